// Package lint holds the rules of ARCHITECTURE.md as tests: who may import whom, where dependencies and comments are
// explained. It owns no code of the product; run it with `go test ./internal/lint`.
package lint
