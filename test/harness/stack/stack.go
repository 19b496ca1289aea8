// Package stack starts kvepp among the real programs it works with, on loopback: Envoy before it, Dynamo's frontends in
// direct mode and Dynamo's mocker workers behind it.
//
// It owns the processes, their ports, configuration and logs. The end-to-end tests and `make run` share it. It never
// pretends to be any of the programs.
package stack

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"kvepp/test/harness/process"
)

// Model is the name under which the workers serve the model.
const Model = "tiny"

// Config says what to start.
type Config struct {
	Root  string // the project's root
	Tools string // what test/tools/install.sh tools installed: KVEPP_TOOLS
	Dir   string // for logs, configurations and Dynamo's discovery; a new folder in the system's when empty

	Workers int // mocker processes; 0: 4; -1: none
	// addresses of servers of the caller's own, which Envoy and the endpoints file know beside the workers
	Servers []string
	Engines []*Engine // stand-ins for stock engines that the caller started; likewise
	// of these, how many only prefill; the others then only decode. They share a frontend, and are heard on the event
	// plane
	Prefill int
	Model   string // folder of the model, from the root; empty: the byte-level one of test/models
	// in which the workers are in turn, and which blocks on their way to decode workers must not leave; 0: no zones
	Zones  int
	Ranks  int // data-parallel ranks of each worker; 0: 1
	Blocks int // KV blocks of each rank; 0: 2048
	// SharedFrontend starts one frontend for all workers, which then share a Dynamo namespace, instead of one beside
	// each. The endpoints file names their instance ids, and the block size of the first alone: kvepp learns the
	// others'.
	SharedFrontend bool
	// EventPlane is "zmq" or "nats" for workers that announce their blocks on Dynamo's event plane alone, not on
	// sockets of their engines; "nats" starts a NATS server. Empty: on the engines' sockets.
	EventPlane string
	// Pages is how many of the workers, the first ones, show metrics of their own, which the endpoints file names.
	Pages int
	// RuntimeConfigs are, for StartFrontend, JSON objects with what a model's mocker says in its card's runtime_config
	// beside what its flags make it say; "" for nothing.
	RuntimeConfigs []string
	// Speedup of the mocked engine; 0: 1, as fast as the GPU it models.
	Speedup float64
	// DecodeSpeedup is a further one of decoding alone; 0: 1.
	DecodeSpeedup float64

	// KveppModel is the folder that kvepp gets for the model; empty: Model.
	KveppModel string
	KveppFlags []string // with --model=... among them, KveppModel is not used
	KveppEnv   []string // NAME=VALUE
	// Endpoints is the text of the endpoints file in place of what the fields above make of it. Start then waits until
	// kvepp serves, and not until it is connected to workers.
	Endpoints string
	// WithoutEnvoy has Start start no Envoy.
	WithoutEnvoy bool
	// ExtProc are addresses of external processors that the caller starts itself; Envoy then asks whichever is healthy,
	// and the stack starts no kvepp. Empty: its own.
	ExtProc []string
	// Manifest is that of the first Envoy, of manifests/envoy; empty: override-host.yaml.
	Manifest string
	// EditEnvoy, unless nil, changes each Envoy's whole configuration once all else is done to it.
	EditEnvoy func(config any)
	// Certificates is a folder that stands for the one in mtls.yaml.
	Certificates string

	// Frontend is a router mode of Dynamo's frontend: one such frontend, with FrontendFlags, then stands before all
	// workers in place of Envoy and kvepp. Empty: Envoy and kvepp.
	Frontend      string
	FrontendFlags []string
	// Gateway puts an Envoy before that frontend all the same, which asks nobody.
	Gateway bool
	// Later is how many of the workers, the last ones, are not running at first, and not in the endpoints file: Restart
	// and WriteEndpoints change that.
	Later int
	// Kill has Close end everything by force, which is quicker.
	Kill bool

	Progress func(format string, args ...any) // nil: silent
}

// errNotInstalled refuses a Config without Tools.
var errNotInstalled = errors.New(
	"stack: Envoy and Dynamo are not installed: run this through make (make test, make run), " +
		"or set KVEPP_TOOLS to what test/tools/install.sh tools prints",
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
	natsPort                  int
	Envoy                     *Envoy // the first
	envoys                    []*Envoy
	closing                   sync.Once
}

// Start starts everything and waits until it is ready. On an error nothing is left running.
func Start(ctx context.Context, cfg Config) (_ *Stack, err error) {
	if cfg.Tools == "" {
		return nil, errNotInstalled
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
		cfg.Model = "test/models/tiny-bytelevel"
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
		if cfg.Gateway {
			if err := s.startGateway(ctx); err != nil {
				return nil, err
			}
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
	if !cfg.WithoutEnvoy {
		if s.Envoy, err = s.StartEnvoy(ctx, cmp.Or(cfg.Manifest, "override-host.yaml"), nil); err != nil {
			return nil, err
		}
	}
	for _, w := range running {
		if err := w.Ready(ctx); err != nil {
			return nil, err
		}
		cfg.Progress("%s is ready", w.Name)
	}
	if len(cfg.ExtProc) > 0 || cfg.Endpoints != "" {
		return s, nil
	}
	if err := s.settled(ctx, len(running)*cfg.Ranks+len(cfg.Servers)+len(cfg.Engines),
		(s.announcing()-cfg.Later)*cfg.Ranks); err != nil {
		return nil, err
	}
	cfg.Progress("kvepp is subscribed to all workers; Envoy listens at %s", s.Envoy.URL)
	return s, nil
}

// allocate gives every program its ports.
func (s *Stack) allocate() (err error) {
	take := func(n int) (first int) {
		if err == nil {
			first, err = process.Ports(n)
		}
		return first
	}
	s.grpc, s.health, s.prom, s.admin, s.natsPort = take(1), take(1), take(1), take(1), take(1)
	sharedPort := take(1)
	for i := range s.cfg.Workers {
		w := &Worker{
			Name:      fmt.Sprintf("worker-%d", i),
			Namespace: fmt.Sprintf("w%d", i),
			component: "backend",
			stack:     s,
			events:    take(s.cfg.Ranks),
			replay:    take(s.cfg.Ranks),
			port:      sharedPort,
		}
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

func (s *Stack) discovery() string { return filepath.Join(s.dir, "discovery") }

func (s *Stack) python() string { return filepath.Join(s.cfg.Tools, "bin/python") }

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
