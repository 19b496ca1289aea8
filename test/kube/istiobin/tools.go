//go:build tools

// Package istiobin names Istio's control plane, so that the module's requirements are its too. It has no code and is
// never built.
package istiobin

import _ "istio.io/istio/pilot/cmd/pilot-discovery"
