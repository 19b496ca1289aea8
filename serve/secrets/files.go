// Package secrets reads certificates and files with tokens, and reads them again while kvepp runs. If new files cannot
// be used, the earlier content stays: a listener never becomes open, and never closes.
//
// Concurrency: everything is safe for concurrent use.
package secrets

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
)

// reloadEvery is the interval at which kvepp reads the files. File watches would react sooner, but do not work on every
// file system. Certificates are renewed long before they expire.
const reloadEvery = 5 * time.Second

// Files reads the files of a process again, at intervals. Create it with Follow.
type Files struct {
	m   *metrics.Metrics
	log *slog.Logger

	certificates *Certificates // nil: not read

	refusedCertificates, refusedTokens atomic.Int64

	mu  sync.Mutex
	all []*followed // guarded by mu
}

// followed is a file, or files that belong together.
type followed struct {
	load     func() (news []any, err error) // news are attributes for the log; nil: the files are unchanged
	changed  string                         // log line
	rejected string                         // log line
	refused  *atomic.Int64                  // counts contents that could not be used
	failures int                            // consecutive; guarded by Files.mu
}

// Follow returns Files that are read again until ctx ends.
func Follow(ctx context.Context, m *metrics.Metrics, log *slog.Logger) *Files {
	f := &Files{m: m, log: log}
	metrics.Counter(m, metrics.TokenFilesRefused, f.refusedTokens.Load)
	go f.follow(ctx, reloadEvery)
	return f
}

func (f *Files) follow(ctx context.Context, every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			f.reload()
		}
	}
}

func (f *Files) add(x *followed) error {
	if _, err := x.load(); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.all = append(f.all, x)
	return nil
}

func (f *Files) reload() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.all {
		news, err := x.load()
		if err == nil {
			if x.failures = 0; news != nil {
				f.log.Info(x.changed, news...)
			}
			continue
		}
		// One failure may be a read between the removal of a file and its replacement.
		if x.failures++; x.failures == 2 {
			f.log.Error(x.rejected, "error", err)
			x.refused.Add(1)
		}
	}
}
