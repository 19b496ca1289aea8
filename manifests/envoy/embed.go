// Package envoy holds Envoy's configurations, for `kvepp envoy`. It has no code.
package envoy

import _ "embed"

// OverrideHost is the configuration for Dynamo's frontends.
//
//go:embed override-host.yaml
var OverrideHost string

// StockEngines is the configuration for vLLM, SGLang and TensorRT-LLM.
//
//go:embed stock-engines.yaml
var StockEngines string
