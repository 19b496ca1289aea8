package pool

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"kvepp/internal/boundedfile"
)

// quietDelay is how long a file must stay unchanged before it is read again, because editors write in several steps.
const quietDelay = 50 * time.Millisecond

// WatchFile reads the endpoints file now and after each change until ctx ends, and passes the entries to apply. parse
// is [ParseFile], or a reader of another format. WatchFile notices a rename over the file and Kubernetes' symlink swap.
// It returns only errors of the first read. If a later read or apply fails, it logs the error and calls refused; the
// earlier entries stay.
func WatchFile(ctx context.Context, path string, parse func([]byte) ([]Entry, error), log *slog.Logger,
	apply func([]Entry) error, refused func()) error {
	// Watch the directory, because a rename over the file replaces the inode that a watch of the file holds.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("pool: cannot watch files: %w", err)
	}
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		watcher.Close()
		return fmt.Errorf("pool: cannot watch the folder of %s: %w", path, err)
	}
	last, entries, err := readFile(path, parse)
	if err != nil {
		watcher.Close()
		return err
	}
	if err := apply(entries); err != nil {
		watcher.Close()
		return fmt.Errorf("pool: %s: %w", path, err)
	}
	go func() {
		defer watcher.Close()
		reread := time.NewTimer(0)
		<-reread.C
		for {
			select {
			case <-ctx.Done():
				return
			case _, ok := <-watcher.Events:
				if !ok {
					return
				}
				reread.Reset(quietDelay)
			case err, ok := <-watcher.Errors: // such as an overflow of the kernel's queue: events may be lost
				if !ok {
					return
				}
				log.Warn("error while watching the endpoints file; kvepp reads it again", "error", err)
				reread.Reset(quietDelay)
			case <-reread.C:
				text, entries, err := readFile(path, parse)
				if bytes.Equal(text, last) && text != nil {
					continue
				}
				if err == nil {
					if err = apply(entries); err == nil {
						log.Info("endpoints file read", "file", path, "endpoints", len(entries))
					}
				}
				last = text
				if err != nil {
					log.Error("the endpoints file is refused; the earlier endpoints stay", "error", err)
					refused()
				}
			}
		}
	}()
	return nil
}

func readFile(path string, parse func([]byte) ([]Entry, error)) ([]byte, []Entry, error) {
	text, err := boundedfile.Read(path, MaxFile)
	if err != nil {
		return nil, nil, fmt.Errorf("pool: the endpoints file cannot be read: %w", err)
	}
	entries, err := parse(text)
	if err != nil {
		return text, nil, fmt.Errorf("pool: %s: %w", path, err)
	}
	return text, entries, nil
}
