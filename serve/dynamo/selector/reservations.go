package selector

import (
	"container/list"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"kvepp/internal/overrides"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/scoring"
	"kvepp/serve/api"
)

const (
	// maxReservations bounds the reservations at one time, and maxReservedBlocks the blocks of their prompts.
	maxReservations   = 1 << 17
	maxReservedBlocks = 1 << 25
)

func conflict(id string) error {
	return api.Refuse(http.StatusConflict, "selection %s is already reserved or being reserved", id)
}

// checkRoom returns an error if n more blocks cannot be reserved under a name. kvepp does not see the responses to
// reservations. Therefore the load book has each under its name, and ends it by expiry if its client does not end it.
func (s *Selector) checkRoom(id string, blocks int) error {
	if _, taken := s.loadBook.Named(id); taken {
		return conflict(id)
	}
	if n := s.loadBook.Len(); n >= maxReservations {
		return api.Refuse(http.StatusTooManyRequests, "%d reservations are held, which is the limit", n)
	}
	held := 0
	for _, load := range s.loadBook.Loads(nil) {
		held += load.ActiveBlocks
	}
	if held+blocks > maxReservedBlocks {
		return api.Refuse(http.StatusTooManyRequests, "reservations hold %d blocks, of at most %d", held,
			maxReservedBlocks)
	}
	return nil
}

// onReservation calls f with the booking of that name, or answers that there is none.
func (s *Selector) onReservation(w http.ResponseWriter, req *http.Request, f func(scoring.Booking)) {
	booking, ok := s.loadBook.Named(req.PathValue("id"))
	if !ok {
		api.Reply(w, 0, nil, api.Refuse(http.StatusNotFound, "reservation %s not found", req.PathValue("id")))
		return
	}
	f(booking)
	api.Reply(w, http.StatusOK, api.StatusOK, nil)
}

// pendingSelections are selections that may become reservations, by the names that clients gave them.
type pendingSelections struct {
	ttl        time.Duration
	maxEntries int
	maxBytes   int

	mu    sync.Mutex
	byKey map[pendingKey]*list.Element // elements of order
	order *list.List                   // of *pendingSelection, oldest first
	bytes int
}

type pendingKey struct {
	api.ModelGroup
	id string
}

type pendingSelection struct {
	key     pendingKey
	worker  uint64
	rank    uint32
	tracked []kvblock.SequenceHash
	local   []kvblock.LocalHash // set if the index must learn the booked blocks, else nil
	prefill int                 // tokens to book for it
	session string
	at      time.Time
}

func newPendingSelections(c *Config) *pendingSelections {
	return &pendingSelections{
		ttl:        c.PendingTTL,
		maxEntries: c.PendingEntries,
		maxBytes:   c.PendingBytes,
		byKey:      map[pendingKey]*list.Element{},
		order:      list.New(),
	}
}

func (n *pendingSelection) size() int {
	return 8*(len(n.tracked)+len(n.local)) + len(n.key.Model) + len(n.key.Group) + len(n.key.id) + len(n.session)
}

// put stores a selection under its name, in place of an earlier one. It drops the oldest if there are too many.
func (p *pendingSelections) put(n *pendingSelection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.byKey[n.key]; e != nil {
		p.remove(e)
	}
	n.at = time.Now()
	p.bytes += n.size()
	p.byKey[n.key] = p.order.PushBack(n)
	for e := p.order.Front(); e != nil &&
		(len(p.byKey) > p.maxEntries || p.bytes > p.maxBytes || p.expired(e)); e = p.order.Front() {
		p.remove(e)
	}
}

func (p *pendingSelections) expired(e *list.Element) bool {
	return time.Since(e.Value.(*pendingSelection).at) > p.ttl
}

// get returns a selection, or nil.
func (p *pendingSelections) get(key pendingKey) *pendingSelection {
	p.mu.Lock()
	defer p.mu.Unlock()
	e := p.byKey[key]
	if e == nil || p.expired(e) {
		return nil
	}
	return e.Value.(*pendingSelection)
}

// drop removes a selection. If n is not nil, drop removes only n.
func (p *pendingSelections) drop(key pendingKey, n *pendingSelection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e := p.byKey[key]; e != nil && (n == nil || e.Value == n) {
		p.remove(e)
	}
}

// remove forgets a selection. The caller holds p.mu.
func (p *pendingSelections) remove(e *list.Element) {
	n := p.order.Remove(e).(*pendingSelection)
	delete(p.byKey, n.key)
	p.bytes -= n.size()
}

// reserveRequest is the body of POST /reservations. Without a worker, it reserves the selection of its name, and the
// other fields are ignored.
type reserveRequest struct {
	Model  *string `json:"model_name"`
	Group  *string `json:"routing_group"`
	ID     *string `json:"selection_id"`
	Worker *uint64 `json:"worker_id"`
	Rank   *uint32 `json:"dp_rank"`
	promptFields
	Overrides            *overrides.Overrides `json:"router_config_override"`
	ExpectedOutputTokens *uint32              `json:"expected_output_tokens"`
	Effective            *uint64              `json:"effective_prefill_tokens"` // nil: books no tokens
	TrackPrefill         *bool                `json:"track_prefill_tokens"`
}

func (q *reserveRequest) check() error {
	if q.ID == nil {
		return api.Missing("selection_id")
	}
	return checkName(*q.ID)
}

// reserveResponse is the response to a reserveRequest.
type reserveResponse struct {
	ID       string `json:"selection_id"`
	Model    string `json:"model_name"`
	Group    string `json:"routing_group"`
	Worker   uint64 `json:"worker_id"`
	Rank     uint32 `json:"dp_rank"`
	Endpoint string `json:"endpoint"`
}

// reserve handles POST /reservations.
func (s *Selector) reserve(w http.ResponseWriter, req *http.Request) {
	var q reserveRequest
	err := readChecked(w, req, &q, q.check)
	if err == nil {
		_, err = overridden(s.cfg.Scoring, q.Overrides)
	}
	var response *reserveResponse
	if err == nil && q.Worker == nil {
		response, err = s.takeUp(pendingKey{modelGroupNamed(q.Model, q.Group), *q.ID})
	} else if err == nil {
		response, err = s.reserveOn(&q)
	}
	api.Reply(w, http.StatusCreated, response, err)
}

// takeUp reserves the worker of an earlier selection.
func (s *Selector) takeUp(key pendingKey) (*reserveResponse, error) {
	n := s.pending.get(key)
	if n == nil {
		return nil, api.Refuse(http.StatusNotFound,
			"no pending selection %s for %s (expired, already used, or never selected)", key.id, key.Describe())
	}
	g, err := s.groupNamed(key.ModelGroup)
	if err != nil {
		return nil, err
	}
	r := s.recordOf(n.worker)
	if !r.schedulableIn(key.ModelGroup) || n.rank < r.startRank() || n.rank >= r.endRank() {
		return nil, api.Refuse(http.StatusNotFound,
			"schedulable worker %d (dp_rank %d) not found for %s", n.worker, n.rank, key.Describe())
	}
	var session sessionBinding
	if n.session != "" {
		if session, err = s.sessionOf(g, &n.session); err != nil {
			return nil, err
		}
	}
	if err := s.book(g, key.id, n.worker, n.rank,
		&prompt{tracked: n.tracked, chain: kvblock.AppendSequenceHashes(nil, n.local)}, n.prefill,
		session); err != nil {
		if r := (*api.Refusal)(nil); errors.As(err, &r) && r.Status == http.StatusBadRequest {
			s.pending.drop(key, n) // the session has moved: this selection can never be reserved
		}
		return nil, err
	}
	s.pending.drop(key, n)
	return &reserveResponse{key.id, key.Model, key.Group, n.worker, n.rank, deref(r.Endpoint, "")}, nil
}

// reserveOn reserves on the worker that the client chose.
func (s *Selector) reserveOn(q *reserveRequest) (*reserveResponse, error) {
	of := modelGroupNamed(q.Model, q.Group)
	s.pending.drop(pendingKey{of, *q.ID}, nil)
	g, err := s.groupNamed(of)
	if err != nil {
		return nil, err
	}
	cfg, err := overridden(s.cfg.Scoring, q.Overrides)
	if err != nil {
		return nil, err
	}
	var p prompt
	if err := q.cut(&p, g, false, cfg.AssumeKVReuse); err != nil {
		return nil, err
	}
	prefill := deref(q.Effective, 0)
	if prefill > uint64(p.isl) {
		return nil, api.Refuse(http.StatusBadRequest,
			"effective_prefill_tokens (%d) must not exceed isl_tokens (%d)", prefill, p.isl)
	}
	if !deref(q.TrackPrefill, true) { // absent means true
		prefill = 0
	}
	r := s.recordOf(*q.Worker)
	if !r.schedulableIn(of) {
		return nil, api.Refuse(http.StatusNotFound, "schedulable worker %d not found for %s", *q.Worker, of.Describe())
	}
	rank := deref(q.Rank, 0)
	if err := s.book(g, *q.ID, *q.Worker, rank, &p, int(prefill), sessionBinding{}); err != nil {
		return nil, err
	}
	return &reserveResponse{*q.ID, of.Model, of.Group, *q.Worker, rank, deref(r.Endpoint, "")}, nil
}

// schedulableIn reports whether r is a schedulable worker of the group; r may be nil.
func (r *record) schedulableIn(of api.ModelGroup) bool {
	return r != nil && r.Lifecycle == schedulable && r.modelGroup() == of
}

// book books a prompt on a worker, with the number of tokens to prefill.
func (s *Selector) book(g group, id string, worker uint64, rank uint32, p *prompt, prefill int,
	session sessionBinding) error {
	if err := s.checkRoom(id, len(p.tracked)); err != nil {
		return err
	}
	if _, claimed := s.claims.Load(id); claimed {
		return conflict(id)
	}
	snapshot := s.pool.Acquire()
	defer snapshot.Release()
	at := slices.IndexFunc(snapshot.Workers,
		func(w pool.Worker) bool { return w.InstanceID == worker && w.Rank == rank && w.Model == g.name })
	if at < 0 {
		return api.Refuse(http.StatusNotFound,
			"Worker WorkerWithDpRank { worker_id: %d, dp_rank: %d } not found", worker, rank)
	}
	cfg := s.cfg.Scoring
	// prefill is the number of tokens to book, and hashes are the blocks that others may share.
	cfg.TrackPrefillTokens, cfg.AssumeKVReuse = true, true
	w := &snapshot.Workers[at]
	cut := scoring.Prompt{BlockSize: g.blockSize, Chains: [][]kvblock.SequenceHash{p.tracked}}
	booking, err := s.loadBook.AddRequest(scoring.Request{ID: id, ISLTokens: prefill, Expires: true},
		scoring.Candidate{Worker: w.Worker, Prompt: &cut}, &cfg)
	if err != nil {
		return bookingError(id, err)
	}
	if err := s.bind(session, id, w, snapshot.Workers); err != nil {
		booking.Free()
		return err
	}
	s.predict(w.Worker, p)
	return nil
}

// bookingError returns the response to an error of the load book.
func bookingError(id string, err error) error {
	if errors.Is(err, scoring.ErrDuplicateRequest) {
		return conflict(id)
	}
	return api.Refuse(http.StatusBadRequest, "%v", err)
}

// prefillComplete handles POST /reservations/{id}/prefill_complete.
func (s *Selector) prefillComplete(w http.ResponseWriter, req *http.Request) {
	s.onReservation(w, req, scoring.Booking.MarkPrefillCompleted)
	s.released()
}

// outputBlock handles POST /reservations/{id}/output_block: the engine has generated one more block.
func (s *Selector) outputBlock(w http.ResponseWriter, req *http.Request) {
	var body struct {
		Left *float64 `json:"decay_fraction"`
	}
	err := api.ReadBody(w, req, &body)
	if err == nil && body.Left != nil && !(*body.Left >= 0 && *body.Left <= 1) {
		err = api.Refuse(http.StatusBadRequest, "decay_fraction must be between 0.0 and 1.0")
	}
	if err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	s.onReservation(w, req, func(b scoring.Booking) { b.AddOutputBlocks(1, deref(body.Left, scoring.NotKnown)) })
}

// free handles DELETE /reservations/{id}.
func (s *Selector) free(w http.ResponseWriter, req *http.Request) {
	s.onReservation(w, req, func(b scoring.Booking) {
		s.leases.Release(req.PathValue("id"))
		b.Free()
	})
	s.released()
}
