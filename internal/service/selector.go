package service

import (
	"log/slog"
	"net/http"
	"sync"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/session"
)

// Selector is Dynamo's selection service: workers are registered by request, and their events followed; selections
// choose among them, and reservations book them. Create it with NewSelector.
//
// A selection begins where a prompt is token ids or hashes already, so that it stands on index and book themselves and
// not on router.Router, which begins with a request's body and ends with its response.
//
// Source: dynamo-kv-router 1.6.1, services::selection, and what `python -m dynamo.select_service` answers.
type Selector struct {
	*Reader
	cfg      SelectorConfig
	pool     *pool.Pool
	loadBook *scoring.ActiveSequences
	pending  *pendingSelections
	claims   sync.Map // names of reservations whose selections wait
	began    time.Time
	leases   session.Leases
	metrics  *metrics.SelectionService
	scratch  sync.Pool // of *choice

	changing sync.Mutex // held over a change of the catalog, and of the pool after it
	mu       sync.RWMutex
	// by worker id; changed under both, read under either. A record does not change once it is there
	workers map[uint64]*record
	groups  map[served]*group // guarded by mu
	ranks   int               // of all schedulable workers; guarded by mu
	bytes   int               // of all records, estimated; guarded by mu
}

// SelectorConfig is what an operator chooses.
type SelectorConfig struct {
	// Scoring holds the knobs of the cost function, for requests that bring no other. It must have passed Validate.
	Scoring scoring.Config
	// Events says that the workers' events are followed. Else a worker is believed to hold what it was sent, for
	// PredictTTL.
	Events     bool
	PredictTTL time.Duration
	// A selection waits this long for its reservation, among at most so many others, which take at most so many bytes.
	PendingTTL     time.Duration
	PendingEntries int
	PendingBytes   int
	// Queue says how selections wait while all workers are busy; nil: none does.
	Queue *router.Queue
	// Sessions is the table of session affinity; who leaves the pool leaves it too. nil: there is no affinity.
	Sessions *session.Table
}

// NewSelector returns a Selector without workers. p is its own: nobody else may update it. f, which watches p, follows
// the workers' events; nil if nothing does. book, which must forget who leaves p, ends reservations by its Expiry.
func NewSelector(
	cfg SelectorConfig,
	p *pool.Pool,
	index *indexer.Index,
	f *feed.Feed,
	book *scoring.ActiveSequences,
	m *metrics.SelectionService,
	log *slog.Logger,
) *Selector {
	s := &Selector{
		cfg:      cfg,
		pool:     p,
		loadBook: book,
		metrics:  m,
		workers:  map[uint64]*record{},
		groups:   map[served]*group{},
		pending:  newPendingSelections(&cfg),
		began:    time.Now(),
	}
	s.Reader = newReader(p, index, f, log, func(w *pool.Worker) served { return groupOf(w.Model) })
	s.named = true
	s.scratch.New = func() any { return new(choice) }
	return s
}

// Handler returns what answers the requests; it answers paths that it does not know, too.
func (s *Selector) Handler() http.Handler {
	r := routes{m: s.metrics, mux: http.NewServeMux()}
	r.add(
		"/health",
		handlers{"GET": func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, done, nil) }},
	)
	r.add("/ready", handlers{"GET": s.ready})
	r.add("/workers", handlers{"GET": s.listWorkers, "POST": s.putWorker})
	r.add("/workers/{id}", handlers{"PATCH": s.patchWorker, "DELETE": s.deleteWorker})
	r.add("/select", handlers{"POST": s.selectOnly})
	r.add("/select_and_reserve", handlers{"POST": s.selectAndReserve})
	r.add("/reservations", handlers{"POST": s.reserve})
	r.add("/reservations/{id}", handlers{"DELETE": s.free})
	r.add("/reservations/{id}/prefill_complete", handlers{"POST": s.prefillComplete})
	r.add("/reservations/{id}/output_block", handlers{"POST": s.outputBlock})
	r.add("/loads", handlers{"GET": s.loads})
	r.add("/potential_loads", handlers{"POST": s.potentialLoads})
	r.add("/overlap_scores", handlers{"POST": s.overlapScores})
	r.add("/dump", handlers{"GET": s.dump})
	// Load is not shared with other replicas, which is Dynamo's default too.
	r.add(
		"/replica_sync/peers",
		handlers{"GET": func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, []string{}, nil) }},
	)
	alone := func(w http.ResponseWriter, req *http.Request) {
		var body struct {
			Endpoint *string `json:"endpoint"`
		}
		err := read(w, req, &body)
		switch {
		case err != nil:
		case body.Endpoint == nil:
			err = missing("endpoint")
		default:
			err = refuse(http.StatusConflict, "replica sync is disabled")
		}
		answer(w, 0, nil, err)
	}
	r.add("/replica_sync/register_peer", handlers{"POST": alone})
	r.add("/replica_sync/deregister_peer", handlers{"POST": alone})
	r.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, 0, nil, refuse(http.StatusNotFound, "route not found"))
	})
	return r.mux
}

// done is the answer of requests that have nothing to tell.
var done = map[string]string{"status": "ok"}

// handlers are a path's, by method.
type handlers map[string]http.HandlerFunc

// routes answers what a mux does, with errors in JSON, and counts.
type routes struct {
	m   *metrics.SelectionService
	mux *http.ServeMux
}

func (r *routes) add(path string, byMethod handlers) {
	r.mux.HandleFunc(path, func(w http.ResponseWriter, req *http.Request) {
		method := req.Method
		if method == http.MethodHead {
			method = http.MethodGet
		}
		start, status := time.Now(), &statusWriter{ResponseWriter: w, status: http.StatusOK}
		if handle := byMethod[method]; handle != nil {
			handle(status, req)
			r.m.Answered(path, method, status.status, start)
			return
		}
		answer(w, 0, nil, refuse(http.StatusMethodNotAllowed, "method not allowed"))
	})
}

func missing(field string) error {
	return refuse(http.StatusUnprocessableEntity, "%s is missing", field)
}

// dump of a service that follows no events is empty.
func (s *Selector) dump(w http.ResponseWriter, req *http.Request) {
	if s.feed == nil {
		answer(w, http.StatusOK, struct{}{}, nil)
		return
	}
	s.Reader.dump(w, req)
}

// named returns model and group of a request.
func named(model, group *string) served {
	n := served{defaultModel, defaultGroup}
	if model != nil {
		n.model = *model
	}
	if group != nil {
		n.group = *group
	}
	return n
}

// defaultModel is the model of requests that name none.
const defaultModel = "default"

// describe is how errors name a group. Source: what dynamo.select_service answers.
func (s served) describe() string { return "model=" + s.model + " routing_group=" + s.group }

// SelectorStats is what a Selector holds.
type SelectorStats struct{ Groups, Reservations, Pending, Waiting int }

// Stats returns what s holds at this moment.
func (s *Selector) Stats() SelectorStats {
	stats := SelectorStats{Reservations: s.loadBook.Len(), Pending: s.pending.len()}
	lines := s.lines()
	for _, l := range lines {
		waiting, _ := l.pending()
		stats.Waiting += waiting
	}
	stats.Groups = len(lines)
	return stats
}
