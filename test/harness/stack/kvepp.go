package stack

import (
	"cmp"
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

// WriteEndpoints replaces the endpoints file by a rename, as an operator's tool would. With Config.Prefill the file
// refers to all instances in discovery.
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

// ReplaceEndpoints replaces the text of the endpoints file.
func (s *Stack) ReplaceEndpoints(text string) error {
	next := s.EndpointsFile() + ".next"
	if err := os.WriteFile(next, []byte(text), 0o644); err != nil {
		return err
	}
	return os.Rename(next, s.EndpointsFile())
}

// StartKvepp starts kvepp and waits until it serves. It writes the endpoints file if there is none.
func (s *Stack) StartKvepp(ctx context.Context) (err error) {
	if _, missing := os.Stat(s.EndpointsFile()); missing != nil {
		if err := s.WriteEndpoints(s.Workers[:len(s.Workers)-s.cfg.Later]...); err != nil {
			return err
		}
	}
	first := &replica{grpc: s.grpc, health: s.health, prom: s.prom, admin: s.admin}
	if len(s.replicas) > 0 {
		first = s.replicas[0]
	}
	if s.kvepp, err = s.spawn("kvepp", s.cfg.KveppEnv, s.kveppArgs(first)...); err != nil {
		return err
	}
	return s.up(ctx, "kvepp", func() error { _, err := s.Metrics(ctx); return err }, s.kvepp)
}

// kveppArgs returns the command line of a kvepp.
func (s *Stack) kveppArgs(r *replica) []string {
	program := []string{filepath.Join(s.cfg.Root, "bin/kvepp"), cmp.Or(s.cfg.Command, "serve")}
	return slices.Concat(program, s.EndpointFlags(),
		[]string{"--bind-address", "127.0.0.1",
			"--grpc-port", strconv.Itoa(r.grpc), "--grpc-health-port", strconv.Itoa(r.health), "--metrics-port",
			strconv.Itoa(r.prom), "--admin-address", fmt.Sprintf("127.0.0.1:%d", r.admin), "--nats-server", s.natsURL(),
			"--decision-headers", "--log-level", "debug", "--drain-timeout", "5s", "--drain-delay", "0s"},
		s.sharing(r), s.cfg.KveppFlags)
}

// EndpointFlags returns the flags with which kvepp finds the workers and their model.
func (s *Stack) EndpointFlags() []string {
	flags := []string{"--endpoints", s.EndpointsFile(), "--dynamo-discovery", "file:" + s.discovery()}
	if slices.ContainsFunc(s.cfg.KveppFlags, func(f string) bool { return strings.HasPrefix(f, "--model=") }) {
		return flags // it names the models itself
	}
	return append(flags, "--model", Model+"="+s.cfg.KveppModel)
}

// announcing returns the number of workers that announce blocks: those that prefill.
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
		return serves(m, workers, subscriptions)
	}, s.kvepp)
}

// serves returns an error unless a kvepp with these metrics has so many workers and subscriptions.
func serves(m map[string]float64, workers, subscriptions int) error {
	if got, on := m["kvepp_workers"], m[`kvepp_subscriptions{state="connected"}`]; got != float64(workers) ||
		on != float64(subscriptions) {
		return fmt.Errorf("%v workers of %d, %v subscriptions connected of %d", got, workers, on, subscriptions)
	}
	return nil
}

// KillKvepp kills kvepp.
func (s *Stack) KillKvepp() { s.kvepp.Kill() }

// DrainKvepp sends SIGTERM to kvepp and waits until it has stopped.
func (s *Stack) DrainKvepp(ctx context.Context) error {
	s.kvepp.Signal(syscall.SIGTERM)
	return process.Until(ctx, func() error {
		if !s.kvepp.Ended() {
			return errors.New("kvepp has not stopped yet")
		}
		return nil
	})
}

// KveppPID returns kvepp's process id.
func (s *Stack) KveppPID() int { return s.kvepp.Pid() }

// KveppMemory returns kvepp's peak resident memory since its start, in bytes.
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

// Admin returns the URL of kvepp's admin address.
func (s *Stack) Admin() string { return fmt.Sprintf("http://127.0.0.1:%d", s.admin) }

// ExtProc returns the address of kvepp's external processor.
func (s *Stack) ExtProc() string { return fmt.Sprintf("127.0.0.1:%d", s.grpc) }

// HealthAddresses returns the addresses of kvepp's gRPC health checks: its own port without TLS, and the port of
// ext_proc, with TLS.
func (s *Stack) HealthAddresses() (plain, secure string) {
	return fmt.Sprintf("127.0.0.1:%d", s.health), fmt.Sprintf("127.0.0.1:%d", s.grpc)
}

// MetricsURL returns the URL of kvepp's metrics.
func (s *Stack) MetricsURL() string { return fmt.Sprintf("http://127.0.0.1:%d/metrics", s.prom) }

// Metrics reads kvepp's metrics.
func (s *Stack) Metrics(ctx context.Context) (map[string]float64, error) {
	return ReadMetrics(ctx, s.MetricsURL())
}

// Log returns kvepp's log.
func (s *Stack) Log() (string, error) {
	log, err := os.ReadFile(s.kvepp.Log)
	return string(log), err
}

// CountInFrontendLogs returns how often a text occurs in the logs of Dynamo's frontends.
func (s *Stack) CountInFrontendLogs(text string) (int, error) {
	count := 0
	seen := map[*process.Process]bool{}
	for _, w := range s.Workers {
		if w.frontend == nil || seen[w.frontend] {
			continue
		}
		seen[w.frontend] = true
		log, err := os.ReadFile(w.frontend.Log)
		if err != nil {
			return 0, err
		}
		count += strings.Count(string(log), text)
	}
	return count, nil
}
