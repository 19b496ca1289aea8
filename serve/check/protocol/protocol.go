// Package protocol asks a gateway what it does with an endpoint picker: kvepp check --gateway URL --protocol.
//
// It owns a scripted picker and engines, which answer in place of the real ones, and the requests that it sends through
// the gateway. It knows nothing of kvepp's routing, so it works for other pickers' users as well.
//
// Source: Gateway API Inference Extension, proposal 004-endpoint-picker-protocol.
package protocol

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/internal/useragent"
	"kvepp/serve/check"
)

// Config says where the gateway is, and where it expects its picker and engines: at addresses of this machine.
type Config struct {
	URL     string // of the gateway
	HTTP    *http.Client
	Key     string      // sent as "Authorization: Bearer"; "": none
	Picker  string      // HOST:PORT
	TLS     *tls.Config // of the picker; nil: without TLS
	Engines []string    // HOST:PORT, at least two
	Wait    time.Duration
}

// The engines' response headers, and the header that has them stream.
const (
	engineHeader   = "x-kvepp-check-engine"
	receivedHeader = "x-kvepp-check-received" // bytes of the body
	trailerHeader  = "x-kvepp-check-trailer"
	streamHeader   = "x-kvepp-check-stream"
)

const (
	events     = 10 // of a stream
	eventPause = 50 * time.Millisecond
	largeBody  = 3_000_000 // bytes
	chatBody   = `{"model":"kvepp-check","messages":[{"role":"user","content":"hello"}]}`
)

// run is the state of one check.
type run struct {
	*Config
	ctx      context.Context
	picker   *picker
	last     int // number of the last request
	findings []check.Finding
}

// serving answers the health checks of a gateway, for any service that they name. Without it, a gateway that checks its
// picker stops asking it after a moment.
type serving struct {
	healthv1.UnimplementedHealthServer
}

func (serving) Check(context.Context, *healthv1.HealthCheckRequest) (*healthv1.HealthCheckResponse, error) {
	return &healthv1.HealthCheckResponse{Status: healthv1.HealthCheckResponse_SERVING}, nil
}

// Run answers as the gateway's picker and engines, sends requests through the gateway, and returns what it does.
func Run(ctx context.Context, cfg *Config) ([]check.Finding, error) {
	if len(cfg.Engines) < 2 {
		return nil, errors.New("--protocol: --endpoints must list at least two addresses of this machine, at which " +
			"the gateway expects engines; kvepp check answers there")
	}
	r := &run{Config: cfg, ctx: ctx, picker: &picker{scripts: map[string]script{}, calls: map[string][]*call{}}}
	var options []grpc.ServerOption
	if cfg.TLS != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(cfg.TLS)))
	}
	server := grpc.NewServer(append(options, grpc.MaxRecvMsgSize(64<<20))...)
	extprocv3.RegisterExternalProcessorServer(server, r.picker)
	healthv1.RegisterHealthServer(server, serving{})
	defer server.Stop()
	for i, address := range append([]string{cfg.Picker}, cfg.Engines...) {
		listener, err := net.Listen("tcp", address)
		if err != nil {
			return nil, fmt.Errorf("--protocol: %w; stop what listens there, or give addresses of this machine that "+
				"the gateway knows (--ext-proc-address, --endpoints)", err)
		}
		if i == 0 {
			go server.Serve(listener)
			continue
		}
		engine := &http.Server{Handler: engine(address), ReadHeaderTimeout: cfg.Wait}
		defer engine.Close()
		go engine.Serve(listener)
	}
	if r.asked() {
		r.bodies()
		r.responses()
		r.list()
		r.failures()
	}
	return r.findings, ctx.Err()
}

// engine answers requests with what it received.
func engine(address string) http.HandlerFunc {
	return func(w http.ResponseWriter, req *http.Request) {
		n, _ := io.Copy(io.Discard, req.Body)
		w.Header().Set(engineHeader, address)
		w.Header().Set(receivedHeader, strconv.FormatInt(n, 10))
		w.Header().Set(trailerHeader, req.Trailer.Get("X-Check-Trailer"))
		if req.Header.Get(streamHeader) == "" {
			w.Header().Set("Content-Type", "application/json")
			io.WriteString(w, `{"object":"kvepp check"}`)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for range events {
			io.WriteString(w, "data: {}\n\n")
			http.NewResponseController(w).Flush()
			time.Sleep(eventPause)
		}
	}
}

// outcome is what came of a request.
type outcome struct {
	status                int // 0: no response
	err                   error
	engine, trailer, body string
	received              int           // bytes that the engine received
	calls                 []*call       // of the picker
	first, last           time.Duration // when the first and the last bytes came
}

// says returns the response in short.
func (o *outcome) says() string {
	if o.err != nil && o.status == 0 {
		return o.err.Error()
	}
	return fmt.Sprintf("HTTP %d, %d bytes", o.status, len(o.body))
}

// send sends a request whose picker plays a script.
func (r *run) send(s script, body io.Reader, header, trailer http.Header) *outcome {
	r.last++
	id := fmt.Sprintf("%d-%d", time.Now().UnixNano(), r.last)
	r.picker.mu.Lock()
	r.picker.scripts[id] = s
	r.picker.mu.Unlock()
	ctx, cancel := context.WithTimeout(r.ctx, r.Wait)
	defer cancel()
	o := new(outcome)
	url := strings.TrimRight(r.URL, "/") + "/v1/chat/completions"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, body)
	if err != nil {
		return &outcome{err: err}
	}
	for k, v := range header {
		req.Header[k] = v
	}
	useragent.Add(req)
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(idHeader, id)
	req.Trailer = trailer
	if r.Key != "" {
		req.Header.Set("Authorization", "Bearer "+r.Key)
	}
	began := time.Now()
	response, err := r.HTTP.Do(req)
	if err != nil {
		o.err = err
	} else {
		defer response.Body.Close()
		o.status, o.engine, o.trailer = response.StatusCode, response.Header.Get(engineHeader),
			response.Header.Get(trailerHeader)
		o.received, _ = strconv.Atoi(response.Header.Get(receivedHeader))
		piece := make([]byte, 64<<10)
		for {
			n, err := response.Body.Read(piece)
			if n > 0 {
				o.last = time.Since(began)
				o.first = cmp.Or(o.first, o.last)
				o.body += string(piece[:n])
			}
			if err != nil {
				break
			}
		}
	}
	r.picker.mu.Lock()
	defer r.picker.mu.Unlock()
	for _, c := range r.picker.calls[id] {
		copied := *c // the stream may go on
		o.calls = append(o.calls, &copied)
	}
	return o
}

func (r *run) report(about string, ok bool, fix, says string, args ...any) {
	state := check.OK
	if !ok {
		state = check.Wrong
	}
	r.findings = append(r.findings, check.Finding{Worker: check.ThroughGateway, About: about, State: state,
		Says: fmt.Sprintf(says, args...), Fix: fix})
}

func (r *run) chat(s script) *outcome { return r.send(s, strings.NewReader(chatBody), nil, nil) }

// asked reports how often the gateway asks the picker, what it tells it, and whether it follows its choice.
func (r *run) asked() bool {
	o := r.chat(script{endpoints: r.Engines[0]})
	if len(o.calls) == 0 {
		r.report("picker", false, "make "+r.Picker+" the picker of the route's pool, over TLS unless you give "+
			"--secure-serving=false", "the gateway does not ask it: %s", o.says())
		return false
	}
	r.report("picker", len(o.calls) == 1, "give each pool one route with one match; kvepp repeats its decision "+
		"(docs/gateways.md)", "the gateway asks %d times for a request", len(o.calls))
	c := o.calls[0]
	sent := map[bool]string{true: "sent", false: "not sent"}
	r.report("path", c.path, "kvepp reads the API from the body", "%s", sent[c.path])
	if c.modes {
		r.report("body modes", c.response == fullDuplex, "remove the gateway's "+
			"setting: BUFFERED holds back streams", "request %s, response %s", c.request, c.response)
	} else {
		r.report("body modes", true, "", "not said")
	}
	slices.Sort(c.attributes)
	r.report("attributes", true, "", "%s", cmp.Or(strings.Join(slices.Compact(c.attributes), ", "), "none"))
	r.report("subset hint", true, "", "%s", sent[c.subset])
	followed := 0
	for followed < 6 {
		want := r.Engines[followed%2]
		if o = r.chat(script{endpoints: want}); o.engine != want {
			break
		}
		followed++
	}
	r.report("choice", followed == 6, "the gateway's cluster must have the endpoint, or be ORIGINAL_DST",
		"followed for %d of 6 requests, the last %s", followed, o.says())
	return true
}

// bodies checks large bodies and trailers.
func (r *run) bodies() {
	s := script{endpoints: r.Engines[0]}
	large := strings.Replace(chatBody, "hello", strings.Repeat("hello ", largeBody/6), 1)
	o := r.send(s, strings.NewReader(large), nil, nil)
	r.report("large body", o.status == http.StatusOK && o.received == len(large), "raise the gateway's buffer limit",
		"%d bytes: %s; the engine received %d", len(large), o.says(), o.received)
	const name = "X-Check-Trailer"
	o = r.send(s, io.MultiReader(strings.NewReader(chatBody)), nil, http.Header{name: {"sent"}}) // of unknown length
	told := slices.ContainsFunc(o.calls, func(c *call) bool { return c.trailers })
	r.report("trailers", o.status == http.StatusOK, "do not send requests with trailers",
		"%s; the picker gets them: %v; the engine: %v", o.says(), told, o.trailer != "")
}

// responses checks whether streams arrive piece by piece, and what the picker sees of them.
func (r *run) responses() {
	o := r.send(script{endpoints: r.Engines[1]}, strings.NewReader(chatBody), http.Header{http.CanonicalHeaderKey(
		streamHeader): {"true"}}, nil)
	whole := events * eventPause
	r.report("stream", o.status == http.StatusOK && o.last-o.first > whole/2,
		"the gateway or its picker's body mode buffers responses", "%s: the first came after %v, the last after %v",
		o.says(), o.first.Round(time.Millisecond), o.last.Round(time.Millisecond))
	if len(o.calls) == 0 {
		return
	}
	c := o.calls[0]
	r.report("response", c.responded, "load and failures are then known by the engines' metrics alone",
		"the picker sees its headers: %v, and %d pieces of its body", c.responded, c.pieces)
	r.report("served", c.served == r.Engines[1], "kvepp then cannot tell that another endpoint served", "%s served: "+
		"the gateway says %s", cmp.Or(o.engine, "no engine"), cmp.Or(c.served, "nothing"))
}

// list checks whether the gateway takes several endpoints.
func (r *run) list() {
	o := r.chat(script{endpoints: r.Engines[1] + "," + r.Engines[0]})
	r.report("list", o.engine == r.Engines[1], "leave --fallback-endpoints out: kvepp names one endpoint to such a "+
		"gateway", "two endpoints: %s from %s", o.says(), cmp.Or(o.engine, "no engine"))
}

// failures checks what clients get from a picker that refuses, or is away, and whether they may then choose.
func (r *run) failures() {
	o := r.chat(script{refuse: true})
	r.report("refusal", o.status == http.StatusTooManyRequests && o.body == refusalText,
		"clients do not see why the picker refuses", "the picker's 429: %s", o.says())
	o = r.chat(script{away: true})
	how := "closed"
	if o.engine != "" {
		how = "open"
	}
	r.report("picker away", true, "", "fails %s: %s", how, o.says())
	chosen := true
	for i := range 12 {
		want := r.Engines[i%2]
		o = r.send(script{away: true}, strings.NewReader(chatBody),
			http.Header{http.CanonicalHeaderKey(endpointHeader): {want}}, nil)
		chosen = chosen && o.engine == want
	}
	r.report("client's choice", !chosen, "clients reach any address while the picker is away: remove "+endpointHeader+
		" from their requests", "while it is away, a client's %s decides: %v", endpointHeader, chosen)
}
