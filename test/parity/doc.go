// Package parity holds the tokenizer against the Python originals: token ids on the tokenizer files of real models,
// chat templates, and what engines make of requests.
//
// It owns the Python scripts that say what the originals do, and the comparisons; it has no code of the product, and
// never commits a model's files. `make test` compares a few hundred texts on two small files, `make test-long` 23,000
// texts on each of all files, every chat template in the fetched packages, and with vLLM's and SGLang's own code every
// request of tokenizer/testdata, chats with media, and vLLM's further APIs. Run it through make, which fetches files
// and originals; without them its tests fail and say so.
package parity
