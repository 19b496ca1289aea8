package bpe

import (
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// mergeTable maps a pair of neighbouring tokens to the rank and the result of their merge. It is a hash table of
// buckets. A bucket fills from its beginning; what does not fit goes to the next one.
type mergeTable struct {
	buckets []mergeBucket // their number is a power of two
	idBits  uint          // of an id in an entry
	shift   uint          // of the pair in an entry
	limit   uint64        // ranks are below it, and fit into the bits of an entry that the ids leave
	noPair  uint64        // the key of no pair; its search ends in one bucket
	// The table has ranks of its own, in the order of the model's. If it can, it makes them from the resulting tokens,
	// so that no other table is needed to find a result: the rank is the token's id << groupBits, plus a number for
	// each of the merges that result in that token. Else into has the results by rank.
	groupBits uint
	into      []kvblock.Token
}

// mergeBucket has merges. An entry is a pair, see key, and in the lowest bits the rank; or it is free. Two buckets are
// a cache line.
type mergeBucket [4]uint64

// mergeResult is the merge of a pair.
type mergeResult struct {
	rank uint32 // noRank: the pair does not merge
	into kvblock.Token
}

const (
	// noRank is the rank of a pair that does not merge. It is above every rank of a merge.
	noRank uint32 = 1<<rankBits - 1
	// rankBits is the most bits of a rank.
	rankBits = 25
	// maxIDBits is the most bits of an id; maxID is the highest id that a token may have.
	maxIDBits = 20
	maxID     = 1<<maxIDBits - 2
	// maxMerges is the most merges that a model may have.
	maxMerges = 1<<(64-2*maxIDBits) - 2
	// freeEntry marks a free place. No pair has its bits, because no id has all bits.
	freeEntry = ^uint64(0)
)

// newMergeTable indexes at most maxMerges merges. A merge's rank is its index, and the later of two merges of one pair
// counts, as in Hugging Face tokenizers. If byToken is set, the rank is the id of the resulting token, as in tiktoken.
// largest is the highest id of the vocabulary, at most maxID.
func newMergeTable(merges []merge, byToken bool, largest kvblock.Token) mergeTable {
	t := mergeTable{
		buckets: make([]mergeBucket, tableSize(len(merges)*3/4)/len(mergeBucket{})),
		idBits:  uint(bits.Len(uint(largest) + 1)),
	}
	t.shift = 64 - 2*t.idBits
	t.limit = 1<<min(rankBits, t.shift) - 1
	for i := range t.buckets {
		for k := range t.buckets[i] {
			t.buckets[i][k] = freeEntry
		}
	}
	if !byToken {
		t.groupBits, byToken = groupBits(merges)
		byToken = byToken && (uint64(largest)+1)<<t.groupBits <= t.limit
	}
	if !byToken {
		t.into = make([]kvblock.Token, len(merges))
	}
	group := uint32(0)
	for rank, m := range merges {
		r := uint32(rank)
		if byToken {
			if group++; t.groupBits == 0 || rank == 0 || m.into != merges[rank-1].into {
				group = 0
			}
			r = uint32(m.into)<<t.groupBits + group
		} else {
			t.into[rank] = m.into
		}
		key := t.key(m.left, m.right)
		*t.placeOf(key) = key | uint64(r)
	}
	none := kvblock.Token(1)<<t.idBits - 1 // no token has this id
	for right := range none + 1 {
		t.noPair = t.key(none, right)
		if t.buckets[t.bucket(t.noPair)][len(mergeBucket{})-1] == freeEntry {
			break
		}
	}
	return t
}

// groupBits returns the number of bits that number the merges with the same result. It reports whether results of later
// merges have higher ids, so that these put merges in order.
func groupBits(merges []merge) (count uint, ordered bool) {
	group, largest := 0, 0
	for rank, m := range merges {
		if group++; rank == 0 || m.into > merges[rank-1].into {
			group = 0
		} else if m.into < merges[rank-1].into {
			return 0, false
		}
		largest = max(largest, group)
	}
	return uint(bits.Len(uint(largest))), true
}

// key returns a pair as the higher bits of an entry.
func (t *mergeTable) key(left, right kvblock.Token) uint64 {
	return (uint64(left)<<(t.idBits%64) | uint64(right)) << (t.shift % 64)
}

// placeOf returns the place of a pair, or the free place where it belongs.
func (t *mergeTable) placeOf(key uint64) *uint64 {
	for i := t.bucket(key); ; i = t.next(i) {
		for k := range t.buckets[i] {
			place := &t.buckets[i][k]
			if *place == freeEntry || (*place^key)>>t.shift == 0 {
				return place
			}
		}
	}
}

// bucket returns the index of the bucket where the search for a pair begins.
func (t *mergeTable) bucket(key uint64) uint32 { return uint32(mix(key)) & uint32(len(t.buckets)-1) }

func (t *mergeTable) next(bucket uint32) uint32 { return (bucket + 1) & uint32(len(t.buckets)-1) }

// get returns the merge of a pair.
func (t *mergeTable) get(left, right kvblock.Token) mergeResult {
	key := t.key(left, right)
	rank := t.rank(key, t.bucket(key))
	if rank == noRank {
		return mergeResult{rank: noRank}
	}
	return mergeResult{rank, t.result(rank)}
}

// result returns what the pair of a rank becomes.
func (t *mergeTable) result(rank uint32) kvblock.Token {
	if t.into != nil {
		return t.into[rank]
	}
	return kvblock.Token(rank >> t.groupBits)
}

// address returns the address of a bucket.
func (t *mergeTable) address(bucket uint32) uintptr {
	return uintptr(unsafe.Pointer(&t.buckets[bucket]))
}

// rank returns the rank of a pair. bucket is where the search begins. The difference of an entry and the key is the
// rank if the entry is of this pair; else, as a number without a sign, it is at least limit. There is no branch on the
// place of an entry, because it would be hard to predict.
func (t *mergeTable) rank(key uint64, bucket uint32) uint32 {
	for {
		b := &t.buckets[bucket]
		rank := min(min(b[0]-key, b[1]-key), min(b[2]-key, b[3]-key))
		if rank >= t.limit {
			if b[3] != freeEntry {
				bucket = t.next(bucket)
				continue
			}
			rank = uint64(noRank)
		}
		return uint32(rank)
	}
}

// newByteMerges returns the ranks of pairs of bytes, indexed by first byte << 8 | second byte. Merging begins with
// these, and text has few different ones, so this table stays in the fast caches, which the table of all pairs does not
// fit.
func newByteMerges(t *mergeTable, byteToken *[256]kvblock.Token) []uint32 {
	all := make([]uint32, 1<<16)
	for i := range all {
		all[i] = t.get(byteToken[i>>8], byteToken[i&0xFF]).rank
	}
	return all
}
