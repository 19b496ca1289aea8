package link

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"log/slog"
	"math/big"
	mathrand "math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"kvepp/kvblock"
	"kvepp/scoring/replica"
)

// authority issues certificates.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return &authority{key, cert}
}

// issue returns a certificate for a name.
func (a *authority) issue(t testing.TB, name string) *tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name},
		DNSNames: []string{name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

func (a *authority) pool() *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(a.cert)
	return p
}

// mutual is mTLS with a certificate of the authority.
func (a *authority) mutual(t testing.TB, name string) Security {
	cert, pool := a.issue(t, name), a.pool()
	return Security{Certificate: func() *tls.Certificate { return cert },
		Authorities: func() *x509.CertPool { return pool }}
}

// withToken is TLS with a certificate that is not verified, and a token.
func withToken(t testing.TB, token string) Security {
	cert := newAuthority(t).issue(t, "kvepp")
	return Security{Certificate: func() *tls.Certificate { return cert }, Token: func() string { return token }}
}

// testNode is a node with its own changes and copies.
type testNode struct {
	*Node
	address string

	mu      sync.Mutex
	pending []replica.Entry
	since   time.Duration
	copies  map[uint64]map[uint64]bool
	applied func(*replica.Entry)
}

func startNode(t testing.TB, security Security, change func(*Config)) *testNode {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &testNode{address: at.Addr().String(), copies: map[uint64]map[uint64]bool{}}
	config := Config{Self: replica.Identity{Origin: mathrand.Uint64() | 1, Epoch: 1}, Group: "pool", Name: n.address,
		Timeout: time.Second, Security: security, Known: func(replica.Worker) bool { return true },
		Drain: n.drain, Apply: n.apply, Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&config)
	}
	n.Node = New(config)
	go func() { _ = n.Serve(at, grpc.ConnectionTimeout(time.Second)) }()
	t.Cleanup(n.Close)
	return n
}

func (n *testNode) add(e replica.Entry) {
	n.mu.Lock()
	if len(n.pending) == 0 {
		n.since = n.Now()
	}
	e.At = n.Now()
	n.pending = append(n.pending, e)
	n.mu.Unlock()
	n.Changed()
}

func (n *testNode) book(number uint64) {
	n.add(replica.Entry{Kind: replica.Booked, Number: number, Worker: replica.Worker{Name: "w"}, BlockSize: 16,
		PrefillTokens: 100, Chains: [][]kvblock.SequenceHash{{1, 2, kvblock.SequenceHash(number)}}})
}

func (n *testNode) drain(add func(*replica.Entry)) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	for i := range n.pending {
		add(&n.pending[i])
	}
	n.pending = n.pending[:0]
	return n.Now() - n.since
}

func (n *testNode) apply(e *replica.Effect) {
	n.mu.Lock()
	defer n.mu.Unlock()
	held := n.copies[e.Origin]
	if held == nil {
		held = map[uint64]bool{}
		n.copies[e.Origin] = held
	}
	switch e.Kind {
	case replica.BeginSnapshot:
		for number := range held {
			held[number] = false
		}
	case replica.EndSnapshot:
		for number, marked := range held {
			if !marked {
				delete(held, number)
			}
		}
	case replica.FreeAll:
		delete(n.copies, e.Origin)
	case replica.Apply:
		for i := range e.Entries {
			switch x := &e.Entries[i]; x.Kind {
			case replica.Booked:
				held[x.Number] = true
			case replica.Freed:
				delete(held, x.Number)
			}
			if n.applied != nil {
				n.applied(&e.Entries[i])
			}
		}
	}
}

// holds returns how many copies of another node's bookings this one has.
func (n *testNode) holds(other *testNode) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.copies[other.config.Self.Origin])
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	deadline, tick := time.After(30*time.Second), time.NewTicker(5*time.Millisecond)
	defer tick.Stop()
	for !holds() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

func connectAll(nodes ...*testNode) {
	var addresses []string
	for _, n := range nodes {
		addresses = append(addresses, n.address)
	}
	for _, n := range nodes {
		n.SetPeers(addresses)
	}
}

// TestNodes: bookings travel between three nodes in each way of recognising one another, a node that comes later gets
// what runs, and the bookings of one that says goodbye or dies end.
func TestNodes(t *testing.T) {
	ca := newAuthority(t)
	// All replicas have one certificate, and the authority is that of proxies.
	same := newAuthority(t).mutual(t, "kvepp")
	same.Authorities, same.Token = ca.mutual(t, "envoy").Authorities, func() string { return "secret" }
	for name, security := range map[string]func() Security{
		"one certificate": func() Security { return same },
		"plaintext":       func() Security { return Security{} },
		"mTLS":            func() Security { return ca.mutual(t, "kvepp") },
		"token":           func() Security { return withToken(t, "secret") },
		"both": func() Security {
			s := ca.mutual(t, "kvepp")
			s.Token = func() string { return "secret" }
			return s
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, b := startNode(t, security(), nil), startNode(t, security(), nil)
			a.book(1)
			a.book(2)
			connectAll(a, b)
			eventually(t, "b has a's bookings", func() bool { return b.holds(a) == 2 })
			<-a.Synced() // its own address is no peer's
			<-b.Synced()
			a.add(replica.Entry{Kind: replica.Freed, Number: 1})
			b.book(7)
			eventually(t, "both are up to date", func() bool { return b.holds(a) == 1 && a.holds(b) == 1 })
			c := startNode(t, security(), nil)
			connectAll(a, b, c)
			eventually(t, "c has what runs", func() bool { return c.holds(a) == 1 && c.holds(b) == 1 })
			eventually(t, "a measures staleness", func() bool {
				p := a.Peers()
				return len(p) == 2 && p[0].Staleness > 0 && p[1].Staleness > 0
			})
			b.Close()
			eventually(t, "b's bookings end", func() bool { return c.holds(b) == 0 && a.holds(b) == 0 })
			if freed := c.Stats().Freed[replica.PeerLeft]; freed != 1 {
				t.Errorf("%d bookings were freed by a goodbye", freed)
			}
			a.stop() // no goodbye
			a.server.Stop()
			eventually(t, "a's bookings end", func() bool { return c.holds(a) == 0 })
			if freed := c.Stats().Freed[replica.PeerDead]; freed != 1 {
				t.Errorf("%d bookings were freed by a death", freed)
			}
		})
	}
}

// TestStrangers: who must not share bookings gets none, and gives none.
func TestStrangers(t *testing.T) {
	ca := newAuthority(t)
	good := ca.mutual(t, "kvepp")
	good.Token = func() string { return "secret" }
	other := newAuthority(t).mutual(t, "kvepp")
	other.Token = good.Token
	proxy := ca.mutual(t, "envoy")
	proxy.Token = good.Token
	guess := ca.mutual(t, "kvepp")
	guess.Token = func() string { return "guess" }
	none := ca.mutual(t, "kvepp")
	for name, test := range map[string]struct {
		security Security
		change   func(*Config)
		refused  replica.Reason // empty: no handshake succeeds
	}{
		"another authority":           {security: other},
		"a proxy's certificate":       {security: proxy},
		"no certificate":              {security: withToken(t, "secret")},
		"plaintext":                   {security: Security{}},
		"another token":               {security: guess, refused: replica.BadToken},
		"no token":                    {security: none, refused: replica.BadToken},
		"another pool":                {good, func(c *Config) { c.Group = "other" }, replica.OtherGroup},
		"another pool, another token": {guess, func(c *Config) { c.Group = "other" }, replica.BadToken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, stranger := startNode(t, good, nil), startNode(t, test.security, test.change)
			if said, err := Probe(t.Context(), &good, "pool", stranger.address); (err == nil) != (test.refused != "") ||
				err == nil && said.Refused != test.refused && said.Refused != replica.BadToken {
				t.Errorf("the stranger says %+v, %v", said, err)
			}
			if said, err := Probe(t.Context(), &good, "pool", a.address); err != nil || said.Refused != "" ||
				said.Version != replica.Version || said.Origin != a.Self().Origin || said.Name != a.address {
				t.Errorf("a says %+v, %v", said, err)
			}
			a.book(1)
			stranger.book(2)
			connectAll(a, stranger)
			if test.refused != "" {
				eventually(t, "a refuses the stranger", func() bool { return a.Stats().Refused[test.refused] > 0 })
				<-a.Synced() // a is not kept from being ready
			} else {
				eventually(t, "neither can reach the other", func() bool {
					return a.Stats().Failed >= 2 && stranger.Stats().Failed >= 2
				})
			}
			if a.holds(stranger) != 0 || stranger.holds(a) != 0 {
				t.Errorf("they share bookings")
			}
		})
	}
}

// TestSameOrigin: two processes with one identity are no peers.
func TestSameOrigin(t *testing.T) {
	id := replica.Identity{Origin: 5, Epoch: 1}
	a := startNode(t, Security{}, func(c *Config) { c.Self = id })
	id.Epoch = 2
	b := startNode(t, Security{}, func(c *Config) { c.Self = id })
	connectAll(a, b)
	eventually(t, "each refuses the other", func() bool {
		return a.Stats().Refused[replica.SameOrigin] > 0 && b.Stats().Refused[replica.SameOrigin] > 0
	})
}

// TestNonsense: a server of something else, and a peer that sends garbage, are no peers and do no harm.
func TestNonsense(t *testing.T) {
	a, b := startNode(t, Security{}, nil), startNode(t, Security{}, nil)
	web, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	go func() {
		for {
			c, err := web.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
			c.Close()
		}
	}()
	a.SetPeers([]string{b.address, web.Addr().String()})
	b.book(1)
	eventually(t, "a has b's bookings", func() bool { return a.holds(b) == 1 })

	conn, err := a.dial(b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, watchMethod)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.SendMsg(&frame{[]byte("nonsense")}); err != nil {
		t.Fatal(err)
	}
	var f frame
	if err := s.RecvMsg(&f); err != nil || !bytes.Equal(f.data, replica.Refusal(replica.Malformed)) {
		t.Errorf("%x %v", f.data, err)
	}
	eventually(t, "it is counted", func() bool { return b.Stats().Refused[replica.Malformed] == 1 })
}

// TestSlowReader: a peer that does not read costs bounded memory, is disconnected, and does not delay others.
func TestSlowReader(t *testing.T) {
	a, b := startNode(t, Security{}, nil), startNode(t, Security{}, nil)
	b.SetPeers([]string{a.address})
	conn, err := b.dial(a.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, watchMethod)
	if err != nil {
		t.Fatal(err)
	}
	hello := replica.Hello{Lowest: 1, Highest: 1, Self: replica.Identity{Origin: 99, Epoch: 1}, Group: "pool"}
	if err := s.SendMsg(&frame{hello.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	long := make([]kvblock.SequenceHash, 5000)
	for number := uint64(1); ; number++ {
		a.add(replica.Entry{Kind: replica.Booked, Number: number, Worker: replica.Worker{Name: "w"}, BlockSize: 16,
			Chains: [][]kvblock.SequenceHash{long}})
		a.add(replica.Entry{Kind: replica.Freed, Number: number})
		if a.Stats().Refused[replica.Stalled] > 0 {
			break
		}
		if number > 20_000 {
			t.Fatal("the slow reader is still connected")
		}
		eventually(t, "the entries are in the log", func() bool { return a.Stats().Last >= 2*number })
	}
	a.book(1 << 40)
	eventually(t, "the other reader is up to date", func() bool { return b.holds(a) == 1 })
}

// TestIndex: a peer gives its index, refuses strangers, and says that it is busy.
func TestIndex(t *testing.T) {
	dump := strings.Repeat("blocks ", 100_000)
	busy := true
	a := startNode(t, withToken(t, "secret"), func(c *Config) {
		c.Dump = func(_ context.Context, w io.Writer) error {
			if busy {
				return ErrBusy
			}
			_, err := io.WriteString(w, dump)
			return err
		}
	})
	b, stranger := startNode(t, withToken(t, "secret"), nil), startNode(t, withToken(t, "guess"), nil)
	if _, err := b.OpenIndex(t.Context(), a.address); !errors.Is(err, ErrBusy) {
		t.Errorf("a busy peer: %v", err)
	}
	busy = false
	r, err := b.OpenIndex(t.Context(), a.address)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if got, err := io.ReadAll(r); err != nil || string(got) != dump {
		t.Errorf("%d bytes of %d: %v", len(got), len(dump), err)
	}
	if _, err := stranger.OpenIndex(t.Context(), a.address); err == nil {
		t.Error("a stranger gets the index")
	}
	if _, err := a.OpenIndex(t.Context(), b.address); err == nil {
		t.Error("a replica without an index gives one")
	}
}
