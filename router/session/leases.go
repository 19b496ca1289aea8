package session

import (
	"container/list"
	"sync"
)

// Leases keeps the leases of named reservations, for callers whose requests do not hold their own. The zero value is
// ready. It is safe for concurrent use.
type Leases struct {
	mu     sync.Mutex               // guards all below
	byName map[string]*list.Element // of order
	order  list.List                // of *namedLease, the oldest first
}

type namedLease struct {
	name string
	Lease
}

// Add keeps the lease of a reservation. It releases the lease of an earlier reservation of that name, which has
// expired.
func (l *Leases) Add(name string, lease Lease) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byName[name]; e != nil {
		l.remove(e)
	}
	if l.byName == nil {
		l.byName = map[string]*list.Element{}
	}
	l.byName[name] = l.order.PushBack(&namedLease{name, lease})
}

// Release ends the lease of a reservation, if it has one.
func (l *Leases) Release(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.byName[name]; e != nil {
		l.remove(e)
	}
}

// Sweep ends the leases of reservations that are not active any more. Reservations expire in the order in which they
// were made, so it stops at the first active one.
func (l *Leases) Sweep(active func(name string) bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for e := l.order.Front(); e != nil; e = l.order.Front() {
		if active(e.Value.(*namedLease).name) {
			return
		}
		l.remove(e)
	}
}

// remove ends a lease. The caller holds l.mu.
func (l *Leases) remove(e *list.Element) {
	n := l.order.Remove(e).(*namedLease)
	delete(l.byName, n.name)
	n.Lease.Release(false)
}

// Len returns how many leases are kept.
func (l *Leases) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.order.Len()
}
