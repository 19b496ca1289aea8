package stack

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"kvepp/test/harness/process"
)

// replica is one of several kvepps: its ports and its process. The first one's process is Stack.kvepp.
type replica struct {
	grpc, health, prom, admin, port int
	process                         *process.Process
}

// others returns the replicas but the first.
func (s *Stack) others() []*replica { return s.replicas[min(1, len(s.replicas)):] }

// sharing returns the flags with which a replica shares bookings and sessions with all others.
func (s *Stack) sharing(r *replica) []string {
	if len(s.replicas) == 0 || s.cfg.Unshared {
		return nil
	}
	var all []string
	for _, r := range s.replicas {
		all = append(all, fmt.Sprintf("127.0.0.1:%d", r.port))
	}
	return []string{"--replica-port", strconv.Itoa(r.port), "--replica-peers", strings.Join(all, ",")}
}

// startReplicas starts all replicas but the first, and waits until they serve and, if they share, know each other.
func (s *Stack) startReplicas(ctx context.Context) (err error) {
	for i, r := range s.others() {
		if r.process, err = s.spawn(fmt.Sprintf("kvepp-%d", i+1), s.cfg.KveppEnv, s.kveppArgs(r)...); err != nil {
			return err
		}
	}
	for i, r := range s.replicas {
		if err := s.up(ctx, fmt.Sprintf("replica %d of kvepp", i), func() error {
			m, err := r.metrics(ctx)
			if live := m[`kvepp_replica_peers{state="live"}`]; err == nil && !s.cfg.Unshared &&
				live != float64(len(s.replicas)-1) {
				return fmt.Errorf("%v of %d peers are live", live, len(s.replicas)-1)
			}
			return err
		}, s.processOf(r)); err != nil {
			return err
		}
	}
	return nil
}

func (s *Stack) processOf(r *replica) *process.Process {
	if r == s.replicas[0] {
		return s.kvepp
	}
	return r.process
}

func (r *replica) metrics(ctx context.Context) (map[string]float64, error) {
	return ReadMetrics(ctx, fmt.Sprintf("http://127.0.0.1:%d/metrics", r.prom))
}

// replicasSettled waits until each replica but the first has so many workers and subscriptions.
func (s *Stack) replicasSettled(ctx context.Context, workers, subscriptions int) error {
	for i, r := range s.others() {
		if err := s.up(ctx, fmt.Sprintf("replica %d of kvepp to see all workers", i+1), func() error {
			m, err := r.metrics(ctx)
			if err != nil {
				return err
			}
			return serves(m, workers, subscriptions)
		}, r.process); err != nil {
			return err
		}
	}
	return nil
}

// Decided returns how many requests each replica has routed, and how many bookings of the others it has heard of. Both
// are empty if there is one kvepp.
func (s *Stack) Decided(ctx context.Context) (own, copied []int, err error) {
	for _, r := range s.replicas {
		m, err := r.metrics(ctx)
		if err != nil {
			return nil, nil, err
		}
		routed := 0.0
		for name, n := range m {
			if strings.HasPrefix(name, "kvepp_decisions_total{") {
				routed += n
			}
		}
		own = append(own, int(routed))
		copied = append(copied, int(m["kvepp_replica_copied_total"]))
	}
	return own, copied, nil
}

// Another is a kvepp beside those that Envoy calls. It knows the same workers, and shares nothing.
type Another struct {
	stack *Stack
	at    *replica
}

// StartAnother starts a further kvepp with the stack's flags and these, and waits until it serves. The caller kills it.
func (s *Stack) StartAnother(ctx context.Context, flags ...string) (a *Another, err error) {
	first, err := process.Ports(4)
	if err != nil {
		return nil, err
	}
	a = &Another{s, &replica{grpc: first, health: first + 1, prom: first + 2, admin: first + 3}}
	args := append(s.kveppArgs(a.at), flags...)
	if a.at.process, err = s.spawn(fmt.Sprintf("another-kvepp-%d", first), s.cfg.KveppEnv, args...); err != nil {
		return nil, err
	}
	return a, s.up(ctx, "another kvepp", func() error { _, err := a.Metrics(ctx); return err }, a.at.process)
}

// Metrics reads its metrics.
func (a *Another) Metrics(ctx context.Context) (map[string]float64, error) { return a.at.metrics(ctx) }

// Admin returns the URL of its admin address.
func (a *Another) Admin() string { return fmt.Sprintf("http://127.0.0.1:%d", a.at.admin) }

// Kill kills it.
func (a *Another) Kill() { a.at.process.Kill() }
