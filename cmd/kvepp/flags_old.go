package main

import (
	"time"

	"kvepp/internal/flags"
)

// Names for which package flags has better ones.
var (
	newFlags        = flags.New
	section         = flags.Section
	values          = flags.Values
	oneOf           = flags.OneOf
	negatable       = flags.Negatable
	fromEnvironment = flags.FromEnvironment
	maskPasswords   = flags.MaskPasswords
)

const maxSettingsBytes = flags.MaxFileBytes

// durations returns an error for the first flag whose duration is negative, or 0 where 0 is not allowed.
func durations(of ...durationFlag) error {
	for _, f := range of {
		check := flags.Positive
		if f.zero {
			check = flags.NotNegative
		}
		if err := check(f.name, f.value); err != nil {
			return err
		}
	}
	return nil
}

// durationFlag is a duration flag and its value. zero says whether 0 is allowed.
type durationFlag struct {
	name  string
	value time.Duration
	zero  bool
}

// dynamoEnv maps flags to the environment variables of the same settings of Dynamo's router. Some differ from the flag
// in capitals. Source: dynamo-kv-router 1.6.1, scheduling configuration; kv_router_args.
var dynamoEnv = map[string]string{
	"kv-cache-block-size":                  "DYN_KV_CACHE_BLOCK_SIZE",
	"secure-serving":                       "DYN_SECURE_SERVING",
	"metrics-port":                         "DYN_EPP_METRICS_PORT",
	"dynamo-namespace":                     "DYN_NAMESPACE",
	"event-plane":                          "DYN_EVENT_PLANE",
	"nats-server":                          "NATS_SERVER",
	"router-kv-events":                     "DYN_ROUTER_USE_KV_EVENTS",
	"router-ttl-secs":                      "DYN_ROUTER_TTL_SECS",
	"router-approximate-cache-policy":      "DYN_ROUTER_APPROXIMATE_CACHE_POLICY",
	"router-predicted-ttl-secs":            "DYN_ROUTER_PREDICTED_TTL_SECS",
	"router-mode":                          "DYN_ROUTER_MODE",
	"router-min-initial-workers":           "DYN_ROUTER_MIN_INITIAL_WORKERS",
	"load-aware":                           "DYN_ROUTER_LOAD_AWARE",
	"router-host-cache-hit-weight":         "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT",
	"router-disk-cache-hit-weight":         "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT",
	"router-track-output-blocks":           "DYN_ROUTER_TRACK_OUTPUT_BLOCKS",
	"router-prefill-load-model":            "DYN_ROUTER_PREFILL_LOAD_MODEL",
	"router-worker-selection-policy":       "DYN_ROUTER_WORKER_SELECTION_POLICY",
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
