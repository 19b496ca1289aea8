package natssub

import (
	"bufio"
	"bytes"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/useragent"
)

// server implements the part of NATS's protocol that a subscriber needs. The end-to-end tests use a real server.
type server struct {
	t       *testing.T
	at      string
	asked   chan string // subscriptions: "SUBJECT ID"
	named   chan string // what CONNECT says of each client
	mu      sync.Mutex
	listens net.Listener // nil while the server is down; guarded by mu
	conn    net.Conn     // the latest; guarded by mu
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{t: t, at: "127.0.0.1:0", asked: make(chan string, 10), named: make(chan string, 10)}
	s.begin()
	t.Cleanup(s.end)
	return s
}

// begin listens, on the same address as before.
func (s *server) begin() {
	s.t.Helper()
	l, err := net.Listen("tcp", s.at)
	if err != nil {
		s.t.Fatal(err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listens, s.at = l, l.Addr().String()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conn = conn
			s.mu.Unlock()
			go s.talk(conn)
		}
	}()
}

// end stops the server like a crash.
func (s *server) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listens != nil {
		s.listens.Close()
		s.listens = nil
	}
	if s.conn != nil {
		s.conn.Close()
	}
}

func (s *server) talk(conn net.Conn) {
	fmt.Fprint(conn, `INFO {"server_id":"s","version":"2.10.0","max_payload":1048576}`+"\r\n")
	for lines := bufio.NewScanner(conn); lines.Scan(); {
		switch verb, rest, _ := strings.Cut(lines.Text(), " "); verb {
		case "PING":
			fmt.Fprint(conn, "PONG\r\n")
		case "CONNECT":
			select {
			case s.named <- rest:
			default: // the test does not read them
			}
		case "SUB":
			s.asked <- strings.Join(strings.Fields(rest), " ")
		}
	}
}

// send publishes to the subscription "SUBJECT ID".
func (s *server) send(asked string, data []byte) {
	s.t.Helper()
	s.mu.Lock()
	conn := s.conn
	s.mu.Unlock()
	if _, err := fmt.Fprintf(conn, "MSG %s %d\r\n%s\r\n", asked, len(data), data); err != nil {
		s.t.Fatal(err)
	}
}

func within[T any](t *testing.T, what string, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(time.Minute):
		t.Fatalf("timeout waiting for %s", what)
	}
	return v
}

// TestName: the server is told kvepp's name and version.
func TestName(t *testing.T) {
	useragent.Set("v1.2.3")
	t.Cleanup(func() { useragent.Set("") })
	s := newServer(t)
	c, err := Connect(Config{Server: "nats://" + s.at, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if said := within(t, "CONNECT", s.named); !strings.Contains(said, `"name":"kvepp/1.2.3"`) {
		t.Errorf("CONNECT %s", said)
	}
}

// A server that is absent at first, then starts, stops and starts again.
func TestReconnects(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	s := newServer(t)
	s.end()
	changed, messages, logged := make(chan bool, 10), make(chan string, 10), &logtest.Log{}
	c, err := Connect(
		Config{Server: "nats://user:secret@" + s.at, Purpose: "loads", Log: slog.New(slog.NewTextHandler(logged, nil)),
			Changed: func(connected bool) { changed <- connected }},
	)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	sub, err := c.Subscribe("a.b", 1<<20, func(data []byte) { messages <- string(data) })
	if err != nil {
		t.Fatal(err)
	}
	if c.Connected() {
		t.Error("connected without a server")
	}
	for _, message := range []string{"one", "two"} {
		s.begin()
		if asked := within(t, "a subscription", s.asked); !strings.HasPrefix(asked, "a.b ") {
			t.Errorf("subscribed to %q", asked)
		} else {
			s.send(asked, []byte(message))
		}
		if got := within(t, "a message", messages); got != message {
			t.Errorf("message %q, want %q", got, message)
		}
		if !within(t, "the report of a connection", changed) || !c.Connected() {
			t.Error("the open connection was not reported")
		}
		s.end()
		if within(t, "the report of the connection's end", changed) {
			t.Error("the ended connection was reported as open")
		}
	}
	for what, want := range map[string]int{"NATS is unreachable": 1, "connection to NATS ended": 2,
		"user:xxxxx@" + s.at: 3, "secret": 0} {
		if got := logged.Count(what); got != want {
			t.Errorf("%q was logged %d times, want %d", what, got, want)
		}
	}
	sub.Close()
}

// Messages that wait to be read are kept up to a bound.
func TestBounded(t *testing.T) {
	s, logged := newServer(t), &logtest.Log{}
	c, err := Connect(Config{Server: s.at, Purpose: "loads", Log: slog.New(slog.NewTextHandler(logged, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	const each, pending, sent = 1000, 20 * 1000, 500
	hold, messages := make(chan struct{}), make(chan byte, sent+1)
	sub, err := c.Subscribe("a", pending, func(data []byte) { <-hold; messages <- data[0] })
	if err != nil {
		t.Fatal(err)
	}
	asked := within(t, "a subscription", s.asked)
	for range sent {
		s.send(asked, bytes.Repeat([]byte{'m'}, each))
	}
	if err := c.conn.FlushTimeout(time.Minute); err != nil { // the server's response follows the messages
		t.Fatal(err)
	}
	lost, err := sub.subscription.Dropped()
	if err != nil {
		t.Fatal(err)
	}
	kept := sent - lost
	if kept < 1 || kept > pending/each+1 {
		t.Errorf(
			"%d messages of %d bytes were kept, want at most %d bytes and the message in the callback",
			kept,
			each,
			pending,
		)
	}
	close(hold)
	for range kept {
		within(t, "a message", messages)
	}
	s.send(asked, []byte("end"))
	if got := within(t, "the last message", messages); got != 'e' {
		t.Errorf("more than %d messages were kept", kept)
	}
	for deadline := time.Now().Add(time.Minute); logged.Count("slow consumer") != 1; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the loss was logged %d times, want once", logged.Count("slow consumer"))
		}
	}
}

func TestInvalidServer(t *testing.T) {
	_, err := Connect(Config{Server: "nats://%zz", Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "--nats-server") {
		t.Errorf("error %v does not name --nats-server", err)
	}
	if got, want := redacted("nats://a:b@c:1,nats://%zz"), "nats://a:xxxxx@c:1,(not a URL)"; got != want {
		t.Errorf("logged as %s, want %s", got, want)
	}
}
