package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"kvepp/router/queue"
)

// What the model supposes, in seconds.
const (
	workers  = 16 // of the mockers, too
	perToken = 0.3e-3
	lasts    = 4000.0
	rate     = workers / (1500 * perToken) // requests that the workers serve
	news     = 2e-3                        // until a replica hears of another one's turns
	looks    = 4e-3                        // until it looks at its queue after another one's request ended, at most
	yieldFor = 50e-3                       // how long a Room leaves a worker to another replica
)

// prompt is a request of the model.
type prompt struct {
	at     float64
	tenant queue.Tenant
	tokens int
}

const flooding queue.Tenant = 100 + 9

// clock runs functions at their times.
type clock struct {
	now   float64
	later []alarm // by their times
}

type alarm struct {
	at  float64
	run func()
}

func (c *clock) after(seconds float64, run func()) {
	at := c.now + seconds
	i, _ := slices.BinarySearchFunc(c.later, at, func(x alarm, at float64) int {
		if x.at <= at {
			return -1
		}
		return 1
	})
	c.later = slices.Insert(c.later, i, alarm{at, run})
}

// until runs what is due until a time, which is now then.
func (c *clock) until(at float64) {
	for len(c.later) > 0 && c.later[0].at <= at {
		next := c.later[0]
		c.later = slices.Delete(c.later, 0, 1)
		c.now = next.at
		next.run()
	}
	c.now = at
}

// cluster is replicas with a queue each, before workers that compute one prompt after the other. A replica hears of the
// others a little later, and leaves workers to them as a Room does.
type cluster struct {
	clock
	rng      *rand.Rand
	queues   []*queue.Queue[*prompt]
	yielding []float64       // since when a queue leaves a worker to another one; 0: it does not
	free     int             // workers
	tokens   int             // computed
	nine     []time.Duration // TTFT of the tenants that do not flood
}

// play has a cluster serve requests. named: it knows the tenants.
func play(replicas int, all []prompt, named bool) *cluster {
	c := &cluster{rng: rand.New(rand.NewPCG(5, 6)), yielding: make([]float64, replicas), free: workers}
	for range replicas {
		c.queues = append(c.queues, queue.New[*prompt](queue.Single(queue.FCFS, nil), 1<<20))
	}
	for k := range all {
		r := &all[k]
		c.until(r.at)
		i, who := c.rng.IntN(replicas), r.tenant
		if !named {
			who = flooding
		}
		if _, err := c.queues[i].Push(queue.Request{Lane: queue.Any, Tokens: r.tokens, Arrival: r.at, Tenant: who},
			workers, r); err != nil {
			panic(err)
		}
		if c.look(i); c.queues[i].Waits(who) {
			c.tell(i, who, 0, false)
		}
	}
	return c
}

// tell has the other replicas hear of a tenant.
func (c *cluster) tell(from int, who queue.Tenant, tokens int, turn bool) {
	waits := c.queues[from].Waits(who)
	for j, q := range c.queues {
		if j != from {
			c.after(news, func() { q.Heard(who, tokens, turn, waits) })
		}
	}
}

// look sends on what a replica may send on.
func (c *cluster) look(i int) {
	for c.free > 0 {
		yields := false
		item := c.queues[i].Pop(func(_ *queue.Class, x *queue.Item[*prompt]) bool {
			yields = x.Yields()
			return !yields || c.yielding[i] > 0 && c.now >= c.yielding[i]+yieldFor
		})
		switch {
		case item == nil && yields && c.yielding[i] == 0:
			c.yielding[i] = c.now
			c.after(yieldFor, func() { c.look(i) })
			return
		case item == nil && yields:
			return
		case yields:
			item.Forget()
		}
		c.yielding[i] = 0
		if item == nil {
			return
		}
		c.free--
		c.tell(i, item.Tenant, item.Cost(), true)
		c.after(perToken*float64(item.Tokens), func() { c.end(i, item.Value) })
	}
	c.yielding[i] = 0
}

// end ends a request of a replica.
func (c *cluster) end(of int, r *prompt) {
	c.free++
	c.tokens += r.tokens
	if r.tenant != flooding {
		c.nine = append(c.nine, time.Duration((c.now-r.at)*float64(time.Second)))
	}
	for i := range c.queues {
		if i == of {
			c.look(i)
		} else {
			c.after(news+looks*c.rng.Float64(), func() { c.look(i) })
		}
	}
}

// model plays the tenants' traffic into kvepp's queue in virtual time: what the queue itself does, without a machine
// that is busy with other things.
func model() error {
	fmt.Print("\n## The same in a model, 16 workers\n\n| kvepp | | the nine: TTFT p50 | p90 | of alone | busy |\n" +
		"|---|---|---|---|---|---|\n")
	rng := rand.New(rand.NewPCG(3, 4))
	var nine, both []prompt
	for at := 0.0; at < lasts; at += rng.ExpFloat64() / (1.2 * rate) {
		r := prompt{at, flooding - 9 + queue.Tenant(min(rng.IntN(14), 9)), 1000 + rng.IntN(1001)}
		if both = append(both, r); r.tenant != flooding {
			nine = append(nine, r)
		}
	}
	for _, replicas := range []int{1, 2, 4} {
		alone := play(replicas, nine, true)
		base := percentile(alone.nine, .9)
		for _, x := range []struct {
			name string
			*cluster
		}{{"the nine alone", alone}, {"first come, first served", play(replicas, both, false)},
			{"tenants", play(replicas, both, true)}} {
			p90 := percentile(x.nine, .9)
			fmt.Printf("| %d | %s | %d ms | %d ms | %.2f | %.3f |\n", replicas, x.name,
				percentile(x.nine, .5).Milliseconds(), p90.Milliseconds(), float64(p90)/float64(base),
				float64(x.tokens)/lasts/(rate*1500))
		}
	}
	return nil
}
