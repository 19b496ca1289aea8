package bpe

import (
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// smallMerge merges the symbols of one piece, at most smallMergeSymbols of them. A symbol keeps its place. When a
// symbol merges into its left neighbour, its place becomes empty. A step requests the slots of new pairs, and the next
// step reads them; so several pieces that merge in turn do not wait for memory one after the other.
type smallMerge struct {
	symbols [smallMergeSymbols]kvblock.Token
	// candidates has, for each place, the possible merge of that symbol with its right neighbour: the rank, and in the
	// lowest bits the place. The smallest candidate is the next merge.
	candidates [smallMergeSymbols]uint32
	places     uint64 // one bit for each place that is not empty
	count      int    // number of places at the beginning

	other uint16 // the piece's index among the others of the batch

	pending      [smallMergeSymbols]pendingLookup
	addresses    [smallMergeSymbols]uintptr // of the buckets where the pending lookups begin
	pendingCount int
}

// pendingLookup is a pair that the next step looks up.
type pendingLookup struct {
	key    uint64 // of the pair
	place  uint32 // of its left symbol
	bucket uint32 // where the search begins
}

const (
	// smallMergeSymbols is the number of symbols up to which comparing all candidates is faster than a heap. It is the
	// number of bits of places.
	smallMergeSymbols = 64
	// placeBits is the number of bits that a place takes in a candidate.
	placeBits = 6
	// noCandidate is larger than every candidate that merges, and not larger than the candidate of a pair that does
	// not.
	noCandidate = noRank << placeBits
	// maxGroup is the number of pieces that merge in turn.
	maxGroup = 64
	// minStride is the number of candidates that are compared at once.
	minStride = 8
)

// smaller is min without a branch, because the processor cannot predict which candidate is smaller.
func smaller(a, b uint32) uint32 {
	less := int64(a) - int64(b)
	return b + uint32(less&(less>>63))
}

// begin sets the number of symbols to n. The caller has set the symbols, and for all but the last a candidate or a
// pending lookup. begin fills the rest of the last stride with noCandidate.
func (f *smallMerge) begin(n int) {
	f.count = n
	f.places = 0
	if n > 0 {
		f.places = ^uint64(0) >> uint(smallMergeSymbols-n)
		for k := n - 1; k == n-1 || k%minStride != 0; k++ {
			f.candidates[k] = noCandidate
		}
	}
}

// beginBytes begins with the bytes of s, which is not empty.
func (f *smallMerge) beginBytes(b *bpeModel, s string) {
	f.pendingCount = 0
	last := len(s) - 1
	for k := range last {
		f.symbols[k%smallMergeSymbols] = b.byteToken[s[k]]
		f.set(uint32(k), b.byteMerges[int(s[k])<<8|int(s[k+1])])
	}
	f.symbols[last%smallMergeSymbols] = b.byteToken[s[last]]
	f.begin(len(s))
}

// beginSymbols begins with symbols.
func (f *smallMerge) beginSymbols(t *mergeTable, symbols []kvblock.Token) {
	f.pendingCount = 0
	n := copy(f.symbols[:], symbols)
	for k := range n - 1 {
		f.queueLookup(t, k, k+1)
	}
	f.begin(n)
}

// set stores the rank of the merge of the symbol at a place with its right neighbour.
func (f *smallMerge) set(place, rank uint32) {
	f.candidates[place%smallMergeSymbols] = rank<<placeBits | place
}

// queueLookup makes the next step look up the pair of the symbols at two places.
func (f *smallMerge) queueLookup(t *mergeTable, left, right int) {
	key := t.key(f.symbols[left%smallMergeSymbols], f.symbols[right%smallMergeSymbols])
	bucket := t.bucket(key)
	lookup := &f.pending[f.pendingCount%smallMergeSymbols]
	lookup.key, lookup.place, lookup.bucket = key, uint32(left), bucket
	f.addresses[f.pendingCount%smallMergeSymbols] = uintptr(unsafe.Pointer(&t.buckets[bucket]))
	f.pendingCount++
}

// step does one merge, and reports whether there was one.
func (f *smallMerge) step(t *mergeTable) bool {
	for k := range f.pending[:f.pendingCount] {
		lookup := &f.pending[k]
		f.set(lookup.place, t.rank(lookup.key, lookup.bucket))
	}
	f.pendingCount = 0
	best := uint32(noCandidate)
	for k := 0; k < f.count; k += minStride {
		c := f.candidates[k%smallMergeSymbols:][:minStride]
		best = smaller(
			best,
			smaller(
				smaller(smaller(c[0], c[1]), smaller(c[2], c[3])),
				smaller(smaller(c[4], c[5]), smaller(c[6], c[7])),
			),
		)
	}
	if best >= noCandidate {
		return false
	}
	at := int(best % smallMergeSymbols)
	before := f.places & (1<<uint(at) - 1)
	behind := f.places &^ (2<<uint(at) - 1)
	f.candidates[bits.TrailingZeros64(behind)%smallMergeSymbols] = noCandidate
	behind &= behind - 1
	f.places = before | 1<<uint(at) | behind
	f.symbols[at] = t.result(best >> placeBits)
	f.candidates[at] = noCandidate
	if before != 0 {
		f.queueLookup(t, bits.Len64(before)-1, at)
	}
	if behind != 0 {
		f.queueLookup(t, at, bits.TrailingZeros64(behind))
	}
	return true
}

// appendTo appends the remaining symbols.
func (f *smallMerge) appendTo(out []kvblock.Token) []kvblock.Token {
	for places := f.places; places != 0; places &= places - 1 {
		out = append(out, f.symbols[bits.TrailingZeros64(places)%smallMergeSymbols])
	}
	return out
}
