package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// Names of peers, of -peer.
const (
	peerLLMD = "llm-d"
	peerGAIE = "gaie"
)

// peerSystems are the systems that -peer adds.
var peerSystems = map[string][]system{
	peerLLMD: {{name: "llm-d approx", peer: "approx"}, {name: "llm-d precise", peer: "precise"}},
	peerGAIE: {{name: "GAIE", peer: peerGAIE}, {name: "shadow GAIE", peer: peerGAIE, extra: true, shadow: true,
		flags: shadowFlags}},
}

// besidePeer are the other routers that play with a peer. With kvepp text Dynamo's frontends tokenize again, as with
// the peer.
var besidePeer = []string{baseline, "kvepp time", "kvepp text", "round-robin"}

// checkPeer checks that the peer's programs are there, and adds its systems.
func (o *options) checkPeer() error {
	if o.peer == "" {
		return nil
	}
	added := peerSystems[o.peer]
	if added == nil {
		return fmt.Errorf("-peer %q: must be %s or %s", o.peer, peerLLMD, peerGAIE)
	}
	if _, err := os.Stat(o.program); err != nil {
		if o.peer == peerLLMD {
			return fmt.Errorf("PEER=llm-d needs the program of llm-d's endpoint picker, and LLMD_EPP is %q. Copy "+
				"/app/epp out of its image (docker create IMAGE, docker cp CONTAINER:/app/epp .), or build ./cmd/epp "+
				"in a clone of llm-d's router, version 0.10; then run make quality PEER=llm-d LLMD_EPP=FILE", o.program)
		}
		return fmt.Errorf("-program: %w", err)
	}
	systems = append(systems, added...)
	if o.routers == "" {
		o.routers = strings.Join(besidePeer, ",")
		for _, sys := range added {
			if !sys.extra {
				o.routers += "," + sys.name
			}
		}
	}
	return nil
}

// peer is another endpoint picker in kvepp's place, in front of the same mockers. What it needs of engines and mockers
// do not have, it gets here: vLLM's gauges of each worker, made of the mocker's page and its frontend's; vLLM's topic
// on the mocker's events, at one port of each worker's address; vLLM's render requests, which return a prompt's tokens.
type peer struct {
	kind    string // of system.peer
	program string
	kube    string // Kubernetes' programs, for a picker that takes endpoints from there only
	blocks  int    // KV blocks of a worker

	stack   *stack.Stack
	process *process.Process
	close   []func()
	metrics string          // URL of its metrics
	scrapes []*atomic.Int64 // by worker
	events  []*atomic.Int64 // messages, by worker; nil: it takes none
}

// start is stack.Config.Picker.
func (p *peer) start(ctx context.Context, s *stack.Stack) (address string, err error) {
	p.stack = s
	ports, err := process.Ports(5) // gRPC, health, metrics; of each worker's address: its page, its events
	if err != nil {
		return "", err
	}
	page, events := ports+3, ports+4
	var endpoints strings.Builder
	endpoints.WriteString("endpoints:\n")
	for _, w := range s.Workers {
		host, port, err := net.SplitHostPort(w.Address)
		if err != nil {
			return "", err
		}
		if err := p.servePage(w, net.JoinHostPort(host, strconv.Itoa(page))); err != nil {
			return "", err
		}
		if p.kind == "precise" {
			if err := p.forward(w, fmt.Sprintf("tcp://%s:%d", host, events)); err != nil {
				return "", err
			}
		}
		fmt.Fprintf(&endpoints, "- {name: %s, address: %s, port: %q, labels: {metricsAddress: %s, metricsPort: %q}}\n",
			w.Name, host, port, host, strconv.Itoa(page))
	}
	args := []string{"--pool-name", "pool", "--pool-namespace", "default", "--grpc-port", strconv.Itoa(ports),
		"--grpc-health-port", strconv.Itoa(ports + 1), "--metrics-port", strconv.Itoa(ports + 2),
		"--metrics-endpoint-auth=false", "--tracing=false", "--v", "1", "--health-checking"}
	var env []string
	if p.kind == peerGAIE {
		args = append(args, "--model-server-metrics-port", strconv.Itoa(page))
		env, err = p.inCluster(ctx, ports)
	} else {
		args = append(args, "--enable-pprof=false", "--allow-experimental-plugins", "--config-file",
			filepath.Join(s.Folder(), "llm-d.yaml"))
		err = p.configure(endpoints.String(), events)
	}
	if err != nil {
		return "", err
	}
	if p.process, err = s.Spawn("peer", env, append([]string{p.program}, args...)...); err != nil {
		return "", err
	}
	p.close = append(p.close, p.process.Kill)
	p.metrics = fmt.Sprintf("http://127.0.0.1:%d/metrics", ports+2)
	return fmt.Sprintf("127.0.0.1:%d", ports), p.ready(ctx)
}

// stop ends the picker and what it got.
func (p *peer) stop() {
	for i := len(p.close); i > 0; i-- {
		p.close[i-1]()
	}
}

// ready waits until the picker has all workers and has read each worker's gauges twice, and thus not only at its start.
func (p *peer) ready(ctx context.Context) error {
	return process.Up(ctx, "the peer", func() error {
		m, err := stack.ReadMetrics(ctx, p.metrics)
		if err != nil {
			return err
		}
		if n := largest(m, "pool_ready_pods", "pool_ready_endpoints"); int(n) != len(p.stack.Workers) {
			return fmt.Errorf("the peer has %v of %d workers", n, len(p.stack.Workers))
		}
		for i, n := range p.scrapes {
			if n.Load() < 2 {
				return fmt.Errorf("the peer read the gauges of %s %d times", p.stack.Workers[i].Name, n.Load())
			}
		}
		return nil
	}, p.process)
}

// admissions is llm-d's counter of blocks that events brought into its index.
const admissions = "kvcache_index_admissions_total"

// check checks after the warm-up that the picker works as configured: its gauges are still read, events of each worker
// arrive and reach its index, and a prompt that was sent again hit a cache.
func (p *peer) check(ctx context.Context, floor float64) error {
	if floor == 0 {
		return errors.New("the peer sent no repeated prompt to the worker that has it")
	}
	before := make([]int64, len(p.scrapes))
	for i, n := range p.scrapes {
		before[i] = n.Load()
	}
	return process.Up(ctx, "the peer", func() error {
		for i, n := range p.scrapes {
			if n.Load() == before[i] {
				return fmt.Errorf("the peer reads the gauges of %s no more", p.stack.Workers[i].Name)
			}
		}
		for i, n := range p.events {
			if n.Load() == 0 {
				return fmt.Errorf("%s sent no events", p.stack.Workers[i].Name)
			}
		}
		if len(p.events) == 0 {
			return nil
		}
		m, err := stack.ReadMetrics(ctx, p.metrics)
		if err == nil && largest(m, admissions) == 0 {
			err = errors.New("events do not reach the peer's index: " + admissions + " is 0")
		}
		return err
	}, p.process)
}

// largest returns the largest value of the metrics whose names end with one of these.
func largest(m map[string]float64, names ...string) (most float64) {
	for metric, v := range m {
		name, _, _ := strings.Cut(metric, "{")
		for _, end := range names {
			if strings.HasSuffix(name, end) {
				most = max(most, v)
			}
		}
	}
	return most
}

// serve serves requests at an address; empty: a free one.
func (p *peer) serve(address string, h http.Handler) (url string, err error) {
	if address == "" {
		address = "127.0.0.1:0"
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: h}
	go server.Serve(listener) //nolint:errcheck // it ends when it is closed
	p.close = append(p.close, func() { server.Close() })
	return "http://" + listener.Addr().String(), nil
}

// pageAge is how long a page of gauges is served again: pickers ask for it up to 20 times a second, and each response
// reads two pages of Dynamo's, which would take more CPU than the pickers.
const pageAge = 200 * time.Millisecond

// servePage serves vLLM's gauges of a worker at an address.
func (p *peer) servePage(w *stack.Worker, address string) error {
	scrapes := new(atomic.Int64)
	p.scrapes = append(p.scrapes, scrapes)
	var mu sync.Mutex
	var page []byte
	var read time.Time
	_, err := p.serve(address, http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(read) > pageAge {
			now, err := p.gauges(r.Context(), w)
			if err != nil {
				http.Error(to, err.Error(), http.StatusBadGateway)
				return
			}
			page, read = now, time.Now()
		}
		scrapes.Add(1)
		to.Header().Set("content-type", "text/plain; version=0.0.4")
		to.Write(page) //nolint:errcheck // the picker asks again
	}))
	return err
}

// gauges returns a worker's page of vLLM's gauges.
func (p *peer) gauges(ctx context.Context, w *stack.Worker) ([]byte, error) {
	front, err := stack.ReadMetrics(ctx, "http://"+w.Address+"/metrics")
	if err != nil {
		return nil, err
	}
	own, err := stack.ReadMetrics(ctx, w.PageURL())
	if err != nil {
		return nil, err
	}
	waiting := largest(front, "dynamo_frontend_queued_requests")
	running := max(largest(front, "dynamo_frontend_inflight_requests")-waiting, 0)
	var page bytes.Buffer
	for _, g := range []struct {
		name  string
		value float64
	}{{"num_requests_waiting", waiting}, {"num_requests_running", running},
		{"kv_cache_usage_perc", largest(own, "gpu_cache_usage_perc")}} {
		fmt.Fprintf(&page, "# TYPE vllm:%s gauge\nvllm:%s{model_name=%q} %v\n", g.name, g.name, stack.Model, g.value)
	}
	fmt.Fprintf(&page, "# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"%d\","+
		"num_gpu_blocks=\"%d\"} 1\n", stack.BlockSize, p.blocks)
	return page.Bytes(), nil
}

// serveRender answers vLLM's render requests with the tokens of the mockers' model.
func (p *peer) serveRender() (url string, err error) {
	model, err := prompt.Load(p.stack.ModelFolder(), prompt.Options{})
	if err != nil {
		return "", err
	}
	return p.serve("", http.HandlerFunc(func(to http.ResponseWriter, r *http.Request) {
		path := strings.TrimSuffix(r.URL.Path, "/render")
		text, err := io.ReadAll(r.Body)
		var request *body.Request
		if err == nil {
			request, err = body.ParseRequest(path, text)
		}
		var prompts []prompt.Prompt
		if err == nil {
			prompts, err = model.Tokenize(r.Context(), request)
		}
		if err != nil || len(prompts) == 0 {
			http.Error(to, fmt.Sprint(err), http.StatusBadRequest)
			return
		}
		var answer any = map[string]any{"token_ids": prompts[0].IDs}
		if path == "/v1/completions" {
			answer = []any{answer}
		}
		to.Header().Set("content-type", "application/json")
		json.NewEncoder(to).Encode(answer) //nolint:errcheck // the picker falls back and the check finds it
	}))
}

// forward publishes a worker's events at an address, with the topic that vLLM has for llm-d. The mocker's events have a
// group_idx of 0 without a kv_cache_spec_kind. llm-d skips such events silently, so they lose their group.
func (p *peer) forward(w *stack.Worker, to string) error {
	sub, err := zmq.NewSocket(zmq.SUB)
	if err != nil {
		return err
	}
	pub, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		return err
	}
	if err := errors.Join(sub.SetRcvhwm(0), pub.SetSndhwm(0), sub.Connect(w.EventsURL()), sub.SetSubscribe(""),
		pub.Bind(to), pub.SetLinger(0), sub.SetRcvtimeo(200*time.Millisecond)); err != nil {
		return err
	}
	events := new(atomic.Int64)
	p.events = append(p.events, events)
	done, ended := make(chan struct{}), make(chan struct{})
	p.close = append(p.close, func() { close(done); <-ended })
	go func() {
		defer close(ended)
		defer sub.Close()
		defer pub.Close()
		for {
			select {
			case <-done:
				return
			default:
			}
			message, err := sub.RecvMessageBytes(0)
			if err != nil || len(message) < 2 {
				continue
			}
			frames := []any{"kv@" + w.Address + "@" + stack.Model}
			for _, frame := range message[1:] {
				frames = append(frames,
					bytes.ReplaceAll(frame, []byte("\xa9group_idx\x00"), []byte("\xa9group_idx\xc0")))
			}
			if _, err := pub.SendMessage(frames...); err == nil {
				events.Add(1)
			}
		}
	}()
	return nil
}

// inCluster starts an API server that has the workers as pods of a pool, and returns the picker's environment.
func (p *peer) inCluster(ctx context.Context, port int) (env []string, err error) {
	crds, err := filepath.Glob(filepath.Join(filepath.Dir(p.program), "crds", "*.yaml"))
	if err == nil && len(crds) == 0 {
		err = errors.New(filepath.Dir(p.program) + " has no crds/*.yaml: run this through make quality PEER=gaie")
	}
	if err != nil {
		return nil, err
	}
	cluster, err := apiserver.Start(ctx, apiserver.Config{Programs: p.kube})
	if err != nil {
		return nil, err
	}
	p.close = append(p.close, cluster.Close)
	for _, file := range crds {
		text, err := os.ReadFile(file)
		if err == nil {
			err = cluster.ApplyCRD(ctx, string(text))
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	_, upstream, err := net.SplitHostPort(p.stack.Workers[0].Address)
	if err != nil {
		return nil, err
	}
	if err := cluster.Apply(ctx, "default", fmt.Sprintf(`
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: pool}
spec:
  selector: {matchLabels: {app: engine}}
  targetPorts: [{number: %s}]
  endpointPickerRef: {name: picker, port: {number: %d}}
`, upstream, port)); err != nil {
		return nil, err
	}
	for _, w := range p.stack.Workers {
		host, _, err := net.SplitHostPort(w.Address)
		if err == nil {
			err = cluster.RunPod(ctx, apiserver.Pod{Name: w.Name, Labels: map[string]string{"app": "engine"},
				IPs: []string{host}})
		}
		if err != nil {
			return nil, err
		}
	}
	return []string{"KUBECONFIG=" + cluster.Kubeconfig}, nil
}

// configure writes the configuration of llm-d's picker, with endpoints from a file.
func (p *peer) configure(endpoints string, events int) error {
	file := filepath.Join(p.stack.Folder(), "llm-d-endpoints.yaml")
	text := strings.ReplaceAll(llmdConfigs[p.kind], "ENDPOINTS", file)
	if p.kind == "precise" {
		render, err := p.serveRender()
		if err != nil {
			return err
		}
		text = strings.NewReplacer("EVENTS", strconv.Itoa(events), "RENDER", render, "MODEL", stack.Model, "BLOCK",
			strconv.Itoa(stack.BlockSize)).Replace(text)
	}
	return errors.Join(os.WriteFile(file, []byte(endpoints), 0o600),
		os.WriteFile(filepath.Join(p.stack.Folder(), "llm-d.yaml"), []byte(text), 0o600))
}

// llmdConfigs are plugins and weights of llm-d 0.10, which we did not tune: "approx" those of its chart's default,
// "precise" those of its deploy/config/epp-precise-prefix-cache-config.yaml, without its filter for decode workers.
var llmdConfigs = map[string]string{
	"approx": `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: multicluster-file-discovery, name: file, parameters: {path: ENDPOINTS, watchFile: true}}
- {type: queue-scorer}
- {type: kv-cache-utilization-scorer}
- {type: prefix-cache-scorer}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
dataLayer:
  discovery: {pluginRef: file}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
`,
	"precise": `apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: multicluster-file-discovery, name: file, parameters: {path: ENDPOINTS, watchFile: true}}
- {type: token-producer, parameters: {modelName: MODEL, vllm: {url: "RENDER"}}}
- {type: endpoint-notification-source}
- {type: metrics-data-source}
- {type: core-metrics-extractor}
- {type: single-profile-handler}
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: BLOCK}
    indexerConfig: {kvBlockIndexConfig: {enableMetrics: true}}
    kvEventsConfig: {topicFilter: "kv@", discoverPods: true, podDiscoveryConfig: {socketPort: EVENTS}}
- {type: prefix-cache-scorer, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
- {type: kv-cache-utilization-scorer}
- {type: queue-scorer}
- {type: max-score-picker}
dataLayer:
  discovery: {pluginRef: file}
  sources:
  - {pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}
  - {pluginRef: endpoint-notification-source, extractors: [{pluginRef: precise-prefix-cache-producer}]}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 1}
  - {pluginRef: queue-scorer, weight: 1}
  - {pluginRef: max-score-picker}
`,
}
