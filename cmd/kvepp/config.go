package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/router/admission"
	"kvepp/router/eject"
	"kvepp/router/queue"
	"kvepp/router/record"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/serve/admin"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/join"
	"kvepp/serve/listen"
	"kvepp/serve/llmd"
	"kvepp/serve/models"
)

// options are the settings of `kvepp serve`: one field for each flag, and in config what follows from them. parseServe
// fills and checks them once; nothing changes them after that.
type options struct {
	ports                            listen.Config
	adminTokenFile, metricsTokenFile string
	indexPeers                       []string
	warmUpTimeout                    time.Duration
	transport
	replicaFlags

	sources join.Config
	models  models.Config

	traceURL        string
	dynamoNamespace string

	kvEvents, lru     bool // lru: kvepp forgets assumed blocks by workers' sizes, not by ttl
	ttl, predictedTTL time.Duration

	loadAware       bool // a preset
	inheritedDirect bool // the environment had DYN_ROUTER_MODE=direct
	scoring         scoring.Config
	prefill         scoring.PrefillModel
	affinity        session.Config
	queue           queue.Config
	hold            admission.Config
	ejection        eject.Config
	routing         router.Config  // the part that flags set
	proxy           extproc.Config // the part that flags set

	gauges enginemetrics.Config // Interval is 0: kvepp does not read engines' metrics

	feed   feed.Config
	bounds indexer.Config

	logging
	recording record.Config

	settingsFile

	parseAgain func() (*options, error) // from the same arguments, when a file that they name has changed

	seat     *llmd.Seat // nil: kvepp was not started as llm-d's picker
	noTraces bool       // also if the environment asks for them
}

// parseServe reads the arguments, the environment and the file of --config into o. Precedence: flag, KVEPP_<FLAG>,
// file, Dynamo's variable: a process often inherits Dynamo's variables, but the file is written for kvepp. An
// environment variable that is set but empty counts as not set.
func parseServe(o *options, args []string, getenv func(string) string) error {
	o.parseAgain = func() (*options, error) {
		again := &options{seat: o.seat}
		return again, parseServe(again, args, getenv)
	}
	return parseWith(o, serveFlags(o), args, getenv)
}

// parseWith is parseServe for a command that has further flags: f has those of o and the others.
func parseWith(o *options, f *pflag.FlagSet, args []string, getenv func(string) string) error {
	o.reads(f, getenv)
	if err := parse(f, args, &o.Path, withoutDirect(getenv)); err != nil {
		return err
	}
	if err := absentVariables(getenv); err != nil {
		return err
	}
	o.sources.Kube.KVEventsGiven = o.given("kv-events-port")
	o.inheritedDirect = getenv(modeVariable) == scoring.Direct.String() && !o.given("router-mode")
	o.applyPresets()
	if err := o.queue.Read(f, absentFlag); err != nil {
		return err
	}
	o.selectPolicy()
	if err := o.check(); err != nil {
		return flags.WithSource(f, err)
	}
	return o.sit()
}

const modeVariable = "DYN_ROUTER_MODE"

// withoutDirect is getenv without Dynamo's router mode direct. A pod has it in its environment for the frontend; it
// does not say how the endpoint picker of that frontend chooses.
func withoutDirect(getenv func(string) string) func(string) string {
	return func(name string) string {
		value := getenv(name)
		switch {
		case name == modeVariable && value == scoring.Direct.String():
			return ""
		case name == "DYN_SYSTEM_PORT" && value == "-1":
			return "0" // no port: Dynamo writes -1, kvepp 0
		}
		return value
	}
}

// applyPresets sets the flags that others stand for.
func (o *options) applyPresets() {
	if c := &o.scoring; o.loadAware {
		flags.Imply(o.flags, "--load-aware", func() {
			c.OverlapScoreCredit, o.kvEvents = 0, false
			c.TrackActiveBlocks, c.TrackPrefillTokens, c.AssumeKVReuse = true, true, false
		})
	}
}

// dynamosFlags are the flags that are meant for Dynamo's cost: they set a weight of it, select it by name, or have its
// unit.
var dynamosFlags = append([]string{"load-aware", "router-temperature", "router-worker-selection-policy"},
	scoring.DynamoWeights...)

// selectPolicy sets --router-policy to dynamo if it is not given and another setting is meant for Dynamo's cost.
func (o *options) selectPolicy() {
	if o.given("router-policy") {
		return
	}
	selectDynamo := func(because string) {
		flags.Imply(o.flags, because, func() { o.scoring.Policy = scoring.Dynamo })
	}
	if o.scoring.Mode != scoring.KV { // prices no worker
		selectDynamo("--router-mode")
	}
	if o.queue.File != nil && o.queue.File.Selection != nil {
		selectDynamo("worker_selection in --router-policy-config")
	}
	for _, flag := range dynamosFlags {
		off := slices.Contains([]string{"", "0", "false"}, o.flags.Lookup(flag).Value.String())
		if o.given(flag) && (!off || slices.Contains(scoring.DynamoWeights, flag)) {
			selectDynamo("--" + flag)
		}
	}
}

// given reports whether a flag was given, on the command line, by the environment or by the policy file.
func (o *options) given(flag string) bool { return o.flags.Changed(flag) }

// check returns an error for the first setting that is invalid, alone or beside the others, and says what to do. It
// fills o.config.
func (o *options) check() error {
	for _, topic := range []func() error{
		o.checkChoice,
		o.checkDurations,
		o.sources.Validate,
		o.checkListeners,
		func() error { return o.transport.Validate(o.given) },
		o.logging.Validate,
		o.affinity.Validate,
		o.bounds.Validate,
		o.feed.Validate,
		o.checkKVEvents,
		func() error { return checkThresholds(&o.routing.Thresholds) },
		o.proxy.Validate,
		o.queue.Validate,
		o.hold.Validate,
		o.ejection.Validate,
		o.checkModels,
		o.gauges.Validate,
		o.checkGateway,
	} {
		if err := topic(); err != nil {
			return err
		}
	}
	if o.proxy.Shadow { // kvepp writes neither into a body, so blocks have no salt of it
		o.routing.TenantSalt, o.routing.InjectTokens = false, false
	}
	return nil
}

// checkChoice checks the flags that say how kvepp chooses a worker.
func (o *options) checkChoice() error {
	switch {
	case o.scoring.Mode == scoring.Direct && (!o.routing.Pinning || o.routing.IgnoreHints):
		return errors.New("--router-mode direct sends each request to the worker that it names, and needs " +
			"--allow-client-pinning, without --ignore-client-hints. (Dynamo's frontends behind kvepp run in direct " +
			"mode, because kvepp chooses for them: give that flag to the frontends, not to kvepp)")
	case o.hold.On && o.scoring.Mode != scoring.KV:
		return fmt.Errorf("--router-admission working-set knows conversations in --router-mode kv only, not %v: leave "+
			"out one of the two", o.scoring.Mode)
	}
	return cmp.Or(o.prefill.Validate(&o.scoring), o.scoring.ValidateFlags(o.flags))
}

// checkThresholds checks the busy thresholds, whose errors have Dynamo's names.
func checkThresholds(t *router.Thresholds) error {
	if err := t.Validate(); err != nil {
		flag, says, _ := strings.Cut(err.Error(), " ")
		return fmt.Errorf("--%s %s", strings.ReplaceAll(flag, "_", "-"), says)
	}
	return nil
}

func (o *options) checkDurations() error {
	return cmp.Or(flags.NotNegative("drain-delay", o.ports.DrainDelay),
		flags.NotNegative("drain-timeout", o.ports.DrainTimeout), flags.NotNegative("warmup-timeout", o.warmUpTimeout))
}

// checkListeners checks addresses and ports, and refuses an admin address that other machines can reach without a
// token: requests there read what workers hold, and change thresholds.
func (o *options) checkListeners() error {
	switch {
	case o.ports.GRPCPort == 0 || o.ports.HealthPort == 0:
		return errors.New("--grpc-port and --grpc-health-port: must be from 1 to 65535, for example 9002 and 9003")
	case o.ports.DrainDelay > o.ports.DrainTimeout && o.given("drain-delay"):
		return fmt.Errorf(
			"--drain-delay %s is a part of --drain-timeout, which is %s; shorten the first or lengthen the second",
			o.ports.DrainDelay,
			o.ports.DrainTimeout,
		)
	}
	if err := checkTraceURL(o.traceURL); err != nil {
		return fmt.Errorf("--trace-url %q: %w", o.traceURL, err)
	}
	if o.ports.AdminAddress != "" {
		host, _, err := net.SplitHostPort(o.ports.AdminAddress)
		if err != nil {
			return fmt.Errorf("--admin-address %q: must look like HOST:PORT", o.ports.AdminAddress)
		}
		if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() && o.adminTokenFile == "" {
			return fmt.Errorf(
				"--admin-address %s can be reached from elsewhere, and nothing guards it: give --admin-token-file as "+
					"well, or listen at 127.0.0.1",
				o.ports.AdminAddress,
			)
		}
	}
	metricsPort := o.ports.MetricsPort
	if o.ports.MetricsAddress != "" {
		metricsPort = 0
	}
	switch {
	case o.ports.GRPCPort == o.ports.HealthPort:
		return fmt.Errorf("--grpc-port and --grpc-health-port are both %d; give each a port of its own",
			o.ports.GRPCPort)
	case metricsPort == o.ports.GRPCPort:
		return fmt.Errorf("--metrics-port and --grpc-port are both %d; give each a port of its own", metricsPort)
	case metricsPort == o.ports.HealthPort:
		return fmt.Errorf("--metrics-port and --grpc-health-port are both %d; give each a port of its own", metricsPort)
	case o.ports.MetricsAddress == "":
		return nil
	}
	if _, _, err := net.SplitHostPort(o.ports.MetricsAddress); err != nil {
		return fmt.Errorf("--metrics-address %q: must look like HOST:PORT", o.ports.MetricsAddress)
	}
	return nil
}

// maxTTL bounds the time for which kvepp assumes that a worker holds a block, so that times stay in range.
const maxTTL = 365 * 24 * time.Hour

// checkKVEvents checks the flags that say how kvepp learns which worker holds which blocks.
func (o *options) checkKVEvents() error {
	for _, ttl := range []struct {
		flag     string
		value    time.Duration
		mayBeOff bool
	}{{"router-ttl-secs", o.ttl, false}, {"router-predicted-ttl-secs", o.predictedTTL, true}} {
		if ok := ttl.value > 0 && ttl.value <= maxTTL || ttl.mayBeOff && ttl.value == 0; !ok {
			return fmt.Errorf("--%s %v: must be a positive number of seconds, at most a year, for example 120",
				ttl.flag, ttl.value.Seconds())
		}
	}
	return cmp.Or(indexerapi.CheckPeers("--index-peers", o.indexPeers), o.checkReplicas())
}

// checkModels checks the flags about models and the engine, and refuses those that do not go with the engine.
func (o *options) checkModels() error {
	o.models.Discovery = o.sources.Discovery != ""
	if err := o.models.Validate(); err != nil {
		return err
	}
	o.routing.Engine, o.routing.Scoring = o.models.Engine(), o.scoring
	return cmp.Or(o.checkDisaggregation(), o.routing.Validate())
}

// checkDisaggregation reads the policy of conditional disaggregation, and checks that decode workers can be told to
// work alone.
func (o *options) checkDisaggregation() error {
	d := &o.routing.Disaggregation
	if err := d.Read(&o.scoring, o.queue.Threshold); err != nil || !d.On {
		return err
	}
	o.prefill.TransferSeconds = d.TransferMS / 1000
	switch {
	case !o.wantsEvents():
		return errors.New("--router-conditional-disagg judges by what decode workers hold, which KV events say: " +
			"leave out what turns them off")
	case d.Via == scoring.ViaNvext && (o.proxy.PrefillerHeader || o.models.Engine() != prompt.Dynamo):
		return errors.New("--router-conditional-disagg-config: via nvext is for Dynamo's frontends: leave it out, or " +
			"leave out --prefiller-header and give --engine dynamo")
	case d.Via != scoring.ViaNvext && !o.proxy.PrefillerHeader:
		return errors.New("--router-conditional-disagg: Dynamo's frontends in direct mode answer 500 to a request " +
			"without a prefill worker, so a decode worker behind them cannot work alone; give --prefiller-header, " +
			"with stock engines behind llm-d's sidecar, or \"via\":\"nvext\" in the JSON, with frontends in KV mode " +
			"(docs/disaggregation.md)")
	}
	return nil
}

// checkGateway refuses what the gateway that --gateway names cannot do (docs/gateways.md).
func (o *options) checkGateway() error {
	nginx := o.proxy.Gateway == extproc.GatewayNGINX
	const oneHeader = "gives the engine no header but the endpoint's"
	for _, c := range []struct {
		refused   bool
		flag, why string
	}{
		{o.proxy.OneEndpoint() && o.routing.Fallbacks > 0, "--fallback-endpoints", "takes one endpoint for a request"},
		{nginx && o.routing.Engine == prompt.Dynamo, "--engine dynamo",
			oneHeader + ", and Dynamo's frontends need the worker's"},
		{nginx && o.proxy.PrefillerHeader, "--prefiller-header", oneHeader},
		{nginx && o.gauges.Interval == 0, "--refresh-metrics-interval 0",
			"shows no responses, so loads are known from engines' metrics alone"},
	} {
		if c.refused {
			return fmt.Errorf("%s: --gateway %s %s; leave one of the two out (docs/gateways.md)", c.flag,
				o.proxy.Gateway, c.why)
		}
	}
	return nil
}

// maxDecisions are the latest decisions that the admin address shows.
const maxDecisions = 1000

// keptDecisions returns how many decisions kvepp keeps: none if no admin address could show them.
func (o *options) keptDecisions() int {
	if o.ports.AdminAddress == "" {
		return 0
	}
	return maxDecisions
}

// predictedBytes is what a block takes at most that kvepp assumes held, which the index does not count in its bytes.
const predictedBytes = 256

// index returns the bounds of the index. goLimit is that of Bytes.
func (o *options) index(goLimit int64) indexer.Config {
	c := indexer.Config{MaxBytes: o.bounds.Bytes(goLimit)}
	if !o.kvEvents {
		c.MaxPredicted = int(min(indexer.DefaultMaxPredicted, max(c.MaxBytes/predictedBytes, 1)))
		c.PruneTarget = indexer.DefaultPruneTarget
	}
	return c
}

// predict returns how routing decisions count as stored blocks.
func (o *options) predict() router.Predict {
	if o.kvEvents {
		return router.Predict{TTL: o.predictedTTL, Silent: o.ttl}
	}
	return router.Predict{TTL: o.ttl, LRU: o.lru, Alone: true}
}

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

// indexFlags have an effect only while kvepp keeps an index.
var indexFlags = []string{
	"router-kv-events",
	"router-ttl-secs",
	"router-approximate-cache-policy",
	"router-predicted-ttl-secs",
	"index-max-bytes",
	"index-peers",
	"warmup-timeout",
}

// withoutEffect returns a line for each flag that was given and has no effect beside the others.
func (o *options) withoutEffect() []string {
	unused := flags.Unused{Set: o.flags}
	if !o.sources.Kube.Used() {
		unused.Add(
			"acts with --pool-name or --endpoint-selector only",
			"kubeconfig",
			"pool-group",
			"kv-events-port",
			"kv-replay-port",
			"data-parallel-size",
		)
	}
	switch {
	case !o.sources.Kube.MetricsAuth:
	case !o.sources.Kube.Used():
		unused.Add(
			"acts with --pool-name or --endpoint-selector only; --metrics-token-file guards metrics elsewhere",
			"metrics-endpoint-auth",
		)
	case o.metricsTokenFile != "":
		unused.Add("--metrics-token-file says who may read metrics", "metrics-endpoint-auth")
	}
	if !o.sources.Kube.LeaderElection {
		unused.Add("acts with --ha-enable-leader-election only", "ha-lease-name", "ha-handover-timeout")
	}
	if o.inheritedDirect {
		unused.Lines = append(unused.Lines, "DYN_ROUTER_MODE=direct: sets how Dynamo's frontends run behind kvepp; "+
			"kvepp itself chooses by --router-mode "+o.scoring.Mode.String())
	}
	if name := o.flags.Lookup("router-prefill-load-model").Value.String(); o.prefill.Linear && name != "linear" {
		unused.Lines = append(unused.Lines, "--router-prefill-load-model "+name+
			": treated as linear, at the speed of --router-prefill-tokens-per-second, or a learned one")
	}
	unused.Lines = append(unused.Lines, givenRetired(o.flags)...)
	o.queue.AddUnused(&unused, o.hold.On)
	if o.proxy.Shadow {
		unused.Add("with --shadow kvepp only reads requests", "router-queue-threshold", "router-admission",
			"router-session-affinity-ttl-secs", "fallback-endpoints", "decision-headers", "hold-when-empty",
			"inject-token-data", "tenant-cache-salt")
	} else {
		unused.Add("acts with --shadow only", "shadow-share")
	}
	if !o.scoring.TrackPrefillTokens {
		unused.Add("prompt tokens are not counted (--no-router-track-prefill-tokens)", "router-queue-threshold",
			"active-prefill-tokens-threshold", "active-prefill-tokens-threshold-frac")
	}
	o.ejection.AddUnused(&unused)
	if o.proxy.Gateway == extproc.GatewayNGINX {
		unused.Add("--gateway nginx shows kvepp no responses", "decision-headers", "eject-first-byte",
			"router-track-output-blocks")
	}
	if o.gauges.Interval == 0 {
		unused.Add("with --refresh-metrics-interval=0 kvepp never reads engines' metrics", enginemetrics.Flags...)
	}
	switch {
	case o.scoring.Mode != scoring.KV:
		unused.Add("acts with --router-mode kv only", indexFlags...)
		unused.Add(
			"acts with --router-mode kv only",
			"router-kv-overlap-score-credit",
			"router-kv-overlap-score-credit-decay",
			"router-prefill-load-scale",
			"router-decode-active-request-weight",
			"router-temperature",
			"router-host-cache-hit-weight",
			"router-disk-cache-hit-weight",
		)
	case o.scoring.OverlapScoreCredit == 0:
		unused.Add("cached blocks have no credit, so kvepp keeps no index of them", indexFlags...)
	case o.kvEvents:
		unused.Add(
			"acts with --no-router-kv-events only",
			"router-approximate-cache-policy",
		)
	default:
		unused.Add("acts with KV events only", "router-predicted-ttl-secs", "index-peers",
			"warmup-timeout")
	}
	return unused.Lines
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
