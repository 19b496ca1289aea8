package main

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/internal/suggest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/router/modelrewrite"
	"kvepp/router/record"
	"kvepp/scoring"
	"kvepp/serve/admin"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/listen"
)

// options are the settings of `kvepp serve`: one field for each flag, and in config what follows from them. parseServe
// fills and checks them once; nothing changes them after that.
type options struct {
	bindAddress                      string
	grpcPort                         uint16
	grpcHealthPort                   uint16
	metricsPort                      uint16
	adminAddress                     string
	hosts                            listen.Hosts
	adminTokenFile                   string
	enablePprof                      bool
	indexPeers, vllmHashSeeds        []string
	warmUpTimeout                    time.Duration
	metricsAddress, metricsTokenFile string
	transport
	drainTimeout, drainDelay time.Duration
	modelLoadTimeout         time.Duration
	replicaFlags

	endpoints       string
	dnsLookupFamily string
	dynamoDiscovery string
	kube            kube.Config

	models        []string
	adapters      []string
	modelRewrites []string
	strictModel   bool
	blockSize     int

	engine string
	promptFlags
	unknownVersion string // nearestVersion or loadOnlyVersion
	scheduling
	proxied

	tokenizerURLs       []string
	tokenizerURLTimeout time.Duration
	tokenizerURLKeyFile string
	tokenizerCheck      int

	traceURL          string
	dynamoNamespace   string
	prefillerHeader   bool
	decisionHeaders   bool
	minInitialWorkers int

	overlapWeight *float64 // deprecated
	kvEvents      bool

	ttlSecs, predictedTTLSecs float64
	cachePolicy               string

	ignoreHints, allowPinning bool
	injectTokens, tenantSalt  bool

	affinity affinity

	busy
	ejection
	engineGauges

	feed    feed.Config
	scoring scoring.Config

	indexMemory
	logging
	recording record.Config

	settingsFile
	config config
}

// config is what several flags say together, parsed and checked.
type config struct {
	folders  map[string]string // model -> folder of its tokenizer
	urls     map[string]string // model -> URL of the engine that tokenizes for it
	adapters map[string]string // LoRA adapter -> model
	rewrites []modelrewrite.Rule
	engine   prompt.Options
	gauges   enginemetrics.Config // Interval is 0: kvepp does not read engines' metrics
}

// parseServe reads the arguments, the environment and the file of --config into o. Precedence: flag, KVEPP_<FLAG>,
// file, Dynamo's variable: a process often inherits Dynamo's variables, but the file is written for kvepp. An
// environment variable that is set but empty counts as not set.
func parseServe(o *options, args []string, getenv func(string) string) error {
	return parseWith(o, serveFlags(o), args, getenv)
}

// parseWith is parseServe for a command that has further flags: f has those of o and the others.
func parseWith(o *options, f *pflag.FlagSet, args []string, getenv func(string) string) error {
	o.flags = f
	if err := parse(f, args, &o.Path, o.scheduling.inherited(getenv)); err != nil {
		return err
	}
	o.kube.KVEventsGiven = o.given("kv-events-port")
	o.applyPresets()
	if err := o.busy.readPolicies(f); err != nil {
		return err
	}
	o.selectPolicy()
	return flags.WithSource(f, o.check())
}

// applyPresets sets the flags that others stand for.
func (o *options) applyPresets() {
	_ = flags.Imply(o.flags, "--router-kv-overlap-score-weight", func() error {
		if o.overlapWeight != nil {
			o.scoring.SetOverlapScoreWeight(*o.overlapWeight)
		}
		return nil
	})
	_ = flags.Imply(o.flags, "--load-aware", func() error {
		o.scheduling.applyPresets(&o.scoring, &o.kvEvents)
		return nil
	})
}

// given reports whether a flag was given, on the command line, by the environment or by the policy file.
func (o *options) given(flag string) bool { return o.flags.Changed(flag) }

// check returns an error for the first setting that is invalid, alone or beside the others, and says what to do. It
// fills o.config.
func (o *options) check() error {
	for _, topic := range []func() error{
		func() error { return o.scheduling.check(&o.scoring, o.allowPinning && !o.ignoreHints) },
		func() error { return checkWeights(&o.scoring, o.overlapWeight) },
		func() error { return checkPolicy(&o.scoring, o.given) },
		o.checkDurations,
		o.checkEndpoints,
		o.kube.Validate,
		o.checkListeners,
		func() error { return o.transport.check(o.given) },
		o.logging.Validate,
		o.affinity.check,
		o.indexMemory.check,
		o.checkKVEvents,
		o.busy.check,
		o.checkAdmission,
		o.ejection.check,
		o.recording.Validate,
		o.checkModels,
		o.checkEngine,
	} {
		if err := topic(); err != nil {
			return err
		}
	}
	var err error
	o.config.gauges, err = o.engineGauges.config()
	return err
}

func (o *options) checkDurations() error {
	return durations(
		durationFlag{"drain-delay", o.drainDelay, true},
		durationFlag{"drain-timeout", o.drainTimeout, true},
		durationFlag{"model-load-timeout", o.modelLoadTimeout, false},
		durationFlag{"pick-timeout", o.pickTimeout, false},
		durationFlag{"tokenizer-url-timeout", o.tokenizerURLTimeout, false},
		durationFlag{"warmup-timeout", o.warmUpTimeout, true},
	)
}

// inKubernetes is the value of --dynamo-discovery for workers that write DynamoWorkerMetadata objects.
const inKubernetes = "kubernetes"

// checkEndpoints checks where endpoints come from and what they have in common.
func (o *options) checkEndpoints() error {
	switch {
	case o.endpoints == "" && !o.kube.Used():
		return errors.New(
			"no endpoints: give --endpoints FILE (docs/endpoints-file.md), or in Kubernetes --pool-name NAME",
		)
	case o.blockSize < 0 || o.blockSize > scoring.MaxBlockSize:
		return fmt.Errorf(
			"--kv-cache-block-size %d: must be a number of tokens from 1 to %d, for example 16 (0: each worker's own)",
			o.blockSize,
			scoring.MaxBlockSize,
		)
	case o.minInitialWorkers < 0:
		return fmt.Errorf(
			"--router-min-initial-workers %d: may not be negative; give a number such as 2, or 0",
			o.minInitialWorkers,
		)
	}
	if err := o.checkDiscovery(); err != nil {
		return err
	}
	if _, err := pool.NewNames(o.dnsLookupFamily, nil); err != nil {
		return fmt.Errorf("--dns-lookup-family: %w", err)
	}
	return nil
}

func (o *options) checkDiscovery() error {
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
			"--dynamo-discovery %q: must look like file:DIR or frontend:HOST:PORT, or be kubernetes; for Dynamo's "+
				"other backends, give a frontend%s",
			o.dynamoDiscovery,
			suggest.DidYouMean(kind, "", []string{"file", "frontend", inKubernetes}),
		)
	case !o.kube.Used():
		return errors.New("--dynamo-discovery kubernetes needs to know which Pods to follow: give --pool-name or " +
			"--endpoint-selector")
	}
	if o.feed.EventPlane != "" {
		return oneOf("event-plane", o.feed.EventPlane, "zmq", "nats")
	}
	return nil
}

// checkListeners checks addresses and ports, and refuses an admin address that other machines can reach without a
// token: requests there read what workers hold, and change thresholds.
func (o *options) checkListeners() error {
	switch {
	case o.grpcPort == 0 || o.grpcHealthPort == 0:
		return errors.New("--grpc-port and --grpc-health-port: must be from 1 to 65535, for example 9002 and 9003")
	case o.drainDelay > o.drainTimeout && o.given("drain-delay"):
		return fmt.Errorf(
			"--drain-delay %s is a part of --drain-timeout, which is %s; shorten the first or lengthen the second",
			o.drainDelay,
			o.drainTimeout,
		)
	case o.enablePprof && o.adminAddress == "":
		return errors.New(
			"--enable-pprof: profiles are shown at the admin address; give --admin-address too, 127.0.0.1:9091 for " +
				"example",
		)
	}
	if err := checkTraceURL(o.traceURL); err != nil {
		return fmt.Errorf("--trace-url %q: %w", o.traceURL, err)
	}
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

// maxTTL bounds the time for which kvepp assumes that a worker holds a block, so that times stay in range.
const maxTTL = 365 * 24 * time.Hour

// checkKVEvents checks the flags that say how kvepp learns which worker holds which blocks.
func (o *options) checkKVEvents() error {
	for _, ttl := range []struct {
		flag     string
		secs     float64
		mayBeOff bool
	}{{"router-ttl-secs", o.ttlSecs, false}, {"router-predicted-ttl-secs", o.predictedTTLSecs, true}} {
		if ok := ttl.secs > 0 && ttl.secs <= maxTTL.Seconds() || ttl.mayBeOff && ttl.secs == 0; !ok {
			return fmt.Errorf(
				"--%s %v: must be a positive number of seconds, at most a year, for example 120",
				ttl.flag,
				ttl.secs,
			)
		}
	}
	o.feed.Threads = 4 // of the others, so that a flood of events leaves processors for requests
	if len(o.vllmHashSeeds) > 0 {
		var err error
		if o.feed.EngineHashes, err = kvblock.NewEngineHashes(o.vllmHashSeeds); err != nil {
			return fmt.Errorf("--vllm-hash-seeds: %w", err)
		}
	}
	if err := indexerapi.CheckPeers("--index-peers", o.indexPeers); err != nil {
		return err
	}
	if err := o.checkReplicas(); err != nil {
		return err
	}
	return oneOf("router-approximate-cache-policy", o.cachePolicy, "ttl", "lru")
}

// checkModels reads the flags that name models, and checks them beside each other.
func (o *options) checkModels() (err error) {
	c := &o.config
	if c.folders, err = o.parseModels(); err != nil {
		return err
	}
	if c.rewrites, err = o.parseRewrites(); err != nil {
		return err
	}
	if c.urls, err = o.parseTokenizerURLs(); err != nil {
		return err
	}
	if c.adapters, err = o.parseAdapters(); err != nil {
		return err
	}
	switch {
	case o.tokenizerCheck < 0:
		return fmt.Errorf(
			"--tokenizer-check %d: may not be negative; give a number such as 100, or 0",
			o.tokenizerCheck,
		)
	case o.tokenizerCheck > 0 && len(c.urls) == 0:
		return errors.New("--tokenizer-check needs a server to compare with: give --tokenizer-url NAME=URL")
	}
	return nil
}

// checkEngine reads the flags about the engine, and refuses those that do not go with it.
func (o *options) checkEngine() error {
	engine, err := parseEngine(o.engine)
	if err != nil {
		return err
	}
	if o.engine == "" && o.dynamoDiscovery != "" {
		engine = prompt.Dynamo
	}
	if o.config.engine, err = o.promptFlags.options(engine); err != nil {
		return err
	}
	if err := oneOf("unknown-engine-version", o.unknownVersion, nearestVersion, loadOnlyVersion); err != nil {
		return err
	}
	switch {
	case o.injectTokens && engine != prompt.Dynamo:
		return fmt.Errorf(
			"--inject-token-data: only Dynamo's frontends take token ids beside a prompt, and --engine is %s; leave "+
				"it out",
			engine,
		)
	case o.tenantSalt && engine != prompt.VLLM:
		return fmt.Errorf(
			"--tenant-cache-salt is for stock vLLM, and --engine is %s; leave it out: Dynamo's frontends follow "+
				"x-tenant-id themselves",
			engine,
		)
	case o.tenantSalt && o.ignoreHints:
		return errors.New(
			"--tenant-cache-salt follows x-tenant-id, and --ignore-client-hints drops it; leave one of them out",
		)
	case len(o.adapters) > 0 && engine == prompt.Dynamo:
		return errors.New(
			"--lora: Dynamo's frontends serve no adapters in direct mode (their DYN_LORA_ENABLED excludes it), so " +
				"there are none to route to; leave --lora out, or give --engine vllm, sglang or trtllm if that is " +
				"what the endpoints run",
		)
	case len(o.config.urls) > 0 && engine != prompt.VLLM && engine != prompt.SGLang:
		return fmt.Errorf(
			"--tokenizer-url: with --engine %s there is no server to ask: only vLLM's and SGLang's have an endpoint "+
				"that tokenizes",
			engine,
		)
	}
	return o.proxied.check(engine)
}

// parseEngine returns the engine that --engine names.
func parseEngine(name string) (prompt.Engine, error) {
	engine, err := prompt.ParseEngine(name)
	if err != nil {
		return "", oneOf("engine", name, engineNames()...)
	}
	return engine, nil
}

func engineNames() []string {
	var names []string
	for _, e := range prompt.Engines {
		names = append(names, string(e))
	}
	return names
}

// parseModels returns model -> folder.
func (o *options) parseModels() (map[string]string, error) {
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
	return folders, nil
}

// parseTokenizerURLs returns model -> URL of the engine that tokenizes for it.
func (o *options) parseTokenizerURLs() (map[string]string, error) {
	urls := map[string]string{}
	isURL := func(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
	for _, given := range o.tokenizerURLs {
		name, address, _ := strings.Cut(given, "=")
		if isURL(given) {
			if len(o.config.folders) != 1 {
				return nil, fmt.Errorf(
					"--tokenizer-url %q: say for which model, as NAME=URL: there are %d",
					given,
					len(o.config.folders),
				)
			}
			for only := range o.config.folders {
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

// onlyModel returns the model if there is exactly one, else "".
func (c *config) onlyModel() string {
	names := map[string]bool{}
	for name := range c.folders {
		names[name] = true
	}
	for name := range c.urls {
		names[name] = true
	}
	if len(names) == 1 {
		for name := range names {
			return name
		}
	}
	return ""
}

// parseAdapters returns adapter -> model.
func (o *options) parseAdapters() (map[string]string, error) {
	adapters := map[string]string{}
	for _, a := range o.adapters {
		name, model, ok := strings.Cut(a, "=")
		if !ok {
			if model = o.config.onlyModel(); model == "" {
				return nil, fmt.Errorf("--lora %q needs its model, because there is not exactly one: write NAME=MODEL",
					a)
			}
		}
		if name == "" || model == "" {
			return nil, fmt.Errorf("--lora %q: must look like NAME=MODEL", a)
		}
		if o.engine == string(prompt.SGLang) { // requests name it so, and events do not
			name = strings.TrimPrefix(name, model+":")
		}
		if _, twice := adapters[name]; twice {
			return nil, fmt.Errorf("--lora: %q is given twice", name)
		}
		adapters[name] = model
	}
	return adapters, nil
}

// parseRewrites returns the rules of --model-rewrite: one for each name that requests give, in the order of the flags.
func (o *options) parseRewrites() ([]modelrewrite.Rule, error) {
	var rules []modelrewrite.Rule
	of := map[string]int{} // name -> index in rules
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

// maxDecisions are the latest decisions that the admin address shows.
const maxDecisions = 1000

// keptDecisions returns how many decisions kvepp keeps: none if no admin address could show them.
func (o *options) keptDecisions() int {
	if o.adminAddress == "" {
		return 0
	}
	return maxDecisions
}

// index returns the bounds of the index. goLimit is indexBytes's.
func (o *options) index(goLimit int64) indexer.Config {
	c := indexer.Config{MaxBytes: o.indexBytes(goLimit)}
	if !o.kvEvents {
		c.MaxPredicted, c.PruneTarget = indexer.DefaultMaxPredicted, indexer.DefaultPruneTarget
	}
	return c
}

// predict returns how routing decisions count as stored blocks.
func (o *options) predict() router.Predict {
	if o.kvEvents {
		return router.Predict{TTL: seconds(o.predictedTTLSecs), Silent: seconds(o.ttlSecs)}
	}
	return router.Predict{TTL: seconds(o.ttlSecs), LRU: o.cachePolicy == "lru", Alone: true}
}

func seconds(secs float64) time.Duration { return time.Duration(secs * float64(time.Second)) }

// wantsEvents reports whether kvepp subscribes to KV events: it routes by what workers hold, and learns that from
// events.
func (o *options) wantsEvents() bool {
	return o.kvEvents && o.scoring.OverlapScoreCredit > 0 && o.scoring.Mode == scoring.KV
}

// hostName returns the name of this machine or Pod; empty: not known.
func hostName() string {
	name, _ := os.Hostname()
	return name
}

// identity returns the labels of the metrics that have Dynamo's names.
func (o *options) identity() metrics.Identity {
	return metrics.Identity{Namespace: o.dynamoNamespace, Component: "backend",
		RouterID: kvblock.InstanceID(hostName())} // without a name, the id of the empty one
}

// unusedFlags collects the flags that were given and have no effect.
type unusedFlags struct {
	given func(flag string) bool
	lines []string // one for each flag: its name and why it has no effect
}

// add adds those of the flags that were given.
func (u *unusedFlags) add(why string, flags ...string) {
	for _, flag := range flags {
		if u.given(flag) {
			u.lines = append(u.lines, "--"+flag+": "+why)
		}
	}
}

// indexFlags have an effect only while kvepp keeps an index.
var indexFlags = []string{
	"router-kv-events",
	"router-ttl-secs",
	"router-approximate-cache-policy",
	"router-predicted-ttl-secs",
	"index-max-bytes",
	"vllm-hash-seeds",
	"index-peers",
	"warmup-timeout",
}

// withoutEffect returns a line for each flag that was given and has no effect beside the others.
func (o *options) withoutEffect() []string {
	unused := unusedFlags{given: o.given}
	if !o.kube.Used() {
		unused.add(
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
	case !o.kube.MetricsAuth:
	case !o.kube.Used():
		unused.add(
			"acts with --pool-name or --endpoint-selector only; --metrics-token-file guards metrics elsewhere",
			"metrics-endpoint-auth",
		)
	case o.metricsTokenFile != "":
		unused.add("--metrics-token-file says who may read metrics", "metrics-endpoint-auth")
	}
	if !o.kube.LeaderElection {
		unused.add("acts with --ha-enable-leader-election only", "ha-lease-name", "ha-handover-timeout")
	}
	o.scheduling.unused(&unused)
	unused.lines = append(unused.lines, givenRetired(o.flags)...)
	o.busy.unused(&unused, o.scoring.TrackPrefillTokens)
	o.ejection.unused(&unused)
	o.engineGauges.unused(&unused)
	switch {
	case o.scoring.Mode != scoring.KV:
		unused.add("acts with --router-mode kv only", indexFlags...)
		unused.add(
			"acts with --router-mode kv only",
			"router-kv-overlap-score-credit",
			"router-kv-overlap-score-credit-decay",
			"router-prefill-load-scale",
			"router-kv-overlap-score-weight",
			"router-decode-active-request-weight",
			"router-kv-usage-weight",
			"router-temperature",
			"router-host-cache-hit-weight",
			"router-disk-cache-hit-weight",
		)
	case o.scoring.OverlapScoreCredit == 0:
		unused.add("cached blocks have no credit, so kvepp keeps no index of them", indexFlags...)
	case o.kvEvents:
		unused.add(
			"acts with --no-router-kv-events only",
			"router-approximate-cache-policy",
		)
	default:
		unused.add("acts with KV events only", "router-predicted-ttl-secs", "index-max-bytes",
			"vllm-hash-seeds", "index-peers", "warmup-timeout")
	}
	return unused.lines
}

// checkTraceURL checks the template of addresses of traces. The page shows it to each of its readers, as a link.
func checkTraceURL(template string) error {
	if template == "" {
		return nil
	}
	const example = ", for example https://jaeger.example.com/trace/" + admin.TraceIDPart
	before, _, found := strings.Cut(template, admin.TraceIDPart)
	if !found {
		return errors.New("must have " + admin.TraceIDPart + " in place of the trace's id" + example)
	}
	u, err := url.Parse(strings.ReplaceAll(template, admin.TraceIDPart, strings.Repeat("0", 32)))
	switch urlErr := (*url.Error)(nil); {
	case errors.As(err, &urlErr):
		return urlErr.Err
	case err != nil:
		return err
	case u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return errors.New("must begin with http:// or https:// and a host" + example)
	case u.User != nil:
		return errors.New("must not have a user or password, which the page would show")
	case !strings.ContainsAny(strings.TrimPrefix(before, u.Scheme+"://"), "/?#"):
		return errors.New("must have " + admin.TraceIDPart + " after the host" + example)
	}
	return nil
}
