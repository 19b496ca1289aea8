package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"kvepp/test/harness/process"
)

// EndpointsFile is the file that kvepp reads.
func (s *Stack) EndpointsFile() string { return filepath.Join(s.dir, "endpoints.yaml") }

// WriteEndpoints replaces the endpoints file by a rename, as an operator's tool would. With Config.Prefill it names
// those that discovery has, whichever they are.
func (s *Stack) WriteEndpoints(workers ...*Worker) error {
	if s.cfg.Endpoints != "" {
		return s.ReplaceEndpoints(s.cfg.Endpoints)
	}
	var b strings.Builder
	if b.WriteString("endpoints:\n"); len(workers)+len(s.cfg.Servers)+len(s.cfg.Engines) == 0 {
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
	for _, e := range s.cfg.Engines {
		b.WriteString(e.Entry())
	}
	if s.cfg.Prefill > 0 {
		fmt.Fprintf(&b, "- {name: prefill, role: prefill, dynamo: shared/prefill/generate, allInstances: true}\n"+
			"- {name: decode, address: %q, dynamo: shared/backend/generate, allInstances: true}\n",
			s.Workers[0].Address)
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
	args := append(
		append([]string{filepath.Join(s.cfg.Root, "bin/kvepp"), "serve"}, s.EndpointFlags()...),
		append([]string{"--bind-address", "127.0.0.1",
			"--grpc-port", strconv.Itoa(s.grpc), "--grpc-health-port", strconv.Itoa(s.health), "--metrics-port",
			strconv.Itoa(s.prom),
			"--admin-address", strings.TrimPrefix(s.Admin(), "http://"), "--nats-server", s.natsURL(),
			"--decision-headers", "--log-level", "debug", "--drain-timeout", "5s", "--drain-delay", "0s"},
			s.cfg.KveppFlags...)...)
	if s.kvepp, err = s.spawn("kvepp", s.cfg.KveppEnv, args...); err != nil {
		return err
	}
	return s.up(ctx, "kvepp", func() error { _, err := s.Metrics(ctx); return err }, s.kvepp)
}

// EndpointFlags are those by which kvepp finds the workers and knows their model.
func (s *Stack) EndpointFlags() []string {
	flags := []string{"--endpoints", s.EndpointsFile(), "--dynamo-discovery", "file:" + s.discovery()}
	if slices.ContainsFunc(s.cfg.KveppFlags, func(f string) bool { return strings.HasPrefix(f, "--model=") }) {
		return flags // which names the models in its own way
	}
	return append(flags, "--model", Model+"="+s.cfg.KveppModel)
}

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
	return len(s.Workers) + len(s.cfg.Engines)
}

// Settled waits until kvepp has n workers and is connected to the events of each.
func (s *Stack) Settled(ctx context.Context, n int) error { return s.settled(ctx, n, n) }

func (s *Stack) settled(ctx context.Context, workers, subscriptions int) error {
	return s.up(ctx, "kvepp to see all workers", func() error {
		m, err := s.Metrics(ctx)
		if err != nil {
			return err
		}
		if got, on := m["kvepp_workers"], m[`kvepp_subscriptions{state="connected"}`]; got != float64(workers) ||
			on != float64(subscriptions) {
			return fmt.Errorf("%v workers of %d, %v subscriptions connected of %d", got, workers, on, subscriptions)
		}
		return nil
	}, s.kvepp)
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

// KveppPID is the number of kvepp's process.
func (s *Stack) KveppPID() int { return s.kvepp.Pid() }

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

// Admin is the URL of kvepp's admin address.
func (s *Stack) Admin() string { return fmt.Sprintf("http://127.0.0.1:%d", s.admin) }

// ExtProc is the address of kvepp's external processor.
func (s *Stack) ExtProc() string { return fmt.Sprintf("127.0.0.1:%d", s.grpc) }

// HealthAddresses are where kvepp answers gRPC health checks: without TLS on its own port, with TLS beside ext_proc.
func (s *Stack) HealthAddresses() (plain, secure string) {
	return fmt.Sprintf("127.0.0.1:%d", s.health), fmt.Sprintf("127.0.0.1:%d", s.grpc)
}

// MetricsURL is where kvepp's metrics are.
func (s *Stack) MetricsURL() string { return fmt.Sprintf("http://127.0.0.1:%d/metrics", s.prom) }

// Metrics reads kvepp's metrics.
func (s *Stack) Metrics(ctx context.Context) (map[string]float64, error) {
	return ReadMetrics(ctx, s.MetricsURL())
}

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
