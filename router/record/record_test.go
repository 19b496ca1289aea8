package record

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
)

var began = time.UnixMilli(1_795_399_227_978)

func request(hashes ...kvblock.SequenceHash) *Request {
	return &Request{
		Model:     `a "model"`,
		Received:  began,
		First:     began.Add(20 * time.Millisecond),
		Ended:     began.Add(100 * time.Millisecond),
		Prompt:    4*len(hashes) + 3,
		Output:    5,
		Cached:    -1,
		BlockSize: 4,
		Hashes:    hashes,
		Prefill:   Worker{18446744073709551615, 1},
		Decode:    Worker{7, 0},
	}
}

func opened(t *testing.T, o Config) (*Recorder, *logtest.Log) {
	t.Helper()
	var log logtest.Log
	if o.Path == "" {
		o.Path = filepath.Join(t.TempDir(), "trace.jsonl")
	}
	if o.Files == 0 {
		o.Files, o.MaxBytes = 1, 1<<20
	}
	r, err := open(o, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	return r, &log
}

func content(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestLine: a line has the fields of Dynamo's trace, and the file is for its owner only.
func TestLine(t *testing.T) {
	r, _ := opened(t, Config{plain: true})
	r.Add(request(11, 18446744073709551614))
	r.Close(time.Minute)
	want := `{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_end",` +
		`"event_time_unix_ms":1795399228078,"event_source":"kvepp","request":{"request_id":"kvepp-1",` +
		`"model":"a \"model\"","input_tokens":11,"output_tokens":5,"request_received_ms":1795399227978,` +
		`"ttft_ms":20,"avg_itl_ms":20,"total_time_ms":100,"worker":{"prefill_worker_id":18446744073709551615,` +
		`"prefill_dp_rank":1,"decode_worker_id":7,"decode_dp_rank":0},"replay":{"trace_block_size":4,` +
		`"input_length":11,"input_sequence_hashes":[11,18446744073709551614]}}}}` + "\n"
	if got := content(t, r.config.Path); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
	if info, err := os.Stat(r.config.Path); err != nil || info.Mode() != 0o600 {
		t.Error(info.Mode(), err)
	}
}

// TestShadowLine: in shadow a line says why kvepp would have avoided the worker, or could not compare the choices.
func TestShadowLine(t *testing.T) {
	r, _ := opened(t, Config{plain: true})
	judged, unjudged := request(1), request(1)
	judged.Avoided, unjudged.Unjudged = "ejected", "several_workers"
	r.Add(judged)
	r.Add(unjudged)
	r.Unjudged("no_address")
	r.Close(time.Minute)
	if n := r.Counts.Written.Load(); n != 2 {
		t.Errorf("%d requests are written, want 2", n)
	}
	got := content(t, r.config.Path)
	for _, want := range []string{`"decode_dp_rank":0},"shadow":{"unjudged":"","avoided":"ejected"},"replay":{`,
		`},"shadow":{"unjudged":"several_workers","avoided":""},"replay":{`,
		`"event_type":"kvepp_unjudged",`, `"request":{"shadow":{"unjudged":"no_address"}}}}` + "\n"} {
		if strings.Count(got, want) != 1 {
			t.Errorf("%s\nhas not %s", got, want)
		}
	}
}

// TestKeyedHashes: equal blocks stay equal within a Recorder, are not those of KV events, and differ between Recorders.
func TestKeyedHashes(t *testing.T) {
	seen := map[uint64]bool{1: true, 2: true}
	for range 2 {
		r, _ := opened(t, Config{})
		r.Add(request(1, 2))
		r.Add(request(1, 2))
		r.Close(time.Minute)
		var hashes []uint64
		for line := range strings.Lines(content(t, r.config.Path)) {
			var row struct {
				Event struct {
					Request struct {
						Replay struct {
							Hashes []uint64 `json:"input_sequence_hashes"`
						}
					}
				}
			}
			if err := json.Unmarshal([]byte(line), &row); err != nil {
				t.Fatal(err)
			}
			hashes = append(hashes, row.Event.Request.Replay.Hashes...)
		}
		if len(hashes) != 4 || hashes[0] != hashes[2] || hashes[1] != hashes[3] || hashes[0] == hashes[1] {
			t.Fatal(hashes)
		}
		for _, h := range hashes[:2] {
			if seen[h] {
				t.Errorf("%d again", h)
			}
			seen[h] = true
		}
	}
}

// TestRolls: files are rolled and the oldest removed; all together stay within the bound. A file that was there is kept
// as an older one.
func TestRolls(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.WriteFile(path, []byte("before\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	r, _ := opened(t, Config{Path: path, MaxBytes: 6000, Files: 3})
	if got := content(t, path+".1"); got != "before\n" {
		t.Errorf("%q", got)
	}
	const n = 100
	for range n {
		r.Add(request(1, 2, 3))
	}
	r.Close(time.Minute)
	var all, lines int
	for _, name := range []string{path, path + ".1", path + ".2"} {
		text := content(t, name)
		all += len(text)
		lines += strings.Count(text, "\n")
		if len(text) > 2000 || !strings.HasSuffix(text, "]}}}}\n") {
			t.Errorf("%s: %d bytes, %.30q", name, len(text), text)
		}
		if info, err := os.Stat(name); err != nil || info.Mode() != 0o600 {
			t.Error(info.Mode(), err)
		}
	}
	if _, err := os.Stat(path + ".3"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a fourth file")
	}
	got := r.Counts.Written.Load()
	if got != n || lines == 0 || !strings.Contains(content(t, path), fmt.Sprint("kvepp-", n)) {
		t.Errorf("%d written, %d lines left", got, lines)
	}
}

// TestFullDisk: the first error stops recording; it is logged once, and requests are counted.
func TestFullDisk(t *testing.T) {
	r, log := opened(t, Config{Path: "/dev/full"})
	for range 3 {
		r.Add(request(1))
	}
	for deadline := time.Now().Add(time.Minute); r.Counts.Failed.Load() < 3; {
		if time.Now().After(deadline) {
			t.Fatal("no error from a full disk")
		}
	}
	r.Add(request(1))
	r.Close(time.Minute)
	if r.Counts.Failed.Load() != 4 || r.Counts.Written.Load() != 0 || log.Count("recording has stopped") != 1 ||
		log.Count(syscall.ENOSPC.Error()) != 1 {
		t.Errorf("%d failed, %d written, log:\n%s", r.Counts.Failed.Load(), r.Counts.Written.Load(), log)
	}
}

// TestRollFails: if the files cannot be rolled, recording stops.
func TestRollFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	if err := os.MkdirAll(filepath.Join(path+".1", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	r, log := opened(t, Config{Path: path, MaxBytes: 2000, Files: 2})
	for range 10 {
		r.Add(request(1))
	}
	r.Close(time.Minute)
	written := r.Counts.Written.Load()
	if written == 0 || written+r.Counts.Failed.Load() != 10 || log.Count("recording has stopped") != 1 ||
		int64(strings.Count(content(t, path), "\n")) != written {
		t.Errorf("%d written, %d failed, log:\n%s", written, r.Counts.Failed.Load(), log)
	}
}

// TestSkipped: what cannot be replayed is not recorded.
func TestSkipped(t *testing.T) {
	r, _ := opened(t, Config{})
	r.Add(request(1))
	other, silent, short := request(1), request(1), request(1)
	other.BlockSize, other.Prompt = 8, 9
	silent.Output = 0
	short.Prompt = 8
	for _, q := range []*Request{other, silent, short} {
		r.Add(q)
	}
	r.Close(time.Minute)
	if r.Counts.Skipped.Load() != 3 || r.Counts.Written.Load() != 1 {
		t.Errorf("%d skipped, %d written", r.Counts.Skipped.Load(), r.Counts.Written.Load())
	}
}

// TestSlowDisk: a file that takes nothing delays no request; what does not fit into the queue is dropped.
func TestSlowDisk(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	reader, err := os.OpenFile(path, os.O_RDWR, 0) // it never reads
	if err != nil {
		t.Fatal(err)
	}
	r, log := opened(t, Config{Path: path, MaxBytes: 1 << 40, Files: 1})
	big := make([]kvblock.SequenceHash, maxQueuedHashes/16)
	for range 100 {
		r.Add(request(big...))
	}
	if n := r.Counts.Dropped.Load(); n < 50 {
		t.Errorf("%d dropped", n)
	}
	r.Close(time.Millisecond)
	if log.Count("the last requests are not written") != 1 {
		t.Error(log)
	}
	reader.Close() // the writer ends with an error
	<-r.done
}

// TestUnusableRequests: a request that a replay could not read is skipped, and hashes beyond the prompt are left out.
func TestUnusableRequests(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	r, _ := opened(t, Config{Path: path, plain: true, MaxBytes: 1 << 20, Files: 1})
	for _, change := range []func(*Request){
		func(q *Request) { q.BlockSize = 0 },
		func(q *Request) { q.Prompt = 0 },
		func(q *Request) { q.Output = 0 },
		func(q *Request) { q.Hashes = q.Hashes[:1] },
	} {
		q := request(1, 2)
		change(q)
		r.Add(q)
	}
	long := request(1, 2)
	long.Hashes = append(long.Hashes, 3)
	r.Add(long)
	r.Close(time.Minute)
	text := content(t, path)
	if n := r.Counts.Skipped.Load(); n != 4 || !strings.Contains(text, `"input_sequence_hashes":[1,2]}`) {
		t.Errorf("%d skipped; %s", n, text)
	}
}

// TestFewerFiles: with fewer files than before, the older ones go.
func TestFewerFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "trace.jsonl")
	for _, name := range []string{path, path + ".1", path + ".2", path + ".3"} {
		if err := os.WriteFile(name, []byte(name), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r, _ := opened(t, Config{Path: path, MaxBytes: 1 << 20, Files: 2})
	r.Close(time.Minute)
	if content(t, path) != "" || content(t, path+".1") != path {
		t.Error("the newest two are not kept")
	}
	for _, name := range []string{path + ".2", path + ".3"} {
		if _, err := os.Stat(name); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
