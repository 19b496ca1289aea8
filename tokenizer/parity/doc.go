// Package parity holds the tokenizer against the Python originals, on the tokenizer files of real models.
//
// It owns oracle.py, which says what the originals do, and the comparison; it has no code of the product, and never commits
// a model's files. `make test` compares a few hundred texts on two small files, `make test-long` 23,000 texts on each of all
// files. Run it through make, which fetches files and originals; without them its tests fail and say so.
package parity
