package admin

import (
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvepp/internal/flags"
	"kvepp/serve/api"
)

// Fleet is what /debug/fleet answers: the workers, what waits, and the sessions, now.
type Fleet struct {
	Time    time.Time     `json:"time"`
	Started time.Time     `json:"started"`
	Version string        `json:"version"`
	Workers []FleetWorker `json:"workers"`
	Queues  []FleetQueue  `json:"queues"`
	Held    int           `json:"held_requests"` // by the admission of conversations, or for want of an endpoint
	// Sessions is null without session affinity.
	Sessions *FleetSessions `json:"sessions"`
	Index    FleetIndex     `json:"index"`
	// Shadow is null unless another picker chooses: kvepp_shadow_requests_total by outcome, kvepp_shadow_tokens_total.
	Shadow map[string]map[string]float64 `json:"shadow"`
	// Findings are sentences: what to look at, the most important first.
	Findings []string `json:"findings,omitempty"`
	// Paths are those of the admin API that this kvepp serves, of those that not every kvepp has.
	Paths map[string]bool `json:"paths"`
	// HistorySeconds is the time between two values of the workers' histories.
	HistorySeconds float64 `json:"history_seconds,omitempty"`
}

// FleetWorker is a worker: one data-parallel rank of an endpoint.
type FleetWorker struct {
	Name    string `json:"name"`
	Rank    uint32 `json:"dp_rank"`
	Address string `json:"address,omitempty"`
	Model   string `json:"model,omitempty"`
	Role    string `json:"role,omitempty"`
	// States says in words what an operator should know; "serving" if there is nothing.
	States []WorkerCondition `json:"states"`

	Blocks         int      `json:"blocks"`          // in the index: one for each block in each tier
	CapacityBlocks int      `json:"capacity_blocks"` // of the device; 0: not known
	LastEvent      *float64 `json:"last_event_seconds"`

	// Running, Waiting and KVUsage (0..1) are the engine's; null: not known.
	Running *float64 `json:"running"`
	Waiting *float64 `json:"waiting"`
	KVUsage *float64 `json:"kv_usage"`
	// These are kvepp's own, by its load book.
	BookedRequests int `json:"booked_requests"`
	PrefillTokens  int `json:"prefill_tokens"` // that wait for their prefill
	ActiveBlocks   int `json:"active_blocks"`  // held by active requests
	Sessions       int `json:"sessions"`

	// Totals of ended requests since the worker joined.
	Requests     uint64 `json:"requests_total"`
	Failures     uint64 `json:"failures_total"`
	PromptTokens uint64 `json:"prompt_tokens_total"`
	CachedTokens uint64 `json:"cached_tokens_total"` // as the engine reports, or else as kvepp predicted

	History *WorkerHistory `json:"history,omitempty"`
}

// WorkerCondition is one thing to know about a worker.
type WorkerCondition struct {
	State  string `json:"state"`            // one of few words, such as ejected
	Detail string `json:"detail,omitempty"` // what to know beside
	Level  string `json:"level"`            // ok, note, or bad
}

// States that findings count.
const (
	StateEventsOff = "events off"
	StateSilent    = "silent"
)

// The levels of a WorkerCondition.
const (
	LevelOK   = "ok"
	LevelNote = "note" // as an operator or a threshold wants it
	LevelBad  = "bad"
)

// FleetQueue is what waits in one policy class of a model.
type FleetQueue struct {
	Model        string `json:"model"`
	Class        string `json:"class"`
	Requests     int    `json:"requests"`
	Tokens       int    `json:"tokens"`
	CachedTokens int    `json:"cached_tokens"`
}

// FleetSessions counts sessions. All but Active are since the start.
type FleetSessions struct {
	Active     int     `json:"active"`
	TTL        float64 `json:"ttl_seconds"`
	New        uint64  `json:"new"`  // requests that bound their session
	Kept       uint64  `json:"kept"` // requests that went to their session's worker
	Moved      uint64  `json:"moved"`
	Final      uint64  `json:"final"` // ended by a request's wish
	Expired    uint64  `json:"expired"`
	Evicted    uint64  `json:"evicted"`
	WorkerLeft uint64  `json:"worker_left"`
}

// FleetIndex is the state of the index.
type FleetIndex struct {
	Blocks   int  `json:"blocks"`
	Bytes    int  `json:"bytes"`
	MaxBytes int  `json:"max_bytes"`
	AtBound  bool `json:"at_bound"`
}

// ConditionsOf describes whether an endpoint gets requests.
func ConditionsOf(e *Endpoint) (all []WorkerCondition) {
	if c := e.Cordon; c != nil {
		all = append(all, WorkerCondition{c.As, "by " + strings.Join(c.By, ", "), LevelNote})
	}
	if x := e.Ejected; x != nil {
		next := "next trial with the next request"
		switch {
		case x.WaitsFor != "":
			next = "waits for " + x.WaitsFor
		case x.InTrial:
			next = "in trial"
		case x.NextTrial > 0:
			next = fmt.Sprintf("next trial in %.0fs", x.NextTrial)
		}
		all = append(all, WorkerCondition{"ejected", x.Cause + ", " + next, LevelBad})
	}
	return all
}

const (
	// HistoryInterval is the time between two values of a history, HistoryLength the number of values: ten minutes.
	HistoryInterval = 10 * time.Second
	HistoryLength   = 60

	historyWorkers = 512 // beyond so many, workers have no history: it bounds memory and responses
)

// WorkerHistory has the values of the last ten minutes, the oldest first. A null is an interval without prompts.
type WorkerHistory struct {
	RequestsPerSecond []float64  `json:"requests_per_second"`
	HitShare          []*float64 `json:"hit_share"` // 0..1
	Booked            []int      `json:"booked_requests"`
	Blocks            []int      `json:"blocks"`
}

// History remembers what Fleet was in the last ten minutes. The zero value is empty. It is safe for concurrent use.
type History struct {
	mu      sync.Mutex // guards workers
	workers map[string][]sample
}

type sample struct {
	at                       time.Time
	requests, prompt, cached uint64
	booked, blocks           int
}

func keyOf(w *FleetWorker) string { return w.Name + "/" + strconv.FormatUint(uint64(w.Rank), 10) }

// Add takes the values of now, and forgets the workers that are gone.
func (h *History) Add(now *Fleet) {
	h.mu.Lock()
	defer h.mu.Unlock()
	next := make(map[string][]sample, len(now.Workers))
	for i := range now.Workers[:min(len(now.Workers), historyWorkers)] {
		w := &now.Workers[i]
		all := h.workers[keyOf(w)]
		// A value is the difference of two samples.
		if len(all) > HistoryLength {
			all = append(all[:0], all[len(all)-HistoryLength:]...)
		}
		if n := len(all); n > 0 && all[n-1].requests > w.Requests {
			all = nil // another worker of that name
		}
		next[keyOf(w)] = append(all, sample{now.Time, w.Requests, w.PromptTokens, w.CachedTokens, w.BookedRequests,
			w.Blocks})
	}
	h.workers = next
}

// fill sets the histories of workers.
func (h *History) fill(f *Fleet) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f.HistorySeconds = HistoryInterval.Seconds()
	for i := range f.Workers {
		all := h.workers[keyOf(&f.Workers[i])]
		if len(all) < 2 {
			continue
		}
		past := new(WorkerHistory)
		for k := 1; k < len(all); k++ {
			a, b := &all[k-1], &all[k]
			seconds := max(b.at.Sub(a.at).Seconds(), 1e-3)
			past.RequestsPerSecond = append(past.RequestsPerSecond, float64(b.requests-a.requests)/seconds)
			var share *float64
			if prompt := b.prompt - a.prompt; prompt > 0 {
				share = Finite(float64(b.cached-a.cached) / float64(prompt))
			}
			past.HitShare = append(past.HitShare, share)
			past.Booked = append(past.Booked, b.booked)
			past.Blocks = append(past.Blocks, b.blocks)
		}
		f.Workers[i].History = past
	}
}

const (
	hotRequests = 20  // ended requests from which a worker may be hot
	hotShare    = 2.5 // times the mean of the workers of its model and role
	hopTurns    = 10  // turns of known sessions from which sessions may hop
	hopShare    = 0.1 // of the turns
)

// findings says in sentences what an operator should look at.
func (f *Fleet) findings() (all []string) {
	off := 0
	type group struct{ model, role string }
	workers, requests := map[group]int{}, map[group]uint64{}
	for i := range f.Workers {
		w := &f.Workers[i]
		workers[group{w.Model, w.Role}]++
		requests[group{w.Model, w.Role}] += w.Requests
		for _, s := range w.States {
			if s.State == StateEventsOff || s.State == StateSilent {
				off++
			}
		}
	}
	if off > 0 {
		all = append(all, fmt.Sprintf("KV events are off: %d of %d workers send none, so kvepp does not know what "+
			"they have cached. kvepp check says how to turn them on", off, len(f.Workers)))
	}
	for i := range f.Workers {
		w := &f.Workers[i]
		n, sum := workers[group{w.Model, w.Role}], requests[group{w.Model, w.Role}]
		hot := min(hotShare/float64(n), 0.8) * float64(sum)
		if n > 1 && w.Requests >= hotRequests && float64(w.Requests) >= hot {
			all = append(all, fmt.Sprintf("one hot worker: %s served %d of %d requests. If one prefix draws them "+
				"there, docs/routing.md says which weights spread it", keyOf(w), w.Requests, sum))
		}
	}
	if s := f.Sessions; s != nil && s.Kept+s.Moved >= hopTurns {
		if share := float64(s.Moved) / float64(s.Kept+s.Moved); share >= hopShare {
			all = append(all, fmt.Sprintf("sessions hop: %.0f %% of the turns of known sessions went to another "+
				"worker than the one before, whose cache is then of no use", 100*share))
		}
	}
	return all
}

// optionalPaths are those that not every kvepp serves.
var optionalPaths = []string{"/debug/ladder", "/debug/replicas"}

// HandleFleet adds GET /debug/fleet. Call it after the other handlers are added to mux. With ?history=1 each worker has
// the values of the last ten minutes.
func HandleFleet(mux *http.ServeMux, read func() Fleet, past *History) {
	paths := map[string]bool{}
	for _, path := range optionalPaths {
		_, pattern := mux.Handler(&http.Request{Method: http.MethodGet, URL: &url.URL{Path: path}})
		paths[path] = pattern != ""
	}
	mux.HandleFunc("GET /debug/fleet", func(w http.ResponseWriter, req *http.Request) {
		now := read()
		now.Findings, now.Paths = now.findings(), paths
		if on, _ := strconv.ParseBool(req.URL.Query().Get("history")); on {
			past.fill(&now)
		}
		api.Reply(w, http.StatusOK, now, nil)
	})
}

// HandleSettings adds GET /debug/config: the effective settings.
func HandleSettings(mux *http.ServeMux, settings []flags.Setting) {
	mux.HandleFunc("GET /debug/config", func(w http.ResponseWriter, _ *http.Request) {
		api.Reply(w, http.StatusOK, map[string]any{"settings": settings}, nil)
	})
}
