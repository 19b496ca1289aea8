package tokenizer

import (
	"encoding/binary"
	"math/bits"
	"unsafe"

	"kvepp/kvblock"
)

// batch holds pieces that were cut but not looked up yet. A large vocabulary does not fit into the caches, so that nearly
// every new word waits for memory; the slots of a whole batch are touched at once, and the waits overlap.
type batch struct {
	count   int
	pieces  [batchSize + windowSize]piece
	ids     [batchSize + windowSize]kvblock.Token // by piece, of those that are tokens
	others  [batchSize + windowSize]uint8         // the pieces that are not
	touched uint64                                // keeps the compiler from leaving the touching out
}

// batchSize is the number of pieces from which on a batch is looked up.
const batchSize = 64

// piece is a piece of text, and where it would be in the vocabulary.
type piece struct {
	low, high uint64 // its bytes, if it is of at most 16
	start     uint32
	size      uint32
	slot      uint32
}

// isToken is the size of what is no piece but a token between pieces: its id is low.
const isToken = ^uint32(0)

// maxShort is the longest piece that is kept as two words.
const maxShort = 16

// keepLow and keepHigh are the bits of the first and second eight bytes from a place that are bytes of a piece from there, by
// its size.
var keepLow, keepHigh = func() (low, high [maxShort + 1]uint64) {
	for n := range low {
		low[n] = 1<<(8*min(uint(n), 8)) - 1
		high[n] = 1<<(8*max(uint(n), 8)-64) - 1
	}
	return low, high
}()

// add puts the piece s[i:j] into the batch, and appends the ids of all of it when it is full.
func (b *bpe) add(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	p := &sc.batch.pieces[sc.batch.count]
	p.start, p.size = uint32(i), uint32(j-i)
	if p.size <= maxShort {
		p.low, p.high = load128(s, i, j-i)
	}
	if sc.batch.count++; sc.batch.count >= batchSize {
		return b.flush(out, s, sc)
	}
	return out
}

// addToken puts a token into the batch, so that the batch goes on over it.
func (b *bpe) addToken(out []kvblock.Token, s string, id kvblock.Token, sc *scratch) []kvblock.Token {
	p := &sc.batch.pieces[sc.batch.count]
	p.low, p.size = uint64(id), isToken
	if sc.batch.count++; sc.batch.count >= batchSize {
		return b.flush(out, s, sc)
	}
	return out
}

// addAll puts the pieces of s[i:i+size] into the batch, which begin at the bits of starts, the lowest being s[i], and appends
// the ids of all of it when it is full. size is at most windowSize.
func (b *bpe) addAll(out []kvblock.Token, s string, i, size int, starts uint64, sc *scratch) []kvblock.Token {
	var text *[windowSize + maxShort]byte
	if rest := unsafe.Slice(unsafe.StringData(s), len(s))[i:]; len(rest) >= len(text) {
		text = (*[windowSize + maxShort]byte)(rest)
	} else {
		text = new([windowSize + maxShort]byte)
		copy(text[:], rest)
	}
	batch := &sc.batch
	count := batch.count
	starts &= 1<<uint(size) - 1
	for starts != 0 {
		from := bits.TrailingZeros64(starts) % windowSize
		starts &= starts - 1
		n := uint(min(bits.TrailingZeros64(starts), size) - from)
		p := &batch.pieces[count]
		count++
		p.start, p.size = uint32(i+from), uint32(n)
		n = min(n, maxShort)
		p.low = binary.LittleEndian.Uint64(text[from:from+8]) & keepLow[n]
		p.high = binary.LittleEndian.Uint64(text[from+8:from+16]) & keepHigh[n]
	}
	batch.count = count
	if count >= batchSize {
		return b.flush(out, s, sc)
	}
	return out
}

// flush appends the ids of the batch.
func (b *bpe) flush(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	batch := &sc.batch
	b.vocabulary.touch(batch)
	others := b.find(sc)
	done := 0
	for _, k := range others {
		p := &batch.pieces[k]
		out = append(out, batch.ids[done:k]...)
		done = int(k) + 1
		switch {
		case p.size <= maxShort:
			out = b.appendShort(out, s, p, sc)
		case p.size == isToken:
			out = append(out, kvblock.Token(p.low))
		default:
			out = b.appendLong(out, s, int(p.start), int(p.start+p.size), sc)
		}
	}
	out = append(out, batch.ids[done:batch.count]...)
	batch.count = 0
	return out
}

// touch reads from the slots of all pieces.
func (v *vocabulary) touch(batch *batch) {
	pieces := batch.pieces[:batch.count]
	var touched uint64
	for k := range pieces {
		p := &pieces[k]
		if p.size <= 8 {
			p.slot = v.shortSlot(p.low, p.size)
			touched += v.short[p.slot].text
		} else if p.size <= maxShort {
			p.slot = v.middleSlot(p.low, p.high, p.size)
			touched += v.middle[p.slot].low
		}
	}
	batch.touched = touched
}

// find finds the ids of those pieces that are tokens, and returns the others.
func (b *bpe) find(sc *scratch) []uint8 {
	batch, v := &sc.batch, b.vocabulary
	pieces := batch.pieces[:batch.count]
	var touched uint64
	others := 0
	for k := range pieces {
		p := &pieces[k]
		var found bool
		if p.size <= 8 {
			batch.ids[k], found = v.findShort(p.slot, p.low, p.size)
		} else if p.size <= maxShort {
			batch.ids[k], found = v.findMiddle(p.slot, p.low, p.high, p.size)
		}
		if !found {
			batch.others[others] = uint8(k)
			others++
			touched += sc.pieces[pieceSlot(p.low, p.high, p.size)].low
		}
	}
	batch.touched += touched
	return batch.others[:others]
}
