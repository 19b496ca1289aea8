package api

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// promptBody has lists of numbers and of texts, as bodies of the APIs have.
type promptBody struct {
	Tokens      []uint32 `json:"token_ids"`
	Constraints struct {
		Required []string `json:"required_taints"`
	} `json:"routing_constraints"`
}

// TestBodiesAreBoundedByWhatTheyCost: the memory for decoding is bounded, for any content and any number of concurrent
// bodies.
func TestBodiesAreBoundedByWhatTheyCost(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(10)) // so that the heap has little garbage, on a busy machine too
	fill := func(head, each, tail string) []byte {
		return []byte(head + strings.Repeat(each+",", (MaxBody-1000)/(len(each)+1)) + each + tail)
	}
	names := bytes.NewBufferString("{")
	for i := 0; names.Len() < MaxBody/2; i++ {
		names.WriteString(strconv.Quote(strconv.Itoa(i)) + ":0,")
	}
	names.WriteString(`"x":0}`)
	for what, c := range map[string]struct {
		body  []byte
		times int
		most  int64 // MiB
	}{
		"token ids": {fill(`{"token_ids":[`, "1", `]}`), 1, 100},
		"taints": {fill(`{"routing_constraints":{"required_taints":[`, `""`, `]}}`), 3 * cap(decodeSlots),
			100 + 130*int64(cap(decodeSlots))},
		"unread names": {names.Bytes(), 1, 32},
	} {
		if testing.Short() && c.times > 1 {
			continue // seconds of decoding
		}
		var peak atomic.Uint64
		stop, stopped := make(chan struct{}), make(chan struct{})
		runtime.GC()
		var before runtime.MemStats
		runtime.ReadMemStats(&before)
		go func() {
			defer close(stopped)
			var now runtime.MemStats
			for tick := time.NewTicker(5 * time.Millisecond); ; {
				select {
				case <-stop:
					tick.Stop()
					return
				case <-tick.C:
					runtime.ReadMemStats(&now)
					peak.Store(max(peak.Load(), now.HeapInuse))
				}
			}
		}()
		var wait sync.WaitGroup
		for range c.times {
			wait.Go(func() {
				req := httptest.NewRequest("POST", "/", bytes.NewReader(c.body))
				req.Header.Set("Content-Type", "application/json")
				var q promptBody
				_ = ReadBody(httptest.NewRecorder(), req, &q)
			})
		}
		wait.Wait()
		close(stop)
		<-stopped
		more := int64(peak.Load()) - int64(before.HeapInuse)
		t.Logf("%s: %d MiB", what, more>>20)
		if more > c.most<<20 {
			t.Errorf("%s: %d bodies of %d MiB take %d MiB", what, c.times, MaxBody>>20, more>>20)
		}
	}
	if heldBodyBytes.Load() != 0 || len(decodeSlots) != 0 {
		t.Errorf("%d bytes are held, %d are decoded", heldBodyBytes.Load(), len(decodeSlots))
	}
}

// TestManyBodiesAtOnce: beyond the bound, bodies that do not end are refused. Small bodies are still read.
func TestManyBodiesAtOnce(t *testing.T) {
	send := func(body io.Reader) (code int) {
		req := httptest.NewRequest("POST", "/", body)
		req.Header.Set("Content-Type", "application/json")
		var q promptBody
		w := httptest.NewRecorder()
		Reply(w, http.StatusOK, "", ReadBody(w, req, &q))
		return w.Code
	}
	var refused atomic.Int32
	var wait sync.WaitGroup
	var writers []*io.PipeWriter
	for range 20 {
		reader, writer := io.Pipe()
		writers = append(writers, writer)
		wait.Go(func() {
			if code := send(reader); code == http.StatusServiceUnavailable {
				refused.Add(1)
			}
			reader.Close()
		})
		// 8 MiB of memory, and 4 while it grew; it fails for those that are refused
		writer.Write(bytes.Repeat([]byte(" "), 5<<20))
	}
	if n := refused.Load(); n == 0 {
		t.Error("all are read at once")
	}
	if code := send(strings.NewReader(`{"token_ids":[1]}`)); code != http.StatusOK {
		t.Errorf("a small body meanwhile: %d", code)
	}
	for _, writer := range writers {
		writer.Close()
	}
	wait.Wait()
	if n := heldBodyBytes.Load(); n != 0 {
		t.Errorf("%d bytes are held", n)
	}
	if code := send(io.MultiReader(strings.NewReader(`{"token_ids":[1]`), strings.NewReader(strings.Repeat(" ", 1<<20)),
		strings.NewReader("}"))); code != http.StatusOK {
		t.Errorf("a large body afterwards: %d", code)
	}
}
