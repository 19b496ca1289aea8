package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

var crowdSize = flag.Int("crowd", 100, "how many requests the TestCrowd tests run at once")

// crowdMemory is the most that kvepp may have resident, in bytes, in these tests.
const crowdMemory = 512 << 20

// crowd is a server whose responses wait, and the state that its clients share.
type crowd struct {
	arrived  atomic.Int64  // requests
	written  atomic.Int64  // bytes of responses
	read     chan struct{} // closed to let the server read bodies
	finish   chan struct{} // closed to let the server send responses
	received []byte        // the body that every client sends
	response []byte
	others   atomic.Int64 // bodies that differ from it
}

func (c *crowd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet { // kvepp asks for the engine's version
		http.NotFound(w, r)
		return
	}
	c.arrived.Add(1)
	wait := func(until chan struct{}) bool {
		select {
		case <-until:
			return true
		case <-r.Context().Done():
			return false
		}
	}
	if !wait(c.read) {
		return
	}
	if body, err := io.ReadAll(r.Body); err != nil || !bytes.Equal(body, c.received) {
		c.others.Add(1)
	}
	control := http.NewResponseController(w)
	w.Header().Set("content-type", "text/event-stream")
	first := min(len(c.response), 100)
	w.Write(c.response[:first])
	control.Flush()
	if !wait(c.finish) {
		return
	}
	for n := first; n < len(c.response); {
		m, err := w.Write(c.response[n:min(n+16<<10, len(c.response))])
		if err != nil {
			return
		}
		control.Flush()
		n += m
		c.written.Add(int64(m))
	}
}

// crowdClient is a client that sends and reads only when the test calls it.
type crowdClient struct {
	conn net.Conn
	from *bufio.Reader
	resp *http.Response
}

// call connects and sends the headers and the first bytes of a body.
func call(ctx context.Context, url string, body []byte, first int) (*crowdClient, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		return nil, err
	}
	if err := conn.SetDeadline(time.Now().Add(3 * time.Minute)); err != nil {
		return nil, err
	}
	c := &crowdClient{conn: conn, from: bufio.NewReaderSize(conn, 4<<10)}
	_, err = fmt.Fprintf(
		conn,
		"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n",
		len(body),
	)
	if err == nil {
		_, err = conn.Write(body[:first])
	}
	return c, err
}

// hear waits for the response's headers.
func (c *crowdClient) hear() (err error) {
	c.resp, err = http.ReadResponse(c.from, nil)
	return err
}

// rest reads the response's body.
func (c *crowdClient) rest(want []byte) error {
	got, err := io.ReadAll(c.resp.Body)
	if err == nil && (c.resp.StatusCode != http.StatusOK || !bytes.Equal(got, want)) {
		err = fmt.Errorf("status %d, %d bytes that are not the %d sent", c.resp.StatusCode, len(got), len(want))
	}
	return err
}

// all calls f for each client, so many at once, and reports the first error.
func all(t *testing.T, clients []*crowdClient, atOnce int, f func(i int) error) {
	t.Helper()
	var (
		wait   sync.WaitGroup
		next   atomic.Int64
		failed atomic.Int64
		first  sync.Once
	)
	for range atOnce {
		wait.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(clients); i = int(next.Add(1)) - 1 {
				if err := f(i); err != nil {
					failed.Add(1)
					first.Do(func() { t.Errorf("client %d: %v", i, err) })
				}
			}
		})
	}
	wait.Wait()
	if n := failed.Load(); n > 0 {
		t.Fatalf("%d of %d clients failed", n, len(clients))
	}
}

// within checks kvepp's peak resident memory.
func within(t *testing.T, s *stack.Stack, when string) {
	t.Helper()
	n, err := s.KveppMemory()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s: kvepp's memory has peaked at %d MiB", when, n>>20)
	if n > crowdMemory {
		t.Errorf("%s: more than %d MiB", when, crowdMemory>>20)
	}
}

// padded returns a request of so many bytes, padded with a long prompt or another key.
func padded(size int, prompt bool) []byte {
	before, after := fmt.Sprintf(
		`{"model":%q,"stream":true,"messages":[{"role":"user","content":"Hello`,
		stack.Model,
	), `"}]}`
	if !prompt {
		before, after = fmt.Sprintf(
			`{"model":%q,"stream":true,"messages":[{"role":"user","content":"Hello"}],"metadata":"`,
			stack.Model,
		), `"}`
	}
	return []byte(before + strings.Repeat(" brass measure", size/14) + after)
}

func newCrowd(body []byte, response int) *crowd {
	const event = "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\" brass\"}}]}\n\n"
	return &crowd{read: make(chan struct{}), finish: make(chan struct{}), received: body,
		response: append(bytes.Repeat([]byte(event), 1+response/len(event)), "data: [DONE]\n\n"...)}
}

// TestCrowdOfStreams holds many responses that have begun, and lets them end together.
func TestCrowdOfStreams(t *testing.T) {
	c := newCrowd(padded(2000, true), 20_000)
	close(c.read)
	s, envoys, _ := startStorm(t, 4, c, "--router-kv-events=false")
	clients := make([]*crowdClient, *crowdSize)
	t.Cleanup(func() { hangUp(clients) })
	all(t, clients, 64, func(i int) (err error) {
		if clients[i], err = call(t.Context(), envoys[i%2].URL, c.received, len(c.received)); err != nil {
			return err
		}
		return clients[i].hear()
	})
	m, err := s.Metrics(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := float64(len(clients)); m["kvepp_streams"] != n || m["kvepp_active_requests"] != n ||
		m["kvepp_held_body_bytes"] != 0 {
		t.Errorf(
			"of %v requests %v are followed, %v booked; %v bytes are held",
			n,
			m["kvepp_streams"],
			m["kvepp_active_requests"],
			m["kvepp_held_body_bytes"],
		)
	}
	within(t, s, fmt.Sprint(len(clients), " streams"))
	close(c.finish)
	all(t, clients, len(clients), func(i int) error { return clients[i].rest(c.response) })
	if n := c.others.Load(); n > 0 {
		t.Errorf("%d bodies arrived changed", n)
	}
	allFreed(t, s)
}

func hangUp(clients []*crowdClient) {
	for _, c := range clients {
		if c != nil {
			c.conn.Close()
		}
	}
}

// TestCrowdOfSlowServers: bodies of 512 KiB that no server reads, then responses of that size that no client reads.
// Most of these bytes wait in the kernel's TCP memory, which all programs of the machine share. 2,000 bodies of 1 MiB
// use it up on a machine of 24 GiB: the kernel drops packets, kvepp's streams slow down, and kvepp refuses requests
// with 429.
func TestCrowdOfSlowServers(t *testing.T) {
	const (
		size    = 512 << 10
		refused = `kvepp_rejections_total{cause="held_bytes"}`
	)
	c := newCrowd(padded(size, false), size)
	s, envoys, _ := startStorm(t, 4, c, "--router-kv-events=false")
	clients := make([]*crowdClient, *crowdSize)
	t.Cleanup(func() { hangUp(clients) })
	all(t, clients, 8, func(i int) (err error) {
		if clients[i], err = call(t.Context(), envoys[i%2].URL, c.received, len(c.received)); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		err = process.Until(ctx, func() error {
			if n := c.arrived.Load(); n < int64(i-8) {
				return fmt.Errorf("%d requests have reached the servers", n)
			}
			return nil
		})
		if err != nil {
			m, metricsErr := s.Metrics(t.Context())
			return errors.Join(fmt.Errorf("%w; %s %v", err, refused, m[refused]), metricsErr)
		}
		return nil
	})
	eventually(t, func() error {
		if n := c.arrived.Load(); n != int64(len(clients)) {
			return fmt.Errorf("%d requests have reached the servers", n)
		}
		return nil
	})
	within(t, s, fmt.Sprint(len(clients), " servers that do not read"))
	close(c.read)
	all(t, clients, 64, func(i int) error { return clients[i].hear() })
	close(c.finish)
	before, since := int64(-1), time.Now()
	eventually(t, func() error {
		if n := c.written.Load(); n != before {
			before, since = n, time.Now()
		}
		if before == 0 || time.Since(since) < time.Second {
			return errors.New("servers still write answers")
		}
		return nil
	})
	within(t, s, fmt.Sprint(len(clients), " clients that do not read"))
	all(t, clients, 64, func(i int) error { return clients[i].rest(c.response) })
	if n := c.others.Load(); n > 0 {
		t.Errorf("%d bodies arrived changed", n)
	}
	allFreed(t, s)
}

// TestCrowdOfSlowClients: bodies of 1 MB that all lack their end. kvepp holds as many as it has room for, and answers
// them when they are complete. It refuses the others at once with 429.
func TestCrowdOfSlowClients(t *testing.T) {
	c := newCrowd(padded(1<<20, true), 100)
	close(c.read)
	close(c.finish)
	room := min(*crowdSize/2, 64) << 20 // for bodies of this size: 3/4 of 3/10 of the total
	s, envoys, _ := startStorm(t, 4, c, "--router-kv-events=false", fmt.Sprint("--max-buffered-bytes=", room*224/51))
	clients := make([]*crowdClient, *crowdSize)
	t.Cleanup(func() { hangUp(clients) })
	var refused, served atomic.Int64
	heard := make(chan struct{}, len(clients))
	all(t, clients, 16, func(i int) (err error) {
		if clients[i], err = call(t.Context(), envoys[i%2].URL, c.received, 0); err != nil {
			return err
		}
		go func() {
			defer func() { heard <- struct{}{} }()
			if err := clients[i].hear(); err != nil {
				return // kvepp closed its connection; counted as neither
			}
			switch clients[i].resp.StatusCode {
			case http.StatusTooManyRequests:
				refused.Add(1)
			case http.StatusOK:
				if err := clients[i].rest(c.response); err != nil {
					t.Errorf("client %d: %v", i, err)
				}
				served.Add(1)
			default:
				t.Errorf("client %d: status %d", i, clients[i].resp.StatusCode)
			}
		}()
		if _, err := clients[i].conn.Write(c.received[:len(c.received)-1]); err != nil && !closedByPeer(err) {
			return err
		}
		return nil
	})
	fits := int64(room / len(c.received))
	eventually(t, func() error {
		if n := refused.Load(); n < int64(len(clients))-fits {
			return fmt.Errorf("%d are refused, although %d fit", n, fits)
		}
		return nil
	})
	held := metric(t, s, "kvepp_held_body_bytes")
	if held > float64(room)*4/3 || held < float64(room)/2 {
		t.Errorf("kvepp holds %v bytes of %d", held, room)
	}
	within(t, s, fmt.Sprint(len(clients), " clients that do not complete their bodies"))
	for _, client := range clients {
		client.conn.Write(c.received[len(c.received)-1:]) // refused clients have closed their connections
	}
	for range clients {
		<-heard
	}
	t.Logf("%d served, %d refused, %v bytes held meanwhile", served.Load(), refused.Load(), held)
	if n := int64(len(clients)); served.Load()+refused.Load() != n || served.Load() < fits/2 {
		t.Errorf("of %d clients %d were served and %d refused; %d fit", n, served.Load(), refused.Load(), fits)
	}
	if n := c.others.Load(); n > 0 {
		t.Errorf("%d bodies arrived changed", n)
	}
	within(t, s, "when they finish")
	allFreed(t, s)
}

// closedByPeer reports whether a write failed because the other side closed the connection.
func closedByPeer(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && !op.Timeout() && !errors.Is(err, os.ErrDeadlineExceeded)
}
