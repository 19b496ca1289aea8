// Package stack starts kvepp among the real programs it works with, on loopback: Envoy before it, Dynamo's frontends in
// direct mode and Dynamo's mocker workers behind it.
//
// It owns the processes, their ports, configuration and logs. The end-to-end tests and `make run` share it. It never
// pretends to be any of the programs.
package stack

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"kvepp/e2e/process"
)

// Model is the name under which the workers serve the model.
const Model = "tiny"

// Config says what to start.
type Config struct {
	Root  string // the project's root
	Tools string // the environment that `make tools` installed: KVEPP_TOOLS
	Dir   string // for logs, configurations and Dynamo's discovery; a new folder in the system's when empty

	Workers int      // mocker processes; 0: 4; -1: none
	Servers []string // addresses of servers of the caller's own, which Envoy and the endpoints file know beside the workers
	Prefill int      // of these, how many only prefill; the others then only decode. They share a frontend, and are heard on the event plane
	Model   string   // folder of the model, from the root; empty: the byte-level one of e2e/models
	Zones   int      // in which the workers are in turn, and which blocks on their way to decode workers must not leave; 0: no zones
	Ranks   int      // data-parallel ranks of each worker; 0: 1
	Blocks  int      // KV blocks of each rank; 0: 2048
	// SharedFrontend starts one frontend for all workers, which then share a Dynamo namespace, instead of one beside
	// each. The endpoints file names their instance ids, and the block size of the first alone: kvepp learns the others'.
	SharedFrontend bool
	// EventPlane is "zmq" or "nats" for workers that announce their blocks on Dynamo's event plane alone, not on sockets
	// of their engines; "nats" starts a NATS server. Empty: on the engines' sockets.
	EventPlane string
	// Pages is how many of the workers, the first ones, show metrics of their own, which the endpoints file names.
	Pages int
	// RuntimeConfigs are, for StartFrontend, JSON objects with what a model's mocker says in its card's runtime_config beside
	// what its flags make it say; "" for nothing.
	RuntimeConfigs []string
	// Speedup of the mocked engine; 0: 1, as fast as the GPU it models.
	Speedup float64
	// DecodeSpeedup is a further one of decoding alone; 0: 1.
	DecodeSpeedup float64

	// KveppModel is the folder that kvepp gets for the model; empty: Model.
	KveppModel string
	KveppFlags []string
	KveppEnv   []string // NAME=VALUE
	// ExtProc are addresses of external processors that the caller starts itself; Envoy then asks whichever is healthy, and the stack
	// starts no kvepp. Empty: its own.
	ExtProc []string
	// Manifest is that of the first Envoy, of manifests/envoy; empty: override-host.yaml.
	Manifest string
	// EditEnvoy, unless nil, changes each Envoy's whole configuration once all else is done to it.
	EditEnvoy func(config any)
	// Certificates is a folder that stands for the one in mtls.yaml.
	Certificates string

	// Frontend is a router mode of Dynamo's frontend: one such frontend, with FrontendFlags, then stands before all workers in
	// place of Envoy and kvepp. Empty: Envoy and kvepp.
	Frontend      string
	FrontendFlags []string
	// Later is how many of the workers, the last ones, are not running at first, and not in the endpoints file: Restart and
	// WriteEndpoints change that.
	Later int
	// Kill has Close end everything by force, which is quicker.
	Kill bool

	Progress func(format string, args ...any) // nil: silent
}

// BlockSize is the workers' KV block size in tokens.
const BlockSize = 16

// ManifestCertificates is the folder of Envoy's certificates in mtls.yaml.
const ManifestCertificates = "/etc/envoy/kvepp"

// Stack is a running set of programs.
type Stack struct {
	cfg  Config
	dir  string
	temp bool

	Workers []*Worker
	shared  *process.Process
	nats    *process.Process

	kvepp                     *process.Process
	grpc, health, prom, admin int // kvepp's ports
	natsPort                  int
	Envoy                     *Envoy // the first, of override-host.yaml
	envoys                    []*Envoy
	closing                   sync.Once
}

// Envoy is a running Envoy before kvepp.
type Envoy struct {
	URL string // where clients send requests

	stack         *Stack
	process       *process.Process
	listen, admin int // ports
}

// Worker is one mocker with, unless the frontend is shared, a frontend beside it.
type Worker struct {
	Name      string
	Namespace string // Dynamo's
	Address   string // of its frontend
	Zone      string // of the cluster; empty: none is known

	stack          *Stack
	component      string // Dynamo's
	instance       uint64 // with a shared frontend: its id
	bootstrap      int    // of a prefill worker: where decode workers fetch blocks
	events, replay int
	page           int // port of its own metrics; 0: it shows none
	port           int
	mocker         *process.Process
	frontend       *process.Process
}

// Start starts everything and waits until it is ready. On an error nothing is left running.
func Start(ctx context.Context, cfg Config) (_ *Stack, err error) {
	if cfg.Tools == "" {
		return nil, errors.New("stack: Envoy and Dynamo are not installed: run this through make (make test, make run), " +
			"or set KVEPP_TOOLS to what e2e/tools/install.sh tools prints")
	}
	if cfg.Workers == 0 {
		cfg.Workers = 4
	}
	cfg.Workers = max(cfg.Workers, 0)
	if cfg.Ranks == 0 {
		cfg.Ranks = 1
	}
	if cfg.Prefill > 0 {
		cfg.SharedFrontend, cfg.EventPlane = true, "zmq"
	}
	if cfg.Blocks == 0 {
		cfg.Blocks = 2048
	}
	if cfg.Speedup == 0 {
		cfg.Speedup = 1
	}
	if cfg.Model == "" {
		cfg.Model = "e2e/models/tiny-bytelevel"
	}
	if !filepath.IsAbs(cfg.Model) {
		cfg.Model = filepath.Join(cfg.Root, cfg.Model)
	}
	if cfg.KveppModel == "" {
		cfg.KveppModel = cfg.Model
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string, ...any) {}
	}
	s := &Stack{cfg: cfg, dir: cfg.Dir}
	if s.dir == "" {
		if s.dir, err = os.MkdirTemp("", "kvepp-stack-"); err != nil {
			return nil, err
		}
		s.temp = true
	}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()
	if err := s.allocate(); err != nil {
		return nil, err
	}
	if cfg.EventPlane == "nats" {
		if err := s.startNATS(ctx); err != nil {
			return nil, err
		}
	}
	cfg.Progress("starting %d mocker workers and their frontends", cfg.Workers)
	running := s.Workers[:cfg.Workers-cfg.Later]
	for _, w := range running {
		if err := w.startMocker(); err != nil {
			return nil, err
		}
		if cfg.SharedFrontend { // one after the other: the instance that is new is this worker's
			if w.instance, err = w.newInstance(ctx); err != nil {
				return nil, err
			}
		}
	}
	if cfg.Frontend != "" {
		if err := s.startRouter(ctx, len(running)); err != nil {
			return nil, err
		}
		return s, nil
	}
	for _, w := range s.Workers {
		if err := w.startFrontend(); err != nil {
			return nil, err
		}
	}
	if len(cfg.ExtProc) == 0 {
		if err := s.StartKvepp(ctx); err != nil {
			return nil, err
		}
	}
	if s.Envoy, err = s.StartEnvoy(ctx, cmp.Or(cfg.Manifest, "override-host.yaml"), nil); err != nil {
		return nil, err
	}
	for _, w := range running {
		if err := w.Ready(ctx); err != nil {
			return nil, err
		}
		cfg.Progress("%s is ready", w.Name)
	}
	if len(cfg.ExtProc) > 0 {
		return s, nil
	}
	if err := s.settled(ctx, len(running)*cfg.Ranks+len(cfg.Servers), (s.announcing()-cfg.Later)*cfg.Ranks); err != nil {
		return nil, err
	}
	cfg.Progress("kvepp is subscribed to all workers; Envoy listens at %s", s.Envoy.URL)
	return s, nil
}

// allocate gives every program its ports.
func (s *Stack) allocate() (err error) {
	taken := map[int]bool{}
	take := func(n int) (first int) { // n consecutive ports that no earlier call gave
		for clash := true; clash && err == nil; {
			clash = false
			if first, err = process.Ports(n); err != nil {
				return 0
			}
			for p := first; p < first+n; p++ {
				clash = clash || taken[p]
			}
		}
		for p := first; p < first+n; p++ {
			taken[p] = true
		}
		return first
	}
	s.grpc, s.health, s.prom, s.admin, s.natsPort = take(1), take(1), take(1), take(1), take(1)
	sharedPort := take(1)
	for i := range s.cfg.Workers {
		w := &Worker{Name: fmt.Sprintf("worker-%d", i), Namespace: fmt.Sprintf("w%d", i), component: "backend", stack: s,
			events: take(s.cfg.Ranks), replay: take(s.cfg.Ranks), port: sharedPort}
		if i < s.cfg.Pages {
			w.page = take(1)
		}
		if i < s.cfg.Prefill {
			w.Name, w.component, w.bootstrap = fmt.Sprintf("prefill-%d", i), "prefill", take(1)
		}
		if s.cfg.Zones > 0 {
			w.Zone = fmt.Sprintf("z%d", i%s.cfg.Zones)
		}
		if s.cfg.SharedFrontend || s.cfg.Frontend != "" {
			w.Namespace = "shared"
		} else {
			w.port = take(1)
		}
		w.Address = fmt.Sprintf("127.0.0.1:%d", w.port)
		s.Workers = append(s.Workers, w)
	}
	return err
}

// dynamoEnv keeps Dynamo on loopback and in this stack's discovery.
func (s *Stack) dynamoEnv() []string {
	env := []string{"DYN_DISCOVERY_BACKEND=file", "DYN_FILE_KV=" + s.discovery(), "DYN_TCP_RPC_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1", "PYTHONHASHSEED=0",
		"HF_HUB_OFFLINE=1", "DYN_LOGGING_DISABLE_ANSI_COLORS=1"}
	if s.cfg.EventPlane != "" {
		env = append(env, "DYN_EVENT_PLANE="+s.cfg.EventPlane)
	}
	if s.nats != nil { // Dynamo's programs wait for the server that this names, whatever their event plane
		env = append(env, "NATS_SERVER="+s.natsURL())
	}
	return env
}

func (s *Stack) natsURL() string { return fmt.Sprintf("nats://127.0.0.1:%d", s.natsPort) }

// startNATS starts the NATS server and waits until it listens.
func (s *Stack) startNATS(ctx context.Context) (err error) {
	s.nats, err = s.spawn("nats-server", nil, filepath.Join(s.cfg.Tools, "bin/nats-server"), "-a", "127.0.0.1", "-p", strconv.Itoa(s.natsPort))
	if err != nil {
		return err
	}
	return s.up(ctx, "the NATS server", func() error {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.natsURL(), "nats://"))
		if err == nil {
			conn.Close()
		}
		return err
	}, s.nats)
}

// RestartNATS ends the NATS server as a crash would, lets meanwhile run without it, and starts it again.
func (s *Stack) RestartNATS(ctx context.Context, meanwhile func()) error {
	s.nats.Kill()
	meanwhile()
	return s.startNATS(ctx)
}

func (s *Stack) discovery() string { return filepath.Join(s.dir, "discovery") }

func (s *Stack) python() string { return filepath.Join(s.cfg.Tools, "bin/python") }

func (w *Worker) startMocker() (err error) {
	s := w.stack
	args := []string{s.python(), "-m", "dynamo.mocker",
		"--model-path", s.cfg.Model, "--model-name", Model, "--endpoint", "dyn://" + w.Namespace + "." + w.component + ".generate",
		"--block-size", strconv.Itoa(BlockSize), "--num-gpu-blocks-override", strconv.Itoa(s.cfg.Blocks),
		"--speedup-ratio", strconv.FormatFloat(s.cfg.Speedup, 'f', -1, 64), "--data-parallel-size", strconv.Itoa(s.cfg.Ranks)}
	if s.cfg.EventPlane == "" {
		args = append(args, "--zmq-kv-events-ports", strconv.Itoa(w.events), "--zmq-replay-ports", strconv.Itoa(w.replay))
	}
	if s.cfg.DecodeSpeedup != 0 {
		args = append(args, "--decode-speedup-ratio", strconv.FormatFloat(s.cfg.DecodeSpeedup, 'f', -1, 64))
	}
	switch {
	case w.bootstrap != 0:
		args = append(args, "--disaggregation-mode", "prefill", "--bootstrap-ports", strconv.Itoa(w.bootstrap))
	case s.cfg.Prefill > 0:
		args = append(args, "--disaggregation-mode", "decode")
	}
	env := s.dynamoEnv()
	if w.page != 0 {
		env = append(env, fmt.Sprintf("DYN_SYSTEM_PORT=%d", w.page))
	}
	if w.Zone != "" {
		dir := filepath.Join(s.dir, w.Name+"-topology")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "zone"), []byte(w.Zone), 0o644); err != nil {
			return err
		}
		env = append(env, "DYN_TOPOLOGY_ENABLED=1", "DYN_TOPOLOGY_MOUNT_PATH="+dir, "DYN_KV_TRANSFER_DOMAIN=zone")
	}
	w.mocker, err = s.spawn(w.Name+"-mocker", env, args...)
	return err
}

func (w *Worker) startFrontend() (err error) {
	s := w.stack
	args := []string{s.python(), "-m", "dynamo.frontend", "--router-mode", "direct", "--http-host", "127.0.0.1",
		"--http-port", strconv.Itoa(w.port)}
	if s.cfg.SharedFrontend {
		if s.shared == nil {
			s.shared, err = s.spawn("frontend", s.dynamoEnv(), args...)
		}
		w.frontend = s.shared
		return err
	}
	w.frontend, err = s.spawn(w.Name+"-frontend", s.dynamoEnv(), append(args, "--namespace", w.Namespace)...)
	return err
}

// newInstance waits for an instance in discovery that no other worker has.
func (w *Worker) newInstance(ctx context.Context) (id uint64, err error) {
	return id, w.stack.up(ctx, w.Name, func() error {
		files, err := os.ReadDir(filepath.Join(w.stack.discovery(), "v1/instances"))
		if err != nil {
			return err
		}
		for _, f := range files {
			name, err := url.PathUnescape(f.Name())
			if err != nil {
				return err
			}
			hex, ok := strings.CutPrefix(name, w.Namespace+"/"+w.component+"/generate/")
			if !ok {
				continue
			}
			if id, err = strconv.ParseUint(hex, 16, 64); err != nil {
				return err
			}
			if !slices.ContainsFunc(w.stack.Workers, func(o *Worker) bool { return o.instance == id }) {
				return nil
			}
		}
		return errors.New("it is not in discovery yet")
	}, w.mocker)
}

// Ready waits until the worker's frontend serves the model and a request reaches the worker's own instance.
func (w *Worker) Ready(ctx context.Context) error {
	return w.stack.up(ctx, w.Name, func() error {
		var health struct {
			Instances []struct{ Namespace, Endpoint string }
		}
		if err := getJSON(ctx, "http://"+w.Address+"/health", &health); err != nil {
			return err
		}
		var models struct{ Data []struct{ ID string } }
		if err := getJSON(ctx, "http://"+w.Address+"/v1/models", &models); err != nil {
			return err
		}
		for _, in := range health.Instances {
			if in.Namespace == w.Namespace && in.Endpoint == "generate" && len(models.Data) > 0 {
				return nil
			}
		}
		return errors.New("its frontend does not list it yet")
	}, w.frontend, w.mocker)
}

// Kill ends the mocker as a crash would. Its frontend stays.
func (w *Worker) Kill() { w.mocker.Kill() }

// Stop ends the mocker in order: it leaves discovery before it goes.
func (w *Worker) Stop() { w.mocker.Stop() }

// Instance is the id of a worker behind a shared frontend.
func (w *Worker) Instance() string { return strconv.FormatUint(w.instance, 10) }

// Restart starts the mocker again, on the same ports; it gets a new instance id.
func (w *Worker) Restart() error { return w.startMocker() }

// Entry is the worker as the endpoints file names it.
func (w *Worker) Entry() string {
	entry := fmt.Sprintf("- name: %s\n  address: %s\n", w.Name, w.Address)
	if w.stack.cfg.EventPlane == "" {
		entry += fmt.Sprintf("  kvEvents: tcp://127.0.0.1:%d\n  kvReplay: tcp://127.0.0.1:%d\n", w.events, w.replay)
	}
	if w.page != 0 {
		entry += fmt.Sprintf("  metrics: http://127.0.0.1:%d/metrics\n", w.page)
	}
	if !w.stack.cfg.SharedFrontend {
		return entry + fmt.Sprintf("  dynamo: %s/backend/generate\n", w.Namespace)
	}
	entry += fmt.Sprintf("  instanceId: %d\n  dataParallelSize: %d\n", w.instance, w.stack.cfg.Ranks)
	if w == w.stack.Workers[0] {
		entry += fmt.Sprintf("  blockSize: %d\n", BlockSize)
	}
	return entry
}

// EndpointsFile is the file that kvepp reads.
func (s *Stack) EndpointsFile() string { return filepath.Join(s.dir, "endpoints.yaml") }

// WriteEndpoints replaces the endpoints file by a rename, as an operator's tool would. With Config.Prefill it names those that
// discovery has, whichever they are.
func (s *Stack) WriteEndpoints(workers ...*Worker) error {
	var b strings.Builder
	if b.WriteString("endpoints:\n"); len(workers)+len(s.cfg.Servers) == 0 {
		b.Reset()
		b.WriteString("endpoints: []\n")
	}
	for _, w := range workers {
		if s.cfg.Prefill == 0 {
			b.WriteString(w.Entry())
		}
	}
	for i, address := range s.cfg.Servers {
		fmt.Fprintf(&b, "- {name: server-%d, address: %q, model: %s, blockSize: %d}\n", i, address, Model, BlockSize)
	}
	if s.cfg.Prefill > 0 {
		fmt.Fprintf(&b, "- {name: prefill, role: prefill, dynamo: shared/prefill/generate, allInstances: true}\n"+
			"- {name: decode, address: %q, dynamo: shared/backend/generate, allInstances: true}\n", s.Workers[0].Address)
	}
	return s.ReplaceEndpoints(b.String())
}

// ReplaceEndpoints makes text the endpoints file.
func (s *Stack) ReplaceEndpoints(text string) error {
	next := s.EndpointsFile() + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(next, s.EndpointsFile())
}

// StartKvepp starts kvepp and waits until it serves. The endpoints file is written when there is none yet.
func (s *Stack) StartKvepp(ctx context.Context) (err error) {
	if _, missing := os.Stat(s.EndpointsFile()); missing != nil {
		if err := s.WriteEndpoints(s.Workers[:len(s.Workers)-s.cfg.Later]...); err != nil {
			return err
		}
	}
	args := append(append([]string{filepath.Join(s.cfg.Root, "bin/kvepp"), "serve"}, s.EndpointFlags()...), append([]string{"--bind-address", "127.0.0.1",
		"--grpc-port", strconv.Itoa(s.grpc), "--grpc-health-port", strconv.Itoa(s.health), "--metrics-port", strconv.Itoa(s.prom),
		"--admin-address", strings.TrimPrefix(s.Admin(), "http://"), "--nats-server", s.natsURL(), "--decision-headers", "--log-level", "debug", "--drain-timeout", "5s", "--drain-delay", "0s"}, s.cfg.KveppFlags...)...)
	if s.kvepp, err = s.spawn("kvepp", s.cfg.KveppEnv, args...); err != nil {
		return err
	}
	return s.up(ctx, "kvepp", func() error { _, err := s.Metrics(ctx); return err }, s.kvepp)
}

// EndpointFlags are those by which kvepp finds the workers and knows their model.
func (s *Stack) EndpointFlags() []string {
	return []string{"--endpoints", s.EndpointsFile(), "--dynamo-discovery", "file:" + s.discovery(), "--model", Model + "=" + s.cfg.KveppModel}
}

// Admin is the URL of kvepp's admin address.
func (s *Stack) Admin() string { return fmt.Sprintf("http://127.0.0.1:%d", s.admin) }

// ExtProc is the address of kvepp's external processor.
func (s *Stack) ExtProc() string { return fmt.Sprintf("127.0.0.1:%d", s.grpc) }

// KveppMemory is the most memory that kvepp has had resident so far, in bytes, since it started.
func (s *Stack) KveppMemory() (int, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", s.kvepp.Pid()))
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), "VmHWM:")
	line, _, _ := strings.Cut(after, "kB")
	n, err := strconv.Atoi(strings.TrimSpace(line))
	return n << 10, err
}

// KillKvepp ends kvepp as a crash would.
func (s *Stack) KillKvepp() { s.kvepp.Kill() }

// DrainKvepp asks kvepp to stop, and waits until it has.
func (s *Stack) DrainKvepp(ctx context.Context) error {
	s.kvepp.Signal(syscall.SIGTERM)
	return process.Until(ctx, func() error {
		if !s.kvepp.Ended() {
			return errors.New("kvepp has not stopped yet")
		}
		return nil
	})
}

// Settled waits until kvepp has n workers and is connected to the events of each.
func (s *Stack) Settled(ctx context.Context, n int) error { return s.settled(ctx, n, n) }

// announcing is how many workers' blocks kvepp wants to know: of those that prefill.
func (s *Stack) announcing() int {
	for _, flag := range s.cfg.KveppFlags {
		if mode, ok := strings.CutPrefix(flag, "--router-mode="); ok && mode != "kv" {
			return 0
		}
	}
	if s.cfg.Prefill > 0 {
		return s.cfg.Prefill
	}
	return len(s.Workers)
}

func (s *Stack) settled(ctx context.Context, workers, subscriptions int) error {
	return s.up(ctx, "kvepp to see all workers", func() error {
		m, err := s.Metrics(ctx)
		if err != nil {
			return err
		}
		if got, on := m["kvepp_workers"], m[`kvepp_subscriptions{state="connected"}`]; got != float64(workers) || on != float64(subscriptions) {
			return fmt.Errorf("%v workers of %d, %v subscriptions connected of %d", got, workers, on, subscriptions)
		}
		return nil
	}, s.kvepp)
}

// StartEnvoy starts an Envoy with one of manifests/envoy and waits until it has found kvepp healthy. The manifest is
// used with this stack's ports, what a person adapts by hand; edit, which may be nil, changes more.
func (s *Stack) StartEnvoy(ctx context.Context, manifest string, edit func(extProc map[string]any)) (*Envoy, error) {
	return s.StartEnvoyEdited(ctx, manifest, func(connections map[string]any) {
		if edit != nil {
			edit(At(connections, "http_filters", 0, "typed_config").(map[string]any))
		}
	})
}

// StartEnvoyEdited is StartEnvoy where edit changes anything of the HTTP connection manager.
func (s *Stack) StartEnvoyEdited(ctx context.Context, manifest string, edit func(connections map[string]any)) (*Envoy, error) {
	return s.StartEnvoyOf(ctx, manifest, func(config any) {
		edit(At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config").(map[string]any))
	})
}

// StartEnvoyOf is StartEnvoy where edit changes anything, before Config.EditEnvoy does.
func (s *Stack) StartEnvoyOf(ctx context.Context, manifest string, edit func(config any)) (*Envoy, error) {
	text, err := os.ReadFile(filepath.Join(s.cfg.Root, "manifests/envoy", manifest))
	if err != nil {
		return nil, err
	}
	text = bytes.ReplaceAll(text, []byte(ManifestCertificates), []byte(s.cfg.Certificates))
	e := &Envoy{stack: s}
	for _, port := range []*int{&e.listen, &e.admin} {
		if *port, err = process.Ports(1); err != nil {
			return nil, err
		}
	}
	e.URL = fmt.Sprintf("http://127.0.0.1:%d", e.listen)
	config, err := e.config(text, edit)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("envoy-%d", len(s.envoys))
	file := filepath.Join(s.dir, name+".json")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		return nil, err
	}
	// A base id is a name in shared memory that other Envoys on the machine may have.
	e.process, err = s.spawn(name, nil, filepath.Join(s.cfg.Tools, "bin/envoy"), "-c", file, "--use-dynamic-base-id",
		"--concurrency", "2", "--log-level", "warning")
	if err != nil {
		return nil, err
	}
	s.envoys = append(s.envoys, e)
	return e, s.up(ctx, "Envoy", func() error {
		if err := e.SeesKvepp(ctx, true); err != nil {
			return err
		}
		// It listens when all clusters were checked that it checks the health of.
		conn, err := net.Dial("tcp", strings.TrimPrefix(e.URL, "http://"))
		if err != nil {
			return err
		}
		return conn.Close()
	}, e.process)
}

func (e *Envoy) config(manifest []byte, edit func(config any)) ([]byte, error) {
	var c any
	if err := yaml.Unmarshal(manifest, &c); err != nil {
		return nil, err
	}
	address := func(port int) any {
		return map[string]any{"socket_address": map[string]any{"address": "127.0.0.1", "port_value": port}}
	}
	of := func(addresses []string) (endpoints []any, err error) {
		for _, a := range addresses {
			host, port, err := net.SplitHostPort(a)
			if err != nil {
				return nil, err
			}
			n, err := strconv.Atoi(port)
			if err != nil {
				return nil, err
			}
			socket := map[string]any{"address": host, "port_value": n}
			endpoints = append(endpoints, map[string]any{"endpoint": map[string]any{"address": map[string]any{"socket_address": socket}}})
		}
		return endpoints, nil
	}
	At(c, "admin").(map[string]any)["address"] = address(e.admin)
	listener := At(c, "static_resources", "listeners", 0).(map[string]any)
	listener["address"] = address(e.listen)
	for _, cluster := range At(c, "static_resources", "clusters").([]any) {
		var to []any
		switch At(cluster, "name") {
		case "kvepp":
			processors, err := of(e.stack.extProc())
			if err != nil {
				return nil, err
			}
			to = processors
		case "pool":
			if At(cluster, "type") == "ORIGINAL_DST" {
				continue
			}
			seen := map[int]bool{}
			for _, w := range e.stack.Workers {
				if !seen[w.port] {
					to = append(to, map[string]any{"endpoint": map[string]any{"address": address(w.port)}})
				}
				seen[w.port] = true
			}
			servers, err := of(e.stack.cfg.Servers)
			if err != nil {
				return nil, err
			}
			to = append(to, servers...)
		default: // others are the caller's to edit
			continue
		}
		At(cluster, "load_assignment", "endpoints", 0).(map[string]any)["lb_endpoints"] = to
	}
	edit(c)
	if e.stack.cfg.EditEnvoy != nil {
		e.stack.cfg.EditEnvoy(c)
	}
	return json.Marshal(c)
}

// At walks down a decoded document. A path that is not there is a nil, which the caller's assertion reports.
func At(v any, path ...any) any {
	for _, step := range path {
		switch k := step.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[k]
		case int:
			l, _ := v.([]any)
			if k >= len(l) {
				return nil
			}
			v = l[k]
		}
	}
	return v
}

// extProc are the external processors that Envoys ask.
func (s *Stack) extProc() []string {
	if len(s.cfg.ExtProc) > 0 {
		return s.cfg.ExtProc
	}
	return []string{s.ExtProc()}
}

// SeesKvepp says whether Envoy's health check of kvepp has the given outcome; nil when it has. Of several kvepps one that is healthy
// is enough.
func (e *Envoy) SeesKvepp(ctx context.Context, healthy bool) error {
	var clusters struct {
		Statuses []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Health map[string]any `json:"health_status"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	if err := getJSON(ctx, fmt.Sprintf("http://127.0.0.1:%d/clusters?format=json", e.admin), &clusters); err != nil {
		return err
	}
	for _, c := range clusters.Statuses {
		if c.Name != "kvepp" || len(c.Hosts) == 0 {
			continue
		}
		failed := true
		for _, h := range c.Hosts {
			failed = failed && h.Health["failed_active_health_check"] == true
		}
		if failed == healthy {
			return fmt.Errorf("the health check of kvepp: failed is %v", failed)
		}
		return nil
	}
	return errors.New("kvepp is not among Envoy's clusters yet")
}

// HealthAddresses are where kvepp answers gRPC health checks: without TLS on its own port, with TLS beside ext_proc.
func (s *Stack) HealthAddresses() (plain, secure string) {
	return fmt.Sprintf("127.0.0.1:%d", s.health), fmt.Sprintf("127.0.0.1:%d", s.grpc)
}

// Metrics reads kvepp's metrics.
func (s *Stack) Metrics(ctx context.Context) (map[string]float64, error) {
	return ReadMetrics(ctx, s.MetricsURL())
}

// ReadMetrics reads a page of metrics: name{label="value",...} -> value; of a histogram, how much was observed.
func ReadMetrics(ctx context.Context, url string) (map[string]float64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		return nil, err
	}
	values := map[string]float64{}
	for name, family := range families {
		for _, m := range family.Metric {
			var labels []string
			for _, l := range m.Label {
				labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
			}
			key := name
			if len(labels) > 0 {
				key += "{" + strings.Join(labels, ",") + "}"
			}
			values[key] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return values, nil
}

func getJSON(ctx context.Context, url string, v any) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(v)
}

// Close ends everything that was started. The logs of a folder that the caller named stay.
func (s *Stack) Close() {
	s.closing.Do(func() {
		var all []*process.Process
		all = append(all, s.kvepp, s.shared, s.nats)
		for _, e := range s.envoys {
			all = append(all, e.process)
		}
		for _, w := range s.Workers {
			all = append(all, w.mocker)
			if w.frontend != s.shared {
				all = append(all, w.frontend)
			}
		}
		var wait sync.WaitGroup
		for _, p := range all {
			if s.cfg.Kill {
				wait.Go(p.Kill)
			} else {
				wait.Go(p.Stop)
			}
		}
		wait.Wait()
		if s.temp {
			os.RemoveAll(s.dir)
		}
	})
}

// MetricsURL is where kvepp's metrics are.
func (s *Stack) MetricsURL() string { return fmt.Sprintf("http://127.0.0.1:%d/metrics", s.prom) }

// Logs returns what kvepp has logged, and how often a text is in the logs of the frontends.
func (s *Stack) Logs(text string) (kvepp string, inFrontends int, err error) {
	seen := map[*process.Process]bool{}
	for _, w := range s.Workers {
		if w.frontend == nil || seen[w.frontend] {
			continue
		}
		seen[w.frontend] = true
		log, err := os.ReadFile(w.frontend.Log)
		if err != nil {
			return "", 0, err
		}
		inFrontends += strings.Count(string(log), text)
	}
	log, err := os.ReadFile(s.kvepp.Log)
	return string(log), inFrontends, err
}
