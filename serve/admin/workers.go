// Package admin is the HTTP API of the admin address of `kvepp serve`: endpoints with their cordons, the latest
// decisions, and the busy thresholds of Dynamo's frontend. It keeps no state; package router has all of it.
//
// Concurrency: handlers are called from any goroutine.
package admin

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"kvepp/internal/suggest"
	"kvepp/router"
	"kvepp/router/eject"
	"kvepp/serve/api"
)

// Endpoint is an endpoint as /workers describes it.
type Endpoint struct {
	Name string `json:"name"`
	// InPool is false for a name that is cordoned while no endpoint has it: the fields below up to Cordon are absent
	// then.
	InPool bool `json:"in_pool"`
	// host:port; absent for a prefill worker that is reached through another endpoint
	Address    string `json:"address,omitempty"`
	Model      string `json:"model,omitempty"` // absent: the model that a request names
	Role       string `json:"role,omitempty"`
	Namespace  string `json:"namespace,omitempty"` // Dynamo's
	InstanceID uint64 `json:"instance_id,omitempty"`

	Cordon  *Cordon  `json:"cordon,omitempty"`
	Ejected *Ejected `json:"ejected,omitempty"`

	RunningRequests int      `json:"running_requests"`
	Sessions        int      `json:"sessions"` // bound to it
	Workers         []Worker `json:"workers"`  // by data-parallel rank
}

// Worker is one data-parallel rank of an endpoint.
type Worker struct {
	Number          uint32 `json:"number"` // in the load book and the index
	Rank            uint32 `json:"dp_rank"`
	RunningRequests int    `json:"running_requests"`
	Sessions        int    `json:"sessions"`
}

// Cordon says that an endpoint gets no new requests.
type Cordon struct {
	As string   `json:"as"` // cordoned, or draining
	By []string `json:"by"` // Operator, pool.CordonedByPod, pool.CordonedByFile
}

// Operator is in Cordon.By if the cordon was set over the admin address.
const Operator = "operator"

// Ejected says that an endpoint gets no requests because it failed.
type Ejected struct {
	Cause       string  `json:"cause"` // of eject.Causes
	FailsInARow int     `json:"failures_in_a_row"`
	NextTrial   float64 `json:"next_trial_seconds"` // until a request may be sent to it again for trial
	WaitsFor    string  `json:"waits_for,omitempty"`
	InTrial     bool    `json:"in_trial,omitempty"` // a trial request runs
}

// cordons are the changes that POST /workers/NAME/CHANGE makes.
var cordons = map[string]eject.Cordon{"cordon": eject.NoNewRequests, "drain": eject.Draining, "uncordon": ""}

// HandleWorkers adds the requests with which an operator sees endpoints and takes them out of routing: GET /workers,
// GET /workers/NAME, and POST /workers/NAME/cordon, /drain and /uncordon. A response to a POST is the endpoint's state
// after it.
func HandleWorkers(mux *http.ServeMux, r *router.Router) {
	mux.HandleFunc("GET /workers", func(w http.ResponseWriter, _ *http.Request) {
		list := []Endpoint{}
		for _, e := range r.Endpoints() {
			list = append(list, endpointOf(&e))
		}
		api.Reply(w, http.StatusOK, map[string]any{"endpoints": list}, nil)
	})
	mux.HandleFunc("GET /workers/{name}", func(w http.ResponseWriter, req *http.Request) {
		all := r.Endpoints()
		if e, ok := findEndpoint(all, req.PathValue("name")); ok {
			api.Reply(w, http.StatusOK, e, nil)
		} else {
			api.Reply(w, 0, nil, unknownEndpoint(all, req.PathValue("name")))
		}
	})
	// A request without a body is one that any page in an operator's browser may have it send.
	mux.Handle(
		"POST /workers/{name}/{change}",
		http.NewCrossOriginProtection().Handler(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			name, change := req.PathValue("name"), req.PathValue("change")
			c, known := cordons[change]
			if !known {
				api.Reply(w, 0, nil, api.Refuse(http.StatusNotFound,
					"%.100q is no change of an endpoint: want cordon, drain or uncordon%s", change,
					suggest.DidYouMean(change, "", []string{"cordon", "drain", "uncordon"})))
				return
			}
			e, err := Endpoint{Name: name, Workers: []Worker{}}, r.SetCordon(name, c)
			if errors.Is(err, eject.ErrUnknownEndpoint) {
				err = unknownEndpoint(r.Endpoints(), name)
			} else if now, ok := findEndpoint(r.Endpoints(),
				name); ok { // else the cordon ended of a name that no endpoint has
				e = now
			}
			api.Reply(w, http.StatusOK, e, err)
		})),
	)
}

func findEndpoint(all []router.EndpointState, name string) (Endpoint, bool) {
	i := slices.IndexFunc(all, func(e router.EndpointState) bool { return e.Name == name })
	if i < 0 {
		return Endpoint{}, false
	}
	return endpointOf(&all[i]), true
}

func unknownEndpoint(all []router.EndpointState, name string) error {
	const most = 4 // names in the error
	var names, ranks []string
	for i := range all {
		names = append(names, all[i].Name)
		if strings.HasPrefix(all[i].Name, name+"-rank-") { // name is a Pod's
			ranks = append(ranks, all[i].Name)
		}
	}
	hint := suggest.DidYouMean(name, "", names)
	if n := len(ranks); n > 0 {
		if hint = "; its endpoints are " + strings.Join(ranks[:min(n, most)], ", "); n > most {
			hint += fmt.Sprintf(" and %d more", n-most)
		}
	}
	return api.Refuse(http.StatusNotFound, "no endpoint is named %.200q%s (GET /workers lists all)", name, hint)
}

func endpointOf(s *router.EndpointState) Endpoint {
	e := Endpoint{Name: s.Name, RunningRequests: s.Running(), Sessions: s.Sessions(), Workers: []Worker{}}
	if p := s.Endpoint; p != nil {
		e.InPool, e.Address, e.Model, e.Role, e.Namespace, e.InstanceID = true, p.Address, p.Model, string(
			p.Role), p.Namespace, p.InstanceID
	}
	for _, w := range s.Workers {
		e.Workers = append(e.Workers, Worker{uint32(w.Worker), w.Rank, w.Load.Requests, w.Sessions})
	}
	h := &s.Health
	if h.Cordon != "" {
		e.Cordon = &Cordon{As: string(h.Cordon), By: []string{Operator}}
	}
	if h.Declared != "" {
		if e.Cordon == nil {
			e.Cordon = &Cordon{As: string(eject.NoNewRequests)}
		}
		e.Cordon.By = append(e.Cordon.By, string(h.Declared))
	}
	if h.Ejected {
		e.Ejected = &Ejected{string(h.Cause), h.Fails, h.Trial.Seconds(), h.Waits, h.InTrial}
	}
	return e
}
