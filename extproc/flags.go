package extproc

import (
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/router/budget"
)

// AddFlags declares the flags, each in its section of help.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.PrefillerHeader, "prefiller-header", false,
		"for stock engines with llm-d's routing sidecar before each decode worker: also set x-prefiller-host-port, "+
			"the prefill worker's address. While there is no prefill worker, decode workers serve alone")
	fs.BoolVar(&c.DecisionHeaders, "decision-headers", false,
		"show each decision in the response as x-kvepp-* headers. They reveal the workers' names and loads to clients")
	flags.Section(fs, "Headers")
	c.addLimits(fs)
	flags.Section(fs, "Limits of requests")
	fs.IntVar(&c.RetryAfter, "shed-retry-after", 1,
		"`SECONDS` in the Retry-After header of requests that are refused because of load; 0: no header")
	fs.IntVar(&c.OverloadStatus, "overload-status-code", 429,
		"HTTP `STATUS` of requests that are refused because of load: 429, 503, or 529 (the default of Dynamo's "+
			"frontend)")
	flags.Values(fs, "overload-status-code", "429", "503", "529")
	flags.Inherit(fs, "shed-retry-after", "DYN_EPP_SHED_RETRY_AFTER_SECS",
		"overload-status-code", "DYN_HTTP_OVERLOAD_STATUS_CODE")
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
	fs.BoolVar(&c.Conformance, "conformance", false,
		"let clients restrict the endpoints (header test-epp-endpoint-selection) and show them the endpoint that "+
			"answered (x-conformance-test-served-endpoint), for the conformance tests of the Gateway API Inference "+
			"Extension; never in production")
}

// What requests may take until they are routed, in bytes. They have a quarter of Go's memory limit and the index half
// of it; a quarter is left for tokenizers, gRPC's buffers and garbage. In a container of 2 GiB requests have 448 MiB,
// which is just enough to read bodies of defaultMaxParsed.
const (
	minBuffered        = 512 << 10
	defaultMaxBuffered = 512 << 20
	defaultMaxParsed   = 32 << 20
)

// Validate returns an error for the first setting that is out of range.
func (c *Config) Validate() error {
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
	case c.MaxBufferedBytes < 0 || c.MaxBufferedBytes > 0 && c.MaxBufferedBytes < minBuffered:
		return fmt.Errorf("--max-buffered-bytes %d: must be at least %d, for example %d (0: a quarter of GOMEMLIMIT "+
			"or of 7/8 of the container's memory, else 512 MiB)", c.MaxBufferedBytes, minBuffered, defaultMaxBuffered)
	case c.OverloadStatus != 429 && c.OverloadStatus != 503 && c.OverloadStatus != 529:
		return fmt.Errorf("--overload-status-code %d: must be 429, 503 or 529", c.OverloadStatus)
	}
	return flags.Between("shed-retry-after", c.RetryAfter, 0, 65535)
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
