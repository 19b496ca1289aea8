package record

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// await waits until the recorder has counted n requests as written or failed.
func await(t *testing.T, r *Recorder, n int64) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); r.Counts.Written.Load()+r.Counts.Failed.Load() < n; {
		if time.Now().After(deadline) {
			t.Fatalf("%d written, %d failed, want %d", r.Counts.Written.Load(), r.Counts.Failed.Load(), n)
		}
	}
}

// TestRemovedFile: if the file, or its folder, is removed or moved while kvepp records, then no request is lost that
// counts as written later: kvepp creates the file again. It replaces no file of others.
func TestRemovedFile(t *testing.T) {
	for what, remove := range map[string]func(path string) error{
		"file":        os.Remove,
		"folder":      func(path string) error { return os.RemoveAll(filepath.Dir(path)) },
		"both levels": func(path string) error { return os.RemoveAll(filepath.Dir(filepath.Dir(path))) },
		"replaced": func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.WriteFile(path, []byte("theirs\n"), 0o600)
		},
	} {
		path := filepath.Join(t.TempDir(), "a", "b", "trace.jsonl")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		r, log := opened(t, Config{Path: path, plain: true, Files: 2, MaxBytes: 2 << 20})
		r.Add(request(1))
		await(t, r, 1)
		if err := remove(path); err != nil {
			t.Fatal(err)
		}
		for range 3 {
			r.Add(request(2))
		}
		await(t, r, 4)
		if err := os.Rename(path, path+".moved"); err != nil { // as log rotation programs do
			t.Fatal(err)
		}
		r.Add(request(3))
		r.Close(time.Minute)
		moved := content(t, path+".moved")
		if strings.Count(moved, "[2]") != 3 || strings.Count(moved, "[3]") != 1 || r.Counts.Written.Load() != 5 ||
			r.stopped.Load() {
			t.Errorf("%s: %d written, %s; the file:\n%s", what, r.Counts.Written.Load(), log, moved)
		}
		if what == "replaced" && content(t, path+".1") != "theirs\n" {
			t.Errorf("the file of others is %q", content(t, path+".1"))
		}
	}
}

// TestFolderReplaced: if the folder cannot be created again, kvepp counts the requests as failed and logs why.
func TestFolderReplaced(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "a")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	r, log := opened(t, Config{Path: filepath.Join(folder, "trace.jsonl")})
	r.Add(request(1))
	await(t, r, 1)
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(folder, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.Add(request(2))
	await(t, r, 2)
	r.Close(time.Minute)
	if r.Counts.Failed.Load() != 1 || log.Count("recording has stopped") != 1 || log.Count("not a directory") != 1 {
		t.Errorf("%d failed, %d written, log:\n%s", r.Counts.Failed.Load(), r.Counts.Written.Load(), log)
	}
}
