package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// weights are the parameters of the cost function with which both selection services start.
type weights struct {
	credit, decay, scale, request float64
	host, disk                    float64
	track                         bool // prompt tokens count until they are prefilled
	unheard                       bool // no events: the index assumes the prompts that workers got

	more string // further environment variables, separated by blanks
}

func (w weights) env() []string {
	number := func(v float64) string { return strconv.FormatFloat(v, 'g', -1, 64) }
	return append(
		strings.Fields(w.more),
		"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT="+number(w.credit),
		"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY="+number(w.decay),
		"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT="+number(w.host),
		"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT="+number(w.disk),
		"DYN_ROUTER_PREFILL_LOAD_SCALE="+number(w.scale),
		"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT="+number(w.request),
		"DYN_ROUTER_TRACK_PREFILL_TOKENS="+strconv.FormatBool(
			w.track,
		),
		"DYN_ROUTER_USE_KV_EVENTS="+strconv.FormatBool(!w.unheard),
	)
}

// selectors are both selection services and the state that both must have.
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
	class      string // policy class of the requests
	counts     map[string]int
}

// reserved is a reservation in both services.
type reserved struct {
	name   string
	worker uint64
}

// path returns its URL path.
func (r reserved) path() string { return "/reservations/" + strings.ReplaceAll(r.name, "/", "%2F") }

// selectable is a worker of both services.
type selectable struct {
	id         uint64
	group      string
	start      int
	ranks      int
	publishers []*publisher // by rank; none without events
	taints     []string
}

func startSelectors(t *testing.T, w weights, args ...string) *selectors {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	services, err := stack.StartSelectors(
		t.Context(),
		stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS")},
		w.env(),
		args...)
	if err != nil {
		t.Fatal(err)
	}
	x := &selectors{Services: services, t: t, weights: w, counts: map[string]int{}}
	t.Cleanup(func() {
		services.Close()
		for _, p := range x.publishers {
			p.socket.Close() // after its subscribers; otherwise libzmq may abort (zeromq/libzmq#3442)
		}
	})
	return x
}

// object is a body or a response. Numbers in responses are json.Number, because ids have 64 bits.
type object = map[string]any

// response is one service's response.
type response struct {
	status int
	body   any
}

func (a response) object() object { o, _ := a.body.(object); return o }

// ask sends a request to one service.
func (x *selectors) ask(url, method, path string, body any) response {
	x.t.Helper()
	a, err := send(x.t.Context(), url, method, path, x.class, body)
	if err != nil {
		x.t.Fatal(err)
	}
	return a
}

// send sends a request of a policy class, "" for none. A string body is sent unchanged.
func send(ctx context.Context, url, method, path, class string, body any) (a response, err error) {
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
	responded, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	a.status = resp.StatusCode
	dec := json.NewDecoder(bytes.NewReader(responded))
	dec.UseNumber()
	if dec.Decode(&a.body) != nil {
		a.body = strings.TrimSpace(string(responded))
	}
	sortLists(a.body)
	return a, nil
}

// sortLists sorts lists: Dynamo's of workers, loads and taints have no order.
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

// integer returns a number of a response as an int; 0 if it is not a number.
func integer(v any) uint64 {
	n, _ := v.(json.Number)
	u, _ := strconv.ParseUint(string(n), 10, 64)
	return u
}

func float(v any) float64 { return float64(integer(v)) }

// same checks that both services give the same response, and returns it.
func (x *selectors) same(method, path string, body any) response {
	x.t.Helper()
	theirs, ours := x.ask(x.Dynamo, method, path, body), x.ask(x.Kvepp, method, path, body)
	x.equal(method+" "+path, body, theirs, ours)
	return ours
}

// equal checks that two responses are the same, except for the wording about malformed bodies.
func (x *selectors) equal(what string, body any, theirs, ours response) {
	x.t.Helper()
	if theirs.status != ours.status {
		x.t.Fatalf("%s %v: Dynamo %d %v, kvepp %d %v", what, body, theirs.status, theirs.body, ours.status, ours.body)
	}
	switch theirs.status {
	case http.StatusUnsupportedMediaType, http.StatusUnprocessableEntity, http.StatusRequestEntityTooLarge:
		return
	}
	if theirs.status == http.StatusBadRequest &&
		strings.HasPrefix(fmt.Sprint(theirs.object()["error"]), "Failed to parse") {
		return
	}
	if !reflect.DeepEqual(theirs.body, ours.body) {
		x.t.Fatalf("%s %v: %d\nDynamo %v\nkvepp  %v", what, body, theirs.status, theirs.body, ours.body)
	}
	x.counts["answers alike"]++
}

// register registers a worker with both services, and waits until both are subscribed to its events. Both then have no
// blocks of it, and the engine restarts.
func (x *selectors) register(w *selectable) {
	x.t.Helper()
	endpoints := map[string]string{}
	for i, p := range w.publishers {
		endpoints[strconv.Itoa(w.start+i)] = p.address
	}
	a := x.same(
		"POST",
		"/workers",
		object{
			"worker_id":                w.id,
			"routing_group":            w.group,
			"endpoint":                 fmt.Sprintf("http://w%d:8000", w.id),
			"block_size":               indexerBlock,
			"data_parallel_start_rank": w.start,
			"data_parallel_size":       w.ranks,
			"kv_events_endpoints":      endpoints,
			"taints":                   w.taints,
			"total_kv_blocks":          1000,
			"max_num_batched_tokens":   20,
		},
	)
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

// booked waits until Dynamo's load book has a worker, or has it no longer: its responses about workers come earlier.
func (x *selectors) booked(w *selectable, want bool) {
	x.t.Helper()
	eventually(x.t, func() error {
		groups := x.ask(x.Dynamo, "GET", "/loads?routing_group="+w.group, nil).body.([]any)
		known := len(groups) > 0 &&
			slices.ContainsFunc(
				groups[0].(object)["loads"].([]any),
				func(load any) bool { return integer(load.(object)["worker_id"]) == w.id },
			)
		if known != want {
			return fmt.Errorf("Dynamo's load book has worker %d: %v", w.id, known)
		}
		return nil
	})
}

// remove removes a worker from both services.
func (x *selectors) remove(w *selectable) {
	x.t.Helper()
	x.same("DELETE", fmt.Sprintf("/workers/%d", w.id), nil)
	x.booked(w, false)
}

// add registers a new worker.
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

// settle waits until both services have applied all published events: it stores a new marker block at every publisher.
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

// prompt returns a prompt of few different tokens, so that prompts share prefixes.
func (x *selectors) prompt() []int {
	tokens := make([]int, x.rng.IntN(12)*indexerBlock+x.rng.IntN(indexerBlock))
	for i := range tokens {
		tokens[i] = x.rng.IntN(2) * (i / indexerBlock % 3)
	}
	return tokens
}

// churn publishes random events, as engines do.
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
