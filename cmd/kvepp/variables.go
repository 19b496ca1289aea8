package main

import (
	"time"

	"kvepp/internal/flags"
)

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
	"kv-cache-block-size":        "DYN_KV_CACHE_BLOCK_SIZE",
	"secure-serving":             "DYN_SECURE_SERVING",
	"metrics-port":               "DYN_EPP_METRICS_PORT",
	"dynamo-namespace":           "DYN_NAMESPACE",
	"router-kv-events":           "DYN_ROUTER_USE_KV_EVENTS",
	"router-ttl-secs":            "DYN_ROUTER_TTL_SECS",
	"router-min-initial-workers": "DYN_ROUTER_MIN_INITIAL_WORKERS",
	"active-request-expiry-secs": "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
	"pool-name":                  "DYN_EPP_INFERENCE_POOL_NAME",
	"pool-namespace":             "POD_NAMESPACE",
	"kv-events-port":             "DYN_EPP_KV_EVENT_PORT",
	"kv-replay-port":             "DYN_EPP_KV_EVENT_REPLAY_PORT",
}
