// Package parity compares package tokenizer with the Python originals: token ids with the tokenizer files of real
// models, chat templates, and the prompts that engines make of requests.
//
// It owns the Python scripts that run the originals, and the comparisons. It has no code of the product and no model's
// files. `make test` compares a few hundred texts on two small files. `make test-long` compares 23,000 texts on every
// file and every chat template in the fetched packages. It also compares with vLLM's and SGLang's own code: every
// request of prompt/testdata, chats with media, and vLLM's further APIs. Run it through make, which fetches the
// files and the originals. Without them no test runs, and the output names the make target.
package parity
