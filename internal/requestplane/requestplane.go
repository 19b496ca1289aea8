// Package requestplane sends requests to endpoints of Dynamo's request plane over TCP, and receives their responses.
//
// It owns the framing, TLS, the port at which workers connect back, and the bounds of what they may send there.
// It never looks into the bodies of requests and responses.
//
// A request names an address and a subject. The endpoint acknowledges the request, connects to the address, names the
// subject, and sends the response in parts. All numbers are big-endian.
//
// Source: dynamo-runtime 1.6.1, pipeline::network: egress and ingress over TCP, codec::two_part.
//
// Concurrency: all methods are safe for concurrent use.
package requestplane

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"
)

// Errors that Ask wraps. Others mean that there is no connection or that the response ended early.
var (
	ErrRefused   = errors.New("refused")                          // the endpoint said so, and why
	ErrMalformed = errors.New("the response breaks the protocol") //
	ErrTooLong   = errors.New("the response is too long")         //
)

const (
	maxHeader    = 64 << 10 // bytes of a part's header, and of an acknowledgement
	maxStrangers = 64       // connections at once that have not named a subject that kvepp waits for
	greeting     = 5 * time.Second
)

// Config configures a Plane.
type Config struct {
	// Callback is HOST:PORT, where endpoints connect with their responses. Without a host it is the address from which
	// kvepp reaches the endpoint; port 0 is any free one. kvepp listens at the port of all interfaces.
	Callback string
	TLS      TLS
}

// Plane sends requests. The zero value is not usable; see New.
type Plane struct {
	host, port string
	tls        TLS

	strangers chan struct{}

	mu       sync.Mutex
	listener net.Listener             // nil until the first request; guarded by mu
	waiting  map[string]chan net.Conn // by subject; guarded by mu
	closed   bool                     // guarded by mu
}

// New returns a Plane, which listens from its first request on. An error means that the configuration is invalid.
func New(c Config) (*Plane, error) {
	host, port, err := net.SplitHostPort(c.Callback)
	if err != nil {
		return nil, err
	}
	if _, err := net.LookupPort("tcp", port); err != nil {
		return nil, err
	}
	if err := c.TLS.check(); err != nil {
		return nil, err
	}
	return &Plane{host: host, port: port, tls: c.TLS, strangers: make(chan struct{}, maxStrangers),
		waiting: map[string]chan net.Conn{}}, nil
}

// Close stops listening. Requests that wait for a response fail.
func (p *Plane) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for subject, connections := range p.waiting {
		close(connections)
		delete(p.waiting, subject)
	}
	if p.listener == nil {
		return nil
	}
	return p.listener.Close()
}

// Ask sends a request to an endpoint, HOST:PORT/PATH, and returns the parts of its response, of at most limit bytes
// together.
//
// Errors wrap ErrRefused, ErrMalformed, ErrTooLong, the error of ctx, or those of package net.
func (p *Plane) Ask(ctx context.Context, endpoint string, body []byte, limit int64) (parts [][]byte, err error) {
	address, path, ok := strings.Cut(endpoint, "/")
	if !ok || len(path) > maxHeader/2 {
		return nil, fmt.Errorf("endpoint %q is not HOST:PORT/PATH", endpoint)
	}
	port, err := p.listen()
	if err != nil {
		return nil, err
	}
	request, err := p.tls.dial(ctx, address)
	if err != nil {
		return nil, err
	}
	defer request.Close()
	defer context.AfterFunc(ctx, func() { request.Close() })()
	subject, connections := newID(), make(chan net.Conn, 1)
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil, net.ErrClosed
	}
	p.waiting[subject] = connections
	p.mu.Unlock()
	defer p.forget(subject, connections)
	host := p.host
	if host == "" {
		if host, _, err = net.SplitHostPort(request.LocalAddr().String()); err != nil {
			return nil, err
		}
	}
	if err := send(request, path, net.JoinHostPort(host, port), subject, body); err != nil {
		return nil, because(ctx, err)
	}
	select {
	case response, open := <-connections:
		if !open {
			return nil, net.ErrClosed
		}
		defer response.Close()
		defer context.AfterFunc(ctx, func() { response.Close() })()
		parts, err := receive(response, limit)
		return parts, because(ctx, err)
	case <-ctx.Done():
		return nil, fmt.Errorf("the worker took the request and did not connect to %s: %w",
			net.JoinHostPort(host, port), ctx.Err())
	}
}

// because adds to an error that ctx ended, which closes connections.
func because(ctx context.Context, err error) error {
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// forget ends the wait for a subject's connection.
func (p *Plane) forget(subject string, connections chan net.Conn) {
	p.mu.Lock()
	delete(p.waiting, subject)
	p.mu.Unlock()
	select {
	case c, open := <-connections:
		if open {
			c.Close()
		}
	default:
	}
}

// newID returns a random UUID.
func newID() string {
	var b [16]byte
	rand.Read(b[:])
	b[6], b[8] = b[6]&0x0f|0x40, b[8]&0x3f|0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// connection is what a request says of the connection for its response.
type connection struct {
	Address string `json:"address"`
	Subject string `json:"subject"`
	Context string `json:"context"`
	Stream  string `json:"stream_type"`
}

// send writes a request and reads the acknowledgement.
func send(c net.Conn, path, callback, subject string, body []byte) error {
	id := newID()
	info, err := json.Marshal(connection{callback, subject, id, "response"})
	if err != nil {
		return err
	}
	control, err := json.Marshal(map[string]any{
		"id": id, "request_type": "single_in", "response_type": "many_out", "payload_codec": "msgpack",
		"connection_info": map[string]string{"transport": "tcp_server", "info": string(info)},
	})
	if err != nil {
		return err
	}
	headers := `{"request-id":"` + id + `"}`
	b := binary.BigEndian.AppendUint16(nil, uint16(len(path)))
	b = append(b, path...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(headers)))
	b = append(b, headers...)
	b = binary.BigEndian.AppendUint32(b, uint32(partOverhead+len(control)+len(body)))
	b = binary.BigEndian.AppendUint64(b, uint64(len(control)))
	b = binary.BigEndian.AppendUint64(b, uint64(len(body)))
	b = binary.BigEndian.AppendUint64(b, 0) // no checksum
	b = append(b, control...)
	if _, err := c.Write(append(b, body...)); err != nil {
		return err
	}
	var size [4]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(size[:])
	if n > maxHeader {
		return fmt.Errorf("acknowledgement of %d bytes: %w", n, ErrMalformed)
	}
	text := make([]byte, n)
	if _, err := io.ReadFull(c, text); err != nil || n == 0 {
		return err
	}
	return fmt.Errorf("%w: %.200q", ErrRefused, text)
}

// partOverhead is the bytes of a part besides header and data: the sizes of both and a checksum.
const partOverhead = 24

// part reads one part, whose data may have limit bytes. Memory grows with the bytes that arrive, not with those
// that were announced.
func part(r io.Reader, limit int64) (header, data []byte, err error) {
	var sizes [partOverhead]byte
	if _, err := io.ReadFull(r, sizes[:]); err != nil {
		return nil, nil, err
	}
	n, m := binary.BigEndian.Uint64(sizes[:]), binary.BigEndian.Uint64(sizes[8:])
	if n > maxHeader {
		return nil, nil, fmt.Errorf("a header of %d bytes: %w", n, ErrMalformed)
	}
	if m > uint64(limit) {
		return nil, nil, fmt.Errorf("%d bytes or more, want at most %d: %w", m, limit, ErrTooLong)
	}
	header = make([]byte, n)
	if _, err := io.ReadFull(r, header); err != nil {
		return nil, nil, err
	}
	var b bytes.Buffer
	_, err = io.CopyN(&b, r, int64(m))
	return header, b.Bytes(), err
}

// receive reads a response after its subject.
func receive(c net.Conn, limit int64) (parts [][]byte, err error) {
	header, _, err := part(c, 0)
	if err != nil {
		return nil, err
	}
	var prologue struct {
		Error *string `json:"error"`
	}
	if err := json.Unmarshal(header, &prologue); err != nil {
		return nil, fmt.Errorf("prologue: %w: %w", err, ErrMalformed)
	}
	if prologue.Error != nil {
		return nil, fmt.Errorf("%w: %.200q", ErrRefused, *prologue.Error)
	}
	for {
		header, data, err := part(c, limit)
		switch {
		case err != nil:
			return nil, err
		case string(header) == `"sentinel"`:
			return parts, nil
		case len(header) > 0:
			return nil, fmt.Errorf("control message %.50q: %w", header, ErrMalformed)
		}
		limit -= int64(len(data) + partOverhead)
		if parts = append(parts, data); limit < 0 {
			return nil, ErrTooLong
		}
	}
}

// listen starts to listen, unless it did, and returns the port.
func (p *Plane) listen() (port string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return "", net.ErrClosed
	}
	if p.listener == nil {
		if p.listener, err = net.Listen("tcp", net.JoinHostPort("", p.port)); err != nil {
			p.listener = nil
			return "", fmt.Errorf("cannot listen for workers' responses: %w", err)
		}
		go p.accept(p.listener)
	}
	_, port, err = net.SplitHostPort(p.listener.Addr().String())
	return port, err
}

func (p *Plane) accept(l net.Listener) {
	for {
		c, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors are left
			time.Sleep(100 * time.Millisecond)
			continue
		}
		select {
		case p.strangers <- struct{}{}:
			go func() {
				defer func() { <-p.strangers }()
				p.greet(c)
			}()
		default:
			c.Close()
		}
	}
}

// greet reads the subject of a connection, and passes the connection to the request that waits for it.
func (p *Plane) greet(c net.Conn) {
	c.SetDeadline(time.Now().Add(greeting))
	c, err := p.tls.accept(c)
	if err != nil {
		c.Close()
		return
	}
	var named connection
	header, _, err := part(c, 0)
	if err == nil {
		err = json.Unmarshal(header, &named)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	connections := p.waiting[named.Subject]
	if err != nil || connections == nil {
		c.Close()
		return
	}
	delete(p.waiting, named.Subject)
	c.SetDeadline(time.Time{})
	connections <- c // has room for one
}
