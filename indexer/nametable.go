package indexer

import (
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// nameTable finds the address of a block by its own name: extendible hashing over pages. A full page gives half of its
// names to a new one, so growth never takes long and leaves no old table behind. Only writers use it, so words need no
// order.
//
// A slot is one word as in seqTable, the name's tag above the block's address; the name lies beside the run
// (arena.storedOf). The tag's highest bits select the page, its lowest bits a cache line of slots, filled from the
// first slot on. If a line is full, names go to the next lines.
//
// It is not joined with seqTable: seqTable is read without a lock, so it needs published words and tables that are
// replaced whole, while this one moves slots within a cache line in place, which is faster and takes less memory.
type nameTable struct {
	seed    uint64
	pages   int                // that there are
	bits    uint8              // of a tag, that tell the page
	dir     []dirEntry         // 1<<bits, by these; nil while there is no name
	scratch *[nameSlots]uint64 // scratch, names on their way from page to page
}

type (
	// dirEntry is one of 1<<(nameTable.bits-depth) neighbours that have the same page.
	dirEntry struct {
		lines *[nameLines]nameLine
		*namePage
	}
	nameLine [lineSlots]uint64

	// namePage lies apart from the lines, whose addresses are alike: few of these could be near at once.
	namePage struct {
		live    int   // names
		deleted int   // slots with slotGone
		depth   uint8 // of a tag's highest bits, how many all its names have in common
	}
)

const (
	lineSlots    = 8
	nameLines    = 1 << 9 // of a page: 32 KiB
	nameSlots    = nameLines * lineSlots
	maxNameSlots = nameSlots * 3 / 4 // that are not slotEmpty

	// maxDirPerPage is for how many places a page there may be for dir to grow. Names are spread evenly, so that there
	// are two or so; should it ever be otherwise, memory stays bounded, and some blocks get private names.
	maxDirPerPage = 64
)

// mix returns the bits of a name by which it is looked for.
func (t *nameTable) mix(e kvblock.EngineHash) uint64 { return mix(uint64(e), t.seed) }

// dirIndex returns which place in dir is that of names with these bits.
func (t *nameTable) dirIndex(m uint64) int { return int(uint64(uint32(m)) >> ((32 - t.bits) % 64)) }

// lineOf returns the line of names with these bits.
func lineOf(m uint64) uint { return uint(m % nameLines) }

// lineAfter returns the line behind one.
func lineAfter(i uint) uint { return (i + 1) % nameLines }

// bytes returns the memory of all pages.
func (t *nameTable) bytes() int {
	return t.pages*int(unsafe.Sizeof([nameLines]nameLine{})) + len(t.dir)*int(unsafe.Sizeof(dirEntry{}))
}

// slotAddr returns the address of memory where the search for a name begins, to be prefetched; 0 if there is none.
func (t *nameTable) slotAddr(m uint64) uintptr {
	if len(t.dir) == 0 {
		return 0
	}
	return uintptr(unsafe.Pointer(&t.dir[t.dirIndex(m)].lines[lineOf(m)]))
}

// find returns the address of the block whose name is e.
func (t *nameTable) find(a *arena, e kvblock.EngineHash) (ref, bool) {
	if len(t.dir) == 0 || e == 0 {
		return 0, false
	}
	m := t.mix(e)
	page := &t.dir[t.dirIndex(m)]
	for i := lineOf(m); ; i = lineAfter(i) {
		for _, slot := range &page.lines[i] {
			if slot == slotEmpty {
				return 0, false
			}
			if uint32(slot>>32) == uint32(m) && slot != slotDeleted && a.nameAt(ref(slot)) == e {
				return ref(slot), true
			}
		}
	}
}

// guess returns the address of the block whose name e probably is, without looking there; 0 if there is none. No block
// may be there.
func (t *nameTable) guess(e kvblock.EngineHash) ref {
	if len(t.dir) == 0 {
		return 0
	}
	m := t.mix(e)
	page := &t.dir[t.dirIndex(m)]
	for i := lineOf(m); ; i = lineAfter(i) {
		for _, slot := range &page.lines[i] {
			if slot == slotEmpty || uint32(slot>>32) == uint32(m) {
				return ref(slot)
			}
		}
	}
}

// pageWithRoom returns the page of names with these bits, after it made room there for one more; nil if it could not.
func (t *nameTable) pageWithRoom(m uint64) *dirEntry {
	if len(t.dir) == 0 {
		t.dir, t.bits = []dirEntry{t.newPage()}, 0
	}
	for {
		switch page := &t.dir[t.dirIndex(m)]; {
		case page.live+page.deleted < maxNameSlots:
			return page
		case page.live <= nameSlots/2:
			t.distribute(t.collect(page.lines, 0), page.lines, nil, noBit)
			page.deleted = 0
		case !t.split(t.dirIndex(m)):
			return nil
		}
	}
}

// insert adds the blocks that lie one behind the other from r on, by their names, up to the first that is 0 or taken.
// It returns how many. Mixed is the mix of each name.
func (t *nameTable) insert(a *arena, blocks []kvblock.StoredBlock, mixed []uint64, r ref) int {
next:
	for k := range blocks {
		e, m := blocks[k].Engine, mixed[k]
		if e == 0 {
			return k
		}
		page := t.pageWithRoom(m)
		if page == nil {
			return k
		}
		// Nearly always the line has room and none like it. That is found out without a branch for each slot, where the
		// processor would guess wrong once a name.
		line, used, alike := &page.lines[lineOf(m)], 0, 0
		for _, slot := range line {
			used += b2i(slot != slotEmpty)
			alike += b2i(uint32(slot>>32) == uint32(m))
		}
		if used < lineSlots && alike == 0 {
			line[used] = m<<32 | uint64(r+ref(k))
			page.live++
			continue
		}
		var into *uint64 // the first slot with slotGone
		for i := lineOf(m); ; i = lineAfter(i) {
			line := &page.lines[i]
			for j := range line {
				slot := &line[j]
				switch {
				case *slot == slotEmpty:
					if into != nil {
						slot = into
						page.deleted--
					}
					*slot = m<<32 | uint64(r+ref(k))
					page.live++
					continue next
				case *slot == slotDeleted:
					if into == nil {
						into = slot
					}
				case uint32(*slot>>32) == uint32(m) && a.nameAt(ref(*slot)) == e:
					return k
				}
			}
		}
	}
	return len(blocks)
}

// slotOf returns the line with the slot of the block at r, and its place there. It is there.
func (p *dirEntry) slotOf(m uint64, r ref) (line *nameLine, at int) {
	want := m<<32 | uint64(r)
	for i := lineOf(m); ; i = lineAfter(i) {
		line = &p.lines[i]
		for at, slot := range line {
			if slot == want {
				return line, at
			}
		}
	}
}

// move changes the address of the block whose name is e from one place to another.
func (t *nameTable) move(e kvblock.EngineHash, from, to ref) {
	m := t.mix(e)
	line, at := t.dir[t.dirIndex(m)].slotOf(m, from)
	line[at] = m<<32 | uint64(to)
}

// remove takes away the block at r, whose name is e.
func (t *nameTable) remove(e kvblock.EngineHash, r ref) {
	m := t.mix(e)
	page := &t.dir[t.dirIndex(m)]
	line, at := page.slotOf(m, r)
	page.live--
	if line[lineSlots-1] != slotEmpty { // names may be behind it that belong here
		line[at] = slotDeleted
		page.deleted++
	} else {
		last := at
		for last+1 < lineSlots && line[last+1] != slotEmpty {
			last++
		}
		line[at], line[last] = line[last], slotEmpty
	}
	if page.live < nameSlots/10 {
		t.merge(t.dirIndex(m))
	}
}

func (t *nameTable) newPage() dirEntry {
	t.pages++
	p := dirEntry{new([nameLines]nameLine), new(namePage)}
	hugepage.Populate(unsafe.Pointer(p.lines), int(unsafe.Sizeof(*p.lines)))
	return p
}

// split gives a new page to half of the names in the page at this place. It reports failure, changing nothing, if too
// many would have to be told apart.
func (t *nameTable) split(at int) bool {
	left := t.dir[at]
	if left.depth == t.bits {
		if len(t.dir) >= t.pages*maxDirPerPage {
			return false
		}
		dir := make([]dirEntry, 0, 2*len(t.dir))
		for _, page := range t.dir {
			dir = append(dir, page, page)
		}
		t.dir = dir
		t.bits++
		at *= 2
	}
	right := t.newPage()
	right.live = t.distribute(t.collect(left.lines, 0), left.lines, right.lines, 31-left.depth)
	left.live, left.deleted = left.live-right.live, 0
	left.depth++
	right.depth = left.depth
	size := 1 << (t.bits - left.depth)
	for i := range size {
		t.dir[at&^(2*size-1)+size+i] = right
	}
	return true
}

// merge puts the page at this place and the other half's together while both are nearly empty.
func (t *nameTable) merge(at int) {
	for t.dir[at].depth > 0 {
		size := 1 << (t.bits - t.dir[at].depth)
		at &^= 2*size - 1
		left, right := t.dir[at], t.dir[at+size]
		if left.depth != right.depth || left.live+right.live > nameSlots/4 {
			return
		}
		t.distribute(t.collect(right.lines, t.collect(left.lines, 0)), left.lines, nil, noBit)
		left.live, left.deleted = left.live+right.live, 0
		left.depth--
		for i := range size {
			t.dir[at+size+i] = left
		}
		t.pages--
	}
	if t.dir[at].live == 0 {
		t.dir, t.pages = nil, 0
	}
}

// noBit is a bit that no tag has.
const noBit = 32

// collect moves all names from a page's lines to those in hand, and returns how many these are then.
func (t *nameTable) collect(lines *[nameLines]nameLine, inHand int) int {
	if t.scratch == nil {
		t.scratch = new([nameSlots]uint64)
	}
	for i := range lines { // as every other slot or so has a name, a branch would often go the wrong way
		for _, slot := range &lines[i] {
			t.scratch[inHand%nameSlots] = slot
			inHand += b2i(slot > slotDeleted)
		}
	}
	*lines = [nameLines]nameLine{}
	return inHand
}

// distribute puts the names in hand into lines that have none, those whose tag has this bit into with, and returns how
// many these were.
func (t *nameTable) distribute(inHand int, lines, with *[nameLines]nameLine, bit uint8) (n int) {
	pages, used := [2]*[nameLines]nameLine{lines, with}, [2][nameLines]uint8{}
	for _, name := range t.scratch[:inHand] {
		goes, i := name>>32>>(bit%64)&1, lineOf(name>>32)
		for used[goes][i] == lineSlots {
			i = lineAfter(i)
		}
		pages[goes][i][used[goes][i]%lineSlots] = name
		used[goes][i]++
		n += int(goes)
	}
	return n
}
