package remote

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// returns stands in for kvepp's tokenizer: it returns these ids for every request.
func returns(ids ...kvblock.Token) func(context.Context, *body.Request) ([]prompt.Prompt, error) {
	return func(context.Context, *body.Request) ([]prompt.Prompt, error) {
		return prompt.Certain([][]kvblock.Token{ids}), nil
	}
}

// checked runs a check of n requests on these bodies, until the check ends or has compared the last body.
func checked(
	t *testing.T,
	c *clientOf,
	own func(context.Context, *body.Request) ([]prompt.Prompt, error),
	n int,
	bodies ...string,
) *Check {
	t.Helper()
	check := NewCheck(own, c.Client, n)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { check.Run(ctx); close(done) }()
	compared := func() (n float64) {
		for _, o := range []string{"equal", "differs", "unknown"} {
			n += counted(t, c.metrics, "kvepp_tokenizer_check_requests_total", o)
		}
		return n
	}
	before := compared()
	for i, payload := range bodies {
		check.Offer(completionPath, []byte(payload))
		eventually(t, "compared", func() bool { return compared() >= before+float64(i)+1 || check.wanted.Load() <= 0 })
	}
	if check.wanted.Load() > 0 {
		cancel()
	}
	<-done
	cancel()
	return check
}

func TestCheck(t *testing.T) {
	e := newEngine(t)
	e.response("/v1/completions/render", 200, `[{"token_ids":[1,2,3,4]}]`)
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	if check := checked(t, c, returns(1, 2, 3, 4), 2, completion, completion, completion); check.Differs() {
		t.Error("equal ids differ")
	}
	if n := len(e.wasAsked()); n != 2 {
		t.Errorf("asked %d times for 2 comparisons", n)
	}
	if log := c.log.String(); strings.Count(log, "\n") != 1 || !strings.Contains(log, "requests_compared=2") {
		t.Errorf("log:\n%s", log)
	}

	for _, own := range [][]kvblock.Token{{1, 2, 9, 4}, {1, 2}, {}, {1, 2, 3, 4, 5}} {
		c := newClient(t, e.URL, prompt.VLLM, time.Minute)
		check := checked(t, c, returns(own...), 5, completion, completion)
		if !check.Differs() {
			t.Fatalf("%v: equal", own)
		}
		at := 0
		for at < len(own) && at < 4 && own[at] == kvblock.Token(at+1) {
			at++
		}
		log := c.log.String()
		if strings.Count(log, "level=ERROR") != 1 || !strings.Contains(log, fmt.Sprintf("position=%d ", at)) ||
			!strings.Contains(log, "engine_tokens=4") ||
			!strings.Contains(log, "model=m") ||
			!strings.Contains(log, "--engine") {
			t.Errorf("%v: log:\n%s", own, log)
		}
		check.Offer(completionPath, []byte(completion))
		if len(check.queue) != 0 {
			t.Error("the check continues after it has found a difference")
		}
		if n := counted(t, c.metrics, "kvepp_tokenizer_check_requests_total", "differs"); n != 1 {
			t.Errorf("%v counted", n)
		}
	}
}

// TestCheckOfTime: a difference counts only if a second comparison also finds it.
func TestCheckOfTime(t *testing.T) {
	e := newEngine(t)
	asked := 0
	e.responses["/v1/completions/render"] = func([]byte) (int, string) {
		asked++
		if asked == 1 {
			return 200, `[{"token_ids":[1,2]}]` // yesterday's date
		}
		return 200, `[{"token_ids":[1,3]}]`
	}
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	if check := checked(t, c, returns(1, 3), 1, completion); check.Differs() || check.wanted.Load() != 0 {
		t.Errorf("differs: %v, %d wanted", check.Differs(), check.wanted.Load())
	}
}

// TestCheckKnowsNothing: a request that kvepp or the engine cannot tokenize is neither equal nor different.
func TestCheckKnowsNothing(t *testing.T) {
	e := newEngine(t)
	e.response("/v1/completions/render", 400, badInput)
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	check := checked(t, c, returns(1), 1, completion, completion, `{"model":"m","prompt":[5,6]}`, `{"model":"m"}`)
	if check.Differs() || check.wanted.Load() != 1 || len(e.wasAsked()) != 2 {
		t.Errorf("differs: %v, %d wanted", check.Differs(), check.wanted.Load())
	}
	if log := c.log.String(); strings.Count(log, "could not compare") != 1 || !strings.Contains(log, "HTTP 400") ||
		strings.Contains(log, "maximum context length") {
		t.Errorf("log:\n%s", log)
	}
	check = checked(
		t,
		c,
		func(context.Context, *body.Request) ([]prompt.Prompt, error) { return nil, errors.New("media") },
		1,
		completion,
	)
	if check.Differs() || check.wanted.Load() != 1 || len(e.wasAsked()) != 0 {
		t.Errorf("differs: %v, %d wanted", check.Differs(), check.wanted.Load())
	}
}

// TestOfferNeverWaits offers more requests than the queue holds while no comparison runs.
func TestOfferNeverWaits(t *testing.T) {
	c := newClient(t, "http://127.0.0.1:1", prompt.VLLM, time.Minute)
	check := NewCheck(returns(1), c.Client, 100)
	body := []byte(completion)
	for range 3 * checkQueue {
		check.Offer(completionPath, body)
	}
	check.Offer(completionPath, make([]byte, maxCheckedBody+1))
	if len(check.queue) != checkQueue {
		t.Errorf("%d wait", len(check.queue))
	}
	body[0] = 'x'
	if s := <-check.queue; string(s.body) != completion {
		t.Error("the body was not copied")
	}
	check.Offer(completionPath, make([]byte, maxCheckedBody+1))
	if len(check.queue) != checkQueue-1 {
		t.Error("a body above maxCheckedBody was queued")
	}
	var none *Check
	none.Offer(completionPath, body)
	if none.Differs() {
		t.Error("a nil check reports a difference")
	}
}

func TestDiffer(t *testing.T) {
	a, b := []kvblock.Token{1, 2}, []kvblock.Token{1, 3}
	for _, c := range []struct {
		own, engine [][]kvblock.Token
		prompt, at  int
	}{
		{[][]kvblock.Token{a}, [][]kvblock.Token{a}, -1, -1},
		{[][]kvblock.Token{a, a}, [][]kvblock.Token{a, b}, 1, 1},
		{[][]kvblock.Token{a}, [][]kvblock.Token{a, b}, 1, 0},
		{[][]kvblock.Token{a, {}}, [][]kvblock.Token{a}, 1, 0},
		{nil, nil, -1, -1},
	} {
		d := differ(prompt.Certain(c.own), c.engine)
		if c.prompt < 0 && d != nil || c.prompt >= 0 && (d == nil || d.prompt != c.prompt || d.position != c.at) {
			t.Errorf("%v, %v: %+v", c.own, c.engine, d)
		}
	}
}
