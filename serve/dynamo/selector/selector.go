// Package selector is the HTTP API of Dynamo's selection service, which `kvepp select` serves.
//
// It owns the registered workers, the waiting selections, and the reservations. Its requests and responses have
// Dynamo's fields. It never sends a request to a worker.
//
// Concurrency: handlers are called from any goroutine.
package selector

import (
	"log/slog"
	"net/http"
	"sync"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
)

// Selector is Dynamo's selection service. Clients register workers, and kvepp follows the workers' events. Selections
// choose a worker, and reservations book load on it. Create it with New.
//
// A selection begins with token ids or hashes. It therefore uses the index and the load book directly, and not
// router.Router, which begins with a request's body and ends with its response.
//
// Source: dynamo-kv-router 1.6.1, services::selection, and the responses of `python -m dynamo.select_service`.
type Selector struct {
	cfg       Config
	pool      *pool.Pool
	index     *indexer.Index
	feed      *feed.Feed // nil: no events
	dumps     *indexerapi.Reader
	loadBook  *scoring.ActiveSequences
	pending   *pendingSelections
	claims    sync.Map // names of reservations whose selections wait
	leases    session.Leases
	metrics   *metrics.SelectionService
	scratches sync.Pool // of *scratch

	changing sync.Mutex // held over a change of the catalog and the change of the pool that follows
	mu       sync.RWMutex
	// By worker id. Writers hold both locks, readers either one. A stored record does not change.
	workers map[uint64]*record
	groups  map[api.ModelGroup]*group // guarded by mu
	ranks   int                       // of all schedulable workers; guarded by mu
	bytes   int                       // of all records, estimated; guarded by mu
}

// Config is the operator's configuration.
type Config struct {
	// Scoring is the cost function's configuration, for requests without their own. It must have passed Validate.
	Scoring scoring.Config
	// Events: kvepp follows the workers' events. Otherwise it assumes for PredictTTL that a worker holds the prompts
	// that it was sent.
	Events     bool
	PredictTTL time.Duration
	// How long a selection waits for its reservation, and how many may wait, with how many bytes together.
	PendingTTL     time.Duration
	PendingEntries int
	PendingBytes   int
	// Queue configures how selections wait while all workers are busy. Nil: they never wait.
	Queue *queue.RoomConfig
	// Sessions is the table of session affinity. Endpoints that leave the pool leave it too. Nil: no affinity.
	Sessions *session.Table

	settings settings
}

// New returns a Selector without workers. No other code may update p. f watches p and follows the workers' events; it
// may be nil. book must forget endpoints that leave p, and ends reservations by its Expiry.
func New(
	cfg Config,
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
		index:    index,
		feed:     f,
		dumps:    indexerapi.NewGroupReader(p, index, f, log),
		loadBook: book,
		metrics:  m,
		workers:  map[uint64]*record{},
		groups:   map[api.ModelGroup]*group{},
		pending:  newPendingSelections(&cfg),
	}
	s.scratches.New = func() any { return new(scratch) }
	return s
}

// Handler returns the handler of all requests, including those to unknown paths.
func (s *Selector) Handler() http.Handler {
	r := routes{m: s.metrics, mux: http.NewServeMux()}
	r.add(
		"/health",
		handlers{"GET": func(w http.ResponseWriter, _ *http.Request) {
			api.Reply(w, http.StatusOK, api.StatusOK,
				nil)
		}},
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
	// Load is not shared with other replicas, as in Dynamo by default.
	r.add("/replica_sync/peers",
		handlers{"GET": func(w http.ResponseWriter, _ *http.Request) { api.Reply(w, http.StatusOK, []string{}, nil) }})
	alone := func(w http.ResponseWriter, req *http.Request) {
		var body struct {
			Endpoint *string `json:"endpoint"`
		}
		err := api.ReadBody(w, req, &body)
		switch {
		case err != nil:
		case body.Endpoint == nil:
			err = api.Missing("endpoint")
		default:
			err = api.Refuse(http.StatusConflict, "replica sync is disabled")
		}
		api.Reply(w, 0, nil, err)
	}
	r.add("/replica_sync/register_peer", handlers{"POST": alone})
	r.add("/replica_sync/deregister_peer", handlers{"POST": alone})
	r.mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) {
		api.Reply(w, 0, nil, api.Refuse(http.StatusNotFound, "route not found"))
	})
	return r.mux
}

// handlers are the handlers of a path, by method.
type handlers map[string]http.HandlerFunc

// routes works as a mux, answers errors in JSON, and counts requests.
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
		start, status := time.Now(), api.NewStatusWriter(w)
		if handle := byMethod[method]; handle != nil {
			handle(status, req)
			r.m.Responded(path, method, status.Status, start)
			return
		}
		api.Reply(w, 0, nil, api.Refuse(http.StatusMethodNotAllowed, "method not allowed"))
	})
}

// The dump of a service without events is empty.
func (s *Selector) dump(w http.ResponseWriter, req *http.Request) {
	if s.feed == nil {
		api.Reply(w, http.StatusOK, struct{}{}, nil)
		return
	}
	s.dumps.Dump(w, req)
}

// modelGroupNamed returns the model and the group of a request.
func modelGroupNamed(model, group *string) api.ModelGroup {
	n := api.ModelGroup{Model: defaultModel, Group: api.DefaultGroup}
	if model != nil {
		n.Model = *model
	}
	if group != nil {
		n.Group = *group
	}
	return n
}

// defaultModel is the model of requests that name none.
const defaultModel = "default"

// Stats are the sizes of a Selector's tables.
type Stats struct{ Reservations, Waiting int }

// Stats returns the current sizes.
func (s *Selector) Stats() Stats {
	stats := Stats{Reservations: s.loadBook.Len()}
	for _, room := range s.rooms() {
		waiting, _ := room.pending()
		stats.Waiting += waiting
	}
	return stats
}
