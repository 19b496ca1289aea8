package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"kvepp/router/queue"
	"kvepp/test/harness/stack"
)

// randomProfile writes the policy classes of one model, indented for "models".
func randomProfile(rng *rand.Rand) string {
	var b strings.Builder
	buckets := 1 + rng.IntN(2)
	b.WriteString("    default_policy_family: f0\n    uncached_isl_buckets:\n")
	for i := range buckets {
		fmt.Fprintf(&b, "    - {min_tokens: %d, bucket: b%d}\n", 60*i, i)
	}
	b.WriteString("    policy_classes:\n")
	class := func(name, place string) {
		fmt.Fprintf(&b, "    - {name: %s%s, quantum: %d", name, place, 1+rng.IntN(300))
		if rng.IntN(3) > 0 {
			b.WriteString(", queue_policy: wspt")
		}
		switch rng.IntN(8) {
		case 0: // never waits
		case 1:
			b.WriteString(", prefill_busy_threshold: 100")
		case 2:
			b.WriteString(", prefill_busy_threshold_frac: 0.08")
		default:
			b.WriteString(", prefill_busy_threshold: 0")
		}
		for _, limit := range []string{"request", "raw_isl_token"} {
			if rng.IntN(5) == 0 {
				n := rng.IntN(4)
				if limit != "request" {
					n *= 80
				}
				fmt.Fprintf(&b, ", %s_queue_limit_per_worker: %d", limit, n)
			}
		}
		b.WriteString("}\n")
	}
	for f := range 1 + rng.IntN(2) {
		for i := range buckets {
			class(fmt.Sprintf("c%d%d", f, i), fmt.Sprintf(", policy_family: f%d, cache_bucket: b%d", f, i))
		}
	}
	if rng.IntN(2) == 0 {
		class("own", "")
	}
	return b.String()
}

// replied is the result of one request.
type replied struct {
	id     string
	status int
	body   []byte
}

// TestQueueAsDynamo plays random histories of arrivals and ends into Dynamo's selection service, which runs the queue
// of its router, and into queue with the same policy file. Both admit the same requests at the same time and in the
// same order, and refuse the same ones for the same reason. Each model has one worker and its own profile.
func TestQueueAsDynamo(t *testing.T) {
	const models, steps = 24, 60
	rng := rand.New(rand.NewPCG(6, 4))
	text := "models:\n"
	for m := range models {
		text += fmt.Sprintf("  m%d:\n%s", m, randomProfile(rng))
	}
	file := filepath.Join(t.TempDir(), "policy.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	policies, err := queue.ParseFile([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	services, err := stack.StartSelectors(t.Context(), stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS")},
		[]string{"DYN_ROUTER_POLICY_CONFIG=" + file, "DYN_ROUTER_USE_KV_EVENTS=false"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(services.Close)
	counts := map[string]int{}
	for m := range models {
		name := fmt.Sprintf("m%d", m)
		profile, _ := policies.Profiles(nil).Of(name)
		playQueue(t, services.Dynamo, name, profile, steps, rng, counts)
	}
	t.Logf("%d models: %v", models, counts)
	for _, kind := range []string{"at once", "waited", "refused"} {
		if counts[kind] < 50 {
			t.Errorf("%d requests %s: too few for a conclusion", counts[kind], kind)
		}
	}
}

func playQueue(
	t *testing.T,
	url, model string,
	profile *queue.Profile,
	steps int,
	rng *rand.Rand,
	counts map[string]int,
) {
	t.Helper()
	const most = 1000 // tokens in one step of the engine
	post := func(path, class string, body any) (int, []byte) {
		text, err := json.Marshal(body)
		if err != nil {
			t.Error(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), "POST", url+path, bytes.NewReader(text))
		if err != nil {
			t.Error(err)
			return 0, nil
		}
		req.Header.Set("Content-Type", "application/json")
		if class != "" {
			req.Header.Set("x-dynamo-meta-policy-class", class)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, []byte(err.Error())
		}
		defer resp.Body.Close()
		var response bytes.Buffer
		_, _ = response.ReadFrom(resp.Body)
		return resp.StatusCode, response.Bytes()
	}
	if status, body := post("/workers", "", map[string]any{"worker_id": 1, "model_name": model,
		"endpoint": "http://w:1", "block_size": 16,
		"data_parallel_start_rank": 0, "data_parallel_size": 1, "max_num_batched_tokens": most,
		"total_kv_blocks": 100000}); status != http.StatusCreated &&
		status != http.StatusOK {
		t.Fatalf("worker: %d %s", status, body)
	}
	names := []string{"", "f0", "f1", "own", "unknown"}
	q := queue.New[string](profile, 1<<16)
	load := 0
	running := map[string]int{} // tokens
	var order []string
	replies := make(chan replied, steps)
	expected := map[string]error{} // requests that must be answered now; nil: admitted
	goes := func(id string, tokens int) {
		expected[id] = nil
		running[id] = tokens
		order = append(order, id)
		load += tokens
	}
	// letThrough pops requests that the queue admits, by the loads that Dynamo has too.
	letThrough := func() {
		for {
			item := q.Pop(func(c *queue.Class, i *queue.Item[string]) bool { return !c.Busy(load, most) })
			if item == nil {
				return
			}
			goes(item.Value, item.Tokens)
		}
	}
	settle := func(arrived string) {
		t.Helper()
		for len(expected) > 0 {
			var got replied
			select {
			case got = <-replies:
			case <-t.Context().Done():
				t.Fatal("no response")
			}
			want, known := expected[got.id]
			delete(expected, got.id)
			var refused struct {
				Details struct {
					Class   string `json:"policy_class"`
					Kind    string `json:"limit_kind"`
					Current int    `json:"current"`
					Limit   int    `json:"limit"`
				}
			}
			var limit *queue.LimitError
			errors.As(want, &limit)
			switch {
			case !known:
				t.Fatalf("%s: %s was answered (%d %s), want one of %v", model, got.id, got.status, got.body, expected)
			case limit == nil && got.status != http.StatusOK:
				t.Fatalf("%s: %s: %d %s, want it admitted", model, got.id, got.status, got.body)
			case limit != nil && (got.status != http.StatusTooManyRequests ||
				json.Unmarshal(got.body, &refused) != nil ||
				!reflect.DeepEqual(*limit, queue.LimitError{Class: refused.Details.Class, Kind: refused.Details.Kind,
					Current: refused.Details.Current, Limit: refused.Details.Limit})):
				t.Fatalf("%s: %s: %d %s, want %v", model, got.id, got.status, got.body, limit)
			case limit != nil:
				counts["refused"]++
			case got.id == arrived:
				counts["at once"]++
			default:
				counts["waited"]++
			}
		}
		eventually(t, func() error {
			resp, err := http.Get(url + "/loads?model_name=" + model)
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			var loads []struct {
				Pending int `json:"pending_count"`
				Tokens  int `json:"pending_isl_tokens"`
			}
			if err := json.NewDecoder(resp.Body).Decode(&loads); err != nil || len(loads) != 1 {
				return fmt.Errorf("loads: %v %v", loads, err)
			}
			if loads[0].Pending != q.Len() {
				return fmt.Errorf("%d wait at Dynamo, %d here", loads[0].Pending, q.Len())
			}
			return nil
		})
		if len(replies) > 0 {
			got := <-replies
			t.Fatalf("%s: %s was answered (%d %s), but still waits here", model, got.id, got.status, got.body)
		}
	}
	for step := 0; step < steps || len(running) > 0; step++ {
		// In half of the time more requests arrive than end, so that the queue is long.
		if coming := 2 + 6*(step/20%2); step < steps && (len(running) == 0 || rng.IntN(10) < coming) {
			id, n := fmt.Sprintf("%s-%d", model, step), 1+rng.IntN(20+110*rng.IntN(2))
			jump, strict, class := 1000*rng.IntN(3), rng.IntN(4)/3, names[rng.IntN(len(names))]
			ids := make([]int, n)
			for i := range ids {
				ids[i] = 1000*step + i
			}
			// Priority jumps differ so much that the time between two arrivals does not matter.
			entry := queue.Request{
				Class:          profile.Class(class, n),
				Lane:           queue.Any,
				Tokens:         n,
				Arrival:        float64(step) / 1000,
				Jump:           float64(jump),
				StrictPriority: uint32(strict),
			}
			if c := &profile.Classes[entry.Class]; c.Rejects() && !c.Busy(load, most) {
				goes(id, n) // without waiting
			} else if _, err := q.Push(entry, 1, id); err != nil {
				expected[id] = err
			}
			go func() {
				status, body := post(
					"/select_and_reserve",
					class,
					map[string]any{"selection_id": id, "model_name": model, "token_ids": ids,
						"priority_jump": jump, "strict_priority": strict},
				)
				replies <- replied{id, status, body}
			}()
			letThrough()
			settle(id)
			continue
		}
		// The prefill of a running request ends.
		i := rng.IntN(len(order))
		id := order[i]
		order = slices.Delete(order, i, i+1)
		load -= running[id]
		delete(running, id)
		if status, body := post("/reservations/"+id+"/prefill_complete", "", nil); status != http.StatusOK {
			t.Fatalf("%s: %d %s", id, status, body)
		}
		letThrough()
		settle("")
	}
	if q.Len() != 0 {
		t.Fatalf("%s: %d are left", model, q.Len())
	}
}
