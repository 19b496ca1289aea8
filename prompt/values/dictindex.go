package values

import "hash/maphash"

// dictIndex is the index of a large dict: a hash table with open addressing. A Go map takes several times as much
// memory.
type dictIndex struct {
	slots []int32 // position of a key plus one; 0: empty. The length is a power of two, and at least half are empty.
}

// leastSlots is the size of the first table.
const leastSlots = 4 * smallDict

// indexSeed is random, so that clients cannot choose keys that collide.
var indexSeed = maphash.MakeSeed()

// hashOf returns the hash of a result of hashKey.
func hashOf(key any) uint64 {
	if s, ok := key.(string); ok {
		return maphash.String(indexSeed, s)
	}
	return maphash.Comparable(indexSeed, key)
}

func (x *dictIndex) findString(d *Dict, key string) int {
	mask := uint64(len(x.slots) - 1)
	for at := maphash.String(indexSeed, key) & mask; ; at = (at + 1) & mask {
		i := int(x.slots[at]) - 1
		if i < 0 {
			return -1
		}
		if s, ok := textOf(d.keys[i]); ok && s == key {
			return i
		}
	}
}

// find returns the position of a result of hashKey, or -1.
func (x *dictIndex) find(d *Dict, key any) int {
	mask := uint64(len(x.slots) - 1)
	for at := hashOf(key) & mask; ; at = (at + 1) & mask {
		i := int(x.slots[at]) - 1
		if i < 0 {
			return -1
		}
		if hashKey(d.keys[i]) == key {
			return i
		}
	}
}

// add adds the last key of d. If the table has to grow, it adds all keys again.
func (x *dictIndex) add(d *Dict) {
	first := len(d.keys) - 1
	if 2*len(d.keys) > len(x.slots) {
		x.slots = make([]int32, max(leastSlots, 2*len(x.slots)))
		first = 0
	}
	mask := uint64(len(x.slots) - 1)
	for i := first; i < len(d.keys); i++ {
		at := hashOf(hashKey(d.keys[i])) & mask
		for x.slots[at] != 0 {
			at = (at + 1) & mask
		}
		x.slots[at] = int32(i + 1)
	}
}
