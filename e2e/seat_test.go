package e2e

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"kvepp/test/harness/stack"
)

// seat is a kvepp in the place of llm-d's picker, behind Envoy, and the requests that a test sends to it.
type seat struct {
	*stack.Stack
	t       *testing.T
	running sync.WaitGroup

	mu    sync.Mutex
	ended []string // "name" of a response, "name: status reason" of a refusal, in this order
}

// startSeat starts it with a configuration of testdata/seat, and no worker.
func startSeat(t *testing.T, config string) *seat {
	file, err := filepath.Abs(filepath.Join("testdata/seat", config))
	if err != nil {
		t.Fatal(err)
	}
	s := &seat{t: t, Stack: start(t, stack.Config{Command: "epp", Workers: 1, Later: 1, Blocks: 16384,
		KveppFlags: []string{"--config-file", file, "--metrics-compat=all"}})}
	t.Cleanup(s.running.Wait)
	return s
}

// ready starts the worker, which kvepp does not know yet. join makes it known.
func (s *seat) ready() {
	s.t.Helper()
	if err := s.Workers[0].Restart(); err != nil {
		s.t.Fatal(err)
	}
	if err := s.Workers[0].Ready(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func (s *seat) join() {
	s.t.Helper()
	if err := s.WriteEndpoints(s.Workers[0]); err != nil {
		s.t.Fatal(err)
	}
	s.await("kvepp_workers", 1)
}

// send sends a request of so many tokens of output.
func (s *seat) send(ctx context.Context, name string, output int, header ...string) {
	ids := make([]int, 64)
	for i := range ids {
		ids[i] = 500 + (i*len(name)+int(name[len(name)-1]))%50
	}
	h := http.Header{}
	for i := 0; i < len(header); i += 2 {
		h.Set(header[i], header[i+1])
	}
	s.running.Go(func() {
		a, err := stack.Post(ctx, http.DefaultClient, s.Envoy.URL+"/v1/completions", h, map[string]any{
			"model": stack.Model, "prompt": ids, "max_tokens": output, "ignore_eos": true, "stream": true})
		if ctx.Err() != nil {
			return
		}
		if err == nil && a.Status != http.StatusOK {
			name += fmt.Sprintf(": %d %s", a.Status, a.Header.Get("x-llm-d-request-dropped-reason"))
		} else if err != nil {
			name += ": " + err.Error()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.ended = append(s.ended, name)
	})
}

// occupy sends n requests that run until their functions are called, and waits until all run.
func (s *seat) occupy(n, all int) (release []context.CancelFunc) {
	for i := range n {
		ctx, cancel := context.WithCancel(s.t.Context())
		release = append(release, cancel)
		s.send(ctx, fmt.Sprint("runs ", i), 20_000)
	}
	s.await("kvepp_active_requests", float64(all))
	return release
}

// await waits until a metric has a value.
func (s *seat) await(name string, want float64) {
	s.t.Helper()
	eventually(s.t, func() error {
		if got := metric(s.t, s.Stack, name); got != want {
			return fmt.Errorf("%s is %v, want %v", name, got, want)
		}
		return nil
	})
}

// want waits until these requests have ended, and checks their order.
func (s *seat) want(ended ...string) {
	s.t.Helper()
	eventually(s.t, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if got := strings.Join(s.ended, ", "); got != strings.Join(ended, ", ") {
			return fmt.Errorf("ended: %s; want %s", got, strings.Join(ended, ", "))
		}
		return nil
	})
}

const seatWaiting = `kvepp_queued_requests{policy_class="default"}`

// TestSeatDeadlines: with llm-d's flow control, requests above the gate wait, the earliest deadline first; the band
// refuses what is above its limit, and what waits for too long.
func TestSeatDeadlines(t *testing.T) {
	s := startSeat(t, "deadlines.yaml")
	s.ready()
	s.join()
	release := s.occupy(4, 4)
	for i, header := range [][]string{nil, {"x-llm-d-slo-ttft-ms", "60000"}, {"x-slo-ttft-ms", "20000"}} {
		s.send(t.Context(), []string{"none", "later", "soon"}[i], 1, header...)
		s.await(seatWaiting, float64(i+1))
	}
	s.send(t.Context(), "fourth", 1)
	s.want("fourth: 429 rejected-saturated")
	for _, name := range []string{"llm_d_epp_flow_control_queue_size", "llm_d_epp_flow_control_pool_saturation",
		"llm_d_epp_flow_control_requests_total"} {
		if !s.has(name) {
			t.Errorf("no metric %s", name)
		}
	}
	release[0]()
	s.want("fourth: 429 rejected-saturated", "soon", "later", "none")
	release = append(release, s.occupy(1, 4)...)
	s.send(t.Context(), "late", 1)
	s.await(seatWaiting, 1)
	s.want("fourth: 429 rejected-saturated", "soon", "later", "none", "late: 429 rejected-ttl-expired")
	for _, end := range release {
		end()
	}
}

// TestSeatTenants: tenants of a band with round-robin-fairness-policy take turns, each in the order of arrival.
func TestSeatTenants(t *testing.T) {
	s := startSeat(t, "tenants.yaml")
	s.ready()
	s.join()
	release := s.occupy(1, 1)
	for i, name := range []string{"a1", "a2", "a3", "b1", "c1", "b2"} {
		s.send(t.Context(), name, 1, "x-llm-d-inference-fairness-id", name[:1])
		s.await(seatWaiting, float64(i+1))
	}
	release[0]()
	s.want("a1", "b1", "c1", "a2", "b2", "a3")
}

// TestSeatFromZero: with an empty pool kvepp is ready and holds requests, until the first worker comes, its client
// leaves, or its time is over.
func TestSeatFromZero(t *testing.T) {
	s := startSeat(t, "from-zero.yaml")
	ctx, leave := context.WithCancel(t.Context())
	s.send(ctx, "leaves", 1)
	s.await("kvepp_held_requests", 1)
	leave()
	s.await("kvepp_held_requests", 0)
	s.send(t.Context(), "late", 1)
	s.await("kvepp_held_requests", 1)
	if !s.has("llm_d_epp_flow_control_queue_size") {
		t.Error("no metric llm_d_epp_flow_control_queue_size")
	}
	s.await(s.full("llm_d_epp_flow_control_pool_saturation"), 1)
	s.want("late: 503 rejected-no-endpoints")
	s.ready()
	s.send(t.Context(), "held", 1)
	s.await("kvepp_held_requests", 1)
	s.join()
	s.want("late: 503 rejected-no-endpoints", "held")
	s.await("kvepp_held_requests", 0)
}

// full returns the first series of a metric; empty: there is none.
func (s *seat) full(name string) string {
	all, err := s.Metrics(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	for series := range all {
		if series == name || strings.HasPrefix(series, name+"{") {
			return series
		}
	}
	return ""
}

func (s *seat) has(name string) bool { return s.full(name) != "" }
