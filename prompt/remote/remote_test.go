package remote

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// engine is a server that answers like the engines and records the requests.
type engine struct {
	*httptest.Server
	responses map[string]func(body []byte) (status int, response string) // by path

	mu    sync.Mutex
	asked []string // path and body
}

func newEngine(t *testing.T) *engine {
	e := &engine{responses: map[string]func([]byte) (int, string){}}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the client closed the connection
		}
		e.mu.Lock()
		e.asked = append(e.asked, r.URL.Path+" "+string(body))
		response := e.responses[r.URL.Path]
		e.mu.Unlock()
		status, text := 404, `{"detail":"Not Found"}`
		if response != nil {
			status, text = response(body)
		}
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		io.WriteString(w, text)
	}))
	t.Cleanup(e.Close)
	return e
}

// response sets the response for a path.
func (e *engine) response(path string, status int, text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.responses[path] = func([]byte) (int, string) { return status, text }
}

// wasAsked returns the requests since the last call.
func (e *engine) wasAsked() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	asked := e.asked
	e.asked = nil
	return asked
}

type clientOf struct {
	*Client
	t       *testing.T
	log     *logtest.Log
	metrics *metrics.Metrics
}

func newClient(t *testing.T, url string, engine prompt.Engine, timeout time.Duration) *clientOf {
	t.Helper()
	c := &clientOf{t: t, log: new(logtest.Log), metrics: metrics.New()}
	var err error
	c.Client, err = New(
		Config{Model: "m", URL: url, Engine: engine, Timeout: timeout},
		c.metrics,
		slog.New(slog.NewTextHandler(c.log, nil)),
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.http.CloseIdleConnections)
	return c
}

// counted returns how often kvepp_tokenizer_url_requests_total has an outcome.
func (c *clientOf) counted(o Outcome) float64 {
	return counted(c.t, c.metrics, "kvepp_tokenizer_url_requests_total", string(o))
}

func counted(t *testing.T, m *metrics.Metrics, name, outcome string) float64 {
	t.Helper()
	return metricstest.Read(t, m.Registry).Of(name, "outcome="+outcome).Value()
}

const (
	chatPath       = "/v1/chat/completions"
	completionPath = "/v1/completions"
)

func (c *clientOf) ask(ctx context.Context, path, payload string) ([][]kvblock.Token, error) {
	c.t.Helper()
	request, err := body.ParseRequest(path, []byte(payload))
	if err != nil {
		c.t.Fatalf("%s: %v", payload, err)
	}
	return c.Tokenize(ctx, request, []byte(payload))
}

// A render endpoint's response for a chat, as vLLM 0.33.0 writes it: GenerateRequest.
const renderedChat = `{"request_id":"chatcmpl-1","token_ids":[151644,8948,198],"features":null,` +
	`"sampling_params":{"n":1,"temperature":0.7},` +
	`"model":"m","reasoning_ended":null,"stream":false,"stream_options":null,"cache_salt":null,"priority":0,` +
	`"kv_transfer_params":null,` +
	`"token_offsets":null,"parse_context":{"tools":null,"tool_choice":"none","chat_template_kwargs":{}}}`

const (
	notFound = `{"error":{"message":"The model ` + "`m`" +
		` does not exist.","type":"NotFoundError","param":"model","code":404}}`
	disabled = `{"error":{"message":"Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to ` +
		`enable them.","type":"PermissionDeniedError","param":null,"code":403}}`
	badInput = `{"error":{"message":"This model's maximum context length is 8 tokens.","type":"BadRequestError",` +
		`"param":"input_tokens","code":400}}`
	tokenize = `{"count":3,"max_model_len":8192,"tokens":[1,2,4000000000],"token_strs":null}`
)

func TestVLLMRenders(t *testing.T) {
	e := newEngine(t)
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	e.response("/v1/chat/completions/render", 200, renderedChat)
	e.response(
		"/v1/completions/render",
		200,
		`[{"request_id":"cmpl-1-0","token_ids":[1,2]},{"request_id":"cmpl-1-1","token_ids":[3]}]`,
	)
	e.response("/v1/responses/render", 200, `{"request_id":"resp_1","token_ids":[7]}`)
	e.response("/v1/messages/render", 200, `{"request_id":"chatcmpl-2","token_ids":[8]}`)
	for _, c2 := range []struct {
		path, body string
		want       [][]kvblock.Token
	}{
		{chatPath, `{"model":"m", "messages":[{"role":"user","content":"hi"}],"reasoning_effort":"low","stream":true}`,
			[][]kvblock.Token{{151644, 8948, 198}}},
		{completionPath, `{"model":"m","prompt":["a","b"],"truncate_prompt_tokens":2}`, [][]kvblock.Token{{1, 2}, {3}}},
		{"/v1/responses", `{"model":"m","input":"hi","previous_response_id":null}`, [][]kvblock.Token{{7}}},
		{"/v1/messages", `{"model":"m","max_tokens":3,"messages":[{"role":"user","content":"hi"}]}`,
			[][]kvblock.Token{{8}}},
	} {
		ids, err := c.ask(t.Context(), c2.path, c2.body)
		if err != nil || !reflect.DeepEqual(ids, c2.want) {
			t.Errorf("%s: %v, %v", c2.path, ids, err)
		}
		if asked := e.wasAsked(); len(asked) != 1 || asked[0] != c2.path+"/render "+c2.body {
			t.Errorf("%s: the body did not go as it came: %q", c2.path, asked)
		}
	}
	if c.counted(OK) != 4 {
		t.Errorf("%v counted", c.counted(OK))
	}
}

// TestVLLMWithoutRender asks /tokenize where that gives the same ids, and declines where not.
func TestVLLMWithoutRender(t *testing.T) {
	e := newEngine(t)
	e.response("/v1/chat/completions/render", 403, disabled)
	e.response("/v1/completions/render", 403, disabled)
	e.response("/v1/messages/render", 403, disabled)
	e.response("/tokenize", 200, tokenize)
	const hi = `"model":"m","messages":[{"role":"user","content":"hi"}]`
	ids := [][]kvblock.Token{{1, 2, 4000000000}}
	for _, c2 := range []struct {
		path, body string
		asked      []string // bodies at /tokenize; nil: an error without a call
	}{
		{chatPath, `{` + hi + `,"tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto",` +
			`"temperature":1,"stream":true,"documents":null}`, []string{"as it came"}},
		{chatPath, `{` + hi + `,"documents":[{"text":"d"}]}`, nil},
		{chatPath, `{` + hi + `,"reasoning_effort":"low"}`, nil},
		{chatPath, `{` + hi + `,"truncate_prompt_tokens":1}`, nil},
		{chatPath, `{` + hi + `,"response_format":{"type":"json_object"}}`, nil},
		{chatPath, `{` + hi + `,"tool_choice":"none"}`, nil},
		{chatPath, `{` + hi + `,"kv_transfer_params":{"prompt_token_ids":[1]}}`, nil},
		{chatPath, `{"model":"m","messages":[{"role":"assistant","content":"","reasoning_content":"hm"}]}`, nil},
		{chatPath, `{"model":"m","messages":[{"role":"assistant","tool_calls":[{"id":"call_123456",` +
			`"function":{"name":"f","arguments":"{}"}}]}]}`, nil},
		{chatPath, `{"model":"m","messages":[{"role":"tool","tool_call_id":"call_123456","content":"1"}]}`, nil},
		{chatPath, `{"model":"m","messages":[{"role":"tool","tool_call_id":"123456789","content":"1"}]}`,
			[]string{"as it came"}},
		{"/v1/messages", `{` + hi + `,"max_tokens":3}`, nil},
		{completionPath, `{"model": "m", "prompt": "a < b", "add_special_tokens": false}`,
			[]string{`{"model":"m","prompt":"a < b","add_special_tokens":false}`}},
		{completionPath, `{"model":"m","prompt":["a"],"truncate_prompt_tokens":2}`, nil},
		{completionPath, `{"model":"m","prompt":"a","suffix":"b"}`, nil},
		{completionPath, `{"model":"m","prompt":[1,2]}`, nil},
		{completionPath, `{"model":"m","prompt":["` + strings.Repeat(`a","`, maxTokenizeCalls) + `a"]}`, nil},
		{chatPath, `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url",` +
			`"image_url":{"url":"x"}}]}]}`, nil},
	} {
		c := newClient(t, e.URL, prompt.VLLM, time.Minute)
		for range 2 { // the second time, the client knows that there is no render endpoint
			got, err := c.ask(t.Context(), c2.path, c2.body)
			if c2.asked == nil {
				if OutcomeOf(err) != Unsupported {
					t.Errorf("%s: %v, %v", c2.body, got, err)
				}
				continue
			}
			if err != nil || !reflect.DeepEqual(got, ids) {
				t.Errorf("%s: %v, %v", c2.body, got, err)
			}
		}
		var asked []string
		renders := 0
		for _, a := range e.wasAsked() {
			if body, ok := strings.CutPrefix(a, "/tokenize "); ok {
				asked = append(asked, body)
			} else {
				renders++
			}
		}
		if renders > 1 {
			t.Errorf("%s: the render endpoint was asked %d times", c2.body, renders)
		}
		for i := range asked {
			if asked[i] == c2.body {
				asked[i] = "as it came"
			}
		}
		if want := append(c2.asked, c2.asked...); !reflect.DeepEqual(asked, want) {
			t.Errorf("%s: asked %q, want %q", c2.body, asked, want)
		}
		// once in kvepp's message, once in the engine's
		if logged := strings.Count(c.log.String(), "--enable-scale-out"); logged > 2 {
			t.Errorf("logged %d times: %s", logged, c.log)
		}
	}
	batch := newClient(t, e.URL, prompt.VLLM, time.Minute)
	if got, err := batch.ask(t.Context(), completionPath, `{"model":"m","prompt":["a","b"]}`); err != nil ||
		len(got) != 2 {
		t.Errorf("a batch: %v, %v", got, err)
	}
}

// TestAnOlderVLLM: an older vLLM has no render endpoints and answers 404, as for any unknown path.
func TestAnOlderVLLM(t *testing.T) {
	e := newEngine(t)
	e.response("/prefix/tokenize", 200, tokenize)
	c := newClient(t, e.URL+"/prefix/", prompt.VLLM, time.Minute)
	for range 2 {
		if _, err := c.ask(t.Context(), completionPath, `{"model":"m","prompt":"a"}`); err != nil {
			t.Fatal(err)
		}
	}
	if asked := e.wasAsked(); len(asked) != 3 {
		t.Errorf("asked: %q", asked)
	}
	// A response about an unknown model does not show that the endpoints are missing.
	other := newEngine(t)
	other.response("/v1/completions/render", 404, notFound)
	other.response("/tokenize", 404, notFound)
	c = newClient(t, other.URL, prompt.VLLM, time.Minute)
	for range 2 {
		if _, err := c.ask(t.Context(), completionPath, `{"model":"m","prompt":"a"}`); OutcomeOf(err) != Failed ||
			!strings.Contains(err.Error(), "does not exist") {
			t.Fatal(err)
		}
	}
	if asked := other.wasAsked(); len(asked) != 4 {
		t.Errorf("asked: %q", asked)
	}
}

func TestSGLang(t *testing.T) {
	const info = `{"model_path":"/m","served_model_name":"m","is_generation":true,"has_image_understanding":%t,` +
		`"has_audio_understanding":false}`
	e := newEngine(t)
	e.response("/model_info", 200, fmt.Sprintf(info, false))
	e.responses["/tokenize"] = func(body []byte) (int, string) {
		if strings.Contains(string(body), `"prompt":[`) {
			return 200, `{"tokens":[[1,2],[3]],"count":[2,1],"max_model_len":131072}`
		}
		return 200, `{"tokens":[5,6],"count":2,"max_model_len":131072}`
	}
	c := newClient(t, e.URL, prompt.SGLang, time.Minute)
	for range 2 {
		ids, err := c.ask(
			t.Context(),
			chatPath,
			`{"model":"m","messages":[{"role":"user","content":"a<b"}],"stream":true,`+
				`"stream_options":{"include_usage":true},"tools":[{"a":1.0}]}`,
		)
		if err != nil || !reflect.DeepEqual(ids, [][]kvblock.Token{{5, 6}}) {
			t.Fatalf("chat: %v, %v", ids, err)
		}
	}
	asked := e.wasAsked()
	if len(asked) != 3 || asked[0] != "/model_info " {
		t.Fatalf("asked: %q", asked)
	}
	var sent any
	if err := json.Unmarshal([]byte(strings.TrimPrefix(asked[1], "/tokenize ")), &sent); err != nil {
		t.Fatal(err)
	}
	if want := map[string]any{"model": "m", "messages": []any{map[string]any{"role": "user", "content": "a<b"}},
		"tools": []any{map[string]any{"a": 1.0}}}; !reflect.DeepEqual(
		sent,
		want,
	) {
		t.Errorf("sent %v", sent)
	}
	if !strings.Contains(asked[1], `"a":1.0`) {
		t.Errorf("a number changed its form: %s", asked[1])
	}
	ids, err := c.ask(t.Context(), completionPath, `{"model":"m","prompt":["a","b"],"add_special_tokens":false}`)
	if err != nil || !reflect.DeepEqual(ids, [][]kvblock.Token{{1, 2}, {3}}) {
		t.Errorf("completions: %v, %v", ids, err)
	}
	if asked := e.wasAsked(); !reflect.DeepEqual(
		asked,
		[]string{`/tokenize {"model":"m","prompt":["a","b"],"add_special_tokens":true}`},
	) {
		t.Errorf("asked: %q", asked)
	}
	for _, body := range []string{
		`{"model":"m","messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"reasoning_effort":"low"}}`,
	} {
		if _, err := c.ask(t.Context(), chatPath, body); OutcomeOf(err) != Unsupported {
			t.Errorf("%s: %v", body, err)
		}
	}
	for _, body := range []string{`{"model":"m","prompt":[[1,2]]}`, `{"model":"m","prompt":"a","suffix":"b"}`} {
		if _, err := c.ask(t.Context(), completionPath, body); OutcomeOf(err) != Unsupported {
			t.Errorf("%s: %v", body, err)
		}
	}
	if _, err := c.ask(t.Context(), "/v1/responses", `{"model":"m","input":"hi"}`); OutcomeOf(err) != Unsupported {
		t.Errorf("responses: %v", err)
	}
	if asked := e.wasAsked(); asked != nil {
		t.Errorf("unnecessary requests: %q", asked)
	}

	e.response("/model_info", 200, fmt.Sprintf(info, true))
	c = newClient(t, e.URL, prompt.SGLang, time.Minute)
	for range 2 {
		if _, err := c.ask(t.Context(), chatPath,
			`{"model":"m","messages":[{"role":"user","content":"a"}]}`); OutcomeOf(
			err,
		) != Unsupported {
			t.Errorf("a model that takes images: %v", err)
		}
	}
	if asked := e.wasAsked(); len(asked) != 1 {
		t.Errorf("asked: %q", asked)
	}
}

// TestBadResponses: a response that cannot be used is an error that quotes it, never ids.
func TestBadResponses(t *testing.T) {
	huge := `[{"token_ids":[` + strings.Repeat("1,", minResponseBytes) + `1]}]`
	for _, c2 := range []struct {
		engine   prompt.Engine
		path     string
		status   int
		response string
		outcome  Outcome
		says     string
	}{
		{prompt.VLLM, "/v1/completions/render", 400, badInput, Refused, "maximum context length"},
		{prompt.VLLM, "/v1/completions/render", 422, `{"detail":[]}`, Refused, "422"},
		{prompt.VLLM, "/v1/completions/render", 500, `{"error":{"message":"boom"}}`, Failed, "boom"},
		{prompt.VLLM, "/v1/completions/render", 502, "<html>" + strings.Repeat("x", 1<<20), Failed, "502"},
		{prompt.VLLM, "/v1/completions/render", 401, `{"error":"Unauthorized"}`, Failed, "Unauthorized"},
		{prompt.VLLM, "/v1/completions/render", 302, ``, Failed, "302"},
		{prompt.VLLM, "/v1/completions/render", 200, huge, Unsupported, "longer than"},
		{prompt.VLLM, "/v1/completions/render", 200, `[]`, Failed, "0 prompts instead of 1"},
		{prompt.VLLM, "/v1/completions/render", 200, `[{"token_ids":[]}]`, Failed, "no token_ids"},
		{prompt.VLLM, "/v1/completions/render", 200, `[{"token_ids":[1,-1]}]`, Failed, "cannot be read"},
		{prompt.VLLM, "/v1/completions/render", 200, `[{"token_ids":[1.5]}]`, Failed, "cannot be read"},
		{prompt.VLLM, "/v1/completions/render", 200, `[{"token_ids":[4294967296]}]`, Failed, "cannot be read"},
		{prompt.VLLM, "/v1/completions/render", 200, `{"token_ids":[1]}`, Failed, "cannot be read"},
		{prompt.VLLM, "/v1/completions/render", 200, `<html>`, Failed, "cannot be read"},
		{prompt.VLLM, "/tokenize", 200, `{"count":2,"tokens":[1]}`, Failed, "count of 2"},
		{prompt.VLLM, "/tokenize", 200, `{}`, Failed, "0 tokens"},
		// --skip-tokenizer-init
		{prompt.VLLM, "/tokenize", 200, `{"count":0,"max_model_len":8192,"tokens":[],"token_strs":null}`,
			Unsupported, "no ids"},
		{prompt.SGLang, "/tokenize", 200, `{"tokens":[1],"count":1}`, Failed, "cannot be read"},
		{prompt.SGLang, "/tokenize", 200, `{"tokens":[[1],[2]],"count":[1,1]}`, Failed, "2 prompts instead of 1"},
		{prompt.SGLang, "/tokenize", 200, `{"tokens":[[1]],"count":[2]}`, Failed, "count of 2"},
		{prompt.SGLang, "/tokenize", 400,
			`{"object":"error","message":"Invalid prompt","type":"BadRequestError","param":null,"code":400}`, Refused,
			"Invalid prompt"},
	} {
		e := newEngine(t)
		e.response(c2.path, c2.status, c2.response)
		c := newClient(t, e.URL, c2.engine, time.Minute)
		ids, err := c.ask(t.Context(), completionPath, `{"model":"m","prompt":"a"}`)
		if ids != nil || OutcomeOf(err) != c2.outcome || !strings.Contains(err.Error(), c2.says) {
			t.Errorf("%d %.40s: %v, %v", c2.status, c2.response, ids, err)
		}
		if err != nil && len(err.Error()) > 1000 {
			t.Errorf("%d %.40s: an error of %d bytes", c2.status, c2.response, len(err.Error()))
		}
		if c.counted(c2.outcome) != 1 {
			t.Errorf("%d %.40s: not counted", c2.status, c2.response)
		}
	}
}

// TestAPIKey: the key is sent in the form that the engines' servers expect.
func TestAPIKey(t *testing.T) {
	var got []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = append(got, strings.Join(r.Header.Values("Authorization"), ","))
		io.WriteString(w, `[{"token_ids":[1]}]`)
	}))
	defer server.Close()
	c := newClient(t, server.URL, prompt.VLLM, time.Minute)
	for _, key := range []func() string{nil, func() string { return "" }, func() string { return "secret" }} {
		c.cfg.APIKey = key
		if _, err := c.ask(t.Context(), completionPath, completion); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(got, []string{"", "", "Bearer secret"}) {
		t.Errorf("%q", got)
	}
}

// TestBounds: neither a request nor a response exceeds its bound.
func TestBounds(t *testing.T) {
	e := newEngine(t)
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	body := `{"model":"m","prompt":"` + strings.Repeat("a", maxBodyBytes) + `"}`
	if _, err := c.ask(t.Context(), completionPath, body); OutcomeOf(err) != Unsupported {
		t.Error(err)
	}
	if asked := e.wasAsked(); asked != nil {
		t.Errorf("asked with %d bytes", len(asked[0]))
	}
}

const completion = `{"model":"m","prompt":"a"}`

// TestBreakerGuards opens the breaker by failures, checks that the server gets no requests, and closes it by a probe.
func TestBreakerGuards(t *testing.T) {
	e := newEngine(t)
	e.response("/v1/completions/render", 503, `starting`)
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	for range breakerFailures {
		if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != Failed {
			t.Fatal(err)
		}
	}
	e.wasAsked()
	if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != Open || !c.IsOpen() {
		t.Fatal(err)
	}
	if asked := e.wasAsked(); asked != nil {
		t.Errorf("asked while open: %q", asked)
	}
	e.response("/v1/completions/render", 200, `[{"token_ids":[1]}]`)
	eventually(t, "it is asked again", func() bool {
		_, err := c.ask(t.Context(), completionPath, completion)
		if err != nil && OutcomeOf(err) != Open {
			t.Fatal(err)
		}
		return err == nil
	})
	if log := c.log.String(); strings.Count(log, "tokenizer opens") != 1 || strings.Count(log, "answers again") != 1 ||
		!strings.Contains(log, "HTTP 503") ||
		strings.Contains(log, "starting") ||
		!strings.Contains(log, "model=m") {
		t.Errorf("log:\n%s", log)
	}
	if c.IsOpen() || c.counted(Open) < 1 || c.counted(Failed) != breakerFailures || c.counted(OK) != 1 {
		t.Error("not counted")
	}
	// Failures that a client can cause do not open it.
	for outcome, status := range map[Outcome]int{Refused: 400, Failed: 500} {
		e.response("/v1/completions/render", status, badInput)
		for range 3 * breakerFailures {
			if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != outcome {
				t.Fatal(err)
			}
		}
	}
}

// stuck is a server that never answers and counts the waiting requests.
func stuck(t *testing.T) (url string, waiting *atomic.Int32) {
	waiting = new(atomic.Int32)
	over := make(chan struct{})
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		waiting.Add(1)
		defer waiting.Add(-1)
		select {
		case <-r.Context().Done():
		case <-over:
		}
	}))
	t.Cleanup(s.Close)
	t.Cleanup(func() { close(over) })
	return s.URL, waiting
}

func TestDeadline(t *testing.T) {
	url, _ := stuck(t)
	c := newClient(t, url, prompt.VLLM, 20*time.Millisecond)
	for range breakerFailures {
		if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != TimedOut {
			t.Fatal(err)
		}
	}
	if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != Open {
		t.Errorf("after %d timeouts: %v", breakerFailures, err)
	}
}

// TestSlowResponse: a call ends at its timeout in the middle of a response.
func TestSlowResponse(t *testing.T) {
	over := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		io.WriteString(w, `[{"token_ids":[1,`)
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
		case <-over:
		}
	}))
	defer server.Close()
	defer close(over)
	c := newClient(t, server.URL, prompt.VLLM, 50*time.Millisecond)
	if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != TimedOut {
		t.Error(err)
	}
}

// TestNoServer connects to a port without a server.
func TestNoServer(t *testing.T) {
	e := newEngine(t)
	e.Close()
	c := newClient(t, e.URL, prompt.VLLM, time.Minute)
	if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != Failed {
		t.Error(err)
	}
}

// TestServerClosesIdleConnection closes a connection while the next request is sent: the client repeats the request
// over another connection.
func TestServerClosesIdleConnection(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			read := bufio.NewReader(conn)
			if r, err := http.ReadRequest(read); err == nil {
				io.Copy(io.Discard, r.Body)
				io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 19\r\n\r\n"+`[{"token_ids":[1]}]`)
			}
			read.ReadByte() // of the second request on this connection
			conn.Close()
		}
	}()
	c := newClient(t, "http://"+l.Addr().String(), prompt.VLLM, time.Minute)
	for range 5 {
		if _, err := c.ask(t.Context(), completionPath, completion); err != nil {
			t.Fatal(err)
		}
	}
}

// TestClientGoesAway: if the client closes the connection, the call ends and does not count against the server.
func TestClientGoesAway(t *testing.T) {
	url, waiting := stuck(t)
	c := newClient(t, url, prompt.VLLM, time.Minute)
	for range breakerFailures + 1 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			_, err := c.ask(ctx, completionPath, completion)
			done <- err
		}()
		eventually(t, "the call is there", func() bool { return waiting.Load() == 1 })
		cancel()
		if err := <-done; OutcomeOf(err) != Canceled {
			t.Fatal(err)
		}
		eventually(t, "the server learns it", func() bool { return waiting.Load() == 0 })
	}
	if c.IsOpen() {
		t.Error("the breaker opened")
	}
}

// TestConcurrencyIsBounded: requests beyond Concurrency wait for a free slot.
func TestConcurrencyIsBounded(t *testing.T) {
	var running, most atomic.Int32
	release := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := running.Add(1)
		defer running.Add(-1)
		for was := most.Load(); n > was && !most.CompareAndSwap(was, n); was = most.Load() {
		}
		io.Copy(io.Discard, r.Body)
		<-release
		io.WriteString(w, `[{"token_ids":[1]}]`)
	}))
	defer server.Close()
	c := newClient(t, server.URL, prompt.VLLM, 2*time.Minute)
	const n = Concurrency + 8
	outcomes := make(chan Outcome)
	for range n {
		go func() {
			_, err := c.ask(t.Context(), completionPath, completion)
			outcomes <- OutcomeOf(err)
		}()
	}
	eventually(t, "as many as may are running", func() bool { return running.Load() == Concurrency })
	close(release)
	for range n {
		if o := <-outcomes; o != OK {
			t.Errorf("outcome %s", o)
		}
	}
	if got := most.Load(); got != Concurrency {
		t.Errorf("%d calls at the same time", got)
	}
}

// TestBusy: a request waits for a free slot until its deadline or until the client closes the connection; neither
// counts against the server.
func TestBusy(t *testing.T) {
	c := newClient(t, "http://127.0.0.1:1", prompt.VLLM, 10*time.Millisecond)
	for range Concurrency {
		c.slots <- struct{}{}
	}
	for range breakerFailures + 1 {
		if _, err := c.ask(t.Context(), completionPath, completion); OutcomeOf(err) != Busy {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := c.ask(ctx, completionPath, completion)
	if OutcomeOf(err) != Canceled || !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if c.IsOpen() {
		t.Error("the breaker opened")
	}
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !is(); {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		<-time.After(time.Millisecond)
	}
}

// FuzzResponses looks for panics and for empty ids without an error.
func FuzzResponses(f *testing.F) {
	for _, text := range []string{renderedChat, "[" + renderedChat + "]", tokenize,
		`{"tokens":[[1,2],[3]],"count":[2,1]}`, `{"tokens":[[1,2]],"count":[2]}`, disabled, `[{"token_ids":null}]`,
		`{"count":1e9}`} {
		f.Add(200, []byte(text))
	}
	f.Add(400, []byte(badInput))
	f.Fuzz(func(t *testing.T, status int, text []byte) {
		a := &response{status, text}
		chat, completion := &body.Request{
			API: body.ChatCompletions,
		}, &body.Request{
			API:     body.Completions,
			Prompts: make([]body.Prompt, 1),
		}
		rendered, err1 := vllmRendered(chat, "/", a)
		renderedAll, err2 := vllmRendered(completion, "/", a)
		one, err3 := tokenized(a)
		all, err4 := tokenizedAll(a, 1)
		for _, got := range []struct {
			ids [][]kvblock.Token
			err error
		}{{rendered, err1}, {renderedAll, err2}, {[][]kvblock.Token{one}, err3}, {all, err4}} {
			if got.err == nil && (status != 200 || len(got.ids) != 1 || len(got.ids[0]) == 0) {
				t.Errorf("%d %q: %v", status, text, got.ids)
			}
		}
	})
}

func TestNew(t *testing.T) {
	for _, c := range []Config{
		{URL: "engine:8000", Engine: prompt.VLLM, Timeout: 1},
		{URL: "/tokenize", Engine: prompt.VLLM, Timeout: 1},
		{URL: "http://", Engine: prompt.VLLM, Timeout: 1},
		{URL: "http://a b", Engine: prompt.VLLM, Timeout: 1},
		{URL: "ftp://engine", Engine: prompt.VLLM, Timeout: 1},
		{URL: "http://engine?a=b", Engine: prompt.VLLM, Timeout: 1},
		{URL: "http://user:pass@engine", Engine: prompt.VLLM, Timeout: 1},
		{URL: "http://engine", Engine: prompt.Dynamo, Timeout: 1},
		{URL: "http://engine", Engine: prompt.TRTLLM, Timeout: 1},
		{URL: "http://engine", Engine: prompt.VLLM},
	} {
		if _, err := New(c, metrics.New(), slog.New(slog.DiscardHandler)); err == nil {
			t.Errorf("%+v: no error", c)
		}
	}
}
