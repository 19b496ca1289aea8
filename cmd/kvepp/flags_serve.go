package main

import (
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// serveFlags declares the flags of `kvepp serve` over o, with the defaults in it. Help lists them in this order.
func serveFlags(o *options) *pflag.FlagSet {
	f := flags.New("kvepp serve")
	for _, s := range []struct {
		title string
		add   func(*pflag.FlagSet)
	}{
		{"Settings", o.settingsFile.AddFlags},
		{"", o.sources.AddFlags},
		{"", o.models.AddFlags},
		{"External processor", o.addExternalProcessor},
		{"Metrics and traces", o.addMetrics},
		{"Admin address", o.addAdmin},
		{"Start and shutdown", o.addLife},
		{"How kvepp chooses", o.addChoice},
		{"KV events and the index", o.addKVEvents},
		{"Sessions", o.affinity.AddFlags},
		{"Replicas", o.sharing.AddFlags},
		{"", o.proxy.AddFlags},
		{"", o.routing.AddFlags},
		{"Overload and the queue", o.addQueue},
		{"Ejection of failing endpoints", o.ejection.AddFlags},
		{"Engines' own metrics", o.gauges.AddFlags},
		{"Logs", o.addLogs},
	} {
		s.add(f)
		flags.Section(f, s.title)
	}
	addRetired(f)
	flags.NameVariables(f, "")
	return f
}

func (o *options) addExternalProcessor(f *pflag.FlagSet) {
	f.StringVar(&o.ports.BindAddress, "bind-address", "", "`ADDRESS` to listen on. Empty: all interfaces")
	f.Uint16Var(&o.ports.GRPCPort, "grpc-port", 9002, "`PORT` at which Envoy calls kvepp (ext_proc)")
	f.Uint16Var(&o.ports.HealthPort, "grpc-health-port", 9003,
		"`PORT` of the gRPC health service without TLS; it also answers at --grpc-port")
	o.transport.AddFlags(f)
}

func (o *options) addMetrics(f *pflag.FlagSet) {
	f.Uint16Var(&o.ports.MetricsPort, "metrics-port", 9090, "`PORT` of Prometheus metrics, at /metrics; 0: none")
	f.StringVar(&o.ports.MetricsAddress, "metrics-address", "",
		"`HOST:PORT` of the metrics, in place of --bind-address and --metrics-port")
	f.StringVar(&o.metricsTokenFile, "metrics-token-file", "",
		"`FILE` with the token that requests for metrics must bring, as \"Authorization: Bearer TOKEN\"; kvepp reads "+
			"it again when it changes. Empty: anyone may read metrics")
	f.StringVar(&o.dynamoNamespace, "dynamo-namespace", "dynamo",
		"the label dynamo_namespace of the metrics that have Dynamo's names, `NAME`")
	flags.Inherit(f, "metrics-port", "DYN_EPP_METRICS_PORT", "dynamo-namespace", "DYN_NAMESPACE")
}

func (o *options) addAdmin(f *pflag.FlagSet) {
	f.StringVar(&o.ports.AdminAddress, "admin-address", "",
		"`HOST:PORT` of the web page (/), for kvepp workers, cordon and drain, and for queries about the index and "+
			"decisions. Its paths: /workers, /debug/fleet, /debug/decisions, /busy_threshold as in "+
			"dynamo.frontend, /query, /query_by_hash, /dump and /health as in dynamo.indexer, and /debug/pprof/ for "+
			"\"go tool pprof\". Empty: none")
	f.StringVar(&o.adminTokenFile, "admin-token-file", "",
		"`FILE` with the token that requests at --admin-address, except /health, must bring, as \"Authorization: "+
			"Bearer TOKEN\"; the page asks for it once. kvepp reads it again when it changes. Without it "+
			"--admin-address must be a loopback address")
	o.ports.Hosts.AddFlags(f)
	f.StringVar(&o.traceURL, "trace-url", "",
		"`URL` of a trace in Jaeger, Tempo or Grafana, with {trace_id} in place of its id: the page links each "+
			"decision to it whose spans kvepp exports, and /debug/decisions has it as trace_url. None: no link")
}

func (o *options) addIndexPeers(f *pflag.FlagSet) {
	f.StringSliceVar(&o.indexPeers, "index-peers", nil,
		"admin addresses of other kvepps, or of dynamo.indexer, as `URLS` separated by commas: at start kvepp copies "+
			"the index of the first that answers. It sends them the token of --admin-token-file")
	f.DurationVar(&o.warmUpTimeout, "warmup-timeout", 10*time.Second,
		"how long the start waits for --index-peers; after that kvepp serves with the index that it has")
}

func (o *options) addLife(f *pflag.FlagSet) {
	f.DurationVar(&o.ports.DrainTimeout, "drain-timeout", 30*time.Second,
		"after SIGTERM, how long running requests may take to end")
	f.DurationVar(&o.ports.DrainDelay, "drain-delay", 5*time.Second,
		"after SIGTERM, how long kvepp still serves new requests, so that proxies notice that health checks say "+
			"NOT_SERVING; a part of --drain-timeout")
}

func (o *options) addKVEvents(f *pflag.FlagSet) {
	f.BoolVar(&o.kvEvents, "router-kv-events", true,
		"subscribe to the engines' KV events. Off: approximate mode, in which kvepp assumes that a worker holds what "+
			"it was sent, for --router-ttl-secs")
	flags.Seconds(f, &o.ttl, "router-ttl-secs", 2*time.Minute, false,
		"how many `SECONDS` after the latest request with a block kvepp assumes that the worker holds it, in "+
			"approximate mode and for workers whose KV events do not arrive")
	flags.Either(f, &o.lru, "router-approximate-cache-policy", "ttl", "lru",
		"in approximate mode, when kvepp forgets a block, `POLICY`: ttl (after --router-ttl-secs), or lru (when a "+
			"worker with a known number of blocks has more than that; other workers as with ttl)")
	flags.Seconds(f, &o.predictedTTL, "router-predicted-ttl-secs", 0, false,
		"with KV events, for how many `SECONDS` kvepp also assumes that a worker holds the prompts sent to it, "+
			"so that a burst of requests with one new prefix finds its first copy before any event. 0: off")
	o.feed.AddFlags(f)
	flags.Negatable(f, "router-kv-events")
	flags.Inherit(f, "router-kv-events", "DYN_ROUTER_USE_KV_EVENTS", "router-ttl-secs", "DYN_ROUTER_TTL_SECS",
		"router-approximate-cache-policy", "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
		"router-predicted-ttl-secs", "DYN_ROUTER_PREDICTED_TTL_SECS")
	o.bounds.AddFlags(f)
	o.addIndexPeers(f)
}

// addChoice declares the flags that say how kvepp chooses a worker, and what a running request counts for.
func (o *options) addChoice(f *pflag.FlagSet) {
	o.scoring.AddFlags(f)
	f.BoolVar(&o.loadAware, "load-aware", false,
		"Dynamo's preset: choose by load alone, and count every request's blocks in full. It sets "+
			"--router-kv-overlap-score-credit 0, --no-router-kv-events, --no-router-assume-kv-reuse, and the tracking "+
			"of active blocks and prefill tokens")
	flags.Negatable(f, "load-aware")
	flags.Inherit(f, "load-aware", "DYN_ROUTER_LOAD_AWARE")
	o.prefill.AddFlags(f)
	o.routing.Disaggregation.AddFlags(f)
}

// addQueue declares the flags that hold requests back.
func (o *options) addQueue(f *pflag.FlagSet) {
	o.queue.AddFlags(f)
	o.queue.AddHoldFlag(f)
	o.queue.AddInstanceFlag(f)
	o.hold.AddFlags(f)
}

func (o *options) addLogs(f *pflag.FlagSet) {
	o.logging.AddFlags(f, " (one line per request, with the decision)")
	o.logging.AddAccessFlags(f)
	o.recording.AddFlags(f)
}
