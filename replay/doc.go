// Package replay predicts what a setting of the router does to traffic. It reads or generates a trace and runs kvepp's
// own index, load book, cost function and queue in virtual time against model engines.
//
// It owns trace formats (trace.go), synthetic traces (generate.go), the model engine (engine.go), virtual time
// (simulate.go) and the report (report.go). It opens no socket and starts no goroutine. It does not model ejection,
// taints, or memory tiers below the device.
//
// Concurrency: one goroutine for each Run.
package replay
