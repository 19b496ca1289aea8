package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/pool/dynamo"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/scoring"
)

// settings lists every flag with its environment variables, two values that differ from the default, and the field that
// it sets. TestEveryFlagIsListed fails for a flag that is missing here.
var settings = []struct {
	flag, kvepp, dynamo string
	values              [3]string
	get                 func(*options) any
}{
	{
		"config",
		"KVEPP_CONFIG",
		"",
		[3]string{"testdata/config/a.yaml", "testdata/config/b.yaml", "testdata/config/c.yaml"},
		func(o *options) any { return o.file },
	},
	{
		"print-config",
		"KVEPP_PRINT_CONFIG",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.print },
	},
	{
		"dns-lookup-family",
		"KVEPP_DNS_LOOKUP_FAMILY",
		"",
		[3]string{"v4_only", "v6_only", "v4_preferred"},
		func(o *options) any { return o.dnsLookupFamily },
	},
	{"endpoints", "KVEPP_ENDPOINTS", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.endpoints }},
	{
		"pool-name",
		"KVEPP_POOL_NAME",
		"DYN_EPP_INFERENCE_POOL_NAME",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.poolName },
	},
	{
		"pool-namespace",
		"KVEPP_POOL_NAMESPACE",
		"POD_NAMESPACE",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.poolNamespace },
	},
	{"pool-group", "KVEPP_POOL_GROUP", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.poolGroup }},
	{
		"endpoint-selector",
		"KVEPP_ENDPOINT_SELECTOR",
		"",
		[3]string{"a=b", "a=c", "a=d"},
		func(o *options) any { return o.endpointSelector },
	},
	{
		"endpoint-target-ports",
		"KVEPP_ENDPOINT_TARGET_PORTS",
		"",
		[3]string{"1,2", "3", "4"},
		func(o *options) any { return fmt.Sprint(o.targetPorts) },
	},
	{"kubeconfig", "KVEPP_KUBECONFIG", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.kubeconfig }},
	{
		"kv-events-port",
		"KVEPP_KV_EVENTS_PORT",
		"DYN_EPP_KV_EVENT_PORT",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.kvEventsPort },
	},
	{
		"kv-replay-port",
		"KVEPP_KV_REPLAY_PORT",
		"DYN_EPP_KV_EVENT_REPLAY_PORT",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.kvReplayPort },
	},
	{
		"data-parallel-size",
		"KVEPP_DATA_PARALLEL_SIZE",
		"",
		[3]string{"2", "3", "4"},
		func(o *options) any { return o.dataParallelSize },
	},
	{
		"pod-ip-family",
		"KVEPP_POD_IP_FAMILY",
		"",
		[3]string{"ipv4", "ipv6", "ipv4"},
		func(o *options) any { return o.podIPFamily },
	},
	{
		"ha-enable-leader-election",
		"KVEPP_HA_ENABLE_LEADER_ELECTION",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.leaderElection },
	},
	{
		"metrics-endpoint-auth",
		"KVEPP_METRICS_ENDPOINT_AUTH",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.metricsAuth },
	},
	{"ha-lease-name", "KVEPP_HA_LEASE_NAME", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.leaseName }},
	{
		"ha-handover-timeout",
		"KVEPP_HA_HANDOVER_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.handOverTimeout },
	},
	{
		"dynamo-discovery",
		"KVEPP_DYNAMO_DISCOVERY",
		"",
		[3]string{"file:a", "file:b", "file:c"},
		func(o *options) any { return o.dynamoDiscovery },
	},
	{
		"model",
		"KVEPP_MODEL",
		"",
		[3]string{"m=a", "m=b,n=c", "m=d"},
		func(o *options) any { return strings.Join(o.models, ",") },
	},
	{"model-path", "KVEPP_MODEL_PATH", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.modelPath }},
	{
		"model-name",
		"KVEPP_MODEL_NAME",
		"DYN_MODEL_NAME",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.modelName },
	},
	{
		"strict-model",
		"KVEPP_STRICT_MODEL",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.strictModel },
	},
	{
		"lora",
		"KVEPP_LORA",
		"",
		[3]string{"a=m", "b=m,c=m", "d=m"},
		func(o *options) any { return strings.Join(o.adapters, ",") },
	},
	{
		"model-rewrite",
		"KVEPP_MODEL_REWRITE",
		"",
		[3]string{"a=m", "b=m,c=m", "*=m"},
		func(o *options) any { return strings.Join(o.modelRewrites, ",") },
	},
	{"engine", "KVEPP_ENGINE", "", [3]string{"sglang", "trtllm", "dynamo"}, func(o *options) any { return o.engine }},
	{
		"chat-template",
		"KVEPP_CHAT_TEMPLATE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.chatTemplate },
	},
	{
		"chat-template-content-format",
		"KVEPP_CHAT_TEMPLATE_CONTENT_FORMAT",
		"",
		[3]string{"string", "openai", "string"},
		func(o *options) any { return o.chatTemplateContentFormat },
	},
	{
		"default-chat-template-kwargs",
		"KVEPP_DEFAULT_CHAT_TEMPLATE_KWARGS",
		"",
		[3]string{`{"a":1}`, `{"a":2}`, `{}`},
		func(o *options) any { return o.defaultChatTemplateKwargs },
	},
	{
		"exclude-tools-when-tool-choice-none",
		"KVEPP_EXCLUDE_TOOLS_WHEN_TOOL_CHOICE_NONE",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.excludeTools },
	},
	{
		"reasoning-effort-map",
		"KVEPP_REASONING_EFFORT_MAP",
		"",
		[3]string{`{"a":1}`, `{"a":2}`, `{}`},
		func(o *options) any { return o.reasoningEffortMap },
	},
	{
		"anthropic-disabled-thinking-effort",
		"KVEPP_ANTHROPIC_DISABLED_THINKING_EFFORT",
		"",
		[3]string{"none", "low", "max"},
		func(o *options) any { return o.disabledThinkingEffort },
	},
	{
		"engine-version",
		"KVEPP_ENGINE_VERSION",
		"",
		[3]string{"0.5.23", "0.33.0", "1.2"},
		func(o *options) any { return o.engineVersion },
	},
	{
		"unknown-engine-version",
		"KVEPP_UNKNOWN_ENGINE_VERSION",
		"",
		[3]string{"load", "nearest", "load"},
		func(o *options) any { return o.unknownVersion },
	},
	{
		"tokenizer-mode",
		"KVEPP_TOKENIZER_MODE",
		"",
		[3]string{"hf", "mistral", "hf"},
		func(o *options) any { return o.tokenizerMode },
	},
	{
		"hf-chat-template-name",
		"KVEPP_HF_CHAT_TEMPLATE_NAME",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.hfChatTemplateName },
	},
	{
		"dynamo-runtime-config",
		"KVEPP_DYNAMO_RUNTIME_CONFIG",
		"",
		[3]string{`{"a":1}`, `{"a":2}`, `{}`},
		func(o *options) any { return o.dynamoRuntimeConfig },
	},
	{
		"trust-request-chat-template",
		"KVEPP_TRUST_REQUEST_CHAT_TEMPLATE",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.trustRequestChatTemplate },
	},
	{
		"tokenizer-url",
		"KVEPP_TOKENIZER_URL",
		"",
		[3]string{"m=http://a", "m=http://b,n=https://c", "m=http://d"},
		func(o *options) any { return strings.Join(o.tokenizerURLs, ",") },
	},
	{
		"tokenizer-url-timeout",
		"KVEPP_TOKENIZER_URL_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.tokenizerURLTimeout },
	},
	{
		"tokenizer-url-api-key-file",
		"KVEPP_TOKENIZER_URL_API_KEY_FILE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.tokenizerURLKeyFile },
	},
	{
		"tokenizer-check",
		"KVEPP_TOKENIZER_CHECK",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.tokenizerCheck },
	},
	{
		"kv-cache-block-size",
		"KVEPP_KV_CACHE_BLOCK_SIZE",
		"DYN_KV_CACHE_BLOCK_SIZE",
		[3]string{"16", "32", "64"},
		func(o *options) any { return o.blockSize },
	},
	{
		"bind-address",
		"KVEPP_BIND_ADDRESS",
		"",
		[3]string{"127.0.0.1", "127.0.0.2", "::1"},
		func(o *options) any { return o.bindAddress },
	},
	{"grpc-port", "KVEPP_GRPC_PORT", "", [3]string{"1", "2", "3"}, func(o *options) any { return o.grpcPort }},
	{
		"grpc-health-port",
		"KVEPP_GRPC_HEALTH_PORT",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.grpcHealthPort },
	},
	{
		"metrics-port",
		"KVEPP_METRICS_PORT",
		"DYN_EPP_METRICS_PORT",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.metricsPort },
	},
	{
		"dynamo-namespace",
		"KVEPP_DYNAMO_NAMESPACE",
		"DYN_NAMESPACE",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.dynamoNamespace },
	},
	{
		"dynamo-component",
		"KVEPP_DYNAMO_COMPONENT",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.dynamoComponent },
	},
	{"router-id", "KVEPP_ROUTER_ID", "", [3]string{"1", "2", "3"}, func(o *options) any { return o.routerID }},
	{
		"allowed-hosts",
		"KVEPP_ALLOWED_HOSTS",
		"",
		[3]string{"a", "b,c", "d"},
		func(o *options) any { return strings.Join(o.hosts.names, ",") },
	},
	{
		"admin-address",
		"KVEPP_ADMIN_ADDRESS",
		"",
		[3]string{"a:1", "b:2", "c:3"},
		func(o *options) any { return o.adminAddress },
	},
	{
		"admin-token-file",
		"KVEPP_ADMIN_TOKEN_FILE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.adminTokenFile },
	},
	{
		"debug-decisions",
		"KVEPP_DEBUG_DECISIONS",
		"",
		[3]string{"0", "1", "2"},
		func(o *options) any { return o.debugDecisions },
	},
	{
		"trace-url",
		"KVEPP_TRACE_URL",
		"",
		[3]string{"http://a/{trace_id}", "https://b/?q={trace_id}", "http://[::1]:1/{trace_id}"},
		func(o *options) any { return o.traceURL },
	},
	{
		"ladder-max-bytes",
		"KVEPP_LADDER_MAX_BYTES",
		"",
		[3]string{"0", "1000000", "2000000"},
		func(o *options) any { return o.ladderBytes },
	},
	{
		"replica-peers",
		"KVEPP_REPLICA_PEERS",
		"",
		[3]string{"a:1,b:2", "c:3", "d:4"},
		func(o *options) any { return strings.Join(o.replicaPeers, ",") },
	},
	{
		"replica-service",
		"KVEPP_REPLICA_SERVICE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.replicaService },
	},
	{
		"replica-port",
		"KVEPP_REPLICA_PORT",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.replicaPort },
	},
	{
		"replica-token-file",
		"KVEPP_REPLICA_TOKEN_FILE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.replicaTokenFile },
	},
	{
		"replica-timeout",
		"KVEPP_REPLICA_TIMEOUT",
		"",
		[3]string{"1s", "2s", "4s"},
		func(o *options) any { return o.replicaTimeout },
	},
	{
		"index-peers",
		"KVEPP_INDEX_PEERS",
		"",
		[3]string{"http://a,http://b", "http://c", "http://d"},
		func(o *options) any { return strings.Join(o.indexPeers, ",") },
	},
	{
		"warmup-timeout",
		"KVEPP_WARMUP_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.warmUpTimeout },
	},
	{
		"secure-serving",
		"KVEPP_SECURE_SERVING",
		"DYN_SECURE_SERVING",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.secureServing },
	},
	{"cert-path", "KVEPP_CERT_PATH", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.certPath }},
	{"tls-client-ca", "KVEPP_TLS_CLIENT_CA", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.clientCA }},
	{
		"tls-min-version",
		"KVEPP_TLS_MIN_VERSION",
		"",
		[3]string{"1.3", "1.2", "1.3"},
		func(o *options) any { return o.minVersion },
	},
	{
		"metrics-address",
		"KVEPP_METRICS_ADDRESS",
		"",
		[3]string{"a:1", "b:2", "c:3"},
		func(o *options) any { return o.metricsAddress },
	},
	{"drain-delay", "KVEPP_DRAIN_DELAY", "", [3]string{"1s", "2s", "3s"}, func(o *options) any { return o.drainDelay }},
	{
		"model-load-timeout",
		"KVEPP_MODEL_LOAD_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.modelLoadTimeout },
	},
	{"tracing", "KVEPP_TRACING", "", [3]string{"false", "true", "false"}, func(o *options) any { return o.tracing }},
	{
		"enable-pprof",
		"KVEPP_ENABLE_PPROF",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.enablePprof },
	},
	{
		"metrics-token-file",
		"KVEPP_METRICS_TOKEN_FILE",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.metricsTokenFile },
	},
	{
		"drain-timeout",
		"KVEPP_DRAIN_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.drainTimeout },
	},
	{
		"router-min-initial-workers",
		"KVEPP_ROUTER_MIN_INITIAL_WORKERS",
		"DYN_ROUTER_MIN_INITIAL_WORKERS",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.minInitialWorkers },
	},
	{
		"prefiller-header",
		"KVEPP_PREFILLER_HEADER",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.prefillerHeader },
	},
	{
		"header-aliases",
		"KVEPP_HEADER_ALIASES",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.headerAliases },
	},
	{
		"decision-headers",
		"KVEPP_DECISION_HEADERS",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.decisionHeaders },
	},
	{
		"fallback-endpoints",
		"KVEPP_FALLBACK_ENDPOINTS",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.fallbacks },
	},
	{
		"pick-timeout",
		"KVEPP_PICK_TIMEOUT",
		"",
		[3]string{"1s", "3s", "4s"},
		func(o *options) any { return o.pickTimeout },
	},
	{
		"max-body-bytes",
		"KVEPP_MAX_BODY_BYTES",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.maxBodyBytes },
	},
	{"max-streams", "KVEPP_MAX_STREAMS", "", [3]string{"1", "2", "3"}, func(o *options) any { return o.maxStreams }},
	{
		"max-buffered-bytes",
		"KVEPP_MAX_BUFFERED_BYTES",
		"",
		[3]string{"1000000", "2000000", "3000000"},
		func(o *options) any { return o.maxBufferedBytes },
	},
	{
		"max-parse-bytes",
		"KVEPP_MAX_PARSE_BYTES",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.maxParseBytes },
	},
	{
		"index-max-bytes",
		"KVEPP_INDEX_MAX_BYTES",
		"",
		[3]string{"1048576", "2000000", "3000000"},
		func(o *options) any { return o.indexMaxBytes },
	},
	{
		"vllm-hash-seeds",
		"KVEPP_VLLM_HASH_SEEDS",
		"",
		[3]string{"default", "0,42", "random"},
		func(o *options) any { return strings.Join(o.vllmHashSeeds, ",") },
	},
	{
		"event-plane",
		"KVEPP_EVENT_PLANE",
		"DYN_EVENT_PLANE",
		[3]string{"zmq", "nats", "zmq"},
		func(o *options) any { return o.feed.EventPlane },
	},
	{
		"nats-server",
		"KVEPP_NATS_SERVER",
		"NATS_SERVER",
		[3]string{"nats://a", "nats://b", "nats://c"},
		func(o *options) any { return o.feed.NATSServer },
	},
	{
		"router-kv-events",
		"KVEPP_ROUTER_KV_EVENTS",
		"DYN_ROUTER_USE_KV_EVENTS",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.kvEvents },
	},
	{
		"router-ttl-secs",
		"KVEPP_ROUTER_TTL_SECS",
		"DYN_ROUTER_TTL_SECS",
		[3]string{"1.5", "2", "3"},
		func(o *options) any { return o.ttlSecs },
	},
	{
		"router-max-tree-size",
		"KVEPP_ROUTER_MAX_TREE_SIZE",
		"DYN_ROUTER_MAX_TREE_SIZE",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.maxTreeSize },
	},
	{
		"router-prune-target-ratio",
		"KVEPP_ROUTER_PRUNE_TARGET_RATIO",
		"DYN_ROUTER_PRUNE_TARGET_RATIO",
		[3]string{"0.1", "0.2", "0.3"},
		func(o *options) any { return o.pruneTarget },
	},
	{
		"router-approximate-cache-policy",
		"KVEPP_ROUTER_APPROXIMATE_CACHE_POLICY",
		"DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
		[3]string{"lru", "ttl", "lru"},
		func(o *options) any { return o.cachePolicy },
	},
	{
		"router-predicted-ttl-secs",
		"KVEPP_ROUTER_PREDICTED_TTL_SECS",
		"DYN_ROUTER_PREDICTED_TTL_SECS",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.predictedTTLSecs },
	},
	{
		"router-event-threads",
		"KVEPP_ROUTER_EVENT_THREADS",
		"DYN_ROUTER_EVENT_THREADS",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.feed.Threads },
	},
	{
		"router-durable-kv-events",
		"KVEPP_ROUTER_DURABLE_KV_EVENTS",
		"DYN_ROUTER_DURABLE_KV_EVENTS",
		[3]string{"true", "false", "true"},
		compatValue("router-durable-kv-events"),
	},
	{
		"router-snapshot-threshold",
		"KVEPP_ROUTER_SNAPSHOT_THRESHOLD",
		"DYN_ROUTER_SNAPSHOT_THRESHOLD",
		[3]string{"1", "2", "3"},
		compatValue("router-snapshot-threshold"),
	},
	{
		"router-reset-states",
		"KVEPP_ROUTER_RESET_STATES",
		"DYN_ROUTER_RESET_STATES",
		[3]string{"true", "false", "true"},
		compatValue("router-reset-states"),
	},
	{
		"use-remote-indexer",
		"KVEPP_USE_REMOTE_INDEXER",
		"DYN_USE_REMOTE_INDEXER",
		[3]string{"true", "false", "true"},
		compatValue("use-remote-indexer"),
	},
	{
		"router-mode",
		"KVEPP_ROUTER_MODE",
		"DYN_ROUTER_MODE",
		[3]string{"random", "least-loaded", "round-robin"},
		func(o *options) any { return o.scoring.Mode },
	},
	{
		"router-policy",
		"KVEPP_ROUTER_POLICY",
		"",
		[3]string{"dynamo", "time", "dynamo"},
		func(o *options) any { return o.scoring.Policy },
	},
	{
		"encoder-cuda-to-cpu-ratio",
		"KVEPP_ENCODER_CUDA_TO_CPU_RATIO",
		"DYN_ENCODER_CUDA_TO_CPU_RATIO",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.scoring.CUDAToCPURatio },
	},
	{
		"load-aware",
		"KVEPP_LOAD_AWARE",
		"DYN_ROUTER_LOAD_AWARE",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.loadAware },
	},
	{
		"router-host-cache-hit-weight",
		"KVEPP_ROUTER_HOST_CACHE_HIT_WEIGHT",
		"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.HostCacheHitWeight },
	},
	{
		"router-disk-cache-hit-weight",
		"KVEPP_ROUTER_DISK_CACHE_HIT_WEIGHT",
		"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.DiskCacheHitWeight },
	},
	{
		"shared-cache-multiplier",
		"KVEPP_SHARED_CACHE_MULTIPLIER",
		"DYN_SHARED_CACHE_MULTIPLIER",
		[3]string{"0.5", "0.25", "1"},
		compatValue("shared-cache-multiplier"),
	},
	{
		"router-track-output-blocks",
		"KVEPP_ROUTER_TRACK_OUTPUT_BLOCKS",
		"DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.trackOutput },
	},
	{
		"router-prefill-load-model",
		"KVEPP_ROUTER_PREFILL_LOAD_MODEL",
		"DYN_ROUTER_PREFILL_LOAD_MODEL",
		[3]string{"linear", "aic", "ais"},
		func(o *options) any { return o.prefillModel },
	},
	{
		"router-prefill-tokens-per-second",
		"KVEPP_ROUTER_PREFILL_TOKENS_PER_SECOND",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.prefill().TokensPerSecond },
	},
	{
		"estimated-bytes-per-token",
		"KVEPP_ESTIMATED_BYTES_PER_TOKEN",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.bytesPerToken },
	},
	{
		"router-replica-sync",
		"KVEPP_ROUTER_REPLICA_SYNC",
		"DYN_ROUTER_REPLICA_SYNC",
		[3]string{"true", "false", "true"},
		compatValue("router-replica-sync"),
	},
	{
		"serve-indexer",
		"KVEPP_SERVE_INDEXER",
		"DYN_SERVE_INDEXER",
		[3]string{"true", "false", "true"},
		compatValue("serve-indexer"),
	},
	{
		"enable-session-prefix-index",
		"KVEPP_ENABLE_SESSION_PREFIX_INDEX",
		"DYN_ENABLE_SESSION_PREFIX_INDEX",
		[3]string{"true", "false", "true"},
		compatValue("enable-session-prefix-index"),
	},
	{
		"router-conditional-disagg",
		"KVEPP_ROUTER_CONDITIONAL_DISAGG",
		"DYN_ROUTER_CONDITIONAL_DISAGG",
		[3]string{"true", "false", "true"},
		compatValue("router-conditional-disagg"),
	},
	{
		"router-conditional-disagg-config",
		"KVEPP_ROUTER_CONDITIONAL_DISAGG_CONFIG",
		"DYN_ROUTER_CONDITIONAL_DISAGG_CONFIG",
		[3]string{"a", "b", "c"},
		compatValue("router-conditional-disagg-config"),
	},
	{
		"router-worker-selection-policy",
		"KVEPP_ROUTER_WORKER_SELECTION_POLICY",
		"DYN_ROUTER_WORKER_SELECTION_POLICY",
		[3]string{"default", "default", "default"},
		func(o *options) any { return o.instances.All },
	},
	{
		"router-prefill-policy",
		"KVEPP_ROUTER_PREFILL_POLICY",
		"DYN_ROUTER_PREFILL_POLICY",
		[3]string{"default", "default", "default"},
		func(o *options) any { return o.instances.Prefill },
	},
	{
		"router-decode-policy",
		"KVEPP_ROUTER_DECODE_POLICY",
		"DYN_ROUTER_DECODE_POLICY",
		[3]string{"default", "default", "default"},
		func(o *options) any { return o.instances.Decode },
	},
	{
		"router-tracking-hash",
		"KVEPP_ROUTER_TRACKING_HASH",
		"DYN_ROUTER_TRACKING_HASH",
		[3]string{"a", "b", "c"},
		compatValue("router-tracking-hash"),
	},
	{
		"router-tracking-key-file",
		"KVEPP_ROUTER_TRACKING_KEY_FILE",
		"DYN_ROUTER_TRACKING_KEY_FILE",
		[3]string{"a", "b", "c"},
		compatValue("router-tracking-key-file"),
	},
	{
		"router-tracking-key-id",
		"KVEPP_ROUTER_TRACKING_KEY_ID",
		"DYN_ROUTER_TRACKING_KEY_ID",
		[3]string{"a", "b", "c"},
		compatValue("router-tracking-key-id"),
	},
	{
		"kv-overlap-score-weight",
		"KVEPP_KV_OVERLAP_SCORE_WEIGHT",
		"DYN_OVERLAP_SCORE_WEIGHT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.overlapWeight },
	},
	{
		"kv-events",
		"KVEPP_KV_EVENTS",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.kvEvents },
	},
	{
		"durable-kv-events",
		"KVEPP_DURABLE_KV_EVENTS",
		"",
		[3]string{"true", "false", "true"},
		compatValue("router-durable-kv-events"),
	},
	{
		"track-active-blocks",
		"KVEPP_TRACK_ACTIVE_BLOCKS",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.scoring.TrackActiveBlocks },
	},
	{
		"track-output-blocks",
		"KVEPP_TRACK_OUTPUT_BLOCKS",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.trackOutput },
	},
	{
		"assume-kv-reuse",
		"KVEPP_ASSUME_KV_REUSE",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.scoring.AssumeKVReuse },
	},
	{
		"router-block-size",
		"KVEPP_ROUTER_BLOCK_SIZE",
		"",
		[3]string{"16", "32", "64"},
		func(o *options) any { return o.blockSize },
	},
	{
		"system-port",
		"KVEPP_SYSTEM_PORT",
		"DYN_SYSTEM_PORT",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.metricsPort },
	},
	{
		"shared-cache-type",
		"KVEPP_SHARED_CACHE_TYPE",
		"DYN_SHARED_CACHE_TYPE",
		[3]string{"hicache", "none", "hicache"},
		compatValue("shared-cache-type"),
	},
	{
		"router-kv-overlap-score-credit",
		"KVEPP_ROUTER_KV_OVERLAP_SCORE_CREDIT",
		"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.OverlapScoreCredit },
	},
	{
		"router-kv-overlap-score-credit-decay",
		"KVEPP_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
		"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.OverlapScoreCreditDecay },
	},
	{
		"router-prefill-load-scale",
		"KVEPP_ROUTER_PREFILL_LOAD_SCALE",
		"DYN_ROUTER_PREFILL_LOAD_SCALE",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.PrefillLoadScale },
	},
	{
		"router-kv-overlap-score-weight",
		"KVEPP_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
		"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.overlapWeight },
	},
	{
		"router-kv-usage-weight",
		"KVEPP_ROUTER_KV_USAGE_WEIGHT",
		"",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.KVUsageWeight },
	},
	{
		"router-decode-active-request-weight",
		"KVEPP_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
		"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.DecodeActiveRequestWeight },
	},
	{
		"router-temperature",
		"KVEPP_ROUTER_TEMPERATURE",
		"DYN_ROUTER_TEMPERATURE",
		[3]string{"0.5", "2", "3"},
		func(o *options) any { return o.scoring.Temperature },
	},
	{
		"router-track-active-blocks",
		"KVEPP_ROUTER_TRACK_ACTIVE_BLOCKS",
		"DYN_ROUTER_TRACK_ACTIVE_BLOCKS",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.scoring.TrackActiveBlocks },
	},
	{
		"router-track-prefill-tokens",
		"KVEPP_ROUTER_TRACK_PREFILL_TOKENS",
		"DYN_ROUTER_TRACK_PREFILL_TOKENS",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.scoring.TrackPrefillTokens },
	},
	{
		"router-assume-kv-reuse",
		"KVEPP_ROUTER_ASSUME_KV_REUSE",
		"DYN_ROUTER_ASSUME_KV_REUSE",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.scoring.AssumeKVReuse },
	},
	{
		"router-session-affinity-ttl-secs",
		"KVEPP_ROUTER_SESSION_AFFINITY_TTL_SECS",
		"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.affinity.ttlSecs },
	},
	{
		"router-session-affinity-mode",
		"KVEPP_ROUTER_SESSION_AFFINITY_MODE",
		"DYN_ROUTER_SESSION_AFFINITY_MODE",
		[3]string{"soft", "hard", "soft"},
		func(o *options) any { return o.affinity.mode },
	},
	{
		"allow-client-pinning",
		"KVEPP_ALLOW_CLIENT_PINNING",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.allowPinning },
	},
	{
		"ignore-client-hints",
		"KVEPP_IGNORE_CLIENT_HINTS",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.ignoreHints },
	},
	{
		"pass-session-headers",
		"KVEPP_PASS_SESSION_HEADERS",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.passSessions },
	},
	{
		"keep-legacy-nvext",
		"KVEPP_KEEP_LEGACY_NVEXT",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.keepLegacy },
	},
	{
		"inject-token-data",
		"KVEPP_INJECT_TOKEN_DATA",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.injectTokens },
	},
	{
		"tenant-cache-salt",
		"KVEPP_TENANT_CACHE_SALT",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.tenantSalt },
	},
	{
		"active-decode-blocks-threshold",
		"KVEPP_ACTIVE_DECODE_BLOCKS_THRESHOLD",
		"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD",
		[3]string{"0.5", "0.75", "1"},
		func(o *options) any { return optionalValue[float64]{value: &o.thresholds.ActiveDecodeBlocks}.String() },
	},
	{
		"busy-threshold",
		"KVEPP_BUSY_THRESHOLD",
		"",
		[3]string{"0.5", "0.75", "1"},
		func(o *options) any { return optionalValue[float64]{value: &o.thresholds.ActiveDecodeBlocks}.String() },
	},
	{
		"router-queue-threshold",
		"KVEPP_ROUTER_QUEUE_THRESHOLD",
		"DYN_ROUTER_QUEUE_THRESHOLD",
		[3]string{"0", "2", "4"},
		func(o *options) any { return optionalValue[float64]{value: &o.queueThreshold}.String() },
	},
	{
		"router-queue-policy",
		"KVEPP_ROUTER_QUEUE_POLICY",
		"DYN_ROUTER_QUEUE_POLICY",
		[3]string{"wspt", "lcfs", "wspt"},
		func(o *options) any { return o.queuePolicy },
	},
	{
		"router-policy-config",
		"KVEPP_ROUTER_POLICY_CONFIG",
		"DYN_ROUTER_POLICY_CONFIG",
		[3]string{"testdata/policy.yaml", "testdata/policy2.yaml", "testdata/policy.yaml"},
		func(o *options) any { return o.policyConfig },
	},
	{
		"router-queue-timeout",
		"KVEPP_ROUTER_QUEUE_TIMEOUT",
		"",
		[3]string{"1s", "2s", "3s"},
		func(o *options) any { return o.queueTimeout },
	},
	{
		"router-admission",
		"KVEPP_ROUTER_ADMISSION",
		"",
		[3]string{"working-set", "none", "working-set"},
		func(o *options) any { return o.admissionMode },
	},
	{
		"router-admission-fill",
		"KVEPP_ROUTER_ADMISSION_FILL",
		"",
		[3]string{"0.5", "0.8", "1"},
		func(o *options) any { return o.admissionFill },
	},
	{"eject", "KVEPP_EJECT", "", [3]string{"false", "true", "false"}, func(o *options) any { return o.ejection.on }},
	{
		"eject-consecutive-failures",
		"KVEPP_EJECT_CONSECUTIVE_FAILURES",
		"",
		[3]string{"1", "2", "4"},
		func(o *options) any { return o.ejection.consecutive },
	},
	{
		"eject-failure-percent",
		"KVEPP_EJECT_FAILURE_PERCENT",
		"",
		[3]string{"1", "2", "100"},
		func(o *options) any { return o.ejection.percent },
	},
	{
		"eject-max-percent",
		"KVEPP_EJECT_MAX_PERCENT",
		"",
		[3]string{"0", "2", "100"},
		func(o *options) any { return o.ejection.maxPercent },
	},
	{
		"eject-time",
		"KVEPP_EJECT_TIME",
		"",
		[3]string{"10ms", "2s", "60s"},
		func(o *options) any { return o.ejection.time },
	},
	{
		"eject-first-byte",
		"KVEPP_EJECT_FIRST_BYTE",
		"",
		[3]string{"0s", "2s", "60s"},
		func(o *options) any { return o.ejection.firstByte },
	},
	{
		"router-queue-size",
		"KVEPP_ROUTER_QUEUE_SIZE",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.queueSize },
	},
	{
		"active-prefill-tokens-threshold",
		"KVEPP_ACTIVE_PREFILL_TOKENS_THRESHOLD",
		"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD",
		[3]string{"0", "2", "3"},
		func(o *options) any { return optionalValue[uint64]{value: &o.thresholds.ActivePrefillTokens}.String() },
	},
	{
		"active-prefill-tokens-threshold-frac",
		"KVEPP_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
		"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC",
		[3]string{"0", "2", "3"},
		func(o *options) any {
			return optionalValue[float64]{value: &o.thresholds.ActivePrefillTokensFrac}.String()
		},
	},
	{
		"shed-retry-after",
		"KVEPP_SHED_RETRY_AFTER",
		"DYN_EPP_SHED_RETRY_AFTER_SECS",
		[3]string{"0", "2", "3"},
		func(o *options) any { return o.retryAfter },
	},
	{
		"overload-status-code",
		"KVEPP_OVERLOAD_STATUS_CODE",
		"DYN_HTTP_OVERLOAD_STATUS_CODE",
		[3]string{"503", "529", "503"},
		func(o *options) any { return o.overloadStatus },
	},
	{
		"refresh-metrics-interval",
		"KVEPP_REFRESH_METRICS_INTERVAL",
		"",
		[3]string{"1s", "2s", "0"},
		func(o *options) any { return o.interval },
	},
	{
		"metrics-staleness-threshold",
		"KVEPP_METRICS_STALENESS_THRESHOLD",
		"",
		[3]string{"6s", "7s", "8s"},
		func(o *options) any { return o.stale },
	},
	{
		"model-server-metrics-port",
		"KVEPP_MODEL_SERVER_METRICS_PORT",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.engineGauges.port },
	},
	{
		"model-server-metrics-path",
		"KVEPP_MODEL_SERVER_METRICS_PATH",
		"",
		[3]string{"/a", "/b", "/c"},
		func(o *options) any { return o.engineGauges.path },
	},
	{
		"model-server-metrics-scheme",
		"KVEPP_MODEL_SERVER_METRICS_SCHEME",
		"",
		[3]string{"https", "http", "https"},
		func(o *options) any { return o.engineGauges.scheme },
	},
	{
		"model-server-metrics-https-insecure-skip-verify",
		"KVEPP_MODEL_SERVER_METRICS_HTTPS_INSECURE_SKIP_VERIFY",
		"",
		[3]string{"false", "true", "false"},
		func(o *options) any { return o.skipVerify },
	},
	{
		"total-queued-requests-metric",
		"KVEPP_TOTAL_QUEUED_REQUESTS_METRIC",
		"",
		[3]string{"a", "b", "c{d=e}"},
		func(o *options) any { return o.queued },
	},
	{
		"total-running-requests-metric",
		"KVEPP_TOTAL_RUNNING_REQUESTS_METRIC",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.engineGauges.running },
	},
	{
		"kv-cache-usage-percentage-metric",
		"KVEPP_KV_CACHE_USAGE_PERCENTAGE_METRIC",
		"",
		[3]string{"a", "b", "c"},
		func(o *options) any { return o.usage },
	},
	{
		"conformance",
		"KVEPP_CONFORMANCE",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.conformance },
	},
	{
		"disable-endpoint-subset-filter",
		"KVEPP_DISABLE_ENDPOINT_SUBSET_FILTER",
		"",
		[3]string{"true", "false", "true"},
		func(o *options) any { return o.withoutSubset },
	},
	{
		"zap-encoder",
		"KVEPP_ZAP_ENCODER",
		"",
		[3]string{"json", "console", "json"},
		func(o *options) any { return o.zapEncoder },
	},
	{"v", "KVEPP_V", "", [3]string{"1", "2", "3"}, func(o *options) any { return o.verbosity }},
	{
		"enable-cert-reload",
		"KVEPP_ENABLE_CERT_RELOAD",
		"",
		[3]string{"false", "true", "false"},
		compatValue("enable-cert-reload"),
	},
	{
		"health-checking",
		"KVEPP_HEALTH_CHECKING",
		"",
		[3]string{"false", "true", "false"},
		compatValue("health-checking"),
	},
	{
		"grpc-max-recv-msg-size",
		"KVEPP_GRPC_MAX_RECV_MSG_SIZE",
		"",
		[3]string{"1", "2", "3"},
		compatValue("grpc-max-recv-msg-size"),
	},
	{
		"emit-endpoint-scores",
		"KVEPP_EMIT_ENDPOINT_SCORES",
		"",
		[3]string{"true", "false", "true"},
		compatValue("emit-endpoint-scores"),
	},
	{
		"log-level",
		"KVEPP_LOG_LEVEL",
		"",
		[3]string{"debug", "warn", "error"},
		func(o *options) any { return o.logLevel },
	},
	{
		"access-log",
		"KVEPP_ACCESS_LOG",
		"",
		[3]string{"-", "a.log", "b.log"},
		func(o *options) any { return o.accessLog },
	},
	{"record", "KVEPP_RECORD", "", [3]string{"a", "b", "c"}, func(o *options) any { return o.recordFile }},
	{
		"record-max-bytes",
		"KVEPP_RECORD_MAX_BYTES",
		"",
		[3]string{"10000000", "20000000", "30000000"},
		func(o *options) any { return o.recordMaxBytes },
	},
	{
		"record-files",
		"KVEPP_RECORD_FILES",
		"",
		[3]string{"1", "2", "3"},
		func(o *options) any { return o.recordFiles },
	},
	{
		"record-hashes",
		"KVEPP_RECORD_HASHES",
		"",
		[3]string{"plain", "keyed", "plain"},
		func(o *options) any { return o.recordHashes },
	},
	{
		"log-format",
		"KVEPP_LOG_FORMAT",
		"",
		[3]string{"json", "text", "json"},
		func(o *options) any { return o.logFormat },
	},
}

// compatValue returns a function that reads the value of a compatFlag.
func compatValue(flag string) func(*options) any {
	return func(o *options) any { return o.flags.Lookup(flag).Value.String() }
}

// parsed parses arguments and environment without the checks that need a whole configuration.
func parsed(t *testing.T, args []string, env map[string]string) *options {
	t.Helper()
	var o options
	err := parseServe(&o, args, func(name string) string { return env[name] })
	if err != nil && !strings.Contains(err.Error(), "--endpoints FILE") &&
		!strings.Contains(err.Error(), "belong together") &&
		!strings.Contains(err.Error(), "needs a server") &&
		!strings.Contains(err.Error(), "does not query a cache") {
		t.Fatalf("%v %v: %v", args, env, err)
	}
	return &o
}

// TestPrecedenceOfVariables: a flag precedes kvepp's variable, and that precedes Dynamo's.
func TestPrecedenceOfVariables(t *testing.T) {
	for _, s := range settings {
		want := func(value string) any { return s.get(parsed(t, []string{"--" + s.flag + "=" + value}, nil)) }
		byFlag := want(s.values[0])
		if byFlag == s.get(parsed(t, nil, nil)) {
			t.Errorf("--%s=%s has no effect", s.flag, s.values[0])
		}
		env := map[string]string{s.kvepp: s.values[1]}
		if s.dynamo != "" {
			env[s.dynamo] = s.values[2]
		}
		if got := s.get(parsed(t, []string{"--" + s.flag + "=" + s.values[0]}, env)); got != byFlag {
			t.Errorf("--%s=%s with %v: %v, want the flag's %v", s.flag, s.values[0], env, got, byFlag)
		}
		byEnv := s.get(parsed(t, nil, env))
		if s.flag == "model" {
			if byEnv != "m=b,n=c" {
				t.Errorf("%s: %v", s.kvepp, byEnv)
			}
		} else if byEnv != want(s.values[1]) {
			t.Errorf("%v: %v, want %s's", env, byEnv, s.kvepp)
		}
		if s.dynamo != "" {
			if got := s.get(parsed(t, nil, map[string]string{s.dynamo: s.values[2], s.kvepp: ""})); got != want(
				s.values[2],
			) {
				t.Errorf("%s=%s: %v, want %v", s.dynamo, s.values[2], got, want(s.values[2]))
			}
		}
	}
}

func TestEveryFlagIsListed(t *testing.T) {
	listed := map[string]bool{}
	for _, s := range settings {
		listed[s.flag] = true
		if kveppEnv(s.flag) != s.kvepp || dynamoEnv[s.flag] != s.dynamo {
			t.Errorf(
				"--%s: %s and %q, the table has %s and %q",
				s.flag,
				kveppEnv(s.flag),
				dynamoEnv[s.flag],
				s.kvepp,
				s.dynamo,
			)
		}
	}
	serveFlags(new(options)).VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !listed[f.Name] {
			t.Errorf("add --%s to the table of this test", f.Name)
		}
		if !f.Hidden && annotation(f, inVariables) != kveppEnv(f.Name) {
			t.Errorf("--%s: its first variable is not %s", f.Name, kveppEnv(f.Name))
		}
		if !f.Hidden && (annotation(f, inSection) == "" || f.Usage == "") {
			t.Errorf("--%s is in no section, or has no help", f.Name)
		}
	})
	ofSelect := selectFlags(new(selectOptions))
	for name := range dynamoEnv {
		if !listed[name] && ofSelect.Lookup(name) == nil {
			t.Errorf("dynamoEnv has %s, which is no flag", name)
		}
	}
}

func TestNegatedFlags(t *testing.T) {
	o := parsed(
		t,
		[]string{"--no-router-kv-events", "--no-router-track-active-blocks"},
		map[string]string{"DYN_ROUTER_USE_KV_EVENTS": "true"},
	)
	if o.kvEvents || o.scoring.TrackActiveBlocks || !o.scoring.TrackPrefillTokens {
		t.Errorf("--no-router-kv-events --no-router-track-active-blocks: %+v", o)
	}
}

func TestQueueFlags(t *testing.T) {
	base := []string{"--endpoints=x"}
	for _, c := range []struct {
		args   []string
		waits  bool
		unused int
	}{
		{nil, false, 0},
		{[]string{"--router-queue-threshold=None"}, false, 0},
		{[]string{"--router-queue-policy=wspt", "--router-queue-timeout=1s"}, false, 2},
		{[]string{"--router-admission=working-set", "--router-queue-policy=wspt", "--router-queue-timeout=1s"},
			false, 1},
		{[]string{"--router-admission-fill=0.8"}, false, 1},
		{[]string{"--router-queue-threshold=2.0", "--router-queue-policy=wspt"}, true, 0},
		{[]string{"--router-queue-threshold=2.0", "--no-router-track-prefill-tokens"}, true, 1},
		{[]string{"--router-policy-config=testdata/policy.yaml"}, true, 0},
		{[]string{"--router-policy-config=testdata/policy.yaml", "--router-queue-threshold=2.0"}, true, 1},
		{[]string{"--router-policy-config=testdata/policy2.yaml"}, false, 0},
		{[]string{"--kv-events-port=5557", "--data-parallel-size=2", "--metrics-endpoint-auth", "--ha-lease-name=x",
			"--ha-handover-timeout=1s"}, false, 5},
		{[]string{"--pool-name=p", "--kv-events-port=5557", "--data-parallel-size=2", "--metrics-endpoint-auth",
			"--ha-lease-name=x"}, false, 1},
		{[]string{"--endpoint-selector=a=b", "--metrics-endpoint-auth", "--metrics-token-file=x",
			"--ha-enable-leader-election", "--ha-lease-name=x"}, false, 1},
		{[]string{"--endpoint-selector=a=b", "--metrics-endpoint-auth=false", "--metrics-token-file=x"}, false, 0},
	} {
		o := parsed(t, append(base, c.args...), nil)
		if q := o.busy.queue(); (q != nil) != c.waits || q != nil && (q.Bound != 65536 || q.Timeout != 30*time.Second) {
			t.Errorf("%v: %+v", c.args, q)
		}
		if unused := o.withoutEffect(); len(unused) != c.unused {
			t.Errorf("%v: without effect: %v", c.args, unused)
		}
	}
	// Precedence: the section router of the policy file, flags, the environment.
	o := parsed(
		t,
		append(
			base,
			"--router-policy-config=testdata/policy2.yaml",
			"--router-ttl-secs=9",
			"--router-track-active-blocks",
		),
		map[string]string{"DYN_ROUTER_USE_KV_EVENTS": "true"},
	)
	if o.ttlSecs != 60.5 || o.scoring.TrackActiveBlocks || o.kvEvents || o.predictedTTLSecs != 0 ||
		o.scoring.HostCacheHitWeight != 0.5 {
		t.Errorf("%+v", o.scoring)
	}
	// The section goes before presets too.
	if o = parsed(t, append(base, "--router-policy-config=testdata/policy3.yaml", "--load-aware"), nil); !o.kvEvents {
		t.Error("--load-aware goes before use_kv_events of the policy file")
	}
	classes := parsed(
		t,
		append(base, "--router-policy-config=testdata/policy.yaml"),
		nil,
	).busy.queue().Profiles.Classes()
	if strings.Join(classes, " ") != "cached uncached" {
		t.Errorf("classes %v", classes)
	}
}

// TestWorkerSelection: the parameters of the instance that is selected take precedence over flags and presets, and the
// others leave the flags as they are, as in Dynamo.
func TestWorkerSelection(t *testing.T) {
	base := []string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml", "--router-prefill-load-scale=3",
		"--router-decode-active-request-weight=2"}
	for _, c := range []struct {
		args                       []string
		env                        map[string]string
		credit, scale, temperature float64
		unused                     int
	}{
		{nil, nil, 0.5, 7, 0, 1},
		{[]string{"--router-temperature=0.2"}, nil, 0.5, 7, 0.2, 1},
		{[]string{"--kv-overlap-score-weight=4"}, nil, 0.5, 7, 0, 1},
		{[]string{"--router-worker-selection-policy=default"}, nil, 1, 3, 0, 0},
		{nil, map[string]string{"DYN_ROUTER_WORKER_SELECTION_POLICY": "hot"}, 1, 3, 0.9, 1},
		{[]string{"--router-prefill-policy=hot", "--router-decode-policy=hot",
			"--router-worker-selection-policy=hot"}, nil, 1, 3, 0.9, 1},
	} {
		o := parsed(t, append(slices.Clone(base), c.args...), c.env)
		if w := o.scoring; w.OverlapScoreCredit != c.credit || w.PrefillLoadScale != c.scale ||
			w.Temperature != c.temperature || w.DecodeActiveRequestWeight != 2 {
			t.Errorf("%v %v: %+v", c.args, c.env, w)
		}
		if unused := o.withoutEffect(); len(unused) != c.unused {
			t.Errorf("%v %v: without effect: %q", c.args, c.env, unused)
		}
	}
	f := serveFlags(new(options))
	for key, flag := range parameterFlags {
		if f.Lookup(flag) == nil {
			t.Errorf("%s: no flag --%s", key, flag)
		}
	}
}

// TestPolicySettings: each of Dynamo's settings in the section router has a flag.
func TestPolicySettings(t *testing.T) {
	f := serveFlags(new(options))
	for key, flag := range settingFlags {
		if f.Lookup(flag) == nil {
			t.Errorf("%s: no flag --%s", key, flag)
		}
	}
	if n := len(settingFlags); n != 20 {
		t.Errorf("%d settings, Dynamo has 20", n)
	}
}

func TestBusyThresholdFlags(t *testing.T) {
	base := []string{"--endpoints=x"}
	if o := parsed(t, base, nil); !o.thresholds.None() || o.retryAfter != 1 || o.overloadStatus != 429 {
		t.Errorf("defaults: %+v", o.thresholds)
	}
	for _, flag := range []string{"--busy-threshold=0.5", "--active-decode-blocks-threshold=0.5"} {
		if o := parsed(t, append(base, flag), nil); o.thresholds.ActiveDecodeBlocks == nil ||
			*o.thresholds.ActiveDecodeBlocks != 0.5 {
			t.Errorf("%s: %+v", flag, o.thresholds)
		}
	}
	if o := parsed(t, append(base, "--active-decode-blocks-threshold=None"),
		map[string]string{"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.5"}); !o.thresholds.None() {
		t.Errorf("None: %+v", o.thresholds)
	}
}

func TestDeprecatedWeight(t *testing.T) {
	base := []string{"--endpoints=x"}
	if o := parsed(t, append(base, "--router-kv-overlap-score-weight=2"), nil); o.scoring.PrefillLoadScale != 2 ||
		o.scoring.OverlapScoreCredit != 1 {
		t.Errorf("weight 2: %+v", o.scoring)
	}
	if o := parsed(t, append(base, "--router-kv-overlap-score-weight=0"), nil); o.scoring.PrefillLoadScale != 0 ||
		o.scoring.OverlapScoreCredit != 0 {
		t.Errorf("weight 0: %+v", o.scoring)
	}
	if o := parsed(t, base, nil); !math.IsNaN(o.overlapWeight) || o.scoring.PrefillLoadScale != 1 ||
		o.drainTimeout != 30*time.Second {
		t.Errorf("defaults: %+v", o)
	}
}

// TestOlderNames: older names set the same value as the new ones, also with no-.
func TestOlderNames(t *testing.T) {
	o := parsed(
		t,
		[]string{
			"--no-kv-events",
			"--no-track-active-blocks",
			"--assume-kv-reuse=false",
			"--kv-overlap-score-weight=0",
			"--router-block-size",
			"32",
		},
		nil,
	)
	if o.kvEvents || o.scoring.TrackActiveBlocks || o.scoring.AssumeKVReuse || o.scoring.OverlapScoreCredit != 0 ||
		o.scoring.PrefillLoadScale != 0 ||
		o.blockSize != 32 {
		t.Errorf("%+v", o)
	}
	if o := parsed(t, []string{"--track-output-blocks", "--no-router-assume-kv-reuse"}, nil); !o.trackOutput ||
		o.scoring.AssumeKVReuse {
		t.Errorf("%+v", o)
	}
	// Among variables, the newer name takes precedence. A flag, also by an older name, precedes both.
	env := map[string]string{
		"DYN_OVERLAP_SCORE_WEIGHT":           "2",
		"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "3",
		"DYN_SYSTEM_PORT":                    "-1",
	}
	if o := parsed(t, nil, env); o.scoring.PrefillLoadScale != 3 || o.metricsPort != 0 {
		t.Errorf("%+v, port %d", o.scoring, o.metricsPort)
	}
	if o := parsed(t, []string{"--metrics-port=7", "--kv-overlap-score-weight=4"},
		env); o.scoring.PrefillLoadScale != 4 ||
		o.metricsPort != 7 {
		t.Errorf("%+v, port %d", o.scoring, o.metricsPort)
	}
}

func TestLoadAware(t *testing.T) {
	o := parsed(t, []string{"--load-aware", "--no-router-track-active-blocks"}, nil)
	if c := o.scoring; o.kvEvents || c.OverlapScoreCredit != 0 || c.AssumeKVReuse || !c.TrackActiveBlocks ||
		!c.TrackPrefillTokens {
		t.Errorf("%+v, events %v", c, o.kvEvents)
	}
}

// TestDefaultPolicy: workers are priced by time, unless another setting is meant for Dynamo's cost.
func TestDefaultPolicy(t *testing.T) {
	const file = "--router-policy-config=testdata/"
	for _, c := range []struct {
		args []string
		env  map[string]string
		want scoring.Policy
		from string // what --print-config names
	}{
		{nil, nil, scoring.Time, "default"},
		{[]string{"--router-temperature=0", "--load-aware=false", "--router-host-cache-hit-weight=0.5"}, nil,
			scoring.Time, "default"},
		{[]string{file + "policy.yaml"}, nil, scoring.Time, "default"},
		{[]string{"--router-policy=dynamo"}, nil, scoring.Dynamo, "flag"},
		{[]string{"--router-policy=time", "--router-temperature=5"}, nil, scoring.Time, "flag"},
		{[]string{"--router-policy=time", "--load-aware"}, nil, scoring.Time, "flag"},
		{[]string{"--router-mode=least-loaded"}, nil, scoring.Dynamo, "follows from --router-mode"},
		{[]string{"--router-temperature=0.5"}, nil, scoring.Dynamo, "follows from --router-temperature"},
		{[]string{"--load-aware"}, nil, scoring.Dynamo, "follows from --load-aware"},
		{[]string{"--router-kv-usage-weight=0"}, nil, scoring.Dynamo, "follows from --router-kv-usage-weight"},
		{nil, map[string]string{"DYN_ROUTER_PREFILL_LOAD_SCALE": "1"}, scoring.Dynamo,
			"follows from --router-prefill-load-scale"},
		{[]string{"--kv-overlap-score-weight=1"}, nil, scoring.Dynamo,
			"follows from --router-kv-overlap-score-weight"},
		{[]string{file + "selection.yaml", "--router-worker-selection-policy=default"}, nil, scoring.Dynamo,
			"follows from worker_selection in --router-policy-config"},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), c.env)
		setting, _ := settingOf("", o.flags.Lookup("router-policy"))
		if o.scoring.Policy != c.want || setting.Source != c.from {
			t.Errorf("%v %v: %v, %s; want %v, %s", c.args, c.env, o.scoring.Policy, setting.Source, c.want, c.from)
		}
	}
}

// TestInheritedDirect: DYN_ROUTER_MODE=direct, from a frontend's environment, does not change kvepp's router mode.
func TestInheritedDirect(t *testing.T) {
	env := map[string]string{"DYN_ROUTER_MODE": "direct"}
	if o := parsed(t, []string{"--endpoints=x"}, env); o.scoring.Mode != scoring.KV ||
		!strings.Contains(strings.Join(o.withoutEffect(), "\n"), "DYN_ROUTER_MODE=direct") {
		t.Errorf("mode %v; %q", o.scoring.Mode, o.withoutEffect())
	}
	env["KVEPP_ROUTER_MODE"] = "random"
	if o := parsed(t, []string{"--endpoints=x"}, env); o.scoring.Mode != scoring.Random || o.withoutEffect() != nil {
		t.Errorf("mode %v; %q", o.scoring.Mode, o.withoutEffect())
	}
}

// TestEngineDefault: with Dynamo's discovery the frontend tokenizes, unless --engine says otherwise.
func TestEngineDefault(t *testing.T) {
	for _, c := range []struct {
		args []string
		want prompt.Engine
	}{
		{nil, prompt.VLLM},
		{[]string{"--dynamo-discovery=file:d"}, prompt.Dynamo},
		{[]string{"--dynamo-discovery=file:d", "--engine=sglang"}, prompt.SGLang},
		{[]string{"--engine=trtllm"}, prompt.TRTLLM},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), nil)
		if got := o.config.engine.Engine; got != c.want {
			t.Errorf("%v: engine %q, want %q", c.args, got, c.want)
		}
	}
}

func TestTokenizerURLs(t *testing.T) {
	for _, c := range []struct {
		args []string
		want map[string]string
	}{
		{nil, map[string]string{}},
		{[]string{"--tokenizer-url=m=http://a:1/b?c=d", "--tokenizer-url=n=https://c"},
			map[string]string{"m": "http://a:1/b?c=d", "n": "https://c"}},
		{[]string{"--model=m=dir", "--tokenizer-url=http://a?c=d"}, map[string]string{"m": "http://a?c=d"}},
		{[]string{"--model-name=m", "--model-path=dir", "--tokenizer-url=http://a"},
			map[string]string{"m": "http://a"}},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), nil)
		if got := o.config.urls; !maps.Equal(got, c.want) {
			t.Errorf("%v: %v", c.args, got)
		}
	}
}

// TestTokenFile: the line end that editors add is not part of the token.
func TestTokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	for text, want := range map[string]string{"secret\n": "secret", " k \r\n": "k"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := newTokenFile("--key", file); err != nil || key.token() != want {
			t.Errorf("%q: %q, %v", text, key.token(), err)
		}
	}
	for _, text := range []string{"", "\n", "two\nlines"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := newTokenFile("--key", file); err == nil || key != nil || strings.Contains(err.Error(), "two") {
			t.Errorf("%q: %q, %v", text, key.token(), err)
		}
	}
	if key, err := newTokenFile("--key", ""); err != nil || key.token() != "" {
		t.Errorf("without a file: %q, %v", key.token(), err)
	}
}

// TestRefusedFolderWithURL: kvepp starts if --tokenizer-url names the engine of a model whose folder cannot be used. It
// logs a warning.
func TestRefusedFolderWithURL(t *testing.T) {
	o := parsed(
		t,
		[]string{
			"--endpoints=x",
			"--model=gone=testdata/nomodel",
			"--model=here=../../test/models/tiny-bytelevel",
			"--tokenizer-url=gone=http://engine",
		},
		nil,
	)
	var logged bytes.Buffer
	models := loadModels(o, slog.New(slog.NewTextHandler(&logged, nil)))
	if len(models) != 1 || models["here"] == nil {
		t.Fatalf("%v", models)
	}
	if text := logged.String(); strings.Count(text, "level=WARN") != 1 ||
		!strings.Contains(text, "model=gone url=http://engine") ||
		!strings.Contains(text, "nomodel") {
		t.Errorf("log:\n%s", text)
	}
}

// TestUpperBoundOfSGLang: predictions are upper bounds for hybrid models on SGLang, and for models that may be hybrid.
// The log says so.
func TestUpperBoundOfSGLang(t *testing.T) {
	folder := func(config string) string {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS("../../test/models/tiny-bytelevel")); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "config.json")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if config != "" {
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	for engine, bounded := range map[string]bool{"sglang": true, "vllm": false} {
		o := parsed(
			t,
			[]string{
				"--endpoints=x",
				"--engine=" + engine,
				"--model=plain=" + folder(`{"architectures":["LlamaForCausalLM"]}`),
				"--model=hybrid=" + folder(`{"architectures":["GptOssForCausalLM"]}`),
				"--model=bare=" + folder(""),
			},
			nil,
		)
		var logged bytes.Buffer
		models := loadModels(o, slog.New(slog.NewTextHandler(&logged, nil)))
		if len(models) != 3 {
			t.Fatalf("%v", models)
		}
		of := upperBound(o.config.engine.Engine, models)
		if !bounded {
			if of != nil || strings.Contains(logged.String(), "upper bound") {
				t.Errorf("%s: log:\n%s", engine, logged.String())
			}
			continue
		}
		if of("plain") || !of("hybrid") || !of("bare") || !of("a model without a tokenizer") {
			t.Errorf("upper bounds: plain %v, hybrid %v, bare %v", of("plain"), of("hybrid"), of("bare"))
		}
		if text := logged.String(); strings.Count(text, "upper bound") != 2 ||
			strings.Count(text, "no config.json") != 1 ||
			!strings.Contains(text, "upper bound\" model=hybrid") {
			t.Errorf("log:\n%s", text)
		}
	}
}

// TestRefusedFolderWithoutURL: kvepp starts although a model's folder cannot be used, and logs an error.
func TestRefusedFolderWithoutURL(t *testing.T) {
	o := parsed(
		t,
		[]string{
			"--endpoints=x",
			"--model=gone=testdata/nomodel",
			"--model=here=../../test/models/tiny-bytelevel",
			"--dynamo-discovery=file:x",
		},
		nil,
	)
	var logged bytes.Buffer
	models := loadModels(o, slog.New(slog.NewTextHandler(&logged, nil)))
	if gone, named := models["gone"]; !named || gone != nil || models["here"] == nil {
		t.Fatalf("%v", models)
	}
	if text := logged.String(); strings.Count(text, "level=ERROR") != 1 ||
		!strings.Contains(text, "model=gone folder=testdata/nomodel") {
		t.Errorf("log:\n%s", text)
	}
	files, err := modelFiles(o, models)
	if _, named := files["gone"]; err != nil || named || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
	applySettings(
		models,
		[]dynamo.Instance{{InstanceID: 1, Card: &dynamo.Card{Model: "gone"}}},
		newDedupLog(slog.New(slog.NewTextHandler(&logged, nil))),
	)
}

// TestMismatchesAreLoggedOnce: each mismatch is logged when it begins, and again if it ended in between.
func TestMismatchesAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	logged := map[dynamo.Mismatch]bool{}
	a := dynamo.Mismatch{Endpoint: "w0", File: "tokenizer.json", Own: "x", Worker: "y"}
	b := dynamo.Mismatch{Endpoint: "w1", File: "tokenizer.json", Own: "x", Worker: "y"}
	for _, mismatches := range [][]dynamo.Mismatch{{a}, {a}, {a, b}, {b}, {b, a}} {
		logMismatches(slog.New(slog.NewTextHandler(&log, nil)), mismatches, logged)
	}
	if text := log.String(); strings.Count(text, "level=ERROR") != 3 ||
		strings.Count(text, "worker=w0 file=tokenizer.json own=x worker's=y") != 2 {
		t.Errorf("log:\n%s", text)
	}
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
		says string
	}{
		{nil, nil, "--endpoints FILE"},
		{[]string{"--endpoints=x", "--endpoint=y"}, nil, "unknown flag --endpoint; did you mean --endpoints?"},
		{[]string{"--endpoints=x", "y"}, nil, `"y"`},
		{[]string{"--endpoints=x", "--model=qwen"}, nil, "NAME=DIR"},
		{[]string{"--endpoints=x", "--model=a=b", "--model=a=c"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--model-path=a"}, nil, "belong together"},
		{[]string{"--endpoints=x", "--model=a=b", "--model-name=a", "--model-path=c"}, nil, "given by --model already"},
		{[]string{"--endpoints=x", "--lora=a"}, nil, "needs its model"},
		{[]string{"--endpoints=x", "--model-rewrite=a"}, nil, "NAME=TARGET"},
		{[]string{"--endpoints=x", "--model-rewrite=a="}, nil, "NAME=TARGET"},
		{[]string{"--endpoints=x", "--model=m=d", "--model=n=e", "--lora=a"}, nil, "needs its model"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a="}, nil, "NAME=MODEL"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--lora=a=m"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--engine=dynamo"}, nil, "direct mode"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--dynamo-discovery=file:y"}, nil, "direct mode"},
		{[]string{"--endpoints=x", "--router-session-affinity-ttl-secs=-1"}, nil, "from 1 to 31536000"},
		{[]string{"--endpoints=x", "--router-session-affinity-ttl-secs=31536001"}, nil, "from 1 to 31536000"},
		{[]string{"--endpoints=x", "--router-session-affinity-mode=firm"}, nil, "hard or soft"},
		{[]string{"--endpoints=x", "--kv-cache-block-size=-1"}, nil, "number of tokens"},
		{[]string{"--endpoints=x", "--router-temperature=-1"}, nil, "temperature"},
		{[]string{"--endpoints=x", "--router-temperature=nan"}, nil, "temperature"},
		{[]string{"--endpoints=x", "--router-mode=cheapest"}, nil, "least-loaded"},
		{[]string{"--endpoints=x", "--router-mode=direct"}, nil, "frontends"},
		{[]string{"--endpoints=x", "--router-mode=device-aware-weighted", "--encoder-cuda-to-cpu-ratio=0"}, nil,
			"1 to "},
		{[]string{"--endpoints=x", "--router-track-output-blocks", "--no-router-track-active-blocks"}, nil,
			"one of the two"},
		{[]string{"--endpoints=x", "--router-prefill-load-model=linear", "--no-router-track-prefill-tokens"}, nil,
			"one of the two"},
		{[]string{"--endpoints=x", "--router-prefill-load-model=quadratic"}, nil, "none or linear"},
		{[]string{"--endpoints=x", "--router-policy=tine"}, nil, "must be dynamo or time"},
		{[]string{"--endpoints=x", "--router-policy=time", "--router-mode=random"}, nil, "in --router-mode kv only"},
		{[]string{"--endpoints=x", "--router-policy=time", "--router-kv-usage-weight=1"}, nil,
			"--router-kv-usage-weight is a weight of Dynamo's cost"},
		{[]string{"--endpoints=x", "--router-policy=time"},
			map[string]string{"DYN_ROUTER_PREFILL_LOAD_SCALE": "2"}, "or DYN_ROUTER_PREFILL_LOAD_SCALE is a weight"},
		{[]string{"--endpoints=x", "--router-prefill-tokens-per-second=nan"}, nil, "tokens-per-second"},
		{[]string{"--endpoints=x", "--estimated-bytes-per-token=0"}, nil, "at least 1"},
		{[]string{"--endpoints=x", "--shared-cache-type=hicache"}, nil, "shared-cache-type"},
		{[]string{"--endpoints=x", "--shared-cache-multiplier=1.5"}, nil, "0 to 1"},
		{[]string{"--endpoints=x", "--kv-overlap-score-weight=-1"}, nil,
			"--router-kv-overlap-score-weight -1: must be a finite number"},
		{[]string{"--endpoints=x", "--dynamo-discovery=etcd:y"}, nil, "file:DIR"},
		{[]string{"--endpoints=x", "--dynamo-discovery=frontend:a:1,b"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--dynamo-discovery=kubernetes"}, nil, "which Pods to follow"},
		{[]string{"--pool-name=p", "--endpoint-selector=a=b"}, nil, "a selector of its own"},
		{[]string{"--pool-name=p", "--endpoint-target-ports=1"}, nil, "the pool says"},
		{[]string{"--endpoints=x", "--endpoint-target-ports=1"}, nil, "which Pods to follow"},
		{[]string{"--endpoint-selector=a=b", "--endpoint-target-ports=1,1"}, nil, "twice"},
		{[]string{"--endpoint-selector=a=b", "--endpoint-target-ports=1,2,3,4,5,6,7,8,9"}, nil, "at most 8"},
		{[]string{"--endpoint-selector=a=b=c"}, nil, "--endpoint-selector"},
		{[]string{"--pool-name=p", "--pool-group=llm-d.ai"}, nil, "inference.networking.x-k8s.io"},
		{[]string{"--pool-name=p", "--pod-ip-family=ipv5"}, nil, "ipv4 or ipv6"},
		{[]string{"--pool-name=p", "--data-parallel-size=0"}, nil, "from 1 to 1024"},
		{[]string{"--endpoints=x", "--ha-enable-leader-election"}, nil, "Kubernetes"},
		{[]string{"--pool-name=x", "--ha-handover-timeout=-1s"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--engine=llama"}, nil, "--engine"},
		{[]string{"--endpoints=x", "--chat-template-content-format=parts"}, nil, "auto, string or openai"},
		{[]string{"--endpoints=x", "--tokenizer-url=http://engine"}, nil, "for which model"},
		{[]string{"--endpoints=x", "--model=a=b", "--model=c=d", "--tokenizer-url=http://engine"}, nil, "there are 2"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=engine:8000"}, nil, "NAME=http://HOST:PORT"},
		{[]string{"--endpoints=x", "--tokenizer-url==http://engine"}, nil, "NAME=http://HOST:PORT"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=http://b", "--tokenizer-url=a=http://c"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=http://b", "--engine=dynamo"}, nil, "only vLLM's and SGLang's"},
		{[]string{"--endpoints=x", "--tokenizer-check=3"}, nil, "--tokenizer-url NAME=URL"},
		{[]string{"--endpoints=x", "--tokenizer-check=-1"}, nil, "negative"},
		{[]string{"--endpoints=x", "--tokenizer-url-timeout=0"}, nil, "above 0"},
		{[]string{"--endpoints=x", "--index-max-bytes=1000"}, nil, "at least 1048576"},
		{[]string{"--endpoints=x", "--ladder-max-bytes=1000"}, nil, "must be 0, or from 65536"},
		{[]string{"--endpoints=x", "--router-ttl-secs=0"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-ttl-secs=inf"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-predicted-ttl-secs=-1"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-predicted-ttl-secs=nan"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-max-tree-size=0"}, nil, "blocks"},
		{[]string{"--endpoints=x", "--router-prune-target-ratio=1.5"}, nil, "at most 1"},
		{[]string{"--endpoints=x", "--router-approximate-cache-policy=fifo"}, nil, "ttl or lru"},
		{[]string{"--endpoints=x", "--router-event-threads=0"}, nil, "at least 1"},
		{[]string{"--endpoints=x", "--vllm-hash-seeds=0,seven"}, nil, `"seven" is no value of PYTHONHASHSEED`},
		{[]string{"--endpoints=x", "--router-durable-kv-events"}, nil, "JetStream"},
		{[]string{"--endpoints=x", "--durable-kv-events"}, nil, "JetStream"},
		{[]string{"--endpoints=x", "--router-reset-states"}, nil, "JetStream"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_SNAPSHOT_THRESHOLD": "1000000"}, "JetStream"},
		{[]string{"--endpoints=x", "--use-remote-indexer"}, nil, "its own"},
		{[]string{"--endpoints=x", "--active-decode-blocks-threshold=85"}, nil, "between 0.0 and 1.0"},
		{[]string{"--endpoints=x", "--active-decode-blocks-threshold=nan"}, nil, "between 0.0 and 1.0"},
		{[]string{"--endpoints=x", "--active-prefill-tokens-threshold=-1"}, nil, "or None"},
		{[]string{"--endpoints=x", "--active-prefill-tokens-threshold-frac=inf"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-queue-threshold=-1"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-admission=sessions"}, nil, "none or working-set"},
		{[]string{"--endpoints=x", "--router-admission=working-set", "--router-admission-fill=1.1"}, nil, "at most 1"},
		{[]string{"--endpoints=x", "--router-admission=working-set", "--router-mode=random"}, nil, "kv only"},
		{[]string{"--endpoints=x", "--router-queue-threshold=nan"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-queue-policy=edf"}, nil, "fcfs, wspt or lcfs"},
		{[]string{"--endpoints=x", "--router-queue-timeout=-1s"}, nil, "negative"},
		{[]string{"--endpoints=x", "--router-queue-size=0"}, nil, "at least 1"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/nopolicy.yaml"}, nil, "nopolicy.yaml"},
		{[]string{"--endpoints=x", "--fallback-endpoints=1", "--engine=dynamo"}, nil,
			"serves for the worker that a header names"},
		{[]string{"--endpoints=x", "--fallback-endpoints=9"}, nil, "--fallback-endpoints 9: must be from 0 to 8"},
		{[]string{"--endpoints=x", "--pick-timeout=0s"}, nil, "--pick-timeout 0s: must be above 0"},
		{[]string{"--endpoints=x", "--max-streams=-1"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused.yaml"}, nil,
			"testdata/refused.yaml: line 3: worker_selection: must have instances"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml", "--router-prefill-policy=other"},
			nil, `instance "other" (line 6) has the type thunderagent, which kvepp does not have`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml", "--router-prefill-policy=tuned"},
			nil, `select different weights, "tuned" and "default"`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml"},
			map[string]string{"DYN_ROUTER_WORKER_SELECTION_POLICY": "wrong"},
			`line 8: "overlap_credit" is not a key of the parameters of dynamo-default-cost-fn, which has`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml",
			"--router-worker-selection-policy=negative"}, nil, "--router-temperature -1: must be a finite number"},
		{[]string{"--endpoints=x", "--router-worker-selection-policy=tuned"}, nil, "loads no other"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused2.yaml"}, nil,
			`--router-tracking-hash "keyed": must be public-xxh3-v1`},
		{[]string{"--endpoints=x", "--router-tracking-key-id=1"}, nil, "leave them out"},
		{[]string{"--endpoints=x", "--router-conditional-disagg"}, nil, "answer 500 to one without"},
		{[]string{"--endpoints=x", "--router-conditional-disagg-config={}"}, nil, "answer 500 to one without"},
		{[]string{"--endpoints=x", "--router-prefill-policy=mine"}, nil, "loads no other"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_DECODE_POLICY": "mine"}, "loads no other"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused3.yaml"}, nil,
			`refused3.yaml: line 2: "router_temperature" is not a key of router, which has: disk_cache_hit_weight`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused4.yaml"}, nil,
			"refused4.yaml: line 2: router_ttl_secs \"soon\": must be a number, for example 120"},
		{[]string{"--endpoints=x", "--overload-status-code=200"}, nil, "429, 503 or 529"},
		{[]string{"--endpoints=x", "--refresh-metrics-interval=10ms"}, nil,
			"at least 50ms, for example 5s, or 0 for never"},
		{[]string{"--endpoints=x", "--metrics-staleness-threshold=2s"}, nil,
			"shorter than --refresh-metrics-interval 5s"},
		{[]string{"--endpoints=x", "--model-server-metrics-scheme=ftp"}, nil, "must be http or https"},
		{[]string{"--endpoints=x", "--model-server-metrics-path=metrics"}, nil, "must begin with a slash"},
		{[]string{"--endpoints=x", "--total-queued-requests-metric=a{b"}, nil,
			"--total-queued-requests-metric: \"a{b\" must look like NAME"},
		{[]string{"--endpoints=x", "--inject-token-data"}, nil, "only Dynamo's frontends take token ids"},
		{[]string{"--endpoints=x", "--tenant-cache-salt", "--engine=dynamo"}, nil, "for stock vLLM"},
		{[]string{"--endpoints=x", "--tenant-cache-salt", "--ignore-client-hints"}, nil, "leave one of them out"},
		{[]string{"--endpoints=x", "--tls-min-version=1.1"}, nil, "must be 1.2 or 1.3"},
		{[]string{"--endpoints=x", "--secure-serving=false", "--cert-path=d"}, nil, "--cert-path belongs to TLS"},
		{[]string{"--endpoints=x", "--admin-address=9091"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--trace-url=http://jaeger/trace/"}, nil, "must have {trace_id}"},
		{[]string{"--endpoints=x", "--trace-url=javascript:alert(1)//{trace_id}"}, nil,
			"http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=/trace/{trace_id}"}, nil, "http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=https:///{trace_id}"}, nil, "http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=http://me:word@jaeger/{trace_id}"}, nil, "must not have a user"},
		{[]string{"--endpoints=x", "--trace-url=http://{trace_id}/trace"}, nil, "{trace_id} after the host"},
		{[]string{"--endpoints=x", "--trace-url=http://jaeger\n/{trace_id}"}, nil, "invalid control character"},
		{[]string{"--endpoints=x", "--admin-address=0.0.0.0:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--admin-address=:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--config-file=a"}, nil, "--config-file: kvepp reads no EndpointPickerConfig"},
		{[]string{"--endpoints=x", "--aic-backend=vllm"}, nil, "--aic-backend: belongs to a model of Dynamo"},
		{[]string{"--endpoints=x", "--ais-tp-size", "2"}, nil, "--ais-tp-size: belongs to a model of Dynamo"},
		{[]string{"--endpoints=x", "--config-text=a"}, nil, "EndpointPickerConfig"},
		{[]string{"--endpoints=x", "--emit-endpoint-scores"}, nil, "--decision-headers"},
		{[]string{"--endpoints=x", "--metrics-cert-dir=a"}, nil, "--metrics-token-file"},
		{[]string{"--endpoints=x", "--metrics-client-ca-file=a"}, nil, "--metrics-token-file"},
		{[]string{"--endpoints=x", "--zap-encoder=a"}, nil, "json or console"},
		{[]string{"--endpoints=x", "--log-level=loud"}, nil, "debug, info, warn or error"},
		{[]string{"--endpoints=x", "--log-format=xml"}, nil, "text or json"},
		{[]string{"--endpoints=x", "--v=-1"}, nil, "not be below 0"},
		{[]string{"--endpoints=x", "--enable-pprof"}, nil, "give --admin-address too"},
		{[]string{"--endpoints=x", "--drain-delay=2s", "--drain-timeout=1s"}, nil, "a part of --drain-timeout"},
		{[]string{"--endpoints=x", "--drain-delay=-1s"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--model-load-timeout=0s"}, nil, "--model-load-timeout"},
		{[]string{"--endpoints=x", "--admin-address=[::]:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--admin-address=myhost:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--metrics-address=9090"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--grpc-port=0"}, nil, "1 to 65535"},
		{[]string{"--endpoints=x", "--grpc-port=70000"}, nil, "70000"},
		{[]string{"--endpoints=x", "--max-parse-bytes=-1"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--max-buffered-bytes=1000"}, nil,
			"--max-buffered-bytes 1000: must be at least 524288"},
		{[]string{"--endpoints=x", "--router-min-initial-workers=-1"}, nil, "negative"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_TEMPERATURE": "hot"}, "DYN_ROUTER_TEMPERATURE"},
		{[]string{"--endpoints=x"}, map[string]string{"KVEPP_GRPC_PORT": "x", "DYN_KV_CACHE_BLOCK_SIZE": "y"},
			"DYN_KV_CACHE_BLOCK_SIZE"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(
			append([]string{"serve"}, c.args...),
			nil,
			&stdout,
			&stderr,
			func(name string) string { return c.env[name] },
		)
		if code != 2 || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v %v: status %d, %q; want 2 and %q", c.args, c.env, code, stderr.String(), c.says)
		}
	}
}

func TestErrorsAtStart(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--endpoints=testdata/none.yaml"}, "none.yaml"},
		{[]string{"--endpoints=testdata/none.yaml", "--tokenizer-url=m=http://a@b"}, "--tokenizer-url m=http://a@b"},
		{[]string{"--endpoints=testdata/none.yaml", "--tokenizer-url=m=http://a",
			"--tokenizer-url-api-key-file=testdata/none.key"}, "none.key"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(append([]string{"serve"}, c.args...), nil, &stdout, &stderr,
			func(string) string { return "" }); code != 1 ||
			!strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v: status %d, %q; want 1 and %q", c.args, code, stderr.String(), c.says)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{nil, 2, "kvepp serve"},
		{[]string{"help"}, 0, "endpoints.yaml"},
		{[]string{"--help"}, 0, "endpoints.yaml"},
		{[]string{"serve", "--help-all"}, 0, "DYN_ROUTER_TEMPERATURE"},
		{[]string{"serve", "--help"}, 0, "--help-all"},
		{[]string{"check", "--help-all"}, 0, "--router-mode"},
		{[]string{"version"}, 0, "kvepp "},
		{[]string{"sevre"}, 2, `"sevre"`},
	} {
		var stdout, stderr bytes.Buffer
		code := run(c.args, nil, &stdout, &stderr, func(string) string { return "" })
		if code != c.code || !strings.Contains(stdout.String()+stderr.String(), c.says) {
			t.Errorf("%v: status %s, %q %q", c.args, strconv.Itoa(code), stdout.String(), stderr.String())
		}
	}
}

func TestIndexBytes(t *testing.T) {
	for _, c := range []struct{ flag, limit, want int64 }{
		{0, math.MaxInt64, 2 << 30},
		{0, 3 << 30, 3 << 29},
		{0, 1000, minIndexBytes},
		{5 << 20, 3 << 30, 5 << 20},
	} {
		if got := (&indexMemory{c.flag}).indexBytes(c.limit); got != c.want {
			t.Errorf("flag %d, GOMEMLIMIT %d: %d, want %d", c.flag, c.limit, got, c.want)
		}
	}
}

func TestFlagsWithoutEffectAreNamed(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{nil, 0},
		{[]string{"--router-predicted-ttl-secs=2", "--router-event-threads=2"}, 0},
		{[]string{"--router-max-tree-size=2", "--router-approximate-cache-policy=lru"}, 2},
		{[]string{"--no-router-kv-events", "--router-ttl-secs=2", "--router-max-tree-size=9",
			"--router-prune-target-ratio=0.5", "--router-approximate-cache-policy=lru"}, 0},
		{[]string{"--no-router-kv-events", "--router-predicted-ttl-secs=2", "--router-event-threads=2"}, 2},
		{[]string{"--no-router-kv-events", "--vllm-hash-seeds=default"}, 1},
		{[]string{"--router-kv-overlap-score-weight=0", "--index-max-bytes=2000000"}, 1},
		{[]string{"--no-router-kv-events", "--index-peers=http://10.0.0.9:9091", "--warmup-timeout=1s"}, 2},
		{[]string{"--router-mode=random", "--router-temperature=1", "--router-assume-kv-reuse=false"}, 1},
		{[]string{"--encoder-cuda-to-cpu-ratio=2"}, 1},
		{[]string{"--router-prefill-load-model=aic"}, 1},
		{[]string{"--router-replica-sync", "--serve-indexer", "--shared-cache-multiplier=0.5",
			"--enable-session-prefix-index"}, 4},
		{[]string{"--no-router-conditional-disagg", "--router-tracking-hash=public-xxh3-v1",
			"--router-prefill-policy=default", "--router-decode-policy=default"}, 0},
		{[]string{"--model-server-metrics-port=9", "--model-server-metrics-path=/m",
			"--metrics-staleness-threshold=1m"}, 0},
		{[]string{"--refresh-metrics-interval=0", "--model-server-metrics-port=9", "--model-server-metrics-path=/m"},
			2},
	} {
		o := parsed(t, c.args, nil)
		if got := o.withoutEffect(); len(got) != c.want {
			t.Errorf("%v: %v, want %d", c.args, got, c.want)
		}
	}
	if got := parsed(t, nil, map[string]string{"DYN_ROUTER_APPROXIMATE_CACHE_POLICY": "lru"}).withoutEffect(); len(
		got,
	) != 1 {
		t.Errorf("from the environment: %v, want 1", got)
	}
}

func TestPredict(t *testing.T) {
	for _, c := range []struct {
		args []string
		want router.Predict
		most int
	}{
		{nil, router.Predict{Silent: 2 * time.Minute}, 0},
		{[]string{"--router-predicted-ttl-secs=1.5", "--router-ttl-secs=9"},
			router.Predict{TTL: 1500 * time.Millisecond, Silent: 9 * time.Second}, 0},
		{[]string{"--no-router-kv-events"}, router.Predict{TTL: 2 * time.Minute, Alone: true}, 1 << 20},
		{[]string{"--no-router-kv-events", "--router-approximate-cache-policy=lru", "--router-max-tree-size=99"},
			router.Predict{TTL: 2 * time.Minute, LRU: true, Alone: true}, 99},
	} {
		o := parsed(t, c.args, nil)
		if got := o.predict(); got != c.want || o.index(math.MaxInt64).MaxPredicted != c.most {
			t.Errorf("%v: %+v, want %+v", c.args, got, c.want)
		}
	}
}

func TestAdaptersOfTheOnlyModel(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--model=m=d", "--lora=a", "--lora=b=n"}, "map[a:m b:n]"},
		{[]string{"--model-name=m", "--model-path=d", "--lora=a"}, "map[a:m]"},
		{[]string{"--tokenizer-url=m=http://e", "--lora=a"}, "map[a:m]"},
		{[]string{"--engine=sglang", "--model=m=d", "--lora=m:a", "--lora=b", "--lora=n:c=n"}, "map[a:m b:m c:n]"},
		{[]string{"--engine=vllm", "--model=m=d", "--lora=m:a"}, "map[m:a:m]"},
		{[]string{"--model=m=d", "--tokenizer-url=http://e", "--lora=a"}, "map[a:m]"},
	} {
		if got := parsed(t, append(c.args, "--endpoints=x"), nil).config.adapters; fmt.Sprint(got) != c.want {
			t.Errorf("%v: %v, want %s", c.args, got, c.want)
		}
	}
}

// TestLoggingOfOtherPickers: the logging flags of GAIE's and llm-d's pickers mean the same in kvepp.
func TestLoggingOfOtherPickers(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"", "info text"}, {"--zap-encoder=json", "info json"},
		{"--zap-encoder=console --log-format=json", "info text"},
		{"--v=3", "info text"}, {"--v=4", "debug text"},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, strings.Fields(c.args)...), nil)
		if err := o.check(); err != nil || o.logLevel+" "+o.logFormat != c.want {
			t.Errorf("%s: %s %s, want %s (%v)", c.args, o.logLevel, o.logFormat, c.want, err)
		}
	}
}
