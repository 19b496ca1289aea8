package router

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/router/eject"
	"kvepp/router/ladder"
	"kvepp/scoring"
)

// stockDisaggregated returns p prefill and d decode workers that are stock engines with KV events.
func stockDisaggregated(p, d int) []pool.Endpoint {
	es := disaggregated(p, d)
	for i := range es {
		es[i].KVEvents, es[i].TotalKVBlocks, es[i].MaxNumBatchedTokens = "tcp://10.0.1.1:5557", 100, 20
		es[i].Address = fmt.Sprintf("10.0.3.%d:8000", i+1)
	}
	return es
}

// conditionally makes the router decide by a policy, with thresholds of 20 tokens and half of the prompt.
func conditionally(policy string) func(*Config) {
	return func(c *Config) {
		busy := 2.0
		c.StockPrefill, c.Disaggregation = true, scoring.Disaggregation{On: true, Policy: policy, EffISL: 20,
			EffISLRatio: 0.5, PrefillBusy: &busy}
	}
}

func (h *house) outcomes() string {
	var all []string
	for _, o := range scoring.BypassOutcomes {
		if n := h.counted(fmt.Sprintf("kvepp_conditional_total{outcome=%q}", o)); n > 0 {
			all = append(all, fmt.Sprintf("%s %v", o, n))
		}
	}
	return strings.Join(all, ", ")
}

// TestBypass: a decode worker that holds most of a prompt computes the rest, and is booked with it. Else a pair is
// booked as without the feature, but decode workers that hold blocks are cheaper.
func TestBypass(t *testing.T) {
	h := newHouse(t, stockDisaggregated(2, 2)...)
	conditionally(scoring.ISLBounding)(&h.cfg)
	h.warm("d1", 0, tokens(0, 40), blocksOfFour)
	r := h.route(completion("m", tokens(0, 50)))
	if r.Prefill != nil || r.Name != "d1" || r.Conditional != scoring.Bypassed || r.PredictedCachedTokens != 40 ||
		h.outcomes() != "bypassed 1" {
		t.Errorf("%+v, counted %s", r.Decision, h.outcomes())
	}
	if got, want := h.load("d1"), (scoring.Load{Requests: 1, PrefillTokens: 10, ActiveBlocks: 12,
		ActiveTokens: 48}); got != want {
		t.Errorf("the decode worker has %+v, want %+v", got, want)
	}
	r.MarkPrefillCompleted()
	if got := h.load("d1"); got.PrefillTokens != 0 || got.Requests != 1 {
		t.Errorf("after the first token: %+v", got)
	}
	r.Free()
	for _, c := range []struct {
		n    int
		want scoring.BypassOutcome
	}{{61, scoring.BypassISL}, {60, scoring.BypassISL}, {59, scoring.Bypassed}} {
		if r = h.route(completion("m", tokens(0, c.n))); r.Conditional != c.want || r.Name != "d1" ||
			(r.Prefill == nil) != (c.want == scoring.Bypassed) {
			t.Errorf("%d tokens: %+v", c.n, r.Decision)
		}
		r.Free()
	}
	if r = h.route(completion("m", tokens(500, 12))); r.Conditional != scoring.BypassRatio || r.Prefill == nil {
		t.Errorf("a short new prompt: %+v", r.Decision)
	}
	r.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
	half := 0.12
	h.cfg.Disaggregation.DecodeBusy = &half
	if r = h.route(completion("m", tokens(0, 50))); r.Conditional != scoring.Bypassed {
		t.Errorf("12 of 100 blocks are not above 0.12: %+v", r.Decision)
	}
	if again := h.route(completion("m", tokens(0, 54))); again.Conditional != scoring.DecodeBusy ||
		again.Prefill == nil {
		t.Errorf("13 are: %+v", again.Decision)
	}
	h.cfg.Pinning = true
	pinning := completion("m", tokens(0, 50))
	pinning.Body = append(pinning.Body[:len(pinning.Body)-1], `,"nvext":{"prefill_worker_id":201}}`...)
	pinned := h.route(pinning)
	if pinned.Prefill == nil || pinned.Prefill.Name != "p1" || pinned.Conditional != "" {
		t.Errorf("the request names a prefill worker: %+v", pinned.Decision)
	}
}

// TestJudgedIsBooked: the decode worker that the policy judged is the one that is booked, also if workers are drawn,
// and by the loads by which it was judged.
func TestJudgedIsBooked(t *testing.T) {
	h := newHouse(t, stockDisaggregated(1, 2)...)
	conditionally(scoring.ISLBounding)(&h.cfg)
	h.cfg.Scoring.Temperature = 100
	h.warm("d1", 0, tokens(0, 40), blocksOfFour)
	for range 50 {
		r := h.route(completion("m", tokens(0, 50)))
		if alone := r.Conditional == scoring.Bypassed; alone != (r.Prefill == nil) || alone && r.Name != "d1" ||
			len(r.Costs) != 2 {
			t.Fatalf("%+v", r.Decision)
		}
		r.Free()
	}
	es := stockDisaggregated(1, 2)
	es[1].KVEvents, es[2].KVEvents = "", ""
	h = newHouse(t, es...)
	conditionally(scoring.Never)(&h.cfg)
	judged := ""
	h.log = slog.New(onWorker{slog.DiscardHandler, func(worker string) { // between the judgement and the booking
		s := h.pool.Acquire()
		defer s.Release()
		for i := range s.Workers {
			if w := &s.Workers[i]; w.String() == worker {
				judged = w.Name
				_, err := h.book.AddRequest(scoring.Request{ISLTokens: 400}, scoring.Candidate{Worker: w.Worker},
					&h.cfg.Scoring)
				if err != nil {
					t.Error(err)
				}
			}
		}
	}})
	if r := h.route(completion("m", tokens(0, 50))); r.Prefill != nil || judged == "" || r.Name == judged {
		t.Errorf("a request came to %s after it was judged, and this one went to %s", judged, r.Name)
	}
}

// onWorker is a log that calls a function for each line about a worker.
type onWorker struct {
	slog.Handler
	f func(worker string)
}

func (onWorker) Enabled(context.Context, slog.Level) bool { return true }

func (h onWorker) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "worker" && r.Level == slog.LevelWarn {
			h.f(a.Value.String())
		}
		return true
	})
	return nil
}

// TestBypassIsCounted: cached tokens of a request whose decode worker computes the prompt are in the ladder and in
// Dynamo's metrics.
func TestBypassIsCounted(t *testing.T) {
	h, sample := exportingAs(t, Config{Models: map[string]*prompt.Model{"m": nil}}, stockDisaggregated(1, 2)...)
	conditionally(scoring.ISLBounding)(&h.withLadder().cfg)
	h.warm("d1", 0, tokens(0, 40), blocksOfFour)
	got, lost := h.climbed(completion("m", tokens(0, 50)), 40)
	if want := [ladder.Rungs]uint64{50, 40, 40, 40, 40, 40}; got != want || lost["unpredicted"] != 0 {
		t.Errorf("the ladder has %v, lost %v", got, lost)
	}
	for _, name := range []string{"kv_best_eligible_cached_prefix_tokens_total",
		"kv_selected_cached_prefix_tokens_total"} {
		if got := sample("dynamo_component_router_"+name, "model=m", "phase=aggregated"); got != 40 {
			t.Errorf("%s is %v, want 40", name, got)
		}
	}
	if got := sample("dynamo_component_router_kv_hit_rate"); got != 10./13 {
		t.Errorf("the hit rate is %v, want 10 of 13 blocks", got)
	}
}

// TestBypassByLoad: decode workers compute prompts while the prefill worker that would be chosen is busy.
func TestBypassByLoad(t *testing.T) {
	h := newHouse(t, stockDisaggregated(1, 2)...)
	conditionally(scoring.PrefillLoad)(&h.cfg)
	var routes []*Route
	for i, want := range []scoring.BypassOutcome{scoring.PrefillCalm, scoring.PrefillCalm, scoring.PrefillCalm,
		scoring.Bypassed, scoring.Bypassed} { // 0, 20, 40 and 60 tokens wait; more than two steps are 41
		r := h.route(completion("m", tokens(100*i, 20)))
		if r.Conditional != want {
			t.Errorf("request %d: %+v", i, r.Decision)
		}
		routes = append(routes, r)
	}
	routes[0].MarkPrefillCompleted()
	if r := h.route(completion("m", tokens(900, 20))); r.Conditional != scoring.PrefillCalm {
		t.Errorf("after the first prefill: %+v", r.Decision)
	}
	unknown := stockDisaggregated(1, 2)
	unknown[0].MaxNumBatchedTokens, unknown[1].KVEvents, unknown[2].KVEvents = 0, "", ""
	h.pool.Update(unknown)
	var log logtest.Log
	h.log = slog.New(slog.NewTextHandler(&log, nil))
	defer func() {
		if n := strings.Count(log.String(), "sends no KV events"); n != 1 {
			t.Errorf("%d warnings about a decode worker without events", n)
		}
	}()
	for range 2 {
		if r := h.route(completion("m", tokens(900, 20))); r.Conditional != scoring.PrefillCalm {
			t.Errorf("with an unknown step: %+v", r.Decision)
		}
	}
}

// TestBypassByCost: with the policy cost, a request goes where it takes less time.
func TestBypassByCost(t *testing.T) {
	h := newHouse(t, stockDisaggregated(1, 1)...)
	conditionally(scoring.ByCost)(&h.cfg)
	h.cfg.Scoring.Policy = scoring.Time
	h.book.Prefill.TransferSeconds = 1e-4 // as long as a prefill, until either is learned
	first := h.route(completion("m", tokens(0, 40)))
	if first.Conditional != scoring.Bypassed || first.Prefill != nil {
		t.Errorf("both are idle: %+v", first.Decision)
	}
	// The decode worker has 40 tokens to compute: 20 more take it 6 ms, and a pair 4 ms.
	second := h.route(completion("m", tokens(100, 20)))
	if second.Conditional != scoring.PairCheaper || second.Prefill == nil {
		t.Errorf("the decode worker is busy: %+v", second.Decision)
	}
	if got, want := h.load("p0"), 20; got.PrefillTokens != want {
		t.Errorf("the prefill worker has %+v, want %d tokens", got, want)
	}
	h.warm("d0", 0, tokens(200, 96), blocksOfFour)
	if r := h.route(completion("m", tokens(200, 100))); r.Conditional != scoring.Bypassed {
		t.Errorf("the decode worker holds the prompt: %+v", r.Decision)
	} else {
		r.Free()
	}
	first.Free()
	second.Free()
	if h.book.Len() != 0 {
		t.Errorf("%d booked after the end", h.book.Len())
	}
}

// TestDecodeWorkersAlone: decode workers take requests alone where there is no prefill worker, and where all are
// ejected or cordoned: an ejected one is not tried, as it would be without the feature.
func TestDecodeWorkersAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		es := stockDisaggregated(1, 2)
		h := newCordonHouse(t, conditionally(scoring.ISLBounding), es...)
		ask := func(want scoring.BypassOutcome, prefill bool) *Route {
			t.Helper()
			r := h.route(completion("m", tokens(0, 40)))
			if r.Conditional != want || (r.Prefill != nil) != prefill {
				t.Errorf("want %s: %+v", want, r.Decision)
			}
			return r
		}
		ask(scoring.BypassISL, true).Free()
		h.cordon("p0", eject.Draining)
		ask(scoring.PrefillLost, false).Free()
		h.cordon("p0", "")
		s := h.pool.Acquire()
		for range 3 {
			h.cfg.Eject.Failed(h.cfg.Eject.Of(s.Workers[0].Worker), 0, eject.Refused)
		}
		s.Release()
		ask(scoring.PrefillLost, false).Free()
		h.cfg.Disaggregation.On = false
		ask("", true).Free()
		h.cfg.Disaggregation.On = true
		<-time.After(time.Minute) // the ejection ends with a trial
		h.pool.Update(es[1:])
		ask(scoring.NoPrefill, false).Free()
		if got := h.outcomes(); got != "isl 1, no_prefill 1, prefill_lost 2" {
			t.Errorf("counted %s", got)
		}
		h.pool.Update(append(workers(1), es[1:]...))
		for range 20 { // an aggregated worker is no fallback
			if r := h.route(completion("m", tokens(0, 40))); r.Name == "w0" && r.Conditional != "" ||
				r.Name != "w0" && r.Conditional != scoring.NoPrefill {
				t.Errorf("%+v", r.Decision)
			}
		}
	})
}

// TestBypassInBody: a frontend in KV mode is told the decode worker in the body. The first 500 says that it is in
// direct mode, and from then on each prompt has a prefill worker; one after a good response says nothing.
func TestBypassInBody(t *testing.T) {
	for _, c := range []struct {
		statuses string
		fails    bool
	}{{"500", true}, {"400 200 500", false}, {"503 500", true}} {
		h := newHouse(t, stockDisaggregated(1, 1)...)
		conditionally(scoring.ISLBounding)(&h.cfg)
		h.cfg.StockPrefill, h.cfg.Disaggregation.Via, h.cfg.Frontends = false, scoring.ViaNvext, true
		h.warm("d0", 0, tokens(0, 40), blocksOfFour)
		for _, status := range strings.Fields(c.statuses) {
			r := h.route(completion("m", tokens(0, 50)))
			if want := `"nvext":{"decode_worker_id":300,"dp_rank":0}`; !r.InBody || r.Prefill != nil ||
				!strings.Contains(string(r.Body), want) {
				t.Errorf("%+v, body %.100s", r.Decision, r.Body)
			}
			r.Free()
			r.Ended(Response{Status: status, Complete: true, CachedTokens: -1})
		}
		r := h.route(completion("m", tokens(0, 50)))
		if r.InBody == c.fails || (r.Prefill != nil) != c.fails || (r.Body == nil) != c.fails {
			t.Errorf("after %s: %+v", c.statuses, r.Decision)
		}
		r.Free()
		chat := &Request{Path: "/v1/responses", Body: []byte(`{"model":"m","input":"x"}`)}
		if r := h.route(chat); r.InBody || r.Prefill == nil {
			t.Errorf("an API whose body has no nvext: %+v", r.Decision)
		}
	}
}

// TestFirstTokensAreNoted: a prefill ends when the worker notes the first token.
func TestFirstTokensAreNoted(t *testing.T) {
	es := workers(2)
	es[0].LoadChannels = []pool.EventChannel{{FirstTokens: true}}
	h := newHouse(t, es[:1]...)
	h.cfg.FirstTokens, h.book.Prefill.TokensPerSecond = new(FirstTokens), 0.001
	r := h.route(completion("m", tokens(0, 40)))
	if r.FirstTokenID == "" || h.load("w0").PrefillTokens != 40 {
		t.Fatalf("%+v, load %+v", r.Decision, h.load("w0"))
	}
	h.cfg.FirstTokens.Noted([]byte("another"))
	if got := h.load("w0").PrefillTokens; got != 40 {
		t.Errorf("after a note about another request: %d tokens", got)
	}
	for range 2 {
		h.cfg.FirstTokens.Noted([]byte(r.FirstTokenID))
	}
	if got := h.load("w0"); got.PrefillTokens != 0 || got.Requests != 1 ||
		h.counted("kvepp_first_tokens_noted_total") != 1 {
		t.Errorf("after the note: %+v, %v counted", got, h.counted("kvepp_first_tokens_noted_total"))
	}
	late := h.route(completion("m", tokens(100, 40)))
	if r.estimate == nil || late.estimate != nil {
		t.Error("the prefill ends by estimate before any note was heard, and not after that")
	}
	r.Free()
	late.Free()
	h.cfg.FirstTokens.Noted([]byte(late.FirstTokenID))
	if n := len(h.cfg.FirstTokens.routes); n != 0 || h.book.Len() != 0 {
		t.Errorf("after the end %d requests wait for a note, %d are booked", n, h.book.Len())
	}
	streamed := completion("m", tokens(0, 40))
	streamed.Body = append(streamed.Body[:len(streamed.Body)-1], `,"stream":true}`...)
	r = h.route(streamed)
	if r.FirstTokenID == "" || h.load("w0").PrefillTokens != 40 {
		t.Errorf("streamed: %+v", r.Decision)
	}
	h.cfg.FirstTokens.Noted([]byte(r.FirstTokenID))
	if got := h.load("w0").PrefillTokens; got != 0 {
		t.Errorf("streamed, after the note: %d tokens", got)
	}
	r.ReleasePrefill() // the first piece of a compressed stream, which is not read
	r.Free()
	r = h.route(streamed)
	r.MarkPrefillCompleted()
	h.cfg.FirstTokens.Noted([]byte(r.FirstTokenID)) // the response was faster
	if got := h.load("w0"); got.PrefillTokens != 0 || got.Requests != 1 {
		t.Errorf("streamed, a note after the response began: %+v", got)
	}
	r.Free()
	if n := len(h.cfg.FirstTokens.routes); n != 0 {
		t.Errorf("%d ended requests wait for a note", n)
	}
	named := completion("m", tokens(0, 40))
	named.NamesDynamo = true
	if r := h.route(named); r.FirstTokenID != "" {
		t.Errorf("named by the client: %+v", r.Decision)
	}
	h.pool.Update(es[1:])
	if r := h.route(completion("m", tokens(0, 40))); r.FirstTokenID != "" {
		t.Errorf("a worker that notes nothing: %+v", r.Decision)
	}
}
