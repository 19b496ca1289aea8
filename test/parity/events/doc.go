// Package parity tests the feed with other projects' publishers of KV events: those of vLLM and SGLang, run alone, that
// of Dynamo's TensorRT-LLM worker, and a whole vLLM.
//
// It consists of tests. publisher.py runs an engine's publisher in a process; a test sends it the events to publish and
// may kill it.
package parity
