package kube

import (
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// cuttableProxy is a TCP proxy to the API server whose connections a test can cut.
type cuttableProxy struct {
	kubeconfig string // for connections through the proxy

	mu   sync.Mutex
	open map[*wireConnection]bool
}

// wireConnection is one connection through the proxy.
type wireConnection struct {
	ends [2]net.Conn
	mu   sync.Mutex
	lost bool // bytes sent on it are dropped
}

// newCuttableProxy starts a proxy for the account of a kubeconfig.
func newCuttableProxy(t *testing.T, kubeconfig string) *cuttableProxy {
	t.Helper()
	config, err := clientcmd.LoadFromFile(kubeconfig)
	must(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	w := &cuttableProxy{kubeconfig: filepath.Join(t.TempDir(), "kubeconfig"), open: map[*wireConnection]bool{}}
	var server string
	for _, cluster := range config.Clusters {
		to, err := url.Parse(cluster.Server)
		must(t, err)
		server = to.Host
		cluster.Server = "https://" + listener.Addr().String()
	}
	must(t, clientcmd.WriteToFile(*config, w.kubeconfig))
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", server)
			if err != nil {
				from.Close()
				continue
			}
			s := &wireConnection{ends: [2]net.Conn{from, to}}
			w.mu.Lock()
			w.open[s] = true
			w.mu.Unlock()
			serving.Go(func() { w.copyBytes(s, from, to) })
			serving.Go(func() { w.copyBytes(s, to, from) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		w.cut()
		serving.Wait()
	})
	return w
}

// copyBytes copies bytes from one end of a connection to the other until either end closes.
func (w *cuttableProxy) copyBytes(s *wireConnection, from, to net.Conn) {
	defer func() {
		from.Close()
		to.Close()
		w.mu.Lock()
		delete(w.open, s)
		w.mu.Unlock()
	}()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		s.mu.Lock()
		lost := s.lost
		s.mu.Unlock()
		if lost {
			continue
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// cut ends all connections. New connections work.
func (w *cuttableProxy) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.open {
		s.ends[0].Close()
		s.ends[1].Close()
	}
}

// silence keeps all connections open and drops the bytes sent on them, like a firewall that forgot them. New
// connections work.
func (w *cuttableProxy) silence() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for s := range w.open {
		s.mu.Lock()
		s.lost = true
		s.mu.Unlock()
	}
}

// TestWatchCut: kvepp resumes a watch that ended, and detects a dead one.
func TestWatchCut(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "cut"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	w := newCuttableProxy(t, cluster.Kubeconfig)
	k := startKvepp(t, w.kubeconfig, "--pool-name", "engines", "--pool-namespace", ns, "--kv-events-port", "0")
	k.awaitReady(t)
	url := envoy(t, k)
	lists := func() float64 {
		m, err := k.metrics()
		must(t, err)
		return m[`kvepp_kube_updates_total{of="list"}`]
	}
	before := lists()
	flip := func(e *engine) {
		e.pod.NotReady = !e.pod.NotReady
		e.writePod(t)
		n := 0
		for _, e := range []*engine{a, b} {
			if !e.pod.NotReady {
				n++
			}
		}
		k.awaitWorkers(t, n)
	}
	for range 4 {
		flip(a) // a watch without an event in its first second is not resumed
		w.cut()
		flip(b)
	}
	if after := lists(); after != before {
		t.Errorf("%v lists of all pods before the connections were cut, %v after", before, after)
	}
	awaitReached(t, url, a, b)

	// Pings detect the lost bytes within 45 seconds.
	w.silence()
	a.pod.NotReady = true
	a.writePod(t)
	awaitReached(t, url, b)
}
