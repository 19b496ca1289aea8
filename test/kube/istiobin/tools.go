//go:build tools

// Package istiobin imports Istio's control plane, so that the module's requirements include it. It has no code and is
// never built.
package istiobin

import _ "istio.io/istio/pilot/cmd/pilot-discovery"
