package admin

import (
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"time"

	"kvepp/router"
	"kvepp/serve/api"
)

// Prefixes is what /debug/prefixes answers: the hottest prefixes of the kept decisions, as a radix tree.
type Prefixes struct {
	Requests int        `json:"requests"` // kept decisions whose prompts' blocks are known
	Since    *time.Time `json:"since"`    // of the oldest of these; null: there are none
	Roots    []Prefix   `json:"roots"`
	CutNodes int        `json:"cut_nodes"` // nodes that are left out
}

// Prefix is a node of the tree: blocks that all its requests begin with, after those of the nodes above it. It has
// hashes, and nothing of the prompts.
type Prefix struct {
	Hash      string `json:"hash"` // sequence hash of its last block
	Model     string `json:"model,omitempty"`
	LoRA      string `json:"lora,omitempty"`
	BlockSize int    `json:"block_size"` // tokens
	Depth     int    `json:"depth"`      // blocks before it
	Blocks    int    `json:"blocks"`
	Requests  int    `json:"requests"`
	Heat      int    `json:"heat"`          // blocks times requests
	Cached    int    `json:"cached_blocks"` // of heat, those predicted to be cached by the chosen workers
	Sessions  int    `json:"sessions"`
	// Session is a hash of the session's name, new with each start of kvepp, if all its requests are of one session.
	Session string `json:"session,omitempty"`
	// Workers hold most of its blocks, in any tier; MoreWorkers others hold some.
	Workers     []PrefixWorker `json:"workers"`
	MoreWorkers int            `json:"more_workers,omitempty"`
	CutNodes    int            `json:"cut_nodes,omitempty"` // below it
	Children    []Prefix       `json:"children,omitempty"`
}

// PrefixWorker is a worker that holds blocks of a prefix.
type PrefixWorker struct {
	Name   string `json:"name"`
	Rank   uint32 `json:"dp_rank"`
	Blocks int    `json:"blocks"`
}

const prefixes = 100 // nodes, unless ?n= says otherwise

// HandlePrefixes adds GET /debug/prefixes. ?n=N is the number of nodes, at most router.MaxPrefixes. One response is
// made at a time.
func HandlePrefixes(mux *http.ServeMux, r *router.Router) {
	var one sync.Mutex
	mux.HandleFunc("GET /debug/prefixes", func(w http.ResponseWriter, req *http.Request) {
		n := prefixes
		if given := req.URL.Query().Get("n"); given != "" {
			var err error
			if n, err = strconv.Atoi(given); err != nil || n < 1 || n > router.MaxPrefixes {
				api.Reply(w, 0, nil, api.Refuse(http.StatusBadRequest, "n must be a number of prefixes, 1 to %d",
					router.MaxPrefixes))
				return
			}
		}
		one.Lock()
		found := r.Prefixes(n)
		one.Unlock()
		out := Prefixes{Requests: found.Requests, Roots: prefixesOf(found.Roots), CutNodes: found.Cut}
		if !found.Since.IsZero() {
			out.Since = &found.Since
		}
		api.Reply(w, http.StatusOK, out, nil)
	})
}

func prefixesOf(nodes []*router.Prefix) []Prefix {
	out := make([]Prefix, 0, len(nodes))
	for _, p := range nodes {
		x := Prefix{Hash: fmt.Sprintf("%016x", uint64(p.Hash)), Model: p.Model, LoRA: p.LoRA, BlockSize: p.BlockSize,
			Depth: p.Depth, Blocks: p.Blocks, Requests: p.Requests, Heat: p.Heat(), Cached: p.Cached,
			Sessions: p.Sessions, Workers: []PrefixWorker{}, MoreWorkers: p.More, CutNodes: p.Cut}
		if p.Session != 0 {
			x.Session = fmt.Sprintf("%016x", p.Session)
		}
		for _, w := range p.Workers {
			x.Workers = append(x.Workers, PrefixWorker(w))
		}
		if len(p.Children) > 0 {
			x.Children = prefixesOf(p.Children)
		}
		out = append(out, x)
	}
	return out
}
