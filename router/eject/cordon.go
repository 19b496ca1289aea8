package eject

import (
	"errors"
	"fmt"
)

// Cordon is an operator's wish that an endpoint gets no new requests. Empty: there is none.
type Cordon string

// The cordons. Both keep new requests away, sessions included, and let running requests end; Draining also says that the
// operator waits for that.
const (
	NoNewRequests Cordon = "cordoned"
	Draining      Cordon = "draining"
)

// ErrUnknownEndpoint says that no endpoint of the pool has a name.
var ErrUnknownEndpoint = errors.New("no endpoint has this name")

// maxCordons bounds the names that are kept cordoned while no endpoint has them.
const maxCordons = 10_000

// SetCordon cordons the endpoint of a name, or ends its cordon (empty). The cordon stays with the name when the endpoint leaves
// the pool and comes back, until it is ended or kvepp restarts.
//
// Errors: ErrUnknownEndpoint, for a name that neither an endpoint nor a cordon has.
func (t *Tracker) SetCordon(name string, c Cordon) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byName[name]
	if _, cordoned := t.cordons[name]; e == nil && !cordoned {
		return fmt.Errorf("%w: %.200q", ErrUnknownEndpoint, name)
	}
	switch {
	case c == "":
		delete(t.cordons, name)
	case t.cordons[name] != "" || len(t.cordons) < maxCordons:
		t.cordons[name] = c
	default:
		return fmt.Errorf("%d endpoints are cordoned already; uncordon some that are gone", maxCordons)
	}
	if e == nil || e.cordon == c {
		return nil
	}
	e.cordon = c
	t.publish()
	if c == "" {
		t.log.Info("endpoint uncordoned: it gets requests again", "endpoint", name)
	} else {
		t.log.Info("endpoint cordoned: it gets no new requests", "endpoint", name, "as", c)
	}
	return nil
}
