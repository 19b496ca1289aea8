// Package bpe turns text into token ids by byte-pair encoding: byte-level BPE and SentencePiece-style BPE, exact to the
// id, in Go without cgo. It reads the contents of tokenizer.json, tiktoken.model and tekken.json. It knows nothing of
// chats, engines or files; package tokenizer does.
//
// It never guesses. Loading refuses, by name, a component that it cannot reproduce exactly, because one wrong id makes
// every later block hash wrong.
//
// An encoding goes through these steps:
//
//	added.go          cut the text at added tokens such as <|im_start|>
//	segments.go       look up the ids of each segment between them in a cache
//	normalize.go      normalize
//	scan.go, window.go, pretokenize.go, regex.go
//	                  cut into pieces: a scanner for known patterns, 64 bytes at once for ASCII, else stages that may
//	                  use a general pattern engine
//	sentencepiece.go  cut into pieces where there is no pre-tokenizer: at places that no merge crosses
//	wordsets.go       look up the pieces that occurred recently: most of a text
//	batch.go, vocabulary.go, piececache.go
//	                  look up the other pieces, in batches that hide the latency of memory
//	smallmerge.go, model.go, mergetable.go
//	                  merge the symbols of the other pieces
//
// Errors of encoding begin with "bpe:". Errors of ParseTokenizerJSON, ParseTiktoken and ParseTekken do not: the
// caller puts that and the file's path before them.
//
// An Encoder is safe for concurrent use. Its memory is bounded: at most 64 MiB for the ids of segments, and about 2.5
// MiB for each encoding that runs at the same time, up to one for each processor.
package bpe
