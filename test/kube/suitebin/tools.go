//go:build tools

package suitebin

import _ "sigs.k8s.io/gateway-api/conformance/echo-basic"
