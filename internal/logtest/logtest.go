// Package logtest keeps what is logged, for tests that read it meanwhile. It owns the text and nothing else; any
// goroutine may log, and read.
package logtest

import (
	"strings"
	"sync"
)

// Log is what was logged. The zero value is an empty one.
type Log struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

// Write is for a slog.Handler.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// String returns all that was logged.
func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Count returns how often a text was.
func (l *Log) Count(text string) int { return strings.Count(l.String(), text) }
