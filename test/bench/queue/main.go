// Command queue is `make bench-queue`: it sends more requests than mocked workers can serve through a real Envoy and
// kvepp, and prints what the queue makes of it: tenants beside one that floods, and requests with deadlines.
package main

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"kvepp/test/harness/stack"
)

const (
	speedup       = 0.03 // so that the mocked GPUs determine the times, and not this machine's cores
	decodeSpeedup = 40
	least, most   = 1000, 2000 // tokens of a prompt
	output        = 16         // mean tokens of a response
	busy          = 0          // a worker that has more prompt tokens waiting is busy
)

// class is a policy file of one class.
const class = `
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
- {name: all, policy_family: all, cache_bucket: any, quantum: 1000, queue_policy: %s, prefill_busy_threshold: %d}
`

func main() {
	b := bench{rng: rand.New(rand.NewPCG(1, 2))}
	flag.DurationVar(&b.lasts, "for", 2*time.Minute, "how long each kind of traffic lasts")
	flag.Float64Var(&b.capacity, "capacity", 0, "requests a second that the workers serve; 0: it is measured")
	only := flag.String("only", "model,tenants,replicas,deadlines", "the parts, with commas between")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	parts := map[string]func(context.Context) error{"tenants": func(ctx context.Context) error {
		return b.tenants(ctx, 1)
	}, "model": func(context.Context) error { return model() },
		"replicas": func(ctx context.Context) error { return b.tenants(ctx, 2) }, "deadlines": b.deadlines}
	for part := range strings.SplitSeq(*only, ",") {
		run := parts[part]
		err := fmt.Errorf("no part")
		if run != nil {
			err = run(ctx)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "make bench-queue: %s: %v\n", part, err)
			os.Exit(1)
		}
	}
}

type bench struct {
	lasts    time.Duration
	capacity float64
	rng      *rand.Rand
	plays    int
}

// arrival is a request that is sent at a time.
type arrival struct {
	at       time.Duration
	tenant   string
	deadline time.Duration // 0: none
	prompt   []int
	output   int
}

// served is what became of it.
type served struct {
	arrival
	status      int
	ttft, ended time.Duration // since it was sent, and since the beginning
}

// with starts a stack with a queue order, teaches kvepp the workers' times, and runs. Each worker is a process: the
// ranks of one mocker take their steps together, so that a prompt waits for those of the other ranks.
func (b *bench) with(ctx context.Context, replicas int, order string, run func(*stack.Stack) error) error {
	dir, err := os.MkdirTemp("", "kvepp-bench-queue-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	policy := filepath.Join(dir, "policy.yaml")
	if err := os.WriteFile(policy, fmt.Appendf(nil, class, order, busy), 0o600); err != nil {
		return err
	}
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	s, err := stack.Start(ctx, stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS"), Dir: dir, Workers: workers,
		SharedFrontend: true, Blocks: 16384, Speedup: speedup, DecodeSpeedup: decodeSpeedup, Replicas: replicas,
		Kill: true, KveppFlags: []string{"--router-policy-config", policy, "--router-policy=time",
			"--router-queue-timeout=10m"}})
	if err != nil {
		return err
	}
	defer s.Close()
	if _, err := b.saturated(ctx, s, workers, 15*time.Second); err != nil {
		return err
	}
	if b.capacity == 0 {
		if b.capacity, err = b.saturated(ctx, s, 8*workers, b.lasts); err != nil {
			return err
		}
		fmt.Printf("%d mocked workers serve %.1f requests a second\n", workers, b.capacity)
	}
	return run(s)
}

// request returns a request of random length that no worker has cached.
func (b *bench) request() arrival {
	a := arrival{prompt: make([]int, least+b.rng.IntN(most-least)), output: output/2 + b.rng.IntN(output)}
	for i := range a.prompt {
		a.prompt[i] = 300 + b.rng.IntN(500)
	}
	return a
}

// send sends a request.
func (a *arrival) send(ctx context.Context, s *stack.Stack, client *http.Client) (*stack.Response, error) {
	header := http.Header{}
	if a.tenant != "" {
		header.Set("x-llm-d-inference-fairness-id", a.tenant)
	}
	if a.deadline > 0 {
		header.Set("x-llm-d-slo-ttft-ms", fmt.Sprint(a.deadline.Milliseconds()))
	}
	return stack.Post(ctx, client, s.URL()+"/v1/completions", header, map[string]any{"model": stack.Model,
		"prompt": a.prompt, "max_tokens": a.output, "ignore_eos": true, "stream": true})
}

// saturated returns the requests a second that get their first token when so many run at every time.
func (b *bench) saturated(ctx context.Context, s *stack.Stack, running int, lasts time.Duration) (float64, error) {
	var wait sync.WaitGroup
	var mu sync.Mutex
	var failed error
	var firsts []time.Duration
	begin := time.Now()
	for range running {
		wait.Go(func() {
			for time.Since(begin) < lasts {
				mu.Lock()
				a := b.request()
				mu.Unlock()
				sent := time.Since(begin)
				r, err := a.send(ctx, s, http.DefaultClient)
				if err == nil && r.Status != http.StatusOK {
					err = fmt.Errorf("status %d: %s", r.Status, r.Body)
				}
				mu.Lock()
				if err != nil {
					failed = err
				} else {
					firsts = append(firsts, sent+r.TTFT)
				}
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	return each(firsts, lasts), failed
}

// each returns how many of these times there are a second, without the first quarter of the run and without what ends
// after it. They are those of first tokens: responses end much later than their prompts under load, because an engine
// that computes prompts says one token in each of its steps.
func each(firsts []time.Duration, lasts time.Duration) float64 {
	n := 0
	for _, at := range firsts {
		if at > lasts/4 && at < lasts {
			n++
		}
	}
	return float64(n) / (lasts - lasts/4).Seconds()
}

// arrivals returns a Poisson process.
func (b *bench) arrivals(rate float64, change func(*arrival)) (all []arrival) {
	for at := time.Duration(0); at < b.lasts; at += time.Duration(b.rng.ExpFloat64() / rate * float64(time.Second)) {
		a := b.request()
		a.at = at
		change(&a)
		all = append(all, a)
	}
	return all
}

// play sends all requests at their times, and returns what became of them.
func (b *bench) play(ctx context.Context, s *stack.Stack, all []arrival) ([]served, error) {
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1024}}
	defer client.CloseIdleConnections()
	out := make([]served, len(all))
	var wait sync.WaitGroup
	var mu sync.Mutex
	var failed error
	b.plays++ // no play finds the prompts of another one in the caches
	all = slices.Clone(all)
	begin := time.Now()
	for i := range all {
		all[i].prompt = slices.Clone(all[i].prompt)
		all[i].prompt[0] = 800 + b.plays
		time.Sleep(all[i].at - time.Since(begin))
		wait.Go(func() {
			r, err := all[i].send(ctx, s, client)
			if err != nil {
				mu.Lock()
				failed = err
				mu.Unlock()
				return
			}
			out[i] = served{all[i], r.Status, r.TTFT, time.Since(begin)}
		})
	}
	wait.Wait()
	return out, failed
}

// percentile returns a percentile of times.
func percentile(of []time.Duration, p float64) time.Duration {
	if len(of) == 0 {
		return 0
	}
	slices.Sort(of)
	return of[min(int(p*float64(len(of))), len(of)-1)]
}

// tenants compares nine tenants alone with the same nine beside one of five times their rate.
func (b *bench) tenants(ctx context.Context, replicas int) error {
	const flooder = "flooder"
	first := func(all []served) (times []time.Duration) {
		for i := range all {
			if x := &all[i]; x.tenant != flooder && x.at > b.lasts/4 && x.status == http.StatusOK {
				times = append(times, x.ttft)
			}
		}
		return times
	}
	throughput := func(all []served) float64 {
		var firsts []time.Duration
		for i := range all {
			if x := &all[i]; x.status == http.StatusOK {
				firsts = append(firsts, x.at+x.ttft)
			}
		}
		return each(firsts, b.lasts)
	}
	refused := func(all []served) (nine, tenth int) {
		for i := range all {
			if x := &all[i]; x.status != http.StatusOK && x.tenant == flooder {
				tenth++
			} else if x.status != http.StatusOK {
				nine++
			}
		}
		return nine, tenth
	}
	var alone, fair, plain []served
	if err := b.with(ctx, replicas, "fcfs", func(s *stack.Stack) (err error) {
		unit := 1.2 * b.capacity / 14
		nine := b.arrivals(9*unit, func(a *arrival) { a.tenant = fmt.Sprint("tenant ", b.rng.IntN(9)) })
		tenth := b.arrivals(5*unit, func(a *arrival) { a.tenant = flooder })
		both := slices.SortedFunc(slices.Values(append(slices.Clone(nine), tenth...)),
			func(x, y arrival) int { return int(x.at - y.at) })
		if alone, err = b.play(ctx, s, nine); err == nil {
			fair, err = b.play(ctx, s, both)
		}
		if err == nil {
			// Without names all are one tenant.
			nameless := slices.Clone(both)
			for i := range nameless {
				nameless[i].tenant = ""
			}
			if plain, err = b.play(ctx, s, nameless); err == nil {
				for i := range plain {
					plain[i].tenant = both[i].tenant
				}
			}
		}
		return err
	}); err != nil {
		return err
	}
	base := percentile(first(alone), .9)
	fmt.Printf("\n## One tenant at five times the rate of nine others, at 1.2 of what the workers serve, %d kvepp\n\n",
		replicas)
	fmt.Println("| | the nine: TTFT p50 | p90 | of alone | refused | tenth: refused | served a second |")
	fmt.Println("|---|---|---|---|---|---|---|")
	for _, x := range []struct {
		name string
		all  []served
	}{{"the nine alone", alone}, {"first come, first served", plain}, {"tenants", fair}} {
		times := first(x.all)
		nine, tenth := refused(x.all)
		fmt.Printf("| %s | %d ms | %d ms | %.2f | %d | %d | %.1f |\n", x.name, percentile(times, .5).Milliseconds(),
			percentile(times, .9).Milliseconds(), float64(percentile(times, .9))/float64(base), nine, tenth,
			throughput(x.all))
	}
	fmt.Printf("\nServed, tenants by first come, first served: %.3f\n", throughput(fair)/throughput(plain))
	return nil
}

// deadlines compares the orders at 1.3 of the capacity, for requests that have two, four or eight seconds.
func (b *bench) deadlines(ctx context.Context) error {
	var all []arrival
	fmt.Print("\n## Deadlines at 1.3 of what the workers serve\n\n")
	fmt.Println("| order | requests | met | late | refused | refusals known after p50 | p99 |")
	fmt.Println("|---|---|---|---|---|---|---|")
	before := 0
	for _, order := range []string{"fcfs", "edf"} {
		err := b.with(ctx, 1, order, func(s *stack.Stack) error {
			if all == nil {
				all = b.arrivals(1.3*b.capacity, func(a *arrival) { a.deadline = 2 * time.Second << b.rng.IntN(3) })
			}
			out, err := b.play(ctx, s, all)
			if err != nil {
				return err
			}
			met, late := 0, 0
			var refused []time.Duration
			for i := range out {
				switch x := &out[i]; {
				case x.status != http.StatusOK:
					refused = append(refused, x.ended-x.at)
				case x.ttft <= x.deadline:
					met++
				default:
					late++
				}
			}
			fmt.Printf("| %s | %d | %d | %d | %d | %.1f ms | %.1f ms |\n", order, len(out), met, late, len(refused),
				1000*percentile(refused, .5).Seconds(), 1000*percentile(refused, .99).Seconds())
			if order == "edf" {
				fmt.Printf("\nMet, edf by fcfs: %.2f\n", float64(met)/float64(max(before, 1)))
			}
			before = met
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}
