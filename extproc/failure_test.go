package extproc

import (
	"testing"

	accesslogdata "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"kvepp/router/eject"
)

// Attributes that Envoy 1.40 sent with response headers, and what they say about the endpoint.
func TestFailureOfResponse(t *testing.T) {
	f := func(status, details string, flags float64, want eject.Cause, ofEndpoint bool) {
		t.Helper()
		in := &extprocv3.ProcessingRequest{}
		if details != "" {
			in.Attributes = map[string]*structpb.Struct{attributesNamespace: {Fields: map[string]*structpb.Value{
				detailsAttribute: structpb.NewStringValue(
					details,
				), flagsAttribute: structpb.NewNumberValue(flags), triesAttribute: structpb.NewNumberValue(2)}}}
		}
		v := readVerdict(in)
		if cause, of := v.failure(status); cause != want || of != ofEndpoint {
			t.Errorf("cause %q, from the endpoint: %v", cause, of)
		}
		if details != "" && v.tries != 2 {
			t.Errorf("%d attempts", v.tries)
		}
	}
	f("200", "via_upstream", 0, "", true)
	f("429", "via_upstream", 0, "", true)
	f("404", "via_upstream", 0, "", true)
	f("529", "via_upstream", 0, "", true)
	f("500", "via_upstream", 0, eject.ServerError, true)
	f("503", "via_upstream", 0, eject.ServerError, true)
	f(
		"503",
		"upstream_reset_before_response_started{remote_connection_failure|delayed_connect_error:_Connection_refused}",
		32,
		eject.Refused,
		true,
	)
	f("503", "upstream_reset_before_response_started{connection_termination}", 64, eject.Reset, true)
	f("502", "upstream_reset_before_response_started{protocol_error}", 1<<23, eject.Reset, true)
	f("504", "upstream_response_timeout", 4, eject.Timeout, true)
	f("504", "upstream_per_try_timeout", 4, eject.Timeout, true)
	f("503", "upstream_reset_before_response_started{overflow}", 128, "", false) // the circuit breaker
	f("504", "stream_idle_timeout", 1<<16, "", false)
	f("503", "no_healthy_upstream", 2, "", false)
	f("500", "ext_proc_error_gRPC_error_14", 0, "", false)
	f("503", "kvepp_no_endpoints", 0, "", false)
	// A proxy that sends no attributes.
	f("200", "", 0, "", true)
	f("503", "", 0, eject.ServerError, true)
	f("429", "", 0, "", true)
	f("nonsense", "", 0, "", true)
}

func TestBrokenBy(t *testing.T) {
	f := func(flags *accesslogdata.ResponseFlags, want eject.Cause) {
		t.Helper()
		if got := brokenBy(flags); got != want {
			t.Errorf("%q", got)
		}
	}
	f(nil, "")
	f(&accesslogdata.ResponseFlags{DownstreamConnectionTermination: true}, "")
	f(&accesslogdata.ResponseFlags{UpstreamConnectionTermination: true}, eject.Reset)
	f(&accesslogdata.ResponseFlags{UpstreamRemoteReset: true}, eject.Reset)
	f(&accesslogdata.ResponseFlags{UpstreamProtocolError: true}, eject.Reset)
	f(&accesslogdata.ResponseFlags{UpstreamConnectionFailure: true}, eject.Refused)
	f(&accesslogdata.ResponseFlags{UpstreamRequestTimeout: true}, eject.Timeout)
	f(&accesslogdata.ResponseFlags{StreamIdleTimeout: true}, "") // of a client that does not read, perhaps
}

// TestStatusOfFrontend: a client error of a Dynamo frontend does not readmit a worker; an engine's does.
func TestStatusOfFrontend(t *testing.T) {
	for status, byFrontend := range map[string]bool{
		"200": true, "400": false, "404": false, "429": false, "invalid": true,
	} {
		for frontends, want := range map[bool]bool{true: byFrontend, false: true} {
			s := &Server{cfg: Config{Frontends: frontends}}
			if got := s.showsWorker(status); got != want {
				t.Errorf("%s with frontends %v: %v", status, frontends, got)
			}
		}
	}
}
