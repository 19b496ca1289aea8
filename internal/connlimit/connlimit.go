// Package connlimit bounds the open connections of a listener, so that one client with many connections cannot exhaust
// the process's file descriptors or the listener. At the limit a new connection replaces one whose client keeps the
// server waiting: for its first request, for the rest of a body, or to take a response. Or it replaces one that is idle
// between two requests, if these are more. In both cases it is the one that waits longest. If every connection has a
// request that kvepp works on, the new one is closed. Limit does the same for the requests of one handler, and Serve
// bounds the streams of gRPC methods and their messages.
//
// It owns the counts of connections and streams; it never reads from a connection by itself.
//
// Concurrency: everything is safe for concurrent use.
package connlimit

import (
	"context"
	"io"
	"iter"
	"maps"
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
		longest := longest(maps.Values(l.conns), LeastWait)
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

// longest returns the connection that a new one replaces; nil if the server works on requests of all. A request's
// client must have kept the server waiting for at least least. A crowd that waits, or that is idle between two
// requests, does not replace those of the other kind.
func longest(conns iter.Seq[*Conn], least time.Duration) *Conn {
	var longest [2]*Conn // that waits; that is idle between two requests
	var most [2]time.Duration
	var count [2]int
	for c := range conns {
		busy, waited, kind := c.requests.Load() > 0, c.waited(time.Now().UnixNano()), 0
		if !busy && c.used.Load() {
			kind = 1
		}
		if busy && waited < least {
			continue
		}
		if count[kind]++; longest[kind] == nil || waited > most[kind] {
			longest[kind], most[kind] = c, waited
		}
	}
	if count[1] > count[0] {
		return longest[1]
	}
	return longest[0]
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

	http    bool         // reads of bodies and writes count as waiting; set before the first request
	waiting atomic.Int64 // since when the server waits for the client, Unix nanoseconds; 0: it does not
	sum     atomic.Int64 // how long it has waited in this request before that, in nanoseconds
}

const (
	// LeastWait is how long a client must have kept the server waiting in a request to be replaced. A client that reads
	// takes a response at once.
	LeastWait   = 5 * time.Millisecond
	placeWithin = 5 * time.Second // a scrape of Prometheus takes at most 10 s by default
)

// waited returns how long the client has kept the server waiting in its request, or without one, until now (Unix
// nanoseconds).
func (c *Conn) waited(now int64) time.Duration {
	if c.requests.Load() == 0 {
		return time.Duration(now - c.idle.Load())
	}
	sum := c.sum.Load()
	if since := c.waiting.Load(); since != 0 {
		sum += now - since
	}
	return time.Duration(sum)
}

// wait calls f, which waits for the client, and counts its time.
func (c *Conn) wait(f func([]byte) (int, error), b []byte) (int, error) {
	start := time.Now().UnixNano()
	c.waiting.Store(start)
	n, err := f(b)
	c.sum.Add(time.Now().UnixNano() - start)
	c.waiting.Store(0)
	return n, err
}

// Write writes to the connection.
func (c *Conn) Write(b []byte) (int, error) {
	if !c.http {
		return c.Conn.Write(b)
	}
	return c.wait(c.Conn.Write, b)
}

// body is the body of a request; reading it waits for the client.
type body struct {
	io.ReadCloser
	c *Conn
}

func (b *body) Read(into []byte) (int, error) { return b.c.wait(b.ReadCloser.Read, into) }

// Begin marks the start of a request on the connection. A nil c is allowed.
func (c *Conn) Begin() {
	if c != nil {
		c.sum.Store(0)
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
		if counted != nil {
			counted.http = true
		}
		return context.WithValue(ctx, connKey{}, counted)
	}
	next := s.Handler
	s.Handler = http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		c := of(req)
		c.Begin()
		defer c.End()
		if c != nil && req.Body != http.NoBody {
			req.Body = &body{req.Body, c}
		}
		next.ServeHTTP(w, req)
	})
}

func of(req *http.Request) *Conn {
	c, _ := req.Context().Value(connKey{}).(*Conn)
	return c
}

// Limit returns a handler that runs at most most requests of next at once. One more takes the place of the one whose
// client has kept the server waiting longest, if that is at least least. It waits for that for at most placeWithin;
// then busy answers it. The server must be one of HTTP's; otherwise no request is replaced.
func Limit(next, busy http.HandlerFunc, most int, least time.Duration) http.HandlerFunc {
	var mu sync.Mutex
	running := map[*Conn]bool{} // guarded by mu
	take := func(c *Conn) bool {
		mu.Lock()
		defer mu.Unlock()
		if len(running) >= most {
			slow := longest(maps.Keys(running), least)
			if slow == nil {
				return false
			}
			slow.Conn.Close() // its handler fails to write or to read, and ends
			delete(running, slow)
		}
		running[c] = true
		return true
	}
	return func(w http.ResponseWriter, req *http.Request) {
		c := of(req)
		if c == nil {
			c = new(Conn)
			c.Begin()
		}
		for end := time.Now().Add(placeWithin); !take(c); time.Sleep(LeastWait) {
			if time.Now().After(end) || req.Context().Err() != nil {
				busy(w, req)
				return
			}
		}
		defer func() { mu.Lock(); delete(running, c); mu.Unlock() }()
		next(w, req)
	}
}
