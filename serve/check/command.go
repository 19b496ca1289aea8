package check

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/pool"
)

// Help is the beginning of the command's help.
const Help = `kvepp check tests everything that routing depends on, once, and prints each problem and its fix. For
each worker it tests address, HTTP, KV events, replay socket, block size, ranks, Dynamo's instance
id and prefix caching, and compares kvepp's token ids of a text and of a chat with the engine's. It
also asks other replicas (--replica-peers, --replica-service) whether they would share their load.

Usage:       kvepp check [the flags of kvepp serve] [flags]
Example:     kvepp check --endpoints endpoints.yaml --model qwen=/models/qwen --probe
Exit status: 0 if nothing is wrong, 1 if something is, 2 if kvepp check could not run
All flags:   kvepp check --help-all
`

const (
	AtOnce           = 32     // workers or replicas that are asked at the same time
	maxConversations = 10_000 // they take memory
)

// GatewayFlags are the flags about the gateway.
type GatewayFlags struct {
	URL      string // "": the gateway is not checked
	KeyFile  string
	Insecure bool
	// Protocol tests the gateway's side of the endpoint-picker protocol in place of everything else.
	Protocol bool
	ExtProc  string // HOST:PORT; "": to be found
}

// AddFlags declares the flags that only `kvepp check` has.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.BoolVar(&c.Probe, "probe", false, "send each worker two short chats with the same prefix, so that it has KV "+
		"events to send and cached tokens to report")
	f.IntVar(&c.Conversations, "conversations", 0, "hold `N` conversations of five turns, spread over the workers, "+
		"and compare for each worker the cached tokens that kvepp predicts with those that the engine reports. The "+
		"engines must report them (vLLM: --enable-prompt-tokens-details)")
	g := &c.Gateway
	f.StringVar(&g.URL, "gateway", "", "`URL` of the gateway, such as http://envoy:10080: send a chat through it for "+
		"each endpoint, and compare the endpoint that kvepp chose with the one that answered. The running kvepp must "+
		"show its decisions, at --admin-address (give it here too, with --admin-token-file) or by --decision-headers")
	f.StringVar(&g.KeyFile, "gateway-api-key-file", "",
		"`FILE` with the key that the gateway wants from clients, as \"Authorization: Bearer KEY\"")
	f.BoolVar(&g.Insecure, "gateway-insecure-skip-verify", false, "do not verify the certificate of an https --gateway")
	f.BoolVar(&g.Protocol, "protocol", false, "test only what the gateway does with an endpoint picker: kvepp check "+
		"answers at --ext-proc-address as the picker and at the addresses of --endpoints as the engines: addresses "+
		"of this machine that the gateway knows")
	f.StringVar(&g.ExtProc, "ext-proc-address", "",
		"`HOST:PORT` at which the gateway reaches kvepp. Empty: --bind-address, or this machine, and --grpc-port")
	f.BoolVar(&c.json, "json", false,
		"print a JSON object for each finding: worker, about, state (ok, wrong or unknown), says, fix")
	f.DurationVar(&c.Wait, "wait", 10*time.Second, "how long to wait for endpoints, and for each of their responses")
}

// Validate checks the flags.
func (c *Config) Validate() error {
	if c.Wait <= 0 {
		return fmt.Errorf("--wait %v: must be above 0, such as 10s", c.Wait)
	}
	return errors.Join(flags.Between("conversations", c.Conversations, 0, maxConversations), c.Gateway.validate())
}

func (g *GatewayFlags) validate() error {
	if g.URL == "" {
		for flag, given := range map[string]bool{"gateway-api-key-file": g.KeyFile != "",
			"gateway-insecure-skip-verify": g.Insecure, "ext-proc-address": g.ExtProc != "", "protocol": g.Protocol} {
			if given {
				return fmt.Errorf("--%s acts with --gateway only; give --gateway URL too", flag)
			}
		}
		return nil
	}
	u, err := url.Parse(g.URL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" {
		return fmt.Errorf("--gateway %q: must be a URL such as http://envoy:10080", g.URL)
	}
	if g.ExtProc != "" {
		if err := pool.CheckHostPort(g.ExtProc); err != nil {
			return fmt.Errorf("--ext-proc-address: %w", err)
		}
	}
	return nil
}

// SendsPrompts reports whether the checks send prompts to the engines.
func (c *Config) SendsPrompts() bool { return c.Probe || c.Conversations > 0 || c.Gateway.URL != "" }

// Run checks the workers, sends chats through the gateway, and holds conversations, as far as the flags ask for it. It
// returns the findings about workers and those about what goes through the gateway.
func (c *Config) Run(ctx context.Context, gateway *Gateway, workers []pool.Worker, progress io.Writer) (
	ofWorkers, through []Finding,
) {
	asked := make([]*Result, len(workers))
	var asking sync.WaitGroup
	slots := make(chan struct{}, AtOnce)
	for i := range workers {
		slots <- struct{}{}
		fmt.Fprintf(progress, "\rasking %d of %d workers ", i+1, len(workers))
		asking.Go(func() {
			defer func() { <-slots }()
			asked[i] = Worker(ctx, c, &workers[i])
		})
	}
	asking.Wait()
	fmt.Fprintln(progress)
	if c.Gateway.URL != "" && ctx.Err() == nil {
		through = append(through, CheckGateway(ctx, c, gateway, asked, func(done, all int) {
			fmt.Fprintf(progress, "\rgateway: endpoint %d of %d ", done, all)
		})...)
		fmt.Fprintln(progress)
	}
	if c.Conversations > 0 && ctx.Err() == nil {
		through = append(through, Conversations(ctx, c, asked, c.Conversations, func(done, all int) {
			fmt.Fprintf(progress, "\rconversations: %d of %d requests ", done, all)
		})...)
		fmt.Fprintln(progress)
	}
	for _, a := range asked { // CheckGateway may have changed them
		ofWorkers = append(ofWorkers, a.Findings...)
	}
	return ofWorkers, through
}

// Addresses returns the addresses of a file's endpoints; none without a file.
func Addresses(file string) (addresses []string, err error) {
	entries, err := readEntries(file)
	for i := range entries {
		addresses = append(addresses, entries[i].Address)
	}
	return addresses, err
}

func readEntries(file string) ([]pool.Entry, error) {
	if file == "" {
		return nil, nil
	}
	text, err := boundedfile.Read(file, pool.MaxFile)
	if err != nil {
		return nil, err
	}
	return pool.ParseFile(text)
}

// HostNames returns the endpoints of a file whose addresses are host names, by name; none without a file.
func HostNames(file string) (map[string]pool.Endpoint, error) {
	named := map[string]pool.Endpoint{}
	entries, err := readEntries(file)
	if err != nil {
		return nil, err
	}
	for i := range entries {
		host, _, err := net.SplitHostPort(entries[i].Address)
		if _, notIP := netip.ParseAddr(host); err == nil && notIP != nil {
			named[entries[i].Name] = entries[i].Endpoint
		}
	}
	return named, nil
}

// Unresolved returns findings about the endpoints with host names that are not among the workers: kvepp leaves them out
// because their names have no address.
func Unresolved(named map[string]pool.Endpoint, workers []pool.Worker) (findings []Finding) {
	for _, name := range slices.Sorted(maps.Keys(named)) {
		e := named[name]
		if !slices.ContainsFunc(workers, func(w pool.Worker) bool { return w.Name == name }) {
			findings = append(findings, unresolved(&e))
		}
	}
	return findings
}

// AwaitEndpoints waits until there are endpoints, and their number has not changed for half a second. The caller
// releases them. It fails after c.Wait.
func (c *Config) AwaitEndpoints(ctx context.Context, p *pool.Pool) ([]pool.Worker, func(), error) {
	const stable, interval = 500 * time.Millisecond, 50 * time.Millisecond
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
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("no endpoints after %v; look at the endpoints file, the pool's selector, or "+
				"Dynamo's discovery", c.Wait)
		case <-time.After(interval):
		}
	}
}

// Listening returns a channel that is closed when kvepp is connected to all workers' KV events, or c.Wait has passed.
// subscriptions is that of feed.Feed.
func (c *Config) Listening(ctx context.Context, subscriptions func() (active, connecting int)) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		within, cancel := context.WithTimeout(ctx, c.Wait)
		defer cancel()
		for {
			if _, connecting := subscriptions(); connecting == 0 {
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

// Print prints the findings, as a table or as lines of JSON.
func (c *Config) Print(to io.Writer, findings []Finding) error {
	if !c.json {
		return printTable(to, findings)
	}
	lines := json.NewEncoder(to)
	for i := range findings {
		if err := lines.Encode(&findings[i]); err != nil {
			return err
		}
	}
	return nil
}

// printTable prints findings as a table, and those about conversations as a second one.
func printTable(to io.Writer, findings []Finding) error {
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
		if f.Fix != "" && f.State != OK {
			fmt.Fprintf(t, "\t\t\t-> %s\n", f.Fix)
		}
	}
	if err := t.Flush(); err != nil || !conversations {
		return err
	}
	fmt.Fprintln(to)
	t.Init(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t,
		"CONVERSATIONS\tREQUESTS\tPROMPT TOKENS\tPREDICTED CACHED\tREPORTED CACHED\tEXACT\tSTATE\tWHAT IT SAYS")
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
		fmt.Fprintf(t, "%s\t%d\t%d\t%d%s\t%d\t%s\t%s\t%s\n", f.Worker, x.Requests, x.PromptTokens, x.Predicted, bound,
			x.Reported, exact, f.State, f.Says)
		if f.Fix != "" {
			fmt.Fprintf(t, "\t\t\t\t\t\t\t-> %s\n", f.Fix)
		}
	}
	return t.Flush()
}
