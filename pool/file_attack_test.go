package pool

import (
	"fmt"
	"runtime"
	"strings"
	"testing"
)

// allocated returns how many bytes f allocates.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// TestEndpointsFileBounds: endpoints files that would take gigabytes are refused before they are parsed.
func TestEndpointsFileBounds(t *testing.T) {
	const (
		million = 1_000_000
		entry   = `{"name": "a", "address": "10.0.0.1:8000"}`
	)
	for what, text := range map[string]string{
		"a million entries":             "endpoints:\n" + strings.Repeat("- "+entry+"\n", million),
		"a million entries in one line": "endpoints: [" + strings.Repeat(entry+", ", million) + "]",
		"a million entries in JSON":     `{"endpoints":[` + strings.Repeat(entry+",", million) + "]}",
		"200,000 entries":               "endpoints:\n" + strings.Repeat("- "+entry+"\n", 200_000),
		"two million aliases":           "endpoints:\n- &a " + entry + "\n" + strings.Repeat("- *a\n", 2*million),
		"empty lists":                   "endpoints: [" + strings.Repeat("[],", 2*million) + "]",
		"keys without values":           "endpoints:\n- {" + strings.Repeat("? ,", 2*million) + "}\n",
	} {
		var err error
		took := allocated(func() { _, err = ParseFile([]byte(text)) })
		if err == nil || took > uint64(2*len(text)+(1<<20)) {
			t.Errorf("%s: %.200v; parsing %d bytes allocates %d", what, err, len(text), took)
		}
	}
}

// TestEndpointsFileBombs: a small file that stands for a large one is refused, and takes little memory.
func TestEndpointsFileBombs(t *testing.T) {
	var laughs strings.Builder
	laughs.WriteString("x0: &x0 {name: a}\n")
	for i := range 30 {
		fmt.Fprintf(&laughs, "x%d: &x%d [*x%d, *x%d, *x%d, *x%d]\n", i+1, i+1, i, i, i, i)
	}
	merged := "endpoints:\n- &m0 {name: a, address: \"10.0.0.1:8000\"}\n"
	for i := range 30 {
		merged += fmt.Sprintf("- &m%d {<<: [*m%d, *m%d, *m%d]}\n", i+1, i, i, i)
	}
	for what, text := range map[string]string{
		"aliases":        laughs.String() + "endpoints: *x30\n",
		"merged aliases": merged,
		"a cycle":        "endpoints: &a\n- *a\n",
		"a merged cycle": "endpoints:\n- &a {<<: *a, name: a}\n",
		"deep lists":     "endpoints: " + strings.Repeat("[", 500_000),
		"deep mappings":  "endpoints: " + strings.Repeat("{a: ", 200_000),
		"deep sequences": "endpoints:\n" + strings.Repeat("- ", 400_000),
		"a long key":     "endpoints:\n- {" + strings.Repeat("k", 10<<20) + ": 1}\n",
	} {
		var err error
		took := allocated(func() { _, err = ParseFile([]byte(text)) })
		if err == nil || took > 256<<20 || len(err.Error()) > 2000 {
			t.Errorf("%s: %.200v; %d bytes allocated", what, err, took)
		}
	}
}

// TestLargestEndpointsFile: as many workers as kvepp routes to, with all that an entry usually says, are accepted.
func TestLargestEndpointsFile(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	var text strings.Builder
	text.WriteString("endpoints:\n")
	for i := range maxWorkers {
		fmt.Fprintf(&text, "- name: vllm-qwen3-8b-%d\n  address: \"10.%d.%d.%d:8000\"\n  instanceId: %d\n"+
			"  kvEvents: \"tcp://10.0.0.1:5557\"\n  kvReplay: \"tcp://10.0.0.1:5558\"\n  model: Qwen/Qwen3-8B\n"+
			"  blockSize: 16\n  totalKvBlocks: 10000\n  role: aggregated\n", i, i>>16, i>>8&255, i&255, i+1)
	}
	entries, err := ParseFile([]byte(text.String()))
	if err != nil || len(entries) != maxWorkers || text.Len() > MaxFile {
		t.Errorf("%d entries of %d, %d bytes: %.200v", len(entries), maxWorkers, text.Len(), err)
	}
}
