package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
)

// tokenFile is a secret that requests must bring, to a listener of kvepp's or to an engine, as its file last was when
// it could be used. A nil one asks for nothing. Safe from any goroutine, but for reload.
type tokenFile struct {
	flag, file string
	current    atomic.Pointer[string]
	refused    atomic.Int64
	failures   int // reloads in a row that failed
}

// newTokenFile reads the file; nil when none is given. flag is how it was.
func newTokenFile(flag, file string) (*tokenFile, error) {
	if file == "" {
		return nil, nil
	}
	f := &tokenFile{flag: flag, file: file}
	if _, err := f.load(); err != nil {
		return nil, err
	}
	return f, nil
}

// token returns the secret; "" of nil.
func (f *tokenFile) token() string {
	if f == nil {
		return ""
	}
	return *f.current.Load()
}

func (f *tokenFile) load() (changed bool, err error) {
	text, err := os.ReadFile(f.file)
	if err != nil {
		return false, fmt.Errorf("%s: %w", f.flag, err)
	}
	token := strings.TrimSpace(string(text))
	if token == "" {
		return false, fmt.Errorf("%s: the file is empty; put a secret into it, in one line", f.flag)
	}
	if strings.ContainsAny(token, "\r\n") { // no header can hold it
		return false, fmt.Errorf("%s: the file has several lines; put the secret into it alone", f.flag)
	}
	before := f.current.Swap(&token)
	return before == nil || *before != token, nil
}

// reload reads the file again. One that cannot be used leaves the secret as it was: a listener is never left open.
func (f *tokenFile) reload(log *slog.Logger) {
	changed, err := f.load()
	switch {
	case err == nil:
		if f.failures = 0; changed {
			log.Info("a token was read again; the one before counts no more", "flag", f.flag)
		}
	default:
		// Once may be a look between the removal of the file and the next one.
		if f.failures++; f.failures == 2 {
			log.Error("a file with a token is refused; the one before stays", "error", err)
			f.refused.Add(1)
		}
	}
}

// followTokens reads the files again whenever they change, until ctx ends. Those that are nil are none.
func followTokens(ctx context.Context, every time.Duration, m *metrics.Metrics, log *slog.Logger, files ...*tokenFile) {
	m.CounterSource(metrics.TokenFilesRefused, metrics.TokenFilesRefusedHelp, nil, func() (n float64) {
		for _, f := range files {
			if f != nil {
				n += float64(f.refused.Load())
			}
		}
		return n
	})
	go repeat(ctx, every, func() {
		for _, f := range files {
			if f != nil {
				f.reload(log)
			}
		}
	})
}
