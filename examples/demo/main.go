// Command demo is `make run`: it starts kvepp among real programs, holds conversations through them, and prints the
// effect of each decision.
package main

import (
	"cmp"
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
	check := flag.Bool("check", false, "exit after the run; the exit status is 0 if all went well")
	folder := flag.String("pictures", "", "take pictures of kvepp's page into this folder instead, and exit")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := run(ctx, *check, *folder); err != nil && ctx.Err() == nil {
		fmt.Fprintln(os.Stderr, "make run:", err)
		os.Exit(1)
	}
}

const (
	workers       = 4
	conversations = 8
	turns         = 4
)

// run starts the programs, plays the demonstration, and then waits for the end of ctx unless check is set. With a
// folder it takes the pictures instead.
func run(ctx context.Context, check bool, folder string) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	start := time.Now()
	dir, err := os.MkdirTemp("", "kvepp-run-")
	if err != nil {
		return err
	}
	blocks, pages := 0, 0 // the stack's own numbers
	if folder != "" {
		blocks, pages = smallCache, workers
	}
	s, err := stack.Start(ctx, stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS"), Dir: dir, Workers: workers,
		Blocks: blocks, Pages: pages,
		// Each frontend has one worker, so that the two are a stock engine to kvepp, and another can take its requests.
		FrontendMode: "round-robin", Manifest: "stock-engines.yaml", EditEnvoy: withoutInstances,
		KveppFlags: []string{"--engine=vllm", "--fallback-endpoints=2"},
		Progress: func(format string, args ...any) {
			fmt.Printf("%5.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
		}})
	if err != nil {
		return fmt.Errorf("%w\nlogs: %s", err, dir)
	}
	defer func() {
		s.Close()
		os.RemoveAll(dir)
	}()
	if err := warmUp(ctx, s); err != nil {
		return err
	}
	if folder != "" {
		return takePictures(ctx, s, folder)
	}
	routed := throughKvepp(ctx, s)
	rotated := roundRobin(ctx, s)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	printComparison(routed, rotated)
	if err := killOne(ctx, s); err != nil {
		return fmt.Errorf("with a dead worker: %w\nlogs: %s", err, dir)
	}
	if check {
		return verdict(routed, rotated)
	}
	printHints(s, dir)
	<-ctx.Done()
	fmt.Println("\nstopping")
	return nil
}

// withoutInstances makes Envoy remove the headers that name an instance to a frontend in direct mode. No frontend here
// has that mode, and another one would refuse a request that Envoy retries there.
func withoutInstances(config any) {
	routes := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config",
		"route_config").(map[string]any)
	routes["request_headers_to_remove"] = []string{"x-dynamo-worker-instance-id", "x-dynamo-dp-rank",
		"x-worker-instance-id", "x-dp-rank", "x-data-parallel-rank"}
}

// throughKvepp holds the conversations through Envoy and kvepp, and prints each decision.
func throughKvepp(ctx context.Context, s *stack.Stack) *result {
	fmt.Printf(
		"\n%d conversations of %d turns, each about a document of its own, over %d shared system prompts; all at "+
			"once, through\nEnvoy and kvepp:\n\n",
		conversations,
		turns,
		len(systems),
	)
	fmt.Printf(
		"%-9s %6s  %13s  %5s  %s\n",
		"",
		"prompt",
		"cached tokens",
		"first",
		"cost in milliseconds, of each worker (* chosen):",
	)
	fmt.Printf(
		"%-9s %6s  %6s %6s  %5s  %s\n",
		"request",
		"tokens",
		"kvepp",
		"Dynamo",
		"token",
		"the prompt's - cached + prompts before it + what other responses lose = cost",
	)
	return converse(
		ctx,
		s,
		"picked",
		func(int) (string, http.Header, error) { return s.Envoy.URL, nil, nil },
		printRow,
	)
}

// roundRobin holds the same conversations again, and sends each request to the next worker's frontend. One word at the
// front separates their blocks from those of the first run.
func roundRobin(ctx context.Context, s *stack.Stack) *result {
	next := 0
	var mu sync.Mutex // guards next
	return converse(ctx, s, "rotated", func(int) (string, http.Header, error) {
		mu.Lock()
		w := s.Workers[next%len(s.Workers)]
		next++
		mu.Unlock()
		id, err := w.InstanceID(ctx)
		return "http://" + w.Address, http.Header{"X-Dynamo-Worker-Instance-Id": {id}}, err
	}, nil)
}

// printComparison prints the results of both runs as a table.
func printComparison(routed, rotated *result) {
	fmt.Printf("\n%-44s %14s %14s\n", "", "kvepp", "round-robin")
	fmt.Printf("%-44s %14s %14s\n", "requests answered", routed.count(), rotated.count())
	fmt.Printf("%-44s %13.1f%% %13.1f%%\n", "prompt tokens found in the KV cache", routed.hits(), rotated.hits())
	fmt.Printf(
		"%-44s %14d %14d\n",
		"prompt tokens computed",
		routed.prompt-routed.cached,
		rotated.prompt-rotated.cached,
	)
	fmt.Printf(
		"%-44s %14s %14s\n",
		"time to first token, first turns, mean",
		ttft(routed.first, 1),
		ttft(rotated.first, 1),
	)
	fmt.Printf(
		"%-44s %14s %14s\n",
		"time to first token, later turns, mean",
		ttft(routed.later, turns-1),
		ttft(rotated.later, turns-1),
	)
	fmt.Printf("%-44s %14s\n", "kvepp's predictions of cached tokens", routed.accuracy())
	fmt.Println(
		"\nround-robin: the same conversations (but for one word, so that they start cold), sent to the frontends in " +
			"turn,\nwithout Envoy and kvepp. The engines are Dynamo's mocker, which models a GPU's times.",
	)
}

// verdict returns an error if requests failed, or if kvepp found fewer cached tokens than round-robin.
func verdict(routed, rotated *result) error {
	switch {
	case routed.failed+rotated.failed > 0:
		return fmt.Errorf("%d requests failed: %w", routed.failed+rotated.failed, cmp.Or(routed.err, rotated.err))
	case routed.hits() <= rotated.hits():
		return fmt.Errorf(
			"kvepp found %.1f%% of the prompt tokens cached, round-robin %.1f%%",
			routed.hits(),
			rotated.hits(),
		)
	}
	return nil
}

// printHints prints what a user can try while the programs run. dir has their logs.
func printHints(s *stack.Stack, dir string) {
	fmt.Printf("\nAll programs run until Ctrl-C. Try it; the x-kvepp-* headers explain the choice:\n\n")
	fmt.Printf(
		"  curl -i %s/v1/chat/completions -H 'content-type: application/json' -d '{\"model\": \"%s\", "+
			"\"max_tokens\": 8,\n    \"messages\": [{\"role\": \"user\", \"content\": \"%s\"}]}'\n\n",
		s.Envoy.URL,
		stack.Model,
		strings.Repeat("Tell me about KV caches. ", 4),
	)
	fmt.Printf(
		"the page:                %s\nlogs and configurations: %s\nmetrics:                 curl %s\n",
		s.Admin(),
		filepath.Join(dir, "*.log"),
		s.MetricsURL(),
	)
}

// warmUp sends a request to each frontend, so that neither run includes a program's first steps.
func warmUp(ctx context.Context, s *stack.Stack) error {
	for _, w := range s.Workers {
		id, err := w.InstanceID(ctx)
		if err != nil {
			return err
		}
		header := http.Header{"X-Dynamo-Worker-Instance-Id": {id}}
		if _, err := stack.Chat(ctx, http.DefaultClient, "http://"+w.Address, header,
			[]stack.Message{{Role: "user", Content: "Good morning."}}, true, nil); err != nil {
			return err
		}
	}
	_, err := stack.Chat(
		ctx,
		http.DefaultClient,
		s.Envoy.URL,
		nil,
		[]stack.Message{{Role: "user", Content: "Good morning."}},
		true,
		nil,
	)
	return err
}

// result adds up one run of the conversations.
type result struct {
	requests, failed       int
	prompt, cached         int
	predicted, predictable int           // requests with an exact prediction, and with any
	first, later           time.Duration // sums of times to first token: of first turns, of later ones
	err                    error
}

func (r *result) hits() float64 { return 100 * float64(r.cached) / float64(max(r.prompt, 1)) }
func (r *result) count() string { return fmt.Sprintf("%d of %d", r.requests-r.failed, r.requests) }
func (r *result) accuracy() string {
	return fmt.Sprintf("%d of %d exact", r.predicted, r.predictable)
}

// ttft returns the mean over n conversations' turns.
func ttft(sum time.Duration, turns int) string {
	return (sum / time.Duration(conversations*turns)).Round(time.Millisecond).String()
}

// converse holds all conversations at once, each turn after the previous one, and returns the sum. target returns the
// URL for the next request.
func converse(
	ctx context.Context,
	s *stack.Stack,
	run string,
	target func(conversation int) (string, http.Header, error),
	row func(conversation, turn int, a *stack.Response, d *stack.Decision),
) *result {
	var (
		sum  result
		mu   sync.Mutex // guards sum, and the output of rows
		wait sync.WaitGroup
	)
	for c := range conversations {
		wait.Go(func() {
			messages := []stack.Message{{Role: "system", Content: run + ": " + systems[c%len(systems)]}}
			for t := range turns {
				messages = append(messages, stack.Message{Role: "user", Content: question(run, c, t)})
				a, err := ask(ctx, target, c, messages)
				if ctx.Err() != nil {
					return
				}
				var d *stack.Decision
				if row != nil && err == nil {
					d, err = s.Decision(ctx, a.Header.Get("x-kvepp-request-id"))
				}
				mu.Lock()
				sum.requests++
				if err != nil || a.Status != http.StatusOK || a.PromptTokens < 0 {
					sum.failed++
					if err == nil {
						err = fmt.Errorf("status %d: %s", a.Status, a.Body)
					}
					sum.err = err
					fmt.Printf("%d, turn %d: %v\n", c+1, t+1, err)
					mu.Unlock()
					return
				}
				sum.prompt += a.PromptTokens
				sum.cached += max(a.CachedTokens, 0)
				if t == 0 {
					sum.first += a.TTFT
				} else {
					sum.later += a.TTFT
				}
				if a.Reason == "kv" {
					sum.predictable++
					// An engine always computes the block with the prompt's last token.
					if a.CachedTokens == min(a.KveppCached, (a.PromptTokens-1)/stack.BlockSize*stack.BlockSize) {
						sum.predicted++
					}
				}
				if row != nil {
					row(c, t, a, d)
				}
				mu.Unlock()
				messages = append(messages, stack.Message{Role: "assistant", Content: a.Text})
			}
		})
	}
	wait.Wait()
	return &sum
}

func ask(
	ctx context.Context,
	target func(int) (string, http.Header, error),
	c int,
	messages []stack.Message,
) (*stack.Response, error) {
	url, header, err := target(c)
	if err != nil {
		return nil, err
	}
	return stack.Chat(ctx, http.DefaultClient, url, header, messages, true, map[string]any{"max_tokens": 16})
}

// printRow prints a decision and its result as one line.
func printRow(conversation, turn int, a *stack.Response, d *stack.Decision) {
	fmt.Printf(
		"%-9s %6d  %6d %6d  %3dms ",
		fmt.Sprintf("%d, turn %d", conversation+1, turn+1),
		a.PromptTokens,
		a.KveppCached,
		a.CachedTokens,
		a.TTFT.Milliseconds(),
	)
	for _, c := range d.Candidates {
		mark := " "
		if c.Chosen {
			mark = "*"
		}
		of := map[string]float64{}
		for _, p := range c.Parts {
			of[p.Part] = p.Value
		}
		others := max(c.Cost-of["prompt"]-of["cached"]-of["waiting"], 0) // 0: but for rounding
		fmt.Printf(" %s%-18s", mark,
			fmt.Sprintf("%.0f-%.0f+%.0f+%.0f=%.0f", of["prompt"], 0-of["cached"], of["waiting"], others, c.Cost))
	}
	fmt.Println()
}
