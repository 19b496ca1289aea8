// Package connlimit bounds the open connections of a listener, so that one client with many connections cannot exhaust
// the process's file descriptors or the listener. At the limit a new connection replaces the one that has been without
// a request longest; connections that never had a request are replaced first. If every connection has a request, the
// new one is closed.
//
// It owns the counts of connections; it never reads from a connection.
//
// Concurrency: everything is safe for concurrent use.
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

// Share returns the connection limit of a listener that may use one of parts equal parts of the process's file
// descriptors (RLIMIT_NOFILE, which Go raises to its maximum). The result is between least and most.
func Share(parts, least, most int) int {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) != nil {
		return least
	}
	return max(least, int(min(limit.Cur/uint64(parts), uint64(most))))
}

// Listener is a net.Listener with a limited number of open connections. Create it with New.
type Listener struct {
	net.Listener
	most int

	mu    sync.Mutex
	conns map[ends]*Conn // guarded by mu

	evicted, refused atomic.Int64
}

// ends are the two addresses of a connection.
type ends struct{ local, remote netip.AddrPort }

// New returns a listener that accepts from l and keeps at most most connections open.
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

// admit counts a new connection and returns it; nil if it must be closed.
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
		// Close the raw connection: the Close of a TLS wrapper may wait for the peer.
		longest.Conn.Close()
	}
	l.conns[c.ends] = c
	return c
}

// longestIdle returns the connection that a new one replaces; nil if all have requests. The caller holds l.mu.
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

// Find returns the open connection between two addresses; nil if there is none.
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

// Counts returns the number of open connections, and since the start the number of connections that were replaced
// (evicted) and of new ones that were closed (refused).
func (l *Listener) Counts() (open int, evicted, refused int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.conns), l.evicted.Load(), l.refused.Load()
}

// Conn is a counted connection.
type Conn struct {
	net.Conn
	of   *Listener
	ends ends

	requests atomic.Int32
	used     atomic.Bool  // it has had a request
	idle     atomic.Int64 // start of the time without a request, Unix nanoseconds
}

// Begin marks the start of a request on the connection. A nil c is allowed.
func (c *Conn) Begin() {
	if c != nil {
		c.requests.Add(1)
		c.used.Store(true)
	}
}

// End marks the end of a request.
func (c *Conn) End() {
	if c != nil {
		c.idle.Store(time.Now().UnixNano())
		c.requests.Add(-1)
	}
}

// Close closes the connection and frees its place.
func (c *Conn) Close() error {
	c.of.mu.Lock()
	if c.of.conns[c.ends] == c {
		delete(c.of.conns, c.ends)
	}
	c.of.mu.Unlock()
	return c.Conn.Close()
}

type connKey struct{}

// HTTP makes a server mark the requests on its listener's connections. Call it before the server serves.
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
