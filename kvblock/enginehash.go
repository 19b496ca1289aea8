package kvblock

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
)

// vLLM names a block by the last eight bytes of a digest. The digest covers the digest of the block before it, the
// block's token ids and its extra keys, serialised as a Python tuple:
//
//	digest(i) = SHA-256(serialise((digest(i-1), (token, ...), extra keys or None)))
//
// The digest before a prompt's first block is that of a seed: the text of PYTHONHASHSEED, or a fixed one if that is not
// set. The serialisation is pickle, or CBOR with --prefix-caching-hash-algo sha256_cbor. Extra keys are adapters, media
// and the cache salt. kvepp does not compute the digests of adapters' blocks, because events do not have an adapter's
// path, nor those of media, because events have only those of the blocks that are kept.
//
// Source: vllm/v1/core/kv_cache_utils.py (hash_block_tokens, init_none_hash) and vllm/utils/hashing.py, vLLM 0.31 to
// 0.33; Python's pickle protocol 5; RFC 8949.

// digest is vLLM's full name of a block.
type digest [sha256.Size]byte

// announced returns the block's name in events.
func (d *digest) announced() EngineHash {
	return EngineHash(binary.BigEndian.Uint64(d[sha256.Size-8:]))
}

// hashScheme is a way in which a vLLM process computes digests.
type hashScheme struct {
	cbor bool
	root digest // before a prompt's first block
}

// defaultHashSeed is the seed of vLLM from 0.31 on if PYTHONHASHSEED is not set.
const defaultHashSeed = "vllm-none-hash"

// maxHashSeeds bounds the seeds of EngineHashes. Until a worker's seed is known, each costs time with each store.
const maxHashSeeds = 16

// maxComputedBlock is the largest block whose digest kvepp computes, in tokens. Pickle cuts longer tuples into frames.
const maxComputedBlock = 1 << 12

// EngineHashes are the ways in which vLLM processes may compute their block hashes. It is immutable.
type EngineHashes struct{ schemes []hashScheme }

// DefaultHashSeed stands for vLLM's fixed seed in NewEngineHashes.
const DefaultHashSeed = "default"

// NewEngineHashes returns the ways with vLLM's fixed seed, and with these values of PYTHONHASHSEED, at most 16. It
// returns an error if one is neither an integer from 0 to 4294967295, nor random, nor DefaultHashSeed.
func NewEngineHashes(seeds []string) (*EngineHashes, error) {
	if len(seeds) > maxHashSeeds {
		return nil, fmt.Errorf("%d seeds, but at most %d are possible", len(seeds), maxHashSeeds)
	}
	texts := []string{defaultHashSeed}
	for _, seed := range seeds {
		if _, err := strconv.ParseUint(seed, 10, 32); err != nil && seed != "random" && seed != DefaultHashSeed {
			return nil, fmt.Errorf("%q is no value of PYTHONHASHSEED: want an integer from 0 to 4294967295, or %s",
				seed, DefaultHashSeed)
		}
		if seed != DefaultHashSeed && !slices.Contains(texts, seed) {
			texts = append(texts, seed)
		}
	}
	h := new(EngineHashes)
	for _, seed := range texts {
		pickled := append(appendPickledText(beginPickle(nil), seed), pickleStop)
		endFrame(pickled)
		h.schemes = append(h.schemes,
			hashScheme{root: sha256.Sum256(pickled)},
			hashScheme{cbor: true, root: sha256.Sum256(appendCBORText(nil, seed))})
	}
	return h, nil
}

// saltKey is the tag of a cache salt among a block's extra keys.
const saltKey = "cache_salt"

// next returns the digest of the block with these tokens behind the one with digest before. salt is the prompt's cache
// salt if it is the prompt's first block; empty: none. buf is scratch memory, which it returns.
func (s *hashScheme) next(buf []byte, before *digest, tokens []Token, salt []byte) (digest, []byte) {
	if s.cbor {
		buf = appendCBORBlock(buf[:0], before, tokens, salt)
	} else {
		buf = appendPickledBlock(buf[:0], before, tokens, salt)
	}
	return sha256.Sum256(buf), buf
}

// Opcodes of pickle's protocol 5.
const (
	pickleProto    = 0x80
	pickleFrame    = 0x95
	pickleStop     = '.'
	pickleMark     = '('
	pickleTuple    = 't'
	pickleTuple1   = 0x85 // then those of two and three elements
	pickleEmpty    = ')'
	pickleMemoize  = 0x94
	pickleNone     = 'N'
	pickleInt1     = 'K'
	pickleInt2     = 'M'
	pickleInt4     = 'J'
	pickleLong     = 0x8a
	pickleBytes1   = 'C'
	pickleText1    = 0x8c
	pickleText4    = 'X'
	pickleFrameLen = 3 // where the frame's length begins
)

// beginPickle begins an object: protocol, and a frame of unknown length.
func beginPickle(b []byte) []byte {
	return append(b, pickleProto, 5, pickleFrame, 0, 0, 0, 0, 0, 0, 0, 0)
}

// endFrame sets the frame's length in a whole object.
func endFrame(b []byte) {
	binary.LittleEndian.PutUint64(b[pickleFrameLen:], uint64(len(b)-pickleFrameLen-8))
}

// appendPickledBlock appends pickle.dumps((before, tokens, extra keys)).
func appendPickledBlock(b []byte, before *digest, tokens []Token, salt []byte) []byte {
	b = append(beginPickle(b), pickleBytes1, byte(len(before)))
	b = append(append(b, before[:]...), pickleMemoize)
	if len(tokens) > 3 {
		b = append(b, pickleMark)
	}
	for _, t := range tokens {
		switch {
		case t < 1<<8:
			b = append(b, pickleInt1, byte(t))
		case t < 1<<16:
			b = append(b, pickleInt2, byte(t), byte(t>>8))
		case t < 1<<31:
			b = binary.LittleEndian.AppendUint32(append(b, pickleInt4), uint32(t))
		default: // in five bytes, because the number is not negative
			b = append(binary.LittleEndian.AppendUint32(append(b, pickleLong, 5), uint32(t)), 0)
		}
	}
	switch {
	case len(tokens) > 3:
		b = append(b, pickleTuple, pickleMemoize)
	case len(tokens) > 0:
		b = append(b, pickleTuple1+byte(len(tokens)-1), pickleMemoize)
	default:
		b = append(b, pickleEmpty)
	}
	if len(salt) == 0 {
		b = append(b, pickleNone)
	} else { // (("cache_salt", salt),)
		b = appendPickledText(appendPickledText(b, saltKey), string(salt))
		b = append(b, pickleTuple1+1, pickleMemoize, pickleTuple1, pickleMemoize)
	}
	b = append(b, pickleTuple1+2, pickleMemoize, pickleStop)
	endFrame(b)
	return b
}

func appendPickledText(b []byte, text string) []byte {
	if len(text) < 1<<8 {
		b = append(b, pickleText1, byte(len(text)))
	} else {
		b = binary.LittleEndian.AppendUint32(append(b, pickleText4), uint32(len(text)))
	}
	return append(append(b, text...), pickleMemoize)
}

// Major types of CBOR, in the upper three bits of a head, and the head of null.
const (
	cborUnsigned = 0 << 5
	cborBytes    = 2 << 5
	cborText     = 3 << 5
	cborArray    = 4 << 5
	cborNull     = 0xf6
)

// appendCBORBlock appends cbor2.dumps((before, tokens, extra keys), canonical=True).
func appendCBORBlock(b []byte, before *digest, tokens []Token, salt []byte) []byte {
	b = appendCBORHead(b, cborArray, 3)
	b = append(appendCBORHead(b, cborBytes, uint64(len(before))), before[:]...)
	b = appendCBORHead(b, cborArray, uint64(len(tokens)))
	for _, t := range tokens {
		b = appendCBORHead(b, cborUnsigned, uint64(t))
	}
	if len(salt) == 0 {
		return append(b, cborNull)
	}
	b = appendCBORHead(appendCBORHead(b, cborArray, 1), cborArray, 2)
	return appendCBORText(appendCBORText(b, saltKey), string(salt))
}

func appendCBORText(b []byte, text string) []byte {
	return append(appendCBORHead(b, cborText, uint64(len(text))), text...)
}

// appendCBORHead appends a major type with a length or value below 2^32, in as few bytes as possible.
func appendCBORHead(b []byte, major byte, n uint64) []byte {
	switch {
	case n < 24:
		return append(b, major|byte(n))
	case n < 1<<8:
		return append(b, major|24, byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, major|25), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, major|26), uint32(n))
}
