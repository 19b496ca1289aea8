//go:build tools

// Package kindbin imports kind, so that the module's requirements include it. It has no code and is never built. Its
// folder also has the source of two programs that a cluster runs: coredns and pause.
package kindbin

import _ "sigs.k8s.io/kind"
