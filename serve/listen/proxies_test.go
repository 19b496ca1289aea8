package listen

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/internal/metrics"
)

// TestNoProxyTiming: kvepp logs the line after 60 s, and never if a proxy has connected or kvepp stops.
func TestNoProxyTiming(t *testing.T) {
	for _, c := range []struct {
		name               string
		connects, failures int
		stops              bool
		want               int
	}{{"no proxy", 0, 0, false, 1}, {"a failed handshake", 0, 2, false, 1}, {"a proxy", 1, 0, false, 0},
		{"a stop", 0, 0, true, 0}} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var log logtest.Log
				p := NewProxies(nil, metrics.New(), slog.New(slog.NewTextHandler(&log, nil)))
				ctx, stop := context.WithCancel(t.Context())
				defer stop()
				go p.WarnWithoutProxy(ctx, "127.0.0.1:9002")
				for range c.connects {
					p.succeeded(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}, nil)
				}
				for range c.failures {
					p.failed(&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}, errIsTLS)
				}
				<-time.After(proxyPatience - time.Second)
				synctest.Wait()
				if n := log.Count("no proxy has connected"); n != 0 {
					t.Errorf("logged %d times after 59 s, want 0", n)
				}
				if c.stops {
					stop()
				}
				<-time.After(10 * time.Minute)
				synctest.Wait()
				if n := log.Count("no proxy has connected"); n != c.want {
					t.Errorf("logged %d times, want %d: %s", n, c.want, log.String())
				}
				if want := fmt.Sprintf("failed_handshakes=%d", c.failures); c.want == 1 &&
					!strings.Contains(log.String(), want) {
					t.Errorf("the log line lacks %s: %s", want, log.String())
				}
			})
		})
	}
}

// TestHandshakeFailuresAreNotRepeated: a proxy that fails each second causes one line a minute with the number of
// failures. TCP health checks cause one line in total.
func TestHandshakeFailuresAreNotRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logtest.Log
		p := NewProxies(nil, metrics.New(), slog.New(slog.NewTextHandler(&log, nil)))
		peer := &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 1}
		for range 150 {
			p.failed(peer, errIsTLS)
			p.failed(peer, os.ErrDeadlineExceeded)
			p.failed(peer, net.ErrClosed)
			<-time.After(time.Second)
		}
		for cause, want := range map[string]int{"tls_is_off": 3, "timeout": 3, "closed": 1} {
			if n := log.Count("cause=" + cause); n != want {
				t.Errorf("%d lines about %s in 150 s, want %d", n, cause, want)
			}
		}
		if n := log.Count("times=60"); n != 4 {
			t.Errorf("%d lines report 60 failures, want 4:\n%s", n, log.String())
		}
		for host := range 3 * maxProxyHosts {
			p.succeeded(&net.TCPAddr{IP: net.IPv4(10, 1, byte(host>>8), byte(host)), Port: 1}, nil)
		}
		if n := log.Count("a proxy connected"); n != maxProxyHosts || len(p.hosts) != maxProxyHosts {
			t.Errorf("%d lines are logged and %d hosts kept, want maxProxyHosts", n, len(p.hosts))
		}
	})
}
