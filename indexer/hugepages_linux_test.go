package indexer

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"kvepp/kvblock"
)

// TestHugePages checks that the index advises huge pages for runs, their stored blocks and the name table.
func TestHugePages(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Skipf("the kernel has no transparent huge pages: %v", err)
	}
	x := newIndex(t)
	device := &x.tiers[kvblock.TierDevice]
	for id := range uint64(100) {
		local, _ := chainOf(id, 512)
		mustStore(t, x, 0, stores(kvblock.EngineHash(id<<20|1), local, 0, 512))
	}
	latest := device.arena.page(device.latest)
	for what, at := range map[string]unsafe.Pointer{
		"words":  unsafe.Pointer(&latest.words[0]),
		"stored": unsafe.Pointer(&latest.stored[0]),
		"names":  unsafe.Pointer(device.names.dir[0].lines),
	} {
		if flags := flagsAt(t, uintptr(at)); !strings.Contains(flags, " hg ") {
			t.Errorf("%s: VmFlags are %q, want hg (huge page advised)", what, flags)
		}
	}
}

// flagsAt returns the VmFlags of the mapping that contains the address, from /proc/self/smaps.
func flagsAt(t *testing.T, at uintptr) string {
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	there := false
	for lines := bufio.NewScanner(bytes.NewReader(smaps)); lines.Scan(); {
		var from, to uintptr
		if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &from, &to); n == 2 {
			there = from <= at && at < to
		} else if flags, ok := strings.CutPrefix(lines.Text(), "VmFlags:"); ok && there {
			return flags + " "
		}
	}
	t.Fatalf("no VmFlags for address %x", at)
	return ""
}
