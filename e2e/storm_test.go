package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

var (
	stormRequests = flag.Int("storm", 500, "how many requests TestStorm sends")
	stormSeed     = flag.Uint64("storm-seed", 7, "seed of TestStorm's random requests")
)

// Headers with which clients, servers and Envoy coordinate in a storm.
const (
	stormRequest  = "x-storm"        // number of the request, to the server
	stormResponse = "x-storm-answer" // in the response: it is the server's, not Envoy's or kvepp's
	stormRetry    = "x-storm-retry"  // to Envoy: use the route with a retry
	stormTrailer  = "X-Storm-Sum"    // sha256 of the body before it
)

// stormMemoryLimit is the GOMEMLIMIT of a container that may have crowdMemory.
const stormMemoryLimit = "448MiB"

// stormParseLimit is kvepp's --max-parse-bytes in a storm, so that some bodies are above it.
const stormParseLimit = 1 << 20

// shape describes a random request and its response. A byte offset of -1 means that the event does not happen.
type shape struct {
	number       int
	method, path string
	http2        bool // from the client, and then to the server too
	originalDst  bool // through the Envoy that knows no endpoint
	body         []byte
	piece        int  // most bytes that the client sends at once
	length       bool // the client sends a content-length
	trailer      bool // with both bodies
	expect       bool // the client waits for 100 Continue
	headers      int  // number of further headers
	broken       bool // kvepp must refuse the request
	cutBody      int  // the client closes after so many bytes of its body
	cutResponse  int  // ... of the response

	early          bool // the server answers before it reads
	resetReading   int  // the server breaks off after so many bytes of the body
	resetResponse  int  // ... of the response
	failFirst      bool // the server breaks off the first attempt unread, and Envoy tries again
	status         int
	contentType    string
	gzip           bool
	response       []byte
	responsePiece  int
	responseLength bool
}

func (q *shape) String() string {
	return fmt.Sprintf(
		"-storm-seed %d, number %d: %s %s, HTTP/2 %v, original-dst %v, %d bytes in pieces of %d, length told %v, "+
			"trailer %v, expect %v, "+
			"%d more headers, client away after %d and %d; answer %d early %v, %s gzip %v, %d bytes in pieces of %d, "+
			"length told %v, reset after %d and %d, first attempt fails %v",
		*stormSeed,
		q.number,
		q.method,
		q.path,
		q.http2,
		q.originalDst,
		len(q.body),
		q.piece,
		q.length,
		q.trailer,
		q.expect,
		q.headers,
		q.cutBody,
		q.cutResponse,
		q.status,
		q.early,
		q.contentType,
		q.gzip,
		len(q.response),
		q.responsePiece,
		q.responseLength,
		q.resetReading,
		q.resetResponse,
		q.failFirst,
	)
}

// whole reports that neither side breaks off.
func (q *shape) whole() bool {
	return q.cutBody < 0 && q.cutResponse < 0 && q.resetReading < 0 && q.resetResponse < 0
}

// draw returns the request of that number. The same seed and number always give the same request.
func draw(seed uint64, number int) *shape {
	r := rand.New(rand.NewPCG(seed, uint64(number)))
	one := func(in int) bool { return r.IntN(in) == 0 }
	size := func() int { // random size of a body in bytes, mostly small
		switch n := r.IntN(1000); {
		case n < 40:
			return r.IntN(3)
		case n < 800:
			return r.IntN(4 << 10)
		case n < 960:
			return r.IntN(64 << 10)
		case n < 990:
			return r.IntN(400 << 10)
		default:
			return r.IntN(4 << 20)
		}
	}
	words := func(b []byte, size int) []byte {
		for end := len(b) + size; len(b) < end; {
			b = append(
				b,
				[]string{" the", " measure", " of brass", ` \u00e9`, `\n`, ", Ünïcödé", " 温度計", " {1.50e+3}",
					"x"}[r.IntN(9)]...)
		}
		return b
	}
	random := func(size int) []byte {
		b := make([]byte, size)
		for i := range b {
			b[i] = byte(r.Uint32())
		}
		return b
	}
	q := &shape{
		number:      number,
		method:      "POST",
		http2:       one(2),
		originalDst: one(3),
		length:      one(2),
		trailer:     one(4),
		headers:     r.IntN(3) * r.IntN(28),
		piece: 1 + r.IntN(
			1<<(4+r.IntN(15)),
		),
		cutBody:       -1,
		cutResponse:   -1,
		resetReading:  -1,
		resetResponse: -1,
		status:        200,
	}
	switch n := r.IntN(100); {
	case n < 70:
		q.path = "/v1/chat/completions"
		q.body = fmt.Appendf(
			nil,
			"{ \"x\":1.0e+2,\t\"model\":%q,\"stream\":%v, \"messages\":[{\"role\":\"user\",\"content\":\"",
			stack.Model,
			one(2),
		)
		q.body = append(words(q.body, size()), "\"}],\r\n\"x\" : null}"...)
	case n < 80:
		q.path = "/v1/completions"
		q.body = append(
			words(fmt.Appendf(nil, `{"prompt":"%d`, number), size()),
			fmt.Sprintf(`","model": %q}  `, stack.Model)...)
	case n < 84:
		q.path, q.broken = "/v1/chat/completions", true
		q.body = append([]byte(`{"model":]`), random(r.IntN(300))...)
	case n < 93:
		q.path, q.body = "/v1/files", random(size())
	default:
		q.method, q.path = []string{"GET", "HEAD", "DELETE"}[r.IntN(3)], "/v1/models"
	}
	q.expect = q.method == "POST" && one(20)
	q.piece = max(q.piece, len(q.body)/200) // so that one request does not take all the time
	switch q.contentType = "application/json"; r.IntN(10) {
	case 0:
		q.contentType, q.response = "application/octet-stream", random(size())
	case 1:
		q.response = nil
		q.status = []int{200, 204, 400, 404, 429, 500}[r.IntN(6)]
	case 2, 3, 4, 5, 6:
		q.contentType = "text/event-stream"
		for end := size() + 1; len(q.response) < end; {
			q.response = append(
				words(append(q.response, `data: {"choices":[{"index":0,"delta":{"content":"`...), r.IntN(200)),
				"\"}}]}\n\n"...)
		}
		q.response = append(
			q.response,
			"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n"...)
	default:
		q.response = append(
			words([]byte(`{"choices":[{"text":"`), size()),
			`"}],"usage":{"prompt_tokens":9,"completion_tokens":3}}`...)
	}
	if q.gzip = len(q.response) > 0 && one(8); q.gzip {
		var b bytes.Buffer
		w := gzip.NewWriter(&b)
		w.Write(q.response)
		w.Close()
		q.response = b.Bytes()
	}
	q.responsePiece = max(1+r.IntN(1<<(4+r.IntN(15))), len(q.response)/200)
	q.responseLength = one(2)
	if q.method == "HEAD" || q.status == http.StatusNoContent {
		q.trailer, q.responseLength = false, false
	}
	if q.method != "POST" {
		q.trailer = false
	}
	if q.trailer { // HTTP/1.1 has no trailer after a body with a length
		q.responseLength = false
	}
	if q.broken {
		return q
	}
	switch n := r.IntN(100); {
	case n < 6:
		q.cutBody = r.IntN(len(q.body) + 1)
	case n < 12:
		q.cutResponse = r.IntN(len(q.response) + 1)
	case n < 16:
		q.resetReading = r.IntN(len(q.body) + 1)
	case n < 21:
		q.resetResponse = r.IntN(len(q.response) + 1)
	case n < 24:
		q.early = true
	case n < 29 && len(q.body) < 200<<10:
		q.failFirst, q.trailer = true, false
	}
	if q.method == "HEAD" {
		q.cutResponse, q.resetResponse = min(q.cutResponse, 0), min(q.resetResponse, 0)
	}
	if q.http2 && (q.early || q.resetReading >= 0) {
		// Go's HTTP/2 server treats trailers of a stream that it has ended as a connection error, and so breaks off
		// unrelated requests.
		q.trailer = false
	}
	return q
}

// sent is a running request.
type sent struct {
	*shape
	attempts atomic.Int32
	complete atomic.Int32 // attempts whose whole body the server received
	// The request was running when kvepp got SIGTERM, and must succeed; guarded by storm.mu.
	promised bool
}

// storm is the state that clients and servers share. It is safe for concurrent use.
type storm struct {
	t       *testing.T
	running sync.Map // number as a string -> *sent
	faults  atomic.Int32

	mu      sync.Mutex
	trouble int           // odd while a program is down or not yet known to be up; even otherwise
	ration  int           // how many more requests may begin during this trouble
	calm    chan struct{} // closed at its end
	kept    int           // promised requests that were compared
}

func (s *storm) fault(q *shape, format string, args ...any) {
	if s.faults.Add(1) <= 10 {
		s.t.Errorf("%s\n\t%s", fmt.Sprintf(format, args...), q)
	}
}

// same reads from body up to limit bytes, or to the end if limit is negative, and compares with want. It returns the
// reader's error; io.EOF at the end. The number of bytes is right even if their content differs.
func (s *storm) same(q *shape, what string, body io.Reader, want []byte, limit int) (n int, err error) {
	piece := make([]byte, 32<<10)
	for limit < 0 || n < limit {
		part := piece
		if limit >= 0 {
			part = piece[:min(len(piece), limit-n)]
		}
		m, err := body.Read(part)
		if n+m > len(want) || !bytes.Equal(part[:m], want[n:n+m]) {
			s.fault(q, "%s: bytes %d to %d differ from those sent", what, n, n+m)
			return n, io.ErrUnexpectedEOF
		}
		n += m
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

func sum(body []byte) string { return fmt.Sprintf("%x", sha256.Sum256(body)) }

// ServeHTTP is the server of all endpoints.
func (s *storm) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	v, ok := s.running.Load(r.Header.Get(stormRequest))
	if !ok {
		panic(http.ErrAbortHandler) // its client is gone
	}
	q := v.(*sent)
	attempt := q.attempts.Add(1)
	read := func() {
		n, err := s.same(q.shape, "the request's body", r.Body, q.body, q.resetReading)
		switch {
		case err == nil || q.failFirst && attempt == 1:
			panic(http.ErrAbortHandler)
		case !errors.Is(err, io.EOF):
			panic(http.ErrAbortHandler) // broken off
		case n != len(q.body):
			s.fault(q.shape, "the server saw the body end after %d bytes", n)
		case q.trailer && r.Trailer.Get(stormTrailer) != sum(q.body):
			s.fault(q.shape, "the request's trailer arrived as %q", r.Trailer)
		case q.cutBody >= 0 && q.cutBody < len(q.body):
			s.fault(q.shape, "the server saw the end of a body that the client broke off")
		}
		q.complete.Add(1)
	}
	if !q.early {
		read()
	}
	control := http.NewResponseController(w)
	h := w.Header()
	h.Set("content-type", q.contentType)
	h.Set(stormResponse, strconv.Itoa(q.number))
	if q.gzip {
		h.Set("content-encoding", "gzip")
	}
	if q.responseLength {
		h.Set("content-length", strconv.Itoa(len(q.response)))
	}
	if q.resetResponse == 0 {
		panic(http.ErrAbortHandler)
	}
	w.WriteHeader(q.status)
	if r.Method == "HEAD" || q.status == http.StatusNoContent {
		return
	}
	control.Flush()
	for n := 0; n < len(q.response); {
		end := min(n+q.responsePiece, len(q.response))
		if q.resetResponse >= 0 {
			end = min(end, q.resetResponse)
		}
		if _, err := w.Write(q.response[n:end]); err != nil {
			return
		}
		control.Flush()
		if n = end; n == q.resetResponse {
			panic(http.ErrAbortHandler)
		}
	}
	if q.trailer {
		h.Set(http.TrailerPrefix+stormTrailer, sum(q.response))
	}
	if q.resetResponse >= 0 {
		panic(http.ErrAbortHandler)
	}
}

// pieces reads a body in pieces, and fails where the client must break off.
type pieces struct {
	*shape
	at  int
	cut func()
}

func (p *pieces) Read(b []byte) (int, error) {
	end := len(p.body)
	if p.cutBody >= 0 {
		end = p.cutBody
	}
	n := copy(b[:min(len(b), p.piece)], p.body[p.at:end])
	switch p.at += n; {
	case n > 0:
		return n, nil
	case p.cutBody >= 0:
		p.cut()
		return 0, context.Canceled
	}
	return 0, io.EOF
}

// peace is the state of the programs around a request.
func (s *storm) peace() int {
	s.mu.Lock()
	for s.trouble%2 == 1 && s.ration == 0 {
		calm := s.calm
		s.mu.Unlock()
		<-calm
		s.mu.Lock()
	}
	defer s.mu.Unlock()
	s.ration--
	return s.trouble
}

// disturb runs f while requests may fail. With gently, requests that have reached a server must still succeed.
func (s *storm) disturb(gently bool, f func()) {
	s.mu.Lock()
	s.trouble, s.ration, s.calm = s.trouble+1, 60, make(chan struct{})
	s.running.Range(func(_, v any) bool {
		q := v.(*sent)
		q.promised = gently && q.attempts.Load() > 0
		return true
	})
	s.mu.Unlock()
	f()
	s.mu.Lock()
	s.trouble++
	close(s.calm)
	s.mu.Unlock()
}

// send sends one request and checks everything that comes back. It returns whether the request had to succeed, and was
// compared completely. It is one function, because each check decides whether the next ones apply.
func (s *storm) send(client *http.Client, url string, shaped *shape) (whole bool) {
	q := &sent{shape: shaped}
	before := s.peace()
	key := strconv.Itoa(q.number)
	s.running.Store(key, q)
	defer s.running.Delete(key)
	ctx, cancel := context.WithTimeout(s.t.Context(), time.Minute)
	defer cancel()
	var body io.Reader
	if q.method == "POST" {
		body = &pieces{shape: q.shape, cut: cancel}
	}
	req, err := http.NewRequestWithContext(ctx, q.method, url+q.path, body)
	if err != nil {
		s.fault(q.shape, "%v", err)
		return false
	}
	req.Header.Set(stormRequest, key)
	req.Header.Set("content-type", "application/json")
	req.Header.Set("accept-encoding", "gzip")
	for i := range q.headers {
		req.Header.Set(fmt.Sprintf("x-more-%d", i), strings.Repeat("v", 1+i*17%400))
	}
	if q.expect {
		req.Header.Set("expect", "100-continue")
	}
	if q.failFirst {
		req.Header.Set(stormRetry, "1")
	}
	if q.method == "POST" {
		req.ContentLength = -1
		if q.length && !q.trailer {
			if req.ContentLength = int64(len(q.body)); len(q.body) == 0 {
				req.Body = http.NoBody
			}
		}
		if q.trailer {
			req.Trailer = http.Header{stormTrailer: {sum(q.body)}}
		}
	}
	well := func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		return q.whole() && before%2 == 0 && (before == s.trouble || q.promised && s.trouble <= before+2)
	}
	resp, err := client.Do(req)
	if err != nil {
		if errors.Is(err, context.DeadlineExceeded) {
			s.fault(q.shape, "no response within a minute")
		} else if well() && !q.early {
			s.fault(q.shape, "%v", err)
		}
		return false
	}
	defer resp.Body.Close()
	if resp.Header.Get(stormResponse) == "" { // Envoy's or kvepp's response
		text, err := io.ReadAll(resp.Body)
		switch {
		case q.broken && resp.StatusCode == http.StatusBadRequest:
		case errors.Is(err, context.DeadlineExceeded):
			s.fault(q.shape, "a response of %d that does not end", resp.StatusCode)
		case well():
			s.fault(
				q.shape,
				"after %d attempts answered %d by Envoy or kvepp: %.300s",
				q.attempts.Load(),
				resp.StatusCode,
				text,
			)
		}
		return q.broken
	}
	want := q.response
	if q.method == "HEAD" || q.status == http.StatusNoContent {
		want = nil
	}
	n, err := s.same(q.shape, "the response", resp.Body, want, q.cutResponse)
	switch {
	case err == nil: // the client closes the connection
		return false
	case errors.Is(err, context.DeadlineExceeded):
		s.fault(q.shape, "the response stalls after %d bytes", n)
		return false
	case !errors.Is(err, io.EOF):
		if well() && !q.early {
			s.fault(q.shape, "the response broke off after %d bytes: %v", n, err)
		}
		return false
	}
	switch {
	case resp.Header.Get(stormResponse) != key || resp.StatusCode != q.status ||
		resp.Header.Get("content-type") != q.contentType && q.status != http.StatusNoContent:
		s.fault(q.shape, "another response: %d %v", resp.StatusCode, resp.Header)
	case n != len(want):
		s.fault(q.shape, "the client saw the response end after %d bytes", n)
	case q.resetResponse >= 0 && want != nil && !(q.responseLength && n == q.resetResponse): // complete at its length
		s.fault(q.shape, "the client saw the end of a response that the server broke off")
	case q.trailer && resp.Trailer.Get(stormTrailer) != sum(want):
		s.fault(q.shape, "the response's trailer arrived as %q", resp.Trailer)
	case !well():
		return false
	case q.broken:
		s.fault(q.shape, "a server answered a request that kvepp must refuse")
	case q.attempts.Load() != map[bool]int32{false: 1, true: 2}[q.failFirst]:
		s.fault(q.shape, "%d attempts", q.attempts.Load())
	case !q.early && q.complete.Load() != 1:
		s.fault(q.shape, "%d of %d attempts had the whole body", q.complete.Load(), q.attempts.Load())
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if q.promised {
		s.kept++
	}
	return true
}

// stormServer is an endpoint that can stop and start again.
type stormServer struct {
	address string
	handler http.Handler
	server  *http.Server
}

func (s *stormServer) start(t *testing.T) {
	t.Helper()
	var l net.Listener
	eventually(t, func() (err error) {
		l, err = net.Listen("tcp", s.address)
		return err
	})
	s.address = l.Addr().String()
	s.server = &http.Server{Handler: s.handler, Protocols: new(http.Protocols)}
	s.server.Protocols.SetHTTP1(true)
	s.server.Protocols.SetUnencryptedHTTP2(true)
	go s.server.Serve(l)
}

// startStorm starts kvepp and two Envoys in front of servers of the test. Trailers pass, and HTTP/2 stays HTTP/2.
func startStorm(
	t *testing.T,
	servers int,
	handler http.Handler,
	kveppFlags ...string,
) (s *stack.Stack, envoys []*stack.Envoy, endpoints []*stormServer) {
	t.Helper()
	cfg := stack.Config{Workers: -1, Kill: true, KveppFlags: kveppFlags,
		KveppEnv: []string{"GOMEMLIMIT=" + stormMemoryLimit}, EditEnvoy: func(config any) {
			manager := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0,
				"typed_config").(map[string]any)
			manager["http_protocol_options"] = map[string]any{"enable_trailers": true}
			hosts := stack.At(manager, "route_config", "virtual_hosts", 0).(map[string]any)
			route := maps.Clone(stack.At(hosts, "routes", 0, "route").(map[string]any))
			route["retry_policy"] = map[string]any{"retry_on": "reset", "num_retries": 1}
			hosts["routes"] = append([]any{map[string]any{"route": route, "match": map[string]any{"prefix": "/",
				"headers": []any{
					map[string]any{"name": stormRetry, "present_match": true},
				}}}}, hosts["routes"].([]any)...)
			for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
				if cluster := c.(map[string]any); cluster["name"] == "pool" {
					// Envoy's default is 3 at once.
					stack.At(cluster, "circuit_breakers", "thresholds", 0).(map[string]any)["max_retries"] = 1024
					cluster["typed_extension_protocol_options"] = map[string]any{
						"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": map[string]any{
							"@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
							"use_downstream_protocol_config": map[string]any{
								"http_protocol_options":  map[string]any{"enable_trailers": true},
								"http2_protocol_options": map[string]any{},
							}},
					}
				}
			}
		}}
	for range servers {
		e := &stormServer{address: "127.0.0.1:0", handler: handler}
		e.start(t)
		t.Cleanup(func() { e.server.Close() })
		endpoints, cfg.Servers = append(endpoints, e), append(cfg.Servers, e.address)
	}
	s = start(t, cfg)
	other, err := s.StartEnvoy(t.Context(), "original-dst.yaml", nil)
	if err != nil {
		t.Fatal(err)
	}
	return s, []*stack.Envoy{s.Envoy, other}, endpoints
}

// stormClients are one for HTTP/1.1 and one for HTTP/2.
func stormClients(t *testing.T) map[bool]*http.Client {
	clients := map[bool]*http.Client{}
	for _, http2 := range []bool{false, true} {
		transport := &http.Transport{
			Protocols:             new(http.Protocols),
			DisableCompression:    true,
			ExpectContinueTimeout: 10 * time.Second,
			MaxIdleConnsPerHost:   64,
		}
		transport.Protocols.SetHTTP1(!http2)
		transport.Protocols.SetUnencryptedHTTP2(http2)
		t.Cleanup(transport.CloseIdleConnections)
		clients[http2] = &http.Client{Transport: transport}
	}
	return clients
}

// allFreed waits until kvepp has no open stream, holds no body, and has nothing booked.
func allFreed(t *testing.T, s *stack.Stack) {
	t.Helper()
	eventually(t, func() error {
		m, err := s.Metrics(t.Context())
		if err != nil {
			return err
		}
		if booked, streams, held := m["kvepp_active_requests"], m["kvepp_streams"], m["kvepp_held_body_bytes"]; booked+
			streams+held != 0 {
			return fmt.Errorf("%v requests are booked, %v streams open, %v bytes of bodies held", booked, streams, held)
		}
		return nil
	})
}

// TestStorm sends random requests while clients and servers break off, endpoints stop, and kvepp is killed or stopped.
// Every byte that arrives equals the byte that was sent. No truncated body or response looks complete, no request
// hangs, and undisturbed requests succeed, as do those that were running when kvepp got SIGTERM. At the end nothing is
// booked.
func TestStorm(t *testing.T) {
	st := &storm{t: t}
	s, envoys, endpoints := startStorm(
		t,
		4,
		st,
		"--router-kv-events=false",
		"--max-parse-bytes="+strconv.Itoa(stormParseLimit),
		"--drain-delay=3s",
		"--drain-timeout=60s",
	) // Envoy checks health every second
	clients := stormClients(t)
	t.Logf("%d requests of -storm-seed %d", *stormRequests, *stormSeed)
	var (
		wait  sync.WaitGroup
		next  atomic.Int64
		whole atomic.Int64
	)
	restarts := *stormRequests/1200 + 1
	every := *stormRequests / (3*restarts + 1)
	disturbances := make(chan int, 3*restarts)
	for range 16 {
		wait.Go(func() {
			for n := int(next.Add(1)); n <= *stormRequests && st.faults.Load() < 10; n = int(next.Add(1)) {
				q := draw(*stormSeed, n)
				envoy := envoys[0]
				if q.originalDst {
					envoy = envoys[1]
				}
				if st.send(clients[q.http2], envoy.URL, q) {
					whole.Add(1)
				}
				if n%every == 0 && n/every <= cap(disturbances) {
					disturbances <- n / every
				}
			}
		})
	}
	done := make(chan struct{})
	go func() { wait.Wait(); close(done) }()
	panics := 0.0
	for running := true; running; {
		select {
		case <-done:
			running = false
		case n := <-disturbances:
			st.disturb(n%3 == 0, func() {
				if n%3 == 2 {
					e := endpoints[n/3%len(endpoints)]
					e.server.Close()
					e.start(t)
					return
				}
				panics += metric(t, s, `kvepp_requests_total{reason="panic"}`)
				if n%3 == 1 {
					s.KillKvepp()
				} else if err := s.DrainKvepp(t.Context()); err != nil {
					t.Error(err)
				}
				if err := s.StartKvepp(t.Context()); err != nil {
					t.Error(err)
				}
				for _, e := range envoys {
					eventually(t, func() error { return e.SeesKvepp(t.Context(), true) })
				}
				eventually(t, func() error {
					if n := metric(t, s, "kvepp_workers"); n != float64(len(endpoints)) {
						return fmt.Errorf("kvepp sees %v endpoints", n)
					}
					return nil
				})
			})
		}
	}
	allFreed(t, s)
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if panics += m[`kvepp_requests_total{reason="panic"}`]; panics > 0 {
		t.Errorf("kvepp panicked %v times", panics)
	}
	t.Logf(
		"%d requests undisturbed and compared whole, %d of them through an orderly stop; %v troubles; since kvepp's "+
			"last start",
		whole.Load(),
		st.kept,
		st.trouble/2,
	)
	for _, name := range slices.Sorted(maps.Keys(m)) {
		if m[name] != 0 &&
			(strings.HasPrefix(name, "kvepp_requests_total") || strings.HasPrefix(name, "kvepp_selections_total") ||
				strings.HasPrefix(name, "kvepp_decisions_total") || strings.HasPrefix(name, "kvepp_served_total")) {
			t.Log(name, m[name])
		}
	}
	if int(whole.Load()) < *stormRequests*2/5 && !t.Failed() {
		t.Errorf("only %d of %d requests were compared whole", whole.Load(), *stormRequests)
	}
}
