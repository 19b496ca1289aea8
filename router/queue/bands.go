package queue

import (
	"errors"
	"time"
)

// Bands order and bound what waits by priority alone: no request goes before one of a higher priority.
//
// Source: llm-d-router v0.11, pkg/epp/flowcontrol.
type Bands struct {
	ByPriority        map[int]Band
	Default, Negative Band // of other priorities, from 0 on and below
	MaxRequests       int  // of all bands; 0: no limit
	MaxBytes          int  // of the bodies; 0: no limit
	// MaxWait bounds how long a request waits while there is no worker. 0: it does not wait for that.
	MaxWait time.Duration
	Gate    Gate
}

// Band is what holds for the requests of one priority.
type Band struct {
	Policy                Policy
	Fair                  bool // tenants share it; Policy is the order within each
	MaxRequests, MaxBytes int  // 0: no limit
	Timeout               time.Duration
}

// of returns the band of a priority.
func (b *Bands) of(priority int) Band {
	if own, ok := b.ByPriority[priority]; ok {
		return own
	} else if priority < 0 {
		return b.Negative
	}
	return b.Default
}

// Gate says when requests wait: while the workers' mean saturation is Ceiling or more. A worker's saturation is the
// greatest of the shares of these values that it has. 0: the value does not count.
type Gate struct {
	Requests int     // that run or wait on the worker
	Tokens   int     // that these hold
	Steps    float64 // of the engine that its waiting prompt tokens take
	Usage    float64 // of its KV blocks, 0..1
	Ceiling  float64
}

// Saturation returns that of a worker.
func (g *Gate) Saturation(requests, tokens int, steps, usage float64) (most float64) {
	for _, share := range [][2]float64{{float64(requests), float64(g.Requests)}, {float64(tokens), float64(g.Tokens)},
		{steps, g.Steps}, {usage, g.Usage}} {
		if share[1] > 0 {
			most = max(most, share[0]/share[1])
		}
	}
	return most
}

// Profile returns the profile of one class with these bands.
func (b *Bands) Profile() *Profile {
	return &Profile{Classes: []Class{{Name: "default", Policy: FCFS, Quantum: 1, Gate: &b.Gate}}, Bands: b}
}

// bandLoad is what waits in a band.
type bandLoad struct {
	requests, bytes int
	ledger
}

// load returns what waits in the band of a priority.
func (b *Bands) load(loads map[int]*bandLoad, priority int) *bandLoad {
	if loads[priority] == nil {
		loads[priority] = new(bandLoad)
	}
	return loads[priority]
}

// errBandFull says that a band, or all of them, has reached its limit.
var errBandFull = errors.New("the requests of this priority that wait have reached their limit")

// admit counts a request in its band and returns its score there.
func (b *Bands) admit(load, all *bandLoad, r *Request) (score float64, err error) {
	band := b.of(r.Priority)
	over := func(l *bandLoad, requests, bytes int) bool {
		return requests > 0 && l.requests >= requests || bytes > 0 && l.bytes > bytes-r.Bytes
	}
	if over(all, b.MaxRequests, b.MaxBytes) || over(load, band.MaxRequests, band.MaxBytes) {
		return 0, errBandFull
	}
	for _, l := range []*bandLoad{load, all} {
		l.requests++
		l.bytes += r.Bytes
	}
	return band.Policy.score(r), nil
}

// leave is the opposite of admit.
func (b *Bands) leave(load, all *bandLoad, r *Request) {
	for _, l := range []*bandLoad{load, all} {
		l.requests--
		l.bytes -= r.Bytes
	}
}
