// Package parity holds the feed against publishers of KV events that are not ours: those of vLLM and SGLang, run alone,
// and a whole vLLM.
//
// It consists of tests. publisher.py runs an engine's publisher in a process of its own, which a test tells what to
// publish and kills as it likes.
package parity
