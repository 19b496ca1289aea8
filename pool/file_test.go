package pool

import (
	"bytes"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"kvepp/kvblock"
)

const full = `endpoints:
- name: worker-0
  address: 127.0.0.1:8001
  instanceId: 11820826700540128610
  role: decode
  dataParallelStartRank: 2
  dataParallelSize: 4
  kvEvents: tcp://127.0.0.1:5557
  kvReplay: tcp://[::1]:5657
  kvTopic: kv
  metrics: http://127.0.0.1:8081/metrics
  blockSize: 16
  totalKvBlocks: 4096
  maxNumBatchedTokens: 8192
  model: qwen
  deviceType: cuda
  taints: [a, b]
  eagleDrop: windows
  cordoned: true
- name: worker-1
  address: "[fd00::7]:8001"
  dynamo: ns/backend/generate
- {name: worker-2, address: "gpu-2.example:8000"}
- {name: prefill, role: prefill, dynamo: ns/prefill/generate, allInstances: true}
`

func TestParseFile(t *testing.T) {
	entries, err := ParseFile([]byte(full))
	if err != nil {
		t.Fatal(err)
	}
	e := entries[0]
	if e.InstanceID != 11820826700540128610 || e.Role != Decode || e.DataParallelStartRank != 2 ||
		e.DataParallelSize != 4 ||
		e.KVEvents != "tcp://127.0.0.1:5557" || e.KVReplay != "tcp://[::1]:5657" || e.KVTopic != "kv" ||
		e.Metrics != "http://127.0.0.1:8081/metrics" || e.BlockSize != 16 ||
		e.TotalKVBlocks != 4096 || e.MaxNumBatchedTokens != 8192 || e.Model != "qwen" ||
		e.DeviceType != "cuda" ||
		len(e.Taints) != 2 ||
		e.CordonedBy != CordonedByFile {
		t.Errorf("worker-0: %+v", e)
	}
	if e := entries[1]; e.Dynamo != "ns/backend/generate" || e.InstanceID != 0 || e.Role != Aggregated ||
		e.DataParallelSize != 1 ||
		e.CordonedBy != "" {
		t.Errorf("worker-1: %+v", e)
	}
	if e := entries[2]; e.InstanceID != kvblock.InstanceID("worker-2") || e.InstanceID == 0 {
		t.Errorf("worker-2 has the instance id %d, want the one that Dynamo derives from its name", e.InstanceID)
	}
	if e := entries[3]; e.Role != Prefill || e.Address != "" || !e.AllInstances || e.Dynamo != "ns/prefill/generate" {
		t.Errorf("prefill: %+v", e)
	}
	if entries, err := ParseFile([]byte("endpoints: []\n")); err != nil || len(entries) != 0 {
		t.Errorf("an empty list: %v, %v", entries, err)
	}
}

func TestEAGLEDrop(t *testing.T) {
	entries, err := ParseFile([]byte(full))
	if err != nil || entries[0].EAGLEDrop != kvblock.EAGLEDropWindows || entries[1].EAGLEDrop != 0 {
		t.Errorf("%v, %+v", err, entries)
	}
}

// manyRanks returns a file of n endpoints with 1,024 ranks and three lines each.
func manyRanks(n int) string {
	var b strings.Builder
	b.WriteString("endpoints:\n")
	for i := range n {
		fmt.Fprintf(&b, "- name: w%d\n  address: 10.0.0.1:8000\n  dataParallelSize: 1024\n", i)
	}
	return b.String()
}

func TestParseFileRefuses(t *testing.T) {
	const head = "endpoints:\n- name: a\n  address: 10.0.0.1:8000\n"
	for _, c := range []struct{ name, text, line, says string }{
		{"an empty file", "", "", "empty"},
		{"no list", "endpoints:\n", "", "no list"},
		{"another key", "endpoint: []\n", "line 1", `"endpoint" is not a key`},
		{"an unknown key", head + "  blocksize: 16\n", "line 4", `"blocksize" is not a key of an endpoint`},
		{"no YAML", "endpoints: [", "line 1", ""},
		{"two documents", head + "---\nendpoints: []\n", "", "more than one"},
		{"a list of text", "endpoints:\n- worker-0\n", "line 2", ""},
		{"no name", "endpoints:\n- address: 10.0.0.1:8000\n", "line 2", "name"},
		{"a name twice", head + "- name: a\n  address: 10.0.0.2:8000\n", "line 4",
			`"a" is taken by the endpoint of line 2`},
		{"no address", "endpoints:\n- name: a\n", "line 2", "address"},
		{"no address of a decode worker", "endpoints:\n- name: a\n  role: decode\n", "line 2", "address"},
		{"a page without a scheme", head + "  metrics: 10.0.0.1:9090/metrics\n", "line 4", "http://HOST:PORT/metrics"},
		{"a page of another scheme", head + "  metrics: ftp://10.0.0.1/metrics\n", "line 4",
			"http://HOST:PORT/metrics"},
		{"one page for all instances", head +
			"  dynamo: a/b/c\n  allInstances: true\n  metrics: http://10.0.0.1/metrics\n", "line 6", "one worker's"},
		{"all instances of nothing", head + "  allInstances: true\n", "line 4", "dynamo path"},
		{"one socket for all instances",
			head + "  dynamo: a/b/c\n  allInstances: true\n  kvEvents: tcp://10.0.0.1:5557\n", "line 5", "event plane"},
		{"an address without port", "endpoints:\n- name: a\n  address: 10.0.0.1\n", "line 3", "HOST:PORT"},
		{"a port out of range", "endpoints:\n- name: a\n  address: 10.0.0.1:80000\n", "line 3", "1 to 65535"},
		{"an address to bind", head + "  kvEvents: tcp://*:5557\n", "line 4", "has no host"},
		{"an event address without tcp", head + "  kvEvents: 10.0.0.1:5557\n", "line 4", "tcp://HOST:PORT"},
		{"more ranks than ports", head + "  dataParallelSize: 8\n  kvEvents: tcp://10.0.0.1:65530\n", "line 5",
			"8 ranks"},
		{"several ranks at an address of one", head + "  dataParallelSize: 2\n  rankByAddress: true\n", "line 5",
			"serves one rank"},
		{"too many ranks", head + "  dataParallelSize: 4000000000\n", "line 4", "out of range"},
		{"too many workers", manyRanks(65), "line 194", "more than 65536 workers"},
		{"a role that is none", head + "  role: both\n", "line 4", `"both" is none of`},
		{"a block size out of range", head + "  blockSize: 1048577\n", "line 4", "at most 1048576 tokens"},
		{"a negative block size", head + "  blockSize: -1\n", "line 4", "negative"},
		{"an id and a path", head + "  instanceId: 1\n  dynamo: a/b/c\n", "line 4", "leave out one"},
		{"an id out of range", head + "  instanceId: 18446744073709551616\n", "line 4", ""},
		{"half a path", head + "  dynamo: a/b\n", "line 4", "NAMESPACE/COMPONENT/ENDPOINT"},
		{"a path twice", head + "  dynamo: a/b/c\n- name: b\n  address: 10.0.0.2:8000\n  dynamo: a/b/c\n", "line 5",
			`joins a/b/c as "a" does`},
	} {
		_, err := ParseFile([]byte(c.text))
		if err == nil {
			t.Errorf("%s was accepted", c.name)
		} else if !strings.Contains(err.Error(), c.line) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %q, want one with %q and %q", c.name, err, c.line, c.says)
		}
	}
}

// TestParseFileErrors compares the texts of errors that package yaml finds. They must not name Go types.
func TestParseFileErrors(t *testing.T) {
	const head = "endpoints:\n- name: a\n  address: 10.0.0.1:8000\n"
	for text, want := range map[string]string{
		"endpoint:\n- name: a\n": `line 1: "endpoint" is not a key of the ` +
			`endpoints file: the only key is "endpoints"; did you mean endpoints?`,
		"- name: a\n": `line 1: the file must have the key ` +
			`"endpoints:" with a list below it`,
		"endpoints: worker-0\n": `line 1: endpoints: must be a list, for ` +
			`example [{name: worker-0, address: "10.0.0.7:8000"}]`,
		"endpoints:\n  name: a\n": `line 2: endpoints: must be a list, for ` +
			`example [{name: worker-0, address: "10.0.0.7:8000"}]`,
		"endpoints:\n- worker-0\n": `line 2: an endpoint must be a ` +
			`mapping, for example {name: worker-0, address: "10.0.0.7:8000"}`,
		head + "  adress: b\n": `line 4: "adress" is not a key of an ` +
			`endpoint; did you mean address?`,
		head + "  block_size: 16\n": `line 4: "block_size" is not a key of an ` +
			`endpoint; did you mean blockSize?`,
		head + "  weight: 16\n": `line 4: "weight" is not a key of an endpoint`,
		head + "  blockSize: 16k\n": `line 4: blockSize: must be a whole number, ` +
			`for example blockSize: 16`,
		head + "  blockSize: 16.5\n": `line 4: blockSize: must be a whole number, ` +
			`for example blockSize: 16`,
		head + "  blockSize: [16]\n": `line 4: blockSize: must be a whole number, ` +
			`for example blockSize: 16`,
		head + "  dataParallelSize: -1\n": `line 4: dataParallelSize: must be a whole ` +
			`number of at least 0, for example dataParallelSize: 2`,
		head + "  dataParallelSize: 8589934592\n": `line 4: dataParallelSize: must be a whole ` +
			`number of at least 0, for example dataParallelSize: 2`,
		head + "  allInstances: maybe\n": `line 4: allInstances: must be true or false, ` +
			`for example allInstances: true`,
		head + "  cordoned: maybe\n": `line 4: cordoned: must be true or false, for ` +
			`example cordoned: true`,
		head + "  taints: zone-a\n": `line 4: taints: must be a list of text, for ` +
			`example taints: [zone-a, fast]`,
		head + "  instanceId: 0x10\n": `line 4: instanceId: must be a decimal number ` +
			`of at most 64 bits, for example instanceId: 1234567890`,
		head + "  instanceId: 18446744073709551616\n": `line 4: instanceId: must be a decimal number ` +
			`of at most 64 bits, for example instanceId: 1234567890`,
		head + "  model: {name: qwen}\n": `line 4: model: must be text, for example ` +
			`model: qwen`,
		head + "  kvEvents:\n  - tcp://10.0.0.1:5557\n": `line 5: kvEvents: must be text, for example ` +
			`kvEvents: tcp://10.0.0.7:5557`,
		head + "  role: decoder\n": `line 4: role: "decoder" is none of ` +
			`aggregated, prefill, decode; did you mean decode?`,
		head + "  eagleDrop: ful\n": `line 4: eagleDrop: "ful" is none of ` +
			`none, full, windows, all; did you mean full?`,
		head + "  name: b\n": `line 4: name: already given in line 2`,
		"endpoints:\n- &a {name: a, address: \"10.0.0.1:1\", x: 1}\n": `line 2: "x" is not a key of an endpoint`,
		"endpoints:\n- <<: &a {name: a, port: 1}\n":                   `line 2: "port" is not a key of an endpoint`,
		"endpoints:\n- &a {<<: *a, blockSize: x}\n": `line 2: blockSize: must be a whole number, ` +
			`for example blockSize: 16`,
		"endpoints:\n\t- name: a\n": `line 2: not valid YAML: found character that ` +
			`cannot start any token (YAML is indented with spaces, not with tabs)`,
		"endpoints: [\n": `line 1: not valid YAML: did not find ` +
			`expected node content`,
		"endpoints:\n- *a\n": `not valid YAML: unknown anchor 'a' referenced`,
	} {
		if _, err := ParseFile([]byte(text)); err == nil || err.Error() != want {
			t.Errorf("%q:\n%v\nwant\n%s", text, err, want)
		}
	}
}

// TestKeysHaveExamples checks that the example of each key is valid in a file.
func TestKeysHaveExamples(t *testing.T) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[fileEntry]()) {
		key, example := f.Tag.Get("yaml"), f.Tag.Get("example")
		var e fileEntry
		if err := yaml.Unmarshal([]byte(key+": "+example), &e); err != nil || example == "" {
			t.Errorf("%s: the example %s is not valid: %v", key, example, err)
		}
	}
}

// FuzzParseFile looks for panics and for accepted endpoints with invalid addresses.
func FuzzParseFile(f *testing.F) {
	f.Add([]byte(full))
	f.Add([]byte("endpoints:\n- &a {name: a, address: '1:1'}\n- *a\n"))
	f.Add([]byte("endpoints: {}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		entries, err := ParseFile(text)
		if err != nil {
			if says := err.Error(); strings.Contains(says, "unmarshal") || strings.Contains(says, "pool.") ||
				strings.Contains(says, "struct") && !bytes.Contains(text, []byte("struct")) {
				t.Errorf("an error names a Go type: %s", says)
			}
			return
		}
		names := map[string]bool{}
		for _, e := range entries {
			if e.Name == "" || names[e.Name] ||
				checkHostPort(e.Address, 1) != nil && (e.Address != "" || e.Role != Prefill) ||
				e.DataParallelSize < 1 ||
				e.DataParallelSize > MaxRanks {
				t.Errorf("accepted: %+v", e)
			}
			names[e.Name] = true
		}
	})
}

func TestRankByAddress(t *testing.T) {
	entries, err := ParseFile(
		[]byte(
			"endpoints:\n- {name: a, address: \"10.0.0.1:8000\", dataParallelStartRank: 3, rankByAddress: true}\n- " +
				"{name: b, address: \"10.0.0.1:8001\"}\n",
		),
	)
	if err != nil || !entries[0].RankByAddress || entries[0].DataParallelStartRank != 3 || entries[1].RankByAddress {
		t.Errorf("%+v, %v", entries, err)
	}
}
