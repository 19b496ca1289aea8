package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvepp/e2e/stack"
	"kvepp/kvblock"
)

// weights are the knobs of the cost function that both selection services are started with.
type weights struct {
	credit, decay, scale, request float64
	host, disk                    float64
	track                         bool // prompts' tokens count until they are prefilled
	unheard                       bool // no events are followed: workers hold what they were sent

	more string // of the environment, separated by blanks
}

func (w weights) env() []string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	return append(strings.Fields(w.more), "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT="+number(w.credit), "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY="+number(w.decay),
		"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT="+number(w.host), "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT="+number(w.disk),
		"DYN_ROUTER_PREFILL_LOAD_SCALE="+number(w.scale), "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT="+number(w.request),
		"DYN_ROUTER_TRACK_PREFILL_TOKENS="+strconv.FormatBool(w.track), "DYN_ROUTER_USE_KV_EVENTS="+strconv.FormatBool(!w.unheard))
}

// selectors are both selection services and what has been done to both.
type selectors struct {
	*stack.Services
	t          *testing.T
	rng        *rand.Rand
	weights    weights
	workers    []*selectable
	publishers []*publisher
	reserved   []reserved
	names      int
	markers    int
	class      string // policy class of requests
	counts     map[string]int
}

// reserved is a reservation that both hold.
type reserved struct {
	name   string
	worker uint64
}

// path is where it is.
func (r reserved) path() string { return "/reservations/" + strings.ReplaceAll(r.name, "/", "%2F") }

// selectable is a worker of both.
type selectable struct {
	id         uint64
	group      string
	start      int
	ranks      int
	publishers []*publisher // by rank; none if nobody listens
	taints     []string
}

func startSelectors(t *testing.T, w weights, args ...string) *selectors {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	services, err := stack.StartSelectors(t.Context(), stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS")}, w.env(), args...)
	if err != nil {
		t.Fatal(err)
	}
	x := &selectors{Services: services, t: t, weights: w, counts: map[string]int{}}
	t.Cleanup(func() {
		services.Close()
		for _, p := range x.publishers {
			p.socket.Close() // after its subscribers: libzmq may abort otherwise (zeromq/libzmq#3442)
		}
	})
	return x
}

// object is a body or an answer. Numbers in answers are json.Number: ids have 64 bits.
type object = map[string]any

// answer is one service's.
type answer struct {
	status int
	body   any
}

func (a answer) object() object { o, _ := a.body.(object); return o }

// ask sends a request to one service.
func (x *selectors) ask(url, method, path string, body any) answer {
	x.t.Helper()
	a, err := send(x.t.Context(), url, method, path, x.class, body)
	if err != nil {
		x.t.Fatal(err)
	}
	return a
}

// send sends a request of a policy class, "" for none. A body that is text is sent as it is.
func send(ctx context.Context, url, method, path, class string, body any) (a answer, err error) {
	var text []byte
	switch body := body.(type) {
	case nil:
	case string:
		text = []byte(body)
	default:
		if text, err = json.Marshal(body); err != nil {
			return a, err
		}
	}
	req, err := http.NewRequestWithContext(ctx, method, url+path, bytes.NewReader(text))
	if err != nil {
		return a, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if class != "" {
		req.Header.Set("x-dynamo-meta-policy-class", class)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	answered, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	a.status = resp.StatusCode
	dec := json.NewDecoder(bytes.NewReader(answered))
	dec.UseNumber()
	if dec.Decode(&a.body) != nil {
		a.body = strings.TrimSpace(string(answered))
	}
	sortLists(a.body)
	return a, nil
}

// sortLists brings lists into an order: Dynamo's of workers, loads and taints have none.
func sortLists(v any) {
	switch v := v.(type) {
	case object:
		for key, part := range v {
			if sortLists(part); key != "sequence_hashes" {
				if list, ok := part.([]any); ok {
					sortList(list)
				}
			}
		}
	case []any:
		for _, part := range v {
			sortLists(part)
		}
		sortList(v)
	}
}

func sortList(list []any) {
	slices.SortFunc(list, func(a, b any) int {
		if x, ok := a.(object); ok {
			y, _ := b.(object)
			return cmp.Or(compareNumbers(x["worker_id"], y["worker_id"]), compareNumbers(x["dp_rank"], y["dp_rank"]))
		}
		return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b))
	})
}

func compareNumbers(a, b any) int { return cmp.Compare(integer(a), integer(b)) }

// integer is a number of an answer; 0 for what is none.
func integer(v any) uint64 {
	n, _ := v.(json.Number)
	u, _ := strconv.ParseUint(string(n), 10, 64)
	return u
}

func float(v any) float64 { return float64(integer(v)) }

// same wants both services to give the same answer, and returns it.
func (x *selectors) same(method, path string, body any) answer {
	x.t.Helper()
	theirs, ours := x.ask(x.Dynamo, method, path, body), x.ask(x.Kvepp, method, path, body)
	x.equal(method+" "+path, body, theirs, ours)
	return ours
}

// equal wants two answers to be the same, but for the words about a body that is not what it should be.
func (x *selectors) equal(what string, body any, theirs, ours answer) {
	x.t.Helper()
	if theirs.status != ours.status {
		x.t.Fatalf("%s %v: Dynamo %d %v, kvepp %d %v", what, body, theirs.status, theirs.body, ours.status, ours.body)
	}
	switch theirs.status {
	case http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity, http.StatusRequestEntityTooLarge:
		return
	}
	if theirs.status == http.StatusBadRequest && strings.HasPrefix(fmt.Sprint(theirs.object()["error"]), "Failed to parse") {
		return
	}
	if !reflect.DeepEqual(theirs.body, ours.body) {
		x.t.Fatalf("%s %v: %d\nDynamo %v\nkvepp  %v", what, body, theirs.status, theirs.body, ours.body)
	}
	x.counts["answers alike"]++
}

// register registers a worker with both services, and waits until both hear its events. Both know nothing of it then, and the
// engine begins anew.
func (x *selectors) register(w *selectable) {
	x.t.Helper()
	endpoints := map[string]string{}
	for i, p := range w.publishers {
		endpoints[strconv.Itoa(w.start+i)] = p.address
	}
	a := x.same("POST", "/workers", object{"worker_id": w.id, "routing_group": w.group, "endpoint": fmt.Sprintf("http://w%d:8000", w.id), "block_size": indexerBlock,
		"data_parallel_start_rank": w.start, "data_parallel_size": w.ranks, "kv_events_endpoints": endpoints, "taints": w.taints, "total_kv_blocks": 1000, "max_num_batched_tokens": 20})
	if a.object()["lifecycle"] != "schedulable" {
		x.t.Fatalf("worker %d: %v", w.id, a)
	}
	x.booked(w, true)
	for _, p := range w.publishers {
		p.subscribed(2)
		clear(p.held)
		p.publish([]any{"AllBlocksCleared"})
	}
}

// booked waits until Dynamo's load book knows a worker, or knows it no more: its answers about workers come before.
func (x *selectors) booked(w *selectable, want bool) {
	x.t.Helper()
	eventually(x.t, func() error {
		groups := x.ask(x.Dynamo, "GET", "/loads?routing_group="+w.group, nil).body.([]any)
		known := len(groups) > 0 && slices.ContainsFunc(groups[0].(object)["loads"].([]any), func(load any) bool { return integer(load.(object)["worker_id"]) == w.id })
		if known != want {
			return fmt.Errorf("Dynamo's load book knows worker %d: %v", w.id, known)
		}
		return nil
	})
}

// remove has a worker leave both services.
func (x *selectors) remove(w *selectable) {
	x.t.Helper()
	x.same("DELETE", fmt.Sprintf("/workers/%d", w.id), nil)
	x.booked(w, false)
}

// add makes a new worker and registers it.
func (x *selectors) add(id uint64, group string, start, ranks int, taints ...string) {
	x.t.Helper()
	w := &selectable{id: id, group: group, start: start, taints: append([]string{}, taints...)}
	for i := range ranks {
		if w.ranks++; !x.weights.unheard {
			w.publishers = append(w.publishers, newPublisher(x.t, id, start+i))
		}
	}
	x.publishers = append(x.publishers, w.publishers...)
	x.workers = append(x.workers, w)
	x.register(w)
}

// settle waits until both services have applied all that was published: a block that only this moment has is everywhere.
func (x *selectors) settle() {
	x.t.Helper()
	x.markers++
	marker := []int{1 << 20, x.markers, 0, 0}
	ranks := map[string]int{}
	for _, w := range x.workers {
		for _, p := range w.publishers {
			p.store(marker)
			ranks[w.group]++
		}
	}
	for _, url := range []string{x.Dynamo, x.Kvepp} {
		for group, want := range ranks {
			eventually(x.t, func() error {
				a := x.ask(url, "POST", "/overlap_scores", object{"routing_group": group, "token_ids": marker})
				workers, _ := a.object()["workers"].([]any)
				there := 0
				for _, w := range workers {
					there += int(integer(w.(object)["device_blocks"]))
				}
				if there != want {
					return fmt.Errorf("%s: %d of %d ranks have the marker: %v", url, there, want, a)
				}
				return nil
			})
		}
	}
}

// prompt makes a prompt of few different tokens, so that prompts begin alike.
func (x *selectors) prompt() []int {
	tokens := make([]int, x.rng.IntN(12)*indexerBlock+x.rng.IntN(indexerBlock))
	for i := range tokens {
		tokens[i] = x.rng.IntN(2) * (i / indexerBlock % 3)
	}
	return tokens
}

// churn has engines announce what they would.
func (x *selectors) churn(n int) {
	x.t.Helper()
	for range n {
		p := x.publishers[x.rng.IntN(len(x.publishers))]
		switch n := x.rng.IntN(20); {
		case n < 13:
			p.store(x.prompt())
		case n < 17:
			p.evict(x.rng, 1+x.rng.IntN(4))
		case n < 19:
			p.offload(x.rng, 1+x.rng.IntN(4))
		default:
			clear(p.held)
			p.publish([]any{"AllBlocksCleared"})
		}
	}
	x.counts["events"] += n
	x.settle()
}

// fields are a prompt as a request gives it: as tokens, or as hashes.
func (x *selectors) fields(group string) (body object, isl int) {
	tokens := x.prompt()
	body = object{"routing_group": group}
	if x.rng.IntN(5) > 0 || len(tokens) == 0 {
		body["token_ids"] = tokens
		if x.rng.IntN(10) == 0 {
			body["cache_salt"] = "tenant"
		}
		return body, len(tokens)
	}
	ids := make([]kvblock.Token, len(tokens))
	for i, t := range tokens {
		ids[i] = kvblock.Token(t)
	}
	local := kvblock.AppendLocalHashes(nil, ids, kvblock.HashOptions{BlockSize: indexerBlock})
	blocks, sequence := make([]int64, len(local)), make([]int64, len(local))
	for i, h := range kvblock.AppendSequenceHashes(nil, local) {
		blocks[i], sequence[i] = int64(local[i]), int64(h)
	}
	body["block_hashes"], body["sequence_hashes"], body["isl_tokens"] = blocks, sequence, len(tokens)
	return body, len(tokens)
}

// rank is one rank of one worker, and what Dynamo said of it.
type rank struct {
	id             uint64
	rank           int
	device         float64 // blocks of the prompt
	host, disk     float64 // more of them
	prefill        float64 // tokens waiting
	requests       float64
	decode         float64 // blocks, with the request's
	taints         []string
	allowed        bool
	cost           float64
	costAsStarted  float64 // with the weights of the start, which is what Dynamo goes by
	cachedIfChosen float64
}

// selection is a request, and what is wanted otherwise than at the start.
type selection struct {
	body      object
	isl       int
	group     string
	over      weights // the weights that count
	drawn     bool    // the choice is a draw from all
	preferred map[string]float64
	random    bool // the request's blocks have hashes that nobody knows
}

// newSelection makes a selection at random.
func (x *selectors) newSelection() *selection {
	s := &selection{group: x.workers[x.rng.IntN(len(x.workers))].group, over: x.weights}
	s.body, s.isl = x.fields(s.group)
	over := object{}
	if x.rng.IntN(4) == 0 {
		s.over.credit = float64(x.rng.IntN(5)) / 2
		over["overlap_score_credit"] = s.over.credit
	}
	if x.rng.IntN(4) == 0 {
		s.over.scale = float64(x.rng.IntN(5)) / 2
		over["prefill_load_scale"] = s.over.scale
	}
	if x.rng.IntN(6) == 0 {
		s.over.track = x.rng.IntN(2) == 0
		over["track_prefill_tokens"] = s.over.track
	}
	if x.rng.IntN(8) == 0 {
		reuse := x.rng.IntN(2) == 0
		s.random = !reuse && s.body["token_ids"] != nil
		over["assume_kv_reuse"] = reuse
	}
	if x.rng.IntN(12) == 0 {
		s.drawn = true
		over["router_temperature"] = 0.5
	}
	if len(over) > 0 {
		s.body["router_config_override"] = over
	}
	if x.rng.IntN(8) == 0 {
		allowed := []uint64{}
		for _, w := range x.workers {
			if x.rng.IntN(2) == 0 {
				allowed = append(allowed, w.id)
			}
		}
		s.body["allowed_worker_ids"] = allowed
	}
	if x.rng.IntN(6) == 0 {
		constraints := object{}
		if x.rng.IntN(3) == 0 {
			constraints["required_taints"] = []string{"b"}
		} else {
			s.preferred = map[string]float64{"a": float64(x.rng.IntN(9)-4) / 4, "b": float64(x.rng.IntN(9)-4) / 4}
			constraints["preferred_taints"] = s.preferred
		}
		s.body["routing_constraints"] = constraints
	}
	return s
}

// ranks asks both services what they know about a selection's prompt, wants them to agree, and prices the workers from
// Dynamo's answers.
func (x *selectors) ranks(s *selection) []rank {
	x.t.Helper()
	question := object{"routing_group": s.group}
	for _, key := range []string{"token_ids", "cache_salt", "block_hashes", "sequence_hashes", "isl_tokens", "router_config_override"} {
		if v, ok := s.body[key]; ok {
			question[key] = v
		}
	}
	scores := x.same("POST", "/overlap_scores", question).object()["workers"].([]any)
	potential := x.same("POST", "/potential_loads", question).body.([]any)
	loads := x.same("GET", "/loads?routing_group="+s.group, nil).body.([]any)[0].(object)["loads"].([]any)
	x.counts["overlaps, potential and current loads alike"] += len(scores)
	var all []rank
	for i, v := range scores {
		score, would, has := v.(object), potential[i].(object), loads[i].(object)
		r := rank{id: integer(score["worker_id"]), rank: int(integer(score["dp_rank"])), device: float(score["device_blocks"]),
			host: float(score["host_pinned_extension_blocks"]), disk: float(score["disk_extension_blocks"]),
			prefill: float(has["potential_prefill_tokens"]), requests: float(has["active_requests"]), decode: float(would["potential_decode_blocks"]), allowed: true}
		w := x.worker(r.id)
		r.taints = w.taints
		if allowed, ok := s.body["allowed_worker_ids"].([]uint64); ok && !slices.Contains(allowed, r.id) {
			r.allowed = false
		}
		if constraints, ok := s.body["routing_constraints"].(object); ok && constraints["required_taints"] != nil && !slices.Contains(r.taints, "b") {
			r.allowed = false
		}
		r.cachedIfChosen = math.Round((r.device + x.weights.host*r.host + x.weights.disk*r.disk) * indexerBlock)
		all = append(all, r)
	}
	least := math.Inf(1)
	for _, r := range all {
		if r.allowed {
			least = min(least, r.prefill)
		}
	}
	for i := range all {
		all[i].cost = all[i].price(s, s.over, least)
		asStarted := x.weights
		asStarted.track = s.over.track // which Dynamo does go by
		all[i].costAsStarted = all[i].price(s, asStarted, least)
	}
	return all
}

// price is Dynamo's cost function, written down once more.
func (r *rank) price(s *selection, w weights, least float64) float64 {
	isl := float64(s.isl)
	decay, raw := 1.0, 0.0
	if w.track {
		requestBlocks := max(math.Ceil(isl/indexerBlock), 1)
		decay = 1 / (1 + w.decay*((r.prefill-least)/indexerBlock)/requestBlocks)
		raw = r.prefill + max(isl-r.cachedIfChosen, 0) + r.cachedIfChosen
	}
	credit := w.credit*decay*r.device + w.host*r.host + w.disk*r.disk
	cost := w.scale*max(raw/indexerBlock-credit, 0) + r.decode + w.request*r.requests
	if !w.track && w.credit > 0 { // as of decode workers, which the selection service takes all for
		cost = max(r.decode-credit, 0) + w.request*r.requests
	}
	bias := 0.0
	for taint, weight := range s.preferred {
		if slices.Contains(r.taints, taint) {
			bias += weight
		}
	}
	return cost * math.Exp(-math.Tanh(bias))
}

func (x *selectors) worker(id uint64) *selectable {
	return x.workers[slices.IndexFunc(x.workers, func(w *selectable) bool { return w.id == id })]
}

// cheapest lists the ranks whose cost, as given, is the least: rounding apart.
func cheapest(all []rank, cost func(*rank) float64) (of []*rank) {
	least := math.Inf(1)
	for i := range all {
		if all[i].allowed {
			least = min(least, cost(&all[i]))
		}
	}
	for i := range all {
		if all[i].allowed && cost(&all[i]) <= least+1e-9*(1+math.Abs(least)) {
			of = append(of, &all[i])
		}
	}
	return of
}

func chose(a answer) (id uint64, rank int) {
	return integer(a.object()["worker_id"]), int(integer(a.object()["dp_rank"]))
}

func isOneOf(a answer, of []*rank) bool {
	id, at := chose(a)
	return slices.ContainsFunc(of, func(r *rank) bool { return r.id == id && r.rank == at })
}

// compare has both services choose, and wants each choice to be one of the cheapest. It returns the worker that both shall book,
// nil if there is none.
func (x *selectors) compare(s *selection) *rank {
	x.t.Helper()
	all := x.ranks(s)
	theirs, ours := x.ask(x.Dynamo, "POST", "/select", s.body), x.ask(x.Kvepp, "POST", "/select", s.body)
	best, bestAsStarted := cheapest(all, func(r *rank) float64 { return r.cost }), cheapest(all, func(r *rank) float64 { return r.costAsStarted })
	if len(best) == 0 {
		x.equal("/select", s.body, theirs, ours)
		x.counts["selections without a worker"]++
		return nil
	}
	if theirs.status != http.StatusOK || ours.status != http.StatusOK {
		x.t.Fatalf("/select %v: Dynamo %v, kvepp %v", s.body, theirs, ours)
	}
	x.counts["selections"]++
	// Dynamo's selection service passes over a request's weights and temperature (its cost function has those of the start).
	if !isOneOf(theirs, bestAsStarted) {
		x.t.Fatalf("/select %v: Dynamo chose %v, which is not among the cheapest that the test computes; its cost function is another\nof %+v", s.body, theirs, all)
	}
	if s.over != x.weights && s.over.track == x.weights.track || s.drawn {
		x.counts["of them with weights or a temperature that Dynamo passes over"]++
	}
	if s.drawn {
		if id, at := chose(ours); !slices.ContainsFunc(all, func(r rank) bool { return r.allowed && r.id == id && r.rank == at }) {
			x.t.Fatalf("/select %v: kvepp chose %v, which it must not", s.body, ours)
		}
		x.counts["of them drawn"]++
	} else if !isOneOf(ours, best) {
		x.t.Fatalf("/select %v: kvepp chose %v, which is not among the cheapest\nof %+v", s.body, ours, all)
	} else if len(best) > 1 {
		x.counts["of them ties"]++
	}
	if id, at := chose(theirs); s.over == x.weights && !s.drawn {
		if id2, at2 := chose(ours); id == id2 && at == at2 {
			x.equal("/select", s.body, theirs, ours)
			x.counts["of them the same choice, and then the same answer"]++
		}
	}
	id, at := chose(ours)
	return &all[slices.IndexFunc(all, func(r rank) bool { return r.id == id && r.rank == at })]
}

// book reserves a selection on one worker with both services, in one of the ways.
func (x *selectors) book(s *selection, r *rank) {
	x.t.Helper()
	defer x.predicted(s)
	x.names++
	name := fmt.Sprintf("r/%d", x.names)
	body := maps.Clone(s.body)
	body["selection_id"] = name
	delete(body, "allowed_worker_ids")
	pinned := object{"worker_id": r.id, "dp_rank": r.rank}
	switch way := x.rng.IntN(4); way {
	case 0: // at once
		body["pinned_worker"] = pinned
		theirs, ours := x.ask(x.Dynamo, "POST", "/select_and_reserve", body), x.ask(x.Kvepp, "POST", "/select_and_reserve", body)
		if s.random {
			for _, a := range []answer{theirs, ours} {
				hashes, _ := a.object()["sequence_hashes"].([]any)
				a.object()["sequence_hashes"] = len(hashes) // which nobody knows
			}
		}
		x.equal("/select_and_reserve", body, theirs, ours)
	case 1, 2: // a selection, then a reservation
		if body["pinned_worker"] = pinned; way == 2 {
			delete(body, "pinned_worker")
			delete(body, "routing_constraints")
			body["affinity_target"] = pinned
		}
		body["advisory"] = x.rng.IntN(2) == 0
		x.same("POST", "/select", body)
		x.same("POST", "/reservations", object{"selection_id": name, "routing_group": s.group})
	default: // a reservation that brings everything
		for _, key := range []string{"routing_constraints"} {
			delete(body, key)
		}
		body["worker_id"], body["dp_rank"] = r.id, r.rank
		if x.rng.IntN(3) > 0 {
			body["effective_prefill_tokens"] = int(max(float64(s.isl)-r.cachedIfChosen, 0))
		}
		if x.rng.IntN(3) == 0 {
			body["track_prefill_tokens"] = x.rng.IntN(2) == 0
		}
		x.same("POST", "/reservations", body)
	}
	x.counts["reservations"]++
	x.reserved = append(x.reserved, reserved{name, r.id})
}

// predicted waits until Dynamo believes that the prompt is where it was sent, if that is how it knows. kvepp does when it
// answers.
func (x *selectors) predicted(s *selection) {
	x.t.Helper()
	if !x.weights.unheard {
		return
	}
	question := object{}
	for _, key := range []string{"routing_group", "token_ids", "cache_salt", "block_hashes", "sequence_hashes", "isl_tokens"} {
		if v, ok := s.body[key]; ok {
			question[key] = v
		}
	}
	ours := x.ask(x.Kvepp, "POST", "/overlap_scores", question)
	eventually(x.t, func() error {
		if theirs := x.ask(x.Dynamo, "POST", "/overlap_scores", question); !reflect.DeepEqual(theirs, ours) {
			return fmt.Errorf("/overlap_scores %v: Dynamo %v, kvepp %v", question, theirs, ours)
		}
		return nil
	})
}

// play does steps at random to both services.
func (x *selectors) play(steps int) {
	x.t.Helper()
	for step := range steps {
		if step%40 == 0 && !x.weights.unheard {
			x.churn(30)
		}
		x.counts["steps"]++
		i := 0
		if len(x.reserved) > 0 {
			i = x.rng.IntN(len(x.reserved))
		}
		switch n := x.rng.IntN(100); {
		case n < 50:
			s := x.newSelection()
			if r := x.compare(s); r != nil && x.rng.IntN(3) > 0 {
				x.book(s, r)
			}
		case n < 53:
			w := x.workers[x.rng.IntN(len(x.workers))]
			w.taints = [][]string{{}, {"a"}, {"b"}, {"a", "b"}}[x.rng.IntN(4)]
			x.same("PATCH", fmt.Sprintf("/workers/%d", w.id), object{"taints": w.taints})
		case n < 54 && len(x.workers) > 3:
			w := x.workers[x.rng.IntN(len(x.workers))]
			x.remove(w)
			x.counts["workers that left and came back"]++
			x.reserved = slices.DeleteFunc(x.reserved, func(r reserved) bool {
				if r.worker != w.id {
					return false
				}
				// Dynamo keeps the name until somebody asks for it.
				x.counts["names that Dynamo keeps after their worker has left"]++
				x.same("DELETE", r.path(), nil)
				return true
			})
			if x.register(w); !x.weights.unheard {
				x.settle()
			}
		case len(x.reserved) == 0:
		case n < 68:
			x.same("POST", x.reserved[i].path()+"/prefill_complete", nil)
		case n < 80:
			body := object{}
			if x.rng.IntN(2) == 0 {
				body["decay_fraction"] = float64(x.rng.IntN(9)) / 8
			}
			x.same("POST", x.reserved[i].path()+"/output_block", body)
		case n < 97 || len(x.reserved) > 60:
			x.same("DELETE", x.reserved[i].path(), nil)
			x.reserved = slices.Delete(x.reserved, i, i+1)
		default:
			x.same("POST", "/select_and_reserve", object{"selection_id": x.reserved[i].name, "token_ids": []int{1},
				"pinned_worker": object{"worker_id": x.workers[0].id, "dp_rank": x.workers[0].start}, "routing_group": x.workers[0].group})
		}
	}
	for _, r := range x.reserved {
		x.same("DELETE", r.path(), nil)
	}
	for _, group := range x.same("GET", "/loads", nil).body.([]any) {
		for _, load := range group.(object)["loads"].([]any) {
			for key, v := range load.(object) {
				if key != "worker_id" && key != "dp_rank" && integer(v) != 0 {
					x.t.Errorf("%s is left at the end: %v", key, load)
				}
			}
		}
	}
}

// TestSelectionsAsDynamos plays the same histories of workers, KV events, selections and reservations into python -m
// dynamo.select_service and kvepp select. What both know must agree: overlaps, tokens to prefill, blocks to decode, loads, and
// every answer. What a worker costs the test computes from Dynamo's answers, and each service must choose one of the cheapest.
//
// Where Dynamo errs it is not followed. Counted: weights and temperatures of a request, which it passes over (then its choice must
// be one of the cheapest by the weights of the start), and names of reservations that it keeps taken after their worker has left.
// Not played: what its index errs in, which TestIndexerWhereDynamosErrs shows; the engines here name equal blocks alike, free the
// ends of prompts first, and lose no event.
func TestSelectionsAsDynamos(t *testing.T) {
	for _, c := range []struct {
		name  string
		steps int
		weights
	}{
		{"defaults", 5000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true}},
		{"every weight", 3000, weights{credit: 0.5, decay: 1, scale: 2, request: 3, host: 0.5, disk: 0.125, track: true}},
		{"prefill not tracked", 1000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25}},
		{"without events", 1000, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := startSelectors(t, c.weights)
			seed := uint64(begun)
			x.rng = rand.New(rand.NewPCG(seed, uint64(c.steps)))
			x.add(7, "default", 0, 1)
			x.add(8, "default", 3, 2, "a")
			x.add(12510495253119935035, "default", 0, 1, "b")
			x.add(9, "default", 0, 1, "a", "b")
			x.add(10, "other", 0, 2, "b")
			defer func() {
				for _, what := range slices.Sorted(maps.Keys(x.counts)) {
					t.Logf("%6d %s", x.counts[what], what)
				}
				t.Logf("seed %d", seed)
			}()
			x.play(c.steps)
		})
	}
}

// TestSelectionsRefusedAsDynamos wants refusals, and what is odd but good, answered as Dynamo's selection service does: with the
// same status, and the same body but where the words are a JSON decoder's.
func TestSelectionsRefusedAsDynamos(t *testing.T) {
	x := startSelectors(t, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true})
	same := func(requests ...[2]string) {
		t.Helper()
		for _, r := range requests {
			method, path, _ := strings.Cut(r[0], " ")
			var body any
			if r[1] != "" {
				body = r[1]
			}
			x.same(method, path, body)
		}
	}
	same([][2]string{
		{"GET /health", ""}, {"GET /ready", ""}, {"GET /workers", ""}, {"GET /loads", ""}, {"GET /dump", ""}, {"GET /nowhere", ""}, {"GET /select", ""},
		{"DELETE /workers", ""}, {"PUT /health", ""}, {"GET /replica_sync/peers", ""}, {"POST /replica_sync/register_peer", `{"endpoint": "tcp://127.0.0.1:1"}`},
		{"POST /replica_sync/deregister_peer", `{"endpoint": "x"}`}, {"POST /replica_sync/register_peer", `{}`},
		{"POST /select", `{}`}, {"POST /potential_loads", `{"token_ids": [1]}`}, {"POST /overlap_scores", `{"token_ids": [1]}`},
		{"POST /reservations", `{"selection_id": "a"}`}, {"POST /reservations", `{}`}, {"POST /reservations", `{"selection_id": "a", "worker_id": 1, "token_ids": [1]}`},
		{"POST /workers", `{}`}, {"POST /workers", `{"worker_id": 1}`}, {"GET /ready", ""}, {"PATCH /workers/1", `{"endpoint": "http://h:1"}`}, {"PATCH /workers/9", `{}`},
		{"PATCH /workers/x", `{}`}, {"DELETE /workers/x", ""}, {"POST /workers", `{"worker_id": -1}`}, {"POST /workers", `{"worker_id": "1"}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 2, "kv_events_endpoint": "tcp://127.0.0.1:1"}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 2, "kv_events_endpoints": {"0": "tcp://127.0.0.1:1", "1": "tcp://127.0.0.1:2"}, "replay_endpoint": "tcp://127.0.0.1:9"}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "e", "block_size": 4, "data_parallel_size": 4097}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "", "block_size": 0, "data_parallel_size": 0}`},
		{"POST /workers", `{"worker_id": 1, "kv_transfer_enforcement": "no"}`},
		{"POST /workers", `{"worker_id": 1, "kv_transfer_enforcement": "preferred", "kv_transfer_preferred_weight": 0.1, "router_hint_worker_type": "p", "kv_event_source_mode": "m",
			"router_hint_source_control_endpoints": {"3": "c"}, "topology_domains": {"zone": "z"}, "stable_routing_id": "s", "kv_transfer_domain": "d", "is_eagle": false}`},
		{"POST /workers", `{"worker_id": 1, "endpoint": "http://h:1", "block_size": 4, "data_parallel_size": 2, "data_parallel_start_rank": 3, "max_num_batched_tokens": 50, "total_kv_blocks": 100,
			"kv_events_endpoints": {"3": "tcp://127.0.0.1:1", "4": "tcp://127.0.0.1:2"}, "taints": ["b", "a", "b"]}`},
	}...)
	one := &selectable{id: 1, group: "default"}
	x.booked(one, true)
	same([][2]string{
		{"POST /workers", `{"worker_id": 3, "endpoint": "e", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:4"}`},
		{"POST /workers", `{"worker_id": 4, "endpoint": "e", "block_size": 4, "is_eagle": true, "kv_events_endpoint": "tcp://127.0.0.1:4"}`},
		{"POST /workers", `{"worker_id": 5, "Endpoint": "e", "BLOCK_SIZE": 4}`}, {"DELETE /workers/5", ""}, {"POST /workers", `{"worker_id": 5, "worker_id": 5}`},
		{"PATCH /workers/1", `{"taints": [], "taints": []}`}, {"PATCH /workers/1", `{"Taints": []}`},
		{"GET /ready", ""}, {"GET /workers?model_name=other", ""}, {"GET /workers?routing_group=default", ""}, {"GET /loads", ""}, {"GET /dump", ""},
		{"GET /loads?model_name=other", ""},
	}...)
	only := `"pinned_worker": {"worker_id": 1, "dp_rank": 4}`
	for _, body := range []string{
		`{`, `[]`, ``, `"x"`, `{"token_ids": "x"}`, `{"token_ids": [-1]}`, `{"token_ids": [4294967296]}`, `{"token_ids": [1.5]}`, `{"token_ids": null}`,
		`{"block_hashes": [1]}`, `{"block_hashes": [1], "sequence_hashes": [1]}`, `{"sequence_hashes": [1], "isl_tokens": 5}`,
		`{"block_hashes": [1, 2], "sequence_hashes": [1], "isl_tokens": 5}`, `{"block_hashes": [], "sequence_hashes": [], "isl_tokens": 0}`,
		`{"token_ids": [1], "model_name": "other"}`, `{"token_ids": [1], "pinned_worker": {"worker_id": 1}}`, `{"token_ids": [1], "pinned_worker": {"worker_id": 1, "dp_rank": 0}}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 9, "dp_rank": 0}}`, `{"token_ids": [1], "allowed_worker_ids": [9], ` + only + `}`,
		`{"token_ids": [1], "allowed_worker_ids": []}`, `{"token_ids": [1], "affinity_target": {}}`, `{"token_ids": [1], "affinity_target": {"worker_id": 1, "dp_rank": 3}}`,
		`{"token_ids": [1], "affinity_target": {"worker_id": 9}, ` + only + `}`, `{"token_ids": [1], "affinity_target": {"worker_id": 1, "dp_rank": 3}, ` + only + `}`,
		`{"token_ids": [1], "routing_constraints": {"required_taints": ["c"]}}`, `{"token_ids": [1], "routing_constraints": {"required_taints": ["a", "b"]}, ` + only + `}`,
		`{"token_ids": [1], "session_context": {}}`, `{"token_ids": [1], "session_context": {"session_id": "s", "input_trigger": "no"}}`,
		`{"token_ids": [1], "session_context": {"session_id": "s", "input_trigger": "other", "agent_headers": {"a": ["b"]}}, ` + only + `}`,
		`{"token_ids": [1], "router_config_override": {"overlap_score_credit": -1}}`, `{"token_ids": [1], "router_config_override": {"prefill_load_scale": -1}}`,
		`{"token_ids": [1], "router_config_override": {"router_temperature": -1}}`, `{"token_ids": [1], "router_config_override": {"shared_cache_multiplier": 2}}`,
		`{"token_ids": [1], "router_config_override": {"overlap_score_weight": -1}}`, `{"token_ids": [1], "router_config_override": {"other": 1}, ` + only + `}`,
		`{"token_ids": [1], "expected_output_tokens": -1}`, `{"token_ids": [1], "expected_output_tokens": 7, "priority_jump": 2.5, "strict_priority": 3, ` + only + `}`,
		`{"token_ids": [], ` + only + `}`, `{"token_ids": [1, 2, 3, 4, 5], "is_eagle": true, "lora_name": "l", "cache_salt": "c", ` + only + `}`,
		`{"token_ids": [1], "mm_routing_info": {"routing_token_ids": [1, 2, 3, 4, 5]}, "selection_id": "m", ` + only + `}`,
		`{"token_ids": [1, 2, 3, 4, 5, 6, 7, 8], "block_mm_infos": [{"mm_objects": [{"mm_hash": 18446744073709551615, "offsets": [[0, 2]]}, {"mm_hash": 7, "offsets": []}]}, null], ` + only + `}`,
		`{"token_ids": [1], "advisory": true, ` + only + `}`,
		`{"Token_ids": [1], ` + only + `}`, `{"token\u005fids": [1], "TOKEN_IDS": "x", ` + only + `}`, `{"token_ids": [1], "token_ids": [1], ` + only + `}`,
		`{"token_ids": [1], "unknown": 1, "unknown": 2, ` + only + `}`, `{"token_ids": [1], "pinned_worker": {"worker_id": 1, "Worker_id": 9, "dp_rank": 4}}`,
		`{"token_ids": [1], "pinned_worker": {"worker_id": 1, "dp_rank": 4, "dp_rank": 4}}`,
		`{"token_ids": [1], "session_context": {"session_id": "s", "agent_headers": {"A": ["b"], "a": ["b"]}}, ` + only + `}`,
		`{"token_ids": [` + strings.Repeat("1,", 8<<19) + `1]}`,
	} {
		same([2]string{"POST /select", body})
	}
	tokens := `"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]`
	same([][2]string{
		{"POST /select_and_reserve", `{"selection_id": "b", ` + tokens + `, "block_mm_infos": [{"mm_objects": [{"mm_hash": 9, "offsets": []}, {"mm_hash": 7, "offsets": []}]}], ` + only + `}`},
		{"POST /select_and_reserve", `{"selection_id": "b", ` + tokens + `, ` + only + `}`},
		{"POST /reservations", `{"selection_id": "m"}`}, {"POST /reservations", `{"selection_id": "m"}`},
		{"POST /reservations", `{"selection_id": "c", "worker_id": 1, ` + tokens + `}`}, {"POST /reservations", `{"selection_id": "c", "worker_id": 9, ` + tokens + `}`},
		{"POST /reservations", `{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `, "effective_prefill_tokens": 10}`},
		{"POST /reservations", `{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `, "effective_prefill_tokens": 9}`},
		{"POST /reservations", `{"selection_id": "c", "worker_id": 1, "dp_rank": 3, ` + tokens + `}`},
		{"POST /reservations", `{"selection_id": "d", "worker_id": 1, "dp_rank": 3}`}, {"POST /reservations", `{"selection_id": "d", "worker_id": 1, "sequence_hashes": [1]}`},
		{"POST /reservations", `{"selection_id": "d", "worker_id": 1, "dp_rank": 3, "sequence_hashes": [-1], "isl_tokens": 0}`},
		{"POST /reservations", `{"selection_id": "e", "worker_id": 1, "dp_rank": 3, "model_name": "other", ` + tokens + `}`},
		{"GET /loads", ""}, {"POST /reservations/c/output_block", `{}`}, {"POST /reservations/c/output_block", `{"decay_fraction": 1.5}`}, {"POST /reservations/c/output_block", ""},
		{"POST /reservations/x/output_block", `{}`}, {"GET /loads", ""}, {"POST /reservations/c/prefill_complete", ""}, {"POST /reservations/c/prefill_complete", ""},
		{"POST /reservations/x%2Fy/prefill_complete", ""}, {"POST /reservations/c/prefill_complete/", ""}, {"DELETE /reservations/", ""},
		{"DELETE /reservations/c", ""}, {"DELETE /reservations/c", ""}, {"GET /loads", ""},
		{"POST /potential_loads", `{}`}, {"POST /overlap_scores", `{}`}, {"POST /potential_loads", `{` + tokens + `}`},
		{"POST /potential_loads", `{` + tokens + `,` + tokens + `}`}, {"POST /overlap_scores", `{` + tokens + `,` + tokens + `}`},
		{"POST /potential_loads", `{` + tokens + `, "Model_name": "x", "router_config_override": {"Overlap_score_credit": -1}}`},
		{"POST /reservations", `{"selection_id": "f", "selection_id": "f", "worker_id": 1, "dp_rank": 3, ` + tokens + `}`},
	}...)
	x.remove(one)
	same([][2]string{
		{"POST /reservations/b/prefill_complete", ""}, {"POST /select", `{` + tokens + `}`}, {"GET /workers", ""}, {"GET /loads", ""}, {"GET /ready", ""},
	}...)
	t.Logf("%d answers alike", x.counts["answers alike"])
}

// TestSessionsAsDynamos has sessions begin, go on, be led elsewhere and lose their worker in both selection services.
func TestSessionsAsDynamos(t *testing.T) {
	x := startSelectors(t, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true}, "--session-affinity-ttl-secs", "600")
	x.rng = rand.New(rand.NewPCG(uint64(begun), 9))
	for id := range uint64(3) {
		x.add(id+1, "default", 0, 1)
	}
	boundTo := map[string]uint64{}
	for step := range 600 {
		name, id := fmt.Sprintf("session-%d", x.rng.IntN(6)), 1+x.rng.Uint64N(3)
		tokens := x.prompt()
		selection := object{"token_ids": tokens}
		if x.rng.IntN(2) == 0 {
			selection["session_id"] = name
		} else {
			selection["session_context"], selection["session_id"] = object{"session_id": name}, "another"
		}
		reservation := maps.Clone(selection)
		reservation["selection_id"] = fmt.Sprintf("r%d", step)
		on, there := boundTo[name]
		want := func(a answer, id uint64) {
			t.Helper()
			if got, _ := chose(a); a.status >= 300 || got != id {
				t.Fatalf("step %d: %v is bound to %d, but %v", step, name, id, a)
			}
		}
		switch n := x.rng.IntN(20); {
		case !there:
			// Only one worker may take it, so that both services take the same.
			reservation["allowed_worker_ids"] = []uint64{id}
			if x.rng.IntN(2) == 0 {
				x.same("POST", "/select", reservation) // a look binds nothing ...
				want(x.same("POST", "/reservations", object{"selection_id": reservation["selection_id"]}), id)
			} else {
				want(x.same("POST", "/select_and_reserve", reservation), id)
			}
			boundTo[name] = id
		case n == 0: // it must go elsewhere: refused, and it begins anew
			if id == on {
				id = 1 + on%3
			}
			reservation["allowed_worker_ids"] = []uint64{id}
			if a := x.same("POST", "/select_and_reserve", reservation); a.status != http.StatusBadRequest {
				t.Fatalf("step %d: %v is bound to %d, but %v", step, name, on, a)
			}
			delete(boundTo, name)
			continue
		case n == 1: // who names a worker has no session
			reservation["pinned_worker"] = object{"worker_id": id, "dp_rank": 0}
			want(x.same("POST", "/select_and_reserve", reservation), id)
		case n == 2:
			x.remove(x.worker(id))
			x.counts["workers that left"]++
			for session, at := range boundTo {
				if at == id { // it begins anew on another
					next := 1 + id%3
					want(x.same("POST", "/select_and_reserve", object{"token_ids": tokens, "session_id": session, "selection_id": session + fmt.Sprint(step),
						"allowed_worker_ids": []uint64{next}}), next)
					boundTo[session] = next
				}
			}
			x.register(x.worker(id))
			continue
		default:
			want(x.same("POST", "/select", selection), on)
			want(x.same("POST", "/select_and_reserve", reservation), on)
		}
		x.counts["requests in sessions"]++
		if x.rng.IntN(2) == 0 {
			x.same("DELETE", "/reservations/"+reservation["selection_id"].(string), nil)
		}
	}
	x.same("POST", "/select", object{"token_ids": []int{1}, "session_id": strings.Repeat("s", 257)})
	x.same("POST", "/select_and_reserve", object{"token_ids": []int{1}, "session_id": strings.Repeat("s", 257)})
	t.Log(x.counts)
}

// TestSelectionsWaitAsDynamos has selections wait in both services while the worker that they may have is busy, and wants them to go
// on in the same order.
func TestSelectionsWaitAsDynamos(t *testing.T) {
	policies := filepath.Join(t.TempDir(), "policies.yaml")
	if err := os.WriteFile(policies, []byte(`
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: short}, {min_tokens: 30, bucket: long}]
policy_classes:
- {name: short, policy_family: standard, cache_bucket: short, quantum: 60, prefill_busy_threshold_frac: 1, request_queue_limit_per_worker: 2}
- {name: long, policy_family: standard, cache_bucket: long, queue_policy: wspt, quantum: 30, prefill_busy_threshold: 20, raw_isl_token_queue_limit_per_worker: 60}
- {name: refused, quantum: 1, prefill_busy_threshold: 20, request_queue_limit_per_worker: 0}
- {name: free, quantum: 1}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, env string }{
		{"first come", "DYN_ROUTER_QUEUE_THRESHOLD=1"},
		{"shortest first", "DYN_ROUTER_QUEUE_THRESHOLD=1 DYN_ROUTER_QUEUE_POLICY=wspt"},
		{"classes", "DYN_ROUTER_POLICY_CONFIG=" + policies},
	} {
		t.Run(c.name, func(t *testing.T) {
			x := startSelectors(t, weights{credit: 1, scale: 1, host: 0.75, disk: 0.25, track: true, unheard: true, more: c.env})
			t.Logf("seed %d", begun)
			x.rng = rand.New(rand.NewPCG(uint64(begun), 11))
			x.same("POST", "/workers", object{"worker_id": 1, "endpoint": "e", "block_size": indexerBlock})
			x.add(1, "default", 0, 1)
			x.add(2, "default", 0, 1)
			for round := range 25 {
				x.waitInLine(round, c.name == "classes")
			}
			t.Log(x.counts)
		})
	}
}

// wentOn is what became of one selection that waited.
type wentOn struct {
	name string
	answer
}

// waitInLine makes both workers busy, has selections wait for them, and lets them go on one by one.
func (x *selectors) waitInLine(round int, classes bool) {
	x.t.Helper()
	x.class = ""
	fresh := func(n int) []int { // tokens that nobody has seen
		tokens := make([]int, n)
		for i := range tokens {
			tokens[i] = 1<<24 + round<<12 + x.rng.IntN(1<<12)
		}
		return tokens
	}
	last := map[uint64]string{} // the reservation that keeps a worker busy
	for id := range uint64(2) {
		last[id+1] = fmt.Sprintf("busy-%d-%d", round, id+1)
		x.same("POST", "/select_and_reserve", object{"selection_id": last[id+1], "token_ids": fresh(30), "pinned_worker": object{"worker_id": id + 1, "dp_rank": 0}})
	}
	urls := []string{x.Dynamo, x.Kvepp}
	over := []chan wentOn{make(chan wentOn, 100), make(chan wentOn, 100)}
	pending := func(want int) {
		x.t.Helper()
		for _, url := range urls {
			eventually(x.t, func() error {
				loads := x.ask(url, "GET", "/loads", nil).body.([]any)[0].(object)
				if n := int(integer(loads["pending_count"])); n != want {
					return fmt.Errorf("%s: %d selections wait, want %d: %v", url, n, want, loads)
				}
				return nil
			})
		}
	}
	next := func() (wentOn, wentOn) { // the same from both
		x.t.Helper()
		var went [2]wentOn
		for k := range went {
			select {
			case went[k] = <-over[k]:
			case <-time.After(time.Minute):
				x.t.Fatalf("round %d: nothing goes on in %s", round, urls[k])
			}
		}
		theirs, ours := went[0], went[1]
		if theirs.name != ours.name {
			x.t.Fatalf("round %d: %s goes on in Dynamo, and %s in kvepp", round, theirs.name, ours.name)
		}
		x.equal("/select_and_reserve", theirs.name, theirs.answer, ours.answer)
		return theirs, ours
	}
	const anywhere = 0
	waiting, at := map[uint64]int{}, map[string]uint64{} // by the worker that it must be
	total := 0
	for i := range 2 + x.rng.IntN(7) {
		name, id := fmt.Sprintf("wait-%d-%d", round, i), x.rng.Uint64N(3)
		body := object{"selection_id": name, "token_ids": fresh(21 + x.rng.IntN(20)), "strict_priority": x.rng.IntN(2), "priority_jump": 1000 * x.rng.IntN(5)}
		if classes {
			x.class = []string{"", "standard", "standard", "refused", "free", "unknown"}[x.rng.IntN(6)]
		}
		if x.class == "free" {
			id = 1 // it goes on at once, and both must know where
		}
		if id != anywhere {
			body["pinned_worker"] = object{"worker_id": id, "dp_rank": 0}
		}
		class := x.class
		for k, url := range urls {
			go func() {
				a, err := send(x.t.Context(), url, "POST", "/select_and_reserve", class, body)
				if err != nil {
					a.body = err.Error()
				}
				over[k] <- wentOn{name, a}
			}()
		}
		// It waits, or its answer is there at once.
		there := 0
		eventually(x.t, func() error {
			loads := x.ask(x.Dynamo, "GET", "/loads", nil).body.([]any)[0].(object)
			if int(integer(loads["pending_count"])) == total+1 {
				there = 1
			} else if len(over[0]) == 0 {
				return fmt.Errorf("%s neither waits nor is answered", name)
			}
			return nil
		})
		if there == 0 {
			theirs, _ := next()
			x.counts[fmt.Sprintf("answered %d at once", theirs.status)]++
			if theirs.status == http.StatusOK {
				at[name] = id
				x.reserved = append(x.reserved, reserved{name, id})
			}
			continue
		}
		total++
		waiting[id]++
		at[name] = id
		pending(total)
		x.same("POST", "/select_and_reserve", body) // whose name is taken
	}
	x.class = ""
	x.counts["waited"] += total
	for total > 0 {
		id := 1 + x.rng.Uint64N(2)
		released := last[id]
		if released == "" {
			continue
		}
		for _, r := range x.reserved { // of the class that never waits
			if r.worker == id {
				x.same("DELETE", r.path(), nil)
			}
		}
		x.reserved = slices.DeleteFunc(x.reserved, func(r reserved) bool { return r.worker == id })
		x.same("POST", "/reservations/"+released+"/prefill_complete", nil)
		if last[id] = ""; waiting[id]+waiting[anywhere] > 0 {
			theirs, _ := next() // this worker costs less than the other, whose last prompt is not prefilled
			if on, _ := chose(theirs.answer); on != id {
				x.t.Fatalf("round %d: worker %d was released, and %s goes on at %d", round, id, theirs.name, on)
			}
			last[id] = theirs.name
			waiting[at[theirs.name]]--
			total--
			pending(total)
		}
		x.same("DELETE", "/reservations/"+released, nil)
	}
	for _, url := range urls {
		for name := range at {
			x.ask(url, "DELETE", "/reservations/"+name, nil)
		}
		for id := range uint64(2) {
			x.ask(url, "DELETE", fmt.Sprintf("/reservations/busy-%d-%d", round, id+1), nil)
		}
	}
	x.reserved = nil
	x.same("GET", "/loads", nil)
}
