package main

import (
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/kvblock"
	"kvepp/pool"
)

// healthServices are the names that gateways and probes ask for. Source: GAIE's endpoint picker and its charts.
var healthServices = []string{
	"",
	liveness,
	"readiness",
	"envoy.service.ext_proc.v3.ExternalProcessor",
	"inference-extension",
}

const liveness = "liveness"

// announce sets what health checks answer: whether requests are wanted. That kvepp lives they say in any case.
func announce(checks *health.Server, wanted bool) {
	for _, name := range healthServices {
		status := healthv1.HealthCheckResponse_SERVING
		if !wanted && name != liveness {
			status = healthv1.HealthCheckResponse_NOT_SERVING
		}
		checks.SetServingStatus(name, status)
	}
}

// readiness is what must hold for requests to be wanted. Requests that come in spite of it are served all the same.
type readiness struct {
	mu      sync.Mutex
	unmet   map[string]bool // guarded by mu
	changed chan struct{}   // holds one when something did
}

func newReadiness() *readiness {
	return &readiness{unmet: map[string]bool{}, changed: make(chan struct{}, 1)}
}

// want adds something that must hold, and does not yet. Whoever knows says so with the function.
func (r *readiness) want(what string) func(holds bool) {
	set := func(holds bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if holds {
			delete(r.unmet, what)
		} else {
			r.unmet[what] = true
		}
		select {
		case r.changed <- struct{}{}:
		default:
		}
	}
	set(false)
	return set
}

// await adds something that holds from when done is closed.
func (r *readiness) await(what string, done <-chan struct{}) {
	set := r.want(what)
	select {
	case <-done:
		set(true)
	default:
		go func() {
			<-done
			set(true)
		}()
	}
}

// waits returns what does not hold, "" when everything does.
func (r *readiness) waits() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(slices.Sorted(maps.Keys(r.unmet)), ", ")
}

// firstWorkers waits for the pool to have so many endpoints that requests can be sent to. It does not look again after
// that.
//
// Source: dynamo-llm 1.6.1, kv_router, which waits for as many before it routes.
type firstWorkers struct {
	pool  *pool.Pool
	n     int
	once  sync.Once
	there chan struct{} // closed when they are
}

// awaitWorkers returns what waits for n endpoints of p, which must be told of workers that join.
func awaitWorkers(p *pool.Pool, n int) *firstWorkers {
	w := &firstWorkers{pool: p, n: n, there: make(chan struct{})}
	w.look()
	return w
}

func (w *firstWorkers) look() {
	select {
	case <-w.there:
		return // thousands of workers that join at once would each look at all of them
	default:
	}
	s := w.pool.Acquire()
	defer s.Release()
	found := 0
	var last *pool.Endpoint
	for i := range s.Workers { // the ranks of an endpoint follow one another
		if e := s.Workers[i].Endpoint; e != last && (e.Role == pool.Aggregated || e.Role == pool.Decode) {
			found++
			last = e
		}
	}
	if found >= w.n {
		w.once.Do(func() { close(w.there) })
	}
}

func (w *firstWorkers) WorkerJoined(pool.Worker) { w.look() }
func (*firstWorkers) WorkerLeft(kvblock.Worker)  {}
