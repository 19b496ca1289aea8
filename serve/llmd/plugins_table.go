package llmd

import (
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Plugin is a plugin type of llm-d's picker: what it may be used as, and what it means here.
type Plugin struct {
	meaning
	Type  string
	alpha bool       // needs --allow-experimental-plugins
	shape *yaml.Node // of the parameters; any: llm-d accepts all
}

// meaning is that of some types, which have the same.
type meaning struct {
	Roles   string // with spaces between them
	Verdict Verdict
	Says    string // the setting, the difference, or the reason
	means   func(t *translation, row *Row)
	types   string
}

func (p *Plugin) may(role string) bool { return slices.Contains(strings.Fields(p.Roles), role) }

// What several types say.
const (
	sayCost     = "load is a term of kvepp's one cost, from its own bookings, not scrapes; weights have no counterpart"
	sayNoPlace  = "kvepp does not prefer endpoints by this"
	sayGateOff  = "has no effect while the feature gate flowControl is off"
	sayHard     = "it removes endpoints by a rule that kvepp does not have"
	sayUnread   = "no other plugin that kvepp follows reads it"
	sayByLoad   = "kvepp routes these requests by load"
	sayLabels   = "which Pods are endpoints, or their roles"
	sayNoEncode = "kvepp chooses no encode workers"
)

// multicluster begins the names of the types for several clusters.
const multicluster = "multicluster-"

// Shapes that several rows share.
const (
	sessionShape = ": {strategy, profileName, headerName, encodedEndpointHeaderConfig: {header}, sessionIdConfig: " +
		"{sources: [{header, attribute, producer}], evictionTtlSeconds: int, evictionSweepSeconds: int}}"
	preciseShape = `: {tokenProcessorConfig: {blockSize: int, blockSizeTokens: int, hashSeed, hashAlgorithm},
		indexerConfig: {kvBlockIndexConfig: {inMemoryConfig: {size: int, podCacheSize: int},
		costAwareMemoryConfig: {size}, redisConfig: {address}, enableMetrics: bool,
		metricsLoggingInterval: int}, kvCacheBackendConfigs: [{name, weight: float}]},
		kvEventsConfig: {zmqEndpoint, topicFilter, concurrency: int, engineType, discoverPods: bool,
		podDiscoveryConfig: {podLabelSelector, podNamespace, socketPort: int, replaySocketPort: int}},
		speculativeIndexing: bool, speculativeTTL: duration}`
)

// meanings has the plugin types of llm-d-router from v0.9 on, also those that v0.11 removed: KServe and KAITO still
// name them. A row's types have the shapes of their parameters (none: there are none). ! is maturity alpha.
var meanings = []meaning{
	{"filter", Maps, sayLabels, requireLabels, `label-selector-filter|by-label-selector: {matchLabels: texts,
		matchExpressions: [{key, operator, values: [text]}]}`},
	{"filter", Maps, sayLabels, requireLabel, "by-label: {label, validValues: [text], allowsNoLabel: bool}"},
	{"filter", Maps, "roles by llm-d.ai/role", require(prefills(false)), "prefill-filter"},
	{"filter", Maps, "roles by llm-d.ai/role", require(decodes(true)), "decode-filter"},
	{"filter", Ignored, sayNoEncode, nil, "encode-filter"},
	{"filter", Approximated,
		"no hard threshold: a request leaves its prefix where the queue costs more than the prefill", readsPrefix,
		`prefix-cache-affinity-filter: {affinityThreshold: float, explorationProbability: float, maxTTFTPenaltyMs:
		float, ttftSource, peakPrefillThroughput: float, prefixMatchInfoProducerName, latencyPredictionInfoProducerName,
		inFlightLoadProducerName, maxTokensInFlightPenalty: float}`},
	{"filter", Approximated,
		"kvepp always takes the endpoint with the least cost in time; SLO headers do not rank endpoints", nil,
		"slo-headroom-tier-filter: {epsilonExploreNeg: float, latencyPredictionInfoProducerName}"},
	{"filter", Maps, "--router-session-affinity-ttl-secs", keepSessions("hard"),
		"session-affinity-filter!" + sessionShape},
	{"filter", Refused, sayHard, nil, "endpoint-attribute-filter!: any, topology-affinity-filter!: any"},
	{"filter", Refused, sayHard + "; --active-decode-blocks-threshold and similar flags leave out busy endpoints", nil,
		"utilization-filter!: any"},
	{"filter", Refused, "for conformance tests: give --gateway conformance", nil, "header-based-testing-filter"},
	{"scorer", Approximated, sayCost, nil, `queue-scorer, kv-cache-utilization-scorer, running-requests-size-scorer,
		load-aware-scorer: {threshold: int}, token-load-scorer: {queueThresholdTokens: int, inFlightLoadProducerName},
		active-request-scorer: {requestTimeout, idleThreshold: int, maxBusyScore: float, inFlightLoadProducerName}`},
	{"scorer", Approximated, "cached tokens shorten the prefill in kvepp's one cost", readsPrefix,
		"prefix-cache-scorer: {prefixMatchInfoProducerName, matchLengthWeight: float, matchLengthScaleTokens: int}"},
	{"scorer producer", Approximated, "cached tokens shorten the prefill in kvepp's one cost, by KV events",
		followEvents, "precise-prefix-cache-scorer" + preciseShape},
	{"scorer", Approximated, "only workers whose engine names the adapter are candidates, those with room for it first",
		nil, "lora-affinity-scorer"},
	{"scorer", Approximated, "prompts without a cached prefix go by load", nil,
		"no-hit-lru-scorer: {lruSize: int, prefixPluginType, prefixPluginName, prefixMatchInfoProducerName}"},
	{"scorer", Approximated, "a session keeps its endpoint until that is overloaded", keepSessions("soft"),
		"session-affinity-scorer!" + sessionShape},
	{"scorer filter", Ignored, sayNoPlace, preferLength, "context-length-aware: {label, enableFiltering: bool}"},
	{"scorer", Approximated, "kvepp's cost is the time that a choice takes, by speeds that it learns", nil,
		`latency-scorer: {ttftWeight: float, tpotWeight: float, headroomSelectionStrategy, compositeKVWeight: float,
		compositeQueueWeight: float, compositePrefixWeight: float, latencyPredictionInfoProducerName,
		prefixMatchInfoProducerName, inFlightLoadProducerName}`},
	{"scorer", Ignored, sayNoPlace, nil, `mm-embeddings-cache-scorer: {producerName: producer},
		topology-affinity-scorer!: any, header-label-affinity-scorer!: {headerName, labelKey},
		endpoint-attribute-scorer!: {attributeKey, producer, algorithm: {type, normalization: {fixedRange: {min: float,
		max: float}, adaptiveRange: any}}}, endpoint-attribute-weight-scorer!: {attributeKey, producer, weights: any},
		latency-observation-scorer-hub!: any`},
	{"picker", Maps, "the endpoint with the least cost", pick(), "max-score-picker: {maxNumOfEndpoints: int}"},
	{"picker", Maps, "--router-mode random", pick("--router-mode=random"), "random-picker: {maxNumOfEndpoints: int}"},
	{"picker", Approximated, "a softmax over costs: an endpoint that costs 10 ms more gets a third as many requests",
		pick("--router-policy=time", "--router-temperature=10"), "weighted-random-picker: {maxNumOfEndpoints: int}"},
	{"handler", Maps, "one choice for each request", nil, "single-profile-handler"},
	{"handler", Maps, "--prefiller-header", splitStages, `disagg-profile-handler|pd-profile-handler: {stageOrder,
		profiles: {decode, prefill, encode}, deciders: {prefill: decider, encode: decider}, decodeProfile,
		prefillProfile, encodeProfile, deciderPluginName: decider, prefillDeciderPluginName: decider,
		encodeDeciderPluginName: decider}`},
	{"control", Ignored, "kvepp always writes the header", nil, `disagg-headers-handler: {prefillProfile,
		encodeProfile}, prefill-header-handler: {prefillProfile, encodeProfile}`},
	{"decider", Maps, "each request has a prefill worker", nil, "always-disagg-pd-decider"},
	{"decider", Maps, "a short prompt, or one that the decode worker mostly holds, has no prefill worker", nil,
		"prefix-based-pd-decider: {nonCachedTokens: int, promptTokens: int, prefixMatchInfoProducerName}"},
	{"decider", Refused, sayNoEncode, nil, "always-disagg-multimodal-decider"},
	{"handler", Maps, "the rank's address in x-data-parallel-host-port", sendToPrimary,
		"data-parallel-profile-handler: {primaryPort: int}"},
	{"handler", Refused, "kvepp does not follow the header EPP-Profile", nil, "header-profile-handler!: any"},
	{"producer", Approximated, "--no-router-kv-events: kvepp assumes that a worker holds what it was sent", readsPrefix,
		`approx-prefix-cache-producer: {autoTune: bool, blockSizeTokens: int, blockSize: int, maxPrefixTokensToMatch:
		int, maxPrefixBlocksToMatch: int, lruCapacityPerServer: int}`},
	{"producer", Maps, "KV events", followEvents, "precise-prefix-cache-producer" + preciseShape},
	{"producer", Maps, "token ids", askForTokens, `token-producer|tokenizer: {modelName, vllm: {url, timeout: duration,
		mmTimeout: duration, endpointDiscovery: any, prefillOnly: bool}, estimate: any, udsTokenizerConfig: any}`},
	{"producer", Approximated, "kvepp always books what runs", bookOutput, `inflight-load-producer:
		{addEstimatedOutputTokens: bool, outputRatio: float, maxEstimatedOutputTokens: int, prefixMatchInfoProducerName,
		syncCrossReplicaState: bool}`},
	{"producer", Approximated, "kvepp learns speeds itself: the predictor's containers are not used", nil,
		`predicted-latency-producer: {samplingMean: float, maxDecodeTokenSamplesForPrediction: int, sloBufferFactor:
		float, contextTTL: int, streamingMode: bool, endpointRoleLabel, predictInProduce: bool, useEncoderCacheFeatures:
		bool}`},
	{"producer", Maps, "the header that names a session", nameSessions,
		"session-id-producer: {headerName, cookieName}"},
	{"producer", Approximated,
		"a prompt counts as held from the moment of its choice; requests do not wait to be batched", readsPrefix,
		`burst-prefix-cache-producer!: {windowDurationMs: int, maxPerReplica: int, blockSizeTokens: int,
		maxPrefixTokensToMatch: int, minColocateBlocks: int, maxBatchSize: int, balanceBy}`},
	{"producer", Ignored, "no x-kv-cache-source-host-port: engines compute the prefix again", nil,
		"p2p-source-producer!: {minCachedTokenDelta: int, prefillProfileName}"},
	{"producer", Ignored, sayUnread, nil, `mm-embeddings-cache-producer: {cacheSizeInMBPerServer: int},
		session-state-producer!: any, latency-observer-producer-hub!: any, outlen-bucket!: any, label-producer!:
		{labels: [{label, attributeKey}]}`},
	{"control", Ignored, "kvepp reads the fairness id from its header alone", nil,
		"agent-identity!: {additionalSessionHeaders: [text]}"},
	{"control", Approximated, "kvepp refuses no request for its latency objective", nil,
		"latency-slo-admitter: {latencyPredictionInfoProducerName, producerName: producer}"},
	{"control", Refused, "it refuses requests; kvepp has --active-decode-blocks-threshold and the queue for that", nil,
		"probabilistic-admitter: any"},
	{"control", Refused, "gateways bill and limit by what it writes", nil, "request-attribute-reporter: any"},
	{"control", Refused, "kvepp does not pair revisions of a DisaggregatedSet", nil,
		"disaggregatedset-rollout-screener!: any"},
	{"control", Ignored, "kvepp does it with --gateway conformance", nil, "destination-endpoint-served-verifier"},
	{"fairness", Ignored, sayGateOff, nil, `global-strict-fairness-policy: any, round-robin-fairness-policy: any,
		program-aware-fairness: {strategy, lasWeightService: float, lasWeightHeadWait: float, lasHalfLifeSeconds: float,
		evictionTtlSeconds: float, evictionSweepSeconds: float, turnPriorityTimeWeight: float,
		turnPriorityInactivitySeconds: float}`},
	{"ordering", Ignored, sayGateOff, nil,
		"fcfs-ordering-policy: any, edf-ordering-policy: any, slo-deadline-ordering-policy: any"},
	{"usage", Ignored, sayGateOff, nil, `static-usage-limit-policy: {threshold: float}, priority-holdback-policy!:
		{shape, domain, minCeiling: float, maxCeiling: float}, soft-reflective-ceiling-policy!`},
	{"detector filter", Ignored, sayGateOff, detect, `utilization-detector: {queueDepthThreshold: int,
		kvCacheUtilThreshold: float, metricsStalenessThreshold: duration, headroom: float, stalenessPolicy,
		inFlightLoadProducerName}, concurrency-detector: {maxConcurrency: int, maxTokenConcurrency: int,
		concurrencyMode, headroom: float, inFlightLoadProducerName}`},
	{"detector", Ignored, sayGateOff, detect, "max-saturation-detector: {detectors: [detector], stages: any}"},
	{"band", Ignored, sayGateOff, nil, "strict-band-selection-policy: any"},
	{"eviction", Ignored, sayGateOff, nil, "sheddable-eviction-filter!, priority-then-time-eviction-order-policy!"},
	{"parser", Maps, "kvepp reads this API", nil, "openai-parser, anthropic-parser"},
	{"parser", Maps, sayByLoad, nil, "passthrough-parser"},
	{"parser", Approximated, sayByLoad, nil, "vllmhttp-parser, sglanghttp-parser, vertexai-parser: any"},
	{"parser", Refused, "kvepp reads no gRPC messages", nil, "vllmgrpc-parser"},
	{"source", Maps, "--model-server-metrics-*", scrape, `metrics-data-source: {scheme, path, port: int,
		insecureSkipVerify: bool, caCertPath, clientCertPath, clientKeyPath, interval: duration}`},
	{"extractor", Approximated, "kvepp knows the metrics of vLLM, SGLang, TensorRT-LLM and Triton by their names",
		nameMetrics, `core-metrics-extractor|model-server-protocol-metrics: {engineLabelKey, defaultEngine,
		engineConfigs: [{name, queuedRequestsSpec, runningRequestsSpec, kvUsageSpec, loraSpec, cacheInfoSpec,
		cacheBlockSizeLabelName, cacheNumBlocksLabelName, cacheBlockSizeSpec, cacheNumBlocksSpec, customMetrics:
		[any]}]}`},
	{"source", Ignored, sayUnread, nil, "models-data-source: any, dcgm-data-source!: any"},
	{"extractor", Ignored, sayUnread, nil,
		"models-data-extractor: any, dcgm-extractor!: any, topology-extractor!: any"},
	{"control", Approximated, "GET /v1/models goes to one endpoint, which names its own models", nil,
		"models-responder!: any"},
	{"source", Ignored, "kvepp watches the cluster itself", nil,
		"k8s-notification-source: any, endpoint-notification-source: any"},
	{"endpoints", Maps, "--endpoints", discoverInFile, "file-discovery: {path, watchFile: bool}"},
	{"peers", Ignored, "kvepp's replicas share what runs by --replica-service", nil,
		"k8s-peer-discovery!: {selector, port: int, namespace}"},
	{"source extractor endpoints scorer", Refused, "kvepp serves the endpoints of one cluster", nil,
		multicluster + "!: any"},
}

// Plugins are the types of all rows.
var Plugins = func() (all []Plugin) {
	for _, row := range meanings {
		of := shapeOf("{" + row.types + "}").Content
		for i := 0; i < len(of); i += 2 {
			shape := of[i+1]
			if isNull(shape) {
				shape = shapeOf("{}")
			}
			for name := range strings.SplitSeq(of[i].Value, "|") {
				name, alpha := strings.CutSuffix(name, "!")
				all = append(all, Plugin{row, name, alpha, shape})
			}
		}
	}
	return all
}()

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
