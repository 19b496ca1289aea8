package selector

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/router/queue"
	"kvepp/router/session"
)

// later sends a request from a goroutine of its own; ctx is the client's connection. It returns the channel of the
// response.
func (c *counter) later(ctx context.Context, path, class, body string) <-chan string {
	responded := make(chan string, 1)
	go func() {
		req := httptest.NewRequestWithContext(ctx, "POST", path, strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("x-dynamo-meta-policy-class", class)
		w := httptest.NewRecorder()
		c.handler.ServeHTTP(w, req)
		responded <- http.StatusText(w.Code) + " " + w.Body.String()
	}()
	synctest.Wait()
	return responded
}

// fresh returns a prompt of four tokens that no worker has cached.
func fresh() string {
	return fmt.Sprintf(`"token_ids": [%d,2,3,4]`, seen.Add(1))
}

var seen atomic.Uint32

func wantResponse(t *testing.T, responded <-chan string, part string) {
	t.Helper()
	synctest.Wait()
	select {
	case text := <-responded:
		if part == "" || !strings.Contains(text, part) {
			t.Errorf("answered %s, want %q", text, part)
		}
	default:
		if part != "" {
			t.Errorf("not answered, want %q", part)
		}
	}
}

// TestSelectionsWait: selections wait in order for a busy worker. They end when their client or their worker leaves, or
// after the timeout.
func TestSelectionsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one := 1.0
		c := newCounter(t, func(cfg *Config) {
			cfg.Queue = &queue.RoomConfig{
				Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, &one)),
				Bound:    3,
				Timeout:  30 * time.Second,
			}
		})
		ctx := t.Context()
		c.want(
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4}`,
			http.StatusCreated,
			`["max_num_batched_tokens is required while queueing is enabled"]`,
		)
		c.want(
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "max_num_batched_tokens": 3}`,
			http.StatusCreated,
			"schedulable",
		)
		c.want("POST /select_and_reserve", `{"selection_id": "a", `+fresh()+`}`, http.StatusOK, `"worker_id":1`)
		second := c.later(ctx, "/select_and_reserve", "", `{"selection_id": "b", `+fresh()+`}`)
		third := c.later(ctx, "/select_and_reserve", "", `{"selection_id": "c", "strict_priority": 1, `+fresh()+`}`)
		gone, goes := context.WithCancel(ctx)
		fourth := c.later(gone, "/select_and_reserve", "", `{"selection_id": "d", `+fresh()+`}`)
		c.want("GET /loads", "", http.StatusOK, `"pending_count":3,"pending_isl_tokens":12}`)
		c.want("POST /select", `{`+fresh()+`}`, http.StatusTooManyRequests, "the queue is full")
		c.want("POST /select", `{"advisory": true, `+fresh()+`}`, http.StatusOK, `"active_prefill_tokens":4`)
		c.want(
			"POST /select",
			`{"pinned_worker": {"worker_id": 9, "dp_rank": 0}, `+fresh()+`}`,
			http.StatusServiceUnavailable,
			"no endpoints",
		)
		c.want(
			"POST /select_and_reserve",
			`{"selection_id": "b", `+fresh()+`}`,
			http.StatusConflict,
			"selection b is already reserved or being reserved",
		)
		c.want(
			"POST /reservations",
			`{"selection_id": "b", "worker_id": 1, `+fresh()+`}`,
			http.StatusConflict,
			"selection b is already reserved or being reserved",
		)
		if stats := c.selector.Stats(); stats.Waiting != 3 || stats.Reservations != 1 {
			t.Errorf("%+v", stats)
		}
		goes()
		wantResponse(t, fourth, "the client has gone")
		c.want("GET /loads", "", http.StatusOK, `"pending_count":2,`)

		c.want("POST /reservations/a/prefill_complete", "", http.StatusOK, "ok")
		wantResponse(t, third, `OK {"selection_id":"c",`)
		wantResponse(t, second, "")
		c.want("DELETE /reservations/c", "", http.StatusOK, "ok")
		wantResponse(t, second, `OK {"selection_id":"b",`)

		late := c.later(ctx, "/select", "", `{`+fresh()+`}`)
		<-time.After(30 * time.Second)
		wantResponse(t, late, "Too Many Requests")

		left := c.later(ctx, "/select_and_reserve", "", `{"selection_id": "e", `+fresh()+`}`)
		c.want("DELETE /workers/1", "", http.StatusOK, "unschedulable")
		wantResponse(t, left, "no endpoints available to route work")
		if stats := c.selector.Stats(); stats != (Stats{}) || c.selector.pending.len() != 0 {
			t.Errorf("%+v", stats)
		}

		// A reservation that its client does not end expires, and a waiting selection gets its turn.
		c.want(
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "max_num_batched_tokens": 3}`,
			http.StatusCreated,
			"schedulable",
		)
		c.want("POST /select_and_reserve", `{"selection_id": "f", `+fresh()+`}`, http.StatusOK, `"worker_id":1`)
		<-time.After(5*time.Minute - 10*time.Second)
		after := c.later(ctx, "/select", "", `{`+fresh()+`}`)
		<-time.After(11 * time.Second)
		wantResponse(t, after, `OK {"model_name":`)
	})
}

// TestSelectionsThatMayNotWait: the refusal names the limit.
func TestSelectionsThatMayNotWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := queue.ParseFile([]byte(`
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
- {name: few, policy_family: all, cache_bucket: any, quantum: 1, prefill_busy_threshold: 3, ` +
			`request_queue_limit_per_worker: 1}
- {name: none, quantum: 1, prefill_busy_threshold: 3, raw_isl_token_queue_limit_per_worker: 0}
`))
		if err != nil {
			t.Fatal(err)
		}
		c := newCounter(
			t,
			func(cfg *Config) { cfg.Queue = &queue.RoomConfig{Profiles: f.Profiles(nil), Bound: 10} },
		)
		c.want(
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "max_num_batched_tokens": 3}`,
			http.StatusCreated,
			"schedulable",
		)
		wantResponse(
			t,
			c.later(t.Context(), "/select_and_reserve", "none", `{"selection_id": "a", `+fresh()+`}`),
			`OK {"selection_id":"a"`,
		)
		waits := c.later(t.Context(), "/select", "few", `{`+fresh()+`}`)
		wantResponse(
			t,
			c.later(t.Context(), "/select", "", `{`+fresh()+`}`),
			`Too Many Requests {"details":{"current":1,"limit":1,"limit_kind":"requests","policy_class":"few"},`+
				`"error":"router policy class \"few\" queue requests limit reached (current=1, limit=1)"}`,
		)
		wantResponse(
			t,
			c.later(t.Context(), "/select", "none", `{`+fresh()+`}`),
			`"limit_kind":"raw_isl_tokens","policy_class":"none"`,
		)
		c.want("DELETE /reservations/a", "", http.StatusOK, "ok")
		wantResponse(t, waits, `OK {"model_name":`)
	})
}

// A panic in one decision ends that selection alone: the turn passes to the next one.
func TestPanicOfAChoice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		most := 0.0
		c := newCounter(t, func(cfg *Config) {
			cfg.Queue = &queue.RoomConfig{
				Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, &most)),
				Bound:    10,
				Timeout:  time.Minute,
			}
			looks := 0
			cfg.Sessions = session.NewTable(session.Config{TTL: time.Minute, Clock: func() time.Time {
				if looks++; looks == 2 { // the first is to find the session, the second to hold it
					panic("a defect")
				}
				return time.Now()
			}})
		})
		c.want(
			"POST /workers",
			`{"worker_id": 1, "endpoint": "e", "block_size": 4, "max_num_batched_tokens": 3}`,
			http.StatusCreated,
			"schedulable",
		)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			c.want("POST /select_and_reserve", `{"selection_id": "a", "session_id": "s", `+fresh()+`}`, 0, "")
		}()
		c.want("DELETE /reservations/a", "", http.StatusOK, "ok")
		c.want("POST /select_and_reserve", `{"selection_id": "b", `+fresh()+`}`, http.StatusOK, `"worker_id":1`)
	})
}
