package main

import (
	"context"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"

	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
)

// Bounds on what a peer of a gRPC port can hold.
const (
	handshakeWithin = 10 * time.Second // for TLS and HTTP/2's first frames
	idleConnection  = 15 * time.Minute // without a stream, then it is closed in order
	askSilentAfter  = time.Minute      // a connection on which nothing comes is asked whether it lives
	silentWithin    = 20 * time.Second // for the answer
	leastPings      = 5 * time.Second  // between a peer's own questions; more often, and its connection is closed
	// bytes of names and values of a stream's metadata, which are not those of the request
	maxGRPCMetadata  = 64 << 10
	spareStreams     = 1000 // of a connection, beyond --max-streams: these are refused with words
	leastConnections = 64
	mostConnections  = 4096
)

// connections is how many connections a gRPC port may have: a sixteenth of the process's file descriptors, since
// subscriptions to KV events need most.
func connections() int { return connlimit.Share(16, leastConnections, mostConnections) }

// grpcLimits are options of a gRPC server at a listener, under which no peer can hold much of it. maxStreams is the
// most streams of all peers that are served; 0: no limit.
func grpcLimits(l *connlimit.Listener, maxStreams int) []grpc.ServerOption {
	options := []grpc.ServerOption{
		grpc.ConnectionTimeout(handshakeWithin),
		grpc.KeepaliveParams(
			keepalive.ServerParameters{MaxConnectionIdle: idleConnection, Time: askSilentAfter, Timeout: silentWithin},
		),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: leastPings, PermitWithoutStream: true}),
		grpc.MaxHeaderListSize(maxGRPCMetadata),
		// Connections with a stream are those that count as used.
		grpc.StreamInterceptor(
			func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
				defer begun(stream.Context(), l)()
				return handler(server, stream)
			},
		),
		grpc.UnaryInterceptor(
			func(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
				defer begun(ctx, l)()
				return handler(ctx, req)
			},
		),
	}
	if maxStreams > 0 {
		options = append(options, grpc.MaxConcurrentStreams(uint32(maxStreams+spareStreams)))
	}
	return options
}

// begun tells the connection of a stream that it has one, and returns what tells it the end.
func begun(ctx context.Context, l *connlimit.Listener) func() {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return func() {}
	}
	c := l.Find(p.LocalAddr, p.Addr)
	c.Begin()
	return c.End
}

// limited returns a listener of at most most connections, which metrics call by a name.
func limited(l net.Listener, name string, most int, m *metrics.Metrics) *connlimit.Listener {
	limited := connlimit.New(l, most)
	count := func(read func(open int, evicted, refused int64) float64) func() float64 {
		return func() float64 { return read(limited.Counts()) }
	}
	m.Source(
		metrics.Connections,
		metrics.ConnectionsHelp,
		prometheus.Labels{"listener": name},
		count(func(open int, _, _ int64) float64 { return float64(open) }),
	)
	for outcome, read := range map[string]func(int, int64, int64) float64{
		"evicted": func(_ int, evicted, _ int64) float64 { return float64(evicted) },
		"refused": func(_ int, _, refused int64) float64 { return float64(refused) },
	} {
		m.CounterSource(
			metrics.ConnectionsClosed,
			metrics.ConnectionsClosedHelp,
			prometheus.Labels{"listener": name, "outcome": outcome},
			count(read),
		)
	}
	return limited
}
