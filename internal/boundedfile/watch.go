package boundedfile

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// quietDelay is how long a file's folder must stay unchanged before the file is read again, because editors write in
// several steps. maxDelay is how long this may take: other files of the folder may change all the time.
const (
	quietDelay = 50 * time.Millisecond
	maxDelay   = time.Second
)

// Watched is a file that is read again when it changes.
type Watched struct {
	Path string
	Most int64  // bytes
	What string // its name in log lines: "endpoints file"
	Log  *slog.Logger
	// Use takes the file's text. With an error the earlier text stays in force.
	Use     func(text []byte) error
	Refused func() // counts a later text that cannot be read or used
}

// Watch reads the file now and after each change until ctx ends. It notices a rename over the file and Kubernetes'
// symlink swap. It returns only errors of the first read. Later ones are logged and counted.
func (f *Watched) Watch(ctx context.Context) error {
	// Watch the directory, because a rename over the file replaces the inode that a watch of the file holds.
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("cannot watch files: %w", withLimit(err))
	}
	if err := watcher.Add(filepath.Dir(f.Path)); err != nil {
		watcher.Close()
		return fmt.Errorf("cannot watch the folder of %s: %w", f.Path, withLimit(err))
	}
	last, err := f.read(nil)
	if err != nil {
		watcher.Close()
		return err
	}
	go func() {
		defer watcher.Close()
		reread := time.NewTimer(0)
		<-reread.C
		var due time.Time // zero: no change was noticed
		await := func() {
			if due.IsZero() {
				due = time.Now().Add(maxDelay)
			}
			reread.Reset(min(quietDelay, time.Until(due)))
		}
		for {
			select {
			case <-ctx.Done():
				return
			case _, ok := <-watcher.Events:
				if !ok {
					return
				}
				await()
			case err, ok := <-watcher.Errors: // such as an overflow of the kernel's queue: events may be lost
				if !ok {
					return
				}
				f.Log.Warn("error while watching the "+f.What+"; kvepp reads it again", "error", err)
				await()
			case <-reread.C:
				due = time.Time{}
				text, err := f.read(last)
				switch {
				case err != nil:
					f.Log.Error("the "+f.What+" is refused; what it said before stays in force", "error", err)
					f.Refused()
				case !bytes.Equal(text, last):
					f.Log.Info(f.What+" read", "file", f.Path)
				}
				last = text
			}
		}
	}()
	return nil
}

// withLimit adds the limit of the machine that an error of the kernel means and does not name.
func withLimit(err error) error {
	switch {
	case errors.Is(err, syscall.EMFILE):
		return fmt.Errorf("%w; raise the machine's fs.inotify.max_user_instances, which programs of a user share, or "+
			"this process's limit of open files", err)
	case errors.Is(err, syscall.ENOSPC):
		return fmt.Errorf("%w; raise the machine's fs.inotify.max_user_watches, which programs of a user share", err)
	}
	return err
}

// read reads the file, and uses its text unless it is last.
func (f *Watched) read(last []byte) ([]byte, error) {
	text, err := Read(f.Path, f.Most)
	if err != nil {
		return nil, fmt.Errorf("the %s cannot be read: %w", f.What, err)
	}
	if last != nil && bytes.Equal(text, last) {
		return text, nil
	}
	if err := f.Use(text); err != nil {
		return text, fmt.Errorf("%s: %w", f.Path, err)
	}
	return text, nil
}
