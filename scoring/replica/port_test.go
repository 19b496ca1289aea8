package replica

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"kvepp/internal/connlimit"
)

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

var strangerTLS = &tls.Config{InsecureSkipVerify: true, NextProtos: []string{alpn}}

// Connections without an admitted peer make room for one: those that say nothing, that end a handshake and say nothing,
// that speak an earlier version, and those without the token. A peer that is admitted stays connected.
func TestStrangersKeepNoPeerOut(t *testing.T) {
	for name, connect := range map[string]stranger{
		"no handshake": func(ctx context.Context, at string) func() {
			conn, err := net.Dial("tcp", at)
			return silent(ctx, conn, err)
		},
		"no hello": func(ctx context.Context, at string) func() {
			conn, err := tls.Dial("tcp", at, strangerTLS)
			return silent(ctx, conn, err)
		},
		"an earlier version": func(ctx context.Context, at string) func() {
			conn, err := tls.Dial("tcp", at, &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
			return silent(ctx, conn, err)
		},
		"no token": func(ctx context.Context, at string) func() {
			conn, err := tls.Dial("tcp", at, strangerTLS)
			if err == nil {
				err = (&greeting{Index: true, Origin: 99, Group: "pool"}).send(conn)
			}
			return silent(ctx, conn, err)
		},
	} {
		t.Run(name, func(t *testing.T) { strangersKeepNoPeerOut(t, connect) })
	}
}

func strangersKeepNoPeerOut(t *testing.T, connect stranger) {
	const most = 32
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := connlimit.New(raw, most)
	a := newTestNode(withToken(t, "secret"), nil)
	t.Cleanup(a.Close)
	go func() { _ = a.Serve(l) }()
	b := startNode(t, withToken(t, "secret"), nil)
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
	closed := func() int64 { _, evicted, refused := l.Counts(); return evicted + refused }
	refused := func() (n int) {
		for _, why := range Reasons {
			n += a.counted(Refused, why)
		}
		return n
	}
	came := func() int64 { return closed() + int64(refused()) }
	eventually(t, "strangers take all places", func() bool { return came() > 0 })
	b.SetPeers([]string{at})
	live := func() bool { return len(b.Peers()) == 1 && b.Peers()[0].State == Live }
	eventually(t, "the peer hears the node", live)
	before := came()
	eventually(t, "further strangers came", func() bool { return came() > before+most })
	if !live() || len(a.Readers()) != 1 {
		t.Errorf("the peer was disconnected: %+v, %+v", b.Peers(), a.Readers())
	}
	if _, _, refused := l.Counts(); refused > 0 {
		t.Errorf("%d connections were refused although one peer alone is admitted", refused)
	}
}
