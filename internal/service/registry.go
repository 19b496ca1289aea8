package service

import (
	"cmp"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/pool"
	"kvepp/scoring"
)

// maxRegistered bounds the registered workers, ranks counted one by one.
const maxRegistered = 1 << 16

// maxPeers bounds the list of peers.
const maxPeers = 1 << 10

// maxText bounds each text that is kept, in bytes.
const maxText = pool.MaxText

// Registry is Dynamo's standalone indexer: workers are registered by request, and their events followed. Create it with
// NewRegistry.
type Registry struct {
	*Reader
	pool *pool.Pool

	mu      sync.Mutex
	workers []registered // ordered by model, group, instance id and rank; guarded by mu
	peers   []string     // guarded by mu
}

// registered is one rank of one worker.
type registered struct {
	served
	instance  uint64
	rank      uint32
	endpoint  string
	replay    string
	blockSize int
}

// Registration is the body of POST /register, and one worker of --workers.
type Registration struct {
	InstanceID     *uint64 `json:"instance_id"`
	Endpoint       *string `json:"endpoint"`
	Model          *string `json:"model_name"`
	Group          *string `json:"routing_group"`
	BlockSize      *int    `json:"block_size"`
	Rank           *uint32 `json:"dp_rank"`
	ReplayEndpoint *string `json:"replay_endpoint"`
}

// NewRegistry returns a Registry without workers. p is its own: nobody else may update it. f, which watches p, follows the
// workers' events.
func NewRegistry(p *pool.Pool, index *indexer.Index, f *feed.Feed, log *slog.Logger) *Registry {
	r := &Registry{pool: p}
	r.Reader = newReader(p, index, f, log, func(w *pool.Worker) served { return groupOf(w.Model) })
	r.named = true
	return r
}

// modelOf and groupOf keep model and group in the pool's one field.
func modelOf(s served) string { return strconv.Quote(s.model) + s.group }

func groupOf(model string) served {
	quoted, err := strconv.QuotedPrefix(model)
	if err != nil {
		return served{} // not from modelOf
	}
	name, _ := strconv.Unquote(quoted)
	return served{name, model[len(quoted):]}
}

// Handle adds all requests.
func (r *Registry) Handle(mux *http.ServeMux) {
	r.Reader.Handle(mux)
	done := map[string]string{"status": "ok"}
	mux.HandleFunc("POST /register", func(w http.ResponseWriter, req *http.Request) {
		var body Registration
		err := read(w, req, &body)
		if err == nil {
			err = r.Register(body)
		}
		answer(w, http.StatusCreated, done, err)
	})
	mux.HandleFunc("POST /unregister", func(w http.ResponseWriter, req *http.Request) {
		var body Registration
		err := read(w, req, &body)
		if err == nil {
			err = r.unregister(body)
		}
		answer(w, http.StatusOK, done, err)
	})
	mux.HandleFunc("GET /workers", r.list)
	mux.HandleFunc("GET /peers", func(w http.ResponseWriter, _ *http.Request) { answer(w, http.StatusOK, r.peerList(), nil) })
	mux.HandleFunc("POST /register_peer", func(w http.ResponseWriter, req *http.Request) {
		url, err := readPeer(w, req)
		if err == nil {
			err = r.AddPeer(url)
		}
		answer(w, http.StatusCreated, done, err)
	})
	mux.HandleFunc("POST /deregister_peer", func(w http.ResponseWriter, req *http.Request) {
		url, err := readPeer(w, req)
		if err == nil {
			err = r.removePeer(url)
		}
		answer(w, http.StatusOK, done, err)
	})
}

func (b *Registration) registered() (registered, error) {
	for _, field := range []struct {
		name  string
		there bool
	}{{"instance_id", b.InstanceID != nil}, {"endpoint", b.Endpoint != nil}, {"model_name", b.Model != nil}, {"block_size", b.BlockSize != nil}} {
		if !field.there {
			return registered{}, refuse(http.StatusUnprocessableEntity, "%s is missing", field.name)
		}
	}
	g := registered{served: served{*b.Model, defaultGroup}, instance: *b.InstanceID, endpoint: *b.Endpoint, blockSize: *b.BlockSize}
	if b.Group != nil {
		g.group = *b.Group
	}
	if b.Rank != nil {
		g.rank = *b.Rank
	}
	if b.ReplayEndpoint != nil {
		g.replay = *b.ReplayEndpoint
	}
	for _, field := range []struct{ name, text string }{
		{"endpoint", g.endpoint}, {"model_name", g.model}, {"routing_group", g.group}, {"replay_endpoint", g.replay},
	} {
		if err := pool.CheckText(field.text); err != nil {
			return g, refuse(http.StatusBadRequest, "%s: %v", field.name, err)
		}
	}
	if g.blockSize < 1 || g.blockSize > scoring.MaxBlockSize {
		return g, refuse(http.StatusBadRequest, "block_size %d is not a number of tokens from 1 to %d", g.blockSize, scoring.MaxBlockSize)
	}
	if err := pool.CheckTCP(g.endpoint, 1); err != nil {
		return g, refuse(http.StatusBadRequest, "invalid ZMQ endpoint: %v", err)
	}
	if g.replay != "" {
		if err := pool.CheckTCP(g.replay, 1); err != nil {
			return g, refuse(http.StatusBadRequest, "invalid replay endpoint: %v", err)
		}
	}
	return g, nil
}

// order puts a model's workers together, and an instance's ranks.
func order(a, b registered) int {
	return cmp.Or(cmp.Compare(a.model, b.model), cmp.Compare(a.group, b.group), cmp.Compare(a.instance, b.instance), cmp.Compare(a.rank, b.rank))
}

// Register adds a worker and starts to follow its events. Its errors have texts that name what is wrong.
func (r *Registry) Register(b Registration) error {
	g, err := b.registered()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.workers) == maxRegistered {
		return refuse(http.StatusTooManyRequests, "%d workers are registered, which is the limit", maxRegistered)
	}
	for i := range r.workers {
		switch was := &r.workers[i]; {
		case was.served == g.served && was.blockSize != g.blockSize:
			return refuse(http.StatusConflict, "block_size mismatch for model=%s routing_group=%s: existing=%d, requested=%d",
				g.model, g.group, was.blockSize, g.blockSize)
		case was.served == g.served && was.instance == g.instance && was.rank == g.rank:
			return refuse(http.StatusConflict, "instance %d dp_rank %d already registered", g.instance, g.rank)
		}
	}
	at, _ := slices.BinarySearchFunc(r.workers, g, order)
	r.workers = slices.Insert(r.workers, at, g)
	r.publish()
	if err := r.feed.Room(); err != nil {
		r.workers = slices.Delete(r.workers, at, at+1)
		r.publish()
		return refuse(http.StatusServiceUnavailable, "%v", err)
	}
	return nil
}

// unregister forgets a rank, or all ranks, of a worker.
func (r *Registry) unregister(b Registration) error {
	if b.InstanceID == nil || b.Model == nil {
		return refuse(http.StatusUnprocessableEntity, "instance_id or model_name is missing")
	}
	want := served{*b.Model, defaultGroup}
	if b.Group != nil {
		want.group = *b.Group
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	before := len(r.workers)
	elsewhere := served{}
	r.workers = slices.DeleteFunc(r.workers, func(g registered) bool {
		if g.instance != *b.InstanceID {
			return false
		}
		if g.served != want {
			elsewhere = g.served
			return false
		}
		return b.Rank == nil || g.rank == *b.Rank
	})
	switch {
	case len(r.workers) < before:
		r.publish()
		return nil
	case elsewhere != served{}:
		return refuse(http.StatusNotFound, "instance %d is registered for model=%s routing_group=%s", *b.InstanceID, elsewhere.model, elsewhere.group)
	case b.Rank != nil:
		return refuse(http.StatusNotFound, "instance %d dp_rank %d not found", *b.InstanceID, *b.Rank)
	}
	return refuse(http.StatusNotFound, "instance %d not found", *b.InstanceID)
}

// publish makes the registered workers the pool's. The caller holds r.mu.
func (r *Registry) publish() {
	endpoints := make([]pool.Endpoint, 0, len(r.workers))
	for i := range r.workers {
		g := &r.workers[i]
		endpoints = append(endpoints, pool.Endpoint{
			// Quoted, so that no two workers have one name: the pool could not tell them apart.
			Name: fmt.Sprintf("%s/%d/%d", modelOf(g.served), g.instance, g.rank), InstanceID: g.instance, Model: modelOf(g.served),
			DataParallelStartRank: g.rank, DataParallelSize: 1, KVEvents: g.endpoint, KVReplay: g.replay, BlockSize: g.blockSize})
	}
	r.pool.Update(endpoints)
}

// listed is a worker in the answer of GET /workers.
type listed struct {
	InstanceID uint64              `json:"instance_id"`
	Source     string              `json:"source"`
	Status     string              `json:"status"`
	Model      string              `json:"model_name"`
	Group      string              `json:"routing_group"`
	BlockSize  int                 `json:"block_size"`
	Endpoints  map[string]string   `json:"endpoints"` // by rank
	Listeners  map[string]listener `json:"listeners"`
}

type listener struct {
	Endpoint string `json:"endpoint"`
	Status   string `json:"status"`
}

// list answers the workers of a model or a group, or all.
func (r *Registry) list(w http.ResponseWriter, req *http.Request) {
	model, group := req.URL.Query()["model_name"], req.URL.Query()["routing_group"]
	all := []*listed{}
	r.mu.Lock()
	for i := range r.workers {
		g := &r.workers[i]
		if len(model) > 0 && model[0] != g.model || len(group) > 0 && group[0] != g.group {
			continue
		}
		last := len(all) - 1
		if last < 0 || all[last].InstanceID != g.instance || all[last].Model != g.model || all[last].Group != g.group {
			all = append(all, &listed{InstanceID: g.instance, Source: "zmq", Status: "active", Model: g.model, Group: g.group,
				BlockSize: g.blockSize, Endpoints: map[string]string{}, Listeners: map[string]listener{}})
			last++
		}
		rank := strconv.FormatUint(uint64(g.rank), 10)
		all[last].Endpoints[rank] = g.endpoint
		all[last].Listeners[rank] = listener{g.endpoint, "active"}
	}
	r.mu.Unlock()
	answer(w, http.StatusOK, all, nil)
}

// Counts returns the pairs of model and group that have workers, and the worker instances.
func (r *Registry) Counts() (models, instances int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var last *registered
	for i := range r.workers {
		g := &r.workers[i]
		if last == nil || last.served != g.served {
			models++
		}
		if last == nil || last.served != g.served || last.instance != g.instance {
			instances++
		}
		last = g
	}
	return models, instances
}

// readPeer reads the body of the peer requests.
func readPeer(w http.ResponseWriter, req *http.Request) (url string, err error) {
	var body struct {
		URL *string `json:"url"`
	}
	if err := read(w, req, &body); err != nil {
		return "", err
	}
	if body.URL == nil {
		return "", refuse(http.StatusUnprocessableEntity, "url is missing")
	}
	return *body.URL, nil
}

// peerList returns the URLs of the peers, in order.
func (r *Registry) peerList() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string{}, r.peers...) // never nil, which JSON would call null
}

// AddPeer adds a peer; adding one twice changes nothing.
func (r *Registry) AddPeer(url string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, there := slices.BinarySearch(r.peers, url)
	switch {
	case there:
		return nil
	case pool.CheckText(url) != nil || strings.Contains(url, " "):
		return refuse(http.StatusBadRequest, "url: %.100q has a space or a control character, or is longer than %d bytes", url, pool.MaxText)
	case len(r.peers) == maxPeers:
		return refuse(http.StatusTooManyRequests, "%d peers are registered, which is the limit", maxPeers)
	}
	r.peers = slices.Insert(r.peers, at, url)
	return nil
}

func (r *Registry) removePeer(url string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, there := slices.BinarySearch(r.peers, url)
	if !there {
		return refuse(http.StatusNotFound, "peer not found")
	}
	r.peers = slices.Delete(r.peers, at, at+1)
	return nil
}
