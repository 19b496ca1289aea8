// Package logtest records log output, so that tests can read it while the program logs. It owns only the text. All
// methods are safe for concurrent use.
package logtest

import (
	"strings"
	"sync"
)

// Log is a recorded log. The zero value is empty.
type Log struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

// Write appends a line. A slog.Handler calls it.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns everything that was logged.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Count returns how often text was logged.
func (l *Log) Count(text string) int { return strings.Count(l.String(), text) }
