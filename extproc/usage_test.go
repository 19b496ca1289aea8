package extproc

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics/metricstest"
	"kvepp/router"
)

// What an engine reports and cannot be true is counted and ignored, in the form of every API: no tokens are booked for
// it, and no cached tokens are added up. What may be true counts.
func TestImpossibleUsageIsIgnored(t *testing.T) {
	const limited = `{"model":"m","stream":true,"max_tokens":50,"n":2,"messages":[{"role":"user","content":"-"}]}`
	chat := `data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":%s,"completion_tokens":%s,` +
		`"prompt_tokens_details":{"cached_tokens":%s}}}` + "\n\n"
	responses := `data: {"type":"response.completed","response":{"usage":{"input_tokens":%s,"output_tokens":%s,` +
		`"input_tokens_details":{"cached_tokens":%s}}}}` + "\n\n"
	whole := `{"usage":{"prompt_tokens":%s,"completion_tokens":%s,"prompt_tokens_details":{"cached_tokens":%s}}}`
	wholeResponses := `{"usage":{"input_tokens":%s,"output_tokens":%s,"input_tokens_details":{"cached_tokens":%s}}}`
	for _, form := range []string{chat, responses, whole, wholeResponses} {
		contentType := "text/event-stream"
		if strings.HasPrefix(form, "{") {
			contentType = "application/json"
		}
		for _, c := range []struct {
			body                      string
			prompt, completion, cache string
			impossible, blocks        float64 // responses refused; blocks booked for the response
			cached                    float64
		}{
			{chatBody, "100", "160", "64", 0, 10, 64}, // an engine may have reasoned in silence
			{chatBody, "100", "16000000", "64", 1, 0, 0},
			{chatBody, "100", "2147483647", "64", 1, 0, 0},
			{limited, "100", "100", "64", 0, 6, 64},
			{limited, "100", "101", "64", 1, 0, 0},
			{chatBody, "100", "16", "101", 1, 1, 0},
			{chatBody, "16777217", "16", "0", 1, 1, 0},
			{chatBody, "2147483647", "16", "2147483647", 1, 1, 0},
			// Numbers that are none are not read at all.
			{chatBody, "100", "-5", "-1", 0, 0, 0},
			{chatBody, "100", "1e300", "1e300", 0, 0, 0},
			{chatBody, "NaN", "NaN", "NaN", 0, 0, 0},
			{chatBody, "100", "16", "9223372036854775807", 1, 1, 0},
			{chatBody, "100", "99999999999999999999", "0", 0, 0, 0},
		} {
			b := newBench(t, Config{})
			x := b.running(t, router.Config{TrackOutput: true}, c.body)
			before := b.load().ActiveBlocks
			x.observe(&effect{Status: "200", ContentType: contentType})
			text := fmt.Sprintf(form, c.prompt, c.completion, c.cache)
			x.observe(&effect{Body: []byte(text)})
			if got := b.load().ActiveBlocks - before; contentType != "application/json" && float64(got) != c.blocks {
				t.Errorf("%s %s: %d blocks, want %v", c.body, text, got, c.blocks)
			}
			x.complete = true
			x.end(t.Context())
			now := metricstest.Read(t, b.metrics.Registry)
			for name, want := range map[string]float64{"kvepp_reported_usage_ignored_total": c.impossible,
				"kvepp_reported_cached_tokens_total": c.cached} {
				if got := now.Of(name).Value(); got != want {
					t.Errorf("%s %s: %s is %v, want %v", c.body, text, name, got, want)
				}
			}
		}
	}
}

// An engine may reason for long without sending the text: the longer a response takes, the more tokens it may have.
func TestUnsentReasoningCounts(t *testing.T) {
	for _, c := range []struct {
		took       time.Duration
		impossible float64
	}{{0, 1}, {time.Second, 1}, {10 * time.Second, 0}} {
		b := newBench(t, Config{})
		x := b.running(t, router.Config{}, chatBody)
		x.began = x.began.Add(-c.took)
		x.observe(&effect{Status: "200", ContentType: "application/json"})
		x.observe(&effect{Body: []byte(`{"usage":{"prompt_tokens":100,"completion_tokens":30000}}`)})
		x.complete = true
		x.end(t.Context())
		got := metricstest.Read(t, b.metrics.Registry).Of("kvepp_reported_usage_ignored_total").Value()
		if got != c.impossible {
			t.Errorf("30,000 tokens after %v: counted %v times as impossible, want %v", c.took, got, c.impossible)
		}
	}
}

// A stream that ends at the request's limit has further events, without a token.
func TestEventsWithoutATokenDoNotCount(t *testing.T) {
	x := newBench(t, Config{}).running(t, router.Config{TrackOutput: true},
		`{"model":"m","stream":true,"max_tokens":3,"messages":[{"role":"user","content":"-"}]}`)
	x.observe(&effect{Status: "200", ContentType: "text/event-stream"})
	for range 3 {
		x.observe(&effect{Body: []byte(contentEvent("x"))})
	}
	x.observe(&effect{Body: []byte(`data: {"choices":[{"delta":{},"finish_reason":"length"}]}` + "\n\n")})
	if got := x.generated(); got != 3 {
		t.Errorf("%d tokens, want 3", got)
	}
	x.end(t.Context())
}
