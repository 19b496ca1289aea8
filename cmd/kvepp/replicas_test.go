package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/test/harness/process"
)

// replicaProcess is a kvepp with a port for replicas.
type replicaProcess struct {
	*running
	port int
}

// replicaToken writes a file for --replica-token-file.
func replicaToken(t *testing.T) string {
	t.Helper()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("secret\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	return token
}

// reserveReplicas reserves the ports of n replicas.
func reserveReplicas(t testing.TB, n int) (all []*replicaProcess, addresses string) {
	t.Helper()
	var list []string
	for range n {
		port, err := process.Ports(1)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, &replicaProcess{reserve(t), port})
		list = append(list, fmt.Sprintf("127.0.0.1:%d", port))
	}
	return all, strings.Join(list, ",")
}

// startReplica starts a process that has the peers.
func (r *replicaProcess) startReplica(peers string, flags ...string) {
	r.t.Helper()
	r.writeEndpoints(twoEndpoints)
	r.start(append([]string{"--replica-peers", peers, fmt.Sprintf("--replica-port=%d", r.port),
		"--drain-delay=0s", "--router-mode=least-loaded"}, flags...)...)
}

const twoEndpoints = "endpoints:\n- {name: a, address: '10.0.0.1:8000'}\n- {name: b, address: '10.0.0.2:8000'}\n"

// awaitMetric waits until a metric has a value.
func (r *replicaProcess) awaitMetric(what, name string, want int) {
	r.t.Helper()
	r.eventually(what, func() error { return r.checkMetric(name, want) })
}

// runRequests starts requests that stay active until cancel, and returns how many went to each endpoint.
func (r *replicaProcess) runRequests(n int) (of map[string]int, cancel func()) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r.t.Cleanup(cancel)
	of = map[string]int{}
	for range n {
		q, err := r.startRequest(ctx)
		if err != nil {
			r.t.Fatal(err)
		}
		of[q.endpoint]++
	}
	return of, cancel
}

const copied = "kvepp_replica_bookings"

// TestReplicas: real processes share their running requests: through a snapshot, a kill, a pause, a restart and a
// goodbye.
func TestReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	token := replicaToken(t)
	all, peers := reserveReplicas(t, 2)
	a, b := all[0], all[1]
	a.startReplica(peers, "--replica-token-file", token)
	a.awaitReady()
	first, cancelFirst := a.runRequests(5)
	b.startReplica(peers, "--replica-token-file", token)
	b.awaitReady()
	// b was ready only after it had a's requests.
	if err := b.checkMetric(copied, 5); err != nil {
		t.Error(err)
	}
	if err := b.checkMetric("kvepp_active_requests", 0); err != nil {
		t.Error("copies count as own requests: ", err)
	}
	// b's requests go where a's are not: each endpoint has as many of both together.
	second, cancelSecond := b.runRequests(5)
	for _, endpoint := range []string{"10.0.0.1:8000", "10.0.0.2:8000"} {
		if n := first[endpoint] + second[endpoint]; n != 5 {
			t.Errorf("%s has %d of 10 requests: %v and %v", endpoint, n, first, second)
		}
	}
	a.awaitMetric("a to have b's requests", copied, 5)
	for metric, want := range map[string]int{`kvepp_replica_load{kind="requests"}`: 5, "kvepp_replica_unpriced": 0,
		"kvepp_replica_copied_total": 5} {
		a.awaitMetric("what b's requests are here", metric, want) // a busy machine may be late for a moment
	}
	cancelFirst()
	b.awaitMetric("b to free what ended at a", copied, 0)

	// killed: the copies are freed
	_, cancel := a.runRequests(3)
	defer cancel()
	b.awaitMetric("b to have a's requests", copied, 3)
	killed := time.Now()
	a.Kill()
	b.awaitMetric("b to free a dead replica's requests", copied, 0)
	t.Logf("freed %v after the kill", time.Since(killed).Round(10*time.Millisecond))
	b.awaitMetric("the cause", `kvepp_replica_freed_total{cause="peer_dead"}`, 3)

	// restarted: it gets what runs
	a.startReplica(peers, "--replica-token-file", token)
	a.awaitReady()
	if err := a.checkMetric(copied, 5); err != nil {
		t.Error(err)
	}
	b.awaitMetric("b to read a again", `kvepp_replica_peers{state="live"}`, 1)

	// paused: as if it were dead, and back with a snapshot
	_, cancelThird := a.runRequests(2)
	b.awaitMetric("b to have a's requests", copied, 2)
	a.Signal(syscall.SIGSTOP)
	b.awaitMetric("b to free a silent replica's requests", copied, 0)
	cancelSecond()
	b.awaitMetric("b's requests to end", "kvepp_active_requests", 0)
	a.Signal(syscall.SIGCONT)
	b.awaitMetric("b to have a's requests again", copied, 2)
	a.awaitMetric("a to free what ended meanwhile", copied, 0)

	// ended: it says goodbye
	cancelThird()
	a.awaitMetric("a's requests to end", "kvepp_active_requests", 0)
	_, cancel = a.runRequests(1)
	b.awaitMetric("b to have a's request", copied, 1)
	a.Signal(syscall.SIGTERM)
	cancel()
	a.awaitExit("SIGTERM")
	b.awaitMetric("b to have no copies", copied, 0)
	b.awaitMetric("a is away", `kvepp_replica_peers{state="live"}`, 0)

	var state struct {
		Shares    bool
		Addresses []string
		Peers     []any
	}
	resp, err := http.Get(b.adminURL() + "/debug/replicas")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&state); err != nil || !state.Shares || len(state.Peers) != 0 ||
		len(state.Addresses) != 1 {
		t.Errorf("/debug/replicas: %+v %v", state, err)
	}
}

// TestStrangeReplicas: peers of another pool or with another token, and servers that are none, do not keep a replica
// from being ready, share nothing, and are logged once and counted.
func TestStrangeReplicas(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	folder := t.TempDir()
	for _, name := range []string{"right", "wrong"} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	nonsense, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer nonsense.Close()
	go func() {
		for {
			c, err := nonsense.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "SSH-2.0-nonsense\r\n")
			c.Close()
		}
	}()
	all, peers := reserveReplicas(t, 2)
	a, b := all[0], all[1]
	peers += "," + nonsense.Addr().String()
	a.startReplica(peers, "--replica-token-file", filepath.Join(folder, "right"))
	b.startReplica(peers, "--replica-token-file", filepath.Join(folder, "wrong"))
	a.awaitReady()
	b.awaitReady()
	_, cancel := a.runRequests(3)
	defer cancel()
	a.eventually("a to refuse b", func() error {
		if n, err := a.metric(`kvepp_replica_refused_total{reason="token"}`); err != nil || n == 0 {
			return fmt.Errorf("%v refused, %w", n, err)
		}
		return nil
	})
	var c checkOptions
	if err := parseWith(&c.options, checkFlags(&c), []string{"--endpoints", "none", "--replica-peers", peers,
		"--replica-token-file", filepath.Join(folder, "right")}, func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	a.eventually("kvepp check to say what each one is", func() error { // a busy machine misses the time of a handshake
		says := map[string]string{}
		for _, f := range c.replicaFindings(t.Context(), nil, quiet) {
			says[f.Worker] = string(f.State) + " " + f.Says
		}
		for who, want := range map[string]string{fmt.Sprintf("replica 127.0.0.1:%d", a.port): "ok ",
			fmt.Sprintf("replica 127.0.0.1:%d", b.port): "wrong shares nothing: token",
			"replica " + nonsense.Addr().String():       "wrong does not answer"} {
			if !strings.HasPrefix(says[who], want) {
				return fmt.Errorf("of %s: %q, want %q", who, says[who], want)
			}
		}
		return nil
	})
	for _, line := range []string{"share nothing; it tries again\" address=" + nonsense.Addr().String(),
		"reason=token"} {
		lines := func() int { return strings.Count(a.log(), line) }
		a.eventually("a line with "+line, func() error {
			if lines() == 0 {
				return errors.New("none")
			}
			return nil
		})
		failures, err := a.metric("kvepp_replica_connect_failures_total")
		if err != nil {
			t.Fatal(err)
		}
		a.eventually("a to fail again", func() error {
			if n, err := a.metric("kvepp_replica_connect_failures_total"); err != nil || n < failures+2 {
				return fmt.Errorf("%v failures, %w", n, err)
			}
			return nil
		})
		if n := lines(); n != 1 {
			t.Errorf("%d lines with %s", n, line)
		}
	}
	if err := b.checkMetric(copied, 0); err != nil {
		t.Error(err)
	}
}
