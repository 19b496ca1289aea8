package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"kvepp/prompt"
	"kvepp/router/budget"
	"kvepp/serve/secrets"
)

// proxied are the flags of `kvepp serve` about its exchange with the proxy: how long a decision may take, and how much
// requests may take at once.
type proxied struct {
	fallbacks        int
	pickTimeout      time.Duration
	maxParseBytes    int
	maxBodyBytes     int
	maxStreams       int
	maxBufferedBytes int
	conformance      bool
}

func (p *proxied) add(f *pflag.FlagSet) {
	f.IntVar(&p.fallbacks, "fallback-endpoints", 0,
		"name up to `N` further endpoints, the next cheapest, at which Envoy may retry the request "+
			"(manifests/envoy/stock-engines.yaml). Needs Envoy's override_host policy and a retry_policy: other "+
			"clusters read the whole list as one address. Not with Dynamo's frontends")
	f.DurationVar(&p.pickTimeout, "pick-timeout", 2*time.Second,
		"how long kvepp may take to find a prompt's token ids; after that it routes the request by load. Waiting in "+
			"the queue does not count")
	f.IntVar(&p.maxParseBytes, "max-parse-bytes", 0,
		"kvepp does not read request bodies above this many `BYTES`: it streams them through and routes them by load. "+
			"At most a fourteenth of --max-buffered-bytes. 0: a fourteenth of it, but at most 32 MiB")
	f.IntVar(&p.maxBodyBytes, "max-body-bytes", 0,
		"kvepp answers 413 to request bodies above this many `BYTES`. 0: no limit besides Envoy's own")
	f.IntVar(&p.maxStreams, "max-streams", 20_000,
		"the most requests, `N`, that kvepp follows at once, each until its response has ended; it refuses further "+
			"ones with --overload-status-code. 0: no limit")
	f.IntVar(&p.maxBufferedBytes, "max-buffered-bytes", 0,
		"the most `BYTES` of memory that requests take until they are routed. Three tenths are for bodies: beyond "+
			"that, kvepp answers --overload-status-code. The rest is for reading them: requests wait for it. What "+
			"running requests hold leaves less for bodies, at most half of the three tenths. 0: a "+
			"quarter of GOMEMLIMIT or of 7/8 of the container's memory, at most 512 MiB")
	f.BoolVar(&p.conformance, "conformance", false,
		"let clients restrict the endpoints (header test-epp-endpoint-selection) and show them the endpoint that "+
			"answered (x-conformance-test-served-endpoint), for the conformance tests of the Gateway API Inference "+
			"Extension; never in production")
}

// maxFallbacks keeps the header of a decision short.
const maxFallbacks = 8

// check checks the flags. engine is the one that turns requests into token ids.
func (p *proxied) check(engine prompt.Engine) error {
	switch {
	case p.fallbacks < 0 || p.fallbacks > maxFallbacks:
		return fmt.Errorf("--fallback-endpoints %d: must be from 0 to %d", p.fallbacks, maxFallbacks)
	case p.fallbacks > 0 && engine == prompt.Dynamo:
		return errors.New(
			"--fallback-endpoints: a frontend of Dynamo's serves for the worker that a header names, so a retry at " +
				"another frontend would still name the first worker; leave it out, or give --engine vllm, sglang or " +
				"trtllm if that is what the endpoints run",
		)
	}
	for _, f := range []struct {
		name           string
		value, example int
	}{{"max-body-bytes", p.maxBodyBytes, 64 << 20}, {"max-streams", p.maxStreams, 20_000}} {
		if f.value < 0 {
			return fmt.Errorf(
				"--%s %d: may not be negative; give a number such as %d, or 0 for no limit",
				f.name,
				f.value,
				f.example,
			)
		}
	}
	switch {
	case p.maxParseBytes < 0:
		return fmt.Errorf(
			"--max-parse-bytes %d: may not be negative; give a number such as %d, or 0 for the default",
			p.maxParseBytes,
			defaultMaxParsed,
		)
	case p.maxBufferedBytes < 0 || p.maxBufferedBytes > 0 && p.maxBufferedBytes < minBuffered:
		return fmt.Errorf(
			"--max-buffered-bytes %d: must be at least %d, for example %d (0: a quarter of GOMEMLIMIT or of 7/8 of "+
				"the container's memory, else 512 MiB)",
			p.maxBufferedBytes,
			minBuffered,
			defaultMaxBuffered,
		)
	}
	return nil
}

// What requests may take until they are routed, in bytes. They have a quarter of Go's memory limit and the index half
// of it; a quarter is left for tokenizers, gRPC's buffers and garbage. In a container of 2 GiB requests have 448 MiB,
// which is just enough to read bodies of defaultMaxParsed.
const (
	minBuffered        = 512 << 10
	defaultMaxBuffered = 512 << 20
	defaultMaxParsed   = 32 << 20
)

// bufferedBytes returns what requests may take until they are routed, and the size of the largest body that kvepp
// reads, both in bytes. goLimit is the memory limit of Go's runtime, math.MaxInt64 for none. It returns an error if the
// first is too small for the second.
func (p *proxied) bufferedBytes(goLimit int64) (buffered, parsed int, err error) {
	if buffered = p.maxBufferedBytes; buffered == 0 {
		buffered = int(max(min(goLimit/4, defaultMaxBuffered), minBuffered))
	}
	switch most := budget.MaxBody(buffered); {
	case p.maxParseBytes == 0:
		return buffered, min(most, defaultMaxParsed), nil
	case p.maxParseBytes > most:
		return 0, 0, fmt.Errorf(
			"--max-parse-bytes %d: --max-buffered-bytes is %d, which is enough to read bodies of %d bytes; lower the "+
				"first, or set --max-buffered-bytes %d and give the container at least four times that",
			p.maxParseBytes,
			buffered,
			most,
			budget.ForBody(p.maxParseBytes),
		)
	}
	return buffered, p.maxParseBytes, nil
}

// transport are the flags of TLS between proxies and the external processor.
type transport struct {
	secureServing bool
	secrets.Config
}

func (t *transport) add(f *pflag.FlagSet) {
	f.BoolVar(&t.secureServing, "secure-serving", true,
		"serve TLS at --grpc-port, as Envoy's cluster for kvepp must expect")
	f.StringVar(&t.CertPath, "cert-path", "",
		"folder `DIR` with the certificate, tls.crt, and its key, tls.key, as Kubernetes mounts a TLS secret; kvepp "+
			"reads them again when they change. Empty: kvepp makes a self-signed certificate at start")
	f.StringVar(&t.ClientCA, "tls-client-ca", "",
		"PEM `FILE` with authorities: kvepp accepts only proxies with a certificate of one of them; kvepp reads it "+
			"again when it changes. Empty: kvepp accepts any proxy")
	f.StringVar(&t.MinVersion, "tls-min-version", "1.2", "the oldest `VERSION` of TLS that kvepp accepts, 1.2 or 1.3")
	values(f, "tls-min-version", "1.2", "1.3")
}

func (t *transport) check(given func(flag string) bool) error {
	if err := oneOf("tls-min-version", t.MinVersion, "1.2", "1.3"); err != nil {
		return err
	}
	for _, flag := range []string{"cert-path", "tls-client-ca", "tls-min-version"} {
		if !t.secureServing && given(flag) {
			return fmt.Errorf(
				"--%s belongs to TLS, which --secure-serving=false turns off; leave one of them out",
				flag,
			)
		}
	}
	return nil
}
