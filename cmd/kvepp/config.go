package main

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/url"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/suggest"
	"kvepp/modelrewrite"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/session"
	"kvepp/tokenizer"
)

// checkSessions checks the flags of session affinity.
func (o *options) checkSessions() error {
	switch longest := int(session.MaxTTL / time.Second); {
	case o.sessionTTLSecs < 0 || o.sessionTTLSecs > longest:
		return fmt.Errorf(
			"--router-session-affinity-ttl-secs %d: must be from 1 to %d seconds (0: no affinity but for sessions "+
				"that requests open)",
			o.sessionTTLSecs,
			longest,
		)
	}
	return oneOf("router-session-affinity-mode", o.sessionMode, "hard", "soft")
}

// options is everything that `kvepp serve` can be told.
type options struct {
	bindAddress                      string
	grpcPort                         uint16
	grpcHealthPort                   uint16
	metricsPort                      uint16
	adminAddress                     string
	hosts                            webHosts
	adminTokenFile                   string
	enablePprof, tracing             bool
	indexPeers                       []string
	warmUpTimeout                    time.Duration
	metricsAddress, metricsTokenFile string
	transport
	drainTimeout, drainDelay time.Duration
	modelLoadTimeout         time.Duration

	endpoints       string
	dnsLookupFamily string
	dynamoDiscovery string
	cluster

	models        []string
	modelPath     string
	modelName     string
	adapters      []string
	modelRewrites []string
	strictModel   bool
	blockSize     int

	engine string
	served
	scheduling
	proxied
	pickers

	tokenizerURLs       []string
	tokenizerURLTimeout time.Duration
	tokenizerURLKeyFile string
	tokenizerCheck      int

	debugDecisions    int
	dynamoNamespace   string
	dynamoComponent   string
	routerID          uint64
	headerAliases     bool
	prefillerHeader   bool
	decisionHeaders   bool
	minInitialWorkers int

	overlapWeight float64 // deprecated; NaN when not given
	kvEvents      bool

	ttlSecs, predictedTTLSecs float64
	maxTreeSize               int
	pruneTarget               float64
	cachePolicy               string

	ignoreHints, allowPinning bool
	passSessions, keepLegacy  bool
	injectTokens, tenantSalt  bool

	sessionTTLSecs int
	sessionMode    string

	durableEvents, resetStates, remoteIndexer bool // refused when set
	snapshotThreshold                         int

	busy
	ejection
	engineGauges

	given   map[string]bool // flags given, by flag or environment
	feed    feed.Config
	scoring scoring.Config

	indexMemory
	logging
	accessLog string // a file, or "-"
}

// parseServe reads the arguments and the environment into o: a flag goes before KVEPP_NAME, and that before Dynamo's
// own name. An environment variable that is set but empty counts as not set.
func parseServe(o *options, args []string, getenv func(string) string) error {
	return parseWith(o, serveFlags(o), args, getenv)
}

// parseWith is parseServe with flags besides: f has o's and others.
func parseWith(o *options, f *pflag.FlagSet, args []string, getenv func(string) string) error {
	if err := parse(f, "", args, o.scheduling.inherited(getenv)); err != nil {
		return err
	}
	if err := o.busy.readPolicies(f); err != nil {
		return err
	}
	o.given = map[string]bool{}
	f.VisitAll(func(flag *pflag.Flag) { o.given[flag.Name] = flag.Changed })
	err := o.check()
	o.settings = changedSettings(f) // check applies presets
	return err
}

// index returns the bounds of the index. goLimit is indexBytes's.
func (o *options) index(goLimit int64) indexer.Config {
	c := indexer.Config{MaxBytes: o.indexBytes(goLimit)}
	if !o.kvEvents {
		c.MaxPredicted, c.PruneTarget = o.maxTreeSize, o.pruneTarget
	}
	return c
}

// predict returns how routing decisions count as stores.
func (o *options) predict() router.Predict {
	if o.kvEvents {
		return router.Predict{TTL: seconds(o.predictedTTLSecs), Silent: seconds(o.ttlSecs)}
	}
	return router.Predict{TTL: seconds(o.ttlSecs), LRU: o.cachePolicy == "lru", Alone: true}
}

func seconds(secs float64) time.Duration { return time.Duration(secs * float64(time.Second)) }

// keptDecisions returns how many decisions are kept: none that nobody could ask for.
func (o *options) keptDecisions() int {
	if o.adminAddress == "" {
		return 0
	}
	return o.debugDecisions
}

// tokenizerOptions says how the engine was told to serve its models.
func (o *options) tokenizerOptions() (tokenizer.Options, error) {
	engine, err := parseEngine(o.engine)
	if err != nil {
		return tokenizer.Options{}, err
	}
	if o.engine == "" && o.dynamoDiscovery != "" {
		engine = tokenizer.Dynamo
	}
	return o.served.options(engine)
}

// parseEngine returns the engine that --engine names.
func parseEngine(name string) (tokenizer.Engine, error) {
	engine, err := tokenizer.ParseEngine(name)
	if err != nil {
		var names []string
		for _, e := range tokenizer.Engines {
			names = append(names, string(e))
		}
		return "", oneOf("engine", name, names...)
	}
	return engine, nil
}

// maxTTL keeps times of blocks in range.
const maxTTL = 365 * 24 * time.Hour

// checkRouting checks what says where overlap is known from.
func (o *options) checkRouting() error {
	for _, ttl := range []struct {
		flag string
		secs float64
		zero bool
	}{{"router-ttl-secs", o.ttlSecs, false}, {"router-predicted-ttl-secs", o.predictedTTLSecs, true}} {
		if ok := ttl.secs > 0 && ttl.secs <= maxTTL.Seconds() || ttl.zero && ttl.secs == 0; !ok {
			return fmt.Errorf(
				"--%s %v: must be a positive number of seconds, at most a year, for example 120",
				ttl.flag,
				ttl.secs,
			)
		}
	}
	switch {
	case o.maxTreeSize < 1 || o.maxTreeSize > 1<<30:
		return fmt.Errorf(
			"--router-max-tree-size %d: must be from 1 to %d blocks, for example %d",
			o.maxTreeSize,
			1<<30,
			indexer.DefaultMaxPredicted,
		)
	case !(o.pruneTarget > 0 && o.pruneTarget <= 1):
		return fmt.Errorf(
			"--router-prune-target-ratio %v: must be above 0, and at most 1, for example %v",
			o.pruneTarget,
			indexer.DefaultPruneTarget,
		)
	case o.feed.Threads < 1:
		return fmt.Errorf("--router-event-threads %d: must be at least 1, for example 4", o.feed.Threads)
	case o.durableEvents || o.resetStates || o.given["router-snapshot-threshold"]:
		return errors.New(
			"--router-durable-kv-events, --router-snapshot-threshold and --router-reset-states are for events kept " +
				"in JetStream, which kvepp does not read: " +
				"it asks the engines for past events at their kvReplay address (README, \"The endpoints file\"); " +
				"leave these flags out",
		)
	case o.remoteIndexer:
		return errors.New(
			"--use-remote-indexer: kvepp does not ask another process's index, it keeps its own; leave this flag out",
		)
	}
	return oneOf("router-approximate-cache-policy", o.cachePolicy, "ttl", "lru")
}

// idle is what was given and means nothing.
type idle struct {
	given map[string]bool // options.given
	said  []string        // a line for each
}

// add says why those of the flags that were given mean nothing.
func (i *idle) add(why string, flags ...string) {
	for _, flag := range flags {
		if i.given[flag] {
			i.said = append(i.said, "--"+flag+": "+why)
		}
	}
}

// withoutEffect lists the flags that were given and mean nothing beside the others.
func (o *options) withoutEffect() []string {
	unread := idle{given: o.given}
	if !o.wanted() {
		unread.add(
			"acts with --pool-name or --endpoint-selector only",
			"kubeconfig",
			"pool-group",
			"kv-events-port",
			"kv-replay-port",
			"data-parallel-size",
			"pod-ip-family",
		)
	}
	switch {
	case !o.metricsAuth:
	case !o.wanted():
		unread.add(
			"acts with --pool-name or --endpoint-selector only; --metrics-token-file guards metrics elsewhere",
			"metrics-endpoint-auth",
		)
	case o.metricsTokenFile != "":
		unread.add("--metrics-token-file says who may read metrics", "metrics-endpoint-auth")
	}
	if !o.leaderElection {
		unread.add("acts with --ha-enable-leader-election only", "ha-lease-name", "ha-handover-timeout")
	}
	o.scheduling.unused(&unread)
	o.busy.unused(&unread, o.scoring.TrackPrefillTokens)
	o.ejection.unused(&unread)
	if o.engineGauges.interval == 0 {
		unread.add(
			"with --refresh-metrics-interval=0 engines' metrics are never read",
			"metrics-staleness-threshold",
			"model-server-metrics-port",
			"model-server-metrics-path",
			"model-server-metrics-scheme",
			"model-server-metrics-https-insecure-skip-verify",
			"total-queued-requests-metric",
			"total-running-requests-metric",
			"kv-cache-usage-percentage-metric",
		)
	}
	if o.scoring.Mode != scoring.DeviceAwareWeighted {
		unread.add("acts with --router-mode device-aware-weighted only", "encoder-cuda-to-cpu-ratio")
	}
	if o.scoring.Mode != scoring.KV {
		unread.add(
			"acts with --router-mode kv only",
			"router-kv-events",
			"router-ttl-secs",
			"router-max-tree-size",
			"router-prune-target-ratio",
			"router-approximate-cache-policy",
			"router-predicted-ttl-secs",
			"router-event-threads",
			"index-max-bytes",
			"index-peers",
			"warmup-timeout",
			"router-kv-overlap-score-credit",
			"router-kv-overlap-score-credit-decay",
			"router-prefill-load-scale",
			"router-kv-overlap-score-weight",
			"router-decode-active-request-weight",
			"router-temperature",
			"router-host-cache-hit-weight",
			"router-disk-cache-hit-weight",
		)
		return unread.said
	}
	if o.scoring.OverlapScoreCredit == 0 {
		unread.add(
			"cached blocks have no credit, so nothing is known of them",
			"router-kv-events",
			"router-ttl-secs",
			"router-max-tree-size",
			"router-prune-target-ratio",
			"router-approximate-cache-policy",
			"router-predicted-ttl-secs",
			"router-event-threads",
			"index-max-bytes",
			"index-peers",
			"warmup-timeout",
		)
		return unread.said
	}
	if o.kvEvents {
		unread.add(
			"acts with --no-router-kv-events only",
			"router-max-tree-size",
			"router-prune-target-ratio",
			"router-approximate-cache-policy",
		)
	} else {
		unread.add("acts with KV events only", "router-predicted-ttl-secs", "router-event-threads", "index-max-bytes",
			"index-peers", "warmup-timeout")
	}
	return unread.said
}

// maxDebugDecisions bounds the memory of decisions that are kept.
const maxDebugDecisions = 100_000

// check says what is wrong with the options together, and what to do.
func (o *options) check() error {
	if !math.IsNaN(o.overlapWeight) {
		o.scoring.SetOverlapScoreWeight(o.overlapWeight)
	}
	var err error
	if o.kvEvents, err = o.scheduling.check(&o.scoring, o.kvEvents, o.allowPinning && !o.ignoreHints); err != nil {
		return err
	}
	if err := checkWeights(&o.scoring, o.overlapWeight); err != nil {
		return err
	}
	if err := durations(durationFlag{"drain-delay", o.drainDelay, true},
		durationFlag{"drain-timeout", o.drainTimeout, true}, durationFlag{"model-load-timeout", o.modelLoadTimeout,
			false},
		durationFlag{"ha-handover-timeout", o.handOverTimeout, true},
		durationFlag{"pick-timeout", o.pickTimeout, false},
		durationFlag{"tokenizer-url-timeout", o.tokenizerURLTimeout, false},
		durationFlag{"warmup-timeout", o.warmUpTimeout, true},
		durationFlag{"metrics-staleness-threshold", o.stale, true}); err != nil {
		return err
	}
	switch {
	case o.endpoints == "" && !o.wanted():
		return errors.New(
			"no endpoints: give --endpoints FILE (README, \"The endpoints file\"), or in Kubernetes --pool-name NAME",
		)
	case (o.modelPath == "") != (o.modelName == ""):
		return errors.New("--model-path and --model-name belong together; or give --model NAME=DIR")
	case o.blockSize < 0 || o.blockSize > scoring.MaxBlockSize:
		return fmt.Errorf(
			"--kv-cache-block-size %d: must be a number of tokens from 1 to %d, for example 16 (0: each worker's own)",
			o.blockSize,
			scoring.MaxBlockSize,
		)
	case o.debugDecisions < 0 || o.debugDecisions > maxDebugDecisions:
		return fmt.Errorf("--debug-decisions %d: must be from 0 to %d", o.debugDecisions, maxDebugDecisions)
	case o.minInitialWorkers < 0:
		return fmt.Errorf(
			"--router-min-initial-workers %d: may not be negative; give a number such as 2, or 0",
			o.minInitialWorkers,
		)
	case o.drainDelay > o.drainTimeout && o.given["drain-delay"]:
		return fmt.Errorf(
			"--drain-delay %s is a part of --drain-timeout, which is %s; make the one shorter or the other longer",
			o.drainDelay,
			o.drainTimeout,
		)
	case o.grpcPort == 0 || o.grpcHealthPort == 0:
		return errors.New("--grpc-port and --grpc-health-port: must be from 1 to 65535, for example 9002 and 9003")
	}
	switch kind, at, _ := strings.Cut(o.dynamoDiscovery, ":"); {
	case o.dynamoDiscovery == "" || kind == "file" && at != "":
	case kind == "frontend":
		for _, address := range strings.Split(at, ",") {
			if err := pool.CheckHostPort(address); err != nil {
				return fmt.Errorf("--dynamo-discovery frontend: %w", err)
			}
		}
	case o.dynamoDiscovery != inKubernetes:
		return fmt.Errorf(
			"--dynamo-discovery %q: must look like file:DIR or frontend:HOST:PORT, or be kubernetes; of Dynamo's "+
				"other backends, a frontend knows%s",
			o.dynamoDiscovery,
			suggest.DidYouMean(kind, "", []string{"file", "frontend", inKubernetes}),
		)
	case !o.wanted():
		return errors.New("--dynamo-discovery kubernetes: of which Pods? Give --pool-name or --endpoint-selector")
	}
	if o.feed.EventPlane != "" {
		if err := oneOf("event-plane", o.feed.EventPlane, "zmq", "nats"); err != nil {
			return err
		}
	}
	for _, check := range []error{o.pickers.check(o), o.logging.check(), o.cluster.check(), o.scheduling.refused(),
		o.checkSessions(), o.transport.check(o.given), o.checkListeners()} {
		if check != nil {
			return check
		}
	}
	if _, err := pool.NewNames(o.dnsLookupFamily, nil); err != nil {
		return fmt.Errorf("--dns-lookup-family: %w", err)
	}
	if err := o.indexMemory.check(); err != nil {
		return err
	}
	if err := o.checkRouting(); err != nil {
		return err
	}
	if err := o.busy.check(); err != nil {
		return err
	}
	if err := o.ejection.check(); err != nil {
		return err
	}
	if err := o.engineGauges.check(); err != nil {
		return err
	}
	if _, err := o.modelFolders(); err != nil {
		return err
	}
	if _, err := o.rewriteRules(); err != nil {
		return err
	}
	if _, err := o.adapted(); err != nil {
		return err
	}
	if err := checkPeers("--index-peers", o.indexPeers); err != nil {
		return err
	}
	t, err := o.tokenizerOptions()
	if err != nil {
		return err
	}
	if err := o.proxied.check(t.Engine); err != nil {
		return err
	}
	urls, err := o.tokenizerURLsByModel()
	switch {
	case err != nil:
		return err
	case o.injectTokens && t.Engine != tokenizer.Dynamo:
		return fmt.Errorf(
			"--inject-token-data: only Dynamo's frontends take token ids beside a prompt, and --engine is %s; leave "+
				"it out",
			t.Engine,
		)
	case o.tenantSalt && t.Engine != tokenizer.VLLM:
		return fmt.Errorf(
			"--tenant-cache-salt is for stock vLLM, and --engine is %s; leave it out: Dynamo's frontends follow "+
				"x-tenant-id themselves",
			t.Engine,
		)
	case o.tenantSalt && o.ignoreHints:
		return errors.New(
			"--tenant-cache-salt and --ignore-client-hints: the one follows x-tenant-id, the other drops it; leave " +
				"one of them out",
		)
	case len(o.adapters) > 0 && t.Engine == tokenizer.Dynamo:
		return errors.New(
			"--lora: Dynamo's frontends serve no adapters in direct mode (their DYN_LORA_ENABLED cannot be with it), " +
				"so there are none to route to; " +
				"leave --lora out, or give --engine vllm, sglang or trtllm if the endpoints are these",
		)
	case len(urls) > 0 && t.Engine != tokenizer.VLLM && t.Engine != tokenizer.SGLang:
		return fmt.Errorf(
			"--tokenizer-url: with --engine %s there is no server to ask: only vLLM's and SGLang's have an endpoint "+
				"that tokenizes",
			t.Engine,
		)
	case o.tokenizerCheck < 0:
		return fmt.Errorf(
			"--tokenizer-check %d: may not be negative; give a number such as 100, or 0",
			o.tokenizerCheck,
		)
	case o.tokenizerCheck > 0 && len(urls) == 0:
		return errors.New("--tokenizer-check needs a server to compare with: give --tokenizer-url NAME=URL")
	}
	return nil
}

// modelFolders returns model name -> folder.
func (o *options) modelFolders() (map[string]string, error) {
	folders := map[string]string{}
	for _, m := range o.models {
		name, dir, ok := strings.Cut(m, "=")
		if !ok || name == "" || dir == "" {
			return nil, fmt.Errorf("--model %q: must look like NAME=DIR", m)
		}
		if _, twice := folders[name]; twice {
			return nil, fmt.Errorf("--model: %q is given twice", name)
		}
		folders[name] = dir
	}
	if o.modelName != "" {
		if _, twice := folders[o.modelName]; twice {
			return nil, fmt.Errorf("--model-name %q is given by --model already", o.modelName)
		}
		folders[o.modelName] = o.modelPath
	}
	return folders, nil
}

// onlyModel returns the model if there is a single one, else "".
func (o *options) onlyModel() string {
	names := map[string]bool{}
	folders, _ := o.modelFolders() // what is wrong with them, check says
	urls, _ := o.tokenizerURLsByModel()
	for name := range folders {
		names[name] = true
	}
	for name := range urls {
		names[name] = true
	}
	if len(names) == 1 {
		for name := range names {
			return name
		}
	}
	return ""
}

// adapted returns adapter -> model.
func (o *options) adapted() (map[string]string, error) {
	adapted := map[string]string{}
	for _, a := range o.adapters {
		name, model, ok := strings.Cut(a, "=")
		if !ok {
			if model = o.onlyModel(); model == "" {
				return nil, fmt.Errorf("--lora %q: say of which model, as NAME=MODEL: there is not just one", a)
			}
		}
		if name == "" || model == "" {
			return nil, fmt.Errorf("--lora %q: must look like NAME=MODEL", a)
		}
		if _, twice := adapted[name]; twice {
			return nil, fmt.Errorf("--lora: %q is given twice", name)
		}
		adapted[name] = model
	}
	return adapted, nil
}

// tokenizerURLsByModel returns model name -> URL of the server that knows its tokens.
func (o *options) tokenizerURLsByModel() (map[string]string, error) {
	urls := map[string]string{}
	for _, given := range o.tokenizerURLs {
		isURL := func(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
		name, address, _ := strings.Cut(given, "=")
		if isURL(given) {
			folders, err := o.modelFolders()
			if err != nil {
				return nil, err
			}
			if len(folders) != 1 {
				return nil, fmt.Errorf(
					"--tokenizer-url %q: say for which model, as NAME=URL: there are %d",
					given,
					len(folders),
				)
			}
			for only := range folders {
				name, address = only, given
			}
		}
		if name == "" || !isURL(address) {
			return nil, fmt.Errorf("--tokenizer-url %q: must look like NAME=http://HOST:PORT", given)
		}
		if _, twice := urls[name]; twice {
			return nil, fmt.Errorf("--tokenizer-url: %q is given twice", name)
		}
		urls[name] = address
	}
	return urls, nil
}

// rewriteRules returns the rules of --model-rewrite, one for each name that requests give, in the order in which they
// come.
func (o *options) rewriteRules() ([]modelrewrite.Rule, error) {
	var rules []modelrewrite.Rule
	of := map[string]int{} // a name's place in rules
	for _, given := range o.modelRewrites {
		name, target, ok := strings.Cut(given, "=")
		if !ok || name == "" || target == "" {
			return nil, fmt.Errorf(
				"--model-rewrite %q: must look like NAME=TARGET, or *=TARGET for all other names",
				given,
			)
		}
		i, known := of[name]
		if !known {
			i = len(rules)
			of[name] = i
			rule := modelrewrite.Rule{Name: "flag"}
			if name != "*" {
				rule.Models = []string{name}
			}
			rules = append(rules, rule)
		}
		rules[i].Targets = append(rules[i].Targets, modelrewrite.Target{Model: target})
	}
	return rules, nil
}

// checkListeners refuses an admin address that anybody could reach: it tells what workers hold, and changes thresholds.
func (o *options) checkListeners() error {
	if o.adminAddress != "" {
		host, _, err := net.SplitHostPort(o.adminAddress)
		if err != nil {
			return fmt.Errorf("--admin-address %q: must look like HOST:PORT", o.adminAddress)
		}
		if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() && o.adminTokenFile == "" {
			return fmt.Errorf(
				"--admin-address %s can be reached from elsewhere, and nothing guards it: give --admin-token-file as "+
					"well, or listen at 127.0.0.1",
				o.adminAddress,
			)
		}
	}
	if o.enablePprof && o.adminAddress == "" {
		return errors.New(
			"--enable-pprof: profiles are shown on the admin address; give --admin-address too, 127.0.0.1:9091 for " +
				"example",
		)
	}
	metricsPort := o.metricsPort
	if o.metricsAddress != "" {
		metricsPort = 0
	}
	switch {
	case o.grpcPort == o.grpcHealthPort:
		return fmt.Errorf("--grpc-port and --grpc-health-port are both %d; give each a port of its own", o.grpcPort)
	case metricsPort == o.grpcPort:
		return fmt.Errorf("--metrics-port and --grpc-port are both %d; give each a port of its own", metricsPort)
	case metricsPort == o.grpcHealthPort:
		return fmt.Errorf("--metrics-port and --grpc-health-port are both %d; give each a port of its own", metricsPort)
	case o.metricsAddress == "":
		return nil
	}
	if _, _, err := net.SplitHostPort(o.metricsAddress); err != nil {
		return fmt.Errorf("--metrics-address %q: must look like HOST:PORT", o.metricsAddress)
	}
	return nil
}

// checkPeers says which of the URLs is none.
func checkPeers(flag string, peers []string) error {
	for _, peer := range peers {
		if u, err := url.Parse(peer); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
			u.User != nil {
			return fmt.Errorf("%s: each URL must look like http://HOST:PORT", flag)
		}
	}
	return nil
}
