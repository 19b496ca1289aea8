package selector

import (
	"cmp"
	"maps"
	"net/http"
	"slices"

	"kvepp/internal/overrides"
	"kvepp/pool"
	"kvepp/scoring"
	"kvepp/serve/api"
)

// promptQuery is the body of POST /potential_loads and /overlap_scores.
type promptQuery struct {
	Model *string `json:"model_name"`
	Group *string `json:"routing_group"`
	promptFields
	Overrides *overrides.Overrides `json:"router_config_override"`
}

// potentialLoad is the load of a rank now, and with one more request.
type potentialLoad struct {
	Worker        uint64 `json:"worker_id"`
	Rank          uint32 `json:"dp_rank"`
	PrefillTokens int    `json:"potential_prefill_tokens"`
	DecodeBlocks  int    `json:"potential_decode_blocks"`
	Requests      int    `json:"active_requests"`
}

// groupLoads is one group in the response of GET /loads.
type groupLoads struct {
	Model         string          `json:"model_name"`
	Group         string          `json:"routing_group"`
	Loads         []potentialLoad `json:"loads"`
	Pending       int             `json:"pending_count"`
	PendingTokens int             `json:"pending_isl_tokens"`
}

// loads handles GET /loads.
func (s *Selector) loads(w http.ResponseWriter, req *http.Request) {
	s.mu.RLock()
	groups := slices.SortedFunc(maps.Keys(s.groups), func(a, b api.ModelGroup) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group))
	})
	rooms := make([]*waitingRoom, len(groups))
	for i, of := range groups {
		rooms[i] = s.groups[of].room
	}
	s.mu.RUnlock()
	snapshot := s.pool.Acquire()
	loads := s.loadBook.Loads(nil)
	byName := map[string][]potentialLoad{}
	for i := range snapshot.Workers {
		x := &snapshot.Workers[i]
		l := potentialLoad{Worker: x.InstanceID, Rank: x.Rank}
		if int(x.Worker) < len(loads) {
			load := &loads[x.Worker]
			l.PrefillTokens, l.DecodeBlocks, l.Requests = load.PrefillTokens, load.ActiveBlocks, load.Requests
		}
		byName[x.Model] = append(byName[x.Model], l)
	}
	snapshot.Release()
	all := []groupLoads{}
	for i, of := range groups {
		if asksFor(req, of) {
			l := groupLoads{Model: of.Model, Group: of.Group,
				Loads: append([]potentialLoad{}, byName[of.PoolModel()]...)}
			l.Pending, l.PendingTokens = rooms[i].pending()
			all = append(all, l)
		}
	}
	api.Reply(w, http.StatusOK, all, nil)
}

// withMatches parses a question, cuts its prompt, and looks up the cached blocks of all workers of its group. Then it
// calls f with these workers.
func (s *Selector) withMatches(
	w http.ResponseWriter,
	req *http.Request,
	f func(d *scratch, g group, cfg *scoring.Config, workers []*pool.Worker) (any, error),
) {
	var q promptQuery
	d := s.scratches.Get().(*scratch)
	defer s.scratches.Put(d)
	result, err := func() (any, error) {
		if err := api.ReadBody(w, req, &q); err != nil {
			return nil, err
		}
		cfg, err := overridden(s.cfg.Scoring, q.Overrides)
		if err != nil {
			return nil, err
		}
		g, err := s.groupNamed(modelGroupNamed(q.Model, q.Group))
		if err != nil {
			return nil, err
		}
		if err := q.cut(&d.prompt, g, true, cfg.AssumeKVReuse); err != nil {
			return nil, err
		}
		cfg.AssumeKVReuse = true // a prompt that must not share blocks has its own hashes by now
		snapshot := s.pool.Acquire()
		defer snapshot.Release()
		d.workers = d.workers[:0]
		for i := range snapshot.Workers {
			if x := &snapshot.Workers[i]; x.Model == g.name {
				d.workers = append(d.workers, x)
			}
		}
		if len(d.workers) == 0 {
			return nil, errNoEndpoints // the workers left a moment ago
		}
		s.match(d, g, &scoring.Constraints{})
		return f(d, g, &cfg, d.workers)
	}()
	api.Reply(w, http.StatusOK, result, err)
}

// potentialLoads handles POST /potential_loads.
func (s *Selector) potentialLoads(w http.ResponseWriter, req *http.Request) {
	s.withMatches(w, req, func(d *scratch, g group, cfg *scoring.Config, workers []*pool.Worker) (any, error) {
		loads, err := s.loadBook.PotentialLoads(scoring.Request{ISLTokens: d.prompt.isl}, d.candidates, cfg, nil)
		if err != nil {
			return nil, api.Refuse(http.StatusBadRequest, "%v", err)
		}
		all := make([]potentialLoad, len(workers))
		for i, x := range workers {
			all[i] = potentialLoad{
				x.InstanceID,
				x.Rank,
				loads[i].PotentialPrefillTokens,
				loads[i].PotentialActiveBlocks,
				loads[i].Requests,
			}
		}
		return all, nil
	})
}

// overlapScore is how much of a prompt one rank holds. Each tier includes the tiers before it; an extension does not.
type overlapScore struct {
	Worker         uint64 `json:"worker_id"`
	Rank           uint32 `json:"dp_rank"`
	Device         int    `json:"device_blocks"`
	Host           int    `json:"host_pinned_blocks"`
	Disk           int    `json:"disk_blocks"`
	HostExtension  int    `json:"host_pinned_extension_blocks"`
	DiskExtension  int    `json:"disk_extension_blocks"`
	SharedPastThis *int   `json:"shared_beyond_device_blocks"` // not known
}

// sharedCache is Dynamo's shared cache of all workers. kvepp does not query one.
type sharedCache struct {
	Enabled bool     `json:"enabled"`
	Blocks  int      `json:"total_hit_blocks"`
	Ranges  [][2]int `json:"ranges"`
	Error   *string  `json:"error"`
}

// overlapScores handles POST /overlap_scores.
func (s *Selector) overlapScores(w http.ResponseWriter, req *http.Request) {
	s.withMatches(w, req, func(d *scratch, g group, _ *scoring.Config, workers []*pool.Worker) (any, error) {
		all := make([]overlapScore, len(workers))
		for i, x := range workers {
			device, more := d.scores.Blocks(x.Worker), d.scores.Extension(x.Worker)
			all[i] = overlapScore{
				Worker:        x.InstanceID,
				Rank:          x.Rank,
				Device:        device,
				Host:          device + more.Host,
				Disk:          device + more.Total(),
				HostExtension: more.Host,
				DiskExtension: more.Disk + more.External,
			}
		}
		slices.SortFunc(all, func(a, b overlapScore) int {
			return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
		})
		return struct {
			BlockSize int            `json:"block_size"`
			Blocks    int            `json:"num_blocks"`
			Workers   []overlapScore `json:"workers"`
			Shared    sharedCache    `json:"shared_cache"`
		}{g.blockSize, len(d.prompt.local), all, sharedCache{Ranges: [][2]int{}}}, nil
	})
}
