package eject

import (
	"errors"
	"fmt"
	"time"

	"kvepp/pool"
)

// Cordon is an operator's wish that an endpoint gets no new requests. Empty: there is none.
type Cordon string

// The cordons. Both keep new requests away, sessions included, and let running requests end; Draining also says that
// the operator waits for that.
const (
	NoNewRequests Cordon = "cordoned"
	Draining      Cordon = "draining"
)

// ErrUnknownEndpoint says that no endpoint of the pool has a name.
var ErrUnknownEndpoint = errors.New("no endpoint has this name")

// maxAbsentCordons bounds the cordoned names that are kept while no endpoint has them.
const maxAbsentCordons = 1000

// storedCordon is an operator's cordon of a name.
type storedCordon struct {
	as  Cordon
	set time.Time
}

// SetCordon sets an operator's cordon of the endpoint of a name, or ends it (empty). The cordon stays with the name
// when the endpoint leaves the pool and comes back, until it is ended or kvepp restarts. Of names that no endpoint has,
// the latest maxAbsentCordons are kept.
//
// Errors: ErrUnknownEndpoint, for a name that neither an endpoint nor a cordon has.
func (t *Tracker) SetCordon(name string, c Cordon) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byName[name]
	if _, cordoned := t.cordons[name]; e == nil && !cordoned {
		return fmt.Errorf("%w: %.200q", ErrUnknownEndpoint, name)
	}
	if c == "" {
		delete(t.cordons, name)
	} else {
		t.cordons[name] = storedCordon{c, time.Now()}
		t.forgetAbsentCordons()
	}
	if e == nil {
		t.log.Info("the cordon of an endpoint changed that is not in the pool", "endpoint", name, "operator", orNone(c))
		return nil
	}
	was, before := e.cordoned(), e.cordon
	e.cordon = c
	t.publish()
	t.logCordon(e, was, before != c)
	return nil
}

// PoolCordon notes that the pool cordons the endpoint of a name from now on, or stopped that (empty). What the pool
// says of an endpoint that joins comes with WorkerJoined.
func (t *Tracker) PoolCordon(name string, by pool.CordonSource) {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byName[name]
	if e == nil {
		return
	}
	was, before := e.cordoned(), e.declared
	e.declared = by
	t.publish()
	t.logCordon(e, was, before != by)
}

// logCordon logs that e is cordoned or uncordoned. was says whether it was cordoned before, and changed that the
// reasons differ. The caller holds t.mu.
func (t *Tracker) logCordon(e *Endpoint, was, changed bool) {
	switch now := e.cordoned(); {
	case now && !was:
		t.log.Info(
			"endpoint cordoned: it gets no new requests",
			"endpoint",
			e.name,
			"operator",
			orNone(e.cordon),
			"pool",
			orNone(e.declared),
		)
	case now && changed:
		t.log.Info(
			"the cordon of an endpoint changed: it still gets no new requests",
			"endpoint",
			e.name,
			"operator",
			orNone(e.cordon),
			"pool",
			orNone(e.declared),
		)
	case was && !now:
		t.log.Info("endpoint uncordoned: it gets requests again", "endpoint", e.name)
	}
}

// orNone is a word for the log that may be empty.
func orNone[T ~string](word T) string {
	if word == "" {
		return "none"
	}
	return string(word)
}

// forgetAbsentCordons removes the oldest cordons of names that no endpoint has until maxAbsentCordons are left. The
// caller holds t.mu.
func (t *Tracker) forgetAbsentCordons() {
	for {
		absent, oldest := 0, ""
		for name, c := range t.cordons {
			if t.byName[name] != nil {
				continue
			}
			if absent++; oldest == "" || c.set.Before(t.cordons[oldest].set) {
				oldest = name
			}
		}
		if absent <= maxAbsentCordons {
			return
		}
		delete(t.cordons, oldest)
		t.log.Warn(
			"the cordon of an endpoint is forgotten that left the pool: too many of them",
			"endpoint",
			oldest,
			"most",
			maxAbsentCordons,
		)
	}
}
