package selector

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/serve/api"
)

const (
	// maxRanks is how many data-parallel ranks a worker may have. Source: dynamo-kv-router 1.6.1, sequences::topology.
	maxRanksOfWorker = 4096

	// maxWorkers bounds the records of workers.
	maxWorkers = 1 << 16

	// itemBytes is the estimated memory of one text of a record, without the bytes of the text.
	itemBytes = 32

	// maxItems bounds each list and map of a worker's record.
	maxItems = maxRanksOfWorker
)

// workerFields are a worker's fields in a request. Nil: not given.
type workerFields struct {
	Endpoint *string `json:"endpoint"`
	KVEvents *string `json:"kv_events_endpoint"`
	// By rank; if there are any, KVEvents is ignored.
	KVEventsByRank          map[uint32]string `json:"kv_events_endpoints,omitempty"`
	Replay                  *string           `json:"replay_endpoint"`
	BlockSize               *uint32           `json:"block_size"`
	StartRank               *uint32           `json:"data_parallel_start_rank"`
	Size                    *uint32           `json:"data_parallel_size"`
	MaxNumBatchedTokens     *uint64           `json:"max_num_batched_tokens"`
	TotalKVBlocks           *uint64           `json:"total_kv_blocks"`
	StableRoutingID         *string           `json:"stable_routing_id"`
	EAGLE                   *bool             `json:"is_eagle"`
	Taints                  []string          `json:"taints"`
	TopologyDomains         map[string]string `json:"topology_domains"`
	TransferDomain          *string           `json:"kv_transfer_domain"`
	TransferEnforcement     *enforcement      `json:"kv_transfer_enforcement"`
	TransferPreferredWeight *float32          `json:"kv_transfer_preferred_weight"`
	HintWorkerType          *string           `json:"router_hint_worker_type,omitempty"`
	HintEndpointsByRank     map[uint32]string `json:"router_hint_source_control_endpoints,omitempty"`
	EventSourceMode         *string           `json:"kv_event_source_mode,omitempty"`
}

// enforcement is one of two constants.
type enforcement string

func (e *enforcement) UnmarshalText(text []byte) error {
	if *e = enforcement(text); *e != "required" && *e != "preferred" {
		return fmt.Errorf("kv_transfer_enforcement: %q is neither required nor preferred", text)
	}
	return nil
}

// record is a worker in the service's responses.
type record struct {
	ID        uint64 `json:"worker_id"`
	Model     string `json:"model_name"`
	Group     string `json:"routing_group"`
	Lifecycle string `json:"lifecycle"`
	workerFields
	Reasons []string `json:"not_schedulable_reasons,omitempty"`

	bytes int // an estimate
}

// The lifecycle states of a worker.
const (
	incomplete    = "incomplete"
	schedulable   = "schedulable"
	unschedulable = "unschedulable"
)

// group holds the workers of one model and routing group. All have the same block size. It stays after its last worker
// leaves, until its place is needed or a worker with another block size joins.
type group struct {
	name      string // in the pool
	blockSize int
	eagle     bool
	workers   int          // schedulable ones
	room      *waitingRoom // nil: selections never wait
}

func (r *record) modelGroup() api.ModelGroup { return api.ModelGroup{Model: r.Model, Group: r.Group} }

func (r *record) startRank() uint32 { return deref(r.StartRank, 0) }
func (r *record) size() uint32      { return deref(r.Size, 1) }

// endRank is the first rank after the worker's last.
func (r *record) endRank() uint32 { return r.startRank() + r.size() }

func deref[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// kvEventsOf returns the event address of a rank, or "" if none was given.
func (r *record) kvEventsOf(rank uint32) string {
	if len(r.KVEventsByRank) > 0 {
		return r.KVEventsByRank[rank]
	}
	if r.size() == 1 {
		return deref(r.KVEvents, "")
	}
	return ""
}

// check refuses a record that would take too much memory or has ranks out of range. It also estimates the record's
// memory.
func (r *record) check() error {
	if r.size() > maxRanksOfWorker {
		return api.Refuse(http.StatusBadRequest, "data_parallel_size %d exceeds the maximum %d", r.size(),
			maxRanksOfWorker)
	}
	// Dynamo accepts a worker that starts at this rank, and then never selects it.
	if end := uint64(r.startRank()) + uint64(r.size()); end > math.MaxUint32 {
		return api.Refuse(http.StatusBadRequest,
			"data_parallel_start_rank %d with data_parallel_size %d: the last rank must be below %d", r.startRank(),
			r.size(), uint32(math.MaxUint32))
	}
	var bad error
	items := max(len(r.Taints), len(r.TopologyDomains), len(r.KVEventsByRank), len(r.HintEndpointsByRank))
	r.bytes = api.RecordBytes
	note := func(texts ...string) {
		for _, text := range texts {
			if err := pool.CheckText(text); err != nil {
				bad = err
			}
			r.bytes += itemBytes + len(text)
		}
	}
	note(r.Model, r.Group)
	for _, text := range []*string{r.Endpoint, r.KVEvents, r.Replay, r.StableRoutingID, r.TransferDomain,
		r.HintWorkerType, r.EventSourceMode} {
		note(deref(text, ""))
	}
	note(r.Taints...)
	for key, text := range r.TopologyDomains {
		note(key, text)
	}
	for _, of := range []map[uint32]string{r.KVEventsByRank, r.HintEndpointsByRank} {
		for _, text := range of {
			note(text)
		}
	}
	switch {
	case bad != nil:
		return api.Refuse(http.StatusBadRequest, "a text of the worker: %v", bad)
	case strings.ContainsFunc(deref(r.Endpoint, ""), unicode.IsSpace):
		return api.Refuse(http.StatusBadRequest, "endpoint %.100q has a space", *r.Endpoint)
	case items > maxItems:
		return api.Refuse(http.StatusBadRequest, "a list of the worker has more than %d items", maxItems)
	}
	return nil
}

// lacks lists the fields that the worker still needs before it can be selected.
func (s *Selector) lacks(r *record) (reasons []string) {
	if deref(r.Endpoint, "") == "" {
		reasons = append(reasons, "endpoint is required")
	}
	switch size := deref(r.BlockSize, 0); {
	case size == 0:
		reasons = append(reasons, "block_size must be greater than 0")
	case size > kvblock.MaxBlockSize:
		reasons = append(reasons, fmt.Sprintf("block_size must be at most %d", kvblock.MaxBlockSize))
	}
	if r.size() == 0 {
		reasons = append(reasons, "data_parallel_size must be greater than 0")
	}
	if r.MaxNumBatchedTokens == nil && s.queueing(r.Model) {
		reasons = append(reasons, "max_num_batched_tokens is required while queueing is enabled")
	}
	if !s.cfg.Events {
		return reasons
	}
	for rank := r.startRank(); rank < r.endRank(); rank++ {
		if r.kvEventsOf(rank) == "" {
			reasons = append(reasons, fmt.Sprintf("kv_events endpoint is required for dp_rank %d", rank))
		}
	}
	if r.size() > 1 && r.Replay != nil {
		reasons = append(reasons, "replay_endpoint is supported only for data_parallel_size 1")
	}
	return reasons
}

// addresses returns an error if an event address is not valid.
func (r *record) addresses() error {
	for rank := r.startRank(); rank < r.endRank(); rank++ {
		if err := pool.CheckTCP(r.kvEventsOf(rank), 1); err != nil {
			return fmt.Errorf("invalid kv_events endpoint for worker %d dp_rank %d: %w", r.ID, rank, err)
		}
	}
	if r.Replay != nil {
		if err := pool.CheckTCP(*r.Replay, 1); err != nil {
			return fmt.Errorf("invalid replay endpoint for worker %d: %w", r.ID, err)
		}
	}
	return nil
}

// putRecord makes r the record of its worker. It keeps values that cannot be used, and explains them in the record's
// reasons. The caller holds s.changing.
func (s *Selector) putRecord(r *record) error {
	slices.Sort(r.Taints)
	if r.Taints = slices.Compact(r.Taints); r.Taints == nil {
		r.Taints = []string{}
	}
	if err := r.check(); err != nil {
		return err
	}
	if r.TopologyDomains == nil {
		r.TopologyDomains = map[string]string{}
	}
	r.Lifecycle, r.Reasons = incomplete, s.lacks(r)
	if len(r.Reasons) == 0 && s.cfg.Events {
		if err := r.addresses(); err != nil {
			r.Reasons = []string{"reconciliation failed: " + err.Error()}
		}
	}
	s.mu.RLock()
	was := s.workers[r.ID]
	s.mu.RUnlock()
	if err := s.replace(r); err != nil {
		return err
	}
	s.publish(was, r)
	if s.feed == nil || r.Lifecycle != schedulable {
		return nil
	}
	if err := s.feed.Room(); err != nil {
		with, without := *r, *r
		without.Lifecycle, without.Reasons = incomplete, []string{"reconciliation failed: " + err.Error()}
		*r = without
		if err := s.replace(&without); err != nil {
			return err
		}
		s.publish(&with, &without)
	}
	return nil
}

// replace makes r the record of its worker. The worker is schedulable if r has no reasons against it. The caller holds
// s.changing.
func (s *Selector) replace(r *record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.workers[r.ID]
	before := 0
	if was != nil {
		before = was.bytes
	}
	switch {
	case was == nil && len(s.workers) == maxWorkers:
		return api.Refuse(http.StatusTooManyRequests, "%d workers are registered, which is the limit", maxWorkers)
	case s.bytes-before+r.bytes > api.MaxWorkerBytes:
		return api.Refuse(http.StatusTooManyRequests,
			"what is known of workers takes %d bytes, of at most %d", s.bytes, api.MaxWorkerBytes)
	}
	s.bytes += r.bytes - before
	s.count(was, -1)
	if len(r.Reasons) == 0 {
		if err := s.join(r); err != nil {
			r.Reasons = []string{"reconciliation failed: " + err.Error()}
		} else {
			r.Lifecycle = schedulable
		}
	}
	s.workers[r.ID] = r
	s.count(r, 1)
	return nil
}

// count updates the group's and the selector's counts when a worker joins or leaves. The caller holds s.mu.
func (s *Selector) count(r *record, by int) {
	if r != nil && r.Lifecycle == schedulable {
		s.groups[r.modelGroup()].workers += by
		s.ranks += by * int(r.size())
	}
}

// join creates the worker's group if needed, or returns why the worker does not fit the group. The caller holds s.mu.
func (s *Selector) join(r *record) error {
	size, eagle := int(*r.BlockSize), deref(r.EAGLE, false)
	if s.ranks+int(r.size()) > api.MaxRanks {
		return fmt.Errorf("%d data-parallel ranks are registered, of at most %d", s.ranks, api.MaxRanks)
	}
	g := s.groups[r.modelGroup()]
	if g == nil {
		if len(s.groups) == api.MaxGroups {
			maps.DeleteFunc(s.groups, func(_ api.ModelGroup, g *group) bool { return g.workers == 0 })
		}
		if len(s.groups) == api.MaxGroups {
			return fmt.Errorf("%d models and routing groups have workers, which is the limit", api.MaxGroups)
		}
		g = &group{name: r.modelGroup().PoolModel(), blockSize: size, eagle: eagle, room: s.newRoom(r.Model)}
		s.groups[r.modelGroup()] = g
	}
	if g.workers == 0 {
		g.blockSize, g.eagle = size, eagle
	}
	switch {
	case g.blockSize != size:
		return fmt.Errorf("block_size mismatch for %s: existing=%d requested=%d",
			r.modelGroup().Describe(), g.blockSize, size)
	case g.eagle != eagle:
		return fmt.Errorf("is_eagle mismatch for %s: existing=%v requested=%v", r.modelGroup().Describe(), g.eagle,
			eagle)
	}
	return nil
}

// publish updates the worker's endpoints in the pool, one for each rank. was is the worker's earlier record; a nil
// record means no worker. The caller holds s.changing but not s.mu: selections go on while the pool waits for the last
// event of a worker that leaves.
func (s *Selector) publish(was, now *record) {
	before, after := s.endpointsOf(was), s.endpointsOf(now)
	if len(before) == 0 && len(after) == 0 {
		return
	}
	names := make([]string, len(before))
	for i := range before {
		names[i] = before[i].Name
	}
	s.pool.Change(names, after)
	s.released()
}

// endpointsOf returns the ranks of a schedulable worker as endpoints of the pool.
func (s *Selector) endpointsOf(r *record) (endpoints []pool.Endpoint) {
	if r == nil || r.Lifecycle != schedulable {
		return nil
	}
	name := r.modelGroup().PoolModel()
	for rank := r.startRank(); rank < r.endRank(); rank++ {
		// The address that clients are given is left out: a change of it does not change the cache.
		e := pool.Endpoint{Name: fmt.Sprintf("%s/%d/%d", name, r.ID, rank), InstanceID: r.ID, Model: name,
			DataParallelStartRank: rank, DataParallelSize: 1, BlockSize: int(*r.BlockSize),
			EAGLE: deref(r.EAGLE, false), Taints: r.Taints,
			MaxNumBatchedTokens: int(min(deref(r.MaxNumBatchedTokens, 0), math.MaxInt))}
		if s.cfg.Events {
			e.KVEvents, e.KVReplay = r.kvEventsOf(rank), deref(r.Replay, "")
		}
		endpoints = append(endpoints, e)
	}
	return endpoints
}

// ordered returns all records, sorted by model, group and worker id. The caller holds at least s.mu's read lock.
func (s *Selector) ordered() []*record {
	return slices.SortedFunc(maps.Values(s.workers), func(a, b *record) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.Group, b.Group), cmp.Compare(a.ID, b.ID))
	})
}

// putWorker handles POST /workers.
func (s *Selector) putWorker(w http.ResponseWriter, req *http.Request) {
	var body struct {
		ID    *uint64 `json:"worker_id"`
		Model *string `json:"model_name"`
		Group *string `json:"routing_group"`
		workerFields
	}
	err := api.ReadBody(w, req, &body)
	if err == nil && body.ID == nil {
		err = api.Missing("worker_id")
	}
	if err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	of := modelGroupNamed(body.Model, body.Group)
	r := &record{ID: *body.ID, Model: of.Model, Group: of.Group, workerFields: body.workerFields}
	s.changing.Lock()
	err = s.putRecord(r)
	s.changing.Unlock()
	api.Reply(w, http.StatusCreated, r, err)
}

// patchWorker handles PATCH /workers/{id}. Fields that the body does not have keep their values.
func (s *Selector) patchWorker(w http.ResponseWriter, req *http.Request) {
	id, ok := workerID(w, req)
	if !ok {
		return
	}
	var body workerFields
	if err := api.ReadBody(w, req, &body); err != nil {
		api.Reply(w, 0, nil, err)
		return
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.RLock()
	was := s.workers[id]
	s.mu.RUnlock()
	if was == nil {
		api.Reply(w, 0, nil, api.Refuse(http.StatusNotFound, "worker %d not found", id))
		return
	}
	r := *was
	to, from := reflect.ValueOf(&r.workerFields).Elem(), reflect.ValueOf(&body).Elem()
	for i := range from.NumField() {
		if !from.Field(i).IsNil() {
			to.Field(i).Set(from.Field(i))
		}
	}
	err := s.putRecord(&r)
	api.Reply(w, http.StatusOK, &r, err)
}

// deleteWorker handles DELETE /workers/{id}.
func (s *Selector) deleteWorker(w http.ResponseWriter, req *http.Request) {
	id, ok := workerID(w, req)
	if !ok {
		return
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.mu.Lock()
	r := s.workers[id]
	if s.count(r, -1); r != nil {
		s.bytes -= r.bytes
		delete(s.workers, id)
	}
	s.mu.Unlock()
	if r == nil {
		api.Reply(w, 0, nil, api.Refuse(http.StatusNotFound, "worker %d not found", id))
		return
	}
	s.publish(r, nil)
	gone := *r
	gone.Lifecycle, gone.Reasons = unschedulable, nil
	api.Reply(w, http.StatusOK, &gone, nil)
}

// workerID parses the worker id of the path. If it is not valid, workerID answers the request.
func workerID(w http.ResponseWriter, req *http.Request) (id uint64, ok bool) {
	id, err := strconv.ParseUint(req.PathValue("id"), 10, 64)
	if err != nil {
		http.Error(
			w,
			fmt.Sprintf("Invalid URL: Cannot parse `%s` to a `u64`", req.PathValue("id")),
			http.StatusBadRequest,
		)
	}
	return id, err == nil
}

// recordsAskedFor returns the records of the model and group in the request's query.
func (s *Selector) recordsAskedFor(req *http.Request) []*record {
	s.mu.RLock()
	defer s.mu.RUnlock()
	all := s.ordered()
	return slices.DeleteFunc(all, func(r *record) bool { return !asksFor(req, r.modelGroup()) })
}

// asksFor reports whether the request's query matches the group. A query without a group matches each one.
func asksFor(req *http.Request, of api.ModelGroup) bool {
	query := req.URL.Query()
	return (!query.Has("model_name") || query.Get("model_name") == of.Model) &&
		(!query.Has("routing_group") || query.Get("routing_group") == of.Group)
}

func (s *Selector) listWorkers(w http.ResponseWriter, req *http.Request) {
	all := s.recordsAskedFor(req)
	if all == nil {
		all = []*record{}
	}
	api.Reply(w, http.StatusOK, all, nil)
}

// ready reports whether a worker can be selected.
func (s *Selector) ready(w http.ResponseWriter, _ *http.Request) {
	s.mu.RLock()
	all := s.ordered()
	s.mu.RUnlock()
	if all == nil {
		all = []*record{}
	}
	count, status := 0, http.StatusServiceUnavailable
	for _, r := range all {
		if r.Lifecycle == schedulable {
			count, status = count+1, http.StatusOK
		}
	}
	api.Reply(w, status, struct {
		Ready   bool      `json:"ready"`
		Count   int       `json:"schedulable_workers"`
		Workers []*record `json:"workers"`
	}{count > 0, count, all}, nil)
}
