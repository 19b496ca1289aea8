package extproc

import (
	"log/slog"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/extproc/extproctest"
	"kvepp/internal/logtest"
	"kvepp/internal/metrics/metricstest"
	"kvepp/router"
)

// observed is a request in observability mode that the endpoint a answers.
func observed() *extproctest.Observed {
	return &extproctest.Observed{Header: chat, Body: [][]byte{[]byte(chatBody[:9]), []byte(chatBody[9:]), nil},
		Response: response("data: 1\n\n", "data: [DONE]\n\n", "")(nil), Address: "10.0.0.1:8000",
		Details: "via_upstream"}
}

// TestShadow: kvepp answers nothing, books the request where it is served, ends the stream with the response, counts
// each request that it cannot judge by one reason, and logs once what to change.
func TestShadow(t *testing.T) {
	for _, c := range []struct {
		reason, advice string
		change         func(o *extproctest.Observed)
	}{
		{"no_tokenizer", "", func(o *extproctest.Observed) {}}, // the request is booked by load
		{router.ShadowNoAddress, "upstream.address", func(o *extproctest.Observed) { o.Address = "" }},
		{router.ShadowUnknown, "10.7.7.7:80", func(o *extproctest.Observed) { o.Address = "10.7.7.7:80" }},
		{router.ShadowUnserved, "", func(o *extproctest.Observed) { // Envoy's own response
			o.Address, o.Details, o.Response.Header = "", "no_healthy_upstream", map[string]string{":status": "503"}
		}},
		{noRequestBody, "request_body_mode: STREAMED", func(o *extproctest.Observed) { o.Body = [][]byte{{}, {}}[:0] }},
		{router.ShadowRefused, "", func(o *extproctest.Observed) { o.Body = [][]byte{[]byte("{"), nil} }},
		{notObserved, "observability_mode: true", func(o *extproctest.Observed) {
			o.Mode = func(m *extprocv3.ProcessingRequest) { m.ObservabilityMode = false }
		}},
	} {
		b := newBench(t, Config{Shadow: true, ShadowShare: 1})
		var log logtest.Log
		b.server.log = slog.New(slog.NewTextHandler(&log, nil))
		for range 2 {
			o := observed()
			c.change(o)
			if err := b.Observe(t.Context(), o, nil); err != nil {
				t.Fatalf("%s: %v", c.reason, err)
			}
		}
		b.counted(t, 2, "kvepp_shadow_requests_total", c.reason)
		if c.advice != "" && log.Count(c.advice) != 1 || c.advice == "" && log.Count("level=WARN") != 0 {
			t.Errorf("%s: the log is\n%s", c.reason, log.String())
		}
		b.idle(t)
		if n := b.server.HeldBytes(); n != 0 {
			t.Errorf("%s: %d bytes are held", c.reason, n)
		}
	}
}

// TestShadowIsBooked: a request counts at its endpoint until its response ends or its client breaks off.
func TestShadowIsBooked(t *testing.T) {
	b := newBench(t, Config{Shadow: true, ShadowShare: 1})
	o := observed()
	if err := b.Observe(t.Context(), o, func() {
		b.counted(t, 1, "kvepp_decisions_total", "no_tokenizer")
		if b.book.Len() != 1 {
			t.Errorf("%d bookings while the response comes, want 1", b.book.Len())
		}
	}); err != nil {
		t.Fatal(err)
	}
	b.idle(t)
	o.Response = extproctest.Response{}
	if err := b.Observe(t.Context(), o, func() { b.counted(t, 2, "kvepp_phase_seconds", "parse") }); err != nil {
		t.Fatal(err)
	}
	b.counted(t, 1, "kvepp_shadow_requests_total", router.ShadowUnserved)
	b.idle(t)
}

// TestShadowComparesItsOwn: what another engine reports is not compared with what kvepp predicts for its own choice.
func TestShadowComparesItsOwn(t *testing.T) {
	b := newBench(t, Config{Shadow: true, ShadowShare: 1})
	for _, address := range []string{"10.7.7.7:80", "", "10.0.0.1:8000"} {
		o := observed()
		o.Response.Body = [][]byte{[]byte(`data: {"usage":{"prompt_tokens":9,"completion_tokens":1,` +
			`"prompt_tokens_details":{"cached_tokens":7}}}` + "\n\n"), []byte("data: [DONE]\n\n"), nil}
		o.Address = address
		if err := b.Observe(t.Context(), o, nil); err != nil {
			t.Fatal(err)
		}
	}
	b.idle(t)
	for name, want := range map[string]float64{"kvepp_reported_cached_tokens_total": 7,
		"kvepp_predicted_of_reported_cached_tokens_total": 0} {
		if got := metricstest.Read(t, b.metrics.Registry).Of(name).Value(); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}

// TestShadowShare: kvepp reads no more than its share of the requests, always the same ones, and books all of them.
func TestShadowShare(t *testing.T) {
	b := newBench(t, Config{Shadow: true})
	if err := b.Observe(t.Context(), observed(), nil); err != nil {
		t.Fatal(err)
	}
	b.counted(t, 1, "kvepp_shadow_requests_total", "not_sampled")
	half := &Config{ShadowShare: 0.5}
	taken := 0
	for i := range 1000 {
		id := string(rune('a'+i%26)) + string(rune('a'+i/26))
		first := half.sampled(id)
		if first {
			taken++
		}
		if again := half.sampled(id); again != first {
			t.Fatal("the same request has two fates")
		}
	}
	if taken < 400 || taken > 600 {
		t.Errorf("%d of 1000 requests", taken)
	}
}

// TestShadowEnds: trailers end a request as well, early hints count it once, and a response whose body is not sent
// counts until the stream ends.
func TestShadowEnds(t *testing.T) {
	b := newBench(t, Config{Shadow: true, ShadowShare: 1})
	trailers := observed()
	trailers.Mode = func(m *extprocv3.ProcessingRequest) {
		if m.GetResponseBody().GetEndOfStream() {
			m.Request = &extprocv3.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocv3.HttpTrailers{}}
		}
	}
	if err := b.Observe(t.Context(), trailers, nil); err != nil {
		t.Fatal(err)
	}
	b.idle(t)

	hints := observed()
	hints.Response.Header[":status"] = "103"
	hints.Mode = func(m *extprocv3.ProcessingRequest) {
		if string(m.GetResponseBody().GetBody()) == "data: 1\n\n" {
			m.Request = &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocv3.HttpHeaders{
				Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":status", RawValue: []byte("200")}}}}}
		}
	}
	if err := b.Observe(t.Context(), hints, nil); err != nil {
		t.Fatal(err)
	}
	b.counted(t, 2, "kvepp_requests_total", "200")

	bodiless := observed()
	bodiless.Response.Body = nil
	bodiless.Mode = func(m *extprocv3.ProcessingRequest) {
		if h := m.GetResponseHeaders(); h != nil {
			h.EndOfStream = false
		}
	}
	if err := b.Observe(t.Context(), bodiless, func() {
		b.counted(t, 3, "kvepp_shadow_requests_total", "no_tokenizer")
		if b.book.Len() != 1 {
			t.Errorf("%d bookings before the stream ends, want 1", b.book.Len())
		}
	}); err != nil {
		t.Fatal(err)
	}
	b.idle(t)
	b.counted(t, 1, "kvepp_shadow_requests_total", noResponseBody)
	b.counted(t, 0, "kvepp_shadow_requests_total", router.ShadowUnserved)
}

// TestShadowCountsOnce: a request that kvepp would have refused while its body came has that one outcome.
func TestShadowCountsOnce(t *testing.T) {
	b := newBench(t, Config{Shadow: true, MaxBodyBytes: 20}) // decided at its headers: it is not sampled
	if err := b.Observe(t.Context(), observed(), nil); err != nil {
		t.Fatal(err)
	}
	b.idle(t)
	b.counted(t, 1, "kvepp_shadow_requests_total", "body_too_large")
	b.counted(t, 0, "kvepp_shadow_requests_total", router.ShadowUnserved)
}

// TestObservedWithoutShadow: kvepp cannot choose for a filter in observability mode, and says what to change.
func TestObservedWithoutShadow(t *testing.T) {
	b := newBench(t, Config{})
	var log logtest.Log
	b.server.log = slog.New(slog.NewTextHandler(&log, nil))
	if err := b.Observe(t.Context(), observed(), nil); err != nil {
		t.Fatal(err)
	}
	b.counted(t, 1, "kvepp_shadow_requests_total", notShadow)
	if log.Count("start kvepp serve with --shadow") != 1 {
		t.Error(log.String())
	}
}
