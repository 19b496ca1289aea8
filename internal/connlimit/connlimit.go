// Package connlimit bounds the open connections of a listener, so that a client that opens many takes neither the
// process's file descriptors nor the listener from others. At the limit a new connection takes the place of one that
// has no request: of the one that has been without a request longest, those first that never had any. While every
// connection has a request, new ones are closed.
//
// It owns the connections' counts; it never reads from a connection.
//
// Concurrency: everything is safe from any goroutine.
package connlimit

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Share returns how many connections a listener may hold that gets one of so many parts of the process's file
// descriptors (RLIMIT_NOFILE, which Go raises as far as it may): at least least, at most most.
func Share(parts, least, most int) int {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return least
	}
	return max(least, int(min(limit.Cur/uint64(parts), uint64(most))))
}

// Listener is a net.Listener of at most so many connections. Create it with New.
type Listener struct {
	net.Listener
	most int

	mu    sync.Mutex
	conns map[ends]*Conn // guarded by mu

	evicted, refused atomic.Int64
}

// ends are the two addresses of a connection.
type ends struct{ local, remote netip.AddrPort }

// New returns a listener of at most most open connections, which accepts from l.
func New(l net.Listener, most int) *Listener {
	return &Listener{Listener: l, most: most, conns: map[ends]*Conn{}}
}

// Accept returns the next connection.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if c := l.admit(raw); c != nil {
			return c, nil
		}
		l.refused.Add(1)
		raw.Close()
	}
}

// admit returns the connection among those that count, nil if it may not be.
func (l *Listener) admit(raw net.Conn) *Conn {
	c := &Conn{Conn: raw, of: l, ends: endsOf(raw.LocalAddr(), raw.RemoteAddr())}
	c.idle.Store(time.Now().UnixNano())
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.conns) >= l.most {
		longest := l.longestIdle()
		if longest == nil {
			return nil
		}
		l.evicted.Add(1)
		delete(l.conns, longest.ends)
		// Close may wait for a TLS peer in what wraps a connection, but not here: this is the connection itself.
		longest.Conn.Close()
	}
	l.conns[c.ends] = c
	return c
}

// longestIdle returns the connection whose place a new one takes; nil if all have requests. The caller holds l.mu.
func (l *Listener) longestIdle() (longest *Conn) {
	var idle int64
	for _, c := range l.conns {
		if c.requests.Load() > 0 {
			continue
		}
		if i := c.idle.Load(); longest == nil || longest.used.Load() && !c.used.Load() ||
			longest.used.Load() == c.used.Load() && i < idle {
			longest, idle = c, i
		}
	}
	return longest
}

// Find returns the open connection between two addresses, nil if there is none.
func (l *Listener) Find(local, remote net.Addr) *Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conns[endsOf(local, remote)]
}

func endsOf(local, remote net.Addr) ends {
	port := func(a net.Addr) netip.AddrPort {
		if tcp, ok := a.(*net.TCPAddr); ok && tcp != nil {
			return tcp.AddrPort()
		}
		return netip.AddrPort{}
	}
	return ends{port(local), port(remote)}
}

// Counts returns how many connections are open, how many were closed for new ones, and how many new ones were closed,
// since the start.
func (l *Listener) Counts() (open int, evicted, refused int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns), l.evicted.Load(), l.refused.Load()
}

// Conn is a connection that counts.
type Conn struct {
	net.Conn
	of   *Listener
	ends ends

	requests atomic.Int32
	used     atomic.Bool  // it has had a request
	idle     atomic.Int64 // since when it has none, in nanoseconds of the Unix time
}

// Begin says that a request begins on the connection. Harmless on nil.
func (c *Conn) Begin() {
	if c != nil {
		c.requests.Add(1)
		c.used.Store(true)
	}
}

// End says that one has ended.
func (c *Conn) End() {
	if c != nil {
		c.idle.Store(time.Now().UnixNano())
		c.requests.Add(-1)
	}
}

// Close closes the connection, and gives its place back.
func (c *Conn) Close() error {
	c.of.mu.Lock()
	if c.of.conns[c.ends] == c {
		delete(c.of.conns, c.ends)
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}

type connKey struct{}

// HTTP has a server tell its listener's connections of their requests. Call it before the server serves.
func HTTP(s *http.Server) {
	s.ConnContext = func(ctx context.Context, c net.Conn) context.Context {
		counted, _ := c.(*Conn)
		return context.WithValue(ctx, connKey{}, counted)
	}
	next := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		c, _ := req.Context().Value(connKey{}).(*Conn)
		c.Begin()
		defer c.End()
		next.ServeHTTP(w, req)
	})
}
