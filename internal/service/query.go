package service

import (
	"log/slog"
	"net/http"
	"strconv"
	"sync"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/kvblock"
	"kvepp/pool"
)

// Reader answers questions about an index over the workers of a pool. Its requests name a model and a routing group.
type Reader struct {
	pool  *pool.Pool
	index *indexer.Index
	feed  *feed.Feed // nil: there are no events
	log   *slog.Logger
	// serves says which model and routing group a worker belongs to.
	serves func(w *pool.Worker) served
	// named says that every worker has a model and a routing group. Else one without a model's name serves whatever a
	// request names, and a dump may tell of ours under other names.
	named   bool
	idle    sync.Pool  // of *lookup
	dumping sync.Mutex // held while a dump is written
}

// served is what requests name.
type served struct{ model, group string }

func (s served) String() string { return s.model + ":" + s.group }

// lookup holds the buffers of one query.
type lookup struct {
	local  []kvblock.LocalHash
	chain  []kvblock.SequenceHash
	scores indexer.OverlapScores
}

// NewReader returns a Reader over the endpoints that `kvepp serve` routes to. They have no routing groups but the
// default. f feeds the index; nil if nothing does, and then there is no dump either.
func NewReader(p *pool.Pool, index *indexer.Index, f *feed.Feed, log *slog.Logger) *Reader {
	return newReader(p, index, f, log, func(w *pool.Worker) served { return served{w.Model, defaultGroup} })
}

func newReader(
	p *pool.Pool,
	index *indexer.Index,
	f *feed.Feed,
	log *slog.Logger,
	serves func(*pool.Worker) served,
) *Reader {
	return &Reader{
		pool:   p,
		index:  index,
		feed:   f,
		log:    log,
		serves: serves,
		idle:   sync.Pool{New: func() any { return new(lookup) }},
	}
}

// Handle adds the requests that only read.
func (r *Reader) Handle(mux *http.ServeMux) {
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /query", r.query)
	mux.HandleFunc("POST /query_by_hash", r.queryByHash)
	if r.feed != nil {
		mux.HandleFunc("GET /dump", r.dump)
	}
}

// asked is what both queries name.
type asked struct {
	Model *string `json:"model_name"`
	Group *string `json:"routing_group"`
}

func (a *asked) served() (served, error) {
	if a.Model == nil {
		return served{}, refuse(http.StatusUnprocessableEntity, "model_name is missing")
	}
	s := served{*a.Model, defaultGroup}
	if a.Group != nil {
		s.group = *a.Group
	}
	return s, nil
}

// query answers how many tokens of a prompt each worker holds.
func (r *Reader) query(w http.ResponseWriter, req *http.Request) {
	var q struct {
		asked
		Tokens    []kvblock.Token `json:"token_ids"`
		LoRAName  string          `json:"lora_name"`
		CacheSalt string          `json:"cache_salt"`
	}
	if err := read(w, req, &q); err != nil {
		answer(w, 0, nil, err)
		return
	}
	if q.Tokens == nil {
		answer(w, 0, nil, refuse(http.StatusUnprocessableEntity, "token_ids is missing"))
		return
	}
	r.match(w, &q.asked, func(local []kvblock.LocalHash, o kvblock.HashOptions) []kvblock.LocalHash {
		o.LoRAName, o.CacheNamespace = q.LoRAName, q.CacheSalt
		return kvblock.AppendLocalHashes(local, q.Tokens, o)
	})
}

// queryByHash is query for a prompt given as local block hashes, 64 bits with a sign.
func (r *Reader) queryByHash(w http.ResponseWriter, req *http.Request) {
	var q struct {
		asked
		Hashes []int64 `json:"block_hashes"`
	}
	if err := read(w, req, &q); err != nil {
		answer(w, 0, nil, err)
		return
	}
	if q.Hashes == nil {
		answer(w, 0, nil, refuse(http.StatusUnprocessableEntity, "block_hashes is missing"))
		return
	}
	r.match(w, &q.asked, func(local []kvblock.LocalHash, _ kvblock.HashOptions) []kvblock.LocalHash {
		for _, h := range q.Hashes {
			local = append(local, kvblock.LocalHash(h))
		}
		return local
	})
}

// overlaps is the answer to both queries, in tokens. Keys are decimal numbers: instance ids and data-parallel ranks.
type overlaps struct {
	Scores      map[string]map[string]int `json:"scores"` // device memory, where it holds any
	Frequencies []int                     `json:"frequencies"`
	Instances   map[string]*instance      `json:"instances"`
}

// instance is the best of an instance's ranks; each tier counts what the tiers before it hold, too.
type instance struct {
	LongestMatched int            `json:"longest_matched"`
	GPU            int            `json:"gpu"`
	DP             map[string]int `json:"dp"` // device memory, by rank
	CPU            int            `json:"cpu"`
	Disk           int            `json:"disk"` // and external
}

// match writes the answer for a prompt that hash cuts into blocks.
func (r *Reader) match(
	w http.ResponseWriter,
	q *asked,
	hash func([]kvblock.LocalHash, kvblock.HashOptions) []kvblock.LocalHash,
) {
	want, err := q.served()
	if err != nil {
		answer(w, 0, nil, err)
		return
	}
	result, known := r.look(want, hash)
	if !known {
		answer(
			w,
			0,
			nil,
			refuse(http.StatusNotFound, "no indexer for model=%s routing_group=%s", want.model, want.group),
		)
		return
	}
	answer(w, http.StatusOK, result, nil)
}

// look returns the answer for a prompt that hash cuts into blocks; known is false when no worker serves it. The
// snapshot is let go here, before anything is written: a client that does not read must not keep numbers of workers
// that left.
func (r *Reader) look(
	want served,
	hash func([]kvblock.LocalHash, kvblock.HashOptions) []kvblock.LocalHash,
) (result overlaps, known bool) {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	l := r.idle.Get().(*lookup)
	defer r.idle.Put(l)

	result = overlaps{Scores: map[string]map[string]int{}, Frequencies: []int{}, Instances: map[string]*instance{}}
	var cut kvblock.HashOptions // how l.scores was made
	for i := range snapshot.Workers {
		worker := &snapshot.Workers[i]
		if of := r.serves(worker); of != want && (r.named || of != served{group: want.group}) {
			continue
		}
		known = true
		if worker.BlockSize == 0 || worker.Announced != 0 {
			continue // nothing of it can be matched
		}
		o := kvblock.HashOptions{BlockSize: worker.BlockSize, EAGLE: worker.EAGLE}
		if o.BlockSize != cut.BlockSize || o.EAGLE != cut.EAGLE {
			cut = o
			l.local = hash(l.local[:0], o)
			l.chain = kvblock.AppendSequenceHashes(l.chain[:0], l.local)
			r.index.FindMatches(l.chain, &l.scores)
		}
		result.add(worker, &l.scores)
	}
	return result, known
}

// add counts one worker's blocks.
func (o *overlaps) add(w *pool.Worker, scores *indexer.OverlapScores) {
	device := scores.Blocks(w.Worker)
	if device+scores.Extension(w.Worker).Total() == 0 {
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
		o.Instances[id] = &instance{DP: map[string]int{}}
	}
	o.Instances[id].add(w, scores)
}

// add counts the blocks of one of the instance's ranks.
func (in *instance) add(w *pool.Worker, scores *indexer.OverlapScores) {
	device, more := scores.Blocks(w.Worker), scores.Extension(w.Worker)
	in.DP[rankName(w)] = device * w.BlockSize
	in.GPU = max(in.GPU, device*w.BlockSize)
	in.CPU = max(in.CPU, (device+more.Host)*w.BlockSize)
	in.Disk = max(in.Disk, (device+more.Total())*w.BlockSize)
	in.LongestMatched = in.Disk
}

func rankName(w *pool.Worker) string { return strconv.FormatUint(uint64(w.Rank), 10) }
