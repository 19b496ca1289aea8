package main

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
	"kvepp/scoring/replica"
	"kvepp/scoring/replica/link"
	"kvepp/serve/listen"
	"kvepp/serve/secrets"
)

// portNode is a replica with a token, with at most so many connections at its port.
func portNode(t *testing.T, origin uint64, most int) (*link.Node, *connlimit.Listener) {
	t.Helper()
	files := secrets.Follow(t.Context(), metrics.New(), slog.New(slog.DiscardHandler))
	certs, err := files.Certificates(secrets.Config{})
	if err != nil {
		t.Fatal(err)
	}
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := connlimit.New(raw, most)
	n := link.New(link.Config{Self: replica.Identity{Origin: origin, Epoch: 1}, Group: "pool",
		Security: link.Security{Certificate: certs.Own,
			Token: func() string { return "secret" }},
		Known: func(replica.Worker) bool { return true }, Drain: func(func(*replica.Entry)) time.Duration { return 0 },
		Apply: func(*replica.Effect) {}, Log: slog.New(slog.DiscardHandler),
		InUse: func(ctx context.Context) func() { return listen.MarkInUse(ctx, l) }})
	go func() { _ = n.Serve(l, listen.Options(nil, nil)...) }()
	t.Cleanup(n.Close)
	return n, l
}

// stranger connects to a replica's port; hold then keeps the connection until the other end closes it or ctx ends.
type stranger func(ctx context.Context, at string) (hold func())

func silent(ctx context.Context, conn net.Conn, err error) func() {
	if err != nil {
		return func() {}
	}
	return func() {
		defer context.AfterFunc(ctx, func() { conn.Close() })()
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
	}
}

var strangerTLS = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}}

// streams opens streams that say nothing.
func streams(method string) stranger {
	return func(ctx context.Context, at string) func() {
		security := grpc.WithTransportCredentials(credentials.NewTLS(strangerTLS))
		conn, err := grpc.NewClient("passthrough:///"+at, security)
		if err != nil {
			return func() {}
		}
		return func() {
			defer conn.Close()
			for range 4 {
				s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
				if err != nil {
					return
				}
				defer func() { _ = s.RecvMsg(new(int)) }()
			}
		}
	}
}

// Connections without an admitted peer make room for one: those that say nothing, that have no stream, and those whose
// streams say nothing. A peer that is admitted stays connected.
func TestStrangersKeepNoPeerOut(t *testing.T) {
	for name, connect := range map[string]stranger{
		"no handshake": func(ctx context.Context, at string) func() {
			conn, err := net.Dial("tcp", at)
			return silent(ctx, conn, err)
		},
		"no stream": func(ctx context.Context, at string) func() {
			conn, err := tls.Dial("tcp", at, strangerTLS)
			return silent(ctx, conn, err)
		},
		"silent streams":                 streams("/kvepp.Replica/Watch"),
		"silent streams for the index":   streams("/kvepp.Replica/Index"),
		"streams of an unknown method":   streams("/kvepp.Replica/Other"),
		"streams of the health protocol": streams("/grpc.health.v1.Health/Watch"),
	} {
		t.Run(name, func(t *testing.T) { strangersKeepNoPeerOut(t, connect) })
	}
}

func strangersKeepNoPeerOut(t *testing.T, connect stranger) {
	const most = 32
	a, l := portNode(t, 1, most)
	b, _ := portNode(t, 2, most)
	at := l.Addr().String()
	ctx, cancel := context.WithCancel(t.Context())
	var strangers sync.WaitGroup
	defer strangers.Wait()
	defer cancel()
	for range 2 * most {
		strangers.Go(func() {
			again := time.NewTicker(200 * time.Millisecond) // else a slow machine has no time for the peer's handshake
			defer again.Stop()
			for ctx.Err() == nil {
				connect(ctx, at)()
				<-again.C
			}
		})
	}
	await := func(what string, holds func() bool) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); !holds(); <-time.After(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("not within 30 s: " + what)
			}
		}
	}
	closed := func() int64 { _, evicted, refused := l.Counts(); return evicted + refused }
	await("strangers take all places", func() bool { return closed() > 0 })
	b.SetPeers([]string{at})
	live := func() bool { return len(b.Peers()) == 1 && b.Peers()[0].State == replica.Live }
	await("the peer reads the log", live)
	before := closed()
	await("further strangers came", func() bool { return closed() > before+most })
	if !live() || len(a.Stats().Readers) != 1 {
		t.Errorf("the peer was disconnected: %+v, %+v", b.Peers(), a.Stats().Readers)
	}
	if _, _, refused := l.Counts(); refused > 0 {
		t.Errorf("%d connections were refused although one peer alone is admitted", refused)
	}
}
