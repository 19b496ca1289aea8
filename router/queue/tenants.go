package queue

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
)

// A class, or a band, is shared by its tenants: each is charged the tokens that its requests cost, and of those that
// have requests waiting, the least served goes next. A tenant without requests saves little up: when it comes back, it
// counts as served as the one that had the latest turn, less the cost of burst requests; a new one without that. So a
// tenant that sends less than its share may send some requests at once. The order EDF knows no tenants.

const (
	// maxTenants bounds how many tenants of a class are told apart. Further ones share some places.
	maxTenants    = 4096
	sharedTenants = 64
	sweepEvery    = 64 // further tenants

	// burst is how many requests of mean cost a tenant saves up. In a model of 16 workers, nine tenants beside one that
	// floods have 1.5 times the p90 TTFT that they have alone without it, and 1.2 times with 10 or more.
	burst = 10
	// meanOf is about how many turns the mean cost is of.
	meanOf = 64
)

// Tenant identifies a tenant in a class: a hash, so that no name can be guessed or be as long as a client likes, and
// the same in all replicas. 0: none.
type Tenant uint64

// SetTenant notes the name of who sent the request, if tenants share its class.
func (e *Entry) SetTenant(name string) {
	class := &e.Profile.Classes[e.Class]
	fair := class.Policy != EDF && !class.Rejects()
	if b := e.Profile.Bands; b != nil {
		fair = b.of(e.Priority).Fair
	}
	if e.Tenant = 0; fair && !e.MayNotWait {
		sum := sha256.Sum256(fmt.Appendf(nil, "%d %d %d %s%s%s", len(e.Line), len(class.Name), e.Priority, e.Line,
			class.Name, name))
		e.Tenant = Tenant(max(binary.LittleEndian.Uint64(sum[:]), sharedTenants+1))
	}
}

// ledger is what the tenants of a class or a band were served.
type ledger struct {
	tenants map[Tenant]*tenant // below sharedTenants: places that tenants share
	now     float64            // served of the tenant that had the latest turn, before it
	mean    float64            // cost of a request
	missed  int                // tenants beyond the bound
}

type tenant struct {
	*ledger
	served  float64 // tokens
	waiting int     // requests
}

// of returns a tenant.
func (l *ledger) of(id Tenant) *tenant {
	t := l.tenants[id]
	if t == nil && len(l.tenants) >= maxTenants {
		if l.missed++; l.missed%sweepEvery == 0 {
			l.sweep()
		}
		if len(l.tenants) >= maxTenants {
			id %= sharedTenants
			t = l.tenants[id]
		}
	}
	if t == nil {
		if l.tenants == nil {
			l.tenants = map[Tenant]*tenant{}
		}
		t = &tenant{ledger: l, served: l.now}
		l.tenants[id] = t
	}
	return t
}

// sweep forgets tenants that are as new ones.
func (l *ledger) sweep() {
	for id, t := range l.tenants {
		if t.waiting == 0 && t.served <= l.now {
			delete(l.tenants, id)
		}
	}
}

// enter notes that a request waits.
func (t *tenant) enter() {
	if t.waiting++; t.waiting == 1 && t.ledger != nil {
		t.served = max(t.served, t.now-burst*t.mean)
	}
}

// leave notes that a request does not wait any more. With its turn it is charged.
func (t *tenant) leave(cost int, taken bool) {
	if t.waiting--; taken && t.ledger != nil {
		t.now = max(t.now, t.served)
		t.mean -= t.mean / meanOf
		t.charge(cost)
	}
}

// charge charges tokens.
func (t *tenant) charge(tokens int) {
	t.served += float64(tokens)
	t.mean = max(t.mean+float64(tokens)/meanOf, 0)
}

// ledgerOf returns the ledger of a request's class or band.
func (q *Queue[T]) ledgerOf(r *Request) *ledger {
	if q.bands != nil {
		return &q.bands.load(q.byBand, r.Priority).ledger
	}
	return &q.classes[r.Class].ledger
}

// Charge charges a tenant for tokens beside those of its requests' turns, or gives some back. One that is not known has
// no request that it would hold back.
func (q *Queue[T]) Charge(id Tenant, tokens int) {
	charge := func(l *ledger) {
		if t := l.tenants[id]; t != nil {
			t.charge(tokens)
		}
	}
	for i := range q.classes {
		charge(&q.classes[i].ledger)
	}
	for _, band := range q.byBand {
		charge(&band.ledger)
	}
}

// Tenants returns how many tenants the queue knows.
func (q *Queue[T]) Tenants() (n int) {
	for i := range q.classes {
		n += len(q.classes[i].ledger.tenants)
	}
	for _, band := range q.byBand {
		n += len(band.tenants)
	}
	return n
}
