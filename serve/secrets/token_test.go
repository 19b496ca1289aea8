package secrets

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
)

// TestTokenFile: the line end that editors add is not part of the token.
func TestTokenFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	if _, err := ReadToken("--key", file); err == nil {
		t.Error("a missing file is accepted")
	}
	for text, want := range map[string]string{"secret\n": "secret", " k \r\n": "k"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := ReadToken("--key", file); err != nil || key != want {
			t.Errorf("%q: %q, %v", text, key, err)
		}
	}
	for _, text := range []string{"", " \n", "two\nlines"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if key, err := ReadToken("--key", file); err == nil || key != "" || strings.Contains(err.Error(), "two") {
			t.Errorf("%q: %q, %v", text, key, err)
		}
	}
	if key, err := ReadToken("--key", ""); err != nil || key != "" {
		t.Errorf("without a file: %q, %v", key, err)
	}
}

// TestTokenChanges: a new token is used after the next reload. If the file cannot be read, the earlier token stays.
func TestTokenChanges(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "token")
		write := func(text string) {
			if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write("one")
		m, log := metrics.New(), new(strings.Builder)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		token, err := Follow(ctx, m, slog.New(slog.NewTextHandler(log, nil))).Token("--admin-token-file", file)
		if err != nil {
			t.Fatal(err)
		}
		expect := func(what, want string) {
			t.Helper()
			<-time.After(3 * reloadEvery)
			synctest.Wait()
			if got := token.Text(); got != want {
				t.Errorf("%s: the token is %q, want %q", what, got, want)
			}
		}
		expect("at first", "one")
		write("two\n")
		expect("after a change", "two")
		write("")
		expect("an empty file", "two")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		expect("no file", "two")
		write("three")
		expect("after another change", "three")
		if n := metricstest.Read(t, m.Registry).Of(metrics.TokenFilesRefused.Name).Value(); n != 1 {
			t.Errorf("%v refusals are counted, want 1", n)
		}
		if n := strings.Count(log.String(), "is refused"); n != 1 || strings.Contains(log.String(), "three") {
			t.Errorf("%d refusals are logged, want 1; or the log has a secret:\n%s", n, log)
		}
	})
}
