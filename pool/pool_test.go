package pool

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"kvepp/kvblock"
)

var quiet = slog.New(slog.DiscardHandler)

// numberChecker is a watcher that checks that no two workers in the pool have the same number.
type numberChecker struct {
	t       *testing.T
	present map[kvblock.Worker]string
	joins   int
	leaves  int
}

func (d *numberChecker) WorkerJoined(w Worker) {
	if other, taken := d.present[w.Worker]; taken {
		d.t.Errorf("%v joined as number %d, which %s still has", w.String(), w.Worker, other)
	}
	d.present[w.Worker] = w.String()
	d.joins++
}

func (d *numberChecker) WorkerLeft(w kvblock.Worker) {
	delete(d.present, w)
	d.leaves++
}

// readConcurrently starts goroutines that acquire snapshots of p and call read with them, until the returned function
// is called, which waits for them.
func readConcurrently(p *Pool, readers int, read func(*Snapshot)) (stop func()) {
	done := make(chan struct{})
	var wait sync.WaitGroup
	for range readers {
		wait.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				s := p.Acquire()
				read(s)
				s.Release()
			}
		})
	}
	return func() {
		close(done)
		wait.Wait()
	}
}

func endpoint(name string, id uint64) Endpoint {
	return Endpoint{Name: name, Address: "10.0.0.1:8000", InstanceID: id, KVEvents: "tcp://10.0.0.1:5557"}
}

func workers(p *Pool) map[string]Worker {
	s := p.Acquire()
	defer s.Release()
	found := map[string]Worker{}
	for _, w := range s.Workers {
		found[w.String()] = w
	}
	return found
}

func TestWorkersKeepTheirNumbers(t *testing.T) {
	p := New(quiet)
	d := &numberChecker{t: t, present: map[kvblock.Worker]string{}}
	p.Watch(d)
	two := endpoint("a", 1)
	two.DataParallelSize = 2
	p.Update([]Endpoint{two, endpoint("b", 2)})
	before := workers(p)
	if len(before) != 3 || d.joins != 3 {
		t.Fatalf("workers %v, %d joined", before, d.joins)
	}
	a1 := before["a/1"]
	if got := a1.KVEventsAddress(); got != "tcp://10.0.0.1:5558" {
		t.Errorf("rank 1 publishes at %s", got)
	}
	// Properties that do not identify the cache may change.
	two.TotalKVBlocks = 99
	p.Update([]Endpoint{endpoint("b", 2), two})
	after := workers(p)
	if after["a/0"].Worker != before["a/0"].Worker || after["a/0"].TotalKVBlocks != 99 || d.joins != 3 ||
		d.leaves != 0 {
		t.Errorf("after an update of the same workers: %+v, %d joined, %d left", after, d.joins, d.leaves)
	}
	// Another instance id is another cache with the same name.
	p.Update([]Endpoint{endpoint("b", 3), two})
	if d.joins != 4 || d.leaves != 1 || workers(p)["b/0"].Worker == before["b/0"].Worker {
		t.Errorf("a restarted worker kept its number, or %d joined, want 4; %d left, want 1", d.joins, d.leaves)
	}
}

// TestCordonChangesInPlace checks that a cordon begins and ends while the endpoint stays, with one call for all ranks.
func TestCordonChangesInPlace(t *testing.T) {
	p := New(quiet)
	d := &numberChecker{t: t, present: map[kvblock.Worker]string{}}
	p.Watch(d)
	var calls []string
	p.OnCordon(func(endpoint string, by CordonSource) { calls = append(calls, endpoint+" "+string(by)) })
	a, b := endpoint("a", 1), endpoint("b", 2)
	a.DataParallelSize = 2
	b.CordonedBy = CordonedByFile
	p.Update([]Endpoint{a, b})
	before := workers(p)
	p.ReportBlockSize(before["a/0"].Worker, 16)
	for _, by := range []CordonSource{CordonedByPod, CordonedByPod, ""} {
		a.CordonedBy = by
		p.Update([]Endpoint{a, b})
		for name, w := range workers(p) {
			if w.Worker != before[name].Worker {
				t.Errorf("%s has number %d, and had %d", name, w.Worker, before[name].Worker)
			}
		}
		if w := workers(p)["a/0"]; w.CordonedBy != by || w.BlockSize != 16 {
			t.Errorf("cordoned by %q, block size %d; want %q, 16", w.CordonedBy, w.BlockSize, by)
		}
	}
	if want := []string{"a Pod annotation", "a "}; !slices.Equal(calls, want) || d.joins != 3 || d.leaves != 0 {
		t.Errorf("OnCordon was called with %q, want %q; %d joined, %d left", calls, want, d.joins, d.leaves)
	}
}

func TestNumberIsNotReusedWhileRead(t *testing.T) {
	p := New(quiet)
	d := &numberChecker{t: t, present: map[kvblock.Worker]string{}}
	p.Watch(d)
	p.Update([]Endpoint{endpoint("a", 1)})
	reading := p.Acquire() // as a concurrent decision does
	old := reading.Workers[0].Worker
	p.Update(nil)
	if d.leaves != 1 {
		t.Fatalf("%d calls of WorkerLeft, want 1", d.leaves)
	}
	p.Update([]Endpoint{endpoint("b", 2)})
	if got := workers(p)["b/0"].Worker; got == old {
		t.Fatalf("number %d was reused while a snapshot with its old worker was held", old)
	}
	reading.Release()
	p.Update([]Endpoint{endpoint("c", 3)})
	if d.leaves != 3 { // the second call for a, and the first for b
		t.Errorf("%d calls of WorkerLeft, want 3", d.leaves)
	}
	p.Update([]Endpoint{endpoint("c", 3), endpoint("d", 4)})
	numbers := map[kvblock.Worker]bool{workers(p)["c/0"].Worker: true, workers(p)["d/0"].Worker: true}
	if !numbers[old] && len(numbers) == 2 {
		t.Errorf("number %d is not reused: %v", old, numbers)
	}
}

func TestBlockSizeIsTheWorkersOwn(t *testing.T) {
	p := New(quiet)
	known := endpoint("known", 2)
	known.BlockSize = 16
	p.Update([]Endpoint{endpoint("unknown", 1), known})
	unknown := workers(p)["unknown/0"].Worker
	p.ReportBlockSize(unknown, 32)
	if w := workers(p)["unknown/0"]; w.BlockSize != 32 || w.Announced != 0 {
		t.Errorf("adopted %d, announced %d", w.BlockSize, w.Announced)
	}
	p.ReportBlockSize(workers(p)["known/0"].Worker, 64)
	if w := workers(p)["known/0"]; w.BlockSize != 16 || w.Announced != 64 {
		t.Errorf("configured and announced differ: block size %d, announced %d; want 16, 64", w.BlockSize, w.Announced)
	}
	p.Update([]Endpoint{endpoint("unknown", 1), known}) // must keep both
	if w := workers(p); w["unknown/0"].BlockSize != 32 || w["known/0"].Announced != 64 {
		t.Errorf("after an update: %+v", w)
	}
	p.ReportBlockSize(workers(p)["known/0"].Worker, 16)
	if w := workers(p)["known/0"]; w.Announced != 0 {
		t.Errorf("after both agree again: announced %d", w.Announced)
	}
	p.ReportBlockSize(99, 16) // a worker that has left
	for _, absurd := range []int{-1, kvblock.MaxBlockSize + 1} {
		p.Update(nil)
		p.Update([]Endpoint{endpoint("absurd", 3)})
		number := workers(p)["absurd/0"].Worker
		if p.ReportBlockSize(number, absurd); workers(p)["absurd/0"].BlockSize != 0 ||
			workers(p)["absurd/0"].Announced != absurd {
			t.Errorf("an announced block size of %d tokens: %+v", absurd, workers(p)["absurd/0"])
		}
		if p.ReportBlockSize(number, 16); workers(p)["absurd/0"].BlockSize != 16 ||
			workers(p)["absurd/0"].Announced != 0 {
			t.Errorf("after %d tokens: %+v", absurd, workers(p)["absurd/0"])
		}
	}
}

// TestDeclaredLate checks that a worker stays if its source declares a property later, with the value of the worker's
// events, as Dynamo's frontends do, or if the source no longer declares a block size that the events do not contradict.
// Any other value makes it another KV cache, and the log says why.
func TestDeclaredLate(t *testing.T) {
	var log bytes.Buffer
	p := New(slog.New(slog.NewTextHandler(&log, nil)))
	d := &numberChecker{t: t, present: make(map[kvblock.Worker]string)}
	p.Watch(d)
	p.Update([]Endpoint{endpoint("a", 1)})
	first := workers(p)["a/0"].Worker
	p.ReportBlockSize(first, 16)
	p.ReportTraits(first, kvblock.Traits{EAGLE: true})
	declared := endpoint("a", 1)
	declared.BlockSize = 16
	p.Update([]Endpoint{declared})
	declared.EAGLE = true
	p.Update([]Endpoint{declared})
	if w := workers(p)["a/0"]; w.Worker != first || w.BlockSize != 16 || !w.EAGLE || d.leaves != 0 {
		t.Errorf("the value of the events is declared: %+v, %d leaves", w, d.leaves)
	}
	declared.BlockSize = 0
	p.Update([]Endpoint{declared})
	if w := workers(p)["a/0"]; w.Worker != first || w.BlockSize != 16 || d.leaves != 0 {
		t.Errorf("the block size is no longer declared: %+v, %d leaves", w, d.leaves)
	}
	wrong := endpoint("b", 1)
	wrong.BlockSize = 64
	p.Update([]Endpoint{wrong})
	p.ReportBlockSize(workers(p)["b/0"].Worker, 16)
	p.Update([]Endpoint{endpoint("b", 1)}) // the operator removes the wrong size
	if w := workers(p)["b/0"]; w.BlockSize != 0 || w.Announced != 0 {
		t.Errorf("a wrong block size is no longer declared: %+v", w)
	}
	p.ReportBlockSize(workers(p)["b/0"].Worker, 16)
	other := endpoint("b", 1)
	other.BlockSize = 32
	leaves := d.leaves
	p.Update([]Endpoint{other})
	if w := workers(p)["b/0"]; w.BlockSize != 32 || d.leaves == leaves {
		t.Errorf("another block size is declared: %+v, %d calls of WorkerLeft", w, d.leaves-leaves)
	}
	if want := `rejoins_with_another="[block size]"`; !strings.Contains(log.String(), want) {
		t.Errorf("the log has no %s:\n%s", want, log.String())
	}
}

// TestBlockSizeOfPromptTailsIsCorrected checks that a configured block size stays.
func TestBlockSizeOfPromptTailsIsCorrected(t *testing.T) {
	p := New(quiet)
	known := endpoint("known", 2)
	known.BlockSize = 16
	p.Update([]Endpoint{endpoint("unknown", 1), known})
	unknown := workers(p)["unknown/0"].Worker
	p.ReportBlockSize(unknown, 16)
	p.CorrectBlockSize(unknown, 32)
	p.CorrectBlockSize(workers(p)["known/0"].Worker, 32)
	p.CorrectBlockSize(99, 32) // a worker that has left
	if w := workers(p); w["unknown/0"].BlockSize != 32 || w["unknown/0"].Announced != 0 ||
		w["known/0"].BlockSize != 16 {
		t.Errorf("%+v", w)
	}
	p.ReportBlockSize(unknown, 64)
	if w := workers(p)["unknown/0"]; w.BlockSize != 32 || w.Announced != 64 {
		t.Errorf("another size afterwards: %d, announced %d", w.BlockSize, w.Announced)
	}
}

// TestTraitsAreTheWorkersOwn checks that reported properties survive updates and end when the worker leaves.
func TestTraitsAreTheWorkersOwn(t *testing.T) {
	p := New(quiet)
	eagle := endpoint("eagle", 2)
	eagle.EAGLE = true
	p.Update([]Endpoint{endpoint("plain", 1), eagle})
	if w := workers(p); w["plain/0"].EAGLE || !w["eagle/0"].EAGLE {
		t.Errorf("at first: %+v", w)
	}
	plain := workers(p)["plain/0"].Worker
	p.ReportTraits(plain, kvblock.Traits{EAGLE: true, UpperBound: true})
	p.ReportTraits(workers(p)["eagle/0"].Worker, kvblock.Traits{})
	p.ReportSilent(plain, true)
	before := p.current.Load()
	p.ReportTraits(plain, kvblock.Traits{EAGLE: true, UpperBound: true})
	p.ReportSilent(plain, true)
	if p.current.Load() != before {
		t.Error("a snapshot was published although nothing changed")
	}
	p.Update([]Endpoint{endpoint("plain", 1), eagle})
	if w := workers(p); !w["plain/0"].EAGLE || !w["plain/0"].UpperBound || !w["plain/0"].Silent || w["eagle/0"].EAGLE ||
		w["eagle/0"].Silent {
		t.Errorf("after an update: %+v", w)
	}
	p.Update([]Endpoint{eagle})
	p.ReportTraits(plain, kvblock.Traits{}) // it has left
	p.ReportSilent(plain, false)
	p.Update([]Endpoint{endpoint("plain", 1), eagle})
	if w := workers(p)["plain/0"]; w.EAGLE || w.UpperBound || w.Silent {
		t.Errorf("after the worker left and joined again: %+v", w)
	}
}

func TestLearningKeepsNoSnapshots(t *testing.T) {
	p := New(quiet)
	var es []Endpoint
	for i := range 200 {
		es = append(es, endpoint(fmt.Sprint(i), uint64(i)))
	}
	p.Update(es)
	for _, w := range workers(p) {
		p.ReportBlockSize(w.Worker, 16)
	}
	if n := len(p.old); n > 1 {
		t.Errorf("%d superseded snapshots are kept without readers, want at most 1", n)
	}
}

// reporter is a watcher that reports a block size when a worker leaves, like a feed that applies its last event.
type reporter struct{ p *Pool }

func (reporter) WorkerJoined(Worker) {}
func (r reporter) WorkerLeft(w kvblock.Worker) {
	done := make(chan struct{})
	go func() { r.p.ReportBlockSize(w, 8); close(done) }()
	<-done
}

func TestReportWhileLeaving(t *testing.T) {
	p := New(quiet)
	p.Watch(reporter{p})
	p.Update([]Endpoint{endpoint("a", 1)})
	p.Update(nil) // must not deadlock
}

func TestConcurrentReaders(t *testing.T) {
	p := New(quiet)
	p.Watch(&numberChecker{t: t, present: map[kvblock.Worker]string{}})
	stop := readConcurrently(p, 4, func(s *Snapshot) {
		seen := map[kvblock.Worker]string{}
		for _, w := range s.Workers {
			if other, twice := seen[w.Worker]; twice {
				t.Errorf("%s and %s share number %d", other, w.String(), w.Worker)
			}
			seen[w.Worker] = w.String()
			p.ReportBlockSize(w.Worker, 16)
		}
	})
	rng := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		var es []Endpoint
		for i := range 8 {
			if rng.IntN(2) == 0 {
				es = append(es, endpoint(fmt.Sprint(i), uint64(rng.IntN(3))))
			}
		}
		p.Update(es)
	}
	stop()
	for range 3 { // without readers, every freed number is reused
		p.Update(nil)
	}
	var es []Endpoint
	for i := range int(p.next) {
		es = append(es, endpoint(fmt.Sprint(i), 7))
	}
	high := p.next
	p.Update(es)
	if p.next != high {
		t.Errorf("%d numbers were lost", p.next-high)
	}
}

// TestHighestRank checks a rank with the highest number of 32 bits.
func TestHighestRank(t *testing.T) {
	p := New(quiet)
	last := Endpoint{Name: "last", Address: "10.0.0.1:8000", DataParallelStartRank: math.MaxUint32}
	p.Update([]Endpoint{last})
	if w, ok := workers(p)["last/4294967295"]; !ok || w.Rank != math.MaxUint32 {
		t.Errorf("workers %v", workers(p))
	}
}

// TestUpdateIsBounded checks the bound for endpoints that do not come from the endpoints file.
func TestUpdateIsBounded(t *testing.T) {
	p := New(slog.New(slog.DiscardHandler))
	var es []Endpoint
	for i := range maxWorkers/MaxRanks + 2 {
		es = append(es, Endpoint{Name: fmt.Sprint(i), DataParallelSize: MaxRanks})
	}
	es = append(es, Endpoint{Name: "one more"})
	p.Update(es)
	s := p.Acquire()
	defer s.Release()
	if n := len(s.Workers); n != maxWorkers {
		t.Errorf("%d workers of %d endpoints are in the pool", n, len(es))
	}
}

// TestUpdateFindsEarlierWorkers checks that workers in two successive updates keep their numbers, in any order.
func TestUpdateFindsEarlierWorkers(t *testing.T) {
	p := New(quiet)
	d := &numberChecker{t: t, present: map[kvblock.Worker]string{}}
	p.Watch(d)
	rng := rand.New(rand.NewPCG(3, 4))
	var before []Endpoint
	for range 300 {
		var now []Endpoint
		for _, i := range rng.Perm(20) {
			if rng.IntN(4) == 0 {
				continue
			}
			e := endpoint(fmt.Sprint("w", i), uint64(rng.IntN(4)/3)) // sometimes another instance with the same name
			e.DataParallelSize = uint32(1 + i%3)
			now = append(now, e)
		}
		if rng.IntN(2) == 0 { // in the order of the sources
			slices.SortFunc(now, func(a, b Endpoint) int { return strings.Compare(a.Name, b.Name) })
		}
		numbers, joins, leaves := workers(p), d.joins, d.leaves
		p.Update(now)
		stay, ranks := 0, 0
		for i := range now {
			ranks += int(now[i].DataParallelSize)
			for j := range before {
				if before[j].Name == now[i].Name && before[j].InstanceID == now[i].InstanceID {
					stay += int(now[i].DataParallelSize)
				}
			}
		}
		for name, w := range workers(p) {
			was, there := numbers[name]
			if same := there && was.InstanceID == w.InstanceID; same != (was.Worker == w.Worker && there) {
				t.Fatalf("%s had number %d as instance %d, and has %d as %d", name, was.Worker, was.InstanceID,
					w.Worker, w.InstanceID)
			}
		}
		// The second call of WorkerLeft, before a number is reused, counts as another leave.
		if joined, left := d.joins-joins, d.leaves-leaves; joined != ranks-stay || left < len(numbers)-stay {
			t.Fatalf("%d joined and %d left, want %d and at least %d", joined, left, ranks-stay, len(numbers)-stay)
		}
		before = now
	}
}

// TestReportCache: the engine's metrics page sizes a worker's KV cache where neither the endpoint nor events do, and a
// difference from the endpoint is logged once.
func TestReportCache(t *testing.T) {
	var log bytes.Buffer
	p := New(slog.New(slog.NewTextHandler(&log, nil)))
	own := endpoint("own", 2)
	own.BlockSize, own.TotalKVBlocks = 32, 70
	p.Update([]Endpoint{endpoint("a", 1), own})
	a, b := workers(p)["a/0"].Worker, workers(p)["own/0"].Worker
	want := func(what, worker string, size, blocks int) {
		t.Helper()
		if w := workers(p)[worker]; w.BlockSize != size || w.TotalKVBlocks != blocks || w.Announced != 0 {
			t.Errorf("%s: %s has %d blocks of %d, %d announced", what, worker, w.TotalKVBlocks, w.BlockSize,
				w.Announced)
		}
	}
	for _, wrong := range [][2]float64{{0, 5}, {16, 0.5}, {kvblock.MaxBlockSize + 1, 5}, {16, 1e300}, {math.NaN(), 5},
		{16, math.NaN()}, {-16, -5}, {math.Inf(1), 5}} {
		p.ReportCache(a, wrong[0], wrong[1])
	}
	want("sizes out of range", "a/0", 0, 0)
	p.ReportCache(a, 16, 100)
	p.ReportCache(b, 16, 100)
	want("page", "a/0", 16, 100)
	want("configured", "own/0", 32, 70)
	p.ReportCache(b, 16, 100)
	if n := strings.Count(log.String(), "differs from that on the engine's metrics page"); n != 2 || // size and blocks
		!strings.Contains(log.String(), "configured=70 engine=50") {
		t.Errorf("%d lines: %s", n, &log)
	}
	p.Update([]Endpoint{own, endpoint("a", 1)})
	want("after an update", "a/0", 16, 100)
	p.ReportBlockSize(a, 64)
	want("events take precedence over the page", "a/0", 64, 25)
	p.ReportCache(a, 16, 200) // the engine restarted
	want("another page", "a/0", 64, 50)
	p.ReportBlockSize(a, 8)
	if w := workers(p)["a/0"]; w.BlockSize != 64 || w.Announced != 8 {
		t.Errorf("events of two sizes: %d, %d announced", w.BlockSize, w.Announced)
	}
	own.TotalKVBlocks = 0
	p.Update([]Endpoint{own})
	want("no longer configured", "own/0", 32, 50)
	p.ReportCache(a, 16, 300) // has left
}
