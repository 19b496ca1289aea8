package e2e

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"kvepp/test/harness/stack"
)

// frames is a client's HTTP/2 connection on which the test writes every frame itself.
type frames struct {
	net.Conn
	*http2.Framer
	out *bufio.Writer

	reading chan struct{} // holds a token while frames may be read
	mu      sync.Mutex
	changed sync.Cond
	window  map[uint32]int64 // flow-control windows in bytes, by stream; 0 is the connection
	initial int64
	ended   map[uint32]string // how streams ended: a status, or the reset's code
	status  map[uint32]string
	err     error // of the connection
}

func dialFrames(ctx context.Context, url string) (*frames, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(url, "http://"))
	if err != nil {
		return nil, err
	}
	f := &frames{
		Conn:    conn,
		reading: make(chan struct{}, 1),
		out:     bufio.NewWriterSize(conn, 64<<10),
		initial: 65535,
		window:  map[uint32]int64{0: 65535},
		ended:   map[uint32]string{},
		status:  map[uint32]string{},
	}
	f.reading <- struct{}{}
	f.changed.L = &f.mu
	f.Framer = http2.NewFramer(f.out, conn)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	io.WriteString(f.out, http2.ClientPreface)
	if err := errors.Join(f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 30}),
		f.out.Flush()); err != nil {
		return nil, err
	}
	settled := make(chan struct{})
	go f.read(settled)
	<-settled
	return f, errors.Join(f.WriteSettingsAck(), f.out.Flush())
}

// read processes the proxy's frames until the connection ends.
func (f *frames) read(settled chan struct{}) {
	once := sync.OnceFunc(func() { close(settled) })
	defer once()
	for {
		<-f.reading
		f.reading <- struct{}{}
		frame, err := f.ReadFrame()
		f.mu.Lock()
		switch x := frame.(type) {
		case nil:
		case *http2.SettingsFrame:
			if n, ok := x.Value(http2.SettingInitialWindowSize); ok {
				for id := range f.window {
					if id != 0 {
						f.window[id] += int64(n) - f.initial
					}
				}
				f.initial = int64(n)
			}
		case *http2.WindowUpdateFrame:
			f.window[x.StreamID] += int64(x.Increment)
			if x.StreamID == 0 {
				once()
			}
		case *http2.MetaHeadersFrame:
			if s := x.PseudoValue("status"); s != "" {
				f.status[x.StreamID] = s
			}
			if x.StreamEnded() {
				f.ended[x.StreamID] = f.status[x.StreamID]
			}
		case *http2.DataFrame:
			if x.StreamEnded() {
				f.ended[x.StreamID] = f.status[x.StreamID]
			}
		case *http2.RSTStreamFrame:
			if f.ended[x.StreamID] == "" {
				f.ended[x.StreamID] = fmt.Sprint("reset: ", x.ErrCode)
			}
		case *http2.GoAwayFrame:
			err = fmt.Errorf("GOAWAY: %v %s", x.ErrCode, x.DebugData())
		}
		if err != nil {
			f.err = err
		}
		f.changed.Broadcast()
		f.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// send waits for window space and writes DATA.
func (f *frames) send(id uint32, end bool, data []byte) error {
	f.mu.Lock()
	for f.err == nil && f.ended[id] == "" && (f.window[0] < int64(len(data)) || f.window[id] < int64(len(data))) {
		f.mu.Unlock()
		f.out.Flush()
		f.mu.Lock()
		if f.err == nil && f.ended[id] == "" && (f.window[0] < int64(len(data)) || f.window[id] < int64(len(data))) {
			f.changed.Wait()
		}
	}
	err, ended := f.err, f.ended[id]
	f.window[0] -= int64(len(data))
	f.window[id] -= int64(len(data))
	f.mu.Unlock()
	if err != nil {
		return err
	}
	if ended != "" {
		return fmt.Errorf("stream %d ended: %s", id, ended)
	}
	return f.WriteData(id, end, data)
}

func (f *frames) open(id uint32, end bool, more ...string) error {
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":authority", "x"},
		{":path", "/v1/completions"}, {"content-type", "application/json"}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	for i := 0; i+1 < len(more); i += 2 {
		enc.WriteField(hpack.HeaderField{Name: more[i], Value: more[i+1]})
	}
	f.mu.Lock()
	f.window[id] = f.initial
	f.mu.Unlock()
	return f.WriteHeaders(
		http2.HeadersFrameParam{StreamID: id, BlockFragment: block.Bytes(), EndStream: end, EndHeaders: true},
	)
}

func (f *frames) wait(id uint32) string {
	f.out.Flush()
	f.mu.Lock()
	defer f.mu.Unlock()
	for f.ended[id] == "" && f.err == nil {
		f.changed.Wait()
	}
	if f.ended[id] != "" {
		return f.ended[id]
	}
	return f.err.Error()
}

// batched collects writes for half a second, so that thousands of small frames arrive together.
type batched struct {
	net.Conn
	mu  sync.Mutex
	buf []byte
	err error
}

func (b *batched) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.buf) == 0 {
		time.AfterFunc(500*time.Millisecond, func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			_, b.err = b.Conn.Write(b.buf)
			b.buf = b.buf[:0]
		})
	}
	b.buf = append(b.buf, p...)
	return len(p), b.err
}

type batches struct{ net.Listener }

func (l batches) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	return &batched{Conn: c}, err
}

// floodPieces is how many pieces of one byte a flood has: six times Envoy's default of max_outbound_frames.
const floodPieces = 60_000

// flooded is an engine whose responses stay open, or come in pieces of one byte.
type flooded struct{ finish chan struct{} }

func (f *flooded) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return
	}
	control := http.NewResponseController(w)
	switch r.Header.Get("x-answer") {
	case "long":
		for range 400_000 {
			if _, err := io.WriteString(w, "data: {\"choices\":[]}\n\n"); err != nil || control.Flush() != nil {
				return
			}
		}
	case "pieces":
		for range floodPieces {
			if _, err := w.Write([]byte("x")); err != nil || control.Flush() != nil {
				return
			}
		}
	case "open":
		for more := true; more; {
			if _, err := io.WriteString(w, "data: piece\n\n"); err != nil || control.Flush() != nil {
				return
			}
			select {
			case <-f.finish:
				more = false
			case <-r.Context().Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}
}

// TestOneClientCutsNoOthers: clients share Envoy's connections to kvepp. Whichever load one client or engine causes on
// them, the responses of others continue, and Envoy ends no connection.
func TestOneClientCutsNoOthers(t *testing.T) {
	engine := &flooded{finish: make(chan struct{})}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: engine, Protocols: new(http.Protocols)}
	server.Protocols.SetUnencryptedHTTP2(true)
	go server.Serve(batches{l})
	t.Cleanup(func() { server.Close() })
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Kill:       true,
			Servers:    []string{l.Addr().String()},
			KveppFlags: []string{"--router-kv-events=false"},
			EditEnvoy:  http2Upstream,
		},
	)
	// One Envoy does not send kvepp the bodies of responses. Through kvepp, waiting pieces are joined.
	bodiless, err := s.StartEnvoy(t.Context(), "override-host.yaml", func(extProc map[string]any) {
		stack.At(extProc, "processing_mode").(map[string]any)["response_body_mode"] = "NONE"
	})
	if err != nil {
		t.Fatal(err)
	}
	clients := stormClients(t)
	body := fmt.Sprintf(`{"model":%q,"prompt":"hello"}`, stack.Model)
	ask := func(http2 bool, response string) (*http.Response, error) {
		req, err := http.NewRequestWithContext(
			t.Context(),
			"POST",
			s.Envoy.URL+"/v1/completions",
			strings.NewReader(body),
		)
		if err != nil {
			return nil, err
		}
		req.Header.Set("content-type", "application/json")
		req.Header.Set("x-answer", response)
		return clients[http2].Do(req)
	}
	stats := func(envoy *stack.Envoy) map[string]string {
		m, err := envoy.Stats(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	attacks := []struct {
		name string
		do   func(t *testing.T) error
	}{
		{"a body in pieces of one byte", func(t *testing.T) error {
			f, err := dialFrames(t.Context(), s.Envoy.URL)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := errors.Join(f.open(1, false), f.send(1, false, []byte(body))); err != nil {
				return err
			}
			for range floodPieces {
				if err := f.send(1, false, []byte(" ")); err != nil {
					return err
				}
			}
			if err := f.send(1, true, nil); err != nil {
				return err
			}
			if how := f.wait(1); how != "200" {
				return fmt.Errorf("the request itself ended with %s", how)
			}
			return nil
		}},
		{"thousands of requests cancelled at once", func(t *testing.T) error {
			for range 6 {
				f, err := dialFrames(t.Context(), s.Envoy.URL)
				if err != nil {
					return err
				}
				defer f.Close()
				for i := range uint32(1000) {
					if err := errors.Join(f.open(2*i+1, false), f.send(2*i+1, false, []byte(body[:10]))); err != nil {
						return err
					}
				}
				if err := f.out.Flush(); err != nil {
					return err
				}
			}
			// All of them are at kvepp, which waits for the rest of their bodies. Now their connections end together.
			eventually(t, func() error {
				if n := metric(t, s, "kvepp_streams"); n < 6000 {
					return fmt.Errorf("%v requests have reached kvepp", n)
				}
				return nil
			})
			return nil
		}},
		{"a response in pieces of one byte", func(t *testing.T) error {
			resp, err := ask(false, "pieces")
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			n, err := io.Copy(io.Discard, resp.Body)
			if err == nil && n != floodPieces {
				err = fmt.Errorf("%d bytes of %d", n, floodPieces)
			}
			return err
		}},
		{"a long response in short pieces that its client reads late", func(t *testing.T) error {
			f, err := dialFrames(t.Context(), bodiless.URL)
			if err != nil {
				return err
			}
			defer f.Close()
			const buffered, floods = "http.inference.downstream_cx_tx_bytes_buffered", "http2.outbound_flood"
			<-f.reading
			if err := errors.Join(f.WriteWindowUpdate(0, 1<<30), f.open(1, false, "x-answer", "long"),
				f.WriteData(1, true, []byte(body)), f.out.Flush()); err != nil {
				return err
			}
			eventually(t, func() error {
				m := stats(bodiless)
				if n, err := strconv.Atoi(m[buffered]); err != nil || n < 400<<10 && cmp.Or(m[floods], "0") == "0" {
					return fmt.Errorf("%s bytes wait for the client (%v)", m[buffered], err)
				}
				return nil
			})
			f.reading <- struct{}{}
			if how := f.wait(1); how != "200" {
				return fmt.Errorf("the request itself ended with %s", how)
			}
			return nil
		}},
	}
	for _, a := range attacks {
		t.Run(a.name, func(t *testing.T) {
			engine.finish = make(chan struct{})
			before := stats(s.Envoy)
			const others = 30
			var (
				wait, begun sync.WaitGroup
				cut         atomic.Int64
			)
			begun.Add(others)
			for i := range others {
				wait.Go(func() {
					resp, err := ask(i%2 == 0, "open")
					begun.Done()
					if err == nil {
						defer resp.Body.Close()
						var text []byte
						if text, err = io.ReadAll(resp.Body); err == nil &&
							(resp.StatusCode != http.StatusOK || !bytes.HasSuffix(text, []byte("[DONE]\n\n"))) {
							err = fmt.Errorf(
								"status %d, a response that ends with %q",
								resp.StatusCode,
								text[max(0, len(text)-50):],
							)
						}
					}
					if err != nil && cut.Add(1) == 1 {
						t.Errorf("another client's answer: %v", err)
					}
				})
			}
			begun.Wait()
			if err := a.do(t); err != nil {
				t.Error(err)
			}
			eventually(t, func() error { // wait for the end of the attack
				if n := metric(t, s, "kvepp_streams"); n > others {
					return fmt.Errorf("kvepp has %v open streams", n)
				}
				return nil
			})
			close(engine.finish)
			wait.Wait()
			if n := cut.Load(); n > 0 {
				t.Errorf("%d of %d answers were broken off", n, others)
			}
			after := stats(s.Envoy)
			for name, n := range after {
				if strings.Contains(name, "http2.") && strings.HasSuffix(name, "_flood") &&
					n != cmp.Or(before[name], "0") {
					t.Errorf("Envoy ended connections: %s %s, before the attack %s", name, n, cmp.Or(before[name], "0"))
				}
			}
			n, err := s.KveppMemory()
			if err != nil {
				t.Fatal(err)
			}
			t.Logf(
				"kvepp's memory has peaked at %d MiB; Envoy made %s connections to it, and has %s bytes of memory",
				n>>20,
				after["cluster.kvepp.upstream_cx_total"],
				after["server.memory_allocated"],
			)
		})
	}
	allFreed(t, s)
}
