package main

import (
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
)

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
