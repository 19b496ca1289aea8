package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// sidecars are servers in place of stock prefill engines and of decode engines with llm-d's routing sidecar. The
// sidecar sends the prompt to the prefill worker that a header names, and then answers.
type sidecars struct {
	t       *testing.T
	prefill []*httptest.Server
	decode  []*httptest.Server

	mu        sync.Mutex
	prefilled map[string][]byte // guarded by mu: by address, the latest body
	alone     int               // guarded by mu: answers without a prefill worker

	events []*publisher // of the decode engines; nil: they send none
}

func newSidecars(t *testing.T) *sidecars {
	s := &sidecars{t: t, prefilled: map[string][]byte{}}
	add := func(to *[]*httptest.Server, handle func(w http.ResponseWriter, r *http.Request, body []byte)) {
		mux := http.NewServeMux() // without the engine metrics that kvepp reads
		mux.HandleFunc("POST /v1/", func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			handle(w, r, body)
		})
		server := httptest.NewServer(mux)
		t.Cleanup(server.Close)
		*to = append(*to, server)
	}
	for range 2 {
		add(&s.prefill, func(_ http.ResponseWriter, r *http.Request, body []byte) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.prefilled[r.Host] = body
		})
		add(&s.decode, s.respond)
	}
	return s
}

// respond is the behaviour of a decode worker's sidecar.
func (s *sidecars) respond(w http.ResponseWriter, r *http.Request, body []byte) {
	named := r.Header.Values("x-prefiller-host-port")
	switch len(named) {
	case 0:
		s.mu.Lock()
		s.alone++
		s.mu.Unlock()
	case 1:
		resp, err := http.Post("http://"+named[0]+r.URL.Path, "application/json", bytes.NewReader(body))
		if err != nil {
			s.t.Errorf("the prefill worker %q: %v", named, err)
			break
		}
		resp.Body.Close()
	default:
		s.t.Errorf("several prefill workers are named: %q", named)
	}
	w.Header().Set("content-type", "application/json")
	fmt.Fprint(w, `{"choices": [{"message": {"role": "assistant", "content": "so"}}]}`)
}

// seen returns the prompts prefilled since the last call, by address, and how many responses in all had no prefill
// worker.
func (s *sidecars) seen() (prefilled map[string][]byte, alone int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	prefilled, s.prefilled = s.prefilled, map[string][]byte{}
	return prefilled, s.alone
}

// endpoints returns the endpoints file.
func (s *sidecars) endpoints(prefill int) string {
	b := "endpoints:\n"
	for i, server := range s.prefill[:prefill] {
		b += fmt.Sprintf(
			"- {name: prefill-%d, role: prefill, address: %q, model: %s, blockSize: 16}\n",
			i,
			server.Listener.Addr(),
			stack.Model,
		)
	}
	for i, server := range s.decode {
		events := ""
		if s.events != nil {
			events = fmt.Sprintf(", kvEvents: %q", s.events[i].address)
		}
		b += fmt.Sprintf(
			"- {name: decode-%d, role: decode, address: %q, model: %s, blockSize: 16%s}\n",
			i,
			server.Listener.Addr(),
			stack.Model,
			events,
		)
	}
	if s.events != nil {
		b = strings.ReplaceAll(b, "blockSize: 16", fmt.Sprintf("blockSize: %d", indexerBlock))
	}
	return b
}

// TestPrefillerHeader: only kvepp tells a stock decode worker's sidecar where to prefill. The same prompt goes to the
// same prefill worker, and without prefill workers decode workers serve alone.
func TestPrefillerHeader(t *testing.T) {
	engines := newSidecars(t)
	var decode []string
	for _, server := range engines.decode {
		decode = append(decode, server.Listener.Addr().String())
	}
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    decode,
			Kill:       true,
			KveppFlags: []string{"--engine=vllm", "--prefiller-header", "--no-router-kv-events"},
		},
	)
	nothingLeft(t, s)
	use := func(prefill int) {
		t.Helper()
		if err := s.ReplaceEndpoints(engines.endpoints(prefill)); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			if n := metric(t, s, "kvepp_workers"); n != float64(prefill+len(decode)) {
				return fmt.Errorf("%v workers", n)
			}
			return nil
		})
	}
	ask := func(messages []stack.Message) (a *stack.Response, prefiller string, alone int) {
		t.Helper()
		a, err := stack.Chat(
			t.Context(),
			http.DefaultClient,
			s.Envoy.URL,
			http.Header{"X-Prefiller-Host-Port": {"127.0.0.1:9"}},
			messages,
			false,
			nil,
		)
		if err != nil || a.Status != http.StatusOK || a.Text != "so" || !strings.HasPrefix(a.Worker, "decode-") {
			t.Fatalf("%v, %+v", err, a)
		}
		prefilled, alone := engines.seen()
		for address, body := range prefilled {
			if prefiller = address; !bytes.Contains(body, []byte(messages[0].Content)) {
				t.Errorf("prefilled was %s", body)
			}
		}
		if named := strings.TrimSuffix(a.PrefillWorker, "/0"); named != "" &&
			engines.prefill[named[len(named)-1]-'0'].Listener.Addr().String() != prefiller {
			t.Errorf("kvepp chose %s, and %q prefilled", named, prefiller)
		}
		return a, prefiller, alone
	}
	use(2)
	prefillers, decoders := map[string]bool{}, map[string]bool{}
	for i := 0; len(prefillers) < 2 || len(decoders) < 2; i++ { // ties are broken at random
		if i == 100 {
			t.Fatalf("only %v and %v were used", prefillers, decoders)
		}
		messages := novel()
		a, first, _ := ask(messages)
		again, second, alone := ask(messages)
		if first == "" || second != first || alone != 0 || again.KveppCached == 0 {
			t.Errorf(
				"prefilled by %q, and again by %q, with %d predicted cached tokens",
				first,
				second,
				again.KveppCached,
			)
		}
		prefillers[first], decoders[a.Worker] = true, true
	}
	use(0)
	if a, prefiller, alone := ask(novel()); prefiller != "" || a.PrefillWorker != "" || alone != 1 {
		t.Errorf("without prefill workers: %q prefilled, kvepp chose %q", prefiller, a.PrefillWorker)
	}
}

// TestConditionalDisaggregation: stock decode engines behind sidecars. One that holds most of a prompt is told no
// prefill worker and computes the rest. Without a prefill worker all do, and that is counted apart.
func TestConditionalDisaggregation(t *testing.T) {
	engines := newSidecars(t)
	var decode []string
	for i, server := range engines.decode {
		decode = append(decode, server.Listener.Addr().String())
		engines.events = append(engines.events, newPublisher(t, uint64(i+1), 0))
	}
	defer runtime.KeepAlive(engines.events) // a socket without references closes
	s := start(t, stack.Config{Workers: -1, Servers: decode, Kill: true, KveppFlags: []string{"--engine=vllm",
		"--prefiller-header", "--router-conditional-disagg"}})
	nothingLeft(t, s)
	if err := s.ReplaceEndpoints(engines.endpoints(2)); err != nil {
		t.Fatal(err)
	}
	for _, p := range engines.events {
		p.subscribed(1)
	}
	outcome := func(name string) float64 {
		return metric(t, s, fmt.Sprintf("kvepp_conditional_total{outcome=%q}", name))
	}
	// ask returns the worker that answered, and whether it was told a prefill worker.
	ask := func(prompt []int) (worker string, pair bool) {
		t.Helper()
		engines.seen()
		body := fmt.Sprintf(`{"model": %q, "prompt": %s}`, stack.Model, strings.Join(strings.Fields(fmt.Sprint(prompt)),
			","))
		resp, err := http.Post(s.Envoy.URL+"/v1/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		prefilled, _ := engines.seen()
		if named := resp.Header.Get("X-Kvepp-Prefill-Worker"); resp.StatusCode != http.StatusOK ||
			(named != "") != (len(prefilled) == 1) {
			t.Fatalf("status %d, kvepp named %q, %d prefill workers were asked", resp.StatusCode, named,
				len(prefilled))
		}
		return resp.Header.Get("X-Kvepp-Worker"), len(prefilled) == 1
	}
	prompt := make([]int, 400)
	for i := range prompt {
		prompt[i] = 1000 + i
	}
	if _, pair := ask(prompt); !pair || outcome("ratio") != 1 {
		t.Errorf("no decode engine holds the prompt: a prefill worker was named %v, %v counted", pair, outcome("ratio"))
	}
	engines.events[1].store(prompt[:320])
	eventually(t, func() error {
		if worker, pair := ask(prompt); pair || worker != "decode-1/0" {
			return fmt.Errorf("%s, with a prefill worker %v", worker, pair)
		}
		return nil
	})
	if outcome("bypassed") != 1 {
		t.Errorf("%v bypasses are counted", outcome("bypassed"))
	}
	if err := s.ReplaceEndpoints(engines.endpoints(0)); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if _, pair := ask([]int{7, 8, 9, 10, 11}); pair || outcome("no_prefill") == 0 {
			return fmt.Errorf("with a prefill worker %v, %v counted", pair, outcome("no_prefill"))
		}
		return nil
	})
}
