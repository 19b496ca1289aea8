package extproc

import (
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// What the conformance tests of the Gateway API Inference Extension want of a picker: a client may restrict the
// endpoints, and a response header shows the endpoint that answered according to the gateway. Source: GAIE v1.6.0,
// pkg/lwepp.
const (
	selectionHeader = "test-epp-endpoint-selection"
	servedByHeader  = "x-conformance-test-served-endpoint"
	servedByUnknown = "the gateway did not say: no envoy.lb/x-gateway-destination-endpoint-served in the " +
		"response's metadata"
)

// readSelection reads the endpoints that a conformance test wants; nil: none. They take precedence over the proxy's
// subset.
func readSelection(m *corev3.HeaderMap) *subset {
	for _, v := range m.GetHeaders() {
		if strings.EqualFold(v.GetKey(), selectionHeader) {
			s := newSubset()
			s.add(structpb.NewStringValue(headerValue(v)))
			return s
		}
	}
	return nil
}
