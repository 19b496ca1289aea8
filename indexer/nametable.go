package indexer

import (
	"unsafe"

	"kvepp/internal/hugepage"
	"kvepp/kvblock"
)

// nameTable maps own names to addresses of blocks, by extendible hashing over pages. A full page moves half of its
// names to a new page, so growth never takes long and leaves no old table behind. Only writers use it, under tier.mu.
//
// A slot is one word as in seqTable: the name's tag above the block's address. The name itself is beside the run
// (arena.storedOf). The tag's highest bits select the page. Its lowest bits select a cache line of slots, which is
// filled from the first slot on. If a line is full, names go to the next lines.
//
// It is a type of its own because seqTable is read without a lock: seqTable must publish words and replace tables as a
// whole, while nameTable moves slots within a cache line in place, which is faster and takes less memory.
type nameTable struct {
	seed    uint64
	pages   int                // number of pages
	bits    uint8              // number of tag bits that select the page
	dir     []dirEntry         // 1<<bits, by the tag's highest bits; nil until there is a name
	scratch *[nameSlots]uint64 // names that are moved between pages
}

type (
	// dirEntry is one of 1<<(nameTable.bits-depth) consecutive entries with the same page.
	dirEntry struct {
		lines *[nameLines]nameLine
		*namePage
	}
	nameLine [lineSlots]uint64

	// namePage is apart from the lines. Pages' lines begin at multiples of a power of two, and a cache keeps only a few
	// lines at such addresses.
	namePage struct {
		live    int   // names
		deleted int   // slots with slotDeleted
		depth   uint8 // number of highest tag bits that all its names have in common
	}
)

const (
	lineSlots    = 8
	nameLines    = 1 << 9 // of a page: 32 KiB
	nameSlots    = nameLines * lineSlots
	maxNameSlots = nameSlots * 3 / 4 // maximum number of slots that are not slotEmpty

	// maxDirPerPage is the maximum number of entries of dir for each page. Names are spread evenly, so about two are
	// usual. If they were not, memory would stay bounded, and some blocks would get no own name.
	maxDirPerPage = 64
)

// mix returns the bits of a name that select its page, line and tag.
func (t *nameTable) mix(e kvblock.EngineHash) uint64 { return mix(uint64(e), t.seed) }

// dirIndex returns the index in dir for a name that mix maps to m.
func (t *nameTable) dirIndex(m uint64) int { return int(uint64(uint32(m)) >> ((32 - t.bits) % 64)) }

// lineOf returns the line for a name that mix maps to m.
func lineOf(m uint64) uint { return uint(m % nameLines) }

// lineAfter returns the line that follows line i.
func lineAfter(i uint) uint { return (i + 1) % nameLines }

// bytes returns the memory of all pages.
func (t *nameTable) bytes() int {
	return t.pages*int(unsafe.Sizeof([nameLines]nameLine{})) + len(t.dir)*int(unsafe.Sizeof(dirEntry{}))
}

// slotAddr returns the address of the first line that a search reads, for prefetching; 0 if there is none.
func (t *nameTable) slotAddr(m uint64) uintptr {
	if len(t.dir) == 0 {
		return 0
	}
	return uintptr(unsafe.Pointer(&t.dir[t.dirIndex(m)].lines[lineOf(m)]))
}

// find returns the address of the block with own name e.
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

// guess returns the address that the first slot with e's tag has, for prefetching; 0 if there is none. It does not
// compare names, so the block may have another name.
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

// pageWithRoom returns the page for a name that mix maps to m, with room for one more name; nil if there is no room.
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

// insert adds consecutive blocks, the first at r, up to the first whose name is 0 or in the table already. It returns
// their number. mixed has mix of each name.
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
		// The line nearly always has room and no slot with the same tag. The loop has no branch for each slot, because
		// the processor would mispredict one for each name.
		line, used, sameTag := &page.lines[lineOf(m)], 0, 0
		for _, slot := range line {
			used += b2i(slot != slotEmpty)
			sameTag += b2i(uint32(slot>>32) == uint32(m))
		}
		if used < lineSlots && sameTag == 0 {
			line[used] = m<<32 | uint64(r+ref(k))
			page.live++
			continue
		}
		var into *uint64 // the first slot with slotDeleted
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

// slotOf returns the line with the slot of the block at r, and the slot's index there. The block must be in the table.
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

// move changes the address of the block with own name e.
func (t *nameTable) move(e kvblock.EngineHash, from, to ref) {
	m := t.mix(e)
	line, at := t.dir[t.dirIndex(m)].slotOf(m, from)
	line[at] = m<<32 | uint64(to)
}

// remove removes the block at r, whose own name is e.
func (t *nameTable) remove(e kvblock.EngineHash, r ref) {
	m := t.mix(e)
	page := &t.dir[t.dirIndex(m)]
	line, at := page.slotOf(m, r)
	page.live--
	if line[lineSlots-1] != slotEmpty { // a following line may have names of this line
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

// split moves half of the names of the page at index at of dir to a new page. It reports failure, changing nothing, if
// dir would exceed maxDirPerPage.
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

// merge undoes split while both pages are nearly empty: it joins the page at index at of dir with the page of the other
// half, then the result with its other half, and so on.
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
	if t.dir[at].live == 0 { // this page is the last one, which stays
		t.dir, t.bits = []dirEntry{t.dir[at]}, 0
	}
}

// noBit is a bit that is zero in each tag.
const noBit = 32

// collect moves all names from lines to t.scratch, behind the n names there, and returns their number then.
func (t *nameTable) collect(lines *[nameLines]nameLine, n int) int {
	if t.scratch == nil {
		t.scratch = new([nameSlots]uint64)
	}
	for i := range lines { // about every other slot has a name, so the processor would often mispredict a branch
		for _, slot := range &lines[i] {
			t.scratch[n%nameSlots] = slot
			n += b2i(slot > slotDeleted)
		}
	}
	*lines = [nameLines]nameLine{}
	return n
}

// distribute writes the n names in t.scratch to empty lines: names whose tag has this bit set to ones, the others to
// zeros. It returns the number of names in ones.
func (t *nameTable) distribute(n int, zeros, ones *[nameLines]nameLine, bit uint8) (inOnes int) {
	pages, used := [2]*[nameLines]nameLine{zeros, ones}, [2][nameLines]uint8{}
	for _, name := range t.scratch[:n] {
		to, i := name>>32>>(bit%64)&1, lineOf(name>>32)
		for used[to][i] == lineSlots {
			i = lineAfter(i)
		}
		pages[to][i][used[to][i]%lineSlots] = name
		used[to][i]++
		inOnes += int(to)
	}
	return inOnes
}
