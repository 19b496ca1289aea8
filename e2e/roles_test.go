package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
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

// TestBypassThroughFrontends: a frontend in KV mode is told the decode worker in the body, and serves on it. One in
// direct mode answers 500 once, and from then on each prompt has a prefill worker.
func TestBypassThroughFrontends(t *testing.T) {
	const never = `{"policy":"never","via":"nvext"}`
	asked := map[string]any{"nvext": map[string]any{"extra_fields": []string{"worker_id"}}}
	t.Run("kv", func(t *testing.T) {
		s := start(t, stack.Config{Workers: 3, Prefill: 1, Speedup: 20, FrontendMode: "kv", FrontendArgs: []string{
			"--router-conditional-disagg", "--router-conditional-disagg-config",
			`{"policy":"prefill_load","prefill_busy_threshold":0}`},
			KveppFlags: []string{"--router-conditional-disagg", "--router-conditional-disagg-config=" + never}})
		nothingLeft(t, s)
		decoders := map[string]bool{}
		for i := 0; i < 8 || len(decoders) < 2; i++ {
			if i == 100 {
				t.Fatalf("only %v were used", decoders)
			}
			a := chat(t, s.Envoy.URL, novel(), i%2 == 0, asked)
			id, _, _ := strings.Cut(a.Worker[strings.IndexByte(a.Worker, ':')+1:], "/")
			if n, err := strconv.ParseUint(id, 16, 64); err != nil || a.PrefillWorker != "" ||
				strconv.FormatUint(n, 10) != a.UpstreamWorker {
				t.Fatalf("kvepp chose %s and %s, the frontend took %s", a.Worker, a.PrefillWorker, a.UpstreamWorker)
			}
			decoders[a.Worker] = true
		}
		if n := metric(t, s, `kvepp_conditional_total{outcome="bypassed"}`); n < 8 {
			t.Errorf("%v bypasses are counted", n)
		}
		// While its prefill worker has prompts waiting, the frontend needs none.
		long := map[string]any{"nvext": asked["nvext"], "max_tokens": 1}
		eventually(t, func() error {
			var alone atomic.Int32
			var all sync.WaitGroup
			for range 8 {
				all.Go(func() {
					messages := novel()
					messages[0].Content += strings.Repeat(" and so on", 1000)
					a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, messages, false, long)
					if err == nil && a.Status == http.StatusOK && a.UpstreamPrefill == "" && a.UpstreamWorker != "" {
						alone.Add(1)
					}
				})
			}
			if all.Wait(); alone.Load() == 0 {
				return errors.New("a prefill worker computed each prompt")
			}
			return nil
		})
	})
	t.Run("direct", func(t *testing.T) {
		s := start(t, stack.Config{Workers: 2, Prefill: 1, Speedup: 20,
			KveppFlags: []string{"--router-conditional-disagg", "--router-conditional-disagg-config=" + never}})
		nothingLeft(t, s)
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false, asked)
		if err != nil || a.Status != http.StatusInternalServerError {
			t.Errorf("the first response: %+v, %v", a, err)
		}
		eventually(t, func() error { // kvepp learns it at the end of the response
			a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false, asked)
			if err == nil && a.Status != http.StatusOK {
				err = errors.New(a.Body)
			}
			return err
		})
		for range 3 {
			if a := chat(t, s.Envoy.URL, novel(), false, asked); a.PrefillWorker == "" || a.UpstreamPrefill == "" {
				t.Errorf("then %s prefilled by %q, %q", a.Worker, a.PrefillWorker, a.UpstreamPrefill)
			}
		}
	})
}

// TestFirstTokensOfWorkers: Dynamo's workers note first tokens, so that the prefill of a response in one piece ends
// long before the response does.
func TestFirstTokensOfWorkers(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Prefill: 1, Speedup: 1})
	nothingLeft(t, s)
	noted := func() float64 { return metric(t, s, "kvepp_first_tokens_noted_total") }
	eventually(t, func() error { // kvepp has to find the workers' channels first
		chat(t, s.Envoy.URL, novel(), false, nil)
		if noted() == 0 {
			return errors.New("no first token was noted")
		}
		return nil
	})
	before := noted()
	done := make(chan *stack.Response, 1)
	go func() {
		a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, novel(), false,
			map[string]any{"max_tokens": 2000, "ignore_eos": true})
		if err != nil {
			t.Error(err)
		}
		done <- a
	}()
	eventually(t, func() error {
		if noted() == before {
			return errors.New("the first token was not noted")
		}
		return nil
	})
	select {
	case a := <-done:
		t.Errorf("the note came after the response: %+v", a)
	default:
	}
	if a := <-done; a.Status != http.StatusOK {
		t.Errorf("%+v", a)
	}
}

// holding is a server before a worker's frontend. It asks the frontend, and passes the response on when the test goes
// on. If it compresses, as engines and proxies do, the header of gzip comes before that, then a piece without content,
// each until the test goes on.
func holding(t *testing.T, compresses bool, goOn <-chan struct{}) (address string, frontend *atomic.Pointer[string]) {
	t.Helper()
	frontend = new(atomic.Pointer[string])
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Method != http.MethodPost {
			http.Error(w, "not asked for here", http.StatusNotFound)
			return
		}
		hold := func() (goes bool) {
			select {
			case <-goOn:
				return true
			case <-r.Context().Done():
				return false
			}
		}
		to := io.Writer(w)
		if compresses {
			w.Header().Set("content-type", "text/event-stream")
			w.Header().Set("content-encoding", "gzip")
			z := gzip.NewWriter(w)
			defer z.Close()
			to = z
			for range 2 {
				if err := errors.Join(z.Flush(), http.NewResponseController(w).Flush()); err != nil {
					t.Error(err)
					return
				}
				if !hold() {
					return
				}
			}
		}
		req, err := http.NewRequestWithContext(r.Context(), r.Method, "http://"+*frontend.Load()+r.URL.Path,
			bytes.NewReader(body))
		if err != nil {
			t.Error(err)
			return
		}
		req.Header = r.Header.Clone()
		req.Header.Del("accept-encoding")
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			return
		}
		defer resp.Body.Close()
		if !hold() {
			return
		}
		w.Header().Set("content-type", resp.Header.Get("content-type"))
		if _, err := io.Copy(to, resp.Body); err != nil || resp.StatusCode != http.StatusOK {
			t.Errorf("the frontend: %d, %v", resp.StatusCode, err)
		}
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://"), frontend
}

// waitingTokens returns the prompt tokens that wait in all workers.
func waitingTokens(t *testing.T, s *stack.Stack) (sum float64) {
	t.Helper()
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for name, v := range m {
		if strings.HasPrefix(name, "dynamo_frontend_worker_active_prefill_tokens{") {
			sum += v
		}
	}
	return sum
}

// TestFirstTokensOfCompressedResponses: kvepp cannot read a compressed response, nor one whose body Envoy does not
// show. Its prefill ends with the worker's note, and not with the header of gzip, whether Envoy or something before the
// frontend compresses.
func TestFirstTokensOfCompressedResponses(t *testing.T) {
	noted := func(t *testing.T, s *stack.Stack, before float64) {
		t.Helper()
		eventually(t, func() error {
			if metric(t, s, "kvepp_first_tokens_noted_total") == before {
				return errors.New("the first token was not noted")
			}
			return nil
		})
	}
	// active waits until this many requests run. A note of an earlier one, whose response is read, may still come: it
	// says nothing about the next one.
	active := func(t *testing.T, s *stack.Stack, want float64) {
		t.Helper()
		eventually(t, func() error {
			if n := metric(t, s, "kvepp_active_requests"); n != want {
				return fmt.Errorf("%v requests run, want %v", n, want)
			}
			return nil
		})
	}
	type answer struct {
		resp *http.Response
		err  error
	}
	ask := func(t *testing.T, s *stack.Stack, tokens int, stream bool) <-chan answer {
		t.Helper()
		body, err := json.Marshal(map[string]any{"model": stack.Model, "messages": novel(), "stream": stream,
			"max_tokens": tokens, "ignore_eos": true})
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), "POST", s.Envoy.URL+"/v1/chat/completions",
			bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("content-type", "application/json")
		req.Header.Set("accept-encoding", "gzip")
		begun := make(chan answer, 1)
		go func() {
			resp, err := http.DefaultClient.Do(req)
			begun <- answer{resp, err}
		}()
		return begun
	}
	// warm asks until a note was heard and kvepp has the worker's events: it has to find both channels first. A worker
	// whose events it finds later joins once more, without its running requests.
	warm := func(t *testing.T, s *stack.Stack) {
		t.Helper()
		eventually(t, func() error {
			a := <-ask(t, s, 1, false)
			if a.err != nil {
				return a.err
			}
			io.Copy(io.Discard, a.resp.Body)
			a.resp.Body.Close()
			if metric(t, s, "kvepp_first_tokens_noted_total") == 0 ||
				metric(t, s, `kvepp_subscriptions{state="connected"}`) != 1 {
				return fmt.Errorf("no first token was noted, or no events; status %d", a.resp.StatusCode)
			}
			return nil
		})
	}
	// begin starts a worker behind a server that holds its responses back.
	begin := func(t *testing.T, compresses bool, edit func(any)) (s *stack.Stack, goOn chan struct{}, notes float64) {
		t.Helper()
		goOn = make(chan struct{})
		address, frontend := holding(t, compresses, goOn)
		s = start(t, stack.Config{Workers: 1, EventPlane: "zmq", EditEnvoy: edit, Servers: []string{address},
			Endpoints: "endpoints:\n- name: worker-0\n  address: " + address + "\n  dynamo: w0/backend/generate\n"})
		nothingLeft(t, s)
		frontend.Store(&s.Workers[0].Address)
		resume := make(chan struct{})
		go func() { // the first requests need not wait
			for {
				select {
				case goOn <- struct{}{}:
				case <-resume:
					return
				}
			}
		}()
		warm(t, s)
		resume <- struct{}{}
		active(t, s, 0)
		return s, goOn, metric(t, s, "kvepp_first_tokens_noted_total")
	}
	read := func(t *testing.T, a answer, encoding string) {
		t.Helper()
		if a.err != nil {
			t.Fatal(a.err)
		}
		defer a.resp.Body.Close()
		if a.resp.StatusCode != http.StatusOK || a.resp.Header.Get("content-encoding") != encoding {
			t.Fatalf("status %d, headers %v", a.resp.StatusCode, a.resp.Header)
		}
		var body io.Reader = a.resp.Body
		if encoding != "" {
			var err error
			if body, err = gzip.NewReader(a.resp.Body); err != nil {
				t.Fatal(err)
			}
		}
		if text, err := io.ReadAll(body); err != nil || !bytes.Contains(text, []byte(`"finish_reason":"length"`)) {
			t.Errorf("%v: %.300q", err, text)
		}
	}
	compress := func(connections map[string]any) {
		const types = "type.googleapis.com/envoy.extensions."
		gzip := map[string]any{"name": "compressor", "typed_config": map[string]any{
			"@type": types + "filters.http.compressor.v3.Compressor",
			"response_direction_config": map[string]any{"common_config": map[string]any{
				"content_type": []string{"application/json", "text/event-stream"}}},
			"compressor_library": map[string]any{"name": "gzip", "typed_config": map[string]any{
				"@type": types + "compression.gzip.compressor.v3.Gzip"}}}}
		filters := connections["http_filters"].([]any)
		connections["http_filters"] = slices.Insert(filters, len(filters)-1, any(gzip))
	}
	keep := func(connections map[string]any) {
		modes := stack.At(connections, "http_filters", 0, "typed_config", "processing_mode").(map[string]any)
		modes["response_body_mode"] = "NONE"
	}
	for name, c := range map[string]struct {
		edit     func(connections map[string]any)
		encoding string
	}{"Envoy compresses": {compress, "gzip"}, "Envoy shows no bodies": {keep, ""}} {
		t.Run(name, func(t *testing.T) {
			s, goOn, notes := begin(t, false, func(config any) {
				c.edit(stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
					"typed_config").(map[string]any))
			})
			for _, stream := range []bool{false, true} {
				unread := metric(t, s, "kvepp_unread_answers_total")
				begun := ask(t, s, 1000, stream)
				active(t, s, 1)
				noted(t, s, notes)
				notes++
				eventually(t, func() error {
					if n := waitingTokens(t, s); n != 0 {
						return fmt.Errorf("stream %v: %v tokens wait after the note", stream, n)
					}
					return nil
				})
				if n := metric(t, s, "kvepp_active_requests"); n != 1 {
					t.Errorf("stream %v: %v requests run before the response", stream, n)
				}
				goOn <- struct{}{}
				read(t, <-begun, c.encoding)
				active(t, s, 0)
				if n := metric(t, s, "kvepp_unread_answers_total") - unread; (n == 1) != (c.encoding != "") {
					t.Errorf("stream %v: %v responses could not be read", stream, n)
				}
			}
		})
	}
	t.Run("a header of gzip comes first", func(t *testing.T) {
		s, goOn, notes := begin(t, true, nil)
		a := <-ask(t, s, 1000, true)
		if a.err != nil {
			t.Fatal(a.err)
		}
		// A piece arrives when kvepp has let it pass. kvepp has then noticed the one before.
		var pieces [20]byte
		for _, piece := range [][]byte{pieces[:15], pieces[15:]} {
			if _, err := io.ReadFull(a.resp.Body, piece); err != nil {
				t.Fatal(err)
			}
			if &piece[0] == &pieces[0] {
				goOn <- struct{}{}
			}
		}
		if n := waitingTokens(t, s); n == 0 {
			t.Error("a header of gzip ended the prefill")
		}
		goOn <- struct{}{}
		noted(t, s, notes)
		eventually(t, func() error {
			if n := waitingTokens(t, s); n != 0 {
				return fmt.Errorf("%v tokens wait after the note", n)
			}
			return nil
		})
		if n := metric(t, s, "kvepp_active_requests"); n != 1 {
			t.Errorf("%v requests run before the response", n)
		}
		goOn <- struct{}{}
		a.resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(pieces[:]), a.resp.Body), a.resp.Body}
		read(t, a, "gzip")
	})
}
