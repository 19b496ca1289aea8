//go:build tools

// Package kindbin names kind, so that the module's requirements are its too. It has no code and is never built. Beside
// it is the source of two programs that a cluster runs: coredns and pause.
package kindbin

import _ "sigs.k8s.io/kind"
