package extproc

import (
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"strings"

	"kvepp/router/eject"
)

// The attributes that a proxy sends with response headers if its configuration lists them (response_attributes).
const (
	detailsAttribute = "response.code_details"
	flagsAttribute   = "response.flags"
	triesAttribute   = "upstream.request_attempt_count"
)

// Response flags, as bits of response.flags. Source: Envoy 1.40, envoy/stream_info/stream_info.h, CoreResponseFlag.
const (
	flagUpstreamTimeout         = 1 << 2
	flagUpstreamRemoteReset     = 1 << 4
	flagUpstreamRefused         = 1 << 5
	flagUpstreamTermination     = 1 << 6
	flagUpstreamProtocolError   = 1 << 23
	flagsOfInterruptedResponses = flagUpstreamRemoteReset | flagUpstreamTermination | flagUpstreamProtocolError
	detailsOfEndpointsResponse  = "via_upstream"
)

// verdict is what the proxy says about a response in attributes.
type verdict struct {
	told    bool // there are attributes; otherwise only the status is known
	details string
	flags   uint64
	tries   int // endpoints that the proxy tried; 0: unknown
}

func readVerdict(in *extprocv3.ProcessingRequest) (v verdict) {
	fields := in.GetAttributes()[attributesNamespace].GetFields()
	if details := fields[detailsAttribute].GetStringValue(); details != "" {
		v.told, v.details = true, details
	}
	v.flags = uint64(fields[flagsAttribute].GetNumberValue())
	v.tries = max(int(fields[triesAttribute].GetNumberValue()), 0)
	return v
}

// failure returns why the endpoint of a response failed; empty: it did not. ofEndpoint is false for a response that
// says nothing about an endpoint: of a full circuit breaker, a cluster without a healthy endpoint, or a filter.
func (v *verdict) failure(status string) (cause eject.Cause, ofEndpoint bool) {
	if v.told && v.details != detailsOfEndpointsResponse {
		cause = causeOf(v.flags)
		return cause, cause != ""
	}
	switch status {
	case "500", "502", "503", "504":
		return eject.ServerError, true
	}
	return "", true // 429 and other 4xx, 501, 505 and 529 show that the endpoint works
}

// causeOf returns the failure of an endpoint that the proxy's response flags name; empty: none. An idle stream is no
// failure: a client that does not read causes it as well.
func causeOf(flags uint64) eject.Cause {
	switch {
	case flags&flagUpstreamRefused != 0:
		return eject.Refused
	case flags&flagsOfInterruptedResponses != 0:
		return eject.Reset
	case flags&flagUpstreamTimeout != 0:
		return eject.Timeout
	}
	return ""
}

// showsWorker reports whether a response with this status shows that its worker works. A Dynamo frontend itself refuses
// bad requests, and with 400 also requests for a worker that it has lost.
func (s *Server) showsWorker(status string) bool {
	return !s.cfg.Frontends || !strings.HasPrefix(status, "4")
}
