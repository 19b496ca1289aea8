package selector

import (
	"fmt"
	"net/http"
	"testing"

	"kvepp/kvblock"
)

// BenchmarkSelect chooses among 1,000 workers for a prompt of 4,000 tokens, from the request's body to the answer's
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
