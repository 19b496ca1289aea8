package e2e

import (
	"fmt"
	"maps"
	"math"
	"net/http"
	"reflect"
	"slices"

	"kvepp/kvblock"
)

// fields are a prompt in a request: as tokens or as hashes.
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

// rank is one rank of one worker, with Dynamo's responses about it.
type rank struct {
	id             uint64
	rank           int
	device         float64 // cached blocks of the prompt
	host, disk     float64 // further ones in other tiers
	prefill        float64 // waiting tokens
	requests       float64
	decode         float64 // blocks, with those of the request
	taints         []string
	allowed        bool
	cost           float64
	costAsStarted  float64 // with the weights of the start, which Dynamo uses
	cachedIfChosen float64
}

// selection is a request, with the settings that differ from the start.
type selection struct {
	body      object
	isl       int
	group     string
	over      weights // the effective weights
	drawn     bool    // the choice is random among all
	preferred map[string]float64
	random    bool // the request's blocks have unknown hashes
}

// newSelection returns a random selection.
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

// ranks asks both services about a selection's prompt, checks that they agree, and computes the workers' costs from
// Dynamo's responses.
func (x *selectors) ranks(s *selection) []rank {
	x.t.Helper()
	question := object{"routing_group": s.group}
	for _, key := range []string{"token_ids", "cache_salt", "block_hashes", "sequence_hashes", "isl_tokens",
		"router_config_override"} {
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
		r := rank{
			id:     integer(score["worker_id"]),
			rank:   int(integer(score["dp_rank"])),
			device: float(score["device_blocks"]),
			host:   float(score["host_pinned_extension_blocks"]),
			disk:   float(score["disk_extension_blocks"]),
			prefill: float(
				has["potential_prefill_tokens"],
			),
			requests: float(has["active_requests"]),
			decode:   float(would["potential_decode_blocks"]),
			allowed:  true,
		}
		w := x.worker(r.id)
		r.taints = w.taints
		if allowed, ok := s.body["allowed_worker_ids"].([]uint64); ok && !slices.Contains(allowed, r.id) {
			r.allowed = false
		}
		if constraints, ok := s.body["routing_constraints"].(object); ok && constraints["required_taints"] != nil &&
			!slices.Contains(r.taints, "b") {
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
		asStarted.track = s.over.track // Dynamo uses this one
		all[i].costAsStarted = all[i].price(s, asStarted, least)
	}
	return all
}

// price is Dynamo's cost function, implemented independently.
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
	if !w.track && w.credit > 0 { // as for decode workers; the selection service treats all as such
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

// cheapest returns the ranks with the lowest cost, except for rounding.
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

func chose(a response) (id uint64, rank int) {
	return integer(a.object()["worker_id"]), int(integer(a.object()["dp_rank"]))
}

func isOneOf(a response, of []*rank) bool {
	id, at := chose(a)
	return slices.ContainsFunc(of, func(r *rank) bool { return r.id == id && r.rank == at })
}

// compare makes both services choose, and checks that each choice is one of the cheapest. It returns the worker that
// both must book, nil if there is none.
func (x *selectors) compare(s *selection) *rank {
	x.t.Helper()
	all := x.ranks(s)
	theirs, ours := x.ask(x.Dynamo, "POST", "/select", s.body), x.ask(x.Kvepp, "POST", "/select", s.body)
	best, bestAsStarted := cheapest(
		all,
		func(r *rank) float64 { return r.cost },
	), cheapest(
		all,
		func(r *rank) float64 { return r.costAsStarted },
	)
	if len(best) == 0 {
		x.equal("/select", s.body, theirs, ours)
		x.counts["selections without a worker"]++
		return nil
	}
	if theirs.status != http.StatusOK || ours.status != http.StatusOK {
		x.t.Fatalf("/select %v: Dynamo %v, kvepp %v", s.body, theirs, ours)
	}
	x.counts["selections"]++
	// Dynamo's selection service ignores a request's weights and temperature (its cost function uses those of the
	// start).
	if !isOneOf(theirs, bestAsStarted) {
		x.t.Fatalf(
			"/select %v: Dynamo chose %v, which is not among the cheapest computed here; its cost function "+
				"is another\nof %+v",
			s.body,
			theirs,
			all,
		)
	}
	if s.over != x.weights && s.over.track == x.weights.track || s.drawn {
		x.counts["of them with weights or a temperature that Dynamo ignores"]++
	}
	if s.drawn {
		if id, at := chose(ours); !slices.ContainsFunc(
			all,
			func(r rank) bool { return r.allowed && r.id == id && r.rank == at },
		) {
			x.t.Fatalf("/select %v: kvepp chose %v, which is excluded", s.body, ours)
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

// book reserves a selection on one worker with both services, in one of several ways.
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
		theirs, ours := x.ask(
			x.Dynamo,
			"POST",
			"/select_and_reserve",
			body,
		), x.ask(
			x.Kvepp,
			"POST",
			"/select_and_reserve",
			body,
		)
		if s.random {
			for _, a := range []response{theirs, ours} {
				hashes, _ := a.object()["sequence_hashes"].([]any)
				a.object()["sequence_hashes"] = len(hashes) // unknown hashes
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
	default: // a complete reservation without a selection
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

// predicted waits until Dynamo's index has the prompt at the worker that got it, if predictions are on. kvepp's has it
// when it answers.
func (x *selectors) predicted(s *selection) {
	x.t.Helper()
	if !x.weights.unheard {
		return
	}
	question := object{}
	for _, key := range []string{"routing_group", "token_ids", "cache_salt", "block_hashes", "sequence_hashes",
		"isl_tokens"} {
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

// play takes random steps in both services.
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
				// Dynamo keeps the name until it is requested again.
				x.counts["names that Dynamo keeps after their worker left"]++
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
				"pinned_worker": object{
					"worker_id": x.workers[0].id,
					"dp_rank":   x.workers[0].start,
				}, "routing_group": x.workers[0].group})
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
