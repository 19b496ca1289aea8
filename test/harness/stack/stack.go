// Package stack starts kvepp on loopback among the real programs it works with: Envoy in front of it, Dynamo's
// frontends in direct mode and Dynamo's mocker workers behind it.
//
// It owns the processes, their ports, configuration and logs. The end-to-end tests and `make run` share it. It does not
// imitate any of the programs. One goroutine may use a Stack at a time.
package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"kvepp/test/harness/process"
)

// Model is the name under which the workers serve the model.
const Model = "tiny"

// Config configures a Stack.
type Config struct {
	Root  string // the project's root
	Tools string // folder of Envoy and Dynamo; KVEPP_TOOLS, which test/tools/install.sh tools prints
	Dir   string // for logs, configurations and Dynamo's discovery; empty: a new temporary folder
	// EnvoyTools is a folder whose Envoy runs in place of that of Tools; empty: that of Tools.
	EnvoyTools string

	Workers int // mocker processes; 0: 4; -1: none
	// Addresses of the caller's own servers, which are in Envoy's configuration and the endpoints file beside the
	// workers.
	Servers []string
	Engines []*Engine // stand-ins for stock engines that the caller started, in the same places
	// How many of these workers only prefill; the others then only decode. They share a frontend, and announce blocks
	// on the event plane.
	Prefill int
	Model   string // folder of the model, from the root; empty: the byte-level one of test/models
	// Number of zones, to which the workers belong in turn. Blocks must not leave a zone on their way to decode
	// workers. 0: no zones.
	Zones  int
	Ranks  int // data-parallel ranks of each worker; 0: 1
	Blocks int // KV blocks of each rank; 0: 2048
	// SharedFrontend starts one frontend for all workers, which then share a Dynamo namespace, instead of one for each.
	// The endpoints file has their instance ids, and only the first one's block size: kvepp learns the others'.
	SharedFrontend bool
	// FrontendMode is the router mode of the workers' frontends; empty: direct. With round-robin, a worker with a
	// frontend of its own serves any request, as a stock engine does.
	FrontendMode string
	// FrontendArgs are further arguments of the workers' frontends.
	FrontendArgs []string
	// EventPlane is "zmq" or "nats" for workers that announce their blocks only on Dynamo's event plane and not on
	// engine sockets; "nats" starts a NATS server. Empty: engine sockets.
	EventPlane string
	// Pages is the number of workers, the first ones, with a metrics page of their own, which the endpoints file names.
	Pages int
	// RuntimeConfigs are, for StartFrontend, JSON objects that each model's mocker adds to runtime_config in its card;
	// "" adds nothing.
	RuntimeConfigs []string
	// Speedup of the mocked engine; 0 means 1, as fast as the modelled GPU.
	Speedup float64
	// Speeds are factors of Speedup, one for each worker in turn. nil: all workers are equal.
	Speeds []float64
	// DecodeSpeedup is a further speedup of decoding; 0 means 1.
	DecodeSpeedup float64

	// KveppModel is the model folder for kvepp; empty: Model.
	KveppModel string
	Command    string   // of kvepp; empty: serve
	KveppFlags []string // if they contain --model=..., KveppModel is not used
	KveppEnv   []string // NAME=VALUE
	// Endpoints, if not empty, is the text of the endpoints file in place of the generated one. Start then waits until
	// kvepp serves, and not until it is connected to workers.
	Endpoints string
	// Replicas is how many kvepps Envoy calls in turn; 0: 1. Methods about kvepp concern the first one, except for
	// Start and Close.
	Replicas int
	// Unshared makes these kvepps share nothing; otherwise they share bookings and sessions.
	Unshared bool
	// WithoutEnvoy makes Start start no Envoy.
	WithoutEnvoy bool
	// ExtProc are addresses of external processors that the caller starts itself. Envoy then calls a healthy one of
	// them, and the stack starts no kvepp. Empty: the stack's kvepp.
	ExtProc []string
	// Picker, if not nil, starts an external processor of the caller's when the workers serve, and returns its address.
	// Envoy then calls that one, and the stack starts no kvepp. As pods do, the workers' frontends then have addresses
	// of their own (127.0.0.11 and up) and the same port, and the workers have metrics pages. The caller ends the
	// processor.
	Picker func(context.Context, *Stack) (address string, err error)
	// Manifest is the first Envoy's manifest in manifests/envoy; empty: override-host.yaml.
	Manifest string
	// EditEnvoy, if not nil, changes each Envoy's whole configuration as the last step.
	EditEnvoy func(config any)
	// Certificates is a folder that replaces ManifestCertificates.
	Certificates string

	// Frontend is a router mode of Dynamo's frontend. One such frontend, with FrontendFlags, then routes to all workers
	// in place of Envoy and kvepp. Empty: Envoy and kvepp.
	Frontend      string
	FrontendFlags []string
	// Gateway puts an Envoy without an external processor in front of that frontend.
	Gateway bool
	// Later is the number of workers, the last ones, that do not run at first and are not in the endpoints file.
	// Restart and WriteEndpoints change that.
	Later int
	// Kill makes Close kill all processes, which is faster.
	Kill bool

	Progress func(format string, args ...any) // nil: silent
}

// errNotInstalled is the error for a Config without Tools.
var errNotInstalled = errors.New(
	"stack: Envoy and Dynamo are not installed: run this through make (make test, make run), " +
		"or set KVEPP_TOOLS to the output of test/tools/install.sh tools",
)

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
	replicas                  []*replica
	natsPort, natsPage        int
	Envoy                     *Envoy // the first
	envoys                    []*Envoy
	closing                   sync.Once
}

// setDefaults replaces the zero values that stand for a default.
func (cfg *Config) setDefaults() {
	if cfg.Workers == 0 {
		cfg.Workers = 4
	}
	cfg.Workers = max(cfg.Workers, 0)
	if cfg.Prefill > 0 {
		cfg.SharedFrontend, cfg.EventPlane = true, "zmq"
	}
	cfg.Ranks = cmp.Or(cfg.Ranks, 1)
	cfg.Replicas = max(cfg.Replicas, 1)
	cfg.Blocks = cmp.Or(cfg.Blocks, 2048)
	cfg.Speedup = cmp.Or(cfg.Speedup, 1)
	cfg.Model = cmp.Or(cfg.Model, "test/models/tiny-bytelevel")
	if !filepath.IsAbs(cfg.Model) {
		cfg.Model = filepath.Join(cfg.Root, cfg.Model)
	}
	cfg.KveppModel = cmp.Or(cfg.KveppModel, cfg.Model)
	cfg.Manifest = cmp.Or(cfg.Manifest, "override-host.yaml")
	if cfg.Progress == nil {
		cfg.Progress = func(string, ...any) {}
	}
}

// Start starts all programs and waits until they are ready. After an error no process is left.
func Start(ctx context.Context, cfg Config) (_ *Stack, err error) {
	if cfg.Tools == "" {
		return nil, errNotInstalled
	}
	cfg.setDefaults()
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
	running := s.Workers[:cfg.Workers-cfg.Later]
	if err := s.startWorkers(ctx, running); err != nil {
		return nil, err
	}
	if cfg.Frontend != "" {
		if err := s.startRouter(ctx, len(running)); err != nil {
			return nil, err
		}
		if cfg.Gateway {
			if err := s.startGateway(ctx); err != nil {
				return nil, err
			}
		}
		return s, nil
	}
	if err := s.startProxies(ctx); err != nil {
		return nil, err
	}
	if err := s.awaitReady(ctx, running); err != nil {
		return nil, err
	}
	return s, nil
}

// startWorkers starts NATS if the workers need it, and the mockers of these workers.
func (s *Stack) startWorkers(ctx context.Context, running []*Worker) (err error) {
	if s.cfg.EventPlane == "nats" {
		if err := s.startNATS(ctx); err != nil {
			return err
		}
	}
	s.cfg.Progress("starting %d mocker workers and their frontends", s.cfg.Workers)
	for _, w := range running {
		if err := w.startMocker(); err != nil {
			return err
		}
		if s.cfg.SharedFrontend { // one at a time: the new instance then is this worker's
			if w.instance, err = w.newInstance(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// startProxies starts the workers' frontends, kvepp and Envoy.
func (s *Stack) startProxies(ctx context.Context) (err error) {
	for _, w := range s.Workers {
		if err := w.startFrontend(); err != nil {
			return err
		}
	}
	if s.cfg.Picker != nil {
		for _, w := range s.Workers {
			if err := w.Ready(ctx); err != nil {
				return err
			}
		}
		address, err := s.cfg.Picker(ctx, s)
		if err != nil {
			return err
		}
		s.cfg.ExtProc = []string{address}
	}
	if len(s.cfg.ExtProc) == 0 {
		if err := s.StartKvepp(ctx); err != nil {
			return err
		}
		if err := s.startReplicas(ctx); err != nil {
			return err
		}
	}
	if !s.cfg.WithoutEnvoy {
		s.Envoy, err = s.StartEnvoy(ctx, s.cfg.Manifest, nil)
	}
	return err
}

// awaitReady waits until the workers serve, and until kvepp is subscribed to their events if it has the generated
// endpoints file.
func (s *Stack) awaitReady(ctx context.Context, running []*Worker) error {
	for _, w := range running {
		if err := w.Ready(ctx); err != nil {
			return err
		}
		s.cfg.Progress("%s is ready", w.Name)
	}
	if len(s.cfg.ExtProc) > 0 || s.cfg.Endpoints != "" {
		return nil
	}
	workers := len(running)*s.cfg.Ranks + len(s.cfg.Servers) + len(s.cfg.Engines)
	if err := s.settled(ctx, workers, (s.announcing()-s.cfg.Later)*s.cfg.Ranks); err != nil {
		return err
	}
	if err := s.replicasSettled(ctx, workers, (s.announcing()-s.cfg.Later)*s.cfg.Ranks); err != nil {
		return err
	}
	if s.Envoy == nil {
		s.cfg.Progress("kvepp is subscribed to all workers")
		return nil
	}
	s.cfg.Progress("kvepp is subscribed to all workers; Envoy listens at %s", s.Envoy.URL)
	return nil
}

// allocate assigns ports to all programs.
func (s *Stack) allocate() (err error) {
	take := func(n int) (first int) {
		if err == nil {
			first, err = process.Ports(n)
		}
		return first
	}
	s.grpc, s.health, s.prom, s.admin = take(1), take(1), take(1), take(1)
	s.natsPort, s.natsPage = take(1), take(1)
	s.replicas = make([]*replica, s.cfg.Replicas-1)
	for i := range s.replicas {
		s.replicas[i] = &replica{grpc: take(1), health: take(1), prom: take(1), admin: take(1), port: take(1)}
	}
	if len(s.replicas) > 0 {
		s.replicas = append([]*replica{{s.grpc, s.health, s.prom, s.admin, take(1), nil}}, s.replicas...)
	}
	sharedPort := take(1)
	for i := range s.cfg.Workers {
		w := &Worker{
			Name:      fmt.Sprintf("worker-%d", i),
			Namespace: fmt.Sprintf("w%d", i),
			component: "backend",
			stack:     s,
			speed:     s.cfg.Speedup,
			events:    take(s.cfg.Ranks),
			replay:    take(s.cfg.Ranks),
			port:      sharedPort,
		}
		if n := len(s.cfg.Speeds); n > 0 {
			w.speed *= s.cfg.Speeds[i%n]
		}
		if i < s.cfg.Pages || s.cfg.Picker != nil {
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
		} else if s.cfg.Picker == nil {
			w.port = take(1)
		}
		w.host = "127.0.0.1"
		if s.cfg.Picker != nil {
			w.host = fmt.Sprintf("127.0.0.%d", 11+i)
		}
		w.Address = net.JoinHostPort(w.host, strconv.Itoa(w.port))
		s.Workers = append(s.Workers, w)
	}
	return err
}

// dynamoEnv returns an environment that keeps Dynamo on loopback and in this stack's discovery.
func (s *Stack) dynamoEnv() []string {
	env := []string{"DYN_DISCOVERY_BACKEND=file", "DYN_FILE_KV=" + s.discovery(), "DYN_TCP_RPC_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1", "PYTHONHASHSEED=0",
		"HF_HUB_OFFLINE=1", "DYN_LOGGING_DISABLE_ANSI_COLORS=1"}
	if s.cfg.EventPlane != "" {
		env = append(env, "DYN_EVENT_PLANE="+s.cfg.EventPlane)
	}
	if s.nats != nil { // Dynamo's programs wait for this server, with any event plane
		env = append(env, "NATS_SERVER="+s.natsURL())
	}
	return env
}

// Discovery returns the folder of Dynamo's discovery.
func (s *Stack) Discovery() string { return s.discovery() }

func (s *Stack) discovery() string { return filepath.Join(s.dir, "discovery") }

func (s *Stack) python() string { return filepath.Join(s.cfg.Tools, "bin/python") }

// Close ends all processes. A folder that the caller named keeps its logs.
func (s *Stack) Close() {
	s.closing.Do(func() {
		var all []*process.Process
		all = append(all, s.kvepp, s.shared, s.nats)
		for _, r := range s.others() {
			all = append(all, r.process)
		}
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
