package dynamo

import (
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvepp/pool"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// store writes records as Dynamo's file store does.
type store struct {
	t   *testing.T
	dir string
}

func (s store) put(bucket, path string, id uint64, record string, touched time.Time) string {
	s.t.Helper()
	dir := filepath.Join(s.dir, "v1", bucket)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		s.t.Fatal(err)
	}
	file := filepath.Join(dir, url.PathEscape(fmt.Sprintf("%s/%x", path, id)))
	if err := os.WriteFile(file, []byte(record), 0o644); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Chtimes(file, touched, touched); err != nil {
		s.t.Fatal(err)
	}
	return file
}

// instance writes a record of v1/instances as a worker of Dynamo 1.6.1 does.
func (s store) instance(ns string, id uint64, touched time.Time) string {
	return s.put("instances", ns+"/backend/generate", id, fmt.Sprintf(
		`{"type":"Endpoint","component":"backend","endpoint":"generate","namespace":%q,"instance_id":%d,`+
			`"transport":{"tcp":"127.0.0.1:37007/x"},"device_type":"cuda","request_plane_codec":"msgpack"}`, ns, id),
		touched)
}

// card writes a record of v1/mdc, with the fields that kvepp reads and some others.
func (s store) card(ns string, id uint64, blockSize int, touched time.Time) {
	s.put("mdc", ns+"/backend/generate", id, fmt.Sprintf(
		`{"type":"Model","namespace":%q,"component":"backend","endpoint":"generate","instance_id":%d,"card_json":{`+
			`"display_name":"tiny","kv_cache_block_size":%d,"worker_type":"aggregated","needs":[],"runtime_config":{`+
			`"total_kv_blocks":2048,"max_num_batched_tokens":8192,"data_parallel_start_rank":0,"data_parallel_size":2,`+
			`"enable_eagle":true,"tool_call_parser":null}}}`, ns, id, blockSize), touched)
}

func TestScan(t *testing.T) {
	now := time.Now()
	s := store{t, t.TempDir()}
	reader := NewFileStore(s.dir, quiet)
	if got := reader.scan(now); len(got) != 0 {
		t.Fatalf("a store that does not exist yet: %v", got)
	}
	const id = 12510495253119935035 // above 2^53 and 2^63
	s.instance("w0", id, now)
	s.card("w0", id, 16, now)
	s.instance("w1", 2, now) // without its card yet
	dead := s.instance("w2", 3, now.Add(-lease-time.Second))
	s.card("w2", 3, 16, now)
	s.put("instances", "broken", 4, "{", now)
	s.put("instances", "incomplete", 5, `{"namespace":"x"}`, now)
	s.put("mdc", "broken", 6, "[]", now)
	got := reader.scan(now)
	if len(got) != 2 || got[0].Path != "w0/backend/generate" || got[0].InstanceID != id || got[1].Card != nil {
		t.Fatalf("scan: %+v", got)
	}
	c := got[0].Card
	if c == nil || c.Model != "tiny" || c.BlockSize != 16 || c.TotalKVBlocks != 2048 || c.MaxNumBatchedTokens != 8192 ||
		c.DataParallelSize != 2 || !c.EAGLE || c.Role != pool.Aggregated {
		t.Errorf("card: %+v", c)
	}
	s.put(
		"mdc",
		"w1/backend/generate",
		2,
		`{"namespace":"w1","component":"backend","endpoint":"generate","instance_id":2,"card_json":{`+
			`"kv_cache_block_size":32,"runtime_config":{"reasoning_parser":"qwen3",`+
			`"tool_call_arguments_format":"json_string",`+
			`"exclude_tools_when_tool_choice_none":false}}}`,
		now,
	)
	if got := reader.scan(now); got[1].Card == nil || !strings.Contains(string(got[1].Card.RuntimeConfig), `"qwen3"`) ||
		got[0].Card.RuntimeConfig == nil {
		t.Errorf("settings of the workers: %+v", got)
	}
	s.card("w1", 2, 32, now.Add(time.Millisecond))
	if err := os.Chtimes(dead, now, now); err != nil { // it was only slow to touch its record
		t.Fatal(err)
	}
	if got := reader.scan(now); len(got) != 3 || got[1].Card.BlockSize != 32 {
		t.Errorf("after a card and a revival: %+v", got)
	}
	s.card("w1", 2, 64, now.Add(time.Second))
	if got := reader.scan(now); got[1].Card.BlockSize != 64 {
		t.Errorf("a changed card is not read again: %+v", got[1].Card)
	}
	if got := reader.scan(now.Add(lease + 2*time.Second)); len(got) != 0 {
		t.Errorf("instances whose leases have ended are alive: %+v", got)
	}
	if len(reader.loggedErrors) != 0 || len(reader.cards) != 0 {
		t.Errorf("errors or cards of removed records are kept: %v %v", reader.loggedErrors, reader.cards)
	}
}

func TestJoin(t *testing.T) {
	now := time.Now()
	s := store{t, t.TempDir()}
	s.instance("w0", 1, now.Add(-5*time.Second)) // killed five seconds ago; its lease has not ended
	s.card("w0", 1, 16, now)
	s.instance("w0", 2, now)
	s.card("w0", 2, 16, now)
	s.instance("w1", 3, now)
	reader := NewFileStore(s.dir, quiet)
	entries, err := pool.ParseFile([]byte(`endpoints:
- {name: fixed, address: "10.0.0.1:1", instanceId: 9}
- {name: joined, address: "10.0.0.1:2", dynamo: w0/backend/generate, maxNumBatchedTokens: 100}
- {name: cardless, address: "10.0.0.1:3", dynamo: w1/backend/generate}
- {name: absent, address: "10.0.0.1:4", dynamo: w2/backend/generate}
`))
	if err != nil {
		t.Fatal(err)
	}
	got := Join(entries, reader.scan(now))
	if len(got) != 2 || got[0].InstanceID != 9 || got[1].Name != "joined" {
		t.Fatalf("joined: %+v", got)
	}
	j := got[1]
	if j.InstanceID != 2 || j.BlockSize != 16 || j.TotalKVBlocks != 2048 || j.DataParallelSize != 2 ||
		j.Model != "tiny" ||
		!j.EAGLE ||
		j.DeviceType != "cuda" {
		t.Errorf("want the live one of two instances, completed by its card: %+v", j)
	}
	if j.MaxNumBatchedTokens != 100 {
		t.Errorf("the file's value must take precedence over the card's: %d", j.MaxNumBatchedTokens)
	}
	// A third instance appears while the second is alive: the worker was restarted at once.
	s.instance("w0", 4, now.Add(-time.Hour))
	s.instance("w0", 4, now)
	s.card("w0", 4, 16, now)
	if got := Join(entries, reader.scan(now.Add(time.Second))); got[1].InstanceID != 4 {
		t.Errorf("of three instances: %d, want the one seen last", got[1].InstanceID)
	}
}

// TestJoinAllInstances: an entry with allInstances becomes an endpoint for each instance, with the role and namespace
// from discovery.
func TestJoinAllInstances(t *testing.T) {
	now := time.Now()
	s := store{t, t.TempDir()}
	for id := range uint64(3) {
		s.instance("ns", 0x1a0+id, now)
	}
	s.card("ns", 0x1a0, 16, now)
	s.card("ns", 0x1a2, 16, now)
	reader := NewFileStore(s.dir, quiet)
	entries, err := pool.ParseFile([]byte(`endpoints:
- {name: p, role: prefill, dynamo: ns/backend/generate, allInstances: true, maxNumBatchedTokens: 100}
- {name: known, address: "10.0.0.1:1", instanceId: 417}
- {name: unknown, address: "10.0.0.1:1", instanceId: 9}
`))
	if err != nil {
		t.Fatal(err)
	}
	got := Join(entries, reader.scan(now))
	if len(got) != 4 {
		t.Fatalf("joined: %+v", got)
	}
	for i, want := range []struct {
		name, namespace string
		id              uint64
	}{{"p:1a0", "ns", 0x1a0}, {"p:1a2", "ns", 0x1a2}, {"known", "ns", 0x1a1}, {"unknown", "", 9}} {
		if e := got[i]; e.Name != want.name || e.Namespace != want.namespace || e.InstanceID != want.id {
			t.Errorf("%d: %+v, want %+v", i, e, want)
		}
	}
	if e := got[1]; e.Role != pool.Prefill || e.BlockSize != 16 || e.MaxNumBatchedTokens != 100 {
		t.Errorf("an instance is not completed by its card: %+v", e)
	}
	// Only a card tells the block size of a worker whose events are on the event plane.
	s.card("ns", 0x1a1, 32, now)
	if e := Join(entries, reader.scan(now))[3]; e.Name != "known" || e.InstanceID != 0x1a1 || e.BlockSize != 32 ||
		e.TotalKVBlocks != 2048 || e.DataParallelSize != 2 || e.Model != "tiny" {
		t.Errorf("an entry that names an instance is not completed by its card: %+v", e)
	}
}

func TestRoles(t *testing.T) {
	for card, want := range map[string]pool.Role{
		`{"worker_type":"prefill"}`:    pool.Prefill,
		`{"worker_type":"decode"}`:     pool.Decode,
		`{"worker_type":"encode"}`:     pool.Encode,
		`{"worker_type":"aggregated"}`: pool.Aggregated,
		`{"worker_type":"unknown"}`:    pool.Aggregated,
		`{}`:                           pool.Aggregated,
		`{"model_type":"Prefill"}`:     pool.Prefill, // from before worker_type
		`{"worker_type":null,"model_type":"Chat|Completions"}`: pool.Aggregated,
		`{"worker_type":"decode","model_type":"Prefill"}`:      pool.Decode,
	} {
		_, _, c, err := parseCard([]byte(`{"instance_id":1,"card_json":` + card + `}`))
		if err != nil {
			t.Errorf("%s: %v", card, err)
			continue
		}
		if got := Complete(pool.Endpoint{Role: pool.Aggregated}, &Instance{Card: c}).Role; got != want {
			t.Errorf("%s: role %q, want %q", card, got, want)
		}
		if got := Complete(pool.Endpoint{Role: pool.Decode}, &Instance{Card: c}).Role; got != pool.Decode {
			t.Errorf("%s: role %q, but the file says decode", card, got)
		}
	}
}

// TestTransfer: a prefill worker's card may restrict the decode workers for its blocks.
func TestTransfer(t *testing.T) {
	const zone = `"topology_domains":{"zone":"z1","rack":"r7"},"kv_transfer_domain":"zone"`
	for _, c := range []struct {
		worker, runtime string
		want            pool.Transfer
		refused         bool
	}{
		{"prefill", `"topology_domains":{"zone":"z1"}`, pool.Transfer{}, false},
		{"prefill", zone + `,"kv_transfer_enforcement":"required"`,
			pool.Transfer{Taint: "dynamo.topology/zone=z1", Required: true}, false},
		{"prefill", zone + `,"kv_transfer_enforcement":"preferred","kv_transfer_preferred_weight":0.85`,
			pool.Transfer{Taint: "dynamo.topology/zone=z1", Weight: 0.85}, false},
		{"prefill", zone + `,"kv_transfer_enforcement":"preferred"`, pool.Transfer{}, true},
		{"prefill", zone, pool.Transfer{}, true},
		{"prefill", `"topology_domains":{"rack":"r7"},"kv_transfer_domain":"zone","kv_transfer_enforcement":"required"`,
			pool.Transfer{}, true},
		{"decode", zone, pool.Transfer{}, false}, // only a prefill worker's card is read
	} {
		_, _, card, err := parseCard(
			[]byte(
				`{"instance_id":1,"card_json":{"worker_type":"` + c.worker + `","runtime_config":{` + c.runtime + `}}}`,
			),
		)
		switch {
		case c.refused:
			if err == nil || !strings.Contains(err.Error(), "kv_transfer_domain") {
				t.Errorf("%s: %v", c.runtime, err)
			}
		case err != nil:
			t.Errorf("%s: %v", c.runtime, err)
		default:
			if got := Complete(pool.Endpoint{}, &Instance{Card: card}).Transfer; got != c.want {
				t.Errorf("%s: %+v, want %+v", c.runtime, got, c.want)
			}
		}
	}
}

// TestCardsOutOfRange: cards with impossible values are refused, because each rank costs a worker.
func TestCardsOutOfRange(t *testing.T) {
	for _, c := range []struct{ card, says string }{
		{`{"kv_cache_block_size":-1}`, "kv_cache_block_size"},
		{`{"kv_cache_block_size":1048577}`, "kv_cache_block_size"},
		{`{"runtime_config":{"data_parallel_size":4294967295}}`, "data_parallel_size"},
	} {
		if _, _, _, err := parseCard([]byte(`{"instance_id":1,"card_json":` + c.card + `}`)); err == nil ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.card, err)
		}
	}
}

// FuzzRecords looks for panics, and for an instance without a path or a card without its fields.
func FuzzRecords(f *testing.F) {
	f.Add(
		[]byte(`{"namespace":"a","component":"b","endpoint":"c","instance_id":1,"card_json":{"runtime_config":null}}`),
	)
	f.Add([]byte(`{"instance_id":-1,"card_json":[]}`))
	f.Fuzz(func(t *testing.T, record []byte) {
		if in, err := parseInstance(record); err == nil && len(in.Path) < len("a/b/c") {
			t.Errorf("path %q of an instance", in.Path)
		}
		parseCard(record)
	})
}
