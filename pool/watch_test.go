package pool

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// watchedFile watches a file and records the applied entries.
type watchedFile struct {
	applied chan []Entry
	refused atomic.Int64
	refuse  atomic.Bool
}

func (f *watchedFile) start(t *testing.T, path string) error {
	f.applied = make(chan []Entry, 100)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	return WatchFile(ctx, path, ParseFile, quiet, func(e []Entry) error {
		if f.refuse.Load() {
			return errors.New("refused by the test")
		}
		f.applied <- e
		return nil
	}, func() { f.refused.Add(1) })
}

// wantEntries waits for entries with these names.
func (f *watchedFile) wantEntries(t *testing.T, names ...string) {
	t.Helper()
	select {
	case entries := <-f.applied:
		var got []string
		for _, e := range entries {
			got = append(got, e.Name)
		}
		if strings.Join(got, " ") != strings.Join(names, " ") {
			t.Fatalf("applied %v, want %v", got, names)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("nothing was applied, want %v", names)
	}
}

func (f *watchedFile) wantRefusals(t *testing.T, n int64) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); f.refused.Load() < n; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d reads were refused, want %d", f.refused.Load(), n)
		}
	}
	if len(f.applied) > 0 {
		t.Fatal("a refused file was applied")
	}
}

func one(name string) string { return "endpoints:\n- {name: " + name + ", address: '10.0.0.1:8000'}\n" }

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestWatchFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "endpoints.yaml")
	var f watchedFile
	if err := f.start(t, path); err == nil ||
		!strings.Contains(err.Error(), "the endpoints file cannot be read: open "+path) {
		t.Fatal(err)
	}
	put(t, path, "endpoints:\n- nome: a\n")
	if err := f.start(t, path); err == nil || !strings.Contains(err.Error(), "line 2") {
		t.Fatalf("a bad file at the start: %v, want its line", err)
	}
	put(t, path, one("a"))
	if err := f.start(t, path); err != nil {
		t.Fatal(err)
	}
	f.wantEntries(t, "a")

	put(t, path, one("b")) // written in place
	f.wantEntries(t, "b")

	put(t, path+".next", one("c")) // renamed over
	if err := os.Rename(path+".next", path); err != nil {
		t.Fatal(err)
	}
	f.wantEntries(t, "c")
	put(t, path, one("d")) // and in place again: the watch must have survived the rename
	f.wantEntries(t, "d")

	put(t, path, "endpoints: [")
	f.wantRefusals(t, 1)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.wantRefusals(t, 2)
	f.refuse.Store(true)
	put(t, path, one("e"))
	f.wantRefusals(t, 3)
	f.refuse.Store(false)
	put(t, path, one("f"))
	f.wantEntries(t, "f")
}

func TestWatchFileThroughSymlinks(t *testing.T) {
	// Kubernetes mounts a ConfigMap as FILE -> ..data/FILE with ..data -> a folder, and swaps ..data.
	dir := t.TempDir()
	for version, name := range map[string]string{"v1": "a", "v2": "b"} {
		if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(dir, version, "endpoints.yaml"), one(name))
	}
	link := func(to, from string) {
		t.Helper()
		if err := os.Symlink(to, filepath.Join(dir, from)); err != nil {
			t.Fatal(err)
		}
	}
	link("v1", "..data")
	link("..data/endpoints.yaml", "endpoints.yaml")
	var f watchedFile
	if err := f.start(t, filepath.Join(dir, "endpoints.yaml")); err != nil {
		t.Fatal(err)
	}
	f.wantEntries(t, "a")
	link("v2", "..next")
	if err := os.Rename(filepath.Join(dir, "..next"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	f.wantEntries(t, "b")
}
