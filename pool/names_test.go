package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
)

// names returns a resolver that uses answer for lookups.
func names(t *testing.T, family string, log *logtest.Log,
	resolve func(ctx context.Context, network, host string) ([]netip.Addr, error)) *Names {
	t.Helper()
	n, err := NewNames(family, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	n.lookup = resolve
	return n
}

// zone returns a lookup function for a table of names with their addresses.
func zone(records map[string]string) func(context.Context, string, string) ([]netip.Addr, error) {
	return func(_ context.Context, network, host string) (found []netip.Addr, err error) {
		if records[host] == "SERVFAIL" {
			return nil, &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}
		}
		for _, text := range strings.Fields(records[host]) {
			if a := netip.MustParseAddr(text); a.Is4() == (network == "ip4") {
				found = append(found, a)
			}
		}
		if len(found) == 0 {
			err = &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
		}
		return found, err
	}
}

func entries(addresses ...string) (all []Entry) {
	for i, address := range addresses {
		all = append(all, Entry{Endpoint: Endpoint{Name: fmt.Sprintf("e%d", i), Address: address}})
	}
	return all
}

func addresses(all []Entry) string {
	var b strings.Builder
	for i, e := range all {
		if i > 0 {
			b.WriteByte(' ')
		}
		b.WriteString(e.Name + "=" + e.Address)
	}
	return b.String()
}

// TestResolve checks that names become addresses of the family that Envoy would use, that IP addresses and empty
// addresses stay, and that entries whose name has no address are dropped.
func TestResolve(t *testing.T) {
	records := map[string]string{
		"both": "10.0.0.1 fd00::1",
		"four": "10.0.0.2",
		"six":  "fd00::2",
		"many": "10.0.0.9 10.0.0.3 10.0.0.7",
	}
	given := entries("both:1", "four:2", "six:3", "none:4", "10.9.9.9:5", "[fd00::9]:6", "", "many:7", "four:8")
	for family, want := range map[string]string{
		"auto": "e0=[fd00::1]:1 e1=10.0.0.2:2 e2=[fd00::2]:3 e4=10.9.9.9:5 e5=[fd00::9]:6 e6= e7=10.0.0.3:7 " +
			"e8=10.0.0.2:8",
		"v4_preferred": "e0=10.0.0.1:1 e1=10.0.0.2:2 e2=[fd00::2]:3 e4=10.9.9.9:5 e5=[fd00::9]:6 e6= e7=10.0.0.3:7 " +
			"e8=10.0.0.2:8",
		"v4_only": "e0=10.0.0.1:1 e1=10.0.0.2:2 e4=10.9.9.9:5 e5=[fd00::9]:6 e6= e7=10.0.0.3:7 e8=10.0.0.2:8",
		"v6_only": "e0=[fd00::1]:1 e2=[fd00::2]:3 e4=10.9.9.9:5 e5=[fd00::9]:6 e6=",
	} {
		var log logtest.Log
		n := names(t, family, &log, zone(records))
		n.Use(t.Context(), given)
		if got := addresses(n.Resolve(given)); got != want {
			t.Errorf("%s:\n%s, want\n%s", family, got, want)
		}
		if log.Count("cannot resolve") != n.Unresolved() || n.Unresolved() == 0 ||
			!strings.Contains(log.String(), `level=WARN msg="cannot resolve the host name of an endpoint`) {
			t.Errorf("%s: %d unresolved:\n%s", family, n.Unresolved(), log.String())
		}
		if several := log.Count("has several addresses"); (family != "v6_only") != (several == 1) {
			t.Errorf("%s: %d lines about several addresses:\n%s", family, several, log.String())
		}
	}
	if _, err := NewNames("ipv4", nil); err == nil ||
		!strings.Contains(err.Error(), "auto, v4_preferred, v4_only or v6_only") {
		t.Errorf("an unknown family: %v", err)
	}
}

// TestFollowNames checks that kvepp finds a new address within seconds and logs each event once. An address that is
// still one of several stays. A failed lookup changes nothing. A name that does not exist any more removes the
// endpoint.
func TestFollowNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var records atomic.Pointer[map[string]string]
		records.Store(&map[string]string{"a": "10.0.0.2"})
		var log logtest.Log
		n := names(t, "auto", &log, func(ctx context.Context, network, host string) ([]netip.Addr, error) {
			return zone(*records.Load())(ctx, network, host)
		})
		given := entries("a:1", "b:2")
		n.Use(t.Context(), given)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var changes atomic.Int32
		go n.Follow(ctx, func() { changes.Add(1) })
		for _, step := range []struct {
			a, b, want string
			changes    int32
		}{
			{"10.0.0.2", "", "e0=10.0.0.2:1", 0},
			{"10.0.0.3", "", "e0=10.0.0.3:1", 1},
			{"10.0.0.1 10.0.0.3", "", "e0=10.0.0.3:1", 1},
			{"SERVFAIL", "", "e0=10.0.0.3:1", 1},
			{"10.0.0.3", "10.0.0.8", "e0=10.0.0.3:1 e1=10.0.0.8:2", 2},
			{"", "SERVFAIL", "e1=10.0.0.8:2", 3},
			{"10.0.0.3", "10.0.0.8", "e0=10.0.0.3:1 e1=10.0.0.8:2", 4},
		} {
			synctest.Wait()
			records.Store(&map[string]string{"a": step.a, "b": step.b})
			<-time.After(10 * namesInterval)
			synctest.Wait()
			if got := addresses(n.Resolve(given)); got != step.want || changes.Load() != step.changes {
				t.Errorf("a %q, b %q: %s after %d changes, want %s after %d", step.a, step.b, got, changes.Load(),
					step.want, step.changes)
			}
		}
		for text, want := range map[string]int{"has several addresses": 1, "cannot resolve": 4,
			"resolved the host name": 4} {
			if got := log.Count(text); got != want {
				t.Errorf("%q was logged %d times, want %d:\n%s", text, got, want, log.String())
			}
		}
		n.Use(ctx, entries("10.0.0.1:1"))
		if len(n.hosts) != 0 {
			t.Errorf("%d names are still followed", len(n.hosts))
		}
	})
}

// TestLookupsAreBounded checks that a silent name server delays the endpoints by one timeout, for any number of names.
func TestLookupsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		running, most := make(chan int, 1), 0
		running <- 0
		var log logtest.Log
		n := names(t, "v4_only", &log, func(ctx context.Context, _, _ string) ([]netip.Addr, error) {
			now := <-running + 1
			most = max(most, now)
			running <- now
			<-ctx.Done()
			running <- <-running - 1
			return nil, errors.Join(errors.New("no response"), ctx.Err())
		})
		var all []string
		for i := range 1000 {
			all = append(all, fmt.Sprintf("n%d:1", i))
		}
		began := time.Now()
		n.Use(t.Context(), entries(all...))
		if took := time.Since(began); took != lookupTimeout || most != maxLookups {
			t.Errorf("Use took %v, with %d concurrent lookups", took, most)
		}
	})
}
