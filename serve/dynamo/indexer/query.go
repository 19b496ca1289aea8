// Package indexer is the HTTP API of Dynamo's standalone indexer, field for field: which worker holds how much of a
// prompt. Reader has the requests that only read, which `kvepp serve` offers too. Registry adds workers, models and
// peers, for `kvepp indexer`. Neither writes to the index except through indexer/feed.
//
// Concurrency: handlers are called from any goroutine.
//
// Source: dynamo-kv-router 1.6.1, services::indexer, and what `python -m dynamo.indexer` answers.
package indexer

import (
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"sync"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/connlimit"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/serve/api"
)

// Reader answers queries about an index over the workers of a pool. Its requests name a model and a routing group.
type Reader struct {
	pool  *pool.Pool
	index *indexer.Index
	feed  *feed.Feed // nil: there are no events
	log   *slog.Logger
	// modelGroupOf returns which model and routing group a worker belongs to.
	modelGroupOf func(w *pool.Worker) api.ModelGroup
	// modelsNamed means that every worker has a model and a routing group. Otherwise a worker without a model serves
	// any model, and a peer's dump may have our workers under other names.
	modelsNamed bool
	idle        sync.Pool  // of *lookup
	dumping     sync.Mutex // held while a dump is written
}

// lookup holds the buffers of one query.
type lookup struct {
	local  []kvblock.LocalHash
	chain  []kvblock.SequenceHash
	prompt indexer.Prompt // with chain
	scores indexer.OverlapScores
}

// NewReader returns a Reader over the endpoints that `kvepp serve` routes to. All belong to api.DefaultGroup. f feeds
// the index; if it is nil, there are no events and no dump.
func NewReader(p *pool.Pool, index *indexer.Index, f *feed.Feed, log *slog.Logger) *Reader {
	return &Reader{
		pool:  p,
		index: index,
		feed:  f,
		log:   log,
		modelGroupOf: func(w *pool.Worker) api.ModelGroup {
			return api.ModelGroup{Model: w.Model, Group: api.DefaultGroup}
		},
		idle: sync.Pool{New: func() any { return new(lookup) }},
	}
}

// NewGroupReader returns a Reader over registered workers. Their model in the pool is an api.ModelGroup.PoolModel. f
// may be nil, as for NewReader.
func NewGroupReader(p *pool.Pool, index *indexer.Index, f *feed.Feed, log *slog.Logger) *Reader {
	r := NewReader(p, index, f, log)
	r.modelGroupOf = func(w *pool.Worker) api.ModelGroup { return api.ParsePoolModel(w.Model) }
	r.modelsNamed = true
	return r
}

// Handle adds the read-only requests.
func (r *Reader) Handle(mux *http.ServeMux) {
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /query", r.query)
	mux.HandleFunc("POST /query_by_hash", r.queryByHash)
	if r.feed != nil {
		// A client that takes too long to read is replaced by the next.
		mux.HandleFunc("GET /dump", connlimit.Limit(r.Dump, refuseDump, 1, dumpPatience))
	}
}

// modelNames is the part that both queries have.
type modelNames struct {
	Model *string `json:"model_name"`
	Group *string `json:"routing_group"`
}

func (a *modelNames) modelGroup() (api.ModelGroup, error) {
	if a.Model == nil {
		return api.ModelGroup{}, api.Missing("model_name")
	}
	s := api.ModelGroup{Model: *a.Model, Group: api.DefaultGroup}
	if a.Group != nil {
		s.Group = *a.Group
	}
	return s, nil
}

// query returns how many tokens of a prompt each worker holds.
func (r *Reader) query(w http.ResponseWriter, req *http.Request) {
	var q struct {
		modelNames
		Tokens    []kvblock.Token `json:"token_ids"`
		LoRAName  string          `json:"lora_name"`
		CacheSalt string          `json:"cache_salt"`
	}
	if err := api.ReadBody(w, req, &q); err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	if q.Tokens == nil {
		api.Reply(w, 0, nil, api.Missing("token_ids"))
		return
	}
	r.match(w, &q.modelNames, func(l *lookup, o kvblock.HashOptions) {
		o.LoRAName, o.CacheNamespace = q.LoRAName, q.CacheSalt
		l.local = kvblock.AppendLocalHashes(l.local[:0], q.Tokens, o)
		l.prompt = indexer.Prompt{Tokens: len(q.Tokens), IDs: q.Tokens, Options: o}
	})
}

// queryByHash is query for a prompt given as local block hashes (64-bit signed integers).
func (r *Reader) queryByHash(w http.ResponseWriter, req *http.Request) {
	var q struct {
		modelNames
		Hashes []int64 `json:"block_hashes"`
	}
	if err := api.ReadBody(w, req, &q); err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	if q.Hashes == nil {
		api.Reply(w, 0, nil, api.Missing("block_hashes"))
		return
	}
	r.match(w, &q.modelNames, func(l *lookup, _ kvblock.HashOptions) {
		l.local = l.local[:0]
		for _, h := range q.Hashes {
			l.local = append(l.local, kvblock.LocalHash(h))
		}
		l.prompt = indexer.Prompt{Tokens: math.MaxInt}
	})
}

// overlaps is the response to both queries, in tokens. Keys are decimal numbers: instance ids and data-parallel ranks.
type overlaps struct {
	Scores      map[string]map[string]int   `json:"scores"` // device memory; absent if it has no blocks
	Frequencies []int                       `json:"frequencies"`
	Instances   map[string]*InstanceOverlap `json:"instances"`
}

// InstanceOverlap is the best of an instance's ranks. Each tier includes the tiers before it.
type InstanceOverlap struct {
	LongestMatched int            `json:"longest_matched"`
	GPU            int            `json:"gpu"`
	DP             map[string]int `json:"dp"` // device memory, by rank
	CPU            int            `json:"cpu"`
	Disk           int            `json:"disk"` // includes external storage
	// Hybrid has the ranks with a hybrid model; absent if there are none.
	Hybrid map[string]*HybridOverlap `json:"hybrid,omitempty"`
}

// HybridOverlap is how much of a prompt one rank of a hybrid model holds, in tokens. Dynamo has no such response.
type HybridOverlap struct {
	Classes       []string `json:"classes"`        // of layers beside full attention
	FullAttention int      `json:"full_attention"` // held on the device by full attention
	// Unusable tokens of these cannot be reused, because layers of the kind UnusableBy do not hold what they need.
	Unusable   int    `json:"unusable"`
	UnusableBy string `json:"unusable_by,omitempty"` // window, state or chunk
	// UpperBound says that the response counts full attention's blocks, and that fewer may be reusable.
	UpperBound bool `json:"upper_bound"`
}

// addHybrid adds what the other layers of a hybrid model hold, if w's model is one.
func (in *InstanceOverlap) addHybrid(w *pool.Worker, scores *indexer.OverlapScores) {
	cut := scores.Cut(w.Worker)
	if w.Classes == nil && !w.UpperBound && cut == (indexer.Cut{}) {
		return
	}
	held := max(cut.Held, scores.Blocks(w.Worker))
	h := &HybridOverlap{Classes: []string{}, FullAttention: held * w.BlockSize, Unusable: cut.Blocks * w.BlockSize,
		UpperBound: w.UpperBound || cut.UpperBound}
	if cut.Blocks > 0 {
		h.UnusableBy = cut.Kind.String()
	}
	if w.Classes != nil {
		for _, c := range w.Classes[:w.Classes.Len()] {
			h.Classes = append(h.Classes, c.String())
		}
	}
	if in.Hybrid == nil {
		in.Hybrid = map[string]*HybridOverlap{}
	}
	in.Hybrid[rankName(w)] = h
}

// match writes the response for a prompt that hash cuts into blocks.
func (r *Reader) match(w http.ResponseWriter, q *modelNames, hash func(*lookup, kvblock.HashOptions)) {
	want, err := q.modelGroup()
	if err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	result, known := r.overlaps(want, hash)
	if !known {
		api.Reply(w,
			0, nil, api.Refuse(http.StatusNotFound, "no indexer for model=%s routing_group=%s", want.Model, want.Group))
		return
	}
	api.Reply(w, http.StatusOK, result, nil)
}

// overlaps returns the response for a prompt that hash cuts into blocks; known is false if no worker serves the model.
// It releases the snapshot before the response is written: a client that does not read must not keep the numbers of
// workers that left.
func (r *Reader) overlaps(want api.ModelGroup, hash func(*lookup, kvblock.HashOptions)) (result overlaps, known bool) {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	l := r.idle.Get().(*lookup)
	defer func() {
		l.prompt = indexer.Prompt{} // it keeps the request's token ids
		r.idle.Put(l)
	}()

	result = overlaps{Scores: map[string]map[string]int{}, Frequencies: []int{},
		Instances: map[string]*InstanceOverlap{}}
	var cut kvblock.HashOptions // the options of l.scores' blocks
	for i := range snapshot.Workers {
		worker := &snapshot.Workers[i]
		if of := r.modelGroupOf(worker); of != want && (r.modelsNamed || of != api.ModelGroup{Group: want.Group}) {
			continue
		}
		known = true
		if worker.BlockSize == 0 || worker.Announced != 0 {
			continue // none of its blocks can match
		}
		o := kvblock.HashOptions{BlockSize: worker.BlockSize, EAGLE: worker.EAGLE}
		if o.BlockSize != cut.BlockSize || o.EAGLE != cut.EAGLE {
			cut = o
			hash(l, o)
			l.chain = kvblock.AppendSequenceHashes(l.chain[:0], l.local)
			l.prompt.Chain = l.chain
			r.index.FindPrompt(&l.prompt, &l.scores)
		}
		result.add(worker, &l.scores)
	}
	return result, known
}

// add counts one worker's blocks.
func (o *overlaps) add(w *pool.Worker, scores *indexer.OverlapScores) {
	device := scores.Blocks(w.Worker)
	if device+scores.Extension(w.Worker).Total()+scores.Cut(w.Worker).Held == 0 {
		return
	}
	id := strconv.FormatUint(w.InstanceID, 10)
	if device > 0 {
		if o.Scores[id] == nil {
			o.Scores[id] = map[string]int{}
		}
		o.Scores[id][rankName(w)] = device * w.BlockSize
	}
	if o.Instances[id] == nil {
		o.Instances[id] = &InstanceOverlap{DP: map[string]int{}}
	}
	o.Instances[id].Add(w, scores)
}

// Add counts the blocks of one of the instance's ranks.
func (in *InstanceOverlap) Add(w *pool.Worker, scores *indexer.OverlapScores) {
	device, more := scores.Blocks(w.Worker), scores.Extension(w.Worker)
	in.DP[rankName(w)] = device * w.BlockSize
	in.GPU = max(in.GPU, device*w.BlockSize)
	in.CPU = max(in.CPU, (device+more.Host)*w.BlockSize)
	in.Disk = max(in.Disk, (device+more.Total())*w.BlockSize)
	in.LongestMatched = in.Disk
	in.addHybrid(w, scores)
}

func rankName(w *pool.Worker) string { return strconv.FormatUint(uint64(w.Rank), 10) }
