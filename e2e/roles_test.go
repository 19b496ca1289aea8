package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestPrefillAndDecode: a real frontend in direct mode with real prefill and decode workers uses kvepp's choice for
// both legs. Conversations stay with the prefill worker that has their blocks, blocks stay in their zone, and the test
// removes prefill workers.
func TestPrefillAndDecode(t *testing.T) {
	s := start(t, stack.Config{Workers: 4, Prefill: 2, Ranks: 2, Zones: 2, Speedup: 20})
	nothingLeft(t, s)
	id := func(worker string) (id, rank string) { // of "prefill:1f/0", kvepp's name of a discovered instance
		hex, rank, _ := strings.Cut(worker[strings.IndexByte(worker, ':')+1:], "/")
		n, err := strconv.ParseUint(hex, 16, 64)
		if err != nil {
			t.Fatalf("worker %q has no instance id", worker)
		}
		return strconv.FormatUint(n, 10), rank
	}
	zones := map[string]string{}
	for _, w := range s.Workers {
		zones[w.Instance()] = w.Zone
	}
	asked := map[string]any{"nvext": map[string]any{"extra_fields": []string{"worker_id"}}}
	ask := func(messages []stack.Message, stream bool) *stack.Response {
		t.Helper()
		a := chat(t, s.Envoy.URL, messages, stream, asked)
		if !strings.HasPrefix(a.PrefillWorker, "prefill:") || !strings.HasPrefix(a.Worker, "decode:") {
			t.Fatalf("prefilled by %q, decoded by %q", a.PrefillWorker, a.Worker)
		}
		prefill, prefillRank := id(a.PrefillWorker)
		decode, decodeRank := id(a.Worker)
		if prefill != a.UpstreamPrefill || decode != a.UpstreamWorker ||
			a.UpstreamRanks != [2]string{prefillRank, decodeRank} {
			t.Fatalf(
				"kvepp chose %s and %s, Dynamo took %s and %s, ranks %v",
				a.PrefillWorker,
				a.Worker,
				a.UpstreamPrefill,
				a.UpstreamWorker,
				a.UpstreamRanks,
			)
		}
		if from, to := zones[a.UpstreamPrefill], zones[a.UpstreamWorker]; from != to || from == "" {
			t.Fatalf("blocks went from zone %q to %q", from, to)
		}
		return a
	}
	prefillers, decoders := map[string]bool{}, map[string]bool{}
	// Ties between equal workers are broken at random.
	for i := 0; i < 8 || len(prefillers) < 4 || len(decoders) < 4; i++ {
		if i == 100 {
			t.Fatalf("only %v and %v were used", prefillers, decoders)
		}
		stream := i%2 == 0
		messages := conversation(fmt.Sprint(t.Name(), i), 1)
		first := ask(messages, stream)
		messages = append(
			messages,
			stack.Message{Role: "assistant", Content: first.Text},
			stack.Message{Role: "user", Content: "Go on."},
		)
		full := first.PromptTokens / stack.BlockSize
		body, err := json.Marshal(map[string]any{"model": stack.Model, "messages": messages})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error { // wait for the events of its prefill worker
			if n := pick(t, s, string(body)).Predicted; n < full*stack.BlockSize {
				return fmt.Errorf("%d tokens of a prompt of %d are known", n, first.PromptTokens)
			}
			return nil
		})
		again := ask(messages, stream)
		if again.PrefillWorker != first.PrefillWorker || again.Reason != "kv" ||
			again.KveppCached < full*stack.BlockSize {
			t.Errorf("conversation %d: prefilled by %s, then by %s, by %s: %d tokens cached of a prompt that was %d",
				i, first.PrefillWorker, again.PrefillWorker, again.Reason, again.KveppCached, first.PromptTokens)
		}
		prefillers[first.PrefillWorker], decoders[first.Worker], decoders[again.Worker] = true, true, true
	}
	before := metric(t, s, `kvepp_selections_total{role="prefill"}`)
	if decoded := metric(t, s, `kvepp_selections_total{role="decode"}`); before < 16 || decoded != before {
		t.Errorf("%v prefill and %v decode workers were chosen", before, decoded)
	}

	// The taints of model cards, which requests may require and a direct frontend ignores.
	required := func(taint string) map[string]any {
		return map[string]any{"nvext": map[string]any{"extra_fields": []string{"worker_id"},
			"routing_constraints": map[string]any{"required_taints": []string{taint}}}}
	}
	for _, zone := range []string{"z0", "z1", "z0", "z1"} {
		a := chat(t, s.Envoy.URL, novel(), false, required("dynamo.topology/zone="+zone))
		if zones[a.UpstreamPrefill] != zone || zones[a.UpstreamWorker] != zone {
			t.Errorf(
				"prefilled in zone %q, decoded in %q, want %s",
				zones[a.UpstreamPrefill],
				zones[a.UpstreamWorker],
				zone,
			)
		}
	}
	a, err := stack.Chat(
		t.Context(),
		http.DefaultClient,
		s.Envoy.URL,
		nil,
		novel(),
		false,
		required("dynamo.topology/zone=z2"),
	)
	if err != nil || a.Status != http.StatusServiceUnavailable || !strings.Contains(a.Body, "z2") {
		t.Errorf("an unknown zone: %+v, %v", a, err)
	}

	killed, left := s.Workers[0], s.Workers[1]
	killed.Kill()
	eventually(t, func() error { // until its lease has expired
		if n := metric(t, s, "kvepp_workers"); n != 6 {
			return fmt.Errorf("%v workers", n)
		}
		return nil
	})
	for range 4 {
		if a := ask(novel(), false); a.UpstreamPrefill != left.Instance() {
			t.Errorf("prefilled by %s, want the remaining one, %s", a.UpstreamPrefill, left.Instance())
		}
	}
	left.Stop()
	eventually(t, func() error {
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false, nil)
		switch {
		case err != nil:
			return err
		case a.Status != http.StatusServiceUnavailable || !strings.Contains(a.Body, "no prefill worker is ready"):
			return errors.New(a.Body)
		}
		return nil
	})
	if n := metric(t, s, "kvepp_unpaired_requests_total"); n < 1 {
		t.Errorf("the metric counts %v requests as unpaired", n)
	}
}
