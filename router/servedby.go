package router

import (
	"net/netip"
	"strconv"

	"kvepp/pool"
)

// ServedBy.Outcome: which endpoint answered, and what became of the booking.
const (
	ServedByChosen  = "as_chosen" // the booking stays
	ServedByOther   = "moved"     // another endpoint of the pool: the booking moves there
	ServedByUnknown = "unknown"   // no endpoint of the pool: the booking ends
)

// ServedBy is the endpoint that answered a request, as the proxy reports it.
type ServedBy struct {
	Address string // host:port
	// Worker is endpoint and rank, such as "worker-0/0". Empty: the pool has no such endpoint, or it is the chosen one
	// and no record is kept.
	Worker  string
	Outcome string // ServedByChosen, ServedByOther or ServedByUnknown
}

// Reconcile moves the booking to the endpoint that answered the request, as the proxy reports it after retries and
// fallbacks. If the endpoint is not in the pool, the booking ends. Reconcile returns ServedBy.Outcome.
//
// address is host:port. attempts is how many endpoints the proxy says it tried; 0: it does not say. Only the goroutine
// that follows the response calls it.
func (r *Router) Reconcile(route *Route, address string, attempts int) string {
	outcome := r.reconcile(route, address, attempts)
	r.metrics.ServedBy(outcome)
	route.ServedBy.Address, route.ServedBy.Outcome = address, outcome
	if outcome == ServedByChosen && route.record != nil { // otherwise nothing reads Worker
		route.ServedBy.Worker = route.WorkerName()
	}
	r.records.setServedBy(route)
	return outcome
}

// Compares reports whether PredictedCachedTokens is about the worker that answers, so that it can be compared with what
// the response reports.
func (r *Route) Compares() bool { return !r.elsewhere }

// WorkerName returns the chosen worker's endpoint and rank for logs, headers and records, as [pool.Worker.String] does.
func (d *Decision) WorkerName() string {
	return d.Name + "/" + strconv.FormatUint(uint64(d.Rank), 10)
}

func (r *Router) reconcile(route *Route, address string, attempts int) string {
	if sameAddress(address, route.Address) {
		return ServedByChosen // if several workers share the address, the headers have named one
	}
	snapshot := r.pool.Acquire() // a snapshot keeps workers' numbers from being reused
	defer snapshot.Release()
	w := workerAt(snapshot, address, route.Rank)
	if _, err := netip.ParseAddrPort(route.Address); err != nil && w == nil {
		return ServedByUnknown // the chosen address is a host name, which may stand for this one
	}
	route.moved(snapshot, address, attempts)
	route.elsewhere = true
	if w == nil {
		route.Free()
		route.responses = nil
		route.promptComputed, route.health.endpoint, route.health.counts[0] = nil, nil, nil
		return ServedByUnknown
	}
	route.booking.MoveTo(w.Worker, w.BlockSize)
	if route.Prefill == nil {
		route.computes = *w
	}
	route.destination, route.instance, route.notes = w.Worker, w.InstanceID, notesFirstTokens(w)
	route.health.counts[0] = r.counts.of(w.Worker)
	route.ServedBy.Worker = w.String()
	route.health.endpoint = r.cfg.Eject.Of(w.Worker)
	return ServedByOther
}

// workerAt returns the worker at an address, if there are several the one of this rank; nil if there is none.
func workerAt(s *pool.Snapshot, address string, rank uint32) (found *pool.Worker) {
	for _, w := range workersAt(s, address) {
		if found == nil || w.Rank == rank {
			found = w
		}
	}
	return found
}

// workersAt returns the workers at an address that requests can be sent to.
func workersAt(s *pool.Snapshot, address string) (all []*pool.Worker) {
	for i := range s.Workers {
		w := &s.Workers[i]
		if w.Role != pool.Prefill && w.Role != pool.Encode && sameAddress(w.Address, address) {
			all = append(all, w)
		}
	}
	return all
}

// sameAddress compares two of host:port. An IPv6 address has several forms.
func sameAddress(a, b string) bool {
	if a == b {
		return true
	}
	x, errX := netip.ParseAddrPort(a)
	y, errY := netip.ParseAddrPort(b)
	return errX == nil && errY == nil && x == y
}
