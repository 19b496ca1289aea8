package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/boundedfile"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/serve/api"
	"kvepp/serve/check"
	"kvepp/serve/secrets"
	"kvepp/zmqsub"
)

const checkHelp = `kvepp check tests everything that routing depends on, once, and prints each problem and its fix. For
each worker it tests address, HTTP, KV events, replay socket, block size, ranks, Dynamo's instance
id and prefix caching, and compares kvepp's token ids of a text and of a chat with the engine's. It
also asks other replicas (--replica-peers, --replica-service) whether they would share their load.

Usage:       kvepp check [the flags of kvepp serve] [flags]
Example:     kvepp check --endpoints endpoints.yaml --model qwen=/models/qwen --probe
Exit status: 0 if nothing is wrong, 1 if something is, 2 if kvepp check could not run
All flags:   kvepp check --help-all
`

// checkOptions are the settings of `kvepp check`.
type checkOptions struct {
	options
	probe, json   bool
	conversations int
	gateway       gatewayOptions
	wait          time.Duration
}

// checksAtOnce is how many workers are checked at the same time.
const checksAtOnce = 32

// maxConversations bounds the memory of conversations.
const maxConversations = 10_000

// checkFlags declares the flags of `kvepp check`: those of `kvepp serve`, and its own.
func checkFlags(c *checkOptions) *pflag.FlagSet {
	f := serveFlags(&c.options)
	f.Init("kvepp check", pflag.ContinueOnError)
	c.addOwnFlags(f)
	return f
}

// addOwnFlags declares the flags that only `kvepp check` has.
func (c *checkOptions) addOwnFlags(f *pflag.FlagSet) {
	f.BoolVar(
		&c.probe,
		"probe",
		false,
		"send each worker two short chats with the same prefix, so that it has KV events to send and cached tokens to "+
			"report",
	)
	f.IntVar(
		&c.conversations,
		"conversations",
		0,
		"hold `N` conversations of five turns, spread over the workers, and compare for each worker the cached tokens "+
			"that kvepp predicts with those that the engine reports. The engines must report them (vLLM: "+
			"--enable-prompt-tokens-details)",
	)
	c.gateway.add(f)
	f.BoolVar(
		&c.json,
		"json",
		false,
		"print a JSON object for each finding: worker, about, state (ok, wrong or unknown), says, fix",
	)
	f.DurationVar(&c.wait, "wait", 10*time.Second, "how long to wait for endpoints, and for each of their answers")
	section(f, sectionCheck)
}

// checkWorkers is `kvepp check`. It returns the exit status.
func checkWorkers(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var c checkOptions
	err := parseWith(&c.options, checkFlags(&c), args, getenv)
	switch {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, checkFlags(new(checkOptions)), err)
		return 0
	case err == nil && c.wait <= 0:
		err = fmt.Errorf("--wait %v: must be above 0, such as 10s", c.wait)
	case err == nil && (c.conversations < 0 || c.conversations > maxConversations):
		err = fmt.Errorf("--conversations %d: must be from 0 to %d", c.conversations, maxConversations)
	case err == nil:
		err = c.gateway.check()
	}
	if err == nil && c.printsConfig(stdout) {
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp check: %v\n\"kvepp check --help-all\" lists the flags.\n", err)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	findings, err := c.checkAll(ctx, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "kvepp check: %v\n", err)
		return 2
	}
	if c.json {
		lines := json.NewEncoder(stdout)
		for i := range findings {
			if err := lines.Encode(&findings[i]); err != nil {
				return 2
			}
		}
	} else if err := printFindings(stdout, findings); err != nil {
		return 2
	}
	if slices.ContainsFunc(findings, func(f check.Finding) bool { return f.State == check.Wrong }) {
		return 1
	}
	return 0
}

// checkAll finds the endpoints as `kvepp serve` does, and checks each of their workers.
func (c *checkOptions) checkAll(ctx context.Context, stderr io.Writer) ([]check.Finding, error) {
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	m := metrics.New()
	models := loadModels(&c.options, log)
	gateway, err := c.gatewayToCheck()
	if err != nil {
		return nil, err
	}
	endpoints, ready := pool.New(quiet), newReadiness()
	c.kube.LeaderElection = false // any replica can be checked
	cluster, err := openCluster(&c.options, ready, m, log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	predictor, events, err := c.predictor(endpoints, models, m)
	if err != nil {
		return nil, err
	}
	if events != nil {
		defer events.Close()
	}
	unfollow, err := follow(ctx, &c.options, cluster, ready, endpoints, models, nil, m, log)
	if err != nil {
		return nil, err
	}
	defer unfollow()
	workers, release, err := c.awaitEndpoints(ctx, cluster, endpoints)
	if err != nil {
		return nil, err
	}
	defer release()
	hostNames, err := c.endpointsWithHostNames()
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for name, e := range hostNames {
		names[name] = e.Address
	}
	if events != nil {
		predictor.Listening = c.listening(ctx, events)
	}
	hub, err := zmqsub.NewHub()
	if err != nil {
		return nil, err
	}
	defer hub.Close()
	cfg := check.Config{
		Hub:           hub,
		HTTP:          &http.Client{Transport: &http.Transport{Proxy: nil}},
		Models:        models,
		Names:         names,
		Engine:        c.config.engine.Engine,
		WithoutEvents: !c.kvEvents,
		EngineHashes:  c.feed.EngineHashes,
		Probe:         c.probe,
		Predictor:     predictor,
		Wait:          c.wait,
		Metrics:       m,
		Log:           quiet,
	}
	asked := runWorkerChecks(ctx, &cfg, workers, stderr)
	throughGateway := c.runGatewayChecks(ctx, &cfg, gateway, asked, stderr)
	var findings []check.Finding
	for _, a := range asked { // askGateway may have changed them
		findings = append(findings, a.Findings...)
	}
	sharing := c.replicaFindings(ctx, cluster, log)
	return slices.Concat(findings, unresolved(hostNames, workers), sharing, throughGateway), ctx.Err()
}

// runWorkerChecks checks the workers, checksAtOnce at the same time.
func runWorkerChecks(ctx context.Context, cfg *check.Config, workers []pool.Worker, stderr io.Writer) []*check.Result {
	asked := make([]*check.Result, len(workers))
	var (
		asking sync.WaitGroup
		slots  = make(chan struct{}, checksAtOnce)
	)
	for i := range workers {
		slots <- struct{}{}
		fmt.Fprintf(stderr, "\rasking %d of %d workers ", i+1, len(workers))
		asking.Go(func() {
			defer func() { <-slots }()
			asked[i] = check.Worker(ctx, cfg, &workers[i])
		})
	}
	asking.Wait()
	fmt.Fprintln(stderr)
	return asked
}

// runGatewayChecks sends chats through the gateway, and holds conversations, if the flags ask for them.
func (c *checkOptions) runGatewayChecks(
	ctx context.Context,
	cfg *check.Config,
	gateway *check.Gateway,
	asked []*check.Result,
	stderr io.Writer,
) (findings []check.Finding) {
	if c.gateway.url != "" && ctx.Err() == nil {
		findings = append(findings, check.CheckGateway(ctx, cfg, gateway, asked, func(done, all int) {
			fmt.Fprintf(stderr, "\rgateway: endpoint %d of %d ", done, all)
		})...)
		fmt.Fprintln(stderr)
	}
	if c.conversations > 0 && ctx.Err() == nil {
		findings = append(findings, check.Conversations(ctx, cfg, asked, c.conversations, func(done, all int) {
			fmt.Fprintf(stderr, "\rconversations: %d of %d requests ", done, all)
		})...)
		fmt.Fprintln(stderr)
	}
	return findings
}

// endpointsWithHostNames returns the endpoints of the file whose addresses are host names, by name.
func (c *checkOptions) endpointsWithHostNames() (map[string]pool.Endpoint, error) {
	named := map[string]pool.Endpoint{}
	if c.endpoints == "" {
		return named, nil
	}
	text, err := boundedfile.Read(c.endpoints, pool.MaxFile)
	if err != nil {
		return nil, err
	}
	entries, err := pool.ParseFile(text)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		host, _, err := net.SplitHostPort(e.Address)
		if _, notIP := netip.ParseAddr(host); err == nil && notIP != nil {
			named[e.Name] = e.Endpoint
		}
	}
	return named, nil
}

// unresolved returns findings about the endpoints with host names that are not among the workers.
func unresolved(named map[string]pool.Endpoint, workers []pool.Worker) (findings []check.Finding) {
	for _, name := range slices.Sorted(maps.Keys(named)) {
		e := named[name]
		if !slices.ContainsFunc(workers, func(w pool.Worker) bool { return w.Name == name }) {
			findings = append(findings, check.Unresolved(&e))
		}
	}
	return findings
}

// quiet discards log lines of components whose results are findings.
var quiet = slog.New(slog.DiscardHandler)

// predictor returns a predictor of the cached tokens of p's workers, and the feed of their KV events. The feed is nil
// if kvepp check sends no prompts.
func (c *checkOptions) predictor(
	p *pool.Pool,
	models map[string]*prompt.Model,
	m *metrics.Metrics,
) (*check.Predictor, *feed.Feed, error) {
	index, err := indexer.New(c.index(debug.SetMemoryLimit(-1)))
	if err != nil {
		return nil, nil, err
	}
	predictor := &check.Predictor{Pool: p, Index: index}
	if !c.sendsPrompts() || !c.wantsEvents() {
		return predictor, nil, nil
	}
	c.indexPeers = nil // the check is about the engines' own events, not about another kvepp's index
	events, err := subscribe(&c.options, p, index, router.NewAdapters(nil), models, m, quiet)
	if err != nil {
		return nil, nil, err
	}
	p.Watch(events)
	predictor.Events = true
	return predictor, events, nil
}

// listening returns a channel that is closed when kvepp is connected to all workers' KV events, or --wait has passed.
func (c *checkOptions) listening(ctx context.Context, events *feed.Feed) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		within, cancel := context.WithTimeout(ctx, c.wait)
		defer cancel()
		for {
			if _, connecting := events.Subscriptions(); connecting == 0 {
				return
			}
			select {
			case <-within.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return done
}

// sends reports whether kvepp check sends prompts to the engines.
func (c *checkOptions) sendsPrompts() bool {
	return c.probe || c.conversations > 0 || c.gateway.url != ""
}

// awaitEndpoints waits until there are endpoints, and their number has not changed for half a second.
func (c *checkOptions) awaitEndpoints(
	ctx context.Context,
	cluster *kube.Cluster,
	p *pool.Pool,
) ([]pool.Worker, func(), error) {
	const stable, interval = 500 * time.Millisecond, 50 * time.Millisecond
	within, cancel := context.WithTimeout(ctx, c.wait)
	defer cancel()
	cluster.Await(within)
	for last, since := -1, time.Now(); ; {
		s := p.Acquire()
		if n := len(s.Workers); n != last {
			last, since = n, time.Now()
		}
		if last > 0 && time.Since(since) >= stable {
			return s.Workers, s.Release, nil
		}
		s.Release()
		select {
		case <-within.Done():
			return nil, nil, fmt.Errorf(
				"no endpoints after %v; look at the endpoints file, the pool's selector, or Dynamo's discovery",
				c.wait,
			)
		case <-time.After(interval):
		}
	}
}

// printFindings prints findings as a table, and those about conversations as a second one.
func printFindings(to io.Writer, findings []check.Finding) error {
	t := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WORKER\tABOUT\tSTATE\tWHAT IT SAYS")
	last, conversations := "", false
	for _, f := range findings {
		if f.Tally != nil {
			conversations = true
			continue
		}
		worker := f.Worker
		if worker == last {
			worker = ""
		}
		last = f.Worker
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", worker, f.About, f.State, f.Says)
		if f.Fix != "" && f.State != check.OK {
			fmt.Fprintf(t, "\t\t\t-> %s\n", f.Fix)
		}
	}
	if err := t.Flush(); err != nil || !conversations {
		return err
	}
	fmt.Fprintln(to)
	t.Init(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(
		t,
		"CONVERSATIONS\tREQUESTS\tPROMPT TOKENS\tPREDICTED CACHED\tREPORTED CACHED\tEXACT\tSTATE\tWHAT IT SAYS",
	)
	for _, f := range findings {
		x := f.Tally
		if x == nil {
			continue
		}
		bound, exact := "", "-"
		if x.UpperBound {
			bound = " at most"
		}
		if x.Requests > 0 {
			exact = fmt.Sprintf("%.1f %%", 100*float64(x.Exact)/float64(x.Requests))
		}
		fmt.Fprintf(
			t,
			"%s\t%d\t%d\t%d%s\t%d\t%s\t%s\t%s\n",
			f.Worker,
			x.Requests,
			x.PromptTokens,
			x.Predicted,
			bound,
			x.Reported,
			exact,
			f.State,
			f.Says,
		)
		if f.Fix != "" {
			fmt.Fprintf(t, "\t\t\t\t\t\t\t-> %s\n", f.Fix)
		}
	}
	return t.Flush()
}

// gatewayOptions are the flags of `kvepp check` about the gateway.
type gatewayOptions struct {
	url, keyFile string
	insecure     bool
	extProc      string
}

func (g *gatewayOptions) add(f *pflag.FlagSet) {
	f.StringVar(
		&g.url,
		"gateway",
		"",
		"`URL` of the gateway, such as http://envoy:10080: send a chat through it for each endpoint, and compare the "+
			"endpoint that kvepp chose with the one that answered. The running kvepp must show its decisions, at "+
			"--admin-address (give it here too, with --admin-token-file) or by --decision-headers",
	)
	f.StringVar(
		&g.keyFile,
		"gateway-api-key-file",
		"",
		"`FILE` with the key that the gateway wants from clients, as \"Authorization: Bearer KEY\"",
	)
	f.BoolVar(&g.insecure, "gateway-insecure-skip-verify", false, "do not verify the certificate of an https --gateway")
	f.StringVar(
		&g.extProc,
		"ext-proc-address",
		"",
		"`HOST:PORT` at which the gateway reaches kvepp. Empty: --bind-address, or this machine, and --grpc-port",
	)
}

func (g *gatewayOptions) check() error {
	if g.url == "" {
		for flag, given := range map[string]bool{"gateway-api-key-file": g.keyFile != "",
			"gateway-insecure-skip-verify": g.insecure, "ext-proc-address": g.extProc != ""} {
			if given {
				return fmt.Errorf("--%s acts with --gateway only; give --gateway URL too", flag)
			}
		}
		return nil
	}
	u, err := url.Parse(g.url)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return fmt.Errorf("--gateway %q: must be a URL such as http://envoy:10080", g.url)
	}
	if g.extProc != "" {
		if err := pool.CheckHostPort(g.extProc); err != nil {
			return fmt.Errorf("--ext-proc-address: %w", err)
		}
	}
	return nil
}

// gatewayToCheck returns the addresses and tokens of the gateway and of the running kvepp.
func (c *checkOptions) gatewayToCheck() (*check.Gateway, error) {
	key, err := secrets.ReadToken("--gateway-api-key-file", c.gateway.keyFile)
	if err != nil {
		return nil, err
	}
	admin, err := secrets.ReadToken("--admin-token-file", c.adminTokenFile)
	if err != nil {
		return nil, err
	}
	metrics, err := secrets.ReadToken("--metrics-token-file", c.metricsTokenFile)
	if err != nil {
		return nil, err
	}
	at := func(port uint16) string {
		return api.Dialable(net.JoinHostPort(c.bindAddress, strconv.Itoa(int(port))))
	}
	g := &check.Gateway{
		URL:          c.gateway.url,
		Key:          key,
		ExtProc:      cmp.Or(c.gateway.extProc, at(c.grpcPort)),
		AdminToken:   admin,
		MetricsToken: metrics,
		HTTP: &http.Client{
			Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: c.gateway.insecure}},
		},
	}
	if c.adminAddress != "" {
		g.Admin = "http://" + api.Dialable(c.adminAddress)
	}
	switch {
	case c.metricsAddress != "":
		g.MetricsPage = "http://" + api.Dialable(c.metricsAddress) + "/metrics"
	case c.metricsPort != 0:
		g.MetricsPage = "http://" + at(c.metricsPort) + "/metrics"
	}
	return g, nil
}
