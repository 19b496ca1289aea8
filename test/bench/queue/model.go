package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"kvepp/router/queue"
)

// model plays the tenants' traffic into kvepp's queue in virtual time, on workers that compute one prompt after the
// other at one speed: what the queue itself does, without a machine that is busy with other things.
func model() error {
	const workers, perToken, lasts = 16, 0.3e-3, 4000.0 // seconds
	rate := workers / (1500 * perToken)
	type request struct {
		at     float64
		tenant queue.Tenant
		tokens int
	}
	type ending struct {
		at  float64
		req *request
	}
	play := func(replicas int, all []request, named bool) (nine []time.Duration, served float64) {
		rng := rand.New(rand.NewPCG(5, 6))
		var queues []*queue.Queue[*request]
		for range replicas {
			queues = append(queues, queue.New[*request](queue.Single(queue.FCFS, nil), 1<<20))
		}
		var running []ending // by their ends
		free, tokens := workers, 0
		send := func(now float64) {
			for _, i := range rng.Perm(replicas) {
				for free > 0 {
					item := queues[i].Pop(func(*queue.Class, *queue.Item[*request]) bool { return true })
					if item == nil {
						break
					}
					free--
					e := ending{now + perToken*float64(item.Value.tokens), item.Value}
					at, _ := slices.BinarySearchFunc(running, e, func(x, y ending) int {
						return int((x.at - y.at) * 1e9)
					})
					running = slices.Insert(running, at, e)
					for j := range queues {
						if j != i {
							queues[j].Charge(item.Tenant, item.Cost())
						}
					}
				}
			}
		}
		end := func() {
			e := running[0]
			running, free = running[1:], free+1
			tokens += e.req.tokens
			if e.req.tenant != 100+9 {
				nine = append(nine, time.Duration((e.at-e.req.at)*float64(time.Second)))
			}
			send(e.at)
		}
		for i := range all {
			r := &all[i]
			for len(running) > 0 && running[0].at <= r.at {
				end()
			}
			who := r.tenant
			if !named {
				who = 100
			}
			if _, err := queues[rng.IntN(replicas)].Push(queue.Request{Lane: queue.Any, Tokens: r.tokens,
				Arrival: r.at, Tenant: who}, workers, r); err != nil {
				panic(err)
			}
			send(r.at)
		}
		return nine, float64(tokens) / lasts / (rate * 1500)
	}
	fmt.Print("\n## The same in a model, 16 workers\n\n| kvepp | | the nine: TTFT p50 | p90 | of alone | busy |\n" +
		"|---|---|---|---|---|---|\n")
	for _, replicas := range []int{1, 2} {
		rng := rand.New(rand.NewPCG(3, 4))
		var nine, both []request
		for at := 0.0; at < lasts; at += rng.ExpFloat64() / (1.2 * rate) {
			r := request{at, queue.Tenant(100 + min(rng.IntN(14), 9)), 1000 + rng.IntN(1001)}
			if both = append(both, r); r.tenant != 100+9 {
				nine = append(nine, r)
			}
		}
		alone, busy := play(replicas, nine, true)
		line := func(name string, times []time.Duration, busy float64) {
			fmt.Printf("| %d | %s | %d ms | %d ms | %.2f | %.3f |\n", replicas, name,
				percentile(times, .5).Milliseconds(), percentile(times, .9).Milliseconds(),
				float64(percentile(times, .9))/float64(percentile(alone, .9)), busy)
		}
		line("the nine alone", alone, busy)
		plain, busy := play(replicas, both, false)
		line("first come, first served", plain, busy)
		fair, busy := play(replicas, both, true)
		line("tenants", fair, busy)
	}
	return nil
}
