package session

import (
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
)

// oracleSession is a session of the simple table below.
type oracleSession struct {
	worker  kvblock.Worker
	ttl     time.Duration
	running int
	used    time.Time
	order   int // of the latest use
}

// After every step of random histories with passing time, the table equals a simple one.
func TestSessionsAgainstANaiveTable(t *testing.T) {
	for seed := range uint64(40) {
		synctest.Test(t, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 7))
			const most, ttl = 5, 10 * time.Second
			s, naive := NewTable(Config{TTL: ttl, Max: most}), map[Key]*oracleSession{}
			type held struct {
				e Lease
				o *oracleSession
				k Key
			}
			var running []held
			steps, want := 0, Stats{}
			use := func(o *oracleSession) { steps++; o.order, o.used = steps, time.Now() }
			expire := func() {
				for k, o := range naive {
					if o.running == 0 && time.Since(o.used) >= o.ttl {
						delete(naive, k)
						want.Expired++
					}
				}
			}
			for range 300 {
				s.Active() // so that both have removed expired sessions
				expire()
				key := Key{byte(rng.IntN(8))}
				switch rng.IntN(7) {
				case 0, 1, 2:
					was, bound := s.Find(key)
					o := naive[key]
					if bound != (o != nil) || bound && was != o.worker {
						t.Fatalf("seed %d: found %v %v, want %+v", seed, was, bound, o)
					}
					to, own := kvblock.Worker(rng.IntN(3)), time.Duration(rng.IntN(2)*rng.IntN(40))*time.Second
					if rng.IntN(2) == 0 && bound {
						to = was
					}
					e, outcome := s.Hold(key, was, bound, to, own)
					switch {
					case o == nil:
						if len(naive) == most {
							idle, all := Key{}, Key{}
							for k, x := range naive {
								if x.running == 0 &&
									(naive[idle] == nil || naive[idle].running > 0 || x.order < naive[idle].order) {
									idle = k
								}
								if naive[all] == nil || x.order < naive[all].order {
									all = k
								}
							}
							if naive[idle] == nil || naive[idle].running > 0 {
								idle = all
							}
							delete(naive, idle)
							want.Evicted++
						}
						o = &oracleSession{ttl: ttl}
						naive[key] = o
						want.New++
					case o.worker == to:
						want.Kept++
					default:
						want.Moved++
					}
					if outcome == "" {
						t.Fatalf("seed %d: not held", seed)
					}
					if o.worker = to; own > 0 {
						o.ttl = own
					}
					o.running++
					use(o)
					running = append(running, held{e, o, key})
				case 3, 4:
					if len(running) == 0 {
						continue
					}
					i := rng.IntN(len(running))
					x, final := running[i], rng.IntN(4) == 0
					running = slices.Delete(running, i, i+1)
					x.e.Release(final)
					x.o.running--
					if naive[x.k] != x.o {
						continue // it has ended before
					}
					if use(x.o); final {
						delete(naive, x.k)
						want.Final++
					}
				case 5:
					w := kvblock.Worker(rng.IntN(3))
					if rng.IntN(5) > 0 {
						continue
					}
					s.Forget(w)
					for k, o := range naive {
						if o.worker == w {
							delete(naive, k)
							want.WorkerLeft++
						}
					}
				case 6:
					<-time.After(time.Duration(rng.IntN(5000)) * time.Millisecond)
					continue
				}
				if n := s.Active(); n != len(naive) || s.idle.Len()+s.held.Len() != n {
					t.Fatalf(
						"seed %d: %d sessions, %d idle and %d held; want %d",
						seed,
						n,
						s.idle.Len(),
						s.held.Len(),
						len(naive),
					)
				}
				if got := s.Stats(); got != want {
					t.Fatalf("seed %d: %+v, want %+v", seed, got, want)
				}
			}
		})
	}
}

// Hold does not undo a concurrent change: a caller that saw an older state gets no lease.
func TestHoldWantsWhatWasSeen(t *testing.T) {
	s := NewTable(Config{TTL: time.Minute})
	key := Key{1}
	s.Hold(key, 0, false, 5, 0)
	for _, c := range []struct {
		was   kvblock.Worker
		bound bool
		to    kvblock.Worker
		want  string
	}{
		{0, false, 6, ""},    // was bound meanwhile
		{7, true, 6, ""},     // moved meanwhile
		{0, false, 5, Kept},  // was bound to the same worker meanwhile
		{5, true, 6, Moved},  // unchanged meanwhile
		{5, true, 6, Kept},   // moved to the same worker meanwhile
		{9, true, 9, ""},     //
		{6, true, 6, Kept},   //
		{6, true, 10, Moved}, //
	} {
		if _, outcome := s.Hold(key, c.was, c.bound, c.to, 0); outcome != c.want {
			t.Errorf("%+v: %q", c, outcome)
		}
	}
	s.Forget(10)
	if _, outcome := s.Hold(key, 10, true, 10, 0); outcome != "" {
		t.Error("held, though it has ended")
	}
}
