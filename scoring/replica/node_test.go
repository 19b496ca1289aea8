package replica

import (
	"bufio"
	"bytes"
	"cmp"
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
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/internal/logtest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/scoring"
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

// testNode is a node with a book of its own.
type testNode struct {
	*Node
	address string
	book    *scoring.ActiveSequences
	pool    *pool.Pool

	mu     sync.Mutex
	heard  func([]scoring.Change)
	counts map[[2]string]int // by what is counted, and a reason or a cause
}

// newTestNode returns a node that does not serve. Its workers are a and b.
func newTestNode(security Security, change func(*Config)) *testNode {
	n := &testNode{book: scoring.NewActiveSequences(), pool: pool.New(slog.New(slog.DiscardHandler)),
		counts: map[[2]string]int{}}
	n.pool.OnLeave(n.book.Forget)
	config := Config{Group: "pool", Timeout: time.Second, Security: security, Book: n.book, Pool: n.pool,
		Measured: func(time.Duration) {}, Busy: io.ErrNoProgress,
		Changed: func(changes []scoring.Change) {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.heard != nil {
				n.heard(changes)
			}
		},
		Count: func(what, by string, x int) {
			n.mu.Lock()
			defer n.mu.Unlock()
			n.counts[[2]string{what, by}] += x
		},
		Log: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&config)
	}
	n.Node = New(config)
	n.setWorkers("a", "b")
	return n
}

func startNode(t testing.TB, security Security, change func(*Config)) *testNode {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := newTestNode(security, func(c *Config) {
		if c.Name = at.Addr().String(); change != nil {
			change(c)
		}
	})
	n.address = at.Addr().String()
	go func() { _ = n.Serve(at) }()
	t.Cleanup(n.Close)
	return n
}

func (n *testNode) setWorkers(names ...string) {
	var all []pool.Endpoint
	for _, name := range names {
		all = append(all, pool.Endpoint{Name: name, Address: "10.0.0.1:8000"})
	}
	n.pool.Update(all)
}

// worker returns the number of a worker by its name.
func (n *testNode) worker(name string) (kvblock.Worker, bool) {
	s := n.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		if s.Workers[i].Name == name {
			return s.Workers[i].Worker, true
		}
	}
	return 0, false
}

// counted returns what a node has counted.
func (n *testNode) counted(what string, by Reason) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts[[2]string{what, string(by)}]
}

// request books a request of 100 tokens and some blocks at worker a.
func (n *testNode) request(t testing.TB, blocks int) scoring.Booking {
	t.Helper()
	w, _ := n.worker("a")
	chain := make([]kvblock.SequenceHash, blocks)
	for i := range chain {
		chain[i] = kvblock.SequenceHash(i + 1)
	}
	c := scoring.Candidate{Worker: w, Prompt: &scoring.Prompt{BlockSize: 16, Chains: [][]kvblock.SequenceHash{chain}}}
	config := scoring.DefaultConfig()
	b, err := n.book.AddRequest(scoring.Request{ISLTokens: 16*blocks + 4}, c, &config)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// holds returns how many copies of another node's bookings this one has.
func (n *testNode) holds(other *testNode) int {
	for _, p := range n.Peers() {
		if p.Origin == other.Origin() {
			return p.Bookings
		}
	}
	return 0
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

// kill ends a node without a goodbye.
func (n *testNode) kill() {
	n.stop()
	n.running.Wait()
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
			first := a.request(t, 3)
			a.request(t, 4)
			connectAll(a, b)
			eventually(t, "b has a's bookings", func() bool { return b.holds(a) == 2 })
			<-a.Synced() // its own address is no peer's
			<-b.Synced()
			first.Free()
			b.request(t, 2)
			eventually(t, "both are up to date", func() bool { return b.holds(a) == 1 && a.holds(b) == 1 })
			c := startNode(t, security(), nil)
			connectAll(a, b, c)
			eventually(t, "c has what runs", func() bool { return c.holds(a) == 1 && c.holds(b) == 1 })
			w, _ := c.worker("a")
			want := scoring.Load{Requests: 2, PrefillTokens: 36 + 68, ActiveBlocks: 4, ActiveTokens: 64}
			if got := c.book.Load(w); got != want {
				t.Errorf("the load at c is %+v, want %+v", got, want)
			}
			eventually(t, "a measures staleness", func() bool {
				p := a.Peers()
				return len(p) == 2 && p[0].Staleness > 0 && p[1].Staleness > 0
			})
			b.Close()
			eventually(t, "b's bookings end", func() bool { return c.holds(b) == 0 && a.holds(b) == 0 })
			eventually(t, "the cause", func() bool { return c.counted(Freed, PeerLeft) == 1 })
			a.kill()
			eventually(t, "a's bookings end", func() bool { return c.holds(a) == 0 })
			eventually(t, "the cause", func() bool { return c.counted(Freed, PeerDead) == 1 })
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
		refused  Reason // empty: no handshake succeeds
	}{
		"another authority":           {security: other},
		"a proxy's certificate":       {security: proxy},
		"no certificate":              {security: withToken(t, "secret")},
		"plaintext":                   {security: Security{}},
		"another token":               {security: guess, refused: BadToken},
		"no token":                    {security: none, refused: BadToken},
		"another pool":                {good, func(c *Config) { c.Group = "other" }, OtherGroup},
		"another pool, another token": {guess, func(c *Config) { c.Group = "other" }, BadToken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a, stranger := startNode(t, good, nil), startNode(t, test.security, test.change)
			if _, err := Probe(t.Context(), good, "pool", stranger.address); err == nil ||
				test.refused != "" && ReasonOf(err) != test.refused && ReasonOf(err) != BadToken {
				t.Errorf("the stranger says %v", err)
			}
			if name, err := Probe(t.Context(), good, "pool", a.address); err != nil || name != a.address {
				t.Errorf("a says %q, %v", name, err)
			}
			a.request(t, 1)
			stranger.request(t, 1)
			connectAll(a, stranger)
			if test.refused != "" {
				eventually(t, "a refuses the stranger", func() bool { return a.counted(Refused, test.refused) > 0 })
				<-a.Synced() // a is not kept from being ready
			} else {
				eventually(t, "neither can reach the other", func() bool {
					failed := func(n *testNode) int { return n.counted(Failed, "") + n.counted(Closed, Malformed) }
					return failed(a) >= 2 && failed(stranger) >= 1
				})
			}
			if a.holds(stranger) != 0 || stranger.holds(a) != 0 {
				t.Errorf("they share bookings")
			}
		})
	}
}

// dialed connects to a node without TLS, and says hello as a process of an origin.
func dialed(t *testing.T, n *testNode, origin uint64) *link {
	t.Helper()
	c := Config{Group: "pool", Dial: func(ctx context.Context, at string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", at)
	}}
	conn, _, err := c.connect(t.Context(), n.address, greeting{Origin: origin})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
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
	b.request(t, 1)
	eventually(t, "a has b's bookings", func() bool { return a.holds(b) == 1 })
	conn, err := net.Dial("tcp", b.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "nonsense"); err != nil {
		t.Fatal(err)
	}
	if _, err := receiveGreeting(bufio.NewReader(conn)); ReasonOf(err) != Malformed {
		t.Errorf("it says %v", err)
	}
	eventually(t, "it is counted", func() bool { return b.counted(Refused, Malformed) == 1 })
	// A peer that is admitted, and then sends garbage, is disconnected.
	bad := dialed(t, b, 99)
	eventually(t, "it reads", func() bool { return len(b.Readers()) == 2 })
	if _, err := bad.Write(appendRecord(nil, pingKind, []byte{1}, 2, 3)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is disconnected", func() bool { return len(b.Readers()) == 1 })
}

// TestEarlierVersions: processes of earlier versions, which speak gRPC, are refused by name and not misread, whichever
// side connects.
func TestEarlierVersions(t *testing.T) {
	secure, plain := startNode(t, withToken(t, "secret"), nil), startNode(t, Security{}, nil)
	earlier := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13}
	if conn, err := tls.Dial("tcp", secure.address, earlier); err == nil {
		t.Error("a peer that speaks gRPC is admitted")
		conn.Close()
	}
	eventually(t, "it is counted", func() bool { return secure.counted(Refused, OldVersion) == 1 })
	earlier.Certificates = []tls.Certificate{*newAuthority(t).issue(t, "kvepp")}
	at, err := tls.Listen("tcp", "127.0.0.1:0", earlier)
	if err != nil {
		t.Fatal(err)
	}
	defer at.Close()
	go func() {
		for {
			c, err := at.Accept()
			if err != nil {
				return
			}
			_ = c.(*tls.Conn).Handshake()
			c.Close()
		}
	}()
	secure.SetPeers([]string{at.Addr().String()})
	eventually(t, "the other side is known", func() bool { return secure.counted(Closed, OldVersion) > 0 })
	<-secure.Synced()
	// A later version has another layout after its number.
	conn, err := net.Dial("tcp", plain.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	later := appendRecord(nil, greetingKind, []byte(`{"Version":5,"Origin":7,"New":[1]}`))
	if _, err := conn.Write(later); err != nil {
		t.Fatal(err)
	}
	if _, err := receiveGreeting(bufio.NewReader(conn)); ReasonOf(err) != OldVersion {
		t.Errorf("to a later version it says %v", err)
	}
}

// TestCharges: peers hear once of what tenants were charged, for what, and whether they wait; also of a charge without
// tokens, and of a tenant of any number.
func TestCharges(t *testing.T) {
	type charge struct {
		tenant      uint64
		tokens      int
		turn, waits bool
	}
	heard := make(chan charge, 10)
	a := startNode(t, Security{}, nil)
	b := startNode(t, Security{}, func(c *Config) {
		c.Charged = func(tenant uint64, tokens int, turn, waits bool) { heard <- charge{tenant, tokens, turn, waits} }
	})
	b.SetPeers([]string{a.address})
	eventually(t, "b reads", func() bool { return len(a.Readers()) == 1 })
	<-b.Synced()
	for _, want := range []charge{{1, 40, true, false}, {1<<64 - 1, 0, false, true}, {1 << 63, 1 << 20, false, false},
		{1, 40, true, true}} {
		a.Charge(want.tenant, want.tokens, want.turn, want.waits)
		if got := <-heard; got != want {
			t.Errorf("heard %v, want %v", got, want)
		}
	}
}

// TestSlowReader: a peer that does not read costs bounded memory, is disconnected, and does not delay others.
func TestSlowReader(t *testing.T) {
	a, b := startNode(t, Security{}, nil), startNode(t, Security{}, nil)
	b.SetPeers([]string{a.address})
	slow := dialed(t, a, 99)
	defer slow.Close()
	eventually(t, "both read", func() bool { return len(a.Readers()) == 2 })
	for number := 0; a.counted(Refused, Stalled) == 0; number++ {
		a.request(t, 5000).Free()
		if number > 100_000 {
			t.Fatal("the slow reader is still connected")
		}
		if number%100 == 0 {
			<-time.After(time.Millisecond)
		}
	}
	a.request(t, 1)
	eventually(t, "the other reader is up to date", func() bool { return b.holds(a) == 1 })
}

// TestFellBehind: what waits for a peer is bounded in bytes. Beyond that, it is disconnected, and gets a snapshot when
// it connects again.
func TestFellBehind(t *testing.T) {
	a := startNode(t, Security{}, nil)
	dialed(t, a, 99)
	eventually(t, "it reads", func() bool { return len(a.Readers()) == 1 })
	a.mu.Lock()
	a.chunkBytes = 400
	a.mu.Unlock()
	for range 1000 {
		a.request(t, 1000)
	}
	eventually(t, "it is disconnected", func() bool { return a.counted(Refused, Stalled) == 1 })
	b := startNode(t, Security{}, nil)
	b.SetPeers([]string{a.address})
	eventually(t, "another one has all", func() bool { return b.holds(a) == 1000 })
}

// TestFurtherConnectionsOfAPeer: a peer that connects again ends its own earlier connection, and takes no place of
// others.
func TestFurtherConnectionsOfAPeer(t *testing.T) {
	a, b := startNode(t, Security{}, nil), startNode(t, Security{}, nil)
	b.SetPeers([]string{a.address})
	eventually(t, "b reads", func() bool { return len(a.Readers()) == 1 })
	for range 2 * maxPeers {
		dialed(t, a, 99)
	}
	eventually(t, "one connection is left", func() bool { return len(a.Readers()) == 2 })
	if n := a.counted(Refused, TooMany); n != 0 {
		t.Errorf("%d refused", n)
	}
	a.request(t, 1)
	eventually(t, "b is up to date", func() bool { return b.holds(a) == 1 })
}

// liar starts a node whose peer says some records, and then nothing.
func liar(t *testing.T, records []byte) *testNode {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { at.Close() })
	go func() {
		conn, err := at.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		if _, err := receiveGreeting(bufio.NewReader(conn)); err == nil {
			hi := greeting{Origin: 7, Name: strings.Repeat("n", maxText)}
			if hi.send(conn) == nil {
				_, _ = conn.Write(records)
				_, _ = io.Copy(io.Discard, conn)
			}
		}
	}()
	a := startNode(t, Security{}, func(c *Config) { c.Timeout = time.Minute })
	a.SetPeers([]string{at.Addr().String()})
	return a
}

// named names all workers alike.
func named(name string) func(kvblock.Worker) Worker {
	return func(kvblock.Worker) Worker { return Worker{Name: name} }
}

// TestLyingPeer: what an admitted peer says that is malformed closes its connection, and what is out of range or beyond
// a bound is left out.
func TestLyingPeer(t *testing.T) {
	booked := func(b []byte, number uint64, name string) []byte {
		return appendChange(b, &scoring.Change{Kind: scoring.Booked, Number: number, BlockSize: 16, Blocks: 3},
			named(name))
	}
	for what, lie := range map[string][]byte{
		"a kind":          {byte(len(leastInts)), 0, 0},
		"no kind":         {0, 0, 0},
		"too few numbers": appendRecord(nil, byte(scoring.Booked), nil, 1, 0, 0, 16),
		"too many":        {byte(scoring.Freed), 0xff, 0xff, 0xff, 0x7f},
		"too much":        appendHead(nil, byte(scoring.Booked), maxData+1, 1, 0, 1, 16, 0, 0, 0),
		"a long chain": appendRecord(nil, byte(scoring.Booked), append([]byte("a"), make([]byte, 16)...),
			1, 0, 1, 16, 0, 0, 0, 3),
		"a long name": appendRecord(nil, byte(scoring.Booked), make([]byte, maxText+1),
			1, 0, maxText+1, 16, 0, 0, 0),
		"half a name": appendRecord(nil, byte(scoring.Booked), []byte("a"), 1, 0, 2, 16, 0, 0, 0),
		"a greeting":  appendRecord(nil, greetingKind, nil),
		"two ends":    appendRecord(appendRecord(nil, syncedKind, nil), syncedKind, nil),
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			a := liar(t, lie)
			eventually(t, "the liar is disconnected", func() bool { return a.counted(Closed, Malformed) == 1 })
			if p := a.Peers(); p[0].Bookings != 0 || p[0].State != Suspect {
				t.Errorf("%+v", p)
			}
		})
	}
	fine := booked(booked(booked(nil, 1, "a"), 2, "unknown"), 3, "b")
	fine = appendChange(fine, &scoring.Change{Kind: scoring.Booked, Number: 4, BlockSize: 16,
		PrefillTokens: scoring.MaxISLTokens + 1}, named("a"))
	fine = appendChange(fine, &scoring.Change{Kind: scoring.Freed, Number: 3}, named(""))
	fine = appendChange(fine, &scoring.Change{Kind: scoring.PrefillTimed, Number: 1, Tokens: 1 << 40, Took: 1000},
		named(""))
	a := liar(t, appendEvent(fine, &session.Event{Kind: session.Ended, Key: session.Key{1}}, named("")))
	eventually(t, "what is true counts", func() bool { p := a.Peers(); return len(p) == 1 && p[0].Bookings == 1 })
	if n := a.counted(Copied, ""); n != 2 {
		t.Errorf("%d bookings copied", n)
	}
}

// TestReasonsAreLoggedOnce: a peer that now does not answer and now refuses is logged once for each.
func TestReasonsAreLoggedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logtest.Log
		tries := 0
		n := newTestNode(Security{}, func(c *Config) {
			c.Log = slog.New(slog.NewTextHandler(&log, nil))
			c.Dial = func(context.Context, string) (net.Conn, error) {
				if tries++; tries%2 == 0 {
					return nil, errors.New("no response")
				}
				near, far := net.Pipe()
				go func() {
					defer far.Close()
					if _, err := receiveGreeting(bufio.NewReader(far)); err == nil {
						_ = (&greeting{Refused: BadToken}).send(far)
					}
				}()
				return near, nil
			}
		})
		n.SetPeers([]string{"peer"})
		<-time.After(time.Minute)
		n.Close()
		token, none := log.Count("reason=token"), log.Count("reason=unreachable")
		if token != 1 || none != 1 || tries < 4 {
			t.Errorf("%d tries, %d lines about the token, %d about none", tries, token, none)
		}
	})
}

// TestAcceptsAgain: a port that cannot accept for a while keeps no processor busy, and serves afterwards.
func TestAcceptsAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(Security{}, nil)
		l := &failing{listener: listener{conns: make(chan net.Conn), closed: make(chan struct{})}}
		go func() { _ = n.Serve(l) }()
		begin := time.Now()
		near, far := net.Pipe()
		l.conns <- far
		if waited := time.Since(begin); waited < 10*acceptAgain {
			t.Errorf("ten failures within %v", waited)
		}
		near.Close()
		n.Close()
	})
}

// failing is a listener that cannot accept the first ten times.
type failing struct {
	listener
	failed int
}

func (l *failing) Accept() (net.Conn, error) {
	if l.failed++; l.failed <= 10 {
		return nil, errors.New("too many open files")
	}
	return l.listener.Accept()
}

// TestStaleness: how late copies are is the mean of the live peers by their bookings.
func TestStaleness(t *testing.T) {
	peers := []Peer{
		{State: Live, Staleness: 100, Bookings: 2},
		{State: Live, Staleness: 500},
		{State: Suspect, Staleness: 1e6, Bookings: 9},
	}
	for n, want := range []time.Duration{0, 100 * time.Millisecond, 200 * time.Millisecond, 200 * time.Millisecond} {
		if got := staleness(peers[:n]).Round(time.Millisecond); got != want {
			t.Errorf("with %d peers the copies are %v late, want %v", n, got, want)
		}
	}
}

// TestPeersShareTheBounds: the copies of each of several peers have their part of the bounds.
func TestPeersShareTheBounds(t *testing.T) {
	a := newTestNode(Security{}, func(c *Config) { c.Timeout = time.Hour })
	defer a.Close()
	apply := func(origin uint64, from, n, hashes int) {
		t.Helper()
		p := &peer{}
		if err := a.welcome(p, &greeting{Origin: origin}, func(error) {}); err != nil {
			t.Fatal(err)
		}
		var records []byte
		for i := range n {
			records = appendChange(records, &scoring.Change{Kind: scoring.Booked, Number: uint64(from + i),
				BlockSize: 16, Chains: [][]kvblock.SequenceHash{make([]kvblock.SequenceHash, hashes)}}, named("a"))
		}
		in := bufio.NewReader(bytes.NewReader(records))
		for range n {
			var r record
			if err := cmp.Or(r.read(in, maxData), a.take(p, &r, true)); err != nil {
				t.Fatal(err)
			}
		}
	}
	apply(7, 1, 1, 1)
	apply(8, 1, 600, MaxHashes) // more than half of the bytes
	if n := a.counted(Limited, ""); n < 600/2 || n > 600-200 {
		t.Errorf("%d of 600 bookings are flat", n)
	}
	limited := a.counted(Limited, "")
	apply(9, 1, 10, MaxHashes)
	if a.counted(Limited, "") != limited {
		t.Error("one peer's bookings leave out another's")
	}
}

// TestIndex: a peer gives its index, refuses strangers, and says that it is busy.
func TestIndex(t *testing.T) {
	dump := strings.Repeat("blocks ", 100_000)
	busy := true
	a := startNode(t, withToken(t, "secret"), func(c *Config) {
		c.Dump = func(_ context.Context, w io.Writer) error {
			if busy {
				return nil
			}
			_, err := io.WriteString(w, dump)
			return err
		}
	})
	b, stranger := startNode(t, withToken(t, "secret"), nil), startNode(t, withToken(t, "guess"), nil)
	if _, err := b.OpenIndex(t.Context(), a.address); !errors.Is(err, io.ErrNoProgress) {
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

// A peer that asks for the index and does not read it gives way to the next one.
func TestSlowReaderOfTheIndex(t *testing.T) {
	if testing.Short() {
		t.Skip("a reader may be silent for 10 s")
	}
	t.Parallel()
	busy := make(chan bool, 1)
	a := startNode(t, Security{}, func(c *Config) {
		c.Dump = func(_ context.Context, w io.Writer) error {
			select {
			case busy <- true:
				defer func() { <-busy }()
			default:
				return nil
			}
			for part := make([]byte, 1<<20); ; {
				if _, err := w.Write(part); err != nil {
					return err
				}
			}
		}
	})
	b := startNode(t, Security{}, nil)
	if _, err := b.OpenIndex(t.Context(), a.address); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the index is read", func() bool { return len(busy) == 1 })
	eventually(t, "another peer gets the index", func() bool {
		r, err := b.OpenIndex(t.Context(), a.address)
		if err != nil {
			return false
		}
		defer r.Close()
		_, err = io.ReadFull(r, make([]byte, 1<<20))
		return err == nil
	})
}

// TestAcceptedWhileClosing: a connection that comes while a node ends is closed.
func TestAcceptedWhileClosing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTestNode(Security{}, nil)
		near, far := net.Pipe()
		served := make(chan error)
		go func() { served <- n.Serve(&late{node: n, conn: far}) }()
		if err := <-served; err != nil {
			t.Error(err)
		}
		if _, err := near.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%v, want the end of the connection", err)
		}
	})
}

// late is a listener whose node ends before it accepts.
type late struct {
	net.Listener
	node *testNode
	conn net.Conn
}

func (l *late) Accept() (net.Conn, error) {
	l.node.Close()
	return l.conn, nil
}

func (l *late) Close() error { return nil }
