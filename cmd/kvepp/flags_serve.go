package main

import (
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
)

// serveFlags declares the flags of `kvepp serve` over o, with the defaults in it. Help lists them in this order.
func serveFlags(o *options) *pflag.FlagSet {
	f := newFlags("kvepp serve")
	o.addEndpoints(f)
	o.addModels(f)
	o.addTokenizerServers(f)
	o.addListeners(f)
	o.addLife(f)
	o.addHeaders(f)
	o.proxied.add(f)
	o.indexMemory.add(f)
	o.scheduling.add(f, &o.scoring)
	o.addKVEvents(f)
	costFlags(f, &o.scoring, &o.overlapWeight)
	o.addSessions(f)
	o.addHints(f)
	o.busy.add(f)
	o.ejection.add(f)
	o.engineGauges.add(f)
	o.addLogs(f)
	addCompatFlags(f, "serve")
	addAliases(f)
	documentEnvironment(f, "")
	return f
}

func (o *options) addEndpoints(f *pflag.FlagSet) {
	f.StringVar(&o.endpoints, "endpoints", "",
		"YAML `FILE` that lists the endpoints; kvepp reads it again whenever it changes")
	f.StringVar(&o.dnsLookupFamily, "dns-lookup-family", "auto",
		"which address of a host name in the endpoints file kvepp uses, `FAMILY`, as dns_lookup_family in Envoy's "+
			"STRICT_DNS cluster, in lower case: auto (IPv6, or IPv4 for a name without IPv6), v4_preferred (IPv4, or "+
			"IPv6 for a name without IPv4), v4_only or v6_only")
	f.StringVar(&o.dynamoDiscovery, "dynamo-discovery", "",
		"Dynamo's service discovery. `file:DIR` (the workers' DYN_FILE_KV) completes endpoints that have a "+
			"\"dynamo:\" path. frontend:HOST:PORT,... does the same through a frontend, for any discovery backend. "+
			"kubernetes reads the Pods that --pool-name or --endpoint-selector names")
	o.cluster.add(f)
}

func (o *options) addModels(f *pflag.FlagSet) {
	f.StringArrayVar(&o.models, "model", nil,
		"a served model and the folder of its tokenizer, `NAME=DIR`; may be repeated. In the environment: a "+
			"comma-separated list")
	f.StringVar(&o.modelPath, "model-path", "", "for a single model, the `DIR` of its tokenizer")
	f.StringVar(&o.modelName, "model-name", "", "for a single model, the `NAME` that requests give; with --model-path")
	f.StringArrayVar(&o.adapters, "lora", nil,
		"a LoRA adapter, as requests name it (vLLM: --lora-modules), and the model that it adapts, `NAME=MODEL`; with "+
			"a single --model, the name alone; may be repeated. Adapters that KV events name need not be listed. Not "+
			"with Dynamo's frontends. In the environment: a comma-separated list")
	f.StringArrayVar(&o.modelRewrites, "model-rewrite", nil,
		"send requests for the model NAME as requests for TARGET, `NAME=TARGET`, and write NAME into their responses "+
			"(if Envoy sends responses BUFFERED or FULL_DUPLEX_STREAMED). *=TARGET: for all names without a rule of "+
			"their own. May be repeated: several targets of one name share its requests evenly. In the environment: "+
			"a comma-separated list")
	f.BoolVar(&o.strictModel, "strict-model", false,
		"answer 404 for a model that neither --model, --lora, --tokenizer-url, an endpoint nor KV events name. Off: "+
			"kvepp routes such requests by load to endpoints that do not say which model they serve")
	f.StringVar(&o.engine, "engine", "",
		"the `ENGINE` that turns requests into token ids, and whose rules kvepp follows: vllm, sglang, trtllm or "+
			"dynamo. Default: dynamo with --dynamo-discovery, else vllm")
	o.promptFlags.add(f)
}

func (o *options) addTokenizerServers(f *pflag.FlagSet) {
	f.StringArrayVar(&o.tokenizerURLs, "tokenizer-url", nil,
		"the engine server (vLLM or SGLang) that kvepp asks for a model's token ids where it cannot compute them, "+
			"`NAME=URL`; with a single --model, the URL alone; may be repeated. A model named here needs no folder, "+
			"or may have one that kvepp cannot use. In the environment: a comma-separated list")
	f.DurationVar(&o.tokenizerURLTimeout, "tokenizer-url-timeout", 500*time.Millisecond,
		"how long a request waits for --tokenizer-url; after that kvepp routes it by load")
	f.StringVar(&o.tokenizerURLKeyFile, "tokenizer-url-api-key-file", "",
		"`FILE` with the key of the servers at --tokenizer-url, if they were started with --api-key; kvepp reads it "+
			"again when it changes")
	f.IntVar(&o.tokenizerCheck, "tokenizer-check", 0,
		"compare kvepp's token ids of the first `N` requests of each model with those of its --tokenizer-url, without "+
			"delaying the requests; if they differ, kvepp routes the model by load only from then on")
	f.IntVar(&o.blockSize, "kv-cache-block-size", 0,
		"`TOKENS` per KV block, for every worker. 0: each worker's own, from the endpoints file, its model card, or "+
			"its first stored block")
}

func (o *options) addListeners(f *pflag.FlagSet) {
	f.StringVar(&o.bindAddress, "bind-address", "", "`ADDRESS` to listen on; empty: all interfaces")
	f.Uint16Var(&o.grpcPort, "grpc-port", 9002, "`PORT` of the external processor")
	f.Uint16Var(&o.grpcHealthPort, "grpc-health-port", 9003,
		"`PORT` of the gRPC health service, without TLS (it also answers on the external processor's port)")
	f.Uint16Var(&o.metricsPort, "metrics-port", 9090, "`PORT` of Prometheus metrics, at /metrics; 0: none")
	f.StringVar(&o.metricsAddress, "metrics-address", "",
		"`HOST:PORT` of the metrics, in place of --bind-address and --metrics-port")
	f.StringVar(&o.metricsTokenFile, "metrics-token-file", "",
		"`FILE` with a secret that requests for metrics must bring, as \"Authorization: Bearer SECRET\"; kvepp reads "+
			"it again when it changes. Empty: anyone may read metrics")
	f.StringVar(&o.dynamoNamespace, "dynamo-namespace", "dynamo",
		"the workers' namespace, `NAME`: the label dynamo_namespace of the metrics that have Dynamo's names")
	f.StringVar(&o.dynamoComponent, "dynamo-component", "backend",
		"the workers' component, `NAME`: the label dynamo_component of the same metrics")
	f.Uint64Var(&o.routerID, "router-id", 0,
		"`NUMBER` in the label router_id of the same metrics. 0: computed from the host's name, as Dynamo computes "+
			"the id of a pod")
	f.StringVar(&o.adminAddress, "admin-address", "",
		"`HOST:PORT` of HTTP requests about the index: /query, /query_by_hash, /dump and /health, as dynamo.indexer "+
			"answers them; of /busy_threshold, as dynamo.frontend does; and of /workers and /debug/decisions. Empty: "+
			"none")
	f.StringVar(&o.adminTokenFile, "admin-token-file", "",
		"`FILE` with a secret that these requests, all but /health, must bring, as \"Authorization: Bearer SECRET\"; "+
			"kvepp reads it again when it changes. Without it --admin-address must be a loopback address")
	o.hosts.add(f)
	f.BoolVar(&o.enablePprof, "enable-pprof", false,
		"show profiles of the process at --admin-address, at /debug/pprof/, for \"go tool pprof\"")
	f.IntVar(&o.debugDecisions, "debug-decisions", 100,
		"how many of the latest decisions kvepp keeps for /debug/decisions, `N`, with all terms of each candidate's "+
			"cost; about 150 bytes a candidate. 0: none. Without --admin-address kvepp keeps none")
	f.BoolVar(&o.tracing, "tracing", true,
		"send spans of each request to an OpenTelemetry collector, if the environment names one "+
			"(OTEL_EXPORTER_OTLP_ENDPOINT and other OTEL_* variables). Off: never")
	f.StringSliceVar(&o.indexPeers, "index-peers", nil,
		"admin addresses of other kvepps, or of dynamo.indexer, as `URLS` separated by commas: at start kvepp copies "+
			"the index of the first that answers. It sends them the token of --admin-token-file")
	f.DurationVar(&o.warmUpTimeout, "warmup-timeout", 10*time.Second,
		"how long the start waits for --index-peers; after that kvepp serves with the index that it has")
	o.transport.add(f)
}

func (o *options) addLife(f *pflag.FlagSet) {
	f.DurationVar(&o.drainTimeout, "drain-timeout", 30*time.Second,
		"after SIGTERM, how long running requests may take to end")
	f.DurationVar(&o.drainDelay, "drain-delay", 5*time.Second,
		"after SIGTERM, how long kvepp still serves new requests; a part of --drain-timeout. Health checks say "+
			"NOT_SERVING at once, and proxies notice at their next check")
	f.DurationVar(&o.modelLoadTimeout, "model-load-timeout", 30*time.Second,
		"how long the start waits for the models' tokenizers; kvepp routes the requests of a model that is not "+
			"loaded by then by load only")
	f.IntVar(&o.minInitialWorkers, "router-min-initial-workers", 0,
		"health checks say NOT_SERVING until kvepp has seen `N` endpoints that can take requests; prefill workers do "+
			"not count")
}

func (o *options) addHeaders(f *pflag.FlagSet) {
	f.BoolVar(&o.headerAliases, "header-aliases", true,
		"also set the worker headers' older names: x-worker-instance-id, x-dp-rank, x-data-parallel-rank, "+
			"x-prefill-instance-id, x-prefill-dp-rank")
	f.BoolVar(&o.prefillerHeader, "prefiller-header", false,
		"prefill and decode workers are stock engines, with llm-d's routing sidecar before each decode worker: also "+
			"set x-prefiller-host-port, the prefill worker's address. While there is no prefill worker, decode "+
			"workers serve alone")
	f.BoolVar(&o.decisionHeaders, "decision-headers", false,
		"show each decision in the response as x-kvepp-* headers. They reveal the workers' names and loads to clients")
}

func (o *options) addKVEvents(f *pflag.FlagSet) {
	f.BoolVar(&o.kvEvents, "router-kv-events", true,
		"subscribe to the engines' KV events. Off: approximate mode, in which kvepp assumes that a worker holds what "+
			"it was sent, for --router-ttl-secs")
	f.Float64Var(&o.ttlSecs, "router-ttl-secs", 120,
		"in approximate mode, and for workers that should send KV events and do not, how many `SECONDS` after the "+
			"latest request with a block kvepp assumes that the worker holds it")
	f.IntVar(&o.maxTreeSize, "router-max-tree-size", indexer.DefaultMaxPredicted,
		"in approximate mode, the most `BLOCKS` that kvepp assumes held over all workers; beyond it, kvepp forgets "+
			"the oldest. Dynamo 1.6 no longer has this flag")
	f.Float64Var(&o.pruneTarget, "router-prune-target-ratio", indexer.DefaultPruneTarget,
		"the `PART` of --router-max-tree-size, 0 to 1, that is left after kvepp has forgotten the oldest blocks. "+
			"Dynamo 1.6 no longer has this flag")
	f.StringVar(&o.cachePolicy, "router-approximate-cache-policy", "ttl",
		"in approximate mode, when kvepp forgets a block, `ttl or lru`. ttl: after --router-ttl-secs. lru: when a "+
			"worker with a known number of blocks (totalKvBlocks, model card) has more than that; other workers as "+
			"with ttl")
	f.Float64Var(&o.predictedTTLSecs, "router-predicted-ttl-secs", 0,
		"with KV events, for how many `SECONDS` kvepp also assumes that a worker holds what it was sent, so that the "+
			"requests of a burst with one new prefix find its first copy before any event. 0: off")
	f.IntVar(&o.feed.Threads, "router-event-threads", 4,
		"the most workers whose KV events are decoded and applied at the same time")
	f.StringVar(&o.feed.EventPlane, "event-plane", "",
		"the event plane of Dynamo's workers, `zmq or nats`, for endpoints that Dynamo's discovery knows and that "+
			"have no kvEvents. With zmq kvepp does not read loads over NATS either. Default: what discovery names "+
			"for each worker")
	f.StringVar(&o.feed.NATSServer, "nats-server", "nats://localhost:4222",
		"`URL` of the event plane's NATS server; may contain user:password@")
	negatable(f, "router-kv-events")
}

func (o *options) addSessions(f *pflag.FlagSet) {
	f.IntVar(&o.sessionTTLSecs, "router-session-affinity-ttl-secs", 0,
		"keep the requests of a session (x-dynamo-session-id, or a coding agent's header) on one worker, until "+
			"`SECONDS` after its latest request has ended. 0: only sessions that requests open with "+
			"nvext.session_control")
	f.StringVar(&o.sessionMode, "router-session-affinity-mode", "hard",
		"what happens to a session whose worker is above a busy threshold, `hard or soft`. hard: kvepp refuses its "+
			"requests; soft: it moves to another worker")
	f.BoolVar(&o.passSessions, "pass-session-headers", false,
		"forward the headers that name a request's session (x-dynamo-session-id and others, and those of coding "+
			"agents) to Dynamo's frontends. A frontend with its own --router-session-affinity-ttl-secs would follow "+
			"them instead of kvepp's choice. Other engines always get them")
}

func (o *options) addHints(f *pflag.FlagSet) {
	f.BoolVar(&o.allowPinning, "allow-client-pinning", false,
		"let requests name their worker, in nvext: backend_instance_id or decode_worker_id, with dp_rank; "+
			"prefill_worker_id, with prefill_dp_rank. Off: kvepp removes these from the body, and counts them. kvepp "+
			"never follows headers that name a worker")
	f.BoolVar(&o.keepLegacy, "keep-legacy-nvext", false,
		"keep keys in the body that Dynamo's frontends refuse since 1.6.1: nvext.session_control, "+
			"nvext.router_config_override, nvext.agent_hints.kv_overlap_score_weight. For earlier frontends")
	f.BoolVar(&o.injectTokens, "inject-token-data", false,
		"send a prompt's token ids to Dynamo's frontend (nvext.token_data), which then does not tokenize it again. "+
			"Only for chats and completions with one text prompt and no annotations, and for workers whose model "+
			"cards name the same tokenizer and template as kvepp's. A body grows by about 6 bytes a token")
	f.BoolVar(&o.tenantSalt, "tenant-cache-salt", false,
		"with --engine vllm: write the request's tenant (x-tenant-id), or else its cache namespace "+
			"(nvext.cache_salt, cache_salt), into the body as cache_salt, \"dynamo-cache-salt:NAME\" as Dynamo's "+
			"workers do, so that tenants share no cached blocks")
	f.BoolVar(&o.ignoreHints, "ignore-client-hints", false,
		"ignore what clients say about the routing of their requests: priorities, expected lengths, sessions, "+
			"overrides and pins in nvext, and the headers x-dynamo-request-priority, "+
			"x-dynamo-request-strict-priority, x-dynamo-meta-policy-class, x-tenant-id, x-dynamo-session-id and those "+
			"of agents. kvepp also removes Dynamo's own headers among these; it does not change the body")
}

func (o *options) addLogs(f *pflag.FlagSet) {
	o.pickerLogging.add(f)
	o.logging.add(f, " (one line per request, with the decision)")
	f.StringVar(&o.accessLog, "access-log", "",
		"`FILE` to which kvepp appends a line for each request when it has ended, in the format of --log-format: "+
			"request id, model, worker, reason, prompt tokens, predicted and reported cached tokens, time to first "+
			"token, status, duration. -: standard output; the log itself goes to standard error. Empty: none. If the "+
			"file was moved away, kvepp creates it again")
}
