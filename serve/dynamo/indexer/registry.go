package indexer

import (
	"cmp"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/pool"
	"kvepp/scoring"
	"kvepp/serve/api"
)

// maxPeers bounds the list of peers.
const maxPeers = 1 << 10

// Registry is Dynamo's standalone indexer. Clients register workers, and kvepp follows the workers' events. Create it
// with NewRegistry.
type Registry struct {
	*Reader
	pool *pool.Pool

	mu      sync.Mutex
	workers map[rankRef]*rankRecord         // guarded by mu
	ranks   map[workerRef][]uint32          // of each worker; guarded by mu
	groups  map[api.ModelGroup]*groupRecord // guarded by mu
	bytes   int                             // of all workers, an estimate; guarded by mu
	peers   []string                        // guarded by mu
}

// workerOf names a worker, and rankOf one of its ranks.
type (
	workerRef struct {
		api.ModelGroup
		instance uint64
	}
	rankRef struct {
		workerRef
		rank uint32
	}
)

// groupRecord holds the properties that the workers of a model and group share.
type groupRecord struct {
	blockSize int
	ranks     int // of all its workers
}

// rankRecord is one rank of one worker.
type rankRecord struct {
	rankRef
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

// NewRegistry returns a Registry without workers. No other code may update p. f watches p and follows the workers'
// events.
func NewRegistry(p *pool.Pool, index *indexer.Index, f *feed.Feed, log *slog.Logger) *Registry {
	r := &Registry{
		pool:    p,
		workers: map[rankRef]*rankRecord{},
		ranks:   map[workerRef][]uint32{},
		groups:  map[api.ModelGroup]*groupRecord{},
	}
	r.Reader = NewGroupReader(p, index, f, log)
	return r
}

// Handle adds all requests.
func (r *Registry) Handle(mux *http.ServeMux) {
	r.Reader.Handle(mux)
	mux.HandleFunc("POST /register", func(w http.ResponseWriter, req *http.Request) {
		var body Registration
		err := api.ReadBody(w, req, &body)
		if err == nil {
			err = r.Register(body)
		}
		api.Reply(w, http.StatusCreated, api.StatusOK, err)
	})
	mux.HandleFunc("POST /unregister", func(w http.ResponseWriter, req *http.Request) {
		var body Registration
		err := api.ReadBody(w, req, &body)
		if err == nil {
			err = r.unregister(body)
		}
		api.Reply(w, http.StatusOK, api.StatusOK, err)
	})
	mux.HandleFunc("GET /workers", r.list)
	mux.HandleFunc("GET /peers",
		func(w http.ResponseWriter, _ *http.Request) { api.Reply(w, http.StatusOK, r.peerList(), nil) })
	mux.HandleFunc("POST /register_peer", func(w http.ResponseWriter, req *http.Request) {
		url, err := readPeer(w, req)
		if err == nil {
			err = r.AddPeer(url)
		}
		api.Reply(w, http.StatusCreated, api.StatusOK, err)
	})
	mux.HandleFunc("POST /deregister_peer", func(w http.ResponseWriter, req *http.Request) {
		url, err := readPeer(w, req)
		if err == nil {
			err = r.removePeer(url)
		}
		api.Reply(w, http.StatusOK, api.StatusOK, err)
	})
}

func (b *Registration) registered() (rankRecord, error) {
	for _, field := range []struct {
		name  string
		there bool
	}{{"instance_id", b.InstanceID != nil}, {"endpoint", b.Endpoint != nil}, {"model_name", b.Model != nil},
		{"block_size", b.BlockSize != nil}} {
		if !field.there {
			return rankRecord{}, api.Missing(field.name)
		}
	}
	g := rankRecord{
		rankRef:   rankRef{workerRef{api.ModelGroup{Model: *b.Model, Group: api.DefaultGroup}, *b.InstanceID}, 0},
		endpoint:  *b.Endpoint,
		blockSize: *b.BlockSize,
	}
	if b.Group != nil {
		g.Group = *b.Group
	}
	if b.Rank != nil {
		g.rank = *b.Rank
	}
	if b.ReplayEndpoint != nil {
		g.replay = *b.ReplayEndpoint
	}
	for _, field := range []struct{ name, text string }{
		{"endpoint", g.endpoint}, {"model_name", g.Model}, {"routing_group", g.Group}, {"replay_endpoint", g.replay},
	} {
		if err := pool.CheckText(field.text); err != nil {
			return g, api.Refuse(http.StatusBadRequest, "%s: %v", field.name, err)
		}
	}
	if g.blockSize < 1 || g.blockSize > scoring.MaxBlockSize {
		return g, api.Refuse(http.StatusBadRequest,
			"block_size %d is not a number of tokens from 1 to %d", g.blockSize, scoring.MaxBlockSize)
	}
	if err := pool.CheckTCP(g.endpoint, 1); err != nil {
		return g, api.Refuse(http.StatusBadRequest, "invalid ZMQ endpoint: %v", err)
	}
	if g.replay != "" {
		if err := pool.CheckTCP(g.replay, 1); err != nil {
			return g, api.Refuse(http.StatusBadRequest, "invalid replay endpoint: %v", err)
		}
	}
	return g, nil
}

// order sorts by model, instance and rank.
func order(a, b *rankRecord) int {
	return cmp.Or(cmp.Compare(a.Model, b.Model),
		cmp.Compare(a.Group, b.Group), cmp.Compare(a.instance, b.instance), cmp.Compare(a.rank, b.rank))
}

// Register adds a worker and starts to follow its events. An error names the field that is wrong.
func (r *Registry) Register(b Registration) error {
	g, err := b.registered()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.workers) == api.MaxRanks {
		return api.Refuse(http.StatusTooManyRequests, "%d workers are registered, which is the limit", api.MaxRanks)
	}
	group := r.groups[g.ModelGroup]
	switch {
	case group != nil && group.blockSize != g.blockSize:
		return api.Refuse(http.StatusConflict,
			"block_size mismatch for model=%s routing_group=%s: existing=%d, requested=%d", g.Model, g.Group,
			group.blockSize, g.blockSize)
	case r.workers[g.rankRef] != nil:
		return api.Refuse(http.StatusConflict, "instance %d dp_rank %d already registered", g.instance, g.rank)
	}
	switch {
	case group == nil && len(r.groups) == api.MaxGroups:
		return api.Refuse(http.StatusTooManyRequests,
			"%d models and routing groups have workers, which is the limit", api.MaxGroups)
	case r.bytes+g.bytes() > api.MaxWorkerBytes:
		return api.Refuse(http.StatusTooManyRequests,
			"what is known of workers takes %d bytes, of at most %d", r.bytes, api.MaxWorkerBytes)
	}
	if group == nil {
		group = &groupRecord{blockSize: g.blockSize}
		r.groups[g.ModelGroup] = group
	}
	group.ranks++
	r.bytes += g.bytes()
	r.workers[g.rankRef] = &g
	r.ranks[g.workerRef] = append(r.ranks[g.workerRef], g.rank)
	r.pool.Change(nil, []pool.Endpoint{g.poolEndpoint()})
	if err := r.feed.Room(); err != nil {
		r.forget(g.workerRef, func(rank uint32) bool { return rank == g.rank })
		return api.Refuse(http.StatusServiceUnavailable, "%v", err)
	}
	return nil
}

// poolEndpoint is the rank as an endpoint of the pool. The name is quoted, so that different workers have different
// names in the pool.
func (g *rankRecord) poolEndpoint() pool.Endpoint {
	return pool.Endpoint{Name: g.poolName(), InstanceID: g.instance, Model: g.ModelGroup.PoolModel(),
		DataParallelStartRank: g.rank, DataParallelSize: 1, KVEvents: g.endpoint, KVReplay: g.replay,
		BlockSize: g.blockSize}
}

// bytes estimates the memory of a rank here and in the pool.
func (g *rankRecord) bytes() int {
	return 2*api.RecordBytes + 4*(len(g.Model)+len(g.Group)) + len(g.endpoint) + len(g.replay)
}

func (of *rankRef) poolName() string {
	return fmt.Sprintf("%s/%d/%d", of.ModelGroup.PoolModel(), of.instance, of.rank)
}

// forget removes the ranks of a worker for which wanted returns true, and returns their number. The caller holds r.mu.
func (r *Registry) forget(of workerRef, wanted func(rank uint32) bool) int {
	var names []string
	left := slices.DeleteFunc(r.ranks[of], func(rank uint32) bool {
		if !wanted(rank) {
			return false
		}
		id := rankRef{of, rank}
		names = append(names, id.poolName())
		r.bytes -= r.workers[id].bytes()
		delete(r.workers, id)
		return true
	})
	if len(names) == 0 {
		return 0
	}
	if r.ranks[of] = left; len(left) == 0 {
		delete(r.ranks, of)
	}
	if group := r.groups[of.ModelGroup]; group.ranks == len(names) {
		delete(r.groups, of.ModelGroup)
	} else {
		group.ranks -= len(names)
	}
	r.pool.Change(names, nil)
	return len(names)
}

// unregister removes a rank of a worker, or all its ranks.
func (r *Registry) unregister(b Registration) error {
	if b.InstanceID == nil || b.Model == nil {
		return api.Refuse(http.StatusUnprocessableEntity, "instance_id or model_name is missing")
	}
	want := api.ModelGroup{Model: *b.Model, Group: api.DefaultGroup}
	if b.Group != nil {
		want.Group = *b.Group
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.forget(workerRef{want, *b.InstanceID}, func(rank uint32) bool {
		return b.Rank == nil ||
			rank == *b.Rank
	}) > 0 {
		return nil
	}
	// The group does not have the worker. Another one may.
	elsewhere := api.ModelGroup{}
	for of := range r.ranks {
		if of.instance == *b.InstanceID && of.ModelGroup != want &&
			(elsewhere == api.ModelGroup{} || cmp.Or(cmp.Compare(of.Model, elsewhere.Model),
				cmp.Compare(of.Group, elsewhere.Group)) > 0) {
			elsewhere = of.ModelGroup
		}
	}
	switch {
	case elsewhere != api.ModelGroup{}:
		return api.Refuse(http.StatusNotFound,
			"instance %d is registered for model=%s routing_group=%s", *b.InstanceID, elsewhere.Model, elsewhere.Group)
	case b.Rank != nil:
		return api.Refuse(http.StatusNotFound, "instance %d dp_rank %d not found", *b.InstanceID, *b.Rank)
	}
	return api.Refuse(http.StatusNotFound, "instance %d not found", *b.InstanceID)
}

// listedWorker is a worker in the response of GET /workers.
type listedWorker struct {
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

// list returns the workers of a model or a group, or all workers.
func (r *Registry) list(w http.ResponseWriter, req *http.Request) {
	model, group := req.URL.Query()["model_name"], req.URL.Query()["routing_group"]
	all := []*listedWorker{}
	r.mu.Lock()
	ordered := slices.SortedFunc(maps.Values(r.workers), order) // records do not change once they are stored
	r.mu.Unlock()
	for _, g := range ordered {
		if len(model) > 0 && model[0] != g.Model || len(group) > 0 && group[0] != g.Group {
			continue
		}
		last := len(all) - 1
		if last < 0 || all[last].InstanceID != g.instance || all[last].Model != g.Model || all[last].Group != g.Group {
			all = append(all,
				&listedWorker{InstanceID: g.instance, Source: "zmq", Status: "active", Model: g.Model, Group: g.Group,
					BlockSize: g.blockSize, Endpoints: map[string]string{}, Listeners: map[string]listener{}})
			last++
		}
		rank := strconv.FormatUint(uint64(g.rank), 10)
		all[last].Endpoints[rank] = g.endpoint
		all[last].Listeners[rank] = listener{g.endpoint, "active"}
	}
	api.Reply(w, http.StatusOK, all, nil)
}

// readPeer reads the body of the peer requests.
func readPeer(w http.ResponseWriter, req *http.Request) (url string, err error) {
	var body struct {
		URL *string `json:"url"`
	}
	if err := api.ReadBody(w, req, &body); err != nil {
		return "", err
	}
	if body.URL == nil {
		return "", api.Missing("url")
	}
	return *body.URL, nil
}

// peerList returns the URLs of the peers, in order.
func (r *Registry) peerList() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string{}, r.peers...) // never nil, which JSON encodes as null
}

// AddPeer adds a peer. Adding a known peer has no effect.
func (r *Registry) AddPeer(url string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, there := slices.BinarySearch(r.peers, url)
	switch {
	case there:
		return nil
	case pool.CheckText(url) != nil || strings.Contains(url, " "):
		return api.Refuse(http.StatusBadRequest,
			"url: %.100q has a space or a control character, or is longer than %d bytes", url, pool.MaxText)
	case len(r.peers) == maxPeers:
		return api.Refuse(http.StatusTooManyRequests, "%d peers are registered, which is the limit", maxPeers)
	}
	r.peers = slices.Insert(r.peers, at, url)
	return nil
}

func (r *Registry) removePeer(url string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, there := slices.BinarySearch(r.peers, url)
	if !there {
		return api.Refuse(http.StatusNotFound, "peer not found")
	}
	r.peers = slices.Delete(r.peers, at, at+1)
	return nil
}
