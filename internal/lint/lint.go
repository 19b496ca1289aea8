// Package lint holds the rules of ARCHITECTURE.md as tests: which package may import which, where dependencies are
// explained, and the limits and words of docs/style.md. It owns no code of the product; run it with `go test
// ./internal/lint`.
package lint
