package logs

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvepp/internal/logtest"
)

// TestAccessLogRemoved: while kvepp runs, the access log's file or folder is removed, moved, or replaced by something
// else. Lines that count as written are in a file with a name; others count as failed, and kvepp logs why, once.
func TestAccessLogRemoved(t *testing.T) {
	for what, x := range map[string]struct {
		change func(path string) error
		found  string // the file that has the later lines, below the folder's parent; "": they are lost
	}{
		"file removed":   {os.Remove, "logs/access.log"},
		"folder removed": {func(path string) error { return os.RemoveAll(filepath.Dir(path)) }, "logs/access.log"},
		"folder moved": {func(path string) error {
			return os.Rename(filepath.Dir(path), filepath.Dir(path)+".old")
		}, "logs.old/access.log"}, // for a second
		"file moved": {func(path string) error { return os.Rename(path, path+".1") }, "logs/access.log.1"},
		"folder replaced by a file": {func(path string) error {
			if err := os.RemoveAll(filepath.Dir(path)); err != nil {
				return err
			}
			return os.WriteFile(filepath.Dir(path), nil, 0o600)
		}, ""},
		"file replaced by a folder": {func(path string) error {
			if err := os.Remove(path); err != nil {
				return err
			}
			return os.Mkdir(path, 0o755)
		}, ""},
	} {
		parent := t.TempDir()
		path := filepath.Join(parent, "logs", "access.log")
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var logged logtest.Log
		a, err := openAccess(path, slog.New(slog.NewTextHandler(&logged, nil)))
		if err != nil {
			t.Fatal(err)
		}
		a.Writer.Close(1 << 40) // the test calls flush itself
		a.flush([]byte("before\n"))
		if err := x.change(path); err != nil {
			t.Fatal(err)
		}
		a.flush([]byte("one\n"))
		a.flush([]byte("two\nthree\n"))
		failed := int64(0)
		if x.found == "" {
			failed = 3
		} else if got := content(parent, x.found); !strings.HasSuffix(got, "one\ntwo\nthree\n") {
			t.Errorf("%s: the file has %q", what, got)
		}
		if a.written.Load() != 4-failed || a.lostByError.Load() != failed ||
			logged.Count("level=ERROR") != int(failed/3) {
			t.Errorf("%s: %d written and %d failed, want %d failed; logged %s", what, a.written.Load(),
				a.lostByError.Load(), failed, &logged)
		}
		if failed > 0 { // mended
			if err := os.RemoveAll(filepath.Dir(path)); err != nil {
				t.Fatal(err)
			}
			a.flush([]byte("four\n"))
			if got := content(parent, "logs/access.log"); got != "four\n" || logged.Count("is written again") != 1 {
				t.Errorf("%s, and mended: the file has %q; logged %s", what, got, &logged)
			}
		}
		a.file.Close()
	}
}

// content returns the text of a file; "" if there is none.
func content(folder, name string) string {
	text, _ := os.ReadFile(filepath.Join(folder, name))
	return string(text)
}
