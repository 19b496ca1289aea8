package selector

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"kvepp/kvblock"
	"kvepp/router/queue"
)

// BenchmarkSelect chooses among 1,000 workers for a prompt of 4,000 tokens, from the request's body to the response's
// fields and without HTTP.
func BenchmarkSelect(b *testing.B) {
	c := newCounter(b, nil)
	for id := range 1000 {
		c.want(
			"POST /workers",
			fmt.Sprintf(`{"worker_id": %d, "endpoint": "e", "block_size": 16}`, id),
			http.StatusCreated,
			"schedulable",
		)
	}
	q := &selectRequest{promptFields: promptFields{Tokens: make([]kvblock.Token, 4000)}}
	d := new(scratch)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.selector.inTurn(b.Context(), d, q, "", ""); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkTurn measures a reservation from its arrival at the waiting room to its end. With one worker, reservations
// of 16 goroutines wait for each other; with 64 workers, each gets its turn at once.
func BenchmarkTurn(b *testing.B) {
	for _, n := range []int{1, 64} {
		b.Run(fmt.Sprintf("%d-workers", n), func(b *testing.B) {
			none := 0.0
			c := newCounter(b, func(cfg *Config) {
				cfg.Queue = &queue.RoomConfig{
					Profiles: (*queue.File)(nil).Profiles(queue.Single(queue.FCFS, &none)),
					Bound:    1000,
				}
			})
			for i := range n {
				c.want("POST /workers", fmt.Sprintf(
					`{"worker_id": %d, "endpoint": "e", "block_size": 4, "max_num_batched_tokens": 3}`, i),
					http.StatusCreated, "schedulable")
			}
			var last atomic.Int64
			b.ReportAllocs()
			b.SetParallelism(8)
			b.RunParallel(func(p *testing.PB) {
				for p.Next() {
					id := fmt.Sprint("s", last.Add(1))
					for _, req := range []*http.Request{
						httptest.NewRequest("POST", "/select_and_reserve",
							strings.NewReader(`{"selection_id": "`+id+`", "token_ids": [1,2,3,4]}`)),
						httptest.NewRequest("DELETE", "/reservations/"+id, nil),
					} {
						req.Header.Set("Content-Type", "application/json")
						w := httptest.NewRecorder()
						if c.handler.ServeHTTP(w, req); w.Code != http.StatusOK {
							b.Errorf("%s: %d %s", req.URL, w.Code, w.Body)
						}
					}
				}
			})
		})
	}
}
