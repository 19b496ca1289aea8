package indexer

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// ref is the address of a word in an arena: the page number above the word's offset in the page.
type ref uint32

const (
	pageBits  = 13 // 8192 words, 64 KiB
	pageWords = 1 << pageBits

	minClass = 3 // of records, in log2 of words
	maxClass = 20
)

// arena holds records of 2^class words, of two kinds (runs and holders' records). They have no pointers, so the garbage
// collector scans only the list of pages. Lookups read words atomically without a lock, and check afterwards whether
// what they read was consistent (see run.go).
//
// A page has records of one kind and class only, so the address of any word of a record determines where the record
// starts. A record larger than a page gets a page of its size.
//
// tier.mu guards the methods that change the arena.
type arena struct {
	dir      atomic.Pointer[[]atomic.Pointer[page]] // by page number; nil where there is no page
	maxPages uint32                                 // at most 2^(32-pageBits)
	hasNames bool                                   // whether pages of runs have page.stored
	_        memoryLine

	info       []pageInfo                // by page number
	open       [2][maxClass + 1][]uint32 // pages with room, by kind and class
	freePages  []uint32                  // free page numbers
	usedWords  int                       // words of all records in use
	totalWords int                       // words of all pages
}

// recordKind says what a record contains.
type recordKind uint8

const (
	kindRun recordKind = iota
	kindHolders
)

// page has a fixed size, kind and class; only its words and stored blocks change.
type page struct {
	words []uint64
	// stored has one element for each word (arena.storedOf), or is nil. Only writers use it; tier.mu guards it.
	stored []kvblock.StoredBlock
	last   int // words of a record - 1
	class  uint8
	kind   recordKind
}

// pageInfo is the state of a page that only writers need.
type pageInfo struct {
	used      uint32 // records in use
	highWater uint32 // offset behind the last record ever used
	freeHead  uint32 // offset of the first free record, plus 1; 0: none. Word 1 of a free record has the next one's
	openAt    int32  // index in open, -1 if the page is full
}

// page returns the page of r, nil if there is none.
func (a *arena) page(r ref) *page {
	dir := *a.dir.Load()
	if n := int(r >> pageBits); n < len(dir) {
		return dir[n].Load()
	}
	return nil
}

// record returns the words from r to the end of its record, nil if r is in no page.
func (a *arena) record(r ref) []uint64 {
	p := a.page(r)
	if p == nil {
		return nil
	}
	at := int(r) & (pageWords - 1)
	return p.words[at : at|p.last+1]
}

// runAround returns the run that contains r, and the place of the block at r in the run: less than 0 if r is in the
// header. words is nil if r is in no run.
func (a *arena) runAround(r ref) (words []uint64, i int) {
	p := a.page(r)
	if p == nil || p.kind != kindRun {
		return nil, 0
	}
	at := int(r) & (pageWords - 1)
	return p.words[at&^p.last : at|p.last+1], at&p.last - runHeader
}

// locate sets s to the position of the block at r, or to the zero position if r is in no run. s.i is less than 0 if r
// is in the header.
func (a *arena) locate(r ref, s *position) {
	p := a.page(r)
	if p == nil || p.kind != kindRun {
		*s = position{}
		return
	}
	at := int(r) & (pageWords - 1)
	from, to := at&^p.last, at|p.last+1
	s.at, s.run, s.i, s.words = r, r-ref(at-from), at-from-runHeader, p.words[from:to]
	if s.stored = nil; p.stored != nil {
		s.stored = p.stored[from:to]
	}
}

// size returns the memory of a record in words, including its part of page.stored.
func (a *arena) size(s recordKind, class uint8) int {
	words := 1 << class
	if s == kindRun {
		words += b2i(a.hasNames) * 2 << class
	}
	return words
}

// storedOf returns the data of the run at r that only writers need, with one element for each word of the record; nil
// in a tier without engine hashes. The elements beside the header words are the run's runHead (headOf). The element
// beside a sequence hash has the block's own name, or 0 if it has none, and its local hash.
func (a *arena) storedOf(r ref) []kvblock.StoredBlock {
	p := a.page(r)
	if p.stored == nil {
		return nil
	}
	at := int(r) & (pageWords - 1)
	return p.stored[at : at+1<<p.class]
}

// nameAt returns the own name of the block at r; 0 if it has none, or if r is in no run.
func (a *arena) nameAt(r ref) kvblock.EngineHash {
	p := a.page(r)
	if p == nil || p.stored == nil {
		return 0
	}
	return p.stored[r&(pageWords-1)].Engine
}

// eachRun calls f with every run until f returns false. f may change, split and free that run. Runs that f makes may or
// may not be visited.
func (a *arena) eachRun(f func(run) bool) {
	for n := range a.info {
		p := a.page(ref(n << pageBits))
		if p == nil || p.kind != kindRun {
			continue
		}
		for at := 0; at < int(a.info[n].highWater); at += 1 << p.class {
			if length(p.words[at]) > 0 && !f(ref(n<<pageBits|at)) {
				return
			}
		}
	}
}

// load returns the word at r, if r is in a run.
func (a *arena) load(r ref) (uint64, bool) {
	p := a.page(r)
	if p == nil || p.kind != kindRun {
		return 0, false
	}
	return atomic.LoadUint64(&p.words[r&(pageWords-1)]), true
}

// alloc returns a record of 2^class words with undefined contents. It reports false if no address is left.
func (a *arena) alloc(s recordKind, class uint8) (ref, bool) {
	open := &a.open[s][class]
	if len(*open) == 0 && !a.addPage(s, class) {
		return 0, false
	}
	n := (*open)[len(*open)-1]
	in := &a.info[n]
	p := a.page(ref(n << pageBits))
	at := in.highWater
	if in.freeHead != 0 {
		at = in.freeHead - 1
		in.freeHead = uint32(atomic.LoadUint64(&p.words[at+1]))
	} else {
		in.highWater += 1 << class
	}
	in.used++
	a.usedWords += a.size(s, class)
	if in.freeHead == 0 && int(in.highWater) >= len(p.words) {
		a.close(s, class, n)
	}
	return ref(n<<pageBits | at), true
}

func (a *arena) addPage(s recordKind, class uint8) bool {
	var n uint32
	if last := len(a.freePages) - 1; last >= 0 { // reuse numbers of released pages first
		n, a.freePages = a.freePages[last], a.freePages[:last]
	} else {
		n = uint32(len(a.info))
		if n == a.maxPages {
			return false
		}
		a.info = append(a.info, pageInfo{})
		if old := *a.dir.Load(); len(old) <= int(n) {
			dir := make([]atomic.Pointer[page], max(8, 2*n))
			for i := range old {
				dir[i].Store(old[i].Load())
			}
			a.dir.Store(&dir)
		}
	}
	a.info[n] = pageInfo{openAt: int32(len(a.open[s][class]))}
	a.open[s][class] = append(a.open[s][class], n)
	p := &page{words: make([]uint64, max(pageWords, 1<<class)), last: 1<<class - 1, class: class, kind: s}
	if s == kindRun && a.hasNames {
		p.stored = make([]kvblock.StoredBlock, len(p.words))
	}
	hugepage.Populate(unsafe.Pointer(&p.words[0]), 8*len(p.words))
	if p.stored != nil {
		hugepage.Populate(unsafe.Pointer(&p.stored[0]), 16*len(p.stored))
	}
	(*a.dir.Load())[n].Store(p)
	a.totalWords += len(p.words) + 2*len(p.stored)
	return true
}

// close removes page n from its list of pages with room.
func (a *arena) close(s recordKind, class uint8, n uint32) {
	open := a.open[s][class]
	at, last := a.info[n].openAt, len(open)-1
	open[at] = open[last]
	a.info[open[at]].openAt = at
	a.open[s][class] = open[:last]
	a.info[n].openAt = -1
}

// release frees the record at r. Lookups may still read it, so all words except word 1 keep their values until the
// record is used again.
func (a *arena) release(r ref) {
	p, n, at := a.page(r), uint32(r)>>pageBits, uint32(r)&(pageWords-1)
	in := &a.info[n]
	publishWord(&p.words[at+1], uint64(in.freeHead))
	in.freeHead = at + 1
	in.used--
	a.usedWords -= a.size(p.kind, p.class)
	if in.openAt < 0 {
		in.openAt = int32(len(a.open[p.kind][p.class]))
		a.open[p.kind][p.class] = append(a.open[p.kind][p.class], n)
	}
	// The last open page stays, so that one record more or less does not allocate and free a page each time.
	if in.used == 0 && len(a.open[p.kind][p.class]) > 1 {
		a.close(p.kind, p.class, n)
		(*a.dir.Load())[n].Store(nil)
		a.totalWords -= len(p.words) + 2*len(p.stored)
		a.freePages = append(a.freePages, n)
	}
}

// used returns the bytes of the records in use.
func (a *arena) used() int { return 8 * a.usedWords }

// bytes returns the bytes of all pages. A page is freed when its last record is, so bytes may stay above used.
func (a *arena) bytes() int {
	return 8 * (a.totalWords + len(*a.dir.Load()))
}

// classFor returns the smallest class of at least words words.
func classFor(words int) uint8 {
	return uint8(max(minClass, bits.Len(uint(words-1))))
}
