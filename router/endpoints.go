package router

import (
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/scoring"
)

// EndpointState is the current state of one endpoint, for people.
type EndpointState struct {
	Name     string
	Endpoint *pool.Endpoint // nil: the name is cordoned, and no endpoint of the pool has it
	Health   eject.Health
	Workers  []WorkerState // by rank
}

// WorkerState is the current state of one rank of an endpoint.
type WorkerState struct {
	Worker   kvblock.Worker
	Rank     uint32
	Load     scoring.Load // by the load book
	Busy     bool         // above a busy threshold
	Silent   bool         // see pool.Worker
	Sessions int          // bound to it
	// BlockSize is in tokens, 0: not known. Announced is that of its events if it differs, else 0.
	BlockSize, Announced int
	TotalKVBlocks        int // of the device; 0: not known
}

// Running returns how many requests run on the endpoint. A request with two legs runs on the prefill worker until its
// first token.
func (e *EndpointState) Running() (n int) {
	for _, w := range e.Workers {
		n += w.Load.Requests
	}
	return n
}

// Sessions returns how many sessions are bound to the endpoint.
func (e *EndpointState) Sessions() (n int) {
	for _, w := range e.Workers {
		n += w.Sessions
	}
	return n
}

// Endpoints returns the state of every endpoint, in the pool's order, and then of each cordoned name that no endpoint
// has.
func (r *Router) Endpoints() []EndpointState {
	s := r.pool.Acquire()
	defer s.Release()
	sc := r.takeScratch(nil)
	defer r.putScratch(sc)
	over := r.overloaded(&sc.gathered, s, "")
	loads, sessions := r.book.Loads(nil), r.cfg.Sessions.CountByWorker()
	health, inPool := map[string]eject.Health{}, map[string]bool{}
	tracked := r.cfg.Eject.Endpoints()
	for _, h := range tracked {
		health[h.Name] = h
	}
	var all []EndpointState
	for i := range s.Workers {
		w := &s.Workers[i]
		if n := len(all); n == 0 || all[n-1].Name != w.Name {
			h := health[w.Name]
			h.Declared = w.CordonedBy // the tracker may not have it yet
			all = append(all, EndpointState{Name: w.Name, Endpoint: w.Endpoint, Health: h})
			inPool[w.Name] = true
		}
		e := &all[len(all)-1]
		e.Workers = append(
			e.Workers,
			WorkerState{
				Worker:    w.Worker,
				Rank:      w.Rank,
				Load:      *loadOf(loads, w),
				Busy:      over != nil && over[i],
				Silent:    w.Silent,
				Sessions:  sessions[w.Worker],
				BlockSize: w.BlockSize, TotalKVBlocks: w.TotalKVBlocks,
				Announced: w.Announced,
			},
		)
	}
	for _, h := range tracked {
		if !inPool[h.Name] && h.Cordon != "" {
			all = append(all, EndpointState{Name: h.Name, Health: h})
		}
	}
	return all
}

// SetCordon sets or ends an operator's cordon of an endpoint, see [eject.Tracker.SetCordon].
func (r *Router) SetCordon(name string, c eject.Cordon) error { return r.cfg.Eject.SetCordon(name, c) }
