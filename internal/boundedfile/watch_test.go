package boundedfile

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// watchedFile watches a file and records the texts that were used.
type watchedFile struct {
	applied chan string
	refused atomic.Int64
	refuse  atomic.Bool
}

func (f *watchedFile) start(t *testing.T, path string) error {
	f.applied = make(chan string, 100)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	w := &Watched{Path: path, Most: 100, What: "endpoints file", Log: slog.New(slog.DiscardHandler),
		Use: func(text []byte) error {
			if f.refuse.Load() || len(text) == 0 {
				return errors.New("refused by the test")
			}
			f.applied <- string(text)
			return nil
		}, Refused: func() { f.refused.Add(1) }}
	return w.Watch(ctx)
}

// want waits for a text.
func (f *watchedFile) want(t *testing.T, text string) {
	t.Helper()
	select {
	case got := <-f.applied:
		if got != text {
			t.Fatalf("used %q, want %q", got, text)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("nothing was used, want %q", text)
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
	put(t, path, "")
	if err := f.start(t, path); err == nil || !strings.Contains(err.Error(), path+": refused") {
		t.Fatalf("a bad file at the start: %v", err)
	}
	put(t, path, "a")
	if err := f.start(t, path); err != nil {
		t.Fatal(err)
	}
	f.want(t, "a")

	put(t, path, "b") // written in place
	f.want(t, "b")

	put(t, path+".next", "c") // renamed over
	if err := os.Rename(path+".next", path); err != nil {
		t.Fatal(err)
	}
	f.want(t, "c")
	put(t, path, "d") // and in place again: the watch must have survived the rename
	f.want(t, "d")

	put(t, path, strings.Repeat("x", 101))
	f.wantRefusals(t, 1)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	f.wantRefusals(t, 2)
	f.refuse.Store(true)
	put(t, path, "e")
	f.wantRefusals(t, 3)
	f.refuse.Store(false)
	put(t, path, "f")
	f.want(t, "f")
}

// TestWatchFileInABusyFolder: a change is noticed while another file of the folder changes all the time.
func TestWatchFileInABusyFolder(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "endpoints.yaml")
	put(t, path, "a")
	var f watchedFile
	if err := f.start(t, path); err != nil {
		t.Fatal(err)
	}
	f.want(t, "a")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			case <-time.After(quietDelay / 20):
				os.WriteFile(filepath.Join(dir, "log"), []byte{byte(n)}, 0o644)
			}
		}
	}()
	defer func() {
		close(stop)
		<-stopped
	}()
	put(t, path, "b")
	f.want(t, "b")
}

func TestWatchFileThroughSymlinks(t *testing.T) {
	// Kubernetes mounts a ConfigMap as FILE -> ..data/FILE with ..data -> a folder, and swaps ..data.
	dir := t.TempDir()
	for version, name := range map[string]string{"v1": "a", "v2": "b"} {
		if err := os.Mkdir(filepath.Join(dir, version), 0o755); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(dir, version, "endpoints.yaml"), name)
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
	f.want(t, "a")
	link("v2", "..next")
	if err := os.Rename(filepath.Join(dir, "..next"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	f.want(t, "b")
}

// TestHugeFile: a file of 1 TiB is refused before it takes memory.
func TestHugeFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "huge")
	put(t, file, "")
	if err := os.Truncate(file, 1<<40); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(file, 100); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Error(err)
	}
}

// TestMachineLimit lets this process open no more files, which the kernel reports like too many inotify instances.
func TestMachineLimit(t *testing.T) {
	path := filepath.Join(t.TempDir(), "endpoints.yaml")
	var limit syscall.Rlimit
	if err := errors.Join(os.WriteFile(path, []byte("x"), 0o600), syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit),
		syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 3, Max: limit.Max})); err != nil {
		t.Fatal(err)
	}
	err := new(watchedFile).start(t, path)
	if restored := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); restored != nil {
		t.Fatal(restored)
	}
	if err == nil || !strings.Contains(err.Error(), "fs.inotify.max_user_instances") {
		t.Errorf("%v", err)
	}
}
