package extproc

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/internal/metrics/metricstest"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
)

// running is a routed request whose response has not begun.
func (b *bench) running(t *testing.T, cfg router.Config, body string) *exchange {
	t.Helper()
	cfg.Scoring = scoring.DefaultConfig()
	r := router.New(cfg, b.pool, b.index, b.book, b.metrics, b.log)
	route, err := r.Route(context.Background(), &router.Request{Path: "/v1/chat/completions", Body: []byte(body)})
	if err != nil {
		t.Fatal(err)
	}
	return &exchange{Server: NewServer(Config{}, r, b.metrics, b.log), route: route, began: time.Now()}
}

// load adds up the booked loads of all workers.
func (b *bench) load() (sum scoring.Load) {
	for _, l := range b.book.Loads(nil) {
		sum.Requests += l.Requests
		sum.PrefillTokens += l.PrefillTokens
		sum.ActiveBlocks += l.ActiveBlocks
	}
	return sum
}

const roleEvent = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n"

func contentEvent(text string) string {
	return fmt.Sprintf("data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", text)
}

// The prefill ends with the first content. Headers, comments and a chunk with only the role do not end it.
func TestPrefillEndsWithContent(t *testing.T) {
	const sse = "text/event-stream"
	for _, c := range []struct {
		name, status, contentType, encoding string
		before, after                       string // pieces that do not end it, and one that does
	}{
		{"stream", "200", sse, "", ": ping\n\n" + roleEvent, contentEvent("H")},
		{"stream, a tool's call", "200", sse + "; charset=utf-8", "", roleEvent,
			"data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n"},
		{"stream that cannot be read", "200", sse, "gzip", "", "\x1f"},
		{"one piece", "200", "application/json", "", "", "{"},
		{"an error", "500", "application/json", "", "", "{"},
	} {
		b := newBench(t, Config{})
		x := b.running(t, router.Config{}, chatBody)
		waiting := b.load().PrefillTokens
		x.observe(&effect{Status: c.status, ContentType: c.contentType, ContentEncoding: c.encoding})
		x.observe(&effect{Body: []byte(c.before)})
		if got := b.load().PrefillTokens; waiting == 0 || got != waiting {
			t.Errorf("%s: %d tokens wait before the first content, want %d", c.name, got, waiting)
		}
		for range 2 {
			x.observe(&effect{Body: []byte(c.after)})
			if got := b.load(); got.PrefillTokens != 0 || got.Requests != 1 {
				t.Errorf("%s: %+v after the first content", c.name, got)
			}
		}
		x.end(t.Context())
		if got := b.load(); got != (scoring.Load{}) {
			t.Errorf("%s: %+v at the end", c.name, got)
		}
	}
}

// A compressed response begins with its header. If the worker notes first tokens, the prefill ends with the note, but
// not if another endpoint answered, which notes none.
func TestCompressedPrefillEndsWithNote(t *testing.T) {
	b := newBench(t, Config{})
	noting := benchEndpoints[0]
	noting.LoadChannels = []pool.EventChannel{{FirstTokens: true}}
	b.pool.Update([]pool.Endpoint{noting})
	notes := new(router.FirstTokens)
	for _, c := range []struct {
		name, status string
		heard, other bool
		waits        bool
	}{
		{name: "no note was heard so far", status: "200"},
		{name: "another was heard", status: "200", heard: true, waits: true},
		{name: "an error", status: "500", heard: true},
		{name: "another endpoint answered", status: "200", heard: true, other: true},
	} {
		if c.heard {
			notes.Noted([]byte("another"))
		}
		x := b.running(t, router.Config{FirstTokens: notes}, chatBody)
		if c.other {
			b.pool.Update([]pool.Endpoint{noting, benchEndpoints[1]})
			x.router.Reconcile(x.route, "10.0.0.2:8000", 1)
		}
		waiting := b.load().PrefillTokens
		x.observe(&effect{Status: c.status, ContentType: "text/event-stream", ContentEncoding: "gzip"})
		for range 2 {
			x.observe(&effect{Body: []byte("\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff")})
			if got := b.load().PrefillTokens; got != 0 && !c.waits || got != waiting && c.waits {
				t.Errorf("%s: after a gzip header %d of %d tokens wait", c.name, got, waiting)
			}
		}
		notes.Noted([]byte(x.route.FirstTokenID))
		if got := b.load(); got.PrefillTokens != 0 || got.Requests != 1 {
			t.Errorf("%s: %+v after the note", c.name, got)
		}
		x.observe(&effect{Body: []byte("content")})
		x.end(t.Context())
	}
}

// If the client closes the connection before the first content, no load stays booked.
func TestClientGoneBeforeContent(t *testing.T) {
	b := newBench(t, Config{})
	x := b.running(t, router.Config{}, chatBody)
	x.observe(&effect{Status: "200", ContentType: "text/event-stream"})
	x.end(t.Context())
	if got := b.load(); got != (scoring.Load{}) {
		t.Errorf("%+v is still booked", got)
	}
}

// kvepp books a block each time the response grows past a block's end. Near the expected end of the response, all its
// blocks count for less.
func TestResponseIsCounted(t *testing.T) {
	b := newBench(t, Config{})
	body := `{"model":"m","stream":true,"nvext":{"agent_hints":{"osl":36}},"messages":[{"role":"user","content":"-"}]}`
	isl := len(body) / 4
	x := b.running(t, router.Config{TrackOutput: true}, body)
	prompt := b.load().ActiveBlocks
	x.observe(&effect{Status: "200", ContentType: "text/event-stream"})
	x.observe(&effect{Body: []byte(roleEvent)})
	blocks, held := (isl+15)/16, float64(prompt)
	for tokens := range 80 {
		if n := (isl + tokens + 15) / 16; n > blocks {
			blocks = n
			held = (float64(prompt) + float64(blocks-(isl+15)/16)) * max(1-float64(tokens)/36, 0)
		}
		if got := b.load().ActiveBlocks; got != int(held+0.5) {
			t.Fatalf("after %d tokens of a response: %d blocks, want %v", tokens, got, held)
		}
		x.observe(&effect{Body: []byte(contentEvent("x"))})
	}
	x.end(t.Context())
	if got := b.load(); got != (scoring.Load{}) {
		t.Errorf("%+v is still booked", got)
	}
	// The engine's count of tokens takes precedence over the number of events.
	x = b.running(t, router.Config{TrackOutput: true}, chatBody)
	x.observe(&effect{Status: "200", ContentType: "text/event-stream"})
	before := b.load().ActiveBlocks
	x.observe(
		&effect{
			Body: []byte(
				`data: {"choices":[{"delta":{"content":"x"}}],"usage":{"prompt_tokens":1,"completion_tokens":160}}` +
					"\n\n",
			),
		},
	)
	if got := b.load().ActiveBlocks; got != before+10 {
		t.Errorf("160 tokens are %d blocks", got-before)
	}
	x.end(t.Context())
}

// newStream returns a stream of a streamed chat, with the given mode of response bodies.
func newStream(t *testing.T, response filterv3.ProcessingMode_BodySendMode) *stream {
	t.Helper()
	s := &stream{cfg: &Config{MaxParseBytes: 1 << 20}}
	s.step(
		&extprocv3.ProcessingRequest{
			ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: fullDuplex, ResponseBodyMode: response},
			Request: &extprocv3.ProcessingRequest_RequestHeaders{
				RequestHeaders: &extprocv3.HttpHeaders{Headers: &corev3.HeaderMap{
					Headers: []*corev3.HeaderValue{{Key: ":path", Value: "/v1/chat/completions"}}}},
			},
		},
	)
	s.step(
		&extprocv3.ProcessingRequest{
			Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{EndOfStream: true,
				Body: []byte(`{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}`)}},
		},
	)
	return s
}

// A response in one piece shows the end of its prefill too late. So, once the worker's speed is known, kvepp ends the
// prefill load at the estimated time. For a streamed response it does so only if the proxy does not send response
// bodies.
func TestPrefillOfWholeResponseEndsByEstimate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, Config{})
		b.book.Prefill.TokensPerSecond = 10
		whole := b.running(t, router.Config{}, chatBody)
		tokens := b.load().PrefillTokens
		<-time.After(time.Duration(tokens)*time.Second/10 - 1) // by synctest's clock, at once
		synctest.Wait()
		if got := b.load().PrefillTokens; got != tokens {
			t.Errorf("too early: %d tokens wait, want %d", got, tokens)
		}
		<-time.After(1) // by synctest's clock, at once
		synctest.Wait()
		if got := b.load(); got.PrefillTokens != 0 || got.Requests != 1 {
			t.Errorf("%+v when the prompt should be prefilled", got)
		}
		whole.end(t.Context())

		stream := b.running(
			t,
			router.Config{},
			`{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}`,
		)
		tokens = b.load().PrefillTokens
		<-time.After(time.Hour) // by synctest's clock, at once
		synctest.Wait()
		if got := b.load().PrefillTokens; got != tokens {
			t.Errorf("a stream: %d tokens wait, want %d", got, tokens)
		}
		stream.end(t.Context())

		s := newStream(t, filterv3.ProcessingMode_NONE)
		request := s.request()
		if !request.ResponseUnseen || newStream(t, fullDuplex).request().ResponseUnseen {
			t.Error("the router must know exactly whether the mode has no response bodies")
		}
		unseen, err := b.router.Route(t.Context(), request)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Hour) // by synctest's clock, at once
		synctest.Wait()
		if got := b.load(); got.PrefillTokens != 0 || got.Requests != 1 {
			t.Errorf("a stream without response bodies: %+v", got)
		}
		unseen.Free()

		ended := b.running(t, router.Config{}, chatBody)
		ended.end(t.Context())
		next := b.running(t, router.Config{}, chatBody)
		<-time.After(time.Millisecond) // by synctest's clock, at once
		if got := b.load().PrefillTokens; got != next.route.PromptTokens {
			t.Errorf("the estimate for an ended request removed %d tokens of another request",
				next.route.PromptTokens-got)
		}
		next.end(t.Context())
		if got := b.load(); got != (scoring.Load{}) {
			t.Errorf("%+v is still booked", got)
		}
	})
}

// kvepp learns the speed from streamed responses only. A response in one piece arrives after all tokens are generated.
func TestSpeedIsLearnedFromStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t, Config{})
		response := func(contentType, body string) {
			x := b.running(
				t,
				router.Config{},
				`{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}]}`,
			)
			<-time.After(time.Second) // by synctest's clock, at once
			x.observe(&effect{Status: "200", ContentType: contentType})
			x.observe(&effect{Body: []byte(body)})
			x.end(t.Context())
		}
		known := func() bool {
			x := b.running(t, router.Config{}, chatBody)
			defer x.end(t.Context())
			<-time.After(time.Minute) // by synctest's clock, at once
			synctest.Wait()
			return b.load().PrefillTokens == 0
		}
		for range 100 {
			response("application/json", "{}")
		}
		if known() {
			t.Error("learned from responses in one piece")
		}
		for range 100 { // over two workers
			response("text/event-stream", contentEvent("x"))
		}
		if !known() {
			t.Error("not learned from streams")
		}
	})
}

// Predicted cached tokens are compared with reported ones, for responses that report them.
func TestPredictionsOfReported(t *testing.T) {
	b := newBench(t, Config{})
	for _, usage := range []string{`{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}`,
		`{"prompt_tokens":9}`} {
		x := b.running(t, router.Config{}, chatBody)
		x.route.PredictedCachedTokens = 6
		x.observe(&effect{Status: "200", ContentType: "application/json"})
		x.observe(&effect{Body: []byte(`{"usage":` + usage + `}`)})
		x.end(t.Context())
	}
	now := metricstest.Read(t, b.metrics.Registry)
	for name, want := range map[string]float64{"kvepp_predicted_of_reported_cached_tokens_total": 6,
		"kvepp_reported_cached_tokens_total": 4} {
		if got := now.Of(name).Value(); got != want {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
}
