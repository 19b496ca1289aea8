package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"
)

// tracking is by which hash Dynamo's routers name the blocks of bookings that they tell each other. kvepp tells nobody,
// and has Dynamo's default.
type tracking struct{ hash, keyFile, keyID string }

const publicTracking = "public-xxh3-v1"

func (t *tracking) add(f *pflag.FlagSet) {
	f.StringVar(
		&t.hash,
		"router-tracking-hash",
		publicTracking,
		"`HASH` by which bookings know blocks; no other than the default",
	)
	f.StringVar(&t.keyFile, "router-tracking-key-file", "", "`FILE`; refused: belongs to another hash")
	f.StringVar(&t.keyID, "router-tracking-key-id", "", "`ID`; refused: belongs to another hash")
}

func (t *tracking) check() error {
	switch {
	case t.hash != publicTracking:
		return fmt.Errorf(
			"--router-tracking-hash %q: must be %s; kvepp tells no other process what it booked, so that nothing is "+
				"to be hidden by a key",
			t.hash,
			publicTracking,
		)
	case t.keyFile != "" || t.keyID != "":
		return errors.New(
			"--router-tracking-key-file and --router-tracking-key-id: kvepp knows no tracking hash with a key; leave " +
				"them out",
		)
	}
	return nil
}

// pickers is what GAIE's and llm-d's endpoint pickers are told by flags of their own, and kvepp otherwise.
type pickers struct {
	conformance   bool
	withoutSubset bool
	zapEncoder    string
	verbosity     int
	certReload    bool
	healthCheck   bool
	maxReceive    int

	configFile, configText   string // refused when set
	endpointScores           bool
	metricsCerts, metricsCAs string
}

func (p *pickers) add(f *pflag.FlagSet) {
	f.BoolVar(
		&p.conformance,
		"conformance",
		false,
		"let clients choose among the endpoints (header test-epp-endpoint-selection) and tell them which has served "+
			"(x-conformance-test-served-endpoint), as the conformance tests of the Gateway API Inference Extension "+
			"have it; never in production",
	)
	f.BoolVar(
		&p.withoutSubset,
		"disable-endpoint-subset-filter",
		false,
		"heed no subset of the endpoints that the proxy names",
	)
	f.StringVar(&p.zapEncoder, "zap-encoder", "", "as --log-format: `json or console`, which is text")
	f.IntVar(&p.verbosity, "v", 0, "as --log-level: debug from `LEVEL` 4 on")
	f.BoolVar(
		&p.certReload,
		"enable-cert-reload",
		true,
		"accepted: certificates are always read again when they change",
	)
	f.BoolVar(&p.healthCheck, "health-checking", true, "accepted: both ports always answer gRPC health checks")
	f.IntVar(
		&p.maxReceive,
		"grpc-max-recv-msg-size",
		0,
		"accepted: messages may have as many `BYTES` as --max-parse-bytes needs",
	)
	f.StringVar(
		&p.configFile,
		"config-file",
		"",
		"refused: kvepp has no plugins to configure with a `FILE`; its flags say all",
	)
	f.StringVar(&p.configText, "config-text", "", "refused, as --config-file")
	f.BoolVar(
		&p.endpointScores,
		"emit-endpoint-scores",
		false,
		"refused: --decision-headers shows every candidate's cost",
	)
	f.StringVar(
		&p.metricsCerts,
		"metrics-cert-dir",
		"",
		"refused: metrics are served without TLS; --metrics-token-file guards them",
	)
	f.StringVar(&p.metricsCAs, "metrics-client-ca-file", "", "refused, as --metrics-cert-dir")
}

// check says what is refused, and makes of the rest what kvepp's own flags have.
func (p *pickers) check(o *options) error {
	switch {
	case p.configFile != "" || p.configText != "":
		return errors.New(
			"--config-file, --config-text: kvepp reads no EndpointPickerConfig. What its scorers do is Dynamo's cost " +
				"function here " +
				"(--router-kv-overlap-score-credit and its like), what its flow control does is " +
				"--router-queue-threshold and --router-policy-config; leave it out",
		)
	case p.endpointScores:
		return errors.New(
			"--emit-endpoint-scores: kvepp tells costs in response headers (--decision-headers), at /debug/decisions " +
				"and in spans, not in metadata; leave it out",
		)
	case p.metricsCerts != "" || p.metricsCAs != "":
		return errors.New(
			"--metrics-cert-dir, --metrics-client-ca-file: kvepp serves metrics without TLS; guard them with " +
				"--metrics-token-file, and leave it out",
		)
	case p.verbosity < 0:
		return fmt.Errorf("--v %d: must not be below 0", p.verbosity)
	}
	switch p.zapEncoder {
	case "":
	case "json":
		o.logFormat = "json"
	case "console":
		o.logFormat = "text"
	default:
		return oneOf("zap-encoder", p.zapEncoder, "json", "console")
	}
	if p.verbosity >= 4 {
		o.logLevel = "debug"
	}
	return nil
}
