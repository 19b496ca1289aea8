package extproc

import (
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/router/budget"
)

// Values of --gateway that change what kvepp does, beside what it refuses.
const (
	GatewayOwn         = "own"
	GatewayNGINX       = "nginx"
	gatewayConformance = "conformance"
)

// Gateways are all values of --gateway.
var Gateways = []string{GatewayOwn, "istio", "envoy-ai-gateway", "agentgateway", GatewayNGINX, gatewayConformance}

// OneEndpoint reports whether the operator names a gateway that takes one endpoint only.
func (c *Config) OneEndpoint() bool {
	return c.Gateway != "" && c.Gateway != GatewayOwn && !c.Conformance
}

// AddFlags declares the flags, each in its section of help.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.PrefillerHeader, "prefiller-header", false,
		"for stock engines with llm-d's routing sidecar before each decode worker: also set x-prefiller-host-port, "+
			"the prefill worker's address. While there is no prefill worker, decode workers serve alone")
	fs.BoolVar(&c.DecisionHeaders, "decision-headers", false,
		"show each decision in the response as x-kvepp-* headers. They reveal the workers' names and loads to clients")
	flags.Choice(fs, &c.Gateway, "gateway", "",
		"`GATEWAY` before kvepp: own (an Envoy that takes several endpoints, from its first request on), istio, "+
			"envoy-ai-gateway, agentgateway or nginx; kvepp refuses flags that it cannot serve (docs/gateways.md). "+
			"Default: kvepp finds out whether it takes several. conformance: one in the conformance tests of the "+
			"Gateway API Inference Extension; clients may restrict the endpoints (header "+
			"test-epp-endpoint-selection) and see the one that answered (x-conformance-test-served-endpoint), so "+
			"never in production",
		Gateways...)
	flags.Section(fs, "Headers")
	fs.BoolVar(&c.Shadow, "shadow", false,
		"choose nothing: compare the choices of the picker in service with kvepp's own, for an ext_proc filter with "+
			"observability_mode: true (docs/shadow.md). With --record, \"kvepp replay\" can compare the two in full")
	fs.Float64Var(&c.ShadowShare, "shadow-share", 1,
		"with --shadow: the `FRACTION` of requests (0 to 1) that kvepp reads and judges, by a hash of the request id, "+
			"if its CPU is short. It counts the load of the others by their sizes")
	flags.Section(fs, "Shadow")
	c.addLimits(fs)
	flags.Section(fs, "Limits of requests")
	fs.IntVar(&c.OverloadStatus, "overload-status-code", 429,
		"HTTP `STATUS` of requests that are refused because of load: 429, 503, or 529 (the default of Dynamo's "+
			"frontend)")
	flags.Values(fs, "overload-status-code", "429", "503", "529")
	flags.Inherit(fs, "overload-status-code", "DYN_HTTP_OVERLOAD_STATUS_CODE")
	flags.Section(fs, "Overload and the queue")
}

func (c *Config) addLimits(fs *pflag.FlagSet) {
	fs.IntVar(&c.MaxParseBytes, "max-parse-bytes", 0,
		"kvepp does not read request bodies above this many `BYTES`: it streams them through and routes them by load. "+
			"At most a fourteenth of --max-buffered-bytes. 0: a fourteenth of it, but at most 32 MiB")
	fs.IntVar(&c.MaxBodyBytes, "max-body-bytes", 0,
		"kvepp answers 413 to request bodies above this many `BYTES`. 0: no limit besides Envoy's own")
	fs.IntVar(&c.MaxStreams, "max-streams", 20_000,
		"the most requests, `N`, that kvepp follows at once, each until its response has ended; it refuses further "+
			"ones with --overload-status-code. 0: no limit")
	fs.IntVar(&c.MaxBufferedBytes, "max-buffered-bytes", 0,
		"the most `BYTES` of memory that requests take until they are routed. Three tenths are for bodies: beyond "+
			"that, kvepp answers --overload-status-code. The rest is for reading them: requests wait for it. What "+
			"running requests hold leaves less for bodies, at most half of the three tenths. 0: a "+
			"quarter of GOMEMLIMIT or of 7/8 of the container's memory, at most 512 MiB")
}

// What requests may take until they are routed, in bytes. They have a quarter of Go's memory limit and the index half
// of it; a quarter is left for tokenizers, gRPC's buffers and garbage. In a container of 2 GiB requests have 448 MiB,
// which is just enough to read bodies of defaultMaxParsed.
const (
	minBuffered        = 512 << 10
	defaultMaxBuffered = 512 << 20
	defaultMaxParsed   = 32 << 20
)

// Validate returns an error for the first setting that is out of range, and fills Conformance.
func (c *Config) Validate() error {
	c.Conformance = c.Gateway == gatewayConformance
	for _, f := range []struct {
		name           string
		value, example int
		zero           string
	}{
		{"max-body-bytes", c.MaxBodyBytes, 64 << 20, "no limit"},
		{"max-streams", c.MaxStreams, 20_000, "no limit"},
		{"max-parse-bytes", c.MaxParseBytes, defaultMaxParsed, "the default"},
	} {
		if f.value < 0 {
			return fmt.Errorf("--%s %d: may not be negative; give a number such as %d, or 0 for %s", f.name, f.value,
				f.example, f.zero)
		}
	}
	switch {
	case !(c.ShadowShare >= 0 && c.ShadowShare <= 1): // also for NaN
		return fmt.Errorf("--shadow-share %v: must be between 0 and 1, for example 0.1", c.ShadowShare)
	case c.MaxBufferedBytes < 0 || c.MaxBufferedBytes > 0 && c.MaxBufferedBytes < minBuffered:
		return fmt.Errorf("--max-buffered-bytes %d: must be at least %d, for example %d (0: a quarter of GOMEMLIMIT "+
			"or of 7/8 of the container's memory, else 512 MiB)", c.MaxBufferedBytes, minBuffered, defaultMaxBuffered)
	case c.OverloadStatus != 429 && c.OverloadStatus != 503 && c.OverloadStatus != 529:
		return fmt.Errorf("--overload-status-code %d: must be 429, 503 or 529", c.OverloadStatus)
	}
	return nil
}

// Buffers returns what requests may take until they are routed, and the size of the largest body that kvepp reads, both
// in bytes. goLimit is the memory limit of Go's runtime, math.MaxInt64 for none. It returns an error if the first is
// too small for the second.
func (c *Config) Buffers(goLimit int64) (buffered, parsed int, err error) {
	if buffered = c.MaxBufferedBytes; buffered == 0 {
		buffered = int(max(min(goLimit/4, defaultMaxBuffered), minBuffered))
	}
	switch most := budget.MaxBody(buffered); {
	case c.MaxParseBytes == 0:
		return buffered, min(most, defaultMaxParsed), nil
	case c.MaxParseBytes > most:
		return 0, 0, fmt.Errorf("--max-parse-bytes %d: --max-buffered-bytes is %d, which is enough to read bodies of "+
			"%d bytes; lower the first, or set --max-buffered-bytes %d and give the container at least four times that",
			c.MaxParseBytes, buffered, most, budget.ForBody(c.MaxParseBytes))
	}
	return buffered, c.MaxParseBytes, nil
}
