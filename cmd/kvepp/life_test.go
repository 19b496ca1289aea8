package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/test/harness/process"
)

// asProgram makes the test binary run as kvepp.
const asProgram = "KVEPP_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		os.Unsetenv(asProgram) // kvepp would refuse the variable
		os.Exit(start(os.Args[1:], os.Stdin, os.Stdout, os.Stderr, os.Environ()))
	}
	os.Exit(m.Run())
}

// running is a kvepp in its own process.
type running struct {
	*process.Process
	t                         testing.TB
	grpc, health, prom, admin int // ports
	endpoints                 string
	env                       []string // NAME=VALUE
	command                   string   // empty: serve
	wrapper                   []string // a program with arguments that runs kvepp; nil: none
	processor, plain          *grpc.ClientConn
}

// reserve chooses the ports of a kvepp, so that others can be configured with them before it starts.
func reserve(t testing.TB) *running {
	t.Helper()
	first, err := process.Ports(4)
	if err != nil {
		t.Fatal(err)
	}
	return &running{
		t:         t,
		grpc:      first,
		health:    first + 1,
		prom:      first + 2,
		admin:     first + 3,
		endpoints: filepath.Join(t.TempDir(), "endpoints.yaml"),
	}
}

func (r *running) adminURL() string { return fmt.Sprintf("http://127.0.0.1:%d", r.admin) }

// writeEndpoints replaces the endpoints file.
func (r *running) writeEndpoints(text string) {
	r.t.Helper()
	if err := os.WriteFile(r.endpoints+".next", []byte(text), 0o644); err != nil {
		r.t.Fatal(err)
	}
	if err := os.Rename(r.endpoints+".next", r.endpoints); err != nil {
		r.t.Fatal(err)
	}
}

// start starts the process without waiting.
func (r *running) start(flags ...string) {
	r.t.Helper()
	self, err := os.Executable()
	if err != nil {
		r.t.Fatal(err)
	}
	argv := append(
		slices.Concat(r.wrapper, []string{self, cmp.Or(r.command, "serve")}),
		append([]string{"--endpoints", r.endpoints, "--bind-address=127.0.0.1", "--secure-serving=false",
			"--grpc-port", strconv.Itoa(r.grpc), "--grpc-health-port", strconv.Itoa(r.health), "--metrics-port",
			strconv.Itoa(r.prom),
			"--admin-address", strings.TrimPrefix(r.adminURL(), "http://")}, flags...)...)
	if r.Process, err = process.Start(filepath.Dir(r.endpoints), "kvepp", append(r.env, asProgram+"=1"),
		argv...); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() {
		r.Kill()
		if r.t.Failed() {
			r.t.Logf("the last lines of kvepp's log:\n%s", r.Tail(30))
		}
	})
	for conn, port := range map[**grpc.ClientConn]int{&r.processor: r.grpc, &r.plain: r.health} {
		if *conn, err = grpc.NewClient(fmt.Sprintf("127.0.0.1:%d", port),
			grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
			r.t.Fatal(err)
		}
		r.t.Cleanup(func() { (*conn).Close() })
	}
}

// status returns the readiness that the health service reports.
func (r *running) status() (healthv1.HealthCheckResponse_ServingStatus, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
	defer cancel()
	response, err := healthv1.NewHealthClient(r.plain).Check(ctx, &healthv1.HealthCheckRequest{Service: "readiness"})
	return response.GetStatus(), err
}

// eventually waits for a condition, for two minutes.
func (r *running) eventually(what string, condition func() error) {
	r.t.Helper()
	r.until(what, 2*time.Minute, condition)
}

// until waits for a condition, at most until timeout. It fails the test if kvepp exits.
func (r *running) until(what string, timeout time.Duration, condition func() error) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := process.Up(ctx, what, condition, r.Process); err != nil {
		r.t.Fatal(err)
	}
}

// awaitReady waits until health checks answer SERVING.
func (r *running) awaitReady() {
	r.t.Helper()
	r.eventually("kvepp to be ready", func() error {
		if s, err := r.status(); err != nil || s != healthv1.HealthCheckResponse_SERVING {
			return fmt.Errorf("%v %w", s, err)
		}
		return nil
	})
}

// metrics returns kvepp's metrics as text.
func (r *running) metrics() (string, error) {
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", r.prom))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	return string(text), err
}

// request is a request as the proxy announces it. It stays active until its stream is closed.
type request struct {
	extprocv3.ExternalProcessor_ProcessClient
	endpoint string // the chosen one; empty: kvepp answered with status itself
	status   int
	set      map[string]string // headers of that answer
}

// startRequest sends a request without a body and returns it with the response of kvepp. It stays active until
// complete.
func (r *running) startRequest(ctx context.Context) (*request, error) {
	stream, err := extprocv3.NewExternalProcessorClient(r.processor).Process(ctx)
	if err != nil {
		return nil, err
	}
	header := func(name, value string) *corev3.HeaderValue {
		return &corev3.HeaderValue{Key: name, RawValue: []byte(value)}
	}
	headers := &extprocv3.HttpHeaders{EndOfStream: true, Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		header(":method", "GET"), header(":path", "/v1/models")}}}
	if err := stream.Send(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: headers}}); err != nil {
		return nil, err
	}
	response, err := stream.Recv()
	if err != nil {
		return nil, err
	}
	q := &request{
		ExternalProcessor_ProcessClient: stream,
		set:                             map[string]string{},
		status:                          int(response.GetImmediateResponse().GetStatus().GetCode()),
	}
	for _, h := range response.GetImmediateResponse().GetHeaders().GetSetHeaders() {
		q.set[h.GetHeader().GetKey()] = string(h.GetHeader().GetRawValue())
	}
	for _, h := range response.GetRequestHeaders().GetResponse().GetHeaderMutation().GetSetHeaders() {
		if h.GetHeader().GetKey() == "x-gateway-destination-endpoint" {
			q.endpoint = string(h.GetHeader().GetRawValue())
		}
	}
	return q, nil
}

// complete sends the response headers and ends the stream.
func (q *request) complete() error {
	headers := &extprocv3.HttpHeaders{EndOfStream: true, Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
		{Key: ":status", RawValue: []byte("200")}}}}
	if err := q.Send(&extprocv3.ProcessingRequest{
		Request: &extprocv3.ProcessingRequest_ResponseHeaders{ResponseHeaders: headers}}); err != nil {
		return err
	}
	if _, err := q.Recv(); err != nil {
		return err
	}
	return q.CloseSend()
}

// awaitEndpoint waits until a request is routed to the endpoint. For an empty endpoint it waits until kvepp answers
// 503.
func (r *running) awaitEndpoint(endpoint string) {
	r.t.Helper()
	r.eventually("requests to go to "+strconv.Quote(endpoint), func() error {
		// A request that goes elsewhere must end too: it may be booked just after its worker has left.
		ctx, cancel := context.WithCancel(r.t.Context())
		defer cancel()
		q, err := r.startRequest(ctx)
		if err != nil {
			return err
		}
		if q.endpoint != endpoint || endpoint == "" && q.status != http.StatusServiceUnavailable {
			return fmt.Errorf("it went to %q, status %d", q.endpoint, q.status)
		}
		if endpoint == "" {
			return nil
		}
		return q.complete()
	})
}

const oneEndpoint = "endpoints:\n- {name: a, address: '10.0.0.1:8000'}\n"

// TestReplicasStartTogether: replicas that are peers of each other do not wait for each other, and not for a peer that
// accepts the connection but never answers.
func TestReplicasStartTogether(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and never answers
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	unusedPort, err := process.Ports(1) // of an engine that does not publish events yet
	if err != nil {
		t.Fatal(err)
	}
	endpoints := fmt.Sprintf(
		"endpoints:\n- {name: a, address: '10.0.0.1:8000', blockSize: 16, kvEvents: 'tcp://127.0.0.1:%d'}\n",
		unusedPort,
	)
	replicas := []*running{reserve(t), reserve(t), reserve(t)}
	for i, r := range replicas {
		var peers []string
		for j, other := range replicas {
			if j != i {
				peers = append(peers, other.adminURL())
			}
		}
		r.writeEndpoints(endpoints)
		r.start("--warmup-timeout=1h", "--index-peers", strings.Join(peers, ","))
	}
	for _, r := range replicas {
		r.awaitReady()
		r.awaitEndpoint("10.0.0.1:8000")
	}
	late := reserve(t)
	late.writeEndpoints(endpoints)
	late.start("--warmup-timeout=1h", "--index-peers", "http://"+silent.Addr().String()+","+replicas[0].adminURL())
	late.awaitReady()
	late.awaitEndpoint("10.0.0.1:8000")
}

// TestPoolAtZero: without endpoints kvepp is ready and answers 503, at its start and after all endpoints have left.
func TestPoolAtZero(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints("endpoints: []\n")
	r.start()
	r.awaitReady()
	r.awaitEndpoint("")
	for range 2 {
		r.writeEndpoints(oneEndpoint)
		r.awaitEndpoint("10.0.0.1:8000")
		running, err := r.startRequest(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		r.writeEndpoints("endpoints: []\n")
		r.awaitEndpoint("")
		if err := running.complete(); err != nil { // its endpoint has left meanwhile
			t.Error(err)
		}
		r.awaitReady()
	}
	r.eventually("bookings to end", func() error {
		m, err := r.metrics()
		if err == nil && !strings.Contains(m, "\nkvepp_active_requests 0\n") {
			err = errors.New("kvepp_active_requests is not 0")
		}
		return err
	})
}

// TestTokenizersThatDoNotLoad: kvepp serves requests despite a missing folder, an unreadable one, and one whose file
// system does not respond.
func TestTokenizersThatDoNotLoad(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	broken, hanging := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(broken, "tokenizer.json"), []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	// opening it waits for a writer
	if err := syscall.Mkfifo(filepath.Join(hanging, "tokenizer.json"), 0o644); err != nil {
		t.Fatal(err)
	}
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.start(
		"--model=a="+filepath.Join(broken, "missing"),
		"--model=b="+broken,
		"--model=c="+hanging,
		"--model=d=../../test/models/tiny-bytelevel",
	)
	r.awaitReady()
	r.awaitEndpoint("10.0.0.1:8000")
	if m, err := r.metrics(); err != nil || !strings.Contains(m, "\nkvepp_models_without_tokenizer 3\n") {
		t.Error("kvepp_models_without_tokenizer is not 3", err)
	}
}

// TestConformanceIsLogged: a start with --gateway conformance logs a warning.
func TestConformanceIsLogged(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints("endpoints:\n- {name: w, address: 127.0.0.1:1}\n")
	r.start("--gateway=conformance")
	r.awaitReady()
	if log := r.Tail(50); !strings.Contains(log, "use it for conformance tests only") {
		t.Errorf("kvepp logs\n%s", log)
	}
}

// TestDrain: after SIGTERM the health service reports NOT_SERVING at once. New requests are served for a while, and
// running ones complete; then kvepp exits with 0. A second signal ends it at once.
func TestDrain(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.start("--drain-delay=6s", "--drain-timeout=1h")
	r.awaitReady()
	held, err := r.startRequest(t.Context())
	if err != nil || held.endpoint == "" {
		t.Fatal(held, err)
	}
	r.Signal(syscall.SIGTERM)
	r.eventually("health checks to answer NOT_SERVING", func() error {
		if s, err := r.status(); err != nil || s != healthv1.HealthCheckResponse_NOT_SERVING {
			return fmt.Errorf("%v %w", s, err)
		}
		return nil
	})
	late, err := r.startRequest(t.Context()) // from a proxy that has not checked the health since
	if err != nil || late.endpoint == "" {
		t.Fatal("a request soon after SIGTERM is refused", late, err)
	}
	r.eventually("new requests to be refused", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		q, err := r.startRequest(ctx)
		if err == nil {
			return fmt.Errorf("one went to %s: %v", q.endpoint, q.complete())
		}
		return nil
	})
	if r.Ended() {
		t.Fatal("kvepp did not wait for running requests")
	}
	var wait sync.WaitGroup
	for _, q := range []*request{held, late} {
		wait.Go(func() {
			if err := q.complete(); err != nil {
				t.Error("kvepp aborted a running request:", err)
			}
		})
	}
	wait.Wait()
	r.awaitExit("after its last request")

	empty := reserve(t) // a request that waits has a response before kvepp ends
	empty.writeEndpoints("endpoints: []\n")
	empty.start("--drain-timeout=3s", "--hold-when-empty=1h")
	empty.awaitReady()
	answered := make(chan error, 1)
	go func() {
		q, err := empty.startRequest(context.WithoutCancel(t.Context()))
		if err == nil && (q.status != http.StatusServiceUnavailable ||
			q.set["x-llm-d-request-dropped-reason"] != "rejected-shutting-down") {
			err = fmt.Errorf("status %d, headers %v", q.status, q.set)
		}
		answered <- err
	}()
	empty.eventually("the request to wait", func() error {
		m, err := empty.metrics()
		if err == nil && !strings.Contains(m, "\nkvepp_held_requests 1\n") {
			err = errors.New("kvepp_held_requests is not 1")
		}
		return err
	})
	empty.Signal(syscall.SIGTERM)
	if err := <-answered; err != nil {
		t.Error(err)
	}
	empty.awaitExit("after --drain-timeout")

	twice := reserve(t)
	twice.writeEndpoints(oneEndpoint)
	twice.start("--drain-timeout=1h")
	short := reserve(t)
	short.writeEndpoints(oneEndpoint)
	short.start("--drain-timeout=1s") // less than the default of --drain-delay
	for _, r := range []*running{twice, short} {
		r.awaitReady()
		if _, err := r.startRequest(t.Context()); err != nil { // the request never ends
			t.Fatal(err)
		}
	}
	short.Signal(syscall.SIGTERM)
	short.awaitExit("after --drain-timeout")
	twice.Signal(syscall.SIGTERM)
	twice.eventually("the effect of the first signal", func() error {
		if s, err := twice.status(); err != nil || s != healthv1.HealthCheckResponse_NOT_SERVING {
			return fmt.Errorf("%v %w", s, err)
		}
		return nil
	})
	twice.Signal(syscall.SIGTERM)
	twice.awaitExit("after the second signal")
}

// awaitExit waits until the process has ended. when completes the error "kvepp has not ended ...".
func (r *running) awaitExit(when string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := process.Until(ctx, func() error {
		if !r.Ended() {
			return fmt.Errorf("kvepp has not ended %s", when)
		}
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
}
