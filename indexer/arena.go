package indexer

import (
	"math/bits"
	"sync/atomic"
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// ref is the address of a word in an arena: the page's number and the word's place in the page.
type ref uint32

const (
	pageBits  = 13 // 8192 words, 64 KiB
	pageWords = 1 << pageBits

	minClass = 3 // of records, in log2 of words
	maxClass = 20
)

// arena keeps records of 2^class words, of two sorts (runs and holders), free of pointers so that the garbage collector
// has nothing to scan but the list of pages. All words are read and written atomically: readers look at them without a
// lock, and find out afterwards whether what they saw was whole (see run.go).
//
// A page holds records of one sort and class only, so where a record starts follows from the address of any of its
// words. A record bigger than a page gets a page of its own size.
//
// Methods that change the arena are guarded by tier.mu.
type arena struct {
	dir      atomic.Pointer[[]atomic.Pointer[page]] // by page number; nil entries are free numbers
	maxPages uint32                                 // addresses have room for 2^(32-pageBits)
	hasNames bool                                   // whether pages of runs say what blocks were stored as
	_        memoryLine

	info       []pageInfo                // by page number
	open       [2][maxClass + 1][]uint32 // pages with room, by sort and class
	freePages  []uint32                  // free page numbers
	usedWords  int                       // words of all records in use
	totalWords int                       // words of all pages
}

// recordKind tells what a record is.
type recordKind uint8

const (
	kindRun recordKind = iota
	kindHolders
)

// page is immutable but for its words.
type page struct {
	words []uint64
	// As many, for what only writers need of a run, if it is kept; guarded by tier.mu.
	stored []kvblock.StoredBlock
	last   int // word of a record
	class  uint8
	kind   recordKind
}

// pageInfo is what only writers need to know of a page.
type pageInfo struct {
	used      uint32 // records in use
	highWater uint32 // the word from which on no record was ever used
	freeHead  uint32 // the word of the first freed record, plus 1; its word 1 holds the next one's
	openAt    int32  // place in open, -1 if the page is full
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

// runAround returns the run with the word at r, and the place of the block there; nil if r lies in no run. The place is
// less than 0 if r lies in the header.
func (a *arena) runAround(r ref) (words []uint64, i int) {
	p := a.page(r)
	if p == nil || p.kind != kindRun {
		return nil, 0
	}
	at := int(r) & (pageWords - 1)
	return p.words[at&^p.last : at|p.last+1], at&p.last - runHeader
}

// locate sets s to the place of the block at r; to the zero spot if r lies in no run. Its i is less than 0 if r lies in
// the header.
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

// size returns the words that a record takes.
func (a *arena) size(s recordKind, class uint8) int {
	words := 1 << class
	if s == kindRun {
		words += b2i(a.hasNames) * 2 << class
	}
	return words
}

// storedOf returns what only writers need of the run at r, nil if it is not kept. It lies beside the run: [0].Engine is
// the sequence hash of the block before the run, [1].Engine says whether there is one, [0].Local which run that was
// last (it need not be there any more), [1].Local whether any block may have no name, [2].Engine whether prompts are
// known to part at the run's end, [2].Local which of its blocks tier.table has if not all, and from runHeader on are
// the blocks as they were stored by their first holder, with no name (0) if that is not the block's own.
func (a *arena) storedOf(r ref) []kvblock.StoredBlock {
	p := a.page(r)
	if p.stored == nil {
		return nil
	}
	at := int(r) & (pageWords - 1)
	return p.stored[at : at+1<<p.class]
}

// nameAt returns the name of the block at r, 0 if it has none or r is in no run.
func (a *arena) nameAt(r ref) kvblock.EngineHash {
	p := a.page(r)
	if p == nil || p.stored == nil {
		return 0
	}
	return p.stored[r&(pageWords-1)].Engine
}

// eachRun calls f with every run until f returns false. f may change, cut and free the run it is called with; whether
// the runs that it makes are visited is not said.
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

// load reads the word at r if r lies in a run.
func (a *arena) load(r ref) (uint64, bool) {
	p := a.page(r)
	if p == nil || p.kind != kindRun {
		return 0, false
	}
	return atomic.LoadUint64(&p.words[r&(pageWords-1)]), true
}

// alloc returns a record of 2^class words with anything in them. It reports failure when addresses run out.
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
	if last := len(a.freePages) - 1; last >= 0 { // emptied pages first
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

// close takes page n off its list of pages with room.
func (a *arena) close(s recordKind, class uint8, n uint32) {
	open := a.open[s][class]
	at, last := a.info[n].openAt, len(open)-1
	open[at] = open[last]
	a.info[open[at]].openAt = at
	a.open[s][class] = open[:last]
	a.info[n].openAt = -1
}

// release gives the record at r back. Readers may still be looking at it, so its words stay until they are used again,
// but for word 1.
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
	// the last one stays, lest one record more or less moves a page
	if in.used == 0 && len(a.open[p.kind][p.class]) > 1 {
		a.close(p.kind, p.class, n)
		(*a.dir.Load())[n].Store(nil)
		a.totalWords -= len(p.words) + 2*len(p.stored)
		a.freePages = append(a.freePages, n)
	}
}

// used returns the bytes of the records in use, bytes those of all pages. A page goes when its last record does, so
// that bytes may stay above used.
func (a *arena) used() int { return 8 * a.usedWords }

func (a *arena) bytes() int {
	return 8 * (a.totalWords + len(*a.dir.Load()))
}

// classFor returns the smallest class of at least words words.
func classFor(words int) uint8 {
	return uint8(max(minClass, bits.Len(uint(words-1))))
}
