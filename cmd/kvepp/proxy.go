package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/tokenizer"
)

// proxied is what `kvepp serve` can be told of its dealings with the proxy: how long a decision may take, and how much may be
// sent at once.
type proxied struct {
	fallbacks        int
	pickTimeout      time.Duration
	maxParseBytes    int
	maxBodyBytes     int
	maxStreams       int
	maxBufferedBytes int
}

// add declares the flags.
func (p *proxied) add(f *pflag.FlagSet) {
	f.IntVar(&p.fallbacks, "fallback-endpoints", 0, "name up to `N` further endpoints after the chosen one, the next cheapest, at which Envoy may retry the request (manifests/envoy/stock-engines.yaml). Needs Envoy's override_host policy and a retry_policy: other clusters take the whole list for one address. A request that may have trailers gets none. Not with Dynamo's frontends, which serve for the worker that a header names")
	f.DurationVar(&p.pickTimeout, "pick-timeout", 2*time.Second, "how long the search for a prompt's token ids may take before the request is routed by load; waiting in the queue does not count")
	f.IntVar(&p.maxParseBytes, "max-parse-bytes", 32<<20, "request bodies above this many `BYTES` are streamed through and routed by load only")
	f.IntVar(&p.maxBodyBytes, "max-body-bytes", 0, "request bodies above this many `BYTES` are refused with 413. 0: none are, and Envoy's own limits hold")
	f.IntVar(&p.maxStreams, "max-streams", 20_000, "most requests, `N`, that are followed at once, each until its answer has ended; more are refused as are those turned away because of load. 0: no limit")
	f.IntVar(&p.maxBufferedBytes, "max-buffered-bytes", 128<<20, "most `BYTES` of request bodies that are held at once, until their requests are routed; more are refused likewise. Reading a body takes a few times its size beside. 0: no limit")
}

// check says what is wrong with them. engine is who turns requests into token ids.
func (p *proxied) check(engine tokenizer.Engine) error {
	switch {
	case p.fallbacks < 0 || p.fallbacks > maxFallbacks:
		return fmt.Errorf("--fallback-endpoints %d: must be from 0 to %d", p.fallbacks, maxFallbacks)
	case p.fallbacks > 0 && engine == tokenizer.Dynamo:
		return errors.New("--fallback-endpoints: a frontend of Dynamo's serves for the worker that a header names, and would be asked for another's; " +
			"leave it out, or give --engine vllm, sglang or trtllm if the endpoints are these")
	case p.maxParseBytes < 1:
		return fmt.Errorf("--max-parse-bytes %d: must be at least 1, for example %d", p.maxParseBytes, 32<<20)
	}
	for _, f := range []struct {
		name        string
		value, good int
	}{{"max-body-bytes", p.maxBodyBytes, 64 << 20}, {"max-streams", p.maxStreams, 20_000}, {"max-buffered-bytes", p.maxBufferedBytes, 128 << 20}} {
		if f.value < 0 {
			return fmt.Errorf("--%s %d: may not be negative; give a number such as %d, or 0 for no limit", f.name, f.value, f.good)
		}
	}
	return nil
}

// maxFallbacks keeps the header of a decision short.
const maxFallbacks = 8
