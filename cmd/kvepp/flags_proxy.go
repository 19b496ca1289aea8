package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/budget"
	"kvepp/tokenizer"
)

// proxied is what `kvepp serve` can be told of its dealings with the proxy: how long a decision may take, and how much
// may be sent at once.
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
	f.IntVar(
		&p.fallbacks,
		"fallback-endpoints",
		0,
		"name up to `N` further endpoints after the chosen one, the next cheapest, at which Envoy may retry the "+
			"request (manifests/envoy/stock-engines.yaml). Needs Envoy's override_host policy and a retry_policy: "+
			"other clusters take the whole list for one address. A request that may have trailers gets none. Not "+
			"with Dynamo's frontends, which serve for the worker that a header names",
	)
	f.DurationVar(
		&p.pickTimeout,
		"pick-timeout",
		2*time.Second,
		"how long the search for a prompt's token ids may take before the request is routed by load; waiting in the "+
			"queue does not count",
	)
	f.IntVar(
		&p.maxParseBytes,
		"max-parse-bytes",
		0,
		"request bodies above this many `BYTES` are streamed through and routed by load only; at most a fourteenth "+
			"of --max-buffered-bytes, so that one can always be read. 0: that, and 32 MiB at most",
	)
	f.IntVar(
		&p.maxBodyBytes,
		"max-body-bytes",
		0,
		"request bodies above this many `BYTES` are refused with 413. 0: none are, and Envoy's own limits hold",
	)
	f.IntVar(
		&p.maxStreams,
		"max-streams",
		20_000,
		"most requests, `N`, that are followed at once, each until its answer has ended; more are refused as are "+
			"those turned away because of load. 0: no limit",
	)
	f.IntVar(
		&p.maxBufferedBytes,
		"max-buffered-bytes",
		0,
		"most `BYTES` of memory that requests take at once until they are routed: three tenths for their bodies, of "+
			"which more are refused likewise, and the rest for reading them, for which they wait. 0: a quarter of "+
			"GOMEMLIMIT, which is 7/8 of the container's memory unless the environment sets it; 512 MiB without "+
			"either, and at most",
	)
}

// check says what is wrong with them. engine is who turns requests into token ids.
func (p *proxied) check(engine tokenizer.Engine) error {
	switch {
	case p.fallbacks < 0 || p.fallbacks > maxFallbacks:
		return fmt.Errorf("--fallback-endpoints %d: must be from 0 to %d", p.fallbacks, maxFallbacks)
	case p.fallbacks > 0 && engine == tokenizer.Dynamo:
		return errors.New(
			"--fallback-endpoints: a frontend of Dynamo's serves for the worker that a header names, and would be " +
				"asked for another's; " +
				"leave it out, or give --engine vllm, sglang or trtllm if the endpoints are these",
		)
	}
	for _, f := range []struct {
		name        string
		value, good int
	}{{"max-body-bytes", p.maxBodyBytes, 64 << 20}, {"max-streams", p.maxStreams, 20_000}} {
		if f.value < 0 {
			return fmt.Errorf(
				"--%s %d: may not be negative; give a number such as %d, or 0 for no limit",
				f.name,
				f.value,
				f.good,
			)
		}
	}
	switch {
	case p.maxParseBytes < 0:
		return fmt.Errorf(
			"--max-parse-bytes %d: may not be negative; give a number such as %d, or 0 for the default",
			p.maxParseBytes,
			mostParsed,
		)
	case p.maxBufferedBytes < 0 || p.maxBufferedBytes > 0 && p.maxBufferedBytes < leastBuffered:
		return fmt.Errorf(
			"--max-buffered-bytes %d: must be at least %d, for example %d (0: a quarter of GOMEMLIMIT or of 7/8 of "+
				"the container's memory, else 512 MiB)",
			p.maxBufferedBytes,
			leastBuffered,
			mostBuffered,
		)
	}
	return nil
}

// What requests may take until they are routed, in bytes. With a quarter of Go's limit for them and half of it for the
// index, a quarter is left for tokenizers, gRPC's buffers and garbage. A container of 2 GiB then has 448 MiB for
// requests, which is just enough to read bodies of mostParsed.
const (
	leastBuffered = 512 << 10
	mostBuffered  = 512 << 20 // unless a flag says more
	mostParsed    = 32 << 20  // the same
)

// bufferedBytes returns what requests may take until they are routed, and the size of the largest body that is read,
// both in bytes, given the limit that Go was set, math.MaxInt64 for none. It returns an error if what the flags say
// cannot both be.
func (p *proxied) bufferedBytes(goLimit int64) (buffered, parsed int, err error) {
	if buffered = p.maxBufferedBytes; buffered == 0 {
		buffered = int(max(min(goLimit/4, mostBuffered), leastBuffered))
	}
	switch most := budget.MaxBody(buffered); {
	case p.maxParseBytes == 0:
		return buffered, min(most, mostParsed), nil
	case p.maxParseBytes > most:
		return 0, 0, fmt.Errorf(
			"--max-parse-bytes %d: --max-buffered-bytes is %d, which is enough to read bodies of %d bytes; lower the "+
				"one, or give the other %d and the container four times that and more",
			p.maxParseBytes,
			buffered,
			most,
			budget.ForBody(p.maxParseBytes),
		)
	}
	return buffered, p.maxParseBytes, nil
}

// maxFallbacks keeps the header of a decision short.
const maxFallbacks = 8

// transport is how proxies reach the external processor.
type transport struct {
	secureServing bool
	certPath      string
	clientCA      string
	minVersion    string
}

func (t *transport) add(f *pflag.FlagSet) {
	f.BoolVar(&t.secureServing, "secure-serving", true, "serve the external processor over TLS")
	f.StringVar(
		&t.certPath,
		"cert-path",
		"",
		"folder `DIR` with the certificate, tls.crt, and its key, tls.key, as Kubernetes mounts a TLS secret; read "+
			"again when they change. Empty: a certificate that kvepp makes and signs itself at start",
	)
	f.StringVar(
		&t.clientCA,
		"tls-client-ca",
		"",
		"PEM `FILE` with authorities: only proxies with a certificate of one of them are served; read again when it "+
			"changes. Empty: any proxy is",
	)
	f.StringVar(&t.minVersion, "tls-min-version", "1.2", "the oldest `VERSION` of TLS that is spoken, 1.2 or 1.3")
}

var tlsVersions = map[string]uint16{"1.2": tls.VersionTLS12, "1.3": tls.VersionTLS13}

func (t *transport) check(given map[string]bool) error {
	if err := oneOf("tls-min-version", t.minVersion, "1.2", "1.3"); err != nil {
		return err
	}
	for _, flag := range []string{"cert-path", "tls-client-ca", "tls-min-version"} {
		if !t.secureServing && given[flag] {
			return fmt.Errorf(
				"--%s belongs to TLS, which --secure-serving=false turns off; leave one of them out",
				flag,
			)
		}
	}
	return nil
}
