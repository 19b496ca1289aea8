package zmqsub

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// newContext returns a libzmq context with threads I/O threads and at most this many sockets.
func newContext(threads, sockets int) (*zmq.Context, error) {
	ctx, err := zmq.NewContext()
	if err != nil {
		return nil, err
	}
	if err := errors.Join(ctx.SetIoThreads(threads), ctx.SetMaxSockets(sockets), ctx.SetBlocky(false)); err != nil {
		return nil, errors.Join(err, ctx.Term())
	}
	return ctx, nil
}

// source is a libzmq socket with one connection, and the relay on it. One goroutine at a time may use it.
type source struct {
	*relay
	hub    *Hub
	socket *zmq.Socket
}

// connect connects a new socket to a peer. It waits for the connection and not for the handshake.
func (h *Hub) connect(ctx context.Context, kind zmq.Type, endpoint string, c *Config, within time.Duration) (
	*source, error) {
	network, address, err := dialable(endpoint)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	far, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("zmqsub: connect to %q: %w", endpoint, err)
	}
	name := "@kvepp-" + rand.Text() // a name with @ is in no folder
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		far.Close()
		return nil, fmt.Errorf("zmqsub: relay from %q: %w", endpoint, err)
	}
	socket, err := h.newSocket(kind, "ipc://"+name, c)
	if err != nil {
		far.Close()
		listener.Close()
		return nil, fmt.Errorf("zmqsub: prepare a %v socket: %w", kind, err)
	}
	s := &source{hub: h, socket: socket}
	if s.relay, err = h.startRelay(far, listener, c.MaxMessageBytes); err != nil {
		s.closeSocket()
		return nil, fmt.Errorf("zmqsub: relay from %q: %w", endpoint, err)
	}
	return s, nil
}

// never is longer than a socket lives: zmqsub opens a new one for each connection.
const never = 24 * time.Hour

// newSocket returns a socket that connects to endpoint. A SUB socket subscribes.
func (h *Hub) newSocket(kind zmq.Type, endpoint string, c *Config) (*zmq.Socket, error) {
	h.calls.Lock()
	defer h.calls.Unlock()
	s, err := h.ctx.NewSocket(kind)
	if err != nil {
		return nil, err
	}
	t := &h.timing
	err = errors.Join(
		s.SetLinger(0),
		s.SetReconnectIvl(never),
		s.SetHandshakeIvl(t.handshake),
		s.SetHeartbeatIvl(t.heartbeat),
		s.SetHeartbeatTimeout(never), // the relay ends silent connections; libzmq does not see the messages
		s.SetHeartbeatTtl(t.heartbeatTimeout),
	)
	if kind == zmq.SUB {
		err = errors.Join(err, s.SetSubscribe(c.Topic))
	}
	if err == nil {
		err = s.Connect(endpoint)
	}
	if err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// close must not run while another goroutine uses the source.
func (s *source) close() {
	s.relay.close()
	s.closeSocket()
}

func (s *source) closeSocket() {
	s.hub.calls.Lock()
	defer s.hub.calls.Unlock()
	s.socket.Close() // an error means that it is closed
}

// request sends an empty frame and p after the handshake.
func (s *source) request(p []byte) error {
	_, err := s.socket.SendMessageDontwait("", p)
	return err
}

// dialable returns an endpoint as package net writes it.
func dialable(endpoint string) (network, address string, err error) {
	if endpoint == "" {
		return "", "", errors.New("zmqsub: the endpoint is empty; want one such as tcp://10.0.0.7:5557")
	}
	if strings.IndexByte(endpoint, 0) >= 0 {
		return "", "", fmt.Errorf("zmqsub: endpoint %q contains a zero byte", endpoint)
	}
	if path, ok := strings.CutPrefix(endpoint, "ipc://"); ok && path != "" {
		return "unix", path, nil
	}
	address, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", "", fmt.Errorf("zmqsub: endpoint %q: want one such as tcp://10.0.0.7:5557", endpoint)
	}
	if strings.HasPrefix(address, "*") {
		return "", "", fmt.Errorf("zmqsub: %q is an address to bind; connecting needs the publisher's host", endpoint)
	}
	colon := strings.LastIndexByte(address, ':')
	port := address[colon+1:]
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return "", "", fmt.Errorf("zmqsub: endpoint %q must end in a port from 1 to 65535", endpoint)
	}
	host := strings.TrimSuffix(strings.TrimPrefix(address[:max(colon, 0)], "["), "]")
	if host == "" {
		return "", "", fmt.Errorf("zmqsub: endpoint %q lacks the publisher's host", endpoint)
	}
	return "tcp", net.JoinHostPort(host, port), nil
}
