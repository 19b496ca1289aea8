package llmd

import (
	"slices"
	"strings"
)

// Plugin is a plugin type of llm-d's picker: what it may be used as, and what it means here.
type Plugin struct {
	Type    string
	Roles   string // with spaces between them: filter, scorer, picker, handler, decider, producer, ...
	Verdict Verdict
	Says    string // the setting, the difference, or the reason

	alpha bool   // needs --allow-experimental-plugins
	loose bool   // llm-d accepts any parameters
	shape string // of the parameters
	means func(t *translation, p *plugin, row *Row)
}

func (p *Plugin) may(role string) bool { return slices.Contains(strings.Fields(p.Roles), role) }

// What several types say.
const (
	sayCost      = "load is a term of kvepp's one cost, from its own bookings, not from scrapes"
	sayNoPlace   = "kvepp does not prefer endpoints by this"
	sayGateOff   = "has no effect while the feature gate flowControl is off"
	sayNoCluster = "kvepp serves the endpoints of one cluster"
	sayHard      = "it removes endpoints by a rule that kvepp does not have"
	sayUnread    = "no other plugin that kvepp follows reads it"
	sayParser    = "kvepp reads this API"
	sayByLoad    = "kvepp routes these requests by load"
)

// multicluster begins the names of the types for several clusters.
const multicluster = "multicluster-"

// Shapes that several types share.
const (
	sessionShape = "strategy text, profileName text, headerName text, encodedEndpointHeaderConfig {header text}, " +
		"sessionIdConfig {sources []{header text, attribute text, producer text}, evictionTtlSeconds int, " +
		"evictionSweepSeconds int}"
	preciseShape = "tokenProcessorConfig {blockSize int, blockSizeTokens int, hashSeed text, hashAlgorithm text}, " +
		"indexerConfig {kvBlockIndexConfig {inMemoryConfig {size int, podCacheSize int}, " +
		"costAwareMemoryConfig {size text}, redisConfig {address text}, enableMetrics bool, " +
		"metricsLoggingInterval nanoseconds}, kvCacheBackendConfigs []{name text, weight float}}, " +
		"kvEventsConfig {zmqEndpoint text, topicFilter text, concurrency int, engineType text, discoverPods bool, " +
		"podDiscoveryConfig {podLabelSelector text, podNamespace text, socketPort int, replaySocketPort int}}, " +
		"speculativeIndexing bool, speculativeTTL duration"
	tokenShape = "modelName text, vllm {url text, timeout duration, mmTimeout duration, endpointDiscovery any, " +
		"prefillOnly bool}, estimate any, udsTokenizerConfig any"
	handlerShape = "stageOrder text, profiles {decode text, prefill text, encode text}, " +
		"deciders {prefill @decider, encode @decider}, decodeProfile text, prefillProfile text, encodeProfile text, " +
		"deciderPluginName @decider, prefillDeciderPluginName @decider, encodeDeciderPluginName @decider"
	detectorShape = "queueDepthThreshold int, kvCacheUtilThreshold float, metricsStalenessThreshold duration, " +
		"headroom float, stalenessPolicy text, inFlightLoadProducerName @producer"
	requirementsShape = "matchLabels texts, matchExpressions []{key text, operator text, values []text}"
	engineShape       = "engineLabelKey text, defaultEngine text, engineConfigs []{name text, " +
		"queuedRequestsSpec text, runningRequestsSpec text, kvUsageSpec text, loraSpec text, cacheInfoSpec text, " +
		"cacheBlockSizeLabelName text, " +
		"cacheNumBlocksLabelName text, cacheBlockSizeSpec text, cacheNumBlocksSpec text, customMetrics []any}"
)

// Plugins are the types of llm-d-router from v0.9 on, also those that v0.11 removed: KServe and KAITO still name them.
var Plugins = []Plugin{
	// Filters.
	{Type: "label-selector-filter", Roles: "filter", Verdict: Maps, Says: "which Pods are endpoints, or their roles",
		shape: requirementsShape, means: requireLabels},
	{Type: "by-label-selector", Roles: "filter", Verdict: Maps, Says: "which Pods are endpoints, or their roles",
		shape: requirementsShape, means: requireLabels},
	{Type: "by-label", Roles: "filter", Verdict: Maps, Says: "which Pods are endpoints, or their roles",
		shape: "label text, validValues []text, allowsNoLabel bool", means: requireLabel},
	{Type: "prefill-filter", Roles: "filter", Verdict: Maps, Says: "roles by llm-d.ai/role",
		means: requireRole(false, prefillRoles)},
	{Type: "decode-filter", Roles: "filter", Verdict: Maps, Says: "roles by llm-d.ai/role",
		means: requireRole(true, decodeRoles)},
	{Type: "encode-filter", Roles: "filter", Verdict: Ignored, Says: "kvepp chooses no encode workers"},
	{Type: "prefix-cache-affinity-filter", Roles: "filter", Verdict: Approximated,
		Says: "no hard threshold: a request leaves its prefix where the queue costs more than the prefill",
		shape: "affinityThreshold float, explorationProbability float, maxTTFTPenaltyMs float, ttftSource text, " +
			"peakPrefillThroughput float, prefixMatchInfoProducerName @producer, " +
			"latencyPredictionInfoProducerName @producer, inFlightLoadProducerName @producer, " +
			"maxTokensInFlightPenalty float",
		means: readsPrefix},
	{Type: "slo-headroom-tier-filter", Roles: "filter", Verdict: Approximated,
		Says:  "kvepp always takes the endpoint with the least cost in time; SLO headers do not rank endpoints",
		shape: "epsilonExploreNeg float, latencyPredictionInfoProducerName @producer"},
	{Type: "session-affinity-filter", Roles: "filter", Verdict: Maps, alpha: true, shape: sessionShape,
		Says: "--router-session-affinity-ttl-secs", means: keepSessions("hard")},
	{Type: "endpoint-attribute-filter", Roles: "filter", Verdict: Refused, alpha: true, Says: sayHard,
		shape: "attribute text, attributeKey text, producer text, operator text, value any"},
	{Type: "topology-affinity-filter", Roles: "filter", Verdict: Refused, alpha: true, Says: sayHard,
		shape: "minAffinity text"},
	{Type: "utilization-filter", Roles: "filter", Verdict: Refused, alpha: true,
		Says:  sayHard + "; --active-decode-blocks-threshold and similar flags leave out busy endpoints",
		shape: "conditions []{metric text, maxValue float}, fallbackOnEmpty bool"},
	{Type: "header-based-testing-filter", Roles: "filter", Verdict: Refused,
		Says: "only for conformance tests: give --conformance instead"},

	// Scorers.
	{Type: "queue-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost},
	{Type: "kv-cache-utilization-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost},
	{Type: "running-requests-size-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost},
	{Type: "load-aware-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost, shape: "threshold int"},
	{Type: "active-request-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost,
		shape: "requestTimeout text, idleThreshold int, maxBusyScore float, inFlightLoadProducerName @producer"},
	{Type: "token-load-scorer", Roles: "scorer", Verdict: Approximated, Says: sayCost,
		shape: "queueThresholdTokens int, inFlightLoadProducerName @producer"},
	{Type: "prefix-cache-scorer", Roles: "scorer", Verdict: Approximated,
		Says:  "cached tokens shorten the prefill in kvepp's one cost",
		shape: "prefixMatchInfoProducerName @producer, matchLengthWeight float, matchLengthScaleTokens int",
		means: readsPrefix},
	{Type: "precise-prefix-cache-scorer", Roles: "scorer producer", Verdict: Approximated,
		Says:  "cached tokens shorten the prefill in kvepp's one cost, by KV events",
		shape: preciseShape, means: followEvents},
	{Type: "lora-affinity-scorer", Roles: "scorer", Verdict: Approximated,
		Says: "an adapter's cached blocks count for its requests; whether it is loaded does not"},
	{Type: "no-hit-lru-scorer", Roles: "scorer", Verdict: Approximated,
		Says:  "prompts without a cached prefix go by load",
		shape: "lruSize int, prefixPluginType text, prefixPluginName text, prefixMatchInfoProducerName @producer"},
	{Type: "session-affinity-scorer", Roles: "scorer", Verdict: Approximated, alpha: true, shape: sessionShape,
		Says: "a session keeps its endpoint until that is overloaded", means: keepSessions("soft")},
	{Type: "context-length-aware", Roles: "scorer filter", Verdict: Ignored, Says: sayNoPlace,
		shape: "label text, enableFiltering bool", means: func(_ *translation, p *plugin, row *Row) {
			if p.parameters.at("enableFiltering").is(false) {
				row.Verdict, row.Says = Refused, "enableFiltering: "+sayHard
			}
		}},
	{Type: "latency-scorer", Roles: "scorer", Verdict: Approximated,
		Says: "kvepp's cost is the time that a choice takes, by speeds that it learns",
		shape: "ttftWeight float, tpotWeight float, headroomSelectionStrategy text, compositeKVWeight float, " +
			"compositeQueueWeight float, compositePrefixWeight float, latencyPredictionInfoProducerName @producer, " +
			"prefixMatchInfoProducerName @producer, inFlightLoadProducerName @producer"},
	{Type: "mm-embeddings-cache-scorer", Roles: "scorer", Verdict: Ignored,
		Says: sayNoPlace, shape: "producerName @producer"},
	{Type: "topology-affinity-scorer", Roles: "scorer", Verdict: Ignored, alpha: true, Says: sayNoPlace, loose: true},
	{Type: "header-label-affinity-scorer", Roles: "scorer", Verdict: Ignored, alpha: true, Says: sayNoPlace,
		shape: "headerName text, labelKey text"},
	{Type: "endpoint-attribute-scorer", Roles: "scorer", Verdict: Ignored, alpha: true, Says: sayNoPlace,
		shape: "attributeKey text, producer text, algorithm {type text, " +
			"normalization {fixedRange {min float, max float}, adaptiveRange any}}"},
	{Type: "endpoint-attribute-weight-scorer", Roles: "scorer", Verdict: Ignored, alpha: true, Says: sayNoPlace,
		shape: "attributeKey text, producer text, weights any"},
	{Type: "latency-observation-scorer-hub", Roles: "scorer", Verdict: Ignored, alpha: true,
		Says: sayNoPlace, loose: true},

	// Pickers.
	{Type: "max-score-picker", Roles: "picker", Verdict: Maps, Says: "the endpoint with the least cost",
		shape: "maxNumOfEndpoints int", means: pick()},
	{Type: "random-picker", Roles: "picker", Verdict: Maps, Says: "--router-mode random",
		shape: "maxNumOfEndpoints int", means: pick("--router-mode=random")},
	{Type: "weighted-random-picker", Roles: "picker", Verdict: Approximated,
		Says:  "--router-temperature 0.5: a softmax over costs, not in proportion to scores",
		shape: "maxNumOfEndpoints int", means: pick("--router-temperature=0.5")},

	// Profile handlers and deciders.
	{Type: "single-profile-handler", Roles: "handler", Verdict: Maps, Says: "one choice for each request"},
	{Type: "disagg-profile-handler", Roles: "handler", Verdict: Maps, Says: "--prefiller-header", shape: handlerShape,
		means: splitStages},
	{Type: "pd-profile-handler", Roles: "handler", Verdict: Maps, Says: "--prefiller-header", shape: handlerShape,
		means: splitStages},
	{Type: "disagg-headers-handler", Roles: "control", Verdict: Ignored, Says: "kvepp always writes the header",
		shape: "prefillProfile text, encodeProfile text"},
	{Type: "prefill-header-handler", Roles: "control", Verdict: Ignored, Says: "kvepp always writes the header",
		shape: "prefillProfile text, encodeProfile text"},
	{Type: "always-disagg-pd-decider", Roles: "decider", Verdict: Maps, Says: "each request has a prefill worker"},
	{Type: "prefix-based-pd-decider", Roles: "decider", Verdict: Maps,
		Says:  "a short prompt, or one that the decode worker mostly holds, has no prefill worker",
		shape: "nonCachedTokens int, promptTokens int, prefixMatchInfoProducerName @producer"},
	{Type: "always-disagg-multimodal-decider", Roles: "decider", Verdict: Refused,
		Says: "kvepp chooses no encode workers"},
	{Type: "data-parallel-profile-handler", Roles: "handler", Verdict: Maps,
		Says: "the rank's address in x-data-parallel-host-port", shape: "primaryPort int", means: sendToPrimary},
	{Type: "header-profile-handler", Roles: "handler", Verdict: Refused, alpha: true,
		Says: "kvepp does not follow the header EPP-Profile", shape: "headerName text, defaultProfile text"},

	// Producers.
	{Type: "approx-prefix-cache-producer", Roles: "producer", Verdict: Approximated,
		Says: "--no-router-kv-events: kvepp assumes that a worker holds what it was sent",
		shape: "autoTune bool, blockSizeTokens int, blockSize int, maxPrefixTokensToMatch int, " +
			"maxPrefixBlocksToMatch int, lruCapacityPerServer int",
		means: readsPrefix},
	{Type: "precise-prefix-cache-producer", Roles: "producer", Verdict: Maps, Says: "KV events", shape: preciseShape,
		means: followEvents},
	{Type: "token-producer", Roles: "producer", Verdict: Maps,
		Says: "token ids", shape: tokenShape, means: askForTokens},
	{Type: "tokenizer", Roles: "producer", Verdict: Maps, Says: "token ids", shape: tokenShape, means: askForTokens},
	{Type: "inflight-load-producer", Roles: "producer", Verdict: Approximated,
		Says: "kvepp always books what runs",
		shape: "addEstimatedOutputTokens bool, outputRatio float, maxEstimatedOutputTokens int, " +
			"prefixMatchInfoProducerName @producer, syncCrossReplicaState bool",
		means: func(t *translation, p *plugin, row *Row) {
			if p.parameters.at("addEstimatedOutputTokens").is(false) {
				row.set("--router-track-output-blocks=true")
			}
		}},
	{Type: "predicted-latency-producer", Roles: "producer", Verdict: Approximated,
		Says: "kvepp learns speeds itself: the predictor's containers are not used",
		shape: "samplingMean float, maxDecodeTokenSamplesForPrediction int, sloBufferFactor float, " +
			"contextTTL nanoseconds, streamingMode bool, endpointRoleLabel text, predictInProduce bool, " +
			"useEncoderCacheFeatures bool"},
	{Type: "session-id-producer", Roles: "producer", Verdict: Maps, Says: "the header that names a session",
		shape: "headerName text, cookieName text", means: nameSessions},
	{Type: "burst-prefix-cache-producer", Roles: "producer", Verdict: Approximated, alpha: true,
		Says: "a prompt counts as held from the moment of its choice; requests do not wait to be batched",
		shape: "windowDurationMs int, maxPerReplica int, blockSizeTokens int, maxPrefixTokensToMatch int, " +
			"minColocateBlocks int, maxBatchSize int, balanceBy text",
		means: readsPrefix},
	{Type: "mm-embeddings-cache-producer", Roles: "producer", Verdict: Ignored, Says: sayUnread,
		shape: "cacheSizeInMBPerServer int"},
	{Type: "p2p-source-producer", Roles: "producer", Verdict: Ignored, alpha: true,
		Says:  "no x-kv-cache-source-host-port: engines compute the prefix again",
		shape: "minCachedTokenDelta int, prefillProfileName text"},
	{Type: "session-state-producer", Roles: "producer", Verdict: Ignored, alpha: true, Says: sayUnread, loose: true},
	{Type: "latency-observer-producer-hub", Roles: "producer", Verdict: Ignored, alpha: true,
		Says: sayUnread, loose: true},
	{Type: "outlen-bucket", Roles: "producer", Verdict: Ignored, alpha: true, Says: sayUnread, loose: true},
	{Type: "label-producer", Roles: "producer", Verdict: Ignored, alpha: true, Says: sayUnread,
		shape: "labels []{label text, attributeKey text}"},

	// Request control.
	{Type: "agent-identity", Roles: "control", Verdict: Ignored, alpha: true,
		Says: "kvepp knows no fairness ids", shape: "additionalSessionHeaders []text"},
	{Type: "latency-slo-admitter", Roles: "control", Verdict: Approximated,
		Says:  "kvepp refuses no request for its latency objective",
		shape: "latencyPredictionInfoProducerName @producer, producerName @producer"},
	{Type: "probabilistic-admitter", Roles: "control", Verdict: Refused,
		Says:  "it refuses requests; kvepp has --active-decode-blocks-threshold and the queue for that",
		shape: "queueDepthThreshold float, kvCacheUtilThreshold float, power float, k float"},
	{Type: "request-attribute-reporter", Roles: "control", Verdict: Refused,
		Says: "gateways bill and limit by what it writes", loose: true},
	{Type: "disaggregatedset-rollout-screener", Roles: "control", Verdict: Refused, alpha: true,
		Says: "kvepp does not pair revisions of a DisaggregatedSet", loose: true},
	{Type: "destination-endpoint-served-verifier", Roles: "control", Verdict: Ignored,
		Says: "kvepp does it with --conformance"},

	// Flow control.
	{Type: "global-strict-fairness-policy", Roles: "fairness", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "round-robin-fairness-policy", Roles: "fairness", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "program-aware-fairness", Roles: "fairness", Verdict: Ignored, Says: sayGateOff,
		shape: "strategy text, lasWeightService float, lasWeightHeadWait float, lasHalfLifeSeconds float, " +
			"evictionTtlSeconds float, evictionSweepSeconds float, turnPriorityTimeWeight float, " +
			"turnPriorityInactivitySeconds float"},
	{Type: "fcfs-ordering-policy", Roles: "ordering", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "edf-ordering-policy", Roles: "ordering", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "slo-deadline-ordering-policy", Roles: "ordering", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "static-usage-limit-policy", Roles: "usage", Verdict: Ignored, Says: sayGateOff, shape: "threshold float"},
	{Type: "priority-holdback-policy", Roles: "usage", Verdict: Ignored, alpha: true, Says: sayGateOff,
		shape: "shape text, domain text, minCeiling float, maxCeiling float"},
	{Type: "soft-reflective-ceiling-policy", Roles: "usage", Verdict: Ignored, alpha: true, Says: sayGateOff},
	{Type: "utilization-detector", Roles: "detector filter", Verdict: Ignored, Says: sayGateOff, shape: detectorShape,
		means: detect},
	{Type: "concurrency-detector", Roles: "detector filter", Verdict: Ignored, Says: sayGateOff,
		shape: "maxConcurrency int, maxTokenConcurrency int, concurrencyMode text, headroom float, " +
			"inFlightLoadProducerName @producer", means: detect},
	{Type: "max-saturation-detector", Roles: "detector", Verdict: Ignored, Says: sayGateOff,
		shape: "detectors []@detector, stages any", means: detect},
	{Type: "strict-band-selection-policy", Roles: "band", Verdict: Ignored, Says: sayGateOff, loose: true},
	{Type: "sheddable-eviction-filter", Roles: "eviction", Verdict: Ignored, alpha: true, Says: sayGateOff},
	{Type: "priority-then-time-eviction-order-policy", Roles: "eviction", Verdict: Ignored, alpha: true,
		Says: sayGateOff},

	// Parsers.
	{Type: "openai-parser", Roles: "parser", Verdict: Maps, Says: sayParser},
	{Type: "anthropic-parser", Roles: "parser", Verdict: Maps, Says: sayParser},
	{Type: "passthrough-parser", Roles: "parser", Verdict: Maps, Says: sayByLoad},
	{Type: "vllmhttp-parser", Roles: "parser", Verdict: Approximated, Says: sayByLoad},
	{Type: "sglanghttp-parser", Roles: "parser", Verdict: Approximated, Says: sayByLoad},
	{Type: "vertexai-parser", Roles: "parser", Verdict: Approximated, Says: sayByLoad, loose: true},
	{Type: "vllmgrpc-parser", Roles: "parser", Verdict: Refused, Says: "kvepp reads no gRPC messages"},

	// Data layer.
	{Type: "metrics-data-source", Roles: "source", Verdict: Maps, Says: "--model-server-metrics-*",
		shape: "scheme text, path text, port int, insecureSkipVerify bool, caCertPath text, clientCertPath text, " +
			"clientKeyPath text, interval duration", means: scrape},
	{Type: "core-metrics-extractor", Roles: "extractor", Verdict: Approximated,
		Says: "kvepp knows the metrics of vLLM, SGLang, TensorRT-LLM and Triton by their names", shape: engineShape,
		means: nameMetrics},
	{Type: "model-server-protocol-metrics", Roles: "extractor", Verdict: Approximated,
		Says: "kvepp knows the metrics of vLLM, SGLang, TensorRT-LLM and Triton by their names", shape: engineShape,
		means: nameMetrics},
	{Type: "models-data-source", Roles: "source", Verdict: Ignored, Says: sayUnread, loose: true},
	{Type: "models-data-extractor", Roles: "extractor", Verdict: Ignored, Says: sayUnread, loose: true},
	{Type: "dcgm-data-source", Roles: "source", Verdict: Ignored, alpha: true, Says: sayUnread, loose: true},
	{Type: "dcgm-extractor", Roles: "extractor", Verdict: Ignored, alpha: true, Says: sayUnread, loose: true},
	{Type: "topology-extractor", Roles: "extractor", Verdict: Ignored, alpha: true, Says: sayUnread, loose: true},
	{Type: "k8s-notification-source", Roles: "source", Verdict: Ignored,
		Says: "kvepp watches the cluster itself", loose: true},
	{Type: "endpoint-notification-source", Roles: "source", Verdict: Ignored, Says: "kvepp watches the cluster itself",
		loose: true},
	{Type: "file-discovery", Roles: "endpoints", Verdict: Maps, Says: "--endpoints",
		shape: "path text, watchFile bool", means: discoverInFile},
	{Type: "k8s-peer-discovery", Roles: "peers", Verdict: Ignored, alpha: true,
		Says:  "kvepp's replicas share what runs by --replica-service",
		shape: "selector text, port int, namespace text"},
	{Type: multicluster, Roles: "source extractor endpoints scorer", Verdict: Refused, alpha: true, Says: sayNoCluster,
		loose: true},
}

// pluginOf returns the row of a type; nil if llm-d has no such type.
func pluginOf(kind string) *Plugin {
	i := slices.IndexFunc(Plugins, func(p Plugin) bool {
		return p.Type == kind || p.Type == multicluster && strings.HasPrefix(kind, multicluster)
	})
	if i < 0 {
		return nil
	}
	return &Plugins[i]
}
