package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// connection is a client's connection, HTTP/1.1.
type connection struct {
	net.Conn
	in  *bufio.Reader
	out []byte
}

func dial(port int) (*connection, error) {
	c, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		return nil, err
	}
	return &connection{Conn: c, in: bufio.NewReaderSize(c, 16<<10)}, nil
}

// send posts a chat and returns the response with its body unread.
func (c *connection) send(body []byte, header string) (*http.Response, error) {
	c.SetDeadline(time.Now().Add(5 * time.Minute))
	c.out = fmt.Appendf(
		c.out[:0],
		"POST /v1/chat/completions HTTP/1.1\r\nHost: m\r\nContent-Type: application/json\r\n"+
			"Content-Length: %d\r\n%s\r\n",
		len(body),
		header,
	)
	c.out = append(c.out, body...)
	if _, err := c.Write(c.out); err != nil {
		return nil, err
	}
	r, err := http.ReadResponse(c.in, nil)
	if err == nil && r.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(r.Body, 400))
		return nil, fmt.Errorf("the response is %s: %s", r.Status, text)
	}
	return r, err
}

// ask posts a chat and reads the whole response.
func (c *connection) ask(body []byte) error {
	r, err := c.send(body, "")
	if err == nil {
		_, err = io.Copy(io.Discard, r.Body)
		r.Body.Close()
	}
	return err
}

// load is a closed loop: each connection sends its next request when it has the previous response.
type load struct {
	port, connections int
	length            time.Duration
	// next returns the next request of a connection, and first, an unmeasured request that must be answered before;
	// nil: none.
	next func(w *writer) (first, body []byte)
}

// measured is the result of a load.
type measured struct {
	times []time.Duration // of each measured request
	sent  int             // number of measured requests
	took  time.Duration
}

func (l *load) run(ctx context.Context, words words) (*measured, error) {
	ctx, cancel := context.WithTimeout(ctx, l.length)
	defer cancel()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // guards out and err
		out   = &measured{}
		first error
	)
	began := time.Now()
	for range l.connections {
		w := words.writer()
		wg.Go(func() {
			times, sent, err := l.one(ctx, w)
			mu.Lock()
			defer mu.Unlock()
			out.times = append(out.times, times...)
			out.sent += sent
			if err != nil {
				first = err
			}
		})
	}
	wg.Wait()
	out.took = time.Since(began)
	return out, first
}

func (l *load) one(ctx context.Context, w *writer) (times []time.Duration, sent int, err error) {
	c, err := dial(l.port)
	if err != nil {
		return nil, 0, err
	}
	defer c.Close()
	for ctx.Err() == nil {
		before, body := l.next(w)
		if before != nil {
			if err := c.ask(before); err != nil {
				return nil, 0, err
			}
			sent++
		}
		at := time.Now()
		if err := c.ask(body); err != nil {
			return nil, 0, err
		}
		times = append(times, time.Since(at))
		sent++
	}
	return times, sent, nil
}

// readStream requests a stream and returns the delay of each of its pieces.
func readStream(port, chunks, intervalMS int, body []byte) (delays []time.Duration, err error) {
	c, err := dial(port)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	r, err := c.send(body, fmt.Sprintf("%s: %d\r\n%s: %d\r\n", chunksHeader, chunks, intervalHeader, intervalMS))
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	lines := bufio.NewReader(r.Body)
	for {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if sent, ok := bytes.CutPrefix(line, []byte(`data: {"id":"`)); ok {
			end := bytes.IndexByte(sent, '"')
			if end < 0 {
				return nil, fmt.Errorf("a piece of a stream is malformed: %q", line)
			}
			at, err := strconv.ParseInt(string(sent[:end]), 10, 64)
			if err != nil {
				return nil, err
			}
			delays = append(delays, time.Since(time.Unix(0, at)))
		}
	}
	if len(delays) != chunks {
		return nil, fmt.Errorf("%d pieces of a stream arrived, want %d", len(delays), chunks)
	}
	return delays, nil
}
