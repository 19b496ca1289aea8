package connlimit

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// world is a server on a limited listener. Requests to /wait block.
type world struct {
	t       *testing.T
	l       *Listener
	waiting chan struct{} // receives when a request to /wait arrives
	resume  chan struct{} // unblocks one of them
}

func start(t *testing.T, most int) *world {
	t.Helper()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t, New(raw, most), make(chan struct{}), make(chan struct{})}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("/wait", func(http.ResponseWriter, *http.Request) { w.waiting <- struct{}{}; <-w.resume })
	mux.HandleFunc("/body", func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	mux.HandleFunc("/large", func(rw http.ResponseWriter, r *http.Request) {
		for text := make([]byte, 1<<20); ; {
			if _, err := rw.Write(text); err != nil {
				return
			}
		}
	})
	refuse := func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusTooManyRequests) }
	limited := Limit(http.StripPrefix("/limited", mux).ServeHTTP, refuse, 2, LeastWait)
	mux.HandleFunc("/limited/", limited)
	s := &http.Server{Handler: mux}
	HTTP(s)
	go s.Serve(w.l)
	t.Cleanup(func() { close(w.resume); s.Close() })
	return w
}

// open opens a connection.
func (w *world) open() net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", w.l.Addr().String())
	if err != nil {
		w.t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(30 * time.Second))
	w.t.Cleanup(func() { c.Close() })
	return c
}

func ask(c net.Conn, path string) error {
	_, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", path)
	return err
}

// responded reads a response without a body. It returns an error if there is none.
func responded(c net.Conn) error {
	var response []byte
	for !bytes.HasSuffix(response, []byte("\r\n\r\n")) {
		next := make([]byte, 1)
		if _, err := c.Read(next); err != nil {
			return err
		}
		response = append(response, next...)
	}
	if !bytes.HasPrefix(response, []byte("HTTP/1.1 200")) {
		return fmt.Errorf("%q", response)
	}
	return nil
}

// ended waits until the server has closed the connection.
func (w *world) ended(what string, c net.Conn) {
	w.t.Helper()
	if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
		w.t.Errorf("%s is still open", what)
	}
}

// TestIdleConnectionsGiveWay: at the limit a new connection replaces the one that has been idle longest, those that
// never had a request first. Connections with requests stay.
func TestIdleConnectionsGiveWay(t *testing.T) {
	w := start(t, 3)
	used, busy := w.open(), w.open()
	for _, c := range []net.Conn{used, busy} {
		if err := errors.Join(ask(c, "/"), responded(c)); err != nil {
			t.Fatal(err)
		}
	}
	if err := ask(busy, "/wait"); err != nil {
		t.Fatal(err)
	}
	<-w.waiting
	var silent net.Conn
	for range 200 {
		next := w.open()
		if silent != nil {
			w.ended("a silent connection", silent)
		}
		silent = next
	}
	fresh := w.open()
	if err := errors.Join(ask(fresh, "/"), responded(fresh)); err != nil {
		t.Errorf("a new connection at the limit: %v", err)
	}
	last := w.open() // all remaining ones had a request: the longest idle one is replaced
	if err := errors.Join(ask(last, "/"), responded(last)); err != nil {
		t.Error(err)
	}
	w.ended("the connection whose request was longest ago", used)
	w.resume <- struct{}{}
	if err := responded(busy); err != nil {
		t.Errorf("the request that waited: %v", err)
	}
	if open, evicted, refused := w.l.Counts(); open != 3 || evicted != 201 || refused != 0 {
		t.Errorf("%d open, %d evicted, %d refused; want 3, 201, 0", open, evicted, refused)
	}
}

// TestAllBusy: while all connections have requests, a new one is closed at once. Later there is room again.
func TestAllBusy(t *testing.T) {
	w := start(t, 2)
	busy := []net.Conn{w.open(), w.open()}
	for _, c := range busy {
		if err := ask(c, "/wait"); err != nil {
			t.Fatal(err)
		}
		<-w.waiting
	}
	w.ended("a third connection", w.open())
	w.resume <- struct{}{}
	w.resume <- struct{}{}
	for _, c := range busy {
		if err := responded(c); err != nil {
			t.Error(err)
		}
		c.Close()
	}
	c := w.open()
	if err := errors.Join(ask(c, "/"), responded(c)); err != nil {
		t.Error(err)
	}
	if _, _, refused := w.l.Counts(); refused != 1 {
		t.Errorf("%d refused, want 1", refused)
	}
}

// TestFind: Find returns a connection by its addresses until it is closed.
func TestFind(t *testing.T) {
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	l := New(raw, 1)
	theirs, err := net.Dial("tcp", raw.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	ours, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if c := l.Find(theirs.RemoteAddr(), theirs.LocalAddr()); c == nil || c != ours {
		t.Errorf("found %v", c)
	}
	ours.Close()
	if c := l.Find(theirs.RemoteAddr(), theirs.LocalAddr()); c != nil {
		t.Error("found after its end")
	}
	if open, _, _ := l.Counts(); open != 0 {
		t.Errorf("%d open", open)
	}
}

func TestShare(t *testing.T) {
	if n := Share(1, 7, 9); n != 9 {
		t.Errorf("all descriptors, at most 9: %d", n)
	}
	if n := Share(1<<40, 7, 9); n != 7 {
		t.Errorf("none, at least 7: %d", n)
	}
}

// slow are clients that keep a request's handler waiting: they send no more of a body, or a byte now and then, or do
// not read the response, or a little of it. at begins the path.
var slow = map[string]func(c net.Conn, at string){
	"a body that stops": func(c net.Conn, at string) {
		fmt.Fprintf(c, "POST %s/body HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nsome", at)
	},
	"a body byte by byte": func(c net.Conn, at string) {
		fmt.Fprintf(c, "POST %s/body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", at)
		go func() {
			for range time.Tick(time.Millisecond) {
				if _, err := fmt.Fprint(c, "1\r\nx\r\n"); err != nil {
					return
				}
			}
		}()
	},
	"a response that is not read": func(c net.Conn, at string) {
		c.(*net.TCPConn).SetReadBuffer(1 << 10)
		ask(c, at+"/large")
	},
	"a response read byte by byte": func(c net.Conn, at string) {
		c.(*net.TCPConn).SetReadBuffer(1 << 10)
		ask(c, at+"/large")
		go func() {
			for range time.Tick(time.Millisecond) {
				if _, err := c.Read(make([]byte, 1)); err != nil {
					return
				}
			}
		}()
	},
}

// soon repeats what fails until it succeeds.
func (w *world) soon(what string, try func() error) {
	w.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for err := try(); err != nil; err = try() {
		if time.Now().After(deadline) {
			w.t.Fatalf("%s: %v", what, err)
		}
	}
}

// TestSlowClientsGiveWay: clients that keep all of a listener's requests waiting do not keep out others, however often
// they connect again. A request that the server works on stays.
func TestSlowClientsGiveWay(t *testing.T) {
	for what, begin := range slow {
		t.Run(what, func(t *testing.T) {
			const most = 8
			w := start(t, most)
			busy := w.open()
			if err := ask(busy, "/wait"); err != nil {
				t.Fatal(err)
			}
			<-w.waiting
			for range 5 {
				for range 2 * most {
					begin(w.open(), "")
				}
				w.soon("a request beside them", func() error {
					c := w.open()
					defer c.Close()
					return errors.Join(ask(c, "/"), responded(c))
				})
			}
			w.resume <- struct{}{}
			if err := responded(busy); err != nil {
				t.Errorf("the request that the server worked on: %v", err)
			}
		})
	}
}

// TestLimit: of the requests of one handler, those whose clients are slow give their places to others.
func TestLimit(t *testing.T) {
	for what, begin := range slow {
		t.Run(what, func(t *testing.T) {
			w := start(t, 100)
			for range 3 {
				for range 4 {
					begin(w.open(), "/limited")
				}
				c := w.open()
				if err := errors.Join(ask(c, "/limited/"), responded(c)); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// TestLimitRefuses: requests that the server works on keep their places, and one more is refused after a time.
func TestLimitRefuses(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	w := start(t, 100)
	for range 2 {
		if err := ask(w.open(), "/limited/wait"); err != nil {
			t.Fatal(err)
		}
		<-w.waiting
	}
	c := w.open()
	if err := errors.Join(ask(c, "/limited/"), responded(c)); err == nil || !strings.Contains(err.Error(), "429") {
		t.Errorf("a request beside two that the server works on: %v", err)
	}
	w.resume <- struct{}{}
	w.resume <- struct{}{}
	last := w.open()
	if err := errors.Join(ask(last, "/limited/"), responded(last)); err != nil {
		t.Errorf("later: %v", err)
	}
}
