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

// An index asks the kernel for big pages.
func TestBigPages(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/mm/transparent_hugepage"); err != nil {
		t.Logf("this kernel has no big pages to ask for: %v", err)
		return
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
			t.Errorf("%s: flags are %q, without hg", what, flags)
		}
	}
}

// flagsAt returns what the kernel was told of the memory at an address.
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
	t.Fatalf("no flags of the memory at %x", at)
	return ""
}
