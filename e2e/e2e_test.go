// Package e2e runs kvepp among the real programs it works with: Envoy in front of it, Dynamo's direct-mode frontends
// and mocker workers behind it, KV events over ZMQ between. `make test` installs the programs.
package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/test/harness/parts"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// main is the stack that most tests share: four workers with a frontend each.
var main *stack.Stack

func TestMain(m *testing.M) {
	os.Exit(parts.Run(withStack{m}, "test", "KVEPP_TOOLS", "KVEPP_IMAGE_ENVOY"))
}

// withStack runs the tests with main.
type withStack struct{ *testing.M }

func (m withStack) Run() int {
	root, err := filepath.Abs("..")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	main, err = stack.Start(
		context.Background(),
		stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS"), Blocks: 16384, Speedup: 20,
			// These change nothing for requests without sessions and pins.
			KveppFlags: []string{"--router-session-affinity-ttl-secs=60", "--allow-client-pinning"}},
	)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer main.Close()
	return m.M.Run()
}

// start starts a stack for one test.
func start(t *testing.T, cfg stack.Config) *stack.Stack {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	cfg.Root, cfg.Tools, cfg.Progress = root, os.Getenv("KVEPP_TOOLS"), t.Logf
	s, err := stack.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// eventually waits until f returns nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := process.Until(ctx, f); err != nil {
		t.Fatal(err)
	}
}

// metric reads one of kvepp's metrics.
func metric(t *testing.T, s *stack.Stack, name string) float64 {
	t.Helper()
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return m[name]
}

// nothingLeft checks at the end of a test that no request is still booked.
func nothingLeft(t *testing.T, s *stack.Stack) {
	t.Helper()
	t.Cleanup(func() {
		eventually(t, func() error {
			m, err := s.Metrics(context.Background())
			if err != nil {
				return err
			}
			if n := m["kvepp_active_requests"]; n != 0 {
				return fmt.Errorf("%v requests are still booked", n)
			}
			return nil
		})
	})
}

// chat sends a chat request, which must succeed.
func chat(t *testing.T, url string, messages []stack.Message, stream bool, extra map[string]any) *stack.Response {
	t.Helper()
	a, err := stack.Chat(t.Context(), http.DefaultClient, url, nil, messages, stream, extra)
	if err != nil {
		t.Fatal(err)
	}
	if a.Status != http.StatusOK || a.PromptTokens < 1 || !a.Finished {
		t.Fatalf("status %d: %.300s", a.Status, a.Body)
	}
	return a
}

// expect returns the cached tokens that an engine reports for a prompt with so many predicted tokens: the engine always
// computes the block of the last token.
func expect(predicted, promptTokens int) int {
	return min(predicted, (promptTokens-1)/stack.BlockSize*stack.BlockSize)
}

// warm sends a request until kvepp's index has all full blocks that the worker made of it.
func warm(t *testing.T, url string, messages []stack.Message, stream bool, extra map[string]any) *stack.Response {
	t.Helper()
	var a *stack.Response
	eventually(t, func() error {
		a = chat(t, url, messages, stream, extra)
		if a.Reason == "no_block_size" {
			return fmt.Errorf("kvepp does not know the block size of %s yet", a.Worker)
		}
		if a.Reason != "kv" && a.Reason != "kv_rendered" || a.KveppPrompt != a.PromptTokens {
			t.Fatalf("reason %s, kvepp counted %d prompt tokens, Dynamo %d", a.Reason, a.KveppPrompt, a.PromptTokens)
		}
		if want := a.PromptTokens / stack.BlockSize * stack.BlockSize; a.KveppCached != want {
			return fmt.Errorf("predicted %d of %d cached tokens", a.KveppCached, want)
		}
		return nil
	})
	if want := expect(a.KveppCached, a.PromptTokens); a.CachedTokens != want {
		t.Errorf(
			"kvepp predicted %d cached tokens of %d, Dynamo reported %d, want %d",
			a.KveppCached,
			a.PromptTokens,
			a.CachedTokens,
			want,
		)
	}
	return a
}

// begun makes this run's prompts new to workers that served an earlier run.
var begun = time.Now().UnixNano()

// conversation is a conversation of the test named by about. The part that differs comes first: prompts with a common
// prefix share blocks, and go to the worker that has them. The assistant's messages are fixed, so that blocks of
// generated tokens, whose events come later, are not in the next prompt.
func conversation(about string, turns int) []stack.Message {
	messages := []stack.Message{
		{Role: "system", Content: fmt.Sprintf("%x %s. ", sha256.Sum256(fmt.Append(nil, about, begun)), about) +
			strings.Repeat(
				"You answer questions about the history of measuring instruments, briefly and with care. ",
				12,
			)},
	}
	for i := range turns {
		if i > 0 {
			messages = append(
				messages,
				stack.Message{
					Role:    "assistant",
					Content: fmt.Sprintf("Answer %d: it was made of brass, and read to a tenth of a degree.", i),
				},
			)
		}
		messages = append(
			messages,
			stack.Message{
				Role: "user",
				Content: fmt.Sprintf(
					"Question %d: what did the instrument number %d look like, and who made it? Ünïcödé: 温度計 🌡️",
					i,
					i,
				),
			},
		)
	}
	return messages
}

var asked atomic.Int64

// novel returns a conversation that no test used before.
func novel() []stack.Message { return conversation(fmt.Sprint("novel ", asked.Add(1)), 1) }

func TestConversationStaysWithItsWorker(t *testing.T) {
	for _, stream := range []bool{false, true} {
		t.Run(fmt.Sprintf("stream=%v", stream), func(t *testing.T) {
			nothingLeft(t, main)
			worker := ""
			for turn := 1; turn <= 5; turn++ {
				allFreed(t, main) // a request that still ends on a worker counts as load there
				messages := conversation(t.Name(), turn)
				// Computing it takes longer than the worker's learned times err on a busy machine.
				messages[0].Content += strings.Repeat("Name its maker, its place, its year and its unit. ", 250)
				a := chat(t, main.Envoy.URL, messages, stream, nil)
				if a.Reason != "kv" || a.KveppPrompt != a.PromptTokens {
					t.Errorf(
						"turn %d: reason %s, kvepp counted %d prompt tokens, Dynamo %d",
						turn,
						a.Reason,
						a.KveppPrompt,
						a.PromptTokens,
					)
				}
				if want := expect(a.KveppCached, a.PromptTokens); a.CachedTokens != want {
					t.Errorf(
						"turn %d: predicted %d, reported %d of %d tokens, want %d",
						turn,
						a.KveppCached,
						a.CachedTokens,
						a.PromptTokens,
						want,
					)
				}
				if turn > 1 && (a.Worker != worker || a.CachedTokens == 0) {
					t.Errorf(
						"turn %d went to %s with %d cached tokens, the turn before to %s",
						turn,
						a.Worker,
						a.CachedTokens,
						worker,
					)
				}
				worker = warm(t, main.Envoy.URL, messages, stream, nil).Worker
			}
		})
	}
}

func TestCompletions(t *testing.T) {
	nothingLeft(t, main)
	text := conversation(t.Name(), 1)[0].Content
	var ids []int
	for i := range 100 {
		ids = append(ids, 300+i)
	}
	for name, prompt := range map[string]any{"text": text, "ids": ids, "list of one": []string{text + "!"}} {
		var a *stack.Response
		eventually(t, func() (err error) {
			a, err = stack.Post(t.Context(), http.DefaultClient, main.Envoy.URL+"/v1/completions", nil,
				map[string]any{"model": stack.Model, "prompt": prompt, "max_tokens": 1})
			if err != nil || a.Status != http.StatusOK || a.Reason != "kv" {
				t.Fatalf("%s: %v: %+v", name, err, a)
			}
			if a.KveppCached != a.PromptTokens/stack.BlockSize*stack.BlockSize {
				return fmt.Errorf("%s: predicted %d of %d tokens", name, a.KveppCached, a.PromptTokens)
			}
			return nil
		})
		if a.KveppPrompt != a.PromptTokens || a.CachedTokens != expect(a.KveppCached, a.PromptTokens) {
			t.Errorf(
				"%s: kvepp %d tokens, %d cached; Dynamo %d, %d",
				name,
				a.KveppPrompt,
				a.KveppCached,
				a.PromptTokens,
				a.CachedTokens,
			)
		}
	}
	// A batch of prompts goes to one worker as a whole.
	a, err := stack.Post(t.Context(), http.DefaultClient, main.Envoy.URL+"/v1/completions", nil,
		map[string]any{"model": stack.Model, "prompt": []string{text, "Another prompt."}, "max_tokens": 1})
	if err != nil || a.Status != http.StatusOK || a.KveppCached == 0 {
		t.Errorf("a batch: %v: %+v", err, a)
	}
}

// TestBodies sends large bodies over both HTTP versions, with streamed and other responses.
func TestBodies(t *testing.T) {
	nothingLeft(t, main)
	h2 := &http.Transport{Protocols: new(http.Protocols)}
	h2.Protocols.SetUnencryptedHTTP2(true)
	defer h2.CloseIdleConnections()
	for version, client := range map[string]*http.Client{"HTTP/1.1": http.DefaultClient, "HTTP/2.0": {Transport: h2}} {
		for _, size := range []int{1 << 10, 300 << 10, 3 << 20} {
			for _, stream := range []bool{false, true} {
				for _, trailers := range []bool{false, true} {
					if trailers && version == "HTTP/1.1" {
						continue // Envoy drops request trailers of HTTP/1.1
					}
					name := fmt.Sprintf("%s %d bytes stream=%v trailers=%v", version, size, stream, trailers)
					body, err := json.Marshal(
						map[string]any{"model": stack.Model, "messages": novel(), "stream": stream,
							"stream_options": map[string]any{"include_usage": true}, "max_tokens": 20},
					)
					if err != nil {
						t.Fatal(err)
					}
					if !stream {
						body = bytes.Replace(body, []byte(`,"stream_options":{"include_usage":true}`), nil, 1)
					}
					// Valid JSON of that size.
					body = append(bytes.Repeat([]byte(" \n"), max(size-len(body)+1, 0)/2), body...)
					req, err := http.NewRequestWithContext(
						t.Context(),
						"POST",
						main.Envoy.URL+"/v1/chat/completions",
						bytes.NewReader(body),
					)
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("content-type", "application/json")
					if trailers {
						req.ContentLength, req.Trailer = -1, http.Header{"X-Checksum": {"0"}}
					}
					a, err := stack.Do(client, req)
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if a.Status != http.StatusOK || a.Reason != "kv" || a.PromptTokens != a.KveppPrompt ||
						a.CompletionTokens != 20 ||
						!a.Finished {
						t.Errorf("%s: status %d, reason %s, %d prompt tokens (kvepp %d), %d generated: %.200s",
							name, a.Status, a.Reason, a.PromptTokens, a.KveppPrompt, a.CompletionTokens, a.Body)
					}
				}
			}
		}
	}
}

// TestLongPrompt sends 300 kB of real text.
func TestLongPrompt(t *testing.T) {
	nothingLeft(t, main)
	var b strings.Builder
	b.WriteString(conversation(t.Name(), 1)[0].Content)
	for i := 0; b.Len() < 300<<10; i++ {
		fmt.Fprintf(
			&b,
			"On day %d the barometer stood at %d millimetres, and the wind had turned by %d degrees. ",
			i,
			700+i%60,
			i%360,
		)
	}
	a := warm(
		t,
		main.Envoy.URL,
		[]stack.Message{{Role: "user", Content: b.String()}},
		true,
		map[string]any{"max_tokens": 1},
	)
	if a.PromptTokens < 50000 {
		t.Errorf("only %d tokens", a.PromptTokens)
	}
}

func TestHeaderOnlyRequest(t *testing.T) {
	nothingLeft(t, main)
	resp, err := http.Get(main.Envoy.URL + "/v1/models")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Header.Get("x-kvepp-reason") != "no_body" {
		t.Errorf("%s %v", resp.Status, resp.Header)
	}
}

// TestClientCannotChoose sends routing headers that name another worker.
func TestClientCannotChoose(t *testing.T) {
	nothingLeft(t, main)
	messages := conversation(t.Name(), 1)
	home := warm(t, main.Envoy.URL, messages, false, nil)
	var other *stack.Worker
	for _, w := range main.Workers {
		if w.Name+"/0" != home.Worker {
			other = w
		}
	}
	id, err := other.InstanceID(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	spoof := http.Header{}
	for _, name := range []string{"x-dynamo-worker-instance-id", "x-worker-instance-id",
		"x-dynamo-prefill-instance-id"} {
		spoof.Set(name, id)
	}
	spoof.Set("x-dynamo-dp-rank", "7")
	spoof.Set("x-gateway-destination-endpoint", other.Address)
	a, err := stack.Chat(t.Context(), http.DefaultClient, main.Envoy.URL, spoof, messages, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if a.Status != http.StatusOK || a.Worker != home.Worker || a.CachedTokens != home.CachedTokens {
		t.Errorf("with the headers of %s: status %d from %s with %d cached tokens, want %s with %d",
			other.Name, a.Status, a.Worker, a.CachedTokens, home.Worker, home.CachedTokens)
	}
}

func TestErrorsAreOpenAIs(t *testing.T) {
	nothingLeft(t, main)
	for _, c := range []struct {
		name, body string
		status     int
		code       string
	}{
		{"no JSON", `{"model":`, 400, "invalid_json"},
		{"no model", `{"messages":[{"role":"user","content":"x"}]}`, 400, "missing_required_parameter"},
		{"unknown model", `{"model":"unknown","messages":[{"role":"user","content":"x"}]}`, 404, "model_not_found"},
	} {
		resp, err := http.Post(main.Envoy.URL+"/v1/chat/completions", "application/json", strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		var e struct {
			Error struct{ Message, Type, Code string }
		}
		err = json.NewDecoder(resp.Body).Decode(&e)
		resp.Body.Close()
		if err != nil || resp.StatusCode != c.status || e.Error.Code != c.code || e.Error.Message == "" ||
			resp.Header.Get("content-type") != "application/json" {
			t.Errorf("%s: %s, %+v, %v", c.name, resp.Status, e, err)
		}
	}
}

// TestBurst: many requests at once; all succeed, spread over all workers.
func TestBurst(t *testing.T) {
	nothingLeft(t, main)
	var (
		mu    sync.Mutex
		count = map[string]int{}
		wait  sync.WaitGroup
	)
	for i := range 64 {
		wait.Go(func() {
			a, err := stack.Chat(
				t.Context(),
				http.DefaultClient,
				main.Envoy.URL,
				nil,
				[]stack.Message{
					{Role: "user", Content: strings.Repeat(fmt.Sprintf("Request %d of a burst. ", i), 20)},
				},
				i%2 == 0,
				nil,
			)
			if err != nil || a.Status != http.StatusOK || !a.Finished {
				t.Errorf("request %d: %v %+v", i, err, a)
				return
			}
			mu.Lock()
			count[a.Worker]++
			mu.Unlock()
		})
	}
	wait.Wait()
	if len(count) != len(main.Workers) {
		t.Errorf("requests per worker: %v", count)
	}
}

// TestClientGoesAway: when the client closes its connection, its booking ends.
func TestClientGoesAway(t *testing.T) {
	nothingLeft(t, main)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		stack.Chat(ctx, http.DefaultClient, main.Envoy.URL, nil, novel(), true, map[string]any{"max_tokens": 20000})
	}()
	eventually(t, func() error {
		if metric(t, main, "kvepp_active_requests") != 1 {
			return fmt.Errorf("the request is not booked")
		}
		return nil
	})
	cancel()
	<-done // nothingLeft checks the rest
}

func TestEndpointsFileIsFollowed(t *testing.T) {
	nothingLeft(t, main)
	defer func() {
		if err := main.WriteEndpoints(main.Workers...); err != nil {
			t.Error(err)
		}
		if err := main.Settled(context.Background(), len(main.Workers)); err != nil {
			t.Error(err)
		}
	}()
	if err := main.WriteEndpoints(main.Workers[1]); err != nil {
		t.Fatal(err)
	}
	if err := main.Settled(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for range 8 {
		if a := chat(t, main.Envoy.URL, novel(), false, nil); a.Worker != "worker-1/0" {
			t.Errorf("%s was chosen", a.Worker)
		}
	}
	refused := metric(t, main, "kvepp_endpoints_file_refused_total")
	if err := main.ReplaceEndpoints("endpoints:\n- {name: a, adress: '127.0.0.1:1'}\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if metric(t, main, "kvepp_endpoints_file_refused_total") != refused+1 {
			return fmt.Errorf("kvepp has not refused the file with a typing error")
		}
		return nil
	})
	if a := chat(t, main.Envoy.URL, novel(), false, nil); a.Worker != "worker-1/0" {
		t.Errorf("after a bad file %s was chosen", a.Worker)
	}
	if err := main.WriteEndpoints(); err != nil {
		t.Fatal(err)
	}
	if err := main.Settled(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	a, err := stack.Chat(t.Context(), http.DefaultClient, main.Envoy.URL, nil, novel(), false, nil)
	if err != nil || a.Status != http.StatusServiceUnavailable || !strings.Contains(a.Body, "no_endpoints") {
		t.Errorf("without endpoints: %v %+v", err, a)
	}
}

// TestWorkerDiesAndComesBack kills a worker: it gets no requests when its lease has expired, and gets them again after
// its restart.
func TestWorkerDiesAndComesBack(t *testing.T) {
	nothingLeft(t, main)
	victim := main.Workers[2]
	victim.Kill()
	if err := main.Settled(t.Context(), len(main.Workers)-1); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		if a := chat(t, main.Envoy.URL, novel(), false, nil); a.Worker == victim.Name+"/0" {
			t.Fatalf("%s was chosen after its death", a.Worker)
		}
	}
	if err := victim.Restart(); err != nil {
		t.Fatal(err)
	}
	if err := main.Settled(t.Context(), len(main.Workers)); err != nil {
		t.Fatal(err)
	}
	if err := victim.Ready(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Several requests at once: the first one goes to a worker that holds the beginning that all chats share.
	eventually(t, func() error {
		var all sync.WaitGroup
		var chosen atomic.Int32
		for range 2 * len(main.Workers) {
			all.Go(func() {
				a, err := stack.Chat(t.Context(), http.DefaultClient, main.Envoy.URL, nil, novel(), false, nil)
				if err == nil && a.Worker == victim.Name+"/0" {
					chosen.Add(1)
				}
			})
		}
		if all.Wait(); chosen.Load() == 0 {
			return fmt.Errorf("%s was not chosen", victim.Name)
		}
		return nil
	})
	warm(t, main.Envoy.URL, conversation(t.Name(), 2), false, nil)
}
