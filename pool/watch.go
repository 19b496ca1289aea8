package pool

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// settle is how long a file must be left alone before it is read again: an editor writes it in several steps.
const settle = 50 * time.Millisecond

// WatchFile reads the endpoints file now and whenever it changes, a rename over it and Kubernetes' symlink swap
// included, and gives what it holds to apply, until ctx ends. Only the first reading's error is returned; a later bad
// file, or one that apply refuses, is logged and counted by refused, and what was applied before stays.
func WatchFile(ctx context.Context, path string, log *slog.Logger, apply func([]Entry) error, refused func()) error {
	// The directory is watched, not the file: a rename over the file replaces the inode that a file watch holds.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("pool: cannot watch files: %w", err)
	}
	if err := watcher.Add(filepath.Dir(path)); err != nil {
		watcher.Close()
		return fmt.Errorf("pool: cannot watch the folder of %s: %w", path, err)
	}
	last, entries, err := readFile(path)
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
				reread.Reset(settle)
			case err, ok := <-watcher.Errors: // among them an overflow of the kernel's queue: what was lost may be ours
				if !ok {
					return
				}
				log.Warn("watching the endpoints file", "error", err)
				reread.Reset(settle)
			case <-reread.C:
				text, entries, err := readFile(path)
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
					log.Error("the endpoints file is refused; the endpoints stay as they were", "error", err)
					refused()
				}
			}
		}
	}()
	return nil
}

func readFile(path string) ([]byte, []Entry, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("pool: the endpoints file cannot be read: %w", err)
	}
	entries, err := ParseFile(text)
	if err != nil {
		return text, nil, fmt.Errorf("pool: %s: %w", path, err)
	}
	return text, entries, nil
}
