package vllm

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"

	"kvepp/kvblock"
	"kvepp/test/harness/stack"
)

// Adapters and tenants separate blocks of the same tokens.

// newChat returns a conversation that no other test uses.
func newChat(rng *rand.Rand) []any {
	return []any{map[string]any{"role": "user", "content": text(rng, 150)}}
}

// chat sends a chat to a model, or an adapter of it, with a tenant or salt in its header or body, and waits until
// kvepp's index has its blocks.
func (b *bench) chat(model string, messages []any, header http.Header, with map[string]any, in space) *stack.Response {
	b.t.Helper()
	body := map[string]any{"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
	for key, value := range with {
		body[key] = value
	}
	a, err := stack.Post(b.t.Context(), http.DefaultClient, b.stack.Envoy.URL+"/v1/chat/completions", header, body)
	if err != nil || a.Status != http.StatusOK {
		b.t.Fatalf("%s, %+v: %v, %+v", model, in, err, a)
	}
	b.await(fmt.Sprintf("%s, %+v", model, in), b.ids(body), in)
	return a
}

// predicted checks that kvepp predicted the cached tokens that vLLM reports: with again, all that can be cached, else
// none.
func (b *bench) predicted(what string, a *stack.Response, again bool) {
	b.t.Helper()
	want := 0
	if again {
		want = full(a.PromptTokens)
	}
	if a.Reason != "kv" || a.KveppPrompt != a.PromptTokens || min(a.KveppCached, full(a.PromptTokens)) != want ||
		a.CachedTokens != want {
		b.t.Errorf(
			"%s: by %s, kvepp predicted %d of %d tokens cached, vLLM reports %d of %d, want %d",
			what,
			a.Reason,
			a.KveppCached,
			a.KveppPrompt,
			a.CachedTokens,
			a.PromptTokens,
			want,
		)
	}
}

// testAdapters: a model and its LoRA adapters share no blocks. That holds for an adapter that kvepp has from its
// configuration and for one that it learns from the first event. Each adapter answers with its own output.
func testAdapters(b *bench) {
	rng := rand.New(rand.NewPCG(6, 0))
	messages := newChat(rng)
	var texts []string
	for _, model := range append([]string{stack.Model}, adapters...) {
		in := space{lora: model}
		if model == stack.Model {
			in.lora = ""
		}
		first := b.chat(model, messages, nil, nil, in)
		texts = append(texts, first.Text)
		if model == "legal" { // not in kvepp's configuration
			if first.Reason != "no_tokenizer" || first.CachedTokens != 0 {
				b.t.Errorf(
					"an unknown adapter: by %s, vLLM reports %d tokens cached",
					first.Reason,
					first.CachedTokens,
				)
			}
		} else {
			b.predicted(model, first, false)
		}
		b.predicted(model+" again", b.chat(model, messages, nil, nil, in), true)
	}
	if slices.Sort(texts); len(slices.Compact(texts)) != 1+len(adapters) {
		b.t.Errorf("adapters do not change the model's answers: %q", texts)
	}
	if m, err := b.stack.Metrics(b.t.Context()); err != nil || m["kvepp_lora_adapters"] != float64(len(adapters)) {
		b.t.Errorf("%v, kvepp knows %v adapters, want %d", err, m["kvepp_lora_adapters"], len(adapters))
	}
	var ids []kvblock.Token
	for turn := range 12 { // conversations with all three at once
		messages = append(
			messages,
			map[string]any{"role": "assistant", "content": "…"},
			map[string]any{"role": "user", "content": text(rng, 20)},
		)
		before := full(len(ids))
		ids = b.ids(map[string]any{"model": stack.Model, "messages": messages})
		for _, lora := range []string{"", "sql", "legal"} {
			model := lora
			if lora == "" {
				model = stack.Model
			}
			if a := b.chat(model, messages, nil, nil, space{lora: lora}); turn > 0 && a.CachedTokens < before ||
				a.Reason != "kv" ||
				a.CachedTokens != min(a.KveppCached, full(a.PromptTokens)) {
				b.t.Errorf(
					"%s, turn %d: by %s, predicted %d of %d tokens cached, vLLM reports %d, want at least %d",
					model,
					turn,
					a.Reason,
					a.KveppCached,
					a.PromptTokens,
					a.CachedTokens,
					before,
				)
			}
		}
	}
}

// testTenants: tenants share no blocks with each other or with requests without a tenant, and kvepp predicts each one's
// blocks. kvepp writes the tenant into vLLM's cache salt.
func testTenants(b *bench) {
	b.separate(func(tenant string) (http.Header, map[string]any) {
		return http.Header{"X-Tenant-Id": {tenant}}, nil
	})
	// A salt that contains another tenant's name does not reach its blocks.
	messages := newChat(rand.New(rand.NewPCG(8, 0)))
	b.predicted(
		"acme",
		b.chat(stack.Model, messages, http.Header{"X-Tenant-Id": {"acme"}}, nil, space{salt: "acme"}),
		false,
	)
	b.predicted(
		"globex who says acme",
		b.chat(
			stack.Model,
			messages,
			http.Header{"X-Tenant-Id": {"globex"}},
			map[string]any{"cache_salt": "acme"},
			space{salt: "globex"},
		),
		false,
	)
	marked := "dynamo-cache-salt:acme"
	b.predicted(
		marked,
		b.chat(stack.Model, messages, nil, map[string]any{"cache_salt": marked}, space{salt: marked}),
		false,
	)
	b.predicted(
		marked+" again",
		b.chat(stack.Model, messages, nil, map[string]any{"cache_salt": marked}, space{salt: marked}),
		true,
	)
}

// testSalts is the same with stock vLLM's salts, which clients send and kvepp does not change.
func testSalts(b *bench) {
	b.separate(func(salt string) (http.Header, map[string]any) {
		return nil, map[string]any{"cache_salt": "salt of " + salt}
	})
}

// separate sends the same conversations as several tenants, to the model and to an adapter, which kvepp knows from
// replayed events. say adds a tenant to a request.
func (b *bench) separate(say func(tenant string) (http.Header, map[string]any)) {
	b.t.Helper()
	messages := newChat(rand.New(rand.NewPCG(7, uint64(len(b.t.Name())))))
	for _, lora := range []string{"", "sql"} {
		model := lora
		if lora == "" {
			model = stack.Model
		}
		for _, tenant := range []string{"", "acme", "globex"} {
			var header http.Header
			var with map[string]any
			in := space{lora: lora, salt: tenant}
			if tenant != "" {
				header, with = say(tenant)
				if salt, raw := with["cache_salt"].(string); raw {
					in.salt = salt
				}
			}
			what := fmt.Sprintf("%s of %q", model, tenant)
			b.predicted(what, b.chat(model, messages, header, with, in), false)
			b.predicted(what+" again", b.chat(model, messages, header, with, in), true)
		}
	}
}
