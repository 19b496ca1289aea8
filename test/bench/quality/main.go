// Command quality is `make quality`: it plays the same traffic through kvepp and through Dynamo's own routers, over the
// same mocked workers, and compares what clients saw: cached prompt tokens, times, requests within an SLO.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"kvepp/test/harness/stack"
)

func main() {
	var o options
	flag.IntVar(&o.seeds, "seeds", 5, "how many times to play each scenario, each time with other traffic")
	flag.IntVar(&o.first, "first", 1, "the first seed; the others follow it")
	flag.StringVar(&o.only, "only", "", "play only scenarios whose names begin with one of these, with commas between")
	flag.StringVar(&o.routers, "routers", "", "play only these routers, with commas between; all: also those of one "+
		"scenario")
	flag.StringVar(&o.out, "out", "", "folder for runs.jsonl, to which runs are added, and for quality.md and "+
		"quality.svg, the tables and a chart of all runs there")
	replicas := flag.Int("replicas", 0, "play only one kvepp, so `MANY` behind an Envoy that spreads requests evenly, "+
		"and as many that share nothing; print what sharing keeps of one kvepp's routing")
	flag.StringVar(&o.charts, "charts", "bin/bench", "folder for quality.svg without -out")
	table := flag.Bool("table", false, "play nothing: print the table of the runs in -out")
	flag.StringVar(&o.peer, "peer", "", "also play another `PICKER`: llm-d or gaie (the Gateway API's)")
	flag.StringVar(&o.program, "program", "", "`FILE` of its program")
	flag.StringVar(&o.kube, "kube", "", "`FOLDER` with kube-apiserver and etcd, for gaie")
	replay := flag.Bool("replay", false, "play nothing: replay the traces of the runs in -out by kvepp replay, and "+
		"print what it predicts beside what clients measured")
	plan := flag.Bool("plan", false, "play nothing: write the traces that the scenarios would send, with estimated "+
		"numbers of tokens, to -out, and print their names and the flags with which kvepp replay models the workers")
	flag.BoolVar(&o.predict, "predict", false, "play "+incumbent+", or with -peer=gaie that picker, with kvepp serve "+
		"--shadow beside it, then "+switched+" with the same traffic, and compare what kvepp replay predicts from the "+
		"first recording with the second; needs -out")
	flag.Parse()
	several := replicated(cmp.Or(*replicas, 4))
	systems = append(systems, several...)
	if *replicas > 0 && o.routers == "" {
		o.routers = single + "," + several[0].name + "," + several[1].name
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	err := cmp.Or(o.checkPeer(), o.check(flag.Args()))
	switch {
	case err != nil:
	case (*replay || *plan || o.predict) && o.out == "":
		err = errors.New("-replay, -plan and -predict need -out")
	case o.predict:
		err = o.predictAll(ctx, os.Stdout)
	case *replay:
		err = o.compareWithReplay(ctx, os.Stdout)
	case *plan:
		err = o.plan(os.Stdout)
	default:
		if !*table {
			err = o.play(ctx)
		}
		if err == nil {
			err = o.report(os.Stdout)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "make quality:", err)
		os.Exit(1)
	}
}

// options are the flags.
type options struct {
	first, seeds       int
	only, routers, out string
	predict            bool
	charts             string // the folder for the chart without out
	peer, program      string // another picker, and its program
	kube               string // Kubernetes' programs, for it
	runs               []run  // without out
}

const (
	// speedup slows down the mocked GPUs, so that they determine the times and not this machine's cores. Decoding is
	// slowed down less, so that a run does not take minutes.
	speedup, decodeSpeedup = 0.15, 7
	// sloTTFT and sloGap are the times within which a request counts for goodput: to the first token, and the mean gap
	// between later ones.
	sloTTFT, sloGap = 1000.0, 50.0 // ms
)

// system is a way to route.
type system struct {
	name     string
	frontend string   // Dynamo's router mode; empty: kvepp
	gateway  bool     // an Envoy in front of Dynamo's frontend
	only     string   // the only scenario for it; empty: all
	extra    bool     // plays only if it is named, or with all
	replicas int      // kvepps behind one Envoy; 0: 1
	unshared bool     // these share nothing
	flags    []string // of kvepp
	peer     string   // a configuration of the peer, which plays in kvepp's place
	shadow   bool     // kvepp serve --shadow beside the peer or, without one, beside Envoy's round robin
}

// baseline is the system that the others are compared with.
const baseline = "Dynamo kv"

// tokenIDs makes kvepp send its token ids, as Dynamo's own endpoint picker does, so that Dynamo's frontends need not
// tokenize again.
const tokenIDs = "--inject-token-data"

var systems = []system{
	{name: baseline, frontend: "kv"},
	{name: "kvepp time", flags: []string{"--router-policy=time", tokenIDs}},
	{name: "kvepp admission", only: "overload", flags: []string{"--router-policy=time", tokenIDs,
		"--router-admission=working-set", "--router-queue-timeout=4s"}},
	{name: "kvepp dynamo", extra: true, flags: []string{"--router-policy=dynamo", tokenIDs}},
	{name: "round-robin", frontend: "round-robin", extra: true},
	{name: "kvepp text", extra: true, flags: []string{"--router-policy=time"}},
	{name: "Envoy, Dynamo kv", frontend: "kv", gateway: true, only: "burst", extra: true},
	{name: incumbent, extra: true, shadow: true, flags: shadowFlags},
	{name: "least-loaded", frontend: "least-loaded", only: "zero reuse", extra: true},
}

// incumbent is the system whose recording, by kvepp in shadow, predicts what switched would do. Frontends treat
// requests alike in both.
const incumbent, switched = "shadow round-robin", "kvepp text"

var shadowFlags = []string{"--shadow", "--router-policy=time"}

// single is the system that several replicas are compared with.
const single = "kvepp time"

// replicated returns the systems of n kvepps behind one Envoy.
func replicated(n int) []system {
	name := fmt.Sprintf("%s %d replicas", single, n)
	flags := []string{"--router-policy=time", tokenIDs}
	return []system{{name: name, extra: true, replicas: n, flags: flags},
		{name: name + " unshared", extra: true, replicas: n, unshared: true, flags: flags}}
}

func (o *options) check(args []string) error {
	if len(args) > 0 || o.seeds < 1 || o.first < 0 {
		return fmt.Errorf("arguments %q, %d seeds from %d: run it as quality [-seeds N] [-first N] [-only NAMES]", args,
			o.seeds, o.first)
	}
	for name := range strings.SplitSeq(o.only, ",") {
		if !slices.ContainsFunc(scenarios, func(sc scenario) bool { return strings.HasPrefix(sc.name, name) }) {
			return fmt.Errorf("-only %q: no scenario's name begins so", name)
		}
	}
	for name := range strings.SplitSeq(o.routers, ",") {
		if name != "" && name != "all" && !slices.ContainsFunc(systems, func(s system) bool { return s.name == name }) {
			return fmt.Errorf("-routers %q: not known", name)
		}
	}
	return nil
}

// named reports whether a scenario is to be played.
func (o *options) named(sc *scenario) bool {
	return slices.ContainsFunc(strings.Split(o.only, ","), func(name string) bool {
		return strings.HasPrefix(sc.name, name)
	})
}

func (o *options) plays(sys *system, sc *scenario) bool {
	if !o.named(sc) || sys.only != "" && sys.only != sc.name || sys.peer != "" && sc.later > 0 {
		return false
	}
	switch o.routers {
	case "all":
		return true
	case "":
		return !sys.extra
	}
	return slices.Contains(strings.Split(o.routers, ","), sys.name)
}

// playing returns the systems that play a scenario.
func (o *options) playing(sc *scenario) (playing []*system) {
	for i := range systems {
		if o.plays(&systems[i], sc) {
			playing = append(playing, &systems[i])
		}
	}
	return playing
}

// play plays all scenarios for each seed.
func (o *options) play(ctx context.Context) error {
	root, err := os.Getwd()
	if err != nil {
		return err
	}
	start := time.Now()
	for seed := o.first; seed < o.first+o.seeds; seed++ {
		for n := range scenarios {
			sc := &scenarios[n]
			playing := o.playing(sc)
			for i := range playing {
				sys := playing[(i+seed)%len(playing)] // the order rotates
				r, err := o.playOnce(ctx, root, sys, sc, uint64(seed))
				if err != nil {
					return fmt.Errorf("%s, %s, seed %d: %w", sc.name, sys.name, seed, err)
				}
				if err := o.keep(*r); err != nil {
					return err
				}
				fmt.Printf("%5.0fs  seed %d, %-12s %-30s %s\n", time.Since(start).Seconds(), seed, sc.name, sys.name,
					r.line())
			}
		}
	}
	return nil
}

// playOnce starts one system, so that all begin with empty caches, and plays one scenario through it. The trace of what
// it sent goes to the folder.
func (o *options) playOnce(
	ctx context.Context, root string, sys *system, sc *scenario, seed uint64,
) (*run, error) {
	dir, err := os.MkdirTemp("", "kvepp-quality-")
	if err != nil {
		return nil, err
	}
	e := sc.engines()
	cfg := stack.Config{
		Root:          root,
		Tools:         os.Getenv("KVEPP_TOOLS"),
		Dir:           dir,
		Workers:       e.workers,
		Blocks:        e.blocks,
		Speedup:       e.speedup,
		Speeds:        sc.speeds,
		DecodeSpeedup: e.decode,
		Frontend:      sys.frontend,
		Gateway:       sys.gateway,
		Replicas:      sys.replicas,
		Unshared:      sys.unshared,
		Kill:          true,
		KveppFlags:    append([]string{"--log-level", "info"}, sys.flags...),
	}
	if sc.later > 0 {
		cfg.Later = 1
	}
	recording := filepath.Join(dir, "recording.jsonl")
	if o.predict {
		cfg.KveppFlags = append(cfg.KveppFlags, "--record="+recording)
	}
	var other *peer
	if sys.peer != "" {
		other = &peer{kind: sys.peer, program: o.program, kube: o.kube, blocks: e.blocks}
		cfg.Picker, cfg.FrontendMode = other.start, "round-robin"
		defer other.stop()
	}
	if sys.shadow {
		shadowed(&cfg)
	}
	s, err := stack.Start(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("%w\nlogs: %s", err, filepath.Join(dir, "*.log"))
	}
	defer func() {
		s.Close()
		os.RemoveAll(dir)
	}()
	if sys.shadow {
		if err := s.Settled(ctx, e.workers); err != nil {
			return nil, err
		}
	}
	p := player{stack: s, scenario: sc, systems: map[string]bool{}, contexts: map[*session]int{},
		client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256}},
		run: run{Scenario: sc.name, Router: sys.name, Seed: seed, Workers: cfg.Workers,
			Capacity: cfg.Workers * cfg.Blocks * stack.BlockSize}}
	defer p.client.CloseIdleConnections()
	if err := p.warmUp(ctx); err != nil {
		return nil, err
	}
	picker := 0
	switch {
	case other != nil:
		if err := other.check(ctx, p.run.Floor); err != nil {
			return nil, err
		}
		picker = other.process.Pid()
	case sys.frontend == "" && sys.replicas == 0:
		picker = s.KveppPID()
	}
	before, used, begin := cpuTime(), ticksOf(picker), time.Now()
	if err := p.playAll(ctx, sys, sc.make(newWriter(seed))); err != nil {
		return nil, err
	}
	if other == nil {
		if err := evenly(ctx, s, sys); err != nil {
			return nil, err
		}
	}
	p.run.Busy, p.run.Own = busyShares(before, cpuTime())
	p.run.Picker = (ticksOf(picker) - used) / ticksPerSecond
	if o.predict {
		if err := o.keepRecording(ctx, recording, &p.run, begin); err != nil {
			return nil, err
		}
	}
	if o.out != "" {
		if err := p.recorder.write(o.out, p.run.traceFile()); err != nil {
			return nil, err
		}
	}
	return &p.run, ctx.Err()
}

// evenly returns an error if a replica had less than half of its share of the requests, or heard of too few of those of
// the others: then the run does not show what it is for.
func evenly(ctx context.Context, s *stack.Stack, sys *system) error {
	own, copied, err := s.Decided(ctx)
	if err != nil {
		return err
	}
	all := 0
	for _, n := range own {
		all += n
	}
	for i, n := range own {
		if 2*n*len(own) < all {
			return fmt.Errorf("unequal numbers of requests reached the replicas: %v", own)
		}
		if !sys.unshared && 2*copied[i] < all-n || sys.unshared && copied[i] > 0 {
			return fmt.Errorf("the replicas routed %v requests, but heard of %v from the others", own, copied)
		}
	}
	return nil
}

// player plays one scenario through one system.
type player struct {
	stack    *stack.Stack
	scenario *scenario
	client   *http.Client

	mu       sync.Mutex // guards the rest
	run      run
	recorder recorder
	failed   error            // why the first request failed
	systems  map[string]bool  // system prompts that were sent
	contexts map[*session]int // tokens of the conversations that are being held
	held     int              // their sum
}

// playAll holds all conversations.
func (p *player) playAll(ctx context.Context, sys *system, sessions []session) error {
	var wait sync.WaitGroup
	begin := time.Now()
	var joined error
	if p.scenario.later > 0 {
		wait.Go(func() { joined = join(ctx, p.stack, sys, p.scenario.later) })
	}
	for i := range sessions {
		wait.Go(func() {
			if sleep(ctx, sessions[i].at-time.Since(begin)) == nil {
				p.hold(ctx, &sessions[i], i, strconv.Itoa(i), nil)
			}
		})
	}
	wait.Wait()
	if joined != nil {
		return joined
	}
	n := p.run.failures()
	if n > 0 && !p.scenario.refusals || n > len(p.run.Samples)/2 {
		return fmt.Errorf("%d of %d requests failed: %w", n, len(p.run.Samples), p.failed)
	}
	return nil
}

// join starts the last worker after a time. kvepp gets it when its frontend is ready, as with a pod.
func join(ctx context.Context, s *stack.Stack, sys *system, after time.Duration) error {
	if err := sleep(ctx, after); err != nil {
		return err
	}
	w := s.Workers[len(s.Workers)-1]
	if err := w.Restart(); err != nil || sys.frontend != "" {
		return err
	}
	if err := w.Ready(ctx); err != nil {
		return err
	}
	return s.WriteEndpoints(s.Workers...)
}

// hold holds one conversation, and those of its subagents. All count as conversation n. name and after are those of its
// first request in the trace. hold returns the name of its last one; empty: a request failed.
func (p *player) hold(ctx context.Context, s *session, n int, name string, after []dependency) (last string) {
	messages := s.messages()
	known := 0       // tokens of the conversation so far
	var blocks []int // full blocks of the prompt before
	defer func() { p.grow(s, 0) }()
	for i, t := range s.turns {
		if i > 0 {
			after = []dependency{{last, "completion", ms(t.think)}}
		}
		if sleep(ctx, t.think) != nil {
			return ""
		}
		if len(t.subagents) > 0 {
			if after = p.delegate(ctx, t.subagents, n, turnOf(name, i), after); after == nil {
				return ""
			}
		}
		messages = append(messages, stack.Message{Role: "user", Content: t.text})
		repeated := i == 0 && p.repeats(s.system)
		a, err := stack.Chat(ctx, p.client, p.stack.URL(), nil, messages, true, map[string]any{"max_tokens": t.output,
			"ignore_eos": true, "nvext": map[string]any{"extra_fields": []string{"worker_id"}}})
		if err == nil && (a.Status != http.StatusOK || !a.Finished || a.PromptTokens < 0) {
			err = fmt.Errorf("status %d: %.300s", a.Status, a.Body)
		}
		shared := 0 // tokens of the system prompt
		if i == 0 && err == nil && s.system != "" {
			shared = a.PromptTokens * len(s.system) / (len(s.system) + len(t.text))
		}
		if repeated {
			known = shared
		}
		p.add(n, a, err, known)
		if err != nil {
			return ""
		}
		last = turnOf(name, i)
		blocks = p.record(s, last, after, blocks, shared, a)
		known = a.PromptTokens // the mockers' responses are random tokens, whose text has other tokens
		p.grow(s, a.PromptTokens+a.CompletionTokens)
		messages = append(messages, stack.Message{Role: "assistant", Content: a.Text})
	}
	return last
}

// delegate holds the conversations of subagents at the same time. It returns what the next turn of their conversation
// waits for; nil: a request failed.
func (p *player) delegate(ctx context.Context, all []session, n int, name string, after []dependency) []dependency {
	last := make([]dependency, len(all))
	var wait sync.WaitGroup
	for j := range all {
		wait.Go(func() {
			last[j] = dependency{p.hold(ctx, &all[j], n, turnOf(name, j), after), "completion", 0}
		})
	}
	wait.Wait()
	if slices.ContainsFunc(last, func(d dependency) bool { return d.RequestID == "" }) {
		return nil
	}
	return last
}

// record adds a request to the trace, and returns the full blocks of its prompt. blocks are those of the prompt before;
// of a first prompt, shared tokens are the system prompt's.
func (p *player) record(
	s *session, name string, after []dependency, blocks []int, shared int, a *stack.Response,
) []int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if shared > 0 {
		blocks = p.recorder.system(s.system, shared)
	}
	return p.recorder.add(name, s.at, after, blocks, a.PromptTokens, a.CompletionTokens)
}

// repeats reports whether a system prompt was sent before, and notes that it was.
func (p *player) repeats(system string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := p.systems[system]
	p.systems[system] = system != ""
	return before
}

// grow notes how many tokens a conversation has; 0: it ended.
func (p *player) grow(s *session, tokens int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held += tokens - p.contexts[s]
	p.contexts[s] = tokens
	p.run.WorkingSet = max(p.run.WorkingSet, p.held)
}

// add adds a request. known is how many tokens of its prompt were in earlier prompts.
func (p *player) add(conversation int, a *stack.Response, err error, known int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	x := sample{Conversation: conversation, Failed: err != nil}
	if err != nil {
		p.failed = cmp.Or(p.failed, err)
		p.run.Samples = append(p.run.Samples, x)
		return
	}
	x.Prompt, x.Cached, x.Output = a.PromptTokens, max(a.CachedTokens, 0), a.CompletionTokens
	x.Possible = min(known, x.Prompt-1) / stack.BlockSize * stack.BlockSize
	x.TTFT, x.EndToEnd, x.Worker = ms(a.TTFT), ms(a.LastToken), a.UpstreamWorker
	if x.Output > 1 {
		x.Gap = (x.EndToEnd - x.TTFT) / float64(x.Output-1)
	}
	p.run.Samples = append(p.run.Samples, x)
}

// floorTokens is the length of the prompt that measures the floor, and floorTries how often it is sent.
const floorTokens, floorTries = 1500, 12

// warmUp sends short requests until each worker has served one, so that no system pays for a program's first steps.
// Then it measures the floor: the time to first token of a cached prompt on idle workers.
func (p *player) warmUp(ctx context.Context) error {
	send := func(text string) (*stack.Response, error) {
		messages := []stack.Message{{Role: "user", Content: text}}
		a, err := stack.Chat(ctx, p.client, p.stack.URL(), nil, messages, true, nil)
		if err == nil && a.Status != http.StatusOK {
			err = fmt.Errorf("the first request: status %d: %s", a.Status, a.Body)
		}
		return a, err
	}
	for i := range 4 * p.run.Workers {
		if _, err := send(fmt.Sprintf("Good morning, worker %d.", i)); err != nil {
			return err
		}
	}
	text := newWriter(0).text(floorTokens)
	var cached []float64
	for range floorTries {
		a, err := send(text)
		if err != nil {
			return err
		}
		if a.PromptTokens-a.CachedTokens <= 2*stack.BlockSize {
			cached = append(cached, ms(a.TTFT))
		}
	}
	p.run.Floor = percentile(cached, 0.5)
	return nil
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

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
