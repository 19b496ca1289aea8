// Command quality is `make quality`: it plays the same traffic through kvepp and through Dynamo's own routers, over the
// same mocked workers with small caches, and prints the results: cached prompt tokens, times to first token, and the
// balance of work.
package main

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvepp/test/harness/stack"
)

func main() {
	seeds := flag.Int("seeds", 5, "how many times to play each scenario, each time with other traffic")
	first := flag.Int("first", 1, "the first seed; the others follow it")
	only := flag.String("only", "", "play only the scenario whose name begins with this")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, *first, *seeds, *only); err != nil {
		fmt.Fprintln(os.Stderr, "make quality:", err)
		os.Exit(1)
	}
}

const (
	workers = 4
	blocks  = 1024 // of 16 tokens: a cache that is too small for the traffic
	// speedup slows down the mocked GPUs, so that they determine the times and not this machine's cores. Decoding is
	// slowed down less, so that a run does not take minutes.
	speedup, decodeSpeedup = 0.15, 5
)

// system is a way to route.
type system struct {
	name     string
	frontend string   // Dynamo's router mode; empty: kvepp
	gateway  bool     // an Envoy in front of Dynamo's frontend
	only     string   // the only scenario for it; empty: all
	flags    []string // of kvepp
}

var systems = []system{
	{name: "kvepp"},
	{name: "kvepp, token ids", only: "burst", flags: []string{"--inject-token-data"}},
	{name: "Dynamo kv", frontend: "kv"},
	{name: "Envoy, Dynamo kv", frontend: "kv", gateway: true, only: "burst"},
	{name: "round-robin", frontend: "round-robin"},
	{name: "least-loaded", frontend: "least-loaded", only: "zero reuse"},
}

func run(ctx context.Context, first, seeds int, only string) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	start := time.Now()
	results := map[[2]string][]result{} // scenario, system -> one for each seed
	for seed := first; seed < first+seeds; seed++ {
		for _, sc := range scenarios {
			if !strings.HasPrefix(sc.name, only) {
				continue
			}
			for i := range systems {
				sys := systems[(i+seed)%len(systems)] // the order rotates
				if sys.only != "" && sys.only != sc.name {
					continue
				}
				r, err := play(ctx, root, sys, sc, uint64(seed))
				if err != nil {
					return fmt.Errorf("%s, %s, seed %d: %w", sc.name, sys.name, seed, err)
				}
				results[[2]string{sc.name, sys.name}] = append(results[[2]string{sc.name, sys.name}], r)
				fmt.Printf(
					"%5.0fs  seed %d, %-13s %-17s %s\n",
					time.Since(start).Seconds(),
					seed,
					sc.name,
					sys.name,
					r.line(),
				)
			}
		}
	}
	table(os.Stdout, results, only)
	return nil
}

// play starts one system, so that all begin with empty caches, and plays one scenario through it.
func play(ctx context.Context, root string, sys system, sc scenario, seed uint64) (r result, err error) {
	dir, err := os.MkdirTemp("", "kvepp-quality-")
	if err != nil {
		return r, err
	}
	cfg := stack.Config{
		Root:          root,
		Tools:         os.Getenv("KVEPP_TOOLS"),
		Dir:           dir,
		Workers:       workers,
		Blocks:        blocks,
		Speedup:       speedup,
		DecodeSpeedup: decodeSpeedup,
		Frontend:      sys.frontend,
		Gateway:       sys.gateway,
		Kill:          true,
		KveppFlags:    append([]string{"--log-level", "info"}, sys.flags...),
	}
	if sc.later > 0 {
		cfg.Later = 1
	}
	s, err := stack.Start(ctx, cfg)
	if err != nil {
		return r, fmt.Errorf("%w\nlogs: %s", err, filepath.Join(dir, "*.log"))
	}
	defer func() {
		s.Close()
		os.RemoveAll(dir)
	}()
	if err := warmUp(ctx, s); err != nil {
		return r, err
	}

	sessions := sc.make(newWriter(seed))
	var (
		mu   sync.Mutex // guards r
		wait sync.WaitGroup
	)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}}
	defer client.CloseIdleConnections()
	busy := cpuTime()
	begin := time.Now()
	if sc.later > 0 {
		wait.Go(func() {
			if e := join(ctx, s, sys, sc.later); e != nil {
				mu.Lock()
				r.err = e
				mu.Unlock()
			}
		})
	}
	for i := range sessions {
		wait.Go(func() {
			if sleep(ctx, sessions[i].at-time.Since(begin)) != nil {
				return
			}
			hold(ctx, client, s.URL(), &sessions[i], func(a *stack.Answer, err error) {
				mu.Lock()
				defer mu.Unlock()
				r.add(a, err)
			})
		})
	}
	wait.Wait()
	r.busy = busyPart(busy, cpuTime())
	if ctx.Err() != nil {
		return r, ctx.Err()
	}
	if r.err != nil {
		return r, fmt.Errorf("%d of %d requests failed: %w", r.failed, r.failed+len(r.ttft), r.err)
	}
	return r, nil
}

// join starts the last worker after a time. kvepp gets it when its frontend is ready, as with a pod.
func join(ctx context.Context, s *stack.Stack, sys system, after time.Duration) error {
	if err := sleep(ctx, after); err != nil {
		return err
	}
	w := s.Workers[workers-1]
	if err := w.Restart(); err != nil || sys.frontend != "" {
		return err
	}
	if err := w.Ready(ctx); err != nil {
		return err
	}
	return s.WriteEndpoints(s.Workers...)
}

// hold holds one conversation.
func hold(ctx context.Context, client *http.Client, url string, s *session, done func(*stack.Answer, error)) {
	messages := s.messages()
	for _, t := range s.turns {
		if sleep(ctx, t.think) != nil {
			return
		}
		messages = append(messages, stack.Message{Role: "user", Content: t.text})
		a, err := stack.Chat(
			ctx,
			client,
			url,
			nil,
			messages,
			true,
			map[string]any{"max_tokens": t.output, "ignore_eos": true,
				"nvext": map[string]any{"extra_fields": []string{"worker_id"}}},
		)
		if err == nil && (a.Status != http.StatusOK || !a.Finished || a.PromptTokens < 0) {
			err = fmt.Errorf("status %d: %.300s", a.Status, a.Body)
		}
		done(a, err)
		if err != nil {
			return
		}
		messages = append(messages, stack.Message{Role: "assistant", Content: a.Text})
	}
}

// warmUp sends short requests until each worker has served one, so that no system pays for a program's first steps.
func warmUp(ctx context.Context, s *stack.Stack) error {
	for i := range 4 * workers {
		a, err := stack.Chat(
			ctx,
			http.DefaultClient,
			s.URL(),
			nil,
			[]stack.Message{{Role: "user", Content: fmt.Sprintf("Good morning, worker %d.", i)}},
			true,
			nil,
		)
		if err != nil {
			return err
		}
		if a.Status != http.StatusOK {
			return fmt.Errorf("the first request: status %d: %s", a.Status, a.Body)
		}
	}
	return nil
}

// sleep waits unless ctx ends.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
