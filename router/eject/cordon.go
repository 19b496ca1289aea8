package eject

import (
	"errors"
	"fmt"
	"time"

	"kvepp/pool"
)

// Cordon is an operator's decision that an endpoint gets no new requests. Empty: none.
type Cordon string

// The cordons. Both keep new requests away, those of sessions included, and let running requests end. Draining also
// says that the operator waits for their end.
const (
	NoNewRequests Cordon = "cordoned"
	Draining      Cordon = "draining"
)

// ErrUnknownEndpoint says that no endpoint of the pool has the name.
var ErrUnknownEndpoint = errors.New("no endpoint has this name")

// maxAbsentCordons bounds the cordons of names that no endpoint has.
const maxAbsentCordons = 1000

// storedCordon is an operator's cordon of an endpoint's name.
type storedCordon struct {
	as  Cordon
	set time.Time
}

// SetCordon sets an operator's cordon of the endpoint with a name; an empty cordon ends it. The cordon stays with the
// name if the endpoint leaves the pool and comes back. It ends with kvepp. Of names that no endpoint has, the latest
// maxAbsentCordons are kept.
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
		t.log.Info("the cordon of an endpoint that is not in the pool changed", "endpoint", name, "operator", orNone(c))
		return nil
	}
	was, before := e.cordoned(), e.cordon
	e.cordon = c
	t.publish()
	t.logCordon(e, was, before != c)
	return nil
}

// PoolCordon notes which source in the pool cordons the endpoint with a name; empty: none. For an endpoint that joins,
// WorkerJoined carries it.
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

// logCordon logs a change of e's cordon. was says whether e was cordoned before, changed whether the reasons differ.
// The caller holds t.mu.
func (t *Tracker) logCordon(e *Endpoint, was, changed bool) {
	switch now := e.cordoned(); {
	case now && !was:
		t.log.Info("endpoint cordoned: it gets no new requests",
			"endpoint", e.name, "operator", orNone(e.cordon), "pool", orNone(e.declared))
	case now && changed:
		t.log.Info("the cordon of an endpoint changed: it still gets no new requests",
			"endpoint", e.name, "operator", orNone(e.cordon), "pool", orNone(e.declared))
	case was && !now:
		t.log.Info("endpoint uncordoned: it gets requests again", "endpoint", e.name)
	}
}

// orNone returns a word for a log line; "none" if it is empty.
func orNone[T ~string](word T) string {
	if word == "" {
		return "none"
	}
	return string(word)
}

// forgetAbsentCordons removes the oldest cordons of names that no endpoint has, down to maxAbsentCordons. The caller
// holds t.mu.
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
		t.log.Warn("the cordon of an endpoint that left the pool is forgotten, because there are too many",
			"endpoint", oldest, "most", maxAbsentCordons)
	}
}
