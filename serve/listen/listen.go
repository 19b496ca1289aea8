// Package listen has the ports of a running kvepp: which connections they take, and what each client can use of them;
// HTTP servers, gRPC servers, health checks, and how the ports of kvepp serve drain.
//
// Concurrency: everything is safe for concurrent use, except methods of settings and Daemon, which are for the start.
package listen

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
)

// At listens at the address of a flag; flag has no dashes. Errors say what to do.
func At(flag, address string) (net.Listener, error) {
	l, err := net.Listen("tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("--%s: the address %s is in use; stop the process that listens there (ss -ltnp shows "+
			"it), or give another port", flag, address)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("--%s: this user may not listen at %s; give a port above 1023, or the capability "+
			"NET_BIND_SERVICE", flag, address)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("--%s: this machine has no network interface with the address of %s; give one that "+
			"\"ip address\" shows", flag, address)
	case err != nil:
		return nil, fmt.Errorf("--%s: %w", flag, err)
	}
	return l, nil
}

// Limit returns a listener with at most most connections. name is its label in metrics.
func Limit(l net.Listener, name string, most int, m *metrics.Metrics) *connlimit.Listener {
	limited := connlimit.New(l, most)
	metrics.Gauge(m, metrics.Connections, func() int { open, _, _ := limited.Counts(); return open }, "listener", name)
	metrics.Counter(m, metrics.ConnectionsClosed, func() int64 { _, n, _ := limited.Counts(); return n },
		"listener", name, "outcome", "evicted")
	metrics.Counter(m, metrics.ConnectionsClosed, func() int64 { _, _, n := limited.Counts(); return n },
		"listener", name, "outcome", "refused")
	return limited
}

// Limits on the resources that a peer of a gRPC port can hold.
const (
	handshakeWithin = 10 * time.Second // for TLS and the first HTTP/2 frames
	idleConnection  = 15 * time.Minute // a connection without a stream is closed gracefully
	askSilentAfter  = time.Minute      // kvepp pings a connection that receives nothing
	silentWithin    = 20 * time.Second // for the response to a ping
	leastPings      = 5 * time.Second  // between a peer's pings; a peer that pings more often is disconnected
	// bytes of names and values in a stream's gRPC metadata; the client's headers are not part of it
	maxGRPCMetadata  = 16 << 10
	spareStreams     = 1000 // per connection, beyond --max-streams: these get an error with a reason
	leastConnections = 64
	mostConnections  = 4096
)

// Connections is the limit on the connections of a gRPC port: a sixteenth of the process's file descriptors, because
// subscriptions to KV events need most of them.
func Connections() int { return connlimit.Share(16, leastConnections, mostConnections) }

// Options returns gRPC server options that bound what each peer can use. methods has the server's methods by name.
// A stream counts as a request of its connection of l; nil: none does.
func Options(l *connlimit.Listener, methods map[string]*connlimit.Method) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ConnectionTimeout(handshakeWithin),
		grpc.KeepaliveParams(
			keepalive.ServerParameters{MaxConnectionIdle: idleConnection, Time: askSilentAfter, Timeout: silentWithin}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: leastPings, PermitWithoutStream: true}),
		grpc.MaxHeaderListSize(maxGRPCMetadata),
		grpc.StreamInterceptor(
			func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
				return l.Serve(server, stream, methods[info.FullMethod], handler)
			},
		),
	}
}
