package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/tokenizer"
)

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

// dynamoEnv names the environment variables by which Dynamo's own router takes the same setting. They are not always
// the flag in capitals. Source: dynamo-kv-router 1.6.1, scheduling configuration; kv_router_args.
var dynamoEnv = map[string]string{
	"kv-cache-block-size":                  "DYN_KV_CACHE_BLOCK_SIZE",
	"model-name":                           "DYN_MODEL_NAME",
	"secure-serving":                       "DYN_SECURE_SERVING",
	"metrics-port":                         "DYN_EPP_METRICS_PORT",
	"dynamo-namespace":                     "DYN_NAMESPACE",
	"event-plane":                          "DYN_EVENT_PLANE",
	"nats-server":                          "NATS_SERVER",
	"router-kv-events":                     "DYN_ROUTER_USE_KV_EVENTS",
	"router-ttl-secs":                      "DYN_ROUTER_TTL_SECS",
	"router-max-tree-size":                 "DYN_ROUTER_MAX_TREE_SIZE",
	"router-prune-target-ratio":            "DYN_ROUTER_PRUNE_TARGET_RATIO",
	"router-approximate-cache-policy":      "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
	"router-predicted-ttl-secs":            "DYN_ROUTER_PREDICTED_TTL_SECS",
	"router-event-threads":                 "DYN_ROUTER_EVENT_THREADS",
	"router-durable-kv-events":             "DYN_ROUTER_DURABLE_KV_EVENTS",
	"router-snapshot-threshold":            "DYN_ROUTER_SNAPSHOT_THRESHOLD",
	"router-reset-states":                  "DYN_ROUTER_RESET_STATES",
	"use-remote-indexer":                   "DYN_USE_REMOTE_INDEXER",
	"router-mode":                          "DYN_ROUTER_MODE",
	"router-min-initial-workers":           "DYN_ROUTER_MIN_INITIAL_WORKERS",
	"encoder-cuda-to-cpu-ratio":            "DYN_ENCODER_CUDA_TO_CPU_RATIO",
	"load-aware":                           "DYN_ROUTER_LOAD_AWARE",
	"router-host-cache-hit-weight":         "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
	"router-disk-cache-hit-weight":         "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
	"shared-cache-type":                    "DYN_SHARED_CACHE_TYPE",
	"shared-cache-multiplier":              "DYN_SHARED_CACHE_MULTIPLIER",
	"router-track-output-blocks":           "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
	"router-prefill-load-model":            "DYN_ROUTER_PREFILL_LOAD_MODEL",
	"router-replica-sync":                  "DYN_ROUTER_REPLICA_SYNC",
	"serve-indexer":                        "DYN_SERVE_INDEXER",
	"enable-session-prefix-index":          "DYN_ENABLE_SESSION_PREFIX_INDEX",
	"router-conditional-disagg":            "DYN_ROUTER_CONDITIONAL_DISAGG",
	"router-conditional-disagg-config":     "DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
	"router-prefill-policy":                "DYN_ROUTER_PREFILL_POLICY",
	"router-decode-policy":                 "DYN_ROUTER_DECODE_POLICY",
	"router-tracking-hash":                 "DYN_ROUTER_TRACKING_HASH",
	"router-tracking-key-file":             "DYN_ROUTER_TRACKING_KEY_FILE",
	"router-tracking-key-id":               "DYN_ROUTER_TRACKING_KEY_ID",
	"kv-overlap-score-weight":              "DYN_OVERLAP_SCORE_WEIGHT",
	"system-port":                          "DYN_SYSTEM_PORT",
	"router-kv-overlap-score-credit":       "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
	"router-kv-overlap-score-credit-decay": "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
	"router-kv-overlap-score-weight":       "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
	"router-prefill-load-scale":            "DYN_ROUTER_PREFILL_LOAD_SCALE",
	"router-decode-active-request-weight":  "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
	"router-temperature":                   "DYN_ROUTER_TEMPERATURE",
	"router-session-affinity-ttl-secs":     "DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
	"router-session-affinity-mode":         "DYN_ROUTER_SESSION_AFFINITY_MODE",
	"router-track-active-blocks":           "DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
	"router-track-prefill-tokens":          "DYN_ROUTER_TRACK_PREFILL_TOKENS",
	"router-assume-kv-reuse":               "DYN_ROUTER_ASSUME_KV_REUSE",
	"active-request-expiry-secs":           "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
	"active-decode-blocks-threshold":       "DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
	"active-prefill-tokens-threshold":      "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
	"active-prefill-tokens-threshold-frac": "DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
	"router-queue-threshold":               "DYN_ROUTER_QUEUE_THRESHOLD",
	"router-queue-policy":                  "DYN_ROUTER_QUEUE_POLICY",
	"router-policy-config":                 "DYN_ROUTER_POLICY_CONFIG",
	"shed-retry-after":                     "DYN_EPP_SHED_RETRY_AFTER_SECS",
	"overload-status-code":                 "DYN_HTTP_OVERLOAD_STATUS_CODE",
	"pool-name":                            "DYN_EPP_INFERENCE_POOL_NAME",
	"pool-namespace":                       "POD_NAMESPACE",
	"kv-events-port":                       "DYN_EPP_KV_EVENT_PORT",
	"kv-replay-port":                       "DYN_EPP_KV_EVENT_REPLAY_PORT",
}

// kveppEnv is kvepp's own name for a flag's environment variable.
func kveppEnv(flag string) string {
	return "KVEPP_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))
}

// newFlags returns the set of a command's flags, which help lists in the order in which they are declared.
func newFlags(command string) *pflag.FlagSet {
	f := pflag.NewFlagSet(command, pflag.ContinueOnError)
	f.SortFlags = false
	f.SetOutput(io.Discard) // whoever parses prints errors, once
	return f
}

// serveFlags declares the flags of `kvepp serve` over o, with the defaults in it.
func serveFlags(o *options) *pflag.FlagSet {
	f := newFlags("kvepp serve")
	f.StringVar(&o.endpoints, "endpoints", "", "YAML `FILE` that lists the endpoints; read again whenever it changes")
	f.StringVar(
		&o.dnsLookupFamily,
		"dns-lookup-family",
		"auto",
		"which address of a host name in the endpoints file is used, `FAMILY`: what dns_lookup_family is in Envoy's "+
			"STRICT_DNS cluster, in lower case. auto: IPv6, or IPv4 for a name without IPv6; v4_preferred: the other "+
			"way round; v4_only; v6_only",
	)
	f.StringVar(
		&o.dynamoDiscovery,
		"dynamo-discovery",
		"",
		"Dynamo's service discovery, as `file:DIR` (the workers' DYN_FILE_KV), which completes endpoints that have a "+
			"\"dynamo:\" path; frontend:HOST:PORT,..., a frontend that knows the workers from whatever discovery, "+
			"for the same; or kubernetes, where --pool-name or --endpoint-selector says which Pods",
	)
	o.cluster.add(f)
	f.StringArrayVar(
		&o.models,
		"model",
		nil,
		"a served model and the folder of its tokenizer, `NAME=DIR`; may be repeated. In the environment: a "+
			"comma-separated list",
	)
	f.StringVar(&o.modelPath, "model-path", "", "the same for a single model: the `DIR` ...")
	f.StringVar(&o.modelName, "model-name", "", "... and the `NAME` that requests give")
	f.StringArrayVar(
		&o.adapters,
		"lora",
		nil,
		"a LoRA adapter, as requests give it for a model (vLLM: --lora-modules), and the model that it adapts, "+
			"`NAME=MODEL`; the name alone for a single --model; may be repeated. Adapters that KV events name need "+
			"not be listed. Not with Dynamo's frontends. In the environment: a comma-separated list",
	)
	f.StringArrayVar(
		&o.modelRewrites,
		"model-rewrite",
		nil,
		"requests for the model `NAME=TARGET` go on as requests for TARGET, and their answers name NAME again (where "+
			"Envoy sends them whole or FULL_DUPLEX_STREAMED); *=TARGET: for whatever no other rule names; may be "+
			"repeated: targets of one name share its requests evenly. In the environment: a comma-separated list",
	)
	f.BoolVar(
		&o.strictModel,
		"strict-model",
		false,
		"answer 404 for a model that neither --model, --lora, --tokenizer-url, an endpoint nor KV events name. Off: "+
			"endpoints that do not say which model they serve are sent its requests, by load",
	)
	f.StringVar(
		&o.engine,
		"engine",
		"",
		"who turns requests into token ids, and so whose rules hold: vllm, sglang, trtllm or dynamo `ENGINE`. "+
			"Default: dynamo with --dynamo-discovery, else vllm",
	)
	o.served.add(f)
	f.StringArrayVar(
		&o.tokenizerURLs,
		"tokenizer-url",
		nil,
		"the engine server (vLLM or SGLang) that is asked for a model's token ids where kvepp cannot know them, "+
			"`NAME=URL`; the URL alone for a single --model; may be repeated. A model named here needs no folder, or "+
			"may have one that kvepp refuses. In the environment: a comma-separated list",
	)
	f.DurationVar(
		&o.tokenizerURLTimeout,
		"tokenizer-url-timeout",
		500*time.Millisecond,
		"how long a request waits for --tokenizer-url before it is routed by load",
	)
	f.StringVar(
		&o.tokenizerURLKeyFile,
		"tokenizer-url-api-key-file",
		"",
		"`FILE` with the key of servers at --tokenizer-url that were started with --api-key; read again when it "+
			"changes",
	)
	f.IntVar(
		&o.tokenizerCheck,
		"tokenizer-check",
		0,
		"compare kvepp's own token ids of the first `N` requests of each model with those that its --tokenizer-url "+
			"gives, beside the requests' way; where they differ, the model is routed by load only from then on",
	)
	f.IntVar(
		&o.blockSize,
		"kv-cache-block-size",
		0,
		"`TOKENS` per KV block, for every worker. 0: each worker's own, from the endpoints file, its model card, or "+
			"its first stored block",
	)

	f.StringVar(&o.bindAddress, "bind-address", "", "`ADDRESS` to listen on; empty: all interfaces")
	f.Uint16Var(&o.grpcPort, "grpc-port", 9002, "`PORT` of the external processor")
	f.Uint16Var(
		&o.grpcHealthPort,
		"grpc-health-port",
		9003,
		"`PORT` of the gRPC health service, without TLS (it also answers on the external processor's port)",
	)
	f.Uint16Var(&o.metricsPort, "metrics-port", 9090, "`PORT` of Prometheus metrics, at /metrics; 0: none")
	f.StringVar(
		&o.metricsAddress,
		"metrics-address",
		"",
		"`HOST:PORT` of the same, in place of --bind-address and --metrics-port",
	)
	f.StringVar(
		&o.metricsTokenFile,
		"metrics-token-file",
		"",
		"`FILE` with a secret that whoever asks for metrics must bring, as \"Authorization: Bearer SECRET\"; read "+
			"again when it changes. Absent: anybody may ask",
	)
	f.StringVar(
		&o.dynamoNamespace,
		"dynamo-namespace",
		"dynamo",
		"`NAME` in the label dynamo_namespace of the metrics that have Dynamo's names: that of the workers",
	)
	f.StringVar(
		&o.dynamoComponent,
		"dynamo-component",
		"backend",
		"`NAME` in their label dynamo_component: that of the workers",
	)
	f.Uint64Var(
		&o.routerID,
		"router-id",
		0,
		"`NUMBER` in their label router_id. 0: made from the host's name, as Dynamo makes the id of a pod",
	)
	f.StringVar(
		&o.adminAddress,
		"admin-address",
		"",
		"`HOST:PORT` of HTTP requests about the index: /query, /query_by_hash, /dump, /health, as dynamo.indexer "+
			"answers them; of /busy_threshold, as dynamo.frontend does; and /debug/decisions. Empty: none",
	)
	f.StringVar(
		&o.adminTokenFile,
		"admin-token-file",
		"",
		"`FILE` with a secret that these requests must bring, as \"Authorization: Bearer SECRET\"; all but /health; "+
			"read again when it changes. Without it the address must be one of this machine alone",
	)
	o.hosts.add(f)
	f.BoolVar(
		&o.enablePprof,
		"enable-pprof",
		false,
		"show profiles of the process there too, at /debug/pprof/, for \"go tool pprof\"",
	)
	f.IntVar(
		&o.debugDecisions,
		"debug-decisions",
		100,
		"how many of the latest decisions /debug/decisions on the admin address can show, `N`, with all terms of "+
			"each candidate's cost; about 150 bytes a candidate. 0: none. Without --admin-address none are kept",
	)
	f.BoolVar(
		&o.tracing,
		"tracing",
		true,
		"tell an OpenTelemetry collector of each request, if the environment names one (OTEL_EXPORTER_OTLP_ENDPOINT "+
			"and its like). Off: not in any case",
	)
	f.StringSliceVar(
		&o.indexPeers,
		"index-peers",
		nil,
		"admin addresses of other kvepps, or of dynamo.indexer, as `URLS` separated by commas: at start the index is "+
			"taken over from the first that answers. They are given the token of --admin-token-file",
	)
	f.DurationVar(
		&o.warmUpTimeout,
		"warmup-timeout",
		10*time.Second,
		"how long the start waits for --index-peers; then kvepp serves with what it has",
	)
	o.transport.add(f)
	f.DurationVar(
		&o.drainTimeout,
		"drain-timeout",
		30*time.Second,
		"after SIGTERM, how long running requests may take to end",
	)
	f.DurationVar(
		&o.drainDelay,
		"drain-delay",
		5*time.Second,
		"after SIGTERM, how long new requests are still served, of --drain-timeout: health checks say at once that "+
			"none are wanted, and proxies notice when they ask the next time",
	)
	f.DurationVar(
		&o.modelLoadTimeout,
		"model-load-timeout",
		30*time.Second,
		"how long the start waits for the models' tokenizers; the requests of a model that is not loaded by then are "+
			"routed by load only",
	)

	f.IntVar(
		&o.minInitialWorkers,
		"router-min-initial-workers",
		0,
		"health checks say that kvepp is not ready until it has first seen `N` endpoints that requests can be sent "+
			"to; prefill workers do not count",
	)

	f.BoolVar(
		&o.headerAliases,
		"header-aliases",
		true,
		"also set the worker headers' older names: x-worker-instance-id, x-dp-rank, x-data-parallel-rank, "+
			"x-prefill-instance-id, x-prefill-dp-rank",
	)
	f.BoolVar(
		&o.prefillerHeader,
		"prefiller-header",
		false,
		"the prefill and decode workers are stock engines, with llm-d's routing sidecar before each decode one: also "+
			"set x-prefiller-host-port, the prefill worker's address. Decode workers then serve alone while there is "+
			"no prefill worker",
	)
	f.BoolVar(
		&o.decisionHeaders,
		"decision-headers",
		false,
		"show each decision in the response as x-kvepp-* headers. They tell clients the workers' names and loads",
	)
	o.proxied.add(f)
	o.indexMemory.add(f)

	o.scheduling.add(f, &o.scoring)
	f.BoolVar(
		&o.kvEvents,
		"router-kv-events",
		true,
		"subscribe to the engines' KV events. Off: approximate mode, where a worker is believed to hold what it was "+
			"sent, for --router-ttl-secs",
	)
	f.Float64Var(
		&o.ttlSecs,
		"router-ttl-secs",
		120,
		"in approximate mode, and for workers that should send KV events and do not, `SECONDS` for which a worker is "+
			"believed to hold a block after the latest request with it",
	)
	f.IntVar(
		&o.maxTreeSize,
		"router-max-tree-size",
		indexer.DefaultMaxPredicted,
		"in approximate mode, most `BLOCKS` believed held over all workers; beyond it the oldest are forgotten ...",
	)
	f.Float64Var(
		&o.pruneTarget,
		"router-prune-target-ratio",
		indexer.DefaultPruneTarget,
		"... until this `PART` of it is left. Dynamo 1.6 has neither any more",
	)
	f.StringVar(
		&o.cachePolicy,
		"router-approximate-cache-policy",
		"ttl",
		"in approximate mode, what makes a block leave: `ttl or lru`. lru: a worker whose number of blocks is known "+
			"(totalKvBlocks, model card) holds as many, whatever their age; any other as with ttl",
	)
	f.Float64Var(
		&o.predictedTTLSecs,
		"router-predicted-ttl-secs",
		0,
		"with events, `SECONDS` for which a worker is also believed to hold what it was sent, so that a burst of one "+
			"new prefix sees its first copy before any event. 0: not",
	)
	f.IntVar(&o.feed.Threads, "router-event-threads", 4, "most workers whose events are decoded and applied at once")
	f.BoolVar(&o.durableEvents, "router-durable-kv-events", false, "refused: kvepp does not read events from JetStream")
	f.IntVar(&o.snapshotThreshold, "router-snapshot-threshold", 0, "`MESSAGES`; refused: belongs to JetStream")
	f.BoolVar(&o.resetStates, "router-reset-states", false, "refused: belongs to JetStream")
	f.BoolVar(&o.remoteIndexer, "use-remote-indexer", false, "refused: kvepp does not ask another process's index")
	f.StringVar(
		&o.feed.EventPlane,
		"event-plane",
		"",
		"the event plane of Dynamo's workers, `zmq or nats`: used, where Dynamo's discovery is known, for endpoints "+
			"without kvEvents. zmq: nor are loads heard over NATS. Default: whichever discovery names for each worker",
	)
	f.StringVar(
		&o.feed.NATSServer,
		"nats-server",
		"nats://localhost:4222",
		"`URL` of that NATS server; may hold user:password@",
	)
	costFlags(f, &o.scoring, &o.overlapWeight)
	negatable(
		f,
		"router-kv-events",
		"router-durable-kv-events",
		"router-reset-states",
		"use-remote-indexer",
		"load-aware",
		"router-track-output-blocks",
		"router-replica-sync",
		"serve-indexer",
		"enable-session-prefix-index",
		"router-conditional-disagg",
	)

	f.IntVar(
		&o.sessionTTLSecs,
		"router-session-affinity-ttl-secs",
		0,
		"keep the requests of a session (x-dynamo-session-id, or what a coding agent sends) on one worker, until "+
			"`SECONDS` after the end of the latest. 0: only sessions that requests open with nvext.session_control",
	)
	f.StringVar(
		&o.sessionMode,
		"router-session-affinity-mode",
		"hard",
		"what a session does whose worker is above a busy threshold, `hard or soft`. hard: its requests are refused; "+
			"soft: it moves to another worker",
	)
	f.BoolVar(
		&o.allowPinning,
		"allow-client-pinning",
		false,
		"let requests name the worker that they go to, in nvext: backend_instance_id or decode_worker_id, with "+
			"dp_rank; prefill_worker_id, with prefill_dp_rank. Off: these are taken out of the body, and counted. "+
			"Headers are never followed",
	)
	f.BoolVar(
		&o.passSessions,
		"pass-session-headers",
		false,
		"let Dynamo's frontends see of which session a request is (x-dynamo-session-id and its like, and what coding "+
			"agents send). A frontend with a --router-session-affinity-ttl-secs of its own would follow these "+
			"instead of kvepp's choice. Other engines are sent them as they are",
	)
	f.BoolVar(
		&o.keepLegacy,
		"keep-legacy-nvext",
		false,
		"leave in a body for Dynamo's frontends what those of 1.6.1 refuse: nvext.session_control, "+
			"nvext.router_config_override, nvext.agent_hints.kv_overlap_score_weight. For earlier frontends",
	)
	f.BoolVar(
		&o.injectTokens,
		"inject-token-data",
		false,
		"send a prompt's token ids on to Dynamo's frontend (nvext.token_data), which then need not tokenize it "+
			"again. Only of chats and completions with one prompt of text, for workers whose model cards name the "+
			"very tokenizer and template that kvepp has, and whose requests want no annotations. A body grows by "+
			"about 6 bytes a token",
	)
	f.BoolVar(
		&o.tenantSalt,
		"tenant-cache-salt",
		false,
		"with --engine vllm: write the tenant of a request (x-tenant-id), or what else its cache namespace is "+
			"(nvext.cache_salt, cache_salt), into the body as cache_salt, \"dynamo-cache-salt:NAME\" as Dynamo's "+
			"workers do, so that tenants share no cached blocks",
	)
	f.BoolVar(
		&o.ignoreHints,
		"ignore-client-hints",
		false,
		"drop what clients say of the routing of their requests: priorities, expected lengths, sessions, overrides "+
			"and pins in nvext, and the headers x-dynamo-request-priority, x-dynamo-request-strict-priority, "+
			"x-dynamo-meta-policy-class, x-tenant-id, x-dynamo-session-id and those of agents. Dynamo's own of these "+
			"headers then do not reach the endpoint either; the body does as it is",
	)
	o.busy.add(f)
	o.ejection.add(f)
	o.engineGauges.add(f)

	o.pickers.add(f)
	o.logging.add(f, " (one line per request, with the decision)")
	f.StringVar(
		&o.accessLog,
		"access-log",
		"",
		"`FILE` to append a line to for each request when it has ended, in the format of --log-format: request id, "+
			"model, worker, reason, prompt tokens, predicted and reported cached tokens, time to first token, "+
			"status, duration. -: standard output; the log itself goes to standard error. Empty: none. A file that "+
			"was moved away is created anew",
	)
	addAliases(f)
	documentEnvironment(f, "")
	return f
}

// costFlags declares the knobs of the cost function over c, with the defaults in it. weight is that of the deprecated
// flag, which goes before two of them; NaN when not given.
func costFlags(f *pflag.FlagSet, c *scoring.Config, weight *float64) {
	d := scoring.DefaultConfig()
	f.Float64Var(
		&c.OverlapScoreCredit,
		"router-kv-overlap-score-credit",
		d.OverlapScoreCredit,
		"worth of a cached block, in blocks that need not be prefilled. 0: routing is blind to caches",
	)
	f.Float64Var(
		&c.OverlapScoreCreditDecay,
		"router-kv-overlap-score-credit-decay",
		d.OverlapScoreCreditDecay,
		"shrinks that credit on workers with more prefill waiting than the least busy one. 0: never",
	)
	f.Float64Var(
		&c.HostCacheHitWeight,
		"router-host-cache-hit-weight",
		d.HostCacheHitWeight,
		"worth of a cached block in the worker's host memory, as --router-kv-overlap-score-credit is of one on its "+
			"device",
	)
	f.Float64Var(
		&c.DiskCacheHitWeight,
		"router-disk-cache-hit-weight",
		d.DiskCacheHitWeight,
		"the same for a block on disk or in external storage",
	)
	f.Float64Var(
		&c.PrefillLoadScale,
		"router-prefill-load-scale",
		d.PrefillLoadScale,
		"weight of blocks to prefill against blocks held for decoding: higher favours time to first token",
	)
	f.Float64Var(
		weight,
		"router-kv-overlap-score-weight",
		math.NaN(),
		"deprecated name of earlier Dynamo versions: sets --router-prefill-load-scale, and 0 also sets the credit to 0",
	)
	f.Lookup("router-kv-overlap-score-weight").DefValue = "0" // NaN means not given, which help does not say
	f.Float64Var(
		&c.DecodeActiveRequestWeight,
		"router-decode-active-request-weight",
		d.DecodeActiveRequestWeight,
		"cost of each request active on a worker, in blocks",
	)
	f.Float64Var(
		&c.Temperature,
		"router-temperature",
		d.Temperature,
		"0: the cheapest worker, ties at random. Above: a softmax over costs, the higher the more even",
	)
	f.BoolVar(
		&c.TrackActiveBlocks,
		"router-track-active-blocks",
		d.TrackActiveBlocks,
		"count the blocks that active requests hold",
	)
	f.BoolVar(
		&c.TrackPrefillTokens,
		"router-track-prefill-tokens",
		d.TrackPrefillTokens,
		"count the prompt tokens that workers have yet to prefill",
	)
	f.BoolVar(
		&c.AssumeKVReuse,
		"router-assume-kv-reuse",
		d.AssumeKVReuse,
		"count a block that several requests of one worker share once",
	)
	negatable(f, "router-track-active-blocks", "router-track-prefill-tokens", "router-assume-kv-reuse")
}

// negatable declares --no-X beside --X for each of the flags, as Dynamo has it.
func negatable(f *pflag.FlagSet, names ...string) {
	for _, name := range names {
		f.VarPF(negated{f.Lookup(name)}, "no-"+name, "", "the same as --"+name+"=false").NoOptDefVal = "true"
	}
}

// documentEnvironment adds to each flag's help the environment variables that say the same, where prefix stands before
// its name.
func documentEnvironment(f *pflag.FlagSet, prefix string) {
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.Type() == (negated{}).Type() {
			flag.Hidden = true
		}
		if flag.Hidden {
			return
		}
		env := kveppEnv(prefix + flag.Name)
		if dyn := dynamoName(prefix, flag.Name); dyn != "" {
			env += ", " + dyn
		}
		flag.Usage += " [" + env + "]"
	})
}

// dynamoName returns the environment variable by which Dynamo takes the same setting; "" if there is none. Its
// selection service has its router's.
func dynamoName(prefix, flag string) string {
	if prefix == indexerPrefix {
		return ""
	}
	return dynamoEnv[flag]
}

// negated is the flag --no-X of a boolean flag --X.
type negated struct{ flag *pflag.Flag }

func (n negated) Set(s string) error {
	switch s {
	case "true":
		s = "false"
	case "false":
		s = "true"
	}
	n.flag.Changed = true
	return n.flag.Value.Set(s)
}
func (n negated) String() string { return "" }
func (n negated) Type() string   { return "negated" }

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

// fromEnvironment sets the flags that were not given from the environment, where prefix stands before their names.
func fromEnvironment(f *pflag.FlagSet, prefix string, getenv func(string) string) error {
	var errs []error
	f.VisitAll(func(flag *pflag.Flag) {
		if of, ok := flag.Value.(alias); flag.Changed || flag.Hidden || ok && of.of.Changed {
			return
		}
		for _, name := range []string{kveppEnv(prefix + flag.Name), dynamoName(prefix, flag.Name)} {
			value := ""
			if name != "" {
				value = getenv(name)
			}
			if value == "" || isServiceURL(name, value, getenv) {
				continue
			}
			values := []string{value}
			if flag.Value.Type() == "stringArray" {
				values = strings.Split(value, ",")
			}
			for _, v := range values {
				if err := flag.Value.Set(v); err != nil {
					errs = append(errs, fmt.Errorf("environment variable %s %q: %s", name, value, takes(flag)))
				}
			}
			flag.Changed = true
			return
		}
	})
	return errors.Join(errs...)
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
