package pool

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"

	"kvepp/kvblock"
)

// workerList is a watcher that keeps the workers in the pool.
type workerList struct {
	t    *testing.T
	here map[kvblock.Worker]string
}

func (r *workerList) WorkerJoined(w Worker) {
	if was, twice := r.here[w.Worker]; twice {
		r.t.Errorf("%s joined with the number of %s", w.String(), was)
	}
	r.here[w.Worker] = w.String()
}

func (r *workerList) WorkerLeft(w kvblock.Worker) { delete(r.here, w) }

// TestChange applies random changes and compares the pool with a list of the expected endpoints, with concurrent
// readers.
func TestChange(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	p := New(quiet)
	watched := &workerList{t, map[kvblock.Worker]string{}}
	p.Watch(watched)
	list := func(s *Snapshot) string {
		text := fmt.Sprint(len(s.Workers))
		for i := range s.Workers {
			text += s.Workers[i].String()
		}
		return text
	}
	stop := readConcurrently(p, 2, func(s *Snapshot) {
		if before, after := list(s), list(s); before != after {
			t.Error("a snapshot changed")
		}
	})
	want := map[string]Endpoint{}
	numbers := map[string]kvblock.Worker{}
	for range 2000 {
		var remove []string
		var add []Endpoint
		for name := range want {
			if random.IntN(20) == 0 {
				remove = append(remove, name)
				if random.IntN(2) == 0 { // add it again, maybe as another instance
					e := want[name]
					if random.IntN(2) == 0 {
						e.InstanceID++
						delete(numbers, name)
					}
					e.Model = fmt.Sprint("m", random.IntN(10))
					add = append(add, e)
					continue
				}
				delete(numbers, name)
			}
		}
		for range random.IntN(4) {
			if name := fmt.Sprint("e", random.IntN(100)); want[name].Name == "" &&
				!slices.ContainsFunc(add, func(e Endpoint) bool { return e.Name == name }) {
				add = append(add, Endpoint{Name: name, Role: Aggregated, DataParallelSize: uint32(1 + random.IntN(2))})
			}
		}
		p.Change(append(remove, "no-such-name"), add)
		if random.IntN(2) == 0 { // a change without removals
			if e := (Endpoint{Name: fmt.Sprint("f", len(numbers), random.Uint32()), Role: Aggregated,
				DataParallelSize: 1}); want[e.Name].Name == "" {
				p.Change(nil, []Endpoint{e})
				add = append(add, e)
			}
		}
		for _, name := range remove {
			delete(want, name)
		}
		for _, e := range add {
			want[e.Name] = e
		}
		s := p.Acquire()
		ranks := 0
		for name, e := range want {
			i := slices.IndexFunc(s.Workers, func(w Worker) bool { return w.Name == name })
			if i < 0 || s.Workers[i].Model != e.Model || s.Workers[i].InstanceID != e.InstanceID {
				t.Fatalf("%s is missing, or has the wrong model or instance id", name)
			}
			for r := range int(e.DataParallelSize) {
				if s.Workers[i+r].Name != name || s.Workers[i+r].Rank != uint32(r) {
					t.Fatalf("%s: rank %d does not follow the other ranks", name, r)
				}
			}
			if was, ok := numbers[name]; ok && was != s.Workers[i].Worker {
				t.Fatalf("%s has another number", name)
			}
			numbers[name] = s.Workers[i].Worker
			ranks += int(e.DataParallelSize)
		}
		if len(s.Workers) != ranks || len(watched.here) != ranks {
			t.Fatalf("%d workers in the pool, %d known to the watcher; want %d", len(s.Workers), len(watched.here),
				ranks)
		}
		s.Release()
	}
	stop()
}

// BenchmarkChange replaces one endpoint in pools of several sizes.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{1000, 8000} {
		p := New(slog.New(slog.DiscardHandler))
		for i := range n {
			p.Change(nil, []Endpoint{{Name: fmt.Sprint("e", i)}})
		}
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				p.Change([]string{"x"}, []Endpoint{{Name: "x"}})
			}
		})
	}
}
