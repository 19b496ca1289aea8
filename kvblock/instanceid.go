package kvblock

import (
	"encoding/binary"
	"math/bits"
)

// InstanceID returns Dynamo's id of the worker instance with this name. In Kubernetes the name is the pod's name, or
// "pod-container" where each container is a worker. The id is at most 2^53-1, so that JSON keeps it exact.
//
// Source: dynamo-runtime 1.6.1, discovery (hash_pod_name): Rust's default hasher, SipHash-1-3 with a zero key, over the
// name and the byte 0xFF with which Rust ends a hashed string.
func InstanceID(name string) uint64 {
	h := sipHash{v0: 0x736f6d6570736575, v1: 0x646f72616e646f6d, v2: 0x6c7967656e657261, v3: 0x7465646279746573}
	rest := len(name) + 1 // including the 0xFF
	for len(name) >= 8 {
		h.compress(binary.LittleEndian.Uint64([]byte(name[:8])))
		name = name[8:]
	}
	var tail [16]byte
	n := copy(tail[:], name)
	tail[n] = 0xFF
	if n == 7 { // the 0xFF completes a word; the length goes into the next one
		h.compress(binary.LittleEndian.Uint64(tail[:8]))
		h.compress(uint64(rest) << 56)
	} else {
		tail[7] = byte(rest)
		h.compress(binary.LittleEndian.Uint64(tail[:8]))
	}
	h.v2 ^= 0xFF
	h.round()
	h.round()
	h.round()
	return (h.v0 ^ h.v1 ^ h.v2 ^ h.v3) & (1<<53 - 1)
}

type sipHash struct{ v0, v1, v2, v3 uint64 }

// compress mixes in one word with one round (the 1 in SipHash-1-3).
func (h *sipHash) compress(m uint64) {
	h.v3 ^= m
	h.round()
	h.v0 ^= m
}

func (h *sipHash) round() {
	h.v0 += h.v1
	h.v1 = bits.RotateLeft64(h.v1, 13) ^ h.v0
	h.v0 = bits.RotateLeft64(h.v0, 32)
	h.v2 += h.v3
	h.v3 = bits.RotateLeft64(h.v3, 16) ^ h.v2
	h.v0 += h.v3
	h.v3 = bits.RotateLeft64(h.v3, 21) ^ h.v0
	h.v2 += h.v1
	h.v1 = bits.RotateLeft64(h.v1, 17) ^ h.v2
	h.v2 = bits.RotateLeft64(h.v2, 32)
}
