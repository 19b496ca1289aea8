package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os/signal"
	"runtime/debug"
	"slices"
	"strconv"
	"syscall"

	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/serve/api"
	"kvepp/serve/check"
	"kvepp/serve/check/protocol"
	"kvepp/serve/join"
	"kvepp/serve/listen"
	"kvepp/serve/models"
	"kvepp/serve/secrets"
	"kvepp/zmqsub"
)

// gatewayFlag is a URL for kvepp check, and a kind of gateway for kvepp serve.
const gatewayFlag = "gateway"

// checkOptions are the settings of `kvepp check`.
type checkOptions struct {
	options
	tests check.Config // only what its flags say
	// pickerConfig is an EndpointPickerConfig that is explained in place of all checks. Empty: none.
	pickerConfig string
}

// checkFlags declares the flags of `kvepp check`: those of `kvepp serve` but for --gateway, and its own.
func checkFlags(c *checkOptions) *pflag.FlagSet {
	f := flags.New("kvepp check")
	serveFlags(&c.options).VisitAll(func(flag *pflag.Flag) {
		if flag.Name != flags.HelpAll && flag.Name != gatewayFlag {
			f.AddFlag(flag)
		}
	})
	c.tests.AddFlags(f)
	f.StringVar(&c.pickerConfig, "config-file", "",
		"print what each part of this `FILE`, an EndpointPickerConfig of llm-d, means for kvepp, and test nothing. "+
			"Exits 1 if kvepp refuses it")
	flags.Section(f, sectionCheck)
	return f
}

// checkWorkers is `kvepp check`. It returns the exit status.
func checkWorkers(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var c checkOptions
	alone := declared("check", "", func(f *pflag.FlagSet) { f.StringVar(&c.pickerConfig, "config-file", "", "") })
	if parseArgs(alone, args) == nil && c.pickerConfig != "" && alone.NArg() == 0 {
		return explainConfig(c.pickerConfig, stdout, stderr)
	}
	err := parseWith(&c.options, checkFlags(&c), args, getenv)
	if slices.Contains(extproc.Gateways, c.tests.Gateway.URL) { // the value for kvepp serve, in a common file
		c.tests.Gateway.URL = ""
	}
	if err == nil {
		err = c.tests.Validate()
	}
	if err != nil {
		return notRun(checkFlags(new(checkOptions)), err, helpAllHint, stdout, stderr)
	}
	if c.printsConfig(stdout) {
		return 0
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	findings, err := c.check(ctx, stderr)
	if err != nil {
		fmt.Fprintf(stderr, "kvepp check: %v\n", err)
		return 2
	}
	if c.tests.Print(stdout, findings) != nil {
		return 2
	}
	if slices.ContainsFunc(findings, func(f check.Finding) bool { return f.State == check.Wrong }) {
		return 1
	}
	return 0
}

// check runs the checks that the flags ask for.
func (c *checkOptions) check(ctx context.Context, stderr io.Writer) ([]check.Finding, error) {
	if c.tests.Gateway.Protocol {
		return c.checkProtocol(ctx)
	}
	return c.checkAll(ctx, stderr)
}

// checkProtocol asks a gateway what it does with an endpoint picker.
func (c *checkOptions) checkProtocol(ctx context.Context) ([]check.Finding, error) {
	gateway, err := c.gatewayToCheck()
	if err != nil {
		return nil, err
	}
	cfg := protocol.Config{URL: gateway.URL, HTTP: gateway.HTTP, Key: gateway.Key, Picker: gateway.ExtProc,
		Wait: c.tests.Wait}
	if c.transport.Serving {
		certificates, err := secrets.Follow(ctx, metrics.New(), quiet).Certificates(c.transport)
		if err != nil {
			return nil, err
		}
		cfg.TLS = certificates.Server()
	}
	if cfg.Engines, err = check.Addresses(c.sources.File); err != nil {
		return nil, err
	}
	return protocol.Run(ctx, &cfg)
}

// checkAll finds the endpoints as `kvepp serve` does, and checks each of their workers.
func (c *checkOptions) checkAll(ctx context.Context, stderr io.Writer) ([]check.Finding, error) {
	log := slog.New(slog.NewTextHandler(stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	m := metrics.New()
	loaded := c.models.Load(log)
	gateway, err := c.gatewayToCheck()
	if err != nil {
		return nil, err
	}
	endpoints, ready := pool.New(quiet), listen.NewReadiness()
	c.sources.Kube.LeaderElection = false // any replica can be checked
	cluster, err := openCluster(&c.options, ready, m, log)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	predictor, events, err := c.predictor(endpoints, loaded, m)
	if err != nil {
		return nil, err
	}
	if events != nil {
		defer events.Close()
	}
	sources := join.Join{Config: &c.sources, Models: &c.models, Loaded: loaded, Gauges: &c.gauges, Cluster: cluster,
		Pool: endpoints, Metrics: m, Log: log}
	unfollow, err := sources.Follow(ctx)
	if err != nil {
		return nil, err
	}
	defer unfollow()
	within, stop := context.WithTimeout(ctx, c.tests.Wait)
	defer stop()
	cluster.Await(within)
	workers, release, err := c.tests.AwaitEndpoints(within, endpoints)
	if err != nil {
		return nil, err
	}
	defer release()
	hostNames, err := check.HostNames(c.sources.File)
	if err != nil {
		return nil, err
	}
	names := map[string]string{}
	for name, e := range hostNames {
		names[name] = e.Address
	}
	if events != nil {
		predictor.Listening = c.tests.Listening(ctx, events.Subscriptions)
	}
	hub, err := zmqsub.NewHub()
	if err != nil {
		return nil, err
	}
	defer hub.Close()
	cfg := check.Config{
		Hub:           hub,
		HTTP:          &http.Client{Transport: &http.Transport{Proxy: nil}},
		Models:        loaded,
		Names:         names,
		Engine:        c.models.Engine(),
		WithoutEvents: !c.kvEvents,
		Probe:         c.tests.Probe,
		Conversations: c.tests.Conversations,
		Gateway:       c.tests.Gateway,
		Predictor:     predictor,
		Wait:          c.tests.Wait,
		Metrics:       m,
		Log:           quiet,
	}
	findings, through := cfg.Run(ctx, gateway, workers, stderr)
	sharing := c.replicaFindings(ctx, cluster, log)
	return slices.Concat(findings, check.Unresolved(hostNames, workers), sharing, through), ctx.Err()
}

// quiet discards log lines of components whose results are findings.
var quiet = slog.New(slog.DiscardHandler)

// predictor returns a predictor of the cached tokens of p's workers, and the feed of their KV events. The feed is nil
// if kvepp check sends no prompts.
func (c *checkOptions) predictor(
	p *pool.Pool,
	loaded models.Models,
	m *metrics.Metrics,
) (*check.Predictor, *feed.Feed, error) {
	index, err := indexer.New(c.index(debug.SetMemoryLimit(-1)))
	if err != nil {
		return nil, nil, err
	}
	predictor := &check.Predictor{Pool: p, Index: index}
	if !c.tests.SendsPrompts() || !c.wantsEvents() {
		return predictor, nil, nil
	}
	c.indexPeers = nil // the check is about the engines' own events, not about another kvepp's index
	s := &server{options: &c.options, m: m, log: quiet, loaded: loaded, adapters: router.NewAdapters(nil), pool: p,
		index: index}
	if err := s.subscribe(); err != nil {
		return nil, nil, err
	}
	p.Watch(s.events)
	predictor.Events = true
	return predictor, s.events, nil
}

// gatewayToCheck returns the addresses and tokens of the gateway and of the running kvepp.
func (c *checkOptions) gatewayToCheck() (*check.Gateway, error) {
	key, err := secrets.ReadToken("--gateway-api-key-file", c.tests.Gateway.KeyFile)
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
		return api.Dialable(net.JoinHostPort(c.ports.BindAddress, strconv.Itoa(int(port))))
	}
	g := &check.Gateway{
		URL:          c.tests.Gateway.URL,
		Key:          key,
		ExtProc:      cmp.Or(c.tests.Gateway.ExtProc, at(c.ports.GRPCPort)),
		AdminToken:   admin,
		MetricsToken: metrics,
		HTTP: &http.Client{
			Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: c.tests.Gateway.Insecure}},
		},
	}
	if c.ports.AdminAddress != "" {
		g.Admin = "http://" + api.Dialable(c.ports.AdminAddress)
	}
	switch {
	case c.ports.MetricsAddress != "":
		g.MetricsPage = "http://" + api.Dialable(c.ports.MetricsAddress) + "/metrics"
	case c.ports.MetricsPort != 0:
		g.MetricsPage = "http://" + at(c.ports.MetricsPort) + "/metrics"
	}
	return g, nil
}
