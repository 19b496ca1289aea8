package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

const (
	root      = "../.."
	blockSize = 16 // tokens, of every engine
)

// kvepp is a kvepp process of a test.
type kvepp struct {
	*process.Process
	env, argv, flags          []string
	host                      string // where it listens
	grpc, health, prom, admin int    // ports
}

// startKvepp starts a kvepp that takes its endpoints from a cluster. It does not wait until it is ready.
func startKvepp(t *testing.T, kubeconfig string, flags ...string) *kvepp {
	t.Helper()
	return startKveppAt(t, "127.0.0.1", append([]string{"--kubeconfig", kubeconfig}, flags...)...)
}

// startKveppAt starts a kvepp that listens at an address.
func startKveppAt(t *testing.T, host string, flags ...string) *kvepp {
	t.Helper()
	first, err := process.Ports(4)
	must(t, err)
	k := &kvepp{host: host, grpc: first, health: first + 1, prom: first + 2, admin: first + 3,
		argv: []string{filepath.Join(root, "bin/kvepp"), "serve"}}
	k.flags = append([]string{"--bind-address", host, "--grpc-port", strconv.Itoa(k.grpc),
		"--grpc-health-port", strconv.Itoa(k.health), "--metrics-port", strconv.Itoa(k.prom), "--admin-address",
		fmt.Sprintf("127.0.0.1:%d", k.admin),
		"--model", stack.Model + "=" + filepath.Join(root, "test/models/tiny-bytelevel"), "--kv-cache-block-size",
		strconv.Itoa(blockSize),
		"--decision-headers", "--drain-timeout", "1m", "--metrics-endpoint-auth=false"}, flags...)
	k.startUntilEnd(t)
	return k
}

// startUntilEnd starts kvepp for the rest of the test. If that fails, it prints the end of kvepp's log.
func (k *kvepp) startUntilEnd(t *testing.T) {
	t.Helper()
	k.start(t)
	t.Cleanup(func() {
		k.Kill()
		if t.Failed() {
			t.Logf("last lines of kvepp's log:\n%s", k.Tail(60))
		}
	})
}

// start starts kvepp, or restarts it after its end, at the same ports.
func (k *kvepp) start(t *testing.T) {
	t.Helper()
	p, err := process.Start(t.TempDir(), "kvepp", k.env, append(slices.Clone(k.argv), k.flags...)...)
	must(t, err)
	k.Process = p
}

// awaitEnd waits until kvepp has ended.
func (k *kvepp) awaitEnd(t *testing.T) {
	t.Helper()
	eventually(t, func() error {
		if !k.Ended() {
			return errors.New("kvepp still runs")
		}
		return nil
	})
}

// cpu returns the CPU time that kvepp has used.
func (k *kvepp) cpu(t *testing.T) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", k.Pid()))
	must(t, err)
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // from the third field on
	var ticks int                                                             // hundredths of a second
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		must(t, err)
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}

// extProc returns the address of the external processor.
func (k *kvepp) extProc() string { return net.JoinHostPort(k.host, strconv.Itoa(k.grpc)) }

// checkHealth returns nil if health checks report that kvepp is ready or, with false, that it runs and is not ready.
func (k *kvepp) checkHealth(ready bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := grpc.NewClient(
		k.extProc(),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true})),
	)
	if err != nil {
		return err
	}
	defer conn.Close()
	status, err := healthv1.NewHealthClient(conn).Check(
		ctx,
		&healthv1.HealthCheckRequest{Service: "envoy.service.ext_proc.v3.ExternalProcessor"},
		grpc.WaitForReady(true), // a kvepp that has just started may not listen yet
	)
	if err != nil {
		return err
	}
	if now := status.Status == healthv1.HealthCheckResponse_SERVING; now != ready {
		return fmt.Errorf("kvepp is ready: %v", now)
	}
	return nil
}

// awaitReady waits until health checks report that kvepp is ready.
func (k *kvepp) awaitReady(t *testing.T) {
	t.Helper()
	eventually(t, func() error {
		if k.Ended() {
			t.Fatal("kvepp has ended")
		}
		return k.checkHealth(true)
	})
}

// awaitLog waits until kvepp has logged a text.
func (k *kvepp) awaitLog(t *testing.T, text string) {
	t.Helper()
	eventually(t, func() error {
		log, err := os.ReadFile(k.Log)
		if err == nil && !strings.Contains(string(log), text) {
			err = fmt.Errorf("kvepp has not logged %q", text)
		}
		return err
	})
}

// metrics reads kvepp's metrics: name{label="value",...} -> value.
func (k *kvepp) metrics() (map[string]float64, error) {
	return stack.ReadMetrics(context.Background(), "http://"+net.JoinHostPort(k.host, strconv.Itoa(k.prom))+"/metrics")
}

// awaitMetric waits until a metric has a value.
func (k *kvepp) awaitMetric(t *testing.T, name string, value float64) {
	t.Helper()
	eventually(t, func() error {
		m, err := k.metrics()
		if err == nil && m[name] != value {
			err = fmt.Errorf("%s is %v, not %v", name, m[name], value)
		}
		return err
	})
}

// awaitWorkers waits until kvepp has this many workers.
func (k *kvepp) awaitWorkers(t *testing.T, workers int) {
	t.Helper()
	k.awaitMetric(t, "kvepp_workers", float64(workers))
}

// envoy starts an Envoy in front of kvepps and returns its URL. At least one kvepp must be ready. Envoy connects
// to any address that kvepp chooses.
func envoy(t *testing.T, before ...*kvepp) string {
	t.Helper()
	return startEnvoy(t, stack.Config{Manifest: "original-dst.yaml"}, before...)
}

// envoyWithEndpoints is like envoy, but Envoy's configuration has the endpoints, and Envoy reports which one served a
// request.
func envoyWithEndpoints(t *testing.T, endpoints []string, before ...*kvepp) string {
	t.Helper()
	return startEnvoy(t, stack.Config{Servers: endpoints}, before...)
}

func startEnvoy(t *testing.T, cfg stack.Config, before ...*kvepp) string {
	t.Helper()
	cfg.Root, cfg.Tools, cfg.Workers, cfg.Kill = root, os.Getenv("KVEPP_TOOLS"), -1, true
	for _, k := range before {
		cfg.ExtProc = append(cfg.ExtProc, k.extProc())
	}
	s, err := stack.Start(t.Context(), cfg)
	must(t, err)
	t.Cleanup(s.Close)
	return s.URL()
}

// engine is an HTTP server of the test in place of an engine in a pod.
type engine struct {
	pod  apiserver.Pod
	port int
	hold atomic.Pointer[chan struct{}] // if not nil, requests wait until it is closed
	held atomic.Int64                  // number of requests that wait for hold

	mu    sync.Mutex
	named []string // the header x-name of those that had one, in order of arrival
}

// addresses counts the loopback addresses that engines of this process have had.
var addresses atomic.Uint32

// newAddress returns a loopback address that no other engine of this process has, and almost certainly none of another
// process.
func newAddress() string {
	n := addresses.Add(1)
	return net.IPv4(127, byte(2+os.Getpid()%250), byte(n>>8), byte(n)).String()
}

// newEngine starts a server at a port of a new address, and a ready pod for it with the label app=APP.
func newEngine(t *testing.T, namespace, app, name string, port int) *engine {
	t.Helper()
	e := &engine{
		port: port,
		pod: apiserver.Pod{
			Namespace: namespace,
			Name:      name,
			IPs:       []string{newAddress()},
			Labels:    map[string]string{"app": app},
		},
	}
	e.listen(t, port)
	e.writePod(t)
	return e
}

// listen makes the engine listen at one more port.
func (e *engine) listen(t *testing.T, port int) {
	t.Helper()
	address := net.JoinHostPort(e.host(), strconv.Itoa(port))
	l, err := net.Listen("tcp", address)
	must(t, err)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if name := r.Header.Get("x-name"); name != "" {
			e.mu.Lock()
			e.named = append(e.named, name)
			e.mu.Unlock()
		}
		if hold := e.hold.Load(); hold != nil {
			e.held.Add(1)
			defer e.held.Add(-1)
			select {
			case <-*hold:
			case <-r.Context().Done():
			}
		}
		w.Header().Set("content-type", "application/json")
		w.Header().Set("x-served-by", address)
		w.Header().Set("x-rank", r.Header.Get("x-data-parallel-rank"))
		w.Header().Set("x-instance", r.Header.Get("x-dynamo-worker-instance-id"))
		w.Header().Set("x-for-rank-at", r.Header.Get("x-data-parallel-host-port"))
		w.Header().Set("x-replaced-by", r.Header.Get("x-llm-d-model-name-rewrite"))
		w.Header().Set("x-prefilled-at", r.Header.Get("x-prefiller-host-port"))
		w.Header().Set("x-destinations", r.Header.Get("x-gateway-destination-endpoint"))
		fmt.Fprint(
			w,
			`{"choices":[{"text":"ok","message":{"content":"ok"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`,
		)
	}))
	server.Listener.Close()
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
}

// stall makes the engine hold all further requests until release is called.
func (e *engine) stall() (release func()) {
	hold := make(chan struct{})
	e.hold.Store(&hold)
	return func() { close(hold) }
}

// awaitStalled waits until the engine holds a request.
func (e *engine) awaitStalled(t *testing.T) {
	t.Helper()
	eventually(t, func() error {
		if e.held.Load() == 0 {
			return errors.New("no request has come")
		}
		return nil
	})
}

// writePod writes the pod's current state to the cluster.
func (e *engine) writePod(t *testing.T) {
	t.Helper()
	must(t, cluster.RunPod(context.Background(), e.pod))
}

// host returns the address of the pod at which the engine listens: the last one.
func (e *engine) host() string { return e.pod.IPs[len(e.pod.IPs)-1] }

// address returns the host and port at which the engine listened first.
func (e *engine) address() string { return net.JoinHostPort(e.host(), strconv.Itoa(e.port)) }

// complete sends token ids through Envoy and returns the response.
func complete(t *testing.T, url string, prompt []int) *stack.Response {
	t.Helper()
	a, err := post(t.Context(), url, prompt)
	must(t, err)
	return a
}

func post(ctx context.Context, url string, prompt []int) (*stack.Response, error) {
	return stack.Post(
		ctx,
		http.DefaultClient,
		url+"/v1/completions",
		http.Header{},
		map[string]any{"model": stack.Model, "prompt": prompt, "max_tokens": 1},
	)
}

// prompt returns a prompt of this many blocks. No two prompts share a block.
func prompt(blocks int) []int {
	first := int(prompts.Add(1))
	tokens := make([]int, blocks*blockSize)
	for i := range tokens {
		tokens[i] = (first*31 + i*7) % 250
	}
	tokens[0], tokens[1] = first%250, first/250
	return tokens
}

var prompts atomic.Uint32

// awaitReached waits until requests reach each of the engines, and no other engine.
func awaitReached(t *testing.T, url string, engines ...*engine) {
	t.Helper()
	wanted := map[string]bool{}
	for _, e := range engines {
		wanted[e.address()] = true
	}
	eventually(t, func() error {
		seen := map[string]bool{}
		for range 8 * len(engines) { // ties are broken at random
			a := complete(t, url, prompt(1))
			if a.Status != http.StatusOK {
				return fmt.Errorf("status %d: %s", a.Status, a.Body)
			}
			by := a.Header.Get("x-served-by")
			if !wanted[by] {
				return fmt.Errorf("%s answered", by)
			}
			seen[by] = true
		}
		if len(seen) < len(wanted) {
			return fmt.Errorf("only %v answered", seen)
		}
		return nil
	})
}

// withoutFailures sends requests through Envoy while f runs, and fails the test if one of them fails.
func withoutFailures(t *testing.T, url string, f func()) {
	t.Helper()
	var (
		clients  sync.WaitGroup
		requests atomic.Int64
		failures sync.Map
		over     = make(chan struct{})
	)
	for range 4 {
		clients.Go(func() {
			tick := time.NewTicker(10 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-over:
					return
				case <-tick.C:
				}
				began := time.Now()
				a, err := post(context.Background(), url, prompt(1))
				if err == nil && a.Status != http.StatusOK {
					err = fmt.Errorf("status %d: %s", a.Status, a.Body)
				}
				if n := requests.Add(1); err != nil {
					failures.Store(n, fmt.Errorf("at %s: %w", began.Format("15:04:05.000"), err))
				}
			}
		})
	}
	f()
	close(over)
	clients.Wait()
	n := 0
	failures.Range(func(_, err any) bool {
		if n++; n <= 3 {
			t.Error(err)
		}
		return true
	})
	if all := requests.Load(); all == 0 || n > 0 {
		t.Errorf("%d of %d requests failed", n, all)
	} else {
		t.Logf("%d requests during the change, none failed", all)
	}
}

// awaitUnavailable waits until requests get the error that there is no endpoint.
func awaitUnavailable(t *testing.T, url string) {
	t.Helper()
	eventually(t, func() error {
		a := complete(t, url, prompt(1))
		if a.Status != http.StatusServiceUnavailable {
			return fmt.Errorf("status %d by %s", a.Status, a.Header.Get("x-served-by"))
		}
		var body struct{ Error struct{ Message string } }
		if err := json.Unmarshal([]byte(a.Body), &body); err != nil || body.Error.Message == "" {
			t.Fatalf("the error does not have OpenAI's shape: %q", a.Body)
		}
		return nil
	})
}

// inferencePool returns the manifest of a pool whose pods have app=APP.
func inferencePool(name, app string, ports ...int) string {
	var list []string
	for _, p := range ports {
		list = append(list, fmt.Sprintf("{number: %d}", p))
	}
	return fmt.Sprintf(`
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: %s}
spec:
  selector: {matchLabels: {app: %s}}
  targetPorts: [%s]
  endpointPickerRef: {name: kvepp, port: {number: 9002}}
`, name, app, strings.Join(list, ", "))
}

// freePorts returns n consecutive ports at which engines can listen.
func freePorts(t *testing.T, n int) int {
	t.Helper()
	first, err := process.Ports(n)
	must(t, err)
	return first
}
