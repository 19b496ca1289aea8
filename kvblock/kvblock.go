// Package kvblock defines a KV block: its hashes, and the events with which engines announce it.
//
// It owns the block's identifiers (three hash types that the compiler keeps apart), Dynamo's block hashing, and the
// decoding and normalisation of the engines' KV events. It keeps no state between calls and does no I/O. Everything in
// it is safe for concurrent use unless its comment says otherwise.
package kvblock

// Token is one token id as the engine's tokenizer numbers it.
type Token uint32

// Worker is one KV cache: one data-parallel rank of one engine instance. Package pool allocates the numbers. They are
// dense, so that they can index slices and bitsets. A number is reused only after all users have forgotten its old
// holder.
type Worker uint32

// MaxBlockSize is the largest block size that kvepp accepts, in tokens.
const MaxBlockSize = 1 << 20

// LocalHash identifies a block by its own tokens only.
type LocalHash uint64

// SequenceHash identifies a block by its tokens and everything before it: equal hashes mean equal prefixes.
type SequenceHash uint64

// EngineHash is the engine's own name of a block. It is opaque, and has a meaning only within the worker that sent it.
type EngineHash uint64
