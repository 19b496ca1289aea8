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

	// ahead is by how many requests of mean cost a tenant was served more than one of another replica, for which it
	// leaves a worker. Replicas hear of each other's turns a little later: with less, two may both leave it.
	ahead = 2
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

	elsewhere map[*tenant]bool // that have requests waiting at other replicas, as those said
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
		if t.waiting == 0 && t.served <= l.now && !l.elsewhere[t] {
			delete(l.tenants, id)
		}
	}
}

// enter notes that a request waits.
func (t *tenant) enter() {
	if t.waiting++; t.waiting == 1 && t.ledger != nil {
		t.lift()
	}
}

// lift has a tenant that had no request waiting begin with as much saved up as it may have.
func (t *tenant) lift() { t.served = max(t.served, t.now-burst*t.mean) }

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
	if t := q.tenant(id); t != nil {
		t.charge(tokens)
	}
}

// Heard charges a tenant for what another replica sent to workers for it, at the turn of a request or beside it, and
// notes whether requests of it wait there.
func (q *Queue[T]) Heard(id Tenant, tokens int, turn, waits bool) {
	t := q.tenant(id)
	if t == nil {
		return
	}
	if turn {
		t.now = max(t.now, t.served)
	}
	t.served += float64(tokens)
	if !waits {
		delete(t.elsewhere, t)
		return
	}
	if t.waiting == 0 && !t.elsewhere[t] {
		t.lift()
	}
	if t.elsewhere == nil {
		t.elsewhere = map[*tenant]bool{}
	}
	t.elsewhere[t] = true
}

// Yields reports whether a request should leave a free worker to another replica: a tenant that was served much less
// waits there.
func (i *Item[T]) Yields() bool {
	own := i.flow.tenant
	if own.ledger == nil {
		return false
	}
	for t := range own.elsewhere {
		if t.served+ahead*own.mean < own.served {
			return true
		}
	}
	return false
}

// Forget forgets who waits at other replicas, until they say so again.
func (i *Item[T]) Forget() { clear(i.flow.tenant.elsewhere) }

// Waits reports whether requests of a tenant wait.
func (q *Queue[T]) Waits(id Tenant) bool {
	t := q.tenant(id)
	return t != nil && t.waiting > 0
}

// tenant returns the one with this name; nil: it is not known.
func (q *Queue[T]) tenant(id Tenant) *tenant {
	for i := range q.classes {
		if t := q.classes[i].ledger.tenants[id]; t != nil {
			return t
		}
	}
	for _, band := range q.byBand {
		if t := band.tenants[id]; t != nil {
			return t
		}
	}
	return nil
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
