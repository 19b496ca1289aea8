package selector

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"time"

	"kvepp/indexer"
	"kvepp/internal/overrides"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
)

// promptFields are a prompt: token ids (for a prompt with media, those of the model's processor), or hashes.
type promptFields struct {
	Tokens         []kvblock.Token `json:"token_ids"`
	Media          *mediaPrompt    `json:"mm_routing_info"` // has precedence if it has tokens
	BlockMedia     []*blockMedia   `json:"block_mm_infos"`  // of Tokens, by block
	BlockHashes    []int64         `json:"block_hashes"`    // local hashes
	SequenceHashes []int64         `json:"sequence_hashes"` // of the same blocks
	ISLTokens      *uint64         `json:"isl_tokens"`
	LoRAName       string          `json:"lora_name"`
	CacheSalt      string          `json:"cache_salt"`
	EAGLE          *bool           `json:"is_eagle"`
}

type mediaPrompt struct {
	Tokens     []kvblock.Token `json:"routing_token_ids"`
	BlockMedia []*blockMedia   `json:"block_mm_infos"`
}

// blockMedia names the media whose placeholders a block contains.
type blockMedia struct {
	Objects []struct {
		Hash uint64 `json:"mm_hash"`
	} `json:"mm_objects"`
}

// prompt is a prompt that is cut into the blocks of a group.
type prompt struct {
	local   []kvblock.LocalHash
	chain   []kvblock.SequenceHash // the blocks' hashes in the index
	tracked []kvblock.SequenceHash // the blocks' hashes in the load book
	isl     int
	ids     []kvblock.Token     // nil: only hashes are known
	options kvblock.HashOptions // of chain
}

// cut fills p with the prompt in blocks of g. whole: compute local and chain too, and not only the hashes to book.
// reuse: equal blocks have the same hash.
func (f *promptFields) cut(p *prompt, g group, whole, reuse bool) error {
	o := kvblock.HashOptions{
		BlockSize:      g.blockSize,
		EAGLE:          deref(f.EAGLE, g.eagle),
		LoRAName:       f.LoRAName,
		CacheNamespace: f.CacheSalt,
	}
	tokens, media := f.Tokens, f.BlockMedia
	if f.Media != nil && len(f.Media.Tokens) > 0 {
		tokens, media = f.Media.Tokens, f.Media.BlockMedia
	}
	if tokens != nil {
		for _, m := range media {
			var hashes []uint64
			if m != nil {
				for _, object := range m.Objects {
					hashes = append(hashes, object.Hash)
				}
			}
			o.MediaHashes = append(o.MediaHashes, hashes)
		}
		p.isl, p.ids, p.options = len(tokens), tokens, o
		p.local = kvblock.AppendLocalHashes(p.local[:0], tokens, o)
		p.chain = kvblock.AppendSequenceHashes(p.chain[:0], p.local)
		p.tracked = append(p.tracked[:0], p.chain...)
		if !reuse {
			for i := range p.tracked {
				p.tracked[i] = kvblock.SequenceHash(rand.Uint64())
			}
		}
		return nil
	}
	for _, field := range []struct {
		name string
		lack bool
	}{{"block_hashes", whole && f.BlockHashes == nil}, {"sequence_hashes", f.SequenceHashes == nil},
		{"isl_tokens", f.ISLTokens == nil}} {
		if field.lack {
			return api.Refuse(http.StatusBadRequest, "%s is required without token_ids", field.name)
		}
	}
	switch isl := *f.ISLTokens; {
	case isl > scoring.MaxISLTokens:
		return api.Refuse(http.StatusBadRequest, "isl_tokens must be at most %d", int64(scoring.MaxISLTokens))
	case whole && isl == 0:
		return api.Refuse(http.StatusBadRequest, "isl_tokens must be greater than 0")
	case whole && len(f.BlockHashes) != len(f.SequenceHashes):
		return api.Refuse(http.StatusBadRequest,
			"block_hashes length %d must match sequence_hashes length %d", len(f.BlockHashes), len(f.SequenceHashes))
	}
	p.isl, p.ids = int(*f.ISLTokens), nil
	p.local, p.tracked = p.local[:0], p.tracked[:0]
	for _, h := range f.BlockHashes {
		p.local = append(p.local, kvblock.LocalHash(h))
	}
	for _, h := range f.SequenceHashes {
		p.tracked = append(p.tracked, kvblock.SequenceHash(h))
	}
	p.chain = kvblock.AppendSequenceHashes(p.chain[:0], p.local)
	return nil
}

// overridden returns c with a request's overrides, or a Refusal of overrides that are outside their limits. nil: the
// request has none.
func overridden(c scoring.Config, o *overrides.Overrides) (scoring.Config, error) {
	if o == nil {
		return c, nil
	}
	if err := o.Check(); err != nil {
		return c, api.Refuse(http.StatusUnprocessableEntity, "router_config_override: %v", err)
	}
	return c.With(o), nil
}

// ranked is one rank of a worker, or all its ranks if Rank is nil.
type ranked struct {
	ID   *uint64 `json:"worker_id"`
	Rank *uint32 `json:"dp_rank"`
}

// selectRequest is the body of POST /select and /select_and_reserve.
type selectRequest struct {
	Model *string `json:"model_name"`
	Group *string `json:"routing_group"`
	ID    *string `json:"selection_id"`
	promptFields
	Overrides *overrides.Overrides `json:"router_config_override"`
	// ExpectedOutputTokens has no effect, as in Dynamo: clients report the rest of a response themselves, see
	// outputBlock.
	ExpectedOutputTokens *uint32         `json:"expected_output_tokens"`
	PriorityJump         *float64        `json:"priority_jump"` // this and the next apply to selections that wait
	StrictPriority       *uint32         `json:"strict_priority"`
	SessionID            *string         `json:"session_id"`
	Session              *sessionContext `json:"session_context"`
	Affinity             *ranked         `json:"affinity_target"` // preferred if it is eligible
	Pinned               *ranked         `json:"pinned_worker"`   // the only eligible worker
	Allowed              []uint64        `json:"allowed_worker_ids"`
	Constraints          struct {
		Required  []string           `json:"required_taints"`
		Preferred map[string]float32 `json:"preferred_taints"`
	} `json:"routing_constraints"`
	Advisory bool `json:"advisory"`
}

func (q *selectRequest) constraints() *scoring.Constraints {
	c := scoring.Constraints(q.Constraints)
	return &c
}

type sessionContext struct {
	ID           *string             `json:"session_id"`
	Parent       *string             `json:"parent_session_id"`
	Final        *bool               `json:"session_final"`
	InputTrigger *inputTrigger       `json:"input_trigger"`
	Headers      map[string][]string `json:"agent_headers"`
}

// inputTrigger is one of three constants.
type inputTrigger string

func (t *inputTrigger) UnmarshalText(text []byte) error {
	switch *t = inputTrigger(text); *t {
	case "user_message", "tool_result", "other":
		return nil
	}
	return fmt.Errorf("session_context: input_trigger %q is none of user_message, tool_result, other", text)
}

// session returns the id of the request's session. It is nil if the request has none or names a worker itself.
func (q *selectRequest) session() *string {
	switch {
	case q.Affinity != nil || q.Pinned != nil:
		return nil
	case q.Session != nil:
		return q.Session.ID
	}
	return q.SessionID
}

// check returns an error if a nested object lacks a required field.
func (q *selectRequest) check() error {
	switch {
	case q.Pinned != nil && q.Pinned.ID == nil:
		return api.Missing("pinned_worker.worker_id")
	case q.Pinned != nil && q.Pinned.Rank == nil:
		return api.Missing("pinned_worker.dp_rank")
	case q.Affinity != nil && q.Affinity.ID == nil:
		return api.Missing("affinity_target.worker_id")
	case q.Session != nil && q.Session.ID == nil:
		return api.Missing("session_context.session_id")
	case q.ID != nil:
		return checkName(*q.ID)
	}
	return nil
}

// checkName returns an error if a reservation cannot have that name. A reservation without a name could not be ended.
func checkName(id string) error {
	switch {
	case id == "":
		return api.Refuse(http.StatusBadRequest, "selection_id is empty")
	case len(id) > pool.MaxText:
		return api.Refuse(http.StatusBadRequest, "selection_id is longer than %d bytes", pool.MaxText)
	}
	if err := pool.CheckText(id); err != nil {
		return api.Refuse(http.StatusBadRequest, "selection_id: %v", err)
	}
	return nil
}

// scratch is the reusable memory of one selection.
type scratch struct {
	prompt     prompt
	cut        scoring.Prompt
	chains     [1][]kvblock.SequenceHash
	scores     indexer.OverlapScores
	workers    []*pool.Worker // the candidates
	candidates []scoring.Candidate
	terms      []scoring.Terms
	costs      []float64
}

// selection is the result of a selection.
type selection struct {
	of      api.ModelGroup
	group   group
	record  *record
	rank    uint32
	worker  kvblock.Worker
	session string // empty if the session does not count

	blocks    int // tracked blocks of the prompt
	overlap   indexerapi.InstanceOverlap
	effective int // tokens to prefill
	terms     scoring.Terms
	cfg       scoring.Config
}

// groupNamed returns a group that has workers, or an error.
func (s *Selector) groupNamed(of api.ModelGroup) (group, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if g := s.groups[of]; g != nil && g.workers > 0 {
		return *g, nil
	}
	for _, g := range s.groups {
		if g.workers > 0 {
			return group{}, api.Refuse(http.StatusServiceUnavailable, "no schedulable workers for %s", of.Describe())
		}
	}
	return group{}, api.Refuse(http.StatusServiceUnavailable, "no schedulable workers are available")
}

func (s *Selector) recordOf(id uint64) *record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.workers[id]
}

var errNoEndpoints = api.Refuse(http.StatusServiceUnavailable, "no endpoints available to route work")

// prepared is the input of a selection.
type prepared struct {
	of    api.ModelGroup
	group group
	cfg   scoring.Config
}

// prepare reads what q asks for; d holds the prompt afterwards. id is the name of the reservation to make, or "" for
// none.
func (s *Selector) prepare(d *scratch, q *selectRequest, id string) (*prepared, error) {
	p := &prepared{of: modelGroupNamed(q.Model, q.Group)}
	var err error
	if p.group, err = s.groupNamed(p.of); err != nil {
		return nil, err
	}
	if p.cfg, err = overridden(s.cfg.Scoring, q.Overrides); err != nil {
		return nil, err
	}
	if _, taken := s.loadBook.Named(id); taken {
		return nil, conflict(id)
	}
	if err := q.cut(&d.prompt, p.group, true, p.cfg.AssumeKVReuse); err != nil {
		return nil, err
	}
	p.cfg.AssumeKVReuse = true // a prompt that must not share blocks has its own hashes by now
	return p, nil
}

// decide selects a worker for q. If id is not empty, decide books the prompt there as id.
func (s *Selector) decide(d *scratch, q *selectRequest, p *prepared, id string) (*selection, error) {
	session, err := s.sessionOf(p.group, q.session())
	if err != nil {
		return nil, err
	}
	snapshot := s.pool.Acquire()
	defer snapshot.Release()
	if err := s.eligible(d, q, p.group, session, snapshot); err != nil {
		return nil, err
	}
	s.match(d, p.group, q.constraints())
	if id != "" {
		if err := s.checkRoom(id, len(d.prompt.tracked)); err != nil {
			return nil, err
		}
	}
	asked := scoring.Request{ID: id, Model: p.of.Model, ISLTokens: d.prompt.isl, Expires: true, DryRun: id == "",
		Terms: d.terms}
	sel, booking, err := s.loadBook.SelectAndAdd(asked, d.candidates, &p.cfg, nil, d.costs)
	if err != nil {
		return nil, bookingError(id, err)
	}
	w := d.workers[sel.Index]
	if id != "" {
		if err := s.bind(session, id, w, snapshot.Workers); err != nil {
			booking.Free()
			return nil, err
		}
	}
	c := &selection{
		of:        p.of,
		group:     p.group,
		session:   session.id,
		record:    s.recordOf(w.InstanceID),
		rank:      w.Rank,
		worker:    w.Worker,
		blocks:    len(d.prompt.tracked),
		effective: d.prompt.isl - sel.CachedTokens,
		terms:     d.terms[sel.Index],
		cfg:       p.cfg,
		overlap:   indexerapi.InstanceOverlap{DP: map[string]int{}},
	}
	if c.record == nil {
		s.leases.Release(id)
		booking.Free()
		return nil, api.Refuse(http.StatusInternalServerError, "selected worker %d is no longer schedulable",
			w.InstanceID)
	}
	for i := range snapshot.Workers {
		if x := &snapshot.Workers[i]; x.InstanceID == w.InstanceID && x.Model == p.group.name {
			c.overlap.Add(x, &d.scores)
		}
	}
	return c, nil
}

// eligible lists the workers that q allows.
func (s *Selector) eligible(d *scratch, q *selectRequest, g group, session sessionBinding,
	snapshot *pool.Snapshot) error {
	d.workers = d.workers[:0]
	means := q.Affinity.means
	if session.there {
		means = func(w *pool.Worker) bool { return w.Worker == session.worker }
	}
	preferred, constraints := false, q.constraints() // preferred: the affinity target is eligible
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		if w.Model != g.name || q.Allowed != nil && !slices.Contains(q.Allowed, w.InstanceID) ||
			!constraints.Allow(w.Taints) {
			continue
		}
		d.workers = append(d.workers, w)
		preferred = preferred || means(w)
	}
	if preferred {
		d.workers = slices.DeleteFunc(d.workers, func(w *pool.Worker) bool { return !means(w) })
	}
	if p := q.Pinned; p != nil {
		if q.Allowed != nil && !slices.Contains(q.Allowed, *p.ID) || preferred && *q.Affinity.ID != *p.ID {
			return api.Refuse(http.StatusBadRequest, "pinned worker %d is not in allowed worker set", *p.ID)
		}
		d.workers = slices.DeleteFunc(d.workers, func(w *pool.Worker) bool { return !p.means(w) })
	}
	if len(d.workers) == 0 {
		return errNoEndpoints
	}
	return nil
}

// means reports whether w is the worker, or a rank of it.
func (r *ranked) means(w *pool.Worker) bool {
	return r != nil && *r.ID == w.InstanceID && (r.Rank == nil || *r.Rank == w.Rank)
}

// match makes candidates of the workers with their cached blocks.
func (s *Selector) match(d *scratch, g group, constraints *scoring.Constraints) {
	s.index.FindPrompt(&indexer.Prompt{
		Chain: d.prompt.chain, Tokens: d.prompt.isl, IDs: d.prompt.ids, Options: d.prompt.options,
	}, &d.scores)
	d.chains[0] = d.prompt.tracked
	d.cut = scoring.Prompt{BlockSize: g.blockSize, Chains: d.chains[:]}
	d.candidates = d.candidates[:0]
	for _, w := range d.workers {
		lower := d.scores.Extension(w.Worker)
		d.candidates = append(
			d.candidates,
			scoring.Candidate{Worker: w.Worker, Prompt: &d.cut, DeviceBlocks: d.scores.Blocks(w.Worker),
				HostBlocks: lower.Host, DiskBlocks: lower.Disk + lower.External,
				KVBlocks: w.TotalKVBlocks, CostMultiplier: constraints.Multiplier(w.Taints)},
		)
	}
	n := len(d.candidates)
	d.terms, d.costs = slices.Grow(d.terms[:0], n)[:n], slices.Grow(d.costs[:0], n)[:n]
}

// selectResponse is the response of POST /select and /select_and_reserve.
type selectResponse struct {
	ID string `json:"selection_id,omitempty"`
	// This and the next two are set for a reservation.
	SequenceHashes *[]int64                   `json:"sequence_hashes,omitempty"`
	ISLTokens      *int                       `json:"isl_tokens,omitempty"`
	TrackPrefill   *bool                      `json:"track_prefill_tokens,omitempty"`
	Model          string                     `json:"model_name"`
	Group          string                     `json:"routing_group"`
	Worker         uint64                     `json:"worker_id"`
	Rank           uint32                     `json:"dp_rank"`
	Endpoint       string                     `json:"endpoint"`
	BlockSize      int                        `json:"block_size"`
	Overlap        indexerapi.InstanceOverlap `json:"overlap"`
	Effective      int                        `json:"effective_prefill_tokens"`
	DecodeBlocks   int                        `json:"potential_decode_blocks"`
	Load           *workerLoad                `json:"worker_load,omitempty"` // set for an advisory selection
}

type workerLoad struct {
	PrefillTokens   int     `json:"active_prefill_tokens"`
	PrefillCapacity uint64  `json:"prefill_token_capacity"`
	TotalKVBlocks   *uint64 `json:"total_kv_blocks,omitempty"`
}

func (c *selection) response(isl int) *selectResponse {
	untracked := max((isl+c.group.blockSize-1)/c.group.blockSize-c.blocks, 0)
	return &selectResponse{
		Model:        c.of.Model,
		Group:        c.of.Group,
		Worker:       c.record.ID,
		Rank:         c.rank,
		Endpoint:     deref(c.record.Endpoint, ""),
		BlockSize:    c.group.blockSize,
		Overlap:      c.overlap,
		Effective:    c.effective,
		DecodeBlocks: int(math.Round(c.terms.DecodeBlocks)) + untracked,
	}
}

// selectOnly handles POST /select.
func (s *Selector) selectOnly(w http.ResponseWriter, req *http.Request) {
	var q selectRequest
	if err := readChecked(w, req, &q, q.check); err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	d := s.scratches.Get().(*scratch)
	defer s.scratches.Put(d)
	c, err := s.inTurn(req.Context(), d, &q, "", policyClass(req))
	control(w)
	if err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	response := c.response(d.prompt.isl)
	if q.ID != nil {
		response.ID = *q.ID
		n := &pendingSelection{
			key:     pendingKey{c.of, *q.ID},
			worker:  c.record.ID,
			rank:    c.rank,
			tracked: slices.Clone(d.prompt.tracked),
			prefill: c.booking(),
			session: c.session,
		}
		if !s.cfg.Events {
			n.local = slices.Clone(d.prompt.local)
		}
		s.pending.put(n)
	}
	if q.Advisory {
		response.Load = &workerLoad{
			PrefillTokens:   c.terms.PrefillTokens,
			PrefillCapacity: deref(c.record.MaxNumBatchedTokens, pool.UnknownBatchedTokens),
			TotalKVBlocks:   c.record.TotalKVBlocks,
		}
	}
	api.Reply(w, http.StatusOK, response, nil)
}

// policyClass returns the policy class that a request asks for.
func policyClass(req *http.Request) string {
	return strings.TrimSpace(req.Header.Get("x-dynamo-meta-policy-class"))
}

// control extends the write deadline for the response of a selection, which may have waited. Some connections have no
// deadlines.
func control(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(responsePatience))
}

// responsePatience is how long a client may take to read a response.
const responsePatience = time.Minute

// booking returns how many tokens to prefill a reservation of the selection books.
func (c *selection) booking() int {
	if !c.cfg.TrackPrefillTokens {
		return 0
	}
	return c.effective
}

// selectAndReserve handles POST /select_and_reserve.
func (s *Selector) selectAndReserve(w http.ResponseWriter, req *http.Request) {
	var q selectRequest
	if err := readChecked(w, req, &q, q.check); err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	id := deref(q.ID, "")
	if q.ID == nil {
		id = router.NewRequestID()
	}
	d := s.scratches.Get().(*scratch)
	defer s.scratches.Put(d)
	c, err := s.inTurn(req.Context(), d, &q, id, policyClass(req))
	control(w)
	if err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	response := c.response(d.prompt.isl)
	hashes := make([]int64, len(d.prompt.tracked))
	for i, h := range d.prompt.tracked {
		hashes[i] = int64(h)
	}
	response.ID, response.SequenceHashes, response.ISLTokens, response.TrackPrefill = id, &hashes, &d.prompt.isl,
		&c.cfg.TrackPrefillTokens
	s.predict(c.worker, &d.prompt)
	api.Reply(w, http.StatusOK, response, nil)
}

// predict tells the index which blocks the worker will compute, if no events will.
func (s *Selector) predict(w kvblock.Worker, p *prompt) {
	if !s.cfg.Events {
		s.index.Predict(w, p.chain, indexer.Lifetime{TTL: s.cfg.PredictTTL})
	}
}

// readChecked reads a body whose check method may refuse it.
func readChecked(w http.ResponseWriter, req *http.Request, body any, check func() error) error {
	if err := api.ReadBody(w, req, body); err != nil {
		return err
	}
	return check()
}
