package kvblock

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/zeebo/xxh3"
)

// hashSeed seeds every block hash. Source: dynamo-kv-router 1.6.1, protocols (XXH3_64_SEED).
const hashSeed = 1337

// HashOptions says how an engine cuts a prompt into blocks, and what distinguishes its blocks besides tokens. The
// blocks of two workers can match only if their options are equal.
type HashOptions struct {
	// BlockSize is the number of tokens in a block. A size below 1 yields no blocks; reject it in the configuration.
	BlockSize int

	// EAGLE widens the window of a block by one token into the next block, as engines that draft with EAGLE do: block i
	// covers tokens [i*BlockSize, i*BlockSize+BlockSize], and n tokens make (n-1)/BlockSize blocks.
	EAGLE bool

	// LoRAName is the adapter's name as the engine announces it; "" is the base model.
	LoRAName string

	// CacheNamespace separates the blocks of one tenant from those of others; "" is the shared namespace.
	CacheNamespace string

	// MediaHashes[i] are the hashes of the images or other media with a placeholder in block i, in any order. May be
	// nil or shorter than the number of blocks; the remaining blocks hold only text.
	MediaHashes [][]uint64
}

// Salt returns the seed of the local hashes under o. The hashes of adapter and namespace are added modulo 2^64.
//
// Source: dynamo-kv-hashing 1.6.1, salt.
func (o HashOptions) Salt() uint64 {
	salt := uint64(hashSeed)
	if o.LoRAName != "" {
		salt += xxh3.HashString(o.LoRAName)
	}
	if o.CacheNamespace != "" {
		salt += xxh3.HashStringSeed(o.CacheNamespace, namespaceSeed)
	}
	return salt
}

// namespaceSeed seeds the hash of a cache namespace.
const namespaceSeed = 1

// Blocks returns how many complete blocks n tokens make. A partial block at the end does not count.
func (o HashOptions) Blocks(n int) int {
	if o.EAGLE {
		n--
	}
	if o.BlockSize < 1 || n < o.BlockSize {
		return 0
	}
	return n / o.BlockSize
}

// AppendLocalHashes appends the local hash of every complete block of tokens to dst: o.Blocks(len(tokens)) hashes. It
// allocates only to grow dst, and for a block with more than 16 media or with media and more than 1024 bytes.
//
// Source: dynamo-kv-router 1.6.1, protocols (compute_block_hash_for_seq): XXH3-64 over the tokens as little-endian u32,
// followed by the block's media hashes, ascending, as little-endian u64.
func AppendLocalHashes(dst []LocalHash, tokens []Token, o HashOptions) []LocalHash {
	return appendSalted(dst, tokens, o, o.Salt())
}

// appendSalted is AppendLocalHashes with a salt that is already computed.
func appendSalted(dst []LocalHash, tokens []Token, o HashOptions, salt uint64) []LocalHash {
	blocks := o.Blocks(len(tokens))
	if blocks == 0 {
		return dst
	}
	dst = slices.Grow(dst, blocks)
	if o.BlockSize == 16 && !o.EAGLE && len(o.MediaHashes) == 0 {
		dst = dst[:len(dst)+blocks]
		hash16(dst[len(dst)-blocks:], tokens, salt)
		return dst
	}
	window := o.BlockSize
	if o.EAGLE {
		window++
	}
	for i := range blocks {
		block := tokens[i*o.BlockSize : i*o.BlockSize+window]
		switch {
		case i < len(o.MediaHashes) && len(o.MediaHashes[i]) > 0:
			dst = append(dst, hashWithMedia(block, o.MediaHashes[i], salt))
		case littleEndian:
			dst = append(dst, LocalHash(xxh3.HashSeed(tokenBytes(block), salt)))
		default:
			dst = append(dst, hashPortable(block, salt))
		}
	}
	return dst
}

// littleEndian reports whether the memory of a Token has the byte order that is hashed.
var littleEndian = binary.NativeEndian.Uint16([]byte{1, 0}) == 1

// tokenBytes returns the memory of tokens. The result must not outlive them.
func tokenBytes(tokens []Token) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens))
}

// hashPortable hashes one block on a machine of any byte order.
func hashPortable(block []Token, salt uint64) LocalHash {
	var stack [1024]byte
	return LocalHash(xxh3.HashSeed(appendTokens(stack[:0], block), salt))
}

func hashWithMedia(block []Token, media []uint64, salt uint64) LocalHash {
	var stack [1024]byte
	var sortStack [16]uint64
	sorted := append(sortStack[:0], media...)
	slices.Sort(sorted)
	b := appendTokens(stack[:0], block)
	for _, m := range sorted {
		b = binary.LittleEndian.AppendUint64(b, m)
	}
	return LocalHash(xxh3.HashSeed(b, salt))
}

func appendTokens(b []byte, tokens []Token) []byte {
	for _, t := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(t))
	}
	return b
}

// NextSequenceHash returns the sequence hash of the block whose local hash is local and whose predecessor is parent.
// The first block of a prompt has no predecessor; see FirstSequenceHash.
//
// Source: dynamo-kv-router 1.6.1, protocols (compute_seq_hash_for_block). The seed is never salted.
func NextSequenceHash(parent SequenceHash, local LocalHash) SequenceHash {
	return SequenceHash(hashPair(uint64(parent), uint64(local)))
}

// FirstSequenceHash returns the sequence hash of a prompt's first block, which is its local hash.
func FirstSequenceHash(local LocalHash) SequenceHash { return SequenceHash(local) }

// PartHash returns the local hash of the first n tokens of block i of tokens, 0 < n < o.BlockSize. Layers of a hybrid
// model may have smaller blocks than full attention, and name a block that ends inside one of full attention's so. It
// reports false if there are too few tokens.
func PartHash(tokens []Token, o HashOptions, i, n int) (h LocalHash, ok bool) {
	return partHash(tokens, o, i, n, o.Salt())
}

// partHash is PartHash with a salt that is already computed. All media of block i count, those behind the n tokens too.
func partHash(tokens []Token, o HashOptions, i, n int, salt uint64) (h LocalHash, ok bool) {
	end := i*o.BlockSize + n
	if o.EAGLE {
		end++
	}
	if n < 1 || end > len(tokens) {
		return 0, false
	}
	part := HashOptions{BlockSize: n, EAGLE: o.EAGLE}
	if i < len(o.MediaHashes) {
		part.MediaHashes = o.MediaHashes[i : i+1]
	}
	var one [1]LocalHash
	return appendSalted(one[:0], tokens[i*o.BlockSize:end], part, salt)[0], true
}

// AppendSequenceHashes appends the sequence hash of every block of a prompt to dst: local[0] is the prompt's first
// block. It allocates only to grow dst.
func AppendSequenceHashes(dst []SequenceHash, local []LocalHash) []SequenceHash {
	if len(local) == 0 {
		return dst
	}
	dst = slices.Grow(dst, len(local))
	chain := dst[len(dst) : len(dst)+len(local)]
	h := FirstSequenceHash(local[0])
	chain[0] = h
	for i := 1; i < len(local); i++ {
		h = NextSequenceHash(h, local[i])
		chain[i] = h
	}
	return dst[:len(dst)+len(local)]
}
