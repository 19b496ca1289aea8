package bpe

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// batches are two batches of pieces that were cut but not looked up yet. A large vocabulary does not fit into the
// processor's caches, so nearly every new word waits for memory. When a piece enters a batch, its slot is prefetched;
// it is looked up when the next batch is full.
type batches struct {
	filling int // which one
	both    [2]batch
}

type batch struct {
	count     int
	pieces    [batchSize + windowSize]piece
	addresses [batchSize + windowSize]uintptr       // of the slots, of pieces of at most maxShort
	ids       [batchSize + windowSize]kvblock.Token // by piece, of those that are tokens
	others    [batchSize + windowSize]uint16        // the pieces that are not
}

// batchSize is the number of pieces at which a batch is full. About three of a hundred pieces must merge; batchSize
// makes these enough to merge in turn.
const batchSize = 704

// piece is a piece of text, and where the search for it begins: in the vocabulary, and when that does not have it, in
// scratch.cache.
type piece struct {
	low, high uint64 // its bytes, if it is of at most 16
	start     uint32
	size      uint32
	slot      uint32
}

// text returns the piece's text, in s.
func (p *piece) text(s string) string { return s[p.start : p.start+p.size] }

// isToken is the size of an entry that is not a piece but a token between pieces. Its id is in low.
const isToken = ^uint32(0)

// maxShort is the longest piece that is stored as two machine words, in bytes.
const maxShort = 16

// keepLow and keepHigh are the bits of the first and second eight bytes from a place that are bytes of a piece from
// there, by its size.
var keepLow, keepHigh = func() (low, high [maxShort + 1]uint64) {
	for n := range low {
		low[n] = 1<<(8*min(uint(n), 8)) - 1
		high[n] = 1<<(8*max(uint(n), 8)-64) - 1
	}
	return low, high
}()

// add puts the piece s[i:j] into the batch, and appends ids of earlier ones when it is full.
func (b *bpeModel) add(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	batch := &sc.batches.both[sc.batches.filling]
	p := &batch.pieces[batch.count]
	p.start, p.size = uint32(i), uint32(j-i)
	if p.size <= maxShort {
		p.low, p.high = load128(s, i, j-i)
	}
	batch.addresses[batch.count] = b.vocabulary.place(p)
	prefetch.Words(&batch.addresses[batch.count], 1)
	batch.count++
	return b.flushFull(out, s, sc)
}

// addToken puts an added token into the batch, so that the batch does not end at it.
func (b *bpeModel) addToken(out []kvblock.Token, s string, id kvblock.Token, sc *scratch) []kvblock.Token {
	batch := &sc.batches.both[sc.batches.filling]
	batch.pieces[batch.count] = piece{low: uint64(id), size: isToken}
	batch.count++
	return b.flushFull(out, s, sc)
}

// addAll puts the pieces of s[i:i+size] into the batch, which begin at the bits of starts, the lowest being s[i], and
// appends ids of earlier ones when it is full. size is at most windowSize.
func (b *bpeModel) addAll(out []kvblock.Token, s string, i, size int, starts uint64, sc *scratch) []kvblock.Token {
	var text *[windowSize + maxShort]byte
	if rest := unsafe.Slice(unsafe.StringData(s), len(s))[i:]; len(rest) >= len(text) {
		text = (*[windowSize + maxShort]byte)(rest)
	} else {
		text = new([windowSize + maxShort]byte)
		copy(text[:], rest)
	}
	batch := &sc.batches.both[sc.batches.filling]
	first := batch.count
	count := first
	starts &= 1<<uint(size) - 1
	for starts != 0 {
		from := bits.TrailingZeros64(starts) % windowSize
		starts &= starts - 1
		n := uint(min(bits.TrailingZeros64(starts), size) - from)
		p := &batch.pieces[count]
		p.start, p.size = uint32(i+from), uint32(n)
		n = min(n, maxShort)
		p.low = binary.LittleEndian.Uint64(text[from:from+8]) & keepLow[n]
		p.high = binary.LittleEndian.Uint64(text[from+8:from+16]) & keepHigh[n]
		batch.addresses[count] = b.vocabulary.place(p)
		count++
	}
	prefetch.Words(&batch.addresses[first], count-first)
	batch.count = count
	return b.flushFull(out, s, sc)
}

// flushFull does nothing until the current batch is full. Then it makes the other batch the current one, and appends
// the ids of the pieces in that.
func (b *bpeModel) flushFull(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	both := &sc.batches
	if both.both[both.filling].count < batchSize {
		return out
	}
	both.filling = 1 - both.filling
	sc.budget.stopped()
	return b.flushOne(out, s, &both.both[both.filling], sc)
}

// flush appends the ids of all pieces that are left.
func (b *bpeModel) flush(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	sc.budget.stopped()
	both := &sc.batches
	out = b.flushOne(out, s, &both.both[1-both.filling], sc)
	return b.flushOne(out, s, &both.both[both.filling], sc)
}

// flushOne appends the ids of a batch.
func (b *bpeModel) flushOne(out []kvblock.Token, s string, batch *batch, sc *scratch) []kvblock.Token {
	if batch.count == 0 {
		return out
	}
	others := b.vocabulary.find(batch, s)
	need := batch.count + maxShort*len(others)
	if cap(out)-len(out) < need && sc.budget.err == nil {
		out = sc.budget.grow(out, need, int(batch.pieces[0].start))
	}
	if sc.budget.err != nil {
		batch.count = 0
		return out
	}
	for i, k := range others {
		batch.addresses[i] = sc.cache.place(&batch.pieces[k], s)
	}
	prefetch.Words(&batch.addresses[0], len(others))
	done := 0
	for len(others) > 0 {
		group := others[:min(len(others), maxGroup)]
		others = others[len(group):]
		var merged [maxGroup]bool
		words := sc.group[:0]
		for i, k := range group {
			p := &batch.pieces[k]
			if p.size > maxLongPiece {
				continue
			}
			if _, found := sc.cache.find(p, s); !found {
				words = words[:len(words)+1]
				merged[i] = true
				b.begin(&words[len(words)-1], p.text(s), sc) // short enough for any symbols
			}
		}
		mergeInterleaved(&b.merges, words)
		for i, k := range group {
			p := &batch.pieces[k]
			out = append(out, batch.ids[done:k]...)
			done = int(k) + 1
			before := len(out)
			if merged[i] {
				out = words[0].appendTo(out)
				words = words[1:]
			} else if ids, found := sc.cache.find(p, s); found {
				out = append(out, ids...)
				continue
			} else { // another piece of the group took its slot, or it is too long
				out = b.encode(out, s, int(p.start), int(p.start+p.size), sc)
			}
			sc.cache.store(p, s, out[before:])
		}
	}
	out = append(out, batch.ids[done:batch.count]...)
	batch.count = 0
	return out
}

// place finds the slot of a piece, and returns its address.
func (v *vocabulary) place(p *piece) uintptr {
	t := &v.tables[(8-p.size)>>31]                               // the difference is negative above 8 bytes
	p.slot = uint32(mix2(p.low, p.high+uint64(p.size))) & t.mask // shortSlot or middleSlot
	return t.address + uintptr(p.slot*t.entry)
}

// find looks up the pieces of the batch, which lie in s. It stores the ids of those that are tokens, and returns the
// others.
func (v *vocabulary) find(batch *batch, s string) []uint16 {
	pieces := batch.pieces[:batch.count]
	others := 0
	for k := range pieces {
		p := &pieces[k]
		var found bool
		if p.size <= 8 {
			batch.ids[k], found = v.findShort(p.slot, p.low, p.size)
		} else if p.size <= maxShort {
			batch.ids[k], found = v.findMiddle(p.slot, p.low, p.high, p.size)
		} else if p.size == isToken {
			batch.ids[k], found = kvblock.Token(p.low), true
		} else {
			batch.ids[k], found = v.long[p.text(s)]
		}
		if !found {
			batch.others[others] = uint16(k)
			others++
		}
	}
	return batch.others[:others]
}
