package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/net/http2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// The tests of this file attack a kvepp in a process of its own over gRPC, without a proxy, and bound its memory.

var attackScale = flag.Int("attack-scale", 1, "how many times as much the attacks send; 7 is what an audit sent")

const (
	// attackBudget is --max-buffered-bytes.
	attackBudget = 64 << 20
	// attackMemory is the most that kvepp may have resident: 128 MiB without a request, collectorFloor, and twice the
	// budget, because the heap may double between two collections.
	attackMemory = 128<<20 + collectorFloor + 2*attackBudget
)

// attacked starts a kvepp with two endpoints, whose blocks have four tokens.
func attacked(t *testing.T, flags ...string) *running {
	t.Helper()
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	r := reserve(t)
	r.writeEndpoints("endpoints:\n- {name: a, address: '10.0.0.1:8000', blockSize: 4}\n" +
		"- {name: b, address: '10.0.0.2:8000', blockSize: 4}\n")
	r.start(append([]string{fmt.Sprint("--max-buffered-bytes=", attackBudget), "--router-kv-events=false",
		"--index-max-bytes=4000000"}, flags...)...)
	r.awaitReady()
	return r
}

// within checks the most memory that kvepp has had so far. The race detector takes several times as much.
func (r *running) within(what string, most int) {
	r.t.Helper()
	now, peak := r.memory("VmRSS:"), r.memory("VmHWM:")
	r.t.Logf("%s: kvepp has %d MiB, at most it had %d", what, now>>20, peak>>20)
	if peak > most && !raceDetector {
		r.t.Errorf("%s: kvepp had %d MiB, more than %d", what, peak>>20, most>>20)
	}
}

// dial returns a connection of its own to one of kvepp's ports.
func (r *running) dial(port int, options ...grpc.DialOption) *grpc.ClientConn {
	r.t.Helper()
	conn, err := grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", port),
		append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	return conn
}

// sendCompletion sends a request with a body on a stream of its own, and returns kvepp's response: "200", or the status
// of its own response. The request stays active until ctx ends.
func sendCompletion(ctx context.Context, conn *grpc.ClientConn, body []byte) (status string, err error) {
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
	if err != nil {
		return "", err
	}
	header := func(name, value string) *corev3.HeaderValue {
		return &corev3.HeaderValue{Key: name, RawValue: []byte(value)}
	}
	for _, m := range []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{header(":method", "POST"),
				header(":path", "/v1/completions"), header("content-type", "application/json")}}}}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{
			RequestBody: &extprocv3.HttpBody{Body: body, EndOfStream: true}}},
	} {
		if err := stream.Send(m); err != nil {
			return "", err
		}
	}
	for {
		response, err := stream.Recv()
		switch {
		case err != nil:
			return "", err
		case response.GetImmediateResponse() != nil:
			return fmt.Sprint(int(response.GetImmediateResponse().GetStatus().GetCode())), nil
		case response.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetEndOfStream():
			return "200", nil
		}
	}
}

// crowd has n requests routed whose responses do not come, and returns how many were answered with each status, and the
// function that ends them. body returns the i-th body.
func (r *running) crowd(n int, body func(i int) []byte) (statuses map[string]int, end func()) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(r.t.Context())
	statuses = map[string]int{}
	var all sync.WaitGroup
	var mu sync.Mutex
	for k := range 8 {
		conn := r.dial(r.grpc)
		all.Go(func() {
			for i := k; i < n; i += 8 {
				status, err := sendCompletion(ctx, conn, body(i))
				if err != nil {
					r.t.Errorf("request %d: %v", i, err)
					return
				}
				mu.Lock()
				statuses[status]++
				mu.Unlock()
			}
		})
	}
	all.Wait()
	return statuses, cancel
}

// TestMemoryOfRunningRequests: completions of many short prompts whose responses do not come take no more memory than
// the budget. They are routed all the same, and a second burst takes no more than the first.
func TestMemoryOfRunningRequests(t *testing.T) {
	requests := 700 * *attackScale
	r := attacked(t)
	for range 2 {
		statuses, end := r.crowd(requests, func(i int) []byte {
			var b strings.Builder
			for j := range 2048 {
				fmt.Fprintf(&b, ",[%d,%d,3,4]", i+1, j+1)
			}
			return []byte(`{"model":"m","prompt":[` + b.String()[1:] + `]}`)
		})
		r.within(fmt.Sprint(statuses), attackMemory+requests*40<<10) // a stream takes some 25 KiB, and garbage
		if statuses["200"] != requests {
			t.Errorf("%v", statuses)
		}
		if n, err := r.metric("kvepp_active_requests_counted_only_total"); n == 0 || err != nil {
			t.Errorf("%v requests were only counted, %v", n, err)
		}
		end()
		r.eventually("all requests to end", func() error { return r.checkMetric("kvepp_active_requests", 0) })
	}
}

// flood is an attack with messages of one method.
type flood struct {
	port           int
	method         string // "/service/method"
	streams        int
	before         []byte // a whole message that comes first; nil: none
	field          protowire.Number
	declared, sent int // bytes of the message's only field
	header         http.Header
}

// run opens the streams over 8 connections. It returns when the server has answered each one, or read all that it
// sends. The streams stay open until the test ends.
func (f *flood) run(t *testing.T) (responded int) {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	field := protowire.AppendVarint(protowire.AppendTag(nil, f.field, protowire.BytesType), uint64(f.declared))
	prefix := func(compressed byte, n int) []byte {
		return binary.BigEndian.AppendUint32([]byte{compressed}, uint32(n))
	}
	start := append(append(f.before, prefix(0, len(field)+f.declared)...), field...)
	if f.header.Get("grpc-encoding") == "gzip" {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		z.Write(append(field, make([]byte, f.declared)...))
		z.Close()
		start = append(append(f.before, prefix(1, b.Len())...), b.Bytes()...)
	}
	var all sync.WaitGroup
	var refused atomic.Int64
	for range 8 {
		client := &http.Transport{Protocols: new(http.Protocols)}
		client.Protocols.SetUnencryptedHTTP2(true)
		for range f.streams / 8 {
			read, end := make(chan struct{}), make(chan struct{})
			body := io.MultiReader(bytes.NewReader(start), io.LimitReader(zeros{}, int64(f.sent)),
				&lastPart{reached: read, ctx: ctx})
			req, err := http.NewRequestWithContext(ctx, http.MethodPost,
				fmt.Sprintf("http://127.0.0.1:%d%s", f.port, f.method), body)
			if err != nil {
				t.Fatal(err)
			}
			if req.Header = f.header.Clone(); req.Header == nil {
				req.Header = http.Header{}
			}
			req.Header.Set("content-type", "application/grpc")
			req.Header.Set("te", "trailers")
			all.Go(func() {
				select {
				case <-read:
				case <-end:
				}
			})
			go func() {
				defer close(end)
				if resp, err := client.RoundTrip(req); err == nil {
					io.Copy(io.Discard, resp.Body) // its end, or that of ctx
					resp.Body.Close()
				}
				refused.Add(1)
			}()
		}
	}
	all.Wait()
	return int(refused.Load())
}

// zeros is an endless file.
type zeros struct{}

func (zeros) Read(b []byte) (int, error) { clear(b); return len(b), nil }

// lastPart is a body's last part: it says when it is asked for, and then waits.
type lastPart struct {
	reached chan struct{}
	ctx     context.Context
}

func (u *lastPart) Read([]byte) (int, error) {
	close(u.reached)
	<-u.ctx.Done()
	return 0, u.ctx.Err()
}

// TestMemoryOfMessages: streams of every method, with messages that are large, half sent or compressed, take no more
// memory than the budget. Probes are answered meanwhile.
func TestMemoryOfMessages(t *testing.T) {
	headers, err := proto.Marshal(&extprocv3.ProcessingRequest{
		ProtocolConfig: &extprocv3.ProtocolConfiguration{RequestBodyMode: filterv3.ProcessingMode_BUFFERED},
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
				{Key: ":path", RawValue: []byte("/v1/completions")}, {Key: ":method", RawValue: []byte("POST")}}}}}})
	if err != nil {
		t.Fatal(err)
	}
	headers = append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(headers))), headers...)
	const unknown, service = 15, 1                 // fields
	const forHealth, forAll = 4_000_000, 4_800_000 // what grpc's default allows, and --max-parse-bytes
	streams := 240 * *attackScale
	process, logs := extprocv3.ExternalProcessor_Process_FullMethodName,
		accesslogv3.AccessLogService_StreamAccessLogs_FullMethodName
	check, watch := healthv1.Health_Check_FullMethodName, healthv1.Health_Watch_FullMethodName
	gzipped := http.Header{"Grpc-Encoding": {"gzip"}}
	for name, attack := range map[string]func(r *running) flood{
		"checks at the health port": func(r *running) flood {
			return flood{r.health, check, streams, nil, service, forHealth, forHealth, nil}
		},
		"half checks at the health port": func(r *running) flood {
			return flood{r.health, check, streams, nil, service, forHealth, forHealth - 1, nil}
		},
		"watches at the health port": func(r *running) flood {
			return flood{r.health, watch, streams, nil, service, forHealth, forHealth, nil}
		},
		"compressed watches": func(r *running) flood {
			return flood{r.health, watch, streams, nil, service, forHealth, 0, gzipped}
		},
		"half checks at the ext_proc port": func(r *running) flood {
			return flood{r.grpc, check, streams, nil, service, forAll, forAll - 1, nil}
		},
		"watches at the ext_proc port": func(r *running) flood {
			return flood{r.grpc, watch, streams, nil, service, forAll, forAll, nil}
		},
		"half access logs": func(r *running) flood {
			return flood{r.grpc, logs, streams, nil, unknown, forAll, forAll - 1, nil}
		},
		"headers": func(r *running) flood {
			return flood{r.grpc, process, streams, nil, unknown, forAll, forAll, nil}
		},
		"half bodies": func(r *running) flood {
			return flood{r.grpc, process, streams, headers, unknown, forAll, forAll - 1, nil}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := attacked(t)
			f := attack(r)
			responded := f.run(t)
			r.within(fmt.Sprintf("%d of %d streams were ended", responded, f.streams), attackMemory)
			for _, port := range []int{r.health, r.grpc} {
				if err := r.probe(port); err != nil {
					t.Errorf("a probe meanwhile: %v", err)
				}
			}
		})
	}
}

// probe checks the health over a connection of its own, as kubelet does.
func (r *running) probe(port int) error {
	conn := r.dial(port)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	response, err := healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{Service: "liveness"})
	if err == nil && response.Status != healthv1.HealthCheckResponse_SERVING {
		err = fmt.Errorf("%v", response.Status)
	}
	return err
}

// TestProbesAlwaysGetIn: connections of every kind that a client can hold without a request, more than a port takes, do
// not keep out a probe, on neither port, and a proxy's request goes on.
func TestProbesAlwaysGetIn(t *testing.T) {
	const crowd = 100 // connections; each port takes 64 with so few file descriptors
	ctx := t.Context()
	stream := func(r *running, port int, method string) (grpc.ClientStream, error) {
		return r.dial(port).NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	}
	raw := func(r *running, port int, sends string) error {
		conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			return err
		}
		t.Cleanup(func() { conn.Close() })
		_, err = conn.Write([]byte(sends))
		return err
	}
	kinds := map[string]func(r *running, port int) error{
		"watches": func(r *running, port int) error {
			watch, err := healthv1.NewHealthClient(r.dial(port)).Watch(ctx, &healthv1.HealthCheckRequest{})
			if err == nil {
				_, err = watch.Recv()
			}
			return err
		},
		"checks without a message": func(r *running, port int) error {
			_, err := stream(r, port, healthv1.Health_Check_FullMethodName)
			return err
		},
		"former checks": func(r *running, port int) error {
			_, err := healthv1.NewHealthClient(r.dial(port)).Check(ctx, &healthv1.HealthCheckRequest{})
			return err
		},
		"silent connections": func(r *running, port int) error { return raw(r, port, "") },
		"HTTP/2 handshakes": func(r *running, port int) error {
			return raw(r, port, http2.ClientPreface+"\x00\x00\x00\x04\x00\x00\x00\x00\x00") // empty SETTINGS
		},
		"half of a preface": func(r *running, port int) error { return raw(r, port, http2.ClientPreface[:10]) },
	}
	ofProxies := map[string]func(r *running, port int) error{
		"access logs": func(r *running, port int) error {
			_, err := stream(r, port, accesslogv3.AccessLogService_StreamAccessLogs_FullMethodName)
			return err
		},
		"requests without headers": func(r *running, port int) error {
			_, err := stream(r, port, extprocv3.ExternalProcessor_Process_FullMethodName)
			return err
		},
	}
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"sh", "-c", `ulimit -n 1024; exec "$@"`, "sh"}
	r.start()
	r.awaitReady()
	q, err := r.startRequest(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range []int{r.health, r.grpc} {
		all := maps.Clone(kinds)
		if port == r.grpc {
			maps.Copy(all, ofProxies)
		}
		for name, open := range all {
			for i := range crowd {
				if err := open(r, port); err != nil {
					t.Fatalf("%s: connection %d: %v", name, i, err)
				}
			}
			if err := r.probe(port); err != nil {
				t.Errorf("beside %d connections with %s: %v", crowd, name, err)
			}
		}
	}
	if err := q.complete(); err != nil {
		t.Errorf("the request from before: %v", err)
	}
}

// TestMetadataIsBounded: a stream's metadata has a limit of its own at both ports.
func TestMetadataIsBounded(t *testing.T) {
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.start()
	r.awaitReady()
	for _, port := range []int{r.health, r.grpc} {
		client := healthv1.NewHealthClient(r.dial(port))
		for n, fits := range map[int]bool{8 << 10: true, 16 << 10: false} {
			ctx := metadata.AppendToOutgoingContext(t.Context(), "x", strings.Repeat("x", n))
			if _, err := client.Check(ctx, &healthv1.HealthCheckRequest{}); (err == nil) != fits {
				t.Errorf("%d bytes of metadata: %v", n, err)
			}
		}
	}
}
