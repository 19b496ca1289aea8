// Package envoy holds Envoy's configurations, and prints one for the endpoints of a file: `kvepp envoy`.
//
// Concurrency: it holds no state. A Config is for one caller at a time.
package envoy

import _ "embed"

// OverrideHost is the configuration for Dynamo's frontends.
//
//go:embed override-host.yaml
var OverrideHost string

// Shadow is the configuration for round robin, with kvepp in shadow.
//
//go:embed shadow.yaml
var Shadow string

// StockEngines is the configuration for vLLM, SGLang and TensorRT-LLM.
//
//go:embed stock-engines.yaml
var StockEngines string
