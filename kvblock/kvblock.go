// Package kvblock says what a KV block is: how it is hashed, and the events with which engines announce it.
//
// It owns the block's identifiers (three hash types that the compiler refuses to mix), Dynamo's block hashing, and the
// codecs and normalisation of the engines' KV events. It never keeps state between calls, never does I/O, and
// everything in it is safe for concurrent use unless its comment says otherwise.
package kvblock

// Token is one token id as the engine's tokenizer numbers it.
type Token uint32

// Worker is one KV cache: one data-parallel rank of one engine instance. Numbers are dense, allocated by package pool,
// and reused only after everybody has forgotten the old holder, so that they can index slices and bitsets.
type Worker uint32

// MaxBlockSize is the largest block size that anything here believes, in tokens.
const MaxBlockSize = 1 << 20

// LocalHash identifies a block by its own tokens alone.
type LocalHash uint64

// SequenceHash identifies a block by its tokens and everything before it: equal hashes mean equal prefixes.
type SequenceHash uint64

// EngineHash is the engine's private name of a block. It is opaque, and means nothing outside the worker that sent it.
type EngineHash uint64
