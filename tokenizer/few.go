package tokenizer

import (
	"math/bits"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// few holds up to fewSymbols symbols while they merge. A symbol keeps its place; the one that merges into its left
// neighbour leaves its place empty. Pairs are asked for in one step and looked up in the next, so that several words
// that merge by turns do not wait for memory one after the other.
type few struct {
	symbols [fewSymbols]kvblock.Token
	// candidates are the possible merges of the symbol at a place with its right neighbour: the rank, then, in the
	// lowest bits, the place. So the smallest is the next one to do.
	candidates [fewSymbols]uint32
	into       [fewSymbols]kvblock.Token // what the symbol and its neighbour become, where there is a candidate
	places     uint64                    // those that are not empty, a bit each
	count      int                       // of places, at the beginning
	asked      [fewSymbols]askedPair
	addresses  [fewSymbols]uintptr // of the slots where the searches for them begin
	askedCount int
}

// askedPair is a pair that the next step looks up.
type askedPair struct {
	pair  uint64 // see pairKey
	place uint32 // of its left symbol
	slot  uint32 // where the search begins
}

const (
	// fewSymbols is the number of symbols up to which looking at all candidates beats a heap: the bits of a word.
	fewSymbols = 64
	// placeBits is what a place takes of a candidate.
	placeBits = 6
	// noCandidate is not larger than the candidate of a pair that does not merge, and larger than all others.
	noCandidate = noRank << placeBits
	// maxTogether is the number of words that merge by turns.
	maxTogether = 32
	// strideOfMin is how many candidates are compared at once.
	strideOfMin = 8
)

// smaller is min without a branch: which of two candidates is smaller cannot be foretold.
func smaller(a, b uint32) uint32 {
	less := int64(a) - int64(b)
	return b + uint32(less&(less>>63))
}

// begin takes the n symbols, with candidates for all but the last, or pairs asked for. There is no candidate behind
// them, up to where comparing ends.
func (f *few) begin(n int) {
	f.count = n
	f.places = 0
	if n > 0 {
		f.places = ^uint64(0) >> uint(fewSymbols-n)
		for k := n - 1; k == n-1 || k%strideOfMin != 0; k++ {
			f.candidates[k] = noCandidate
		}
	}
}

// beginBytes begins with the bytes of s, of which there is at least one.
func (f *few) beginBytes(b *bpe, s string) {
	f.askedCount = 0
	last := len(s) - 1
	for k := range last {
		f.symbols[k%fewSymbols] = b.byteToken[s[k]]
		f.set(uint32(k), b.bytePairs[int(s[k])<<8|int(s[k+1])])
	}
	f.symbols[last%fewSymbols] = b.byteToken[s[last]]
	f.begin(len(s))
}

// beginSymbols begins with symbols.
func (f *few) beginSymbols(t *pairTable, symbols []kvblock.Token) {
	f.askedCount = 0
	n := copy(f.symbols[:], symbols)
	for k := range n - 1 {
		f.ask(t, k, k+1)
	}
	f.begin(n)
}

// set makes m what becomes of the symbol at a place and its right neighbour.
func (f *few) set(place uint32, m pairMerge) {
	f.candidates[place%fewSymbols] = m.rank<<placeBits | place
	f.into[place%fewSymbols] = m.into
}

// ask has the next step look up the pair of the symbols at two places.
func (f *few) ask(t *pairTable, left, right int) {
	key := pairKey(f.symbols[left%fewSymbols], f.symbols[right%fewSymbols])
	slot := t.slot(key)
	f.asked[f.askedCount%fewSymbols] = askedPair{key, uint32(left), slot}
	f.addresses[f.askedCount%fewSymbols] = uintptr(unsafe.Pointer(&t.slots[slot]))
	f.askedCount++
}

// step does one merge, and reports whether there was one to do.
func (f *few) step(t *pairTable) bool {
	for k := range f.asked[:f.askedCount] {
		a := &f.asked[k]
		f.set(a.place, t.search(a.pair, a.slot))
	}
	f.askedCount = 0
	best := uint32(noCandidate)
	for k := 0; k < f.count; k += strideOfMin {
		c := f.candidates[k%fewSymbols:][:strideOfMin]
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
	at := int(best % fewSymbols)
	before := f.places & (1<<uint(at) - 1)
	behind := f.places &^ (2<<uint(at) - 1)
	f.candidates[bits.TrailingZeros64(behind)%fewSymbols] = noCandidate
	behind &= behind - 1
	f.places = before | 1<<uint(at) | behind
	f.symbols[at] = f.into[at]
	f.candidates[at] = noCandidate
	if before != 0 {
		f.ask(t, bits.Len64(before)-1, at)
	}
	if behind != 0 {
		f.ask(t, at, bits.TrailingZeros64(behind))
	}
	return true
}

// appendTo appends the symbols that are left.
func (f *few) appendTo(out []kvblock.Token) []kvblock.Token {
	for places := f.places; places != 0; places &= places - 1 {
		out = append(out, f.symbols[bits.TrailingZeros64(places)%fewSymbols])
	}
	return out
}

// mergeByTurns merges at most maxTogether words.
func mergeByTurns(t *pairTable, words []few) {
	var running [maxTogether]uint8
	for k := range words {
		running[k] = uint8(k)
		prefetch.Words(&words[k].addresses[0], words[k].askedCount)
	}
	for count := len(words); count > 0; {
		still := 0
		for _, k := range running[:count] {
			f := &words[k]
			if f.step(t) {
				running[still] = k
				still++
				prefetch.Words(&f.addresses[0], f.askedCount)
			}
		}
		count = still
	}
}
