package service

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
)

// allocated returns how many bytes f allocates.
func allocated(f func()) float64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return float64(after.TotalAlloc - before.TotalAlloc)
}

// linear does something for each number up to 8 parts of so many, and compares what the first part allocates with what
// the last does.
func linear(t *testing.T, part int, what string, do func(i int)) {
	t.Helper()
	var first, last float64
	for p := range 8 {
		bytes := allocated(func() {
			for i := range part {
				do(p*part + i)
			}
		})
		if last = bytes; p == 0 {
			first = bytes
		}
	}
	t.Logf("%s: %.0f bytes each at first, %.0f at last", what, first/float64(part), last/float64(part))
	if last > 3*first {
		t.Errorf("%s: %d take %.0f bytes at first, and %.0f with %d before them", what, part, first, last, 7*part)
	}
}

// TestRegistrationIsLinear: a worker costs the same whether there are few or many.
func TestRegistrationIsLinear(t *testing.T) {
	const part = 100
	index, err := indexer.New(indexer.Config{})
	if err != nil {
		t.Fatal(err)
	}
	p := pool.New(quiet)
	// which does not watch the pool: nobody is subscribed to
	f, err := feed.New(feed.Config{}, p, index, metrics.New(), quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r := NewRegistry(p, index, f, quiet)
	size, address := 16, "tcp://127.0.0.1:9"
	of := func(i int) Registration {
		id, model := uint64(i), fmt.Sprint("m", i%10)
		return Registration{InstanceID: &id, Endpoint: &address, Model: &model, BlockSize: &size}
	}
	linear(t, part, "register", func(i int) {
		if err := r.Register(of(i)); err != nil {
			t.Fatal(err)
		}
	})
	if models, workers := r.Counts(); models != 10 || workers != 8*part {
		t.Errorf("%d models, %d workers", models, workers)
	}
	for i := range 8 * part {
		if err := r.unregister(of(i)); err != nil {
			t.Fatal(err)
		}
	}
	s := p.Acquire()
	defer s.Release()
	if models, workers := r.Counts(); models+workers+len(s.Workers)+len(r.workers)+r.bytes != 0 {
		t.Errorf(
			"%d models, %d workers, %d in the pool and %d bytes are left",
			models,
			workers,
			len(s.Workers),
			r.bytes,
		)
	}
}

// TestSelectRegistrationIsLinear is the same for the selection service.
func TestSelectRegistrationIsLinear(t *testing.T) {
	c := newCounter(t, nil)
	linear(t, 500, "POST /workers", func(i int) {
		body := fmt.Sprintf(
			`{"worker_id": %d, "model_name": "m", "endpoint": "http://10.0.0.1:80", "block_size": 16}`,
			i,
		)
		req := httptest.NewRequest("POST", "/workers", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		if c.handler.ServeHTTP(w, req); w.Code != http.StatusCreated ||
			!strings.Contains(w.Body.String(), `"schedulable"`) {
			t.Fatal(w.Code, w.Body)
		}
	})
}
