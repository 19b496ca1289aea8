package bpe

import (
	"unsafe"

	"kvepp/internal/prefetch"
	"kvepp/kvblock"
)

// batch has the ids of pieces that were cut, and the pieces whose ids are not known yet. Large tables do not fit into
// the processor's fast caches, and a lookup would wait for memory. So a piece goes through three lists. When it enters
// one, the memory of its next lookup is prefetched; the lookup takes place when the list is full.
type batch struct {
	start int // where the first piece begins

	// Pieces that were just cut. The next lookup is in the words.
	fresh   int
	cut     [maxPieces]piece
	unknown [maxPieces]unknownPiece // those of them that are no words

	// Pieces that wait for the lookup in the vocabulary.
	waiting   int
	pieces    [maxWaiting + maxPieces]waitingPiece
	addresses [maxWaiting + maxPieces]uintptr // of the memory of the next lookups

	others [maxWaiting + maxPieces]other // waiting pieces that are not tokens
	merged []kvblock.Token               // the ids of others

	count int                                // of ids
	ids   [maxIDs + idsOfFresh]kvblock.Token // in the order of the text; not valid for waiting pieces
}

const (
	// maxWaiting is the number of waiting pieces at which a batch is full. About three of a hundred pieces must merge;
	// maxWaiting makes these enough to merge in turn.
	maxWaiting = 192
	// maxFresh is the number of pieces at which they are looked up in the words; maxPieces is the most there can be.
	maxFresh  = 128
	maxPieces = maxFresh + windowSize
	// idsOfFresh is the room for their ids. The ids of a word are copied with their number.
	idsOfFresh = maxPieces*wordIDs + 1
	// maxIDs is the number of ids at which a batch is full.
	maxIDs = 8 << 10
)

// unknownPiece is a piece that lookUpWords did not find.
type unknownPiece struct {
	piece uint32 // its index
	at    uint32 // index of its id
}

// waitingPiece is a piece whose ids are not known yet.
type waitingPiece struct {
	piece
	at uint32 // index of its id in the batch
}

// other is a piece that is not a token.
type other struct {
	piece uint16 // its index in batch.pieces
	// same is the index of an earlier other of the same text, or its own.
	same     uint16
	from, to uint32 // its ids are batch.merged[from:to]; to is 0 if they are not there
}

// beginAt sets start, if the batch is empty.
func (b *batch) beginAt(i int) {
	if b.fresh == 0 && b.count == 0 {
		b.start = i
	}
}

// add puts the piece s[i:j] into the batch, and appends the ids when it is full.
func (b *bpeModel) add(out []kvblock.Token, s string, i, j int, sc *scratch) []kvblock.Token {
	batch := &sc.batch
	batch.beginAt(i)
	p := &batch.cut[batch.fresh]
	low, high := load128(s, i, min(j-i, maxShort))
	*p = piece{low: low, key: pieceKey(high, uint(min(j-i, 255))), start: uint32(i), size: uint32(j - i)}
	p.hash = mix2(p.low, p.key)
	batch.fresh++
	return b.flushFull(out, s, sc)
}

// addToken puts an added token into the batch, so that the batch does not end at it.
func (b *bpeModel) addToken(out []kvblock.Token, s string, id kvblock.Token, sc *scratch) []kvblock.Token {
	out = b.lookUp(out, s, sc)
	sc.batch.ids[sc.batch.count] = id
	sc.batch.count++
	return out
}

// addAll puts the pieces of s[i:i+size] into the batch, which begin at the bits of starts, the lowest being s[i], and
// appends the ids when it is full. size is at most windowSize.
func (b *bpeModel) addAll(out []kvblock.Token, s string, i, size int, starts uint64, sc *scratch) []kvblock.Token {
	var text *[windowSize + maxShort]byte
	if rest := unsafe.Slice(unsafe.StringData(s), len(s))[i:]; len(rest) >= len(text) {
		text = (*[windowSize + maxShort]byte)(rest)
	} else {
		text = new([windowSize + maxShort]byte)
		copy(text[:], rest)
	}
	batch := &sc.batch
	batch.beginAt(i)
	starts &= 1<<uint(size) - 1
	to := (*[windowSize]piece)(batch.cut[batch.fresh:])
	batch.fresh += cutWords(text, starts, size, uint32(i), to, &sc.cache.words)
	return b.flushFull(out, s, sc)
}

// findRecent looks up the pieces that were just cut in the words. The others wait.
func (b *bpeModel) findRecent(batch *batch, cache *pieceCache) {
	if batch.fresh == 0 {
		return
	}
	ids := (*[idsOfFresh]kvblock.Token)(batch.ids[batch.count:])
	count, missing := lookUpWords(batch.cut[:batch.fresh], &cache.words, ids, &batch.unknown)
	first := batch.waiting
	for _, unknown := range batch.unknown[:missing] {
		p := &batch.cut[unknown.piece]
		to := &batch.pieces[batch.waiting]
		to.piece = *p
		to.at = uint32(batch.count) + unknown.at
		batch.addresses[batch.waiting] = b.vocabulary.place(p.size, p.hash)
		batch.waiting++
	}
	prefetch.Words(&batch.addresses[first], missing)
	batch.fresh = 0
	batch.count += count
}

// flushFull looks up the pieces that were just cut if there are enough, and appends the ids of the batch if it is full.
func (b *bpeModel) flushFull(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	if sc.batch.fresh < maxFresh {
		return out
	}
	return b.lookUp(out, s, sc)
}

// lookUp looks up the pieces that were just cut, and appends the ids of the batch if it is full.
func (b *bpeModel) lookUp(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	batch := &sc.batch
	b.findRecent(batch, sc.cache)
	if batch.count < maxIDs && batch.waiting < maxWaiting {
		return out
	}
	return b.flush(out, s, sc)
}

// flush appends the ids of the batch, and empties it.
func (b *bpeModel) flush(out []kvblock.Token, s string, sc *scratch) []kvblock.Token {
	batch := &sc.batch
	b.findRecent(batch, sc.cache)
	if !sc.budget.stopped() && batch.count > 0 {
		out = b.flushBatch(out, s, batch, sc)
	}
	batch.count, batch.waiting = 0, 0
	return out
}

// flushBatch is flush for a batch that is not empty.
func (b *bpeModel) flushBatch(out []kvblock.Token, s string, batch *batch, sc *scratch) []kvblock.Token {
	others := b.vocabulary.find(batch, s, sc.cache)
	need := batch.count + b.mergeOthers(others, s, batch, sc)
	if cap(out)-len(out) < need {
		if out = sc.budget.grow(out, need, batch.start); sc.budget.err != nil {
			return out
		}
	}
	done := uint32(0)
	for k := range others {
		o := &others[k]
		p := &batch.pieces[o.piece]
		out = append(out, batch.ids[done:p.at]...)
		done = p.at + 1
		if o.to == 0 {
			out = b.encode(out, s, int(p.start), int(p.start+p.size), sc)
		} else {
			out = append(out, batch.merged[o.from:o.to]...)
		}
	}
	return append(out, batch.ids[done:batch.count]...)
}

// mergeOthers puts the ids of the pieces that are not tokens into batch.merged, except those of more than maxLongPiece
// bytes. It returns by how much the ids of all are more than one for each; of the long pieces, this is an estimate, and
// encode makes room for more.
func (b *bpeModel) mergeOthers(others []other, s string, batch *batch, sc *scratch) (more int) {
	if len(others) == 0 {
		return 0
	}
	for k := range others {
		batch.addresses[k] = sc.cache.place(&batch.pieces[others[k].piece].piece, s)
	}
	prefetch.Words(&batch.addresses[0], len(others))
	batch.merged = batch.merged[:0]
	const slots = 2 * maxWaiting
	var firsts [slots]uint16 // index of an other plus one, by hash: new words often occur again
	var queue [maxWaiting + maxPieces]uint16
	queued := 0
	for k := range others {
		o := &others[k]
		p := &batch.pieces[o.piece]
		if p.size > maxLongPiece {
			more += int(p.size) / 3
			continue
		}
		first := &firsts[p.hash%slots]
		if *first != 0 && batch.pieces[others[*first-1].piece].equals(&p.piece, s) {
			o.same = *first - 1
			continue
		}
		*first = uint16(k + 1)
		if ids, found := sc.cache.find(&p.piece, s); found {
			o.keep(batch, ids)
			continue
		}
		queue[queued] = uint16(k)
		queued++
	}
	b.mergeQueue(queue[:queued], others, s, batch, sc)
	for k := range others {
		o := &others[k]
		first := &others[o.same]
		o.from, o.to = first.from, first.to
		more += int(o.to - o.from)
	}
	return more
}

// keep stores the ids of an other.
func (o *other) keep(batch *batch, ids []kvblock.Token) {
	o.from = uint32(len(batch.merged))
	batch.merged = append(batch.merged, ids...)
	o.to = uint32(len(batch.merged))
}

// mergeQueue merges the others of these indexes, at most maxGroup of them in turn, one step of each at a time.
func (b *bpeModel) mergeQueue(queue []uint16, others []other, s string, batch *batch, sc *scratch) {
	var running, done, begun [maxGroup]uint8 // indexes in sc.group
	count, fresh := 0, 0                     // the number of those that are running, and that began since the last step
	begin := func(k uint8) {
		f := &sc.group[k]
		f.other = queue[0]
		queue = queue[1:]
		b.begin(f, batch.pieces[others[f.other].piece].text(s), sc) // short enough for any symbols
		running[count], begun[fresh] = k, k
		count++
		fresh++
	}
	for count < maxGroup && len(queue) > 0 {
		begin(uint8(count))
	}
	for count > 0 {
		for _, k := range begun[:fresh] {
			if f := &sc.group[k]; f.unranked {
				f.rankAll(&b.merges)
			}
		}
		still := stepMerges(&b.merges, &sc.group, &running, &done, count)
		finished := done[:count-still]
		count, fresh = still, 0
		for _, k := range finished {
			f := &sc.group[k]
			o := &others[f.other]
			o.from = uint32(len(batch.merged))
			batch.merged = f.appendTo(batch.merged)
			o.to = uint32(len(batch.merged))
			sc.cache.store(&batch.pieces[o.piece].piece, s, batch.merged[o.from:])
			if len(queue) > 0 {
				begin(k)
			}
		}
	}
}

// place returns the address of the slot where the search for a piece begins.
func (v *vocabulary) place(size uint32, hash uint64) uintptr {
	t := &v.tables[(8-size)>>31] // the difference is negative above 8 bytes
	return t.address + uintptr((uint32(hash)&t.mask)*t.entry)
}

// find looks up the pieces of the batch that wait, which lie in s. It stores the ids of those that are tokens, in the
// batch and in the cache, and returns the others.
func (v *vocabulary) find(batch *batch, s string, cache *pieceCache) []other {
	pieces := batch.pieces[:batch.waiting]
	others := 0
	for k := range pieces {
		p := &pieces[k]
		var id kvblock.Token
		var found bool
		if p.size <= 8 {
			id, found = v.findShort(uint32(p.hash)&v.tables[0].mask, p.low, p.size)
		} else if p.size <= maxShort {
			id, found = v.findMiddle(uint32(p.hash)&v.tables[1].mask, p.low, p.high(s), p.size)
		} else {
			id, found = v.long[p.text(s)]
		}
		if found {
			batch.ids[p.at] = id
			cache.storeToken(&p.piece, id)
		} else {
			batch.others[others] = other{piece: uint16(k), same: uint16(others)}
			others++
		}
	}
	return batch.others[:others]
}
