package e2e

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// timedDecision is a record of /debug/decisions with what the policy time adds.
type timedDecision struct {
	Weights    struct{ Policy string }
	Candidates []struct {
		Name   string
		Chosen bool
		Cost   float64
		Pace   *struct {
			Decoding      int     `json:"decoding_requests"`
			PrefillMS     float64 `json:"prefill_ms_per_1000_tokens"`
			OutputTokens  float64 `json:"answer_tokens"`
			OutputSeconds float64 `json:"answer_seconds"`
		}
	}
}

func timedDecisionOf(t *testing.T, s *stack.Stack, requestID string) timedDecision {
	t.Helper()
	resp, err := http.Get(s.Admin() + "/debug/decisions?n=1&request_id=" + url.QueryEscape(requestID))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var found struct{ Decisions []timedDecision }
	if err := json.NewDecoder(resp.Body).Decode(&found); err != nil || len(found.Decisions) != 1 {
		t.Fatalf("%v: %d decisions of request %s", err, len(found.Decisions), requestID)
	}
	return found.Decisions[0]
}

// TestPolicyTime runs kvepp with --router-policy=time before real frontends and mockers. It learns their speeds from
// streamed responses, prices in milliseconds, keeps a conversation where its blocks are, and prices a request with
// weights of Dynamo's cost in Dynamo's way.
func TestPolicyTime(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, KveppFlags: []string{"--router-policy=time"}})
	nothingLeft(t, s)
	served := map[string]bool{} // workers; the others' speed is not known
	ask := func(messages []stack.Message, extra map[string]any) (*stack.Response, timedDecision) {
		t.Helper()
		a := chat(t, s.Envoy.URL, messages, true, extra)
		served[a.Worker] = true
		return a, timedDecisionOf(t, s, a.Header.Get("x-kvepp-request-id"))
	}
	for turn := range 40 { // prompts of different lengths, so that the slope is known
		text := strings.Repeat(fmt.Sprintf("Prompt %d of many. ", turn), 20+10*turn)
		ask([]stack.Message{{Role: "user", Content: text}}, map[string]any{"max_tokens": 8 + turn%5})
	}
	messages := novel()
	first, d := ask(messages, nil)
	if d.Weights.Policy != "time" || len(d.Candidates) != 2 {
		t.Fatalf("the decision is %+v", d)
	}
	least, chosen := math.Inf(1), math.NaN()
	for _, c := range d.Candidates {
		if c.Pace == nil || c.Pace.PrefillMS == 100 || c.Pace.PrefillMS <= 0 || c.Pace.OutputSeconds <= 0 ||
			c.Pace.OutputTokens == 100 {
			t.Fatalf("nothing was learned: %+v, pace %+v", c, c.Pace)
		}
		if least = min(least, c.Cost); c.Chosen {
			chosen = c.Cost
		}
	}
	if chosen != least || least <= 0 {
		t.Errorf("the chosen worker costs %v ms, the cheapest %v", chosen, least)
	}
	eventually(t, func() error {
		next, d := ask(append(messages, stack.Message{Role: "user", Content: "Go on."}), nil)
		if next.Worker != first.Worker || next.CachedTokens == 0 {
			return fmt.Errorf("the next turn went to %s with %d tokens cached, the first to %s: %+v", next.Worker,
				next.CachedTokens, first.Worker, d.Candidates)
		}
		return nil
	})
	_, d = ask(messages, map[string]any{
		"nvext": map[string]any{"router_config_override": map[string]any{"prefill_load_scale": 2}}})
	if d.Weights.Policy != "dynamo" || d.Candidates[0].Pace != nil {
		t.Errorf("a request with a weight of Dynamo's cost was priced by %+v", d)
	}
	learned := 0
	metrics, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range metrics {
		if strings.HasPrefix(name, "kvepp_worker_prefill_seconds_per_token{") && value > 0 && value != 1e-4 {
			learned++
		}
	}
	if learned != len(served) {
		t.Errorf("kvepp_worker_prefill_seconds_per_token is learned for %d of %d workers", learned, len(served))
	}
}
