package requestplane

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/binary"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// worker is an endpoint that reads requests and does with each what the test says.
type worker struct {
	net.Listener
	t *testing.T
}

// request is what a worker reads.
type request struct {
	path, headers string
	control       struct {
		ID    string `json:"id"`
		Codec string `json:"payload_codec"`
		To    struct {
			Transport string `json:"transport"`
			Info      string `json:"info"`
		} `json:"connection_info"`
	}
	body   []byte
	answer connection // decoded from control.To.Info
}

// newWorker answers each request on its connection c with serve.
func newWorker(t *testing.T, config *tls.Config, serve func(c net.Conn, r *request)) *worker {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if config != nil {
		l = tls.NewListener(l, config)
	}
	w := &worker{l, t}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				if r, err := readRequest(c); err == nil {
					serve(c, r)
				}
			}()
		}
	}()
	return w
}

func (w *worker) endpoint() string { return w.Addr().String() + "/1f/ns/backend/q" }

func readRequest(c net.Conn) (*request, error) {
	sized := func(n int) ([]byte, error) {
		b := make([]byte, n)
		if _, err := io.ReadFull(c, b); err != nil {
			return nil, err
		}
		var size uint64
		for _, x := range b {
			size = size<<8 | uint64(x)
		}
		b = make([]byte, size)
		_, err := io.ReadFull(c, b)
		return b, err
	}
	var r request
	path, err := sized(2)
	if err != nil {
		return nil, err
	}
	headers, err := sized(2)
	if err != nil {
		return nil, err
	}
	payload, err := sized(4)
	if err != nil {
		return nil, err
	}
	r.path, r.headers = string(path), string(headers)
	control, body, err := part(bytes.NewReader(payload), 1<<20)
	if err != nil {
		return nil, err
	}
	r.body = body
	if err := json.Unmarshal(control, &r.control); err != nil {
		return nil, err
	}
	return &r, json.Unmarshal([]byte(r.control.To.Info), &r.answer)
}

func frame(header string, data []byte) []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(len(header)))
	b = binary.BigEndian.AppendUint64(b, uint64(len(data)))
	b = binary.BigEndian.AppendUint64(b, 0)
	return append(append(b, header...), data...)
}

// answer acknowledges a request and connects back with a response: these bytes after the subject.
func answer(c net.Conn, r *request, then ...[]byte) {
	c.Write(make([]byte, 4))
	back, err := net.Dial("tcp", r.answer.Address)
	if err != nil {
		return
	}
	defer back.Close()
	back.Write(frame(`{"subject":"`+r.answer.Subject+`","stream_type":"response"}`, nil))
	back.Write(bytes.Join(then, nil))
	io.Copy(io.Discard, back) // until kvepp closes it
}

const sentinel = `"sentinel"`

var prologue = frame(`{"error":null}`, nil)

func newPlane(t *testing.T, c Config) *Plane {
	t.Helper()
	if c.Callback == "" {
		c.Callback = ":0"
	}
	p, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func TestAsk(t *testing.T) {
	got := make(chan *request, 1)
	w := newWorker(t, nil, func(c net.Conn, r *request) {
		got <- r
		answer(c, r, prologue, frame("", []byte("one")), frame("", []byte("two")), frame(sentinel, nil))
	})
	parts, err := newPlane(t, Config{}).Ask(within(t, time.Minute), w.endpoint(), []byte("question"), 100)
	if err != nil || len(parts) != 2 || string(parts[0]) != "one" || string(parts[1]) != "two" {
		t.Fatalf("parts %q, %v", parts, err)
	}
	r := <-got
	if r.path != "1f/ns/backend/q" || string(r.body) != "question" || r.control.Codec != "msgpack" ||
		r.control.To.Transport != "tcp_server" || r.answer.Stream != "response" ||
		r.headers != `{"request-id":"`+r.control.ID+`"}` || r.answer.Context != r.control.ID {
		t.Errorf("request %+v", r)
	}
	if host, _, _ := net.SplitHostPort(r.answer.Address); host != "127.0.0.1" {
		t.Errorf("the worker should connect to %s, want the address that kvepp has on the way to it", r.answer.Address)
	}
}

// TestAnswersToManyQuestions: each question gets its own response, in any order of the connections.
func TestAnswersToManyQuestions(t *testing.T) {
	w := newWorker(t, nil, func(c net.Conn, r *request) {
		answer(c, r, prologue, frame("", r.body), frame(sentinel, nil))
	})
	p := newPlane(t, Config{Callback: "localhost:0"})
	errs := make(chan error)
	for i := range 50 {
		go func() {
			question := []byte{byte(i)}
			parts, err := p.Ask(within(t, time.Minute), w.endpoint(), question, 100)
			if err == nil && (len(parts) != 1 || !bytes.Equal(parts[0], question)) {
				err = errors.New("another question's answer")
			}
			errs <- err
		}()
	}
	for range 50 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
}

func TestHostileWorkers(t *testing.T) {
	announced := func(header, data uint64) []byte {
		return binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, header),
			data), 0)
	}
	type serve = func(c net.Conn, r *request)
	answers := func(frames ...[]byte) serve { return func(c net.Conn, r *request) { answer(c, r, frames...) } }
	for name, c := range map[string]struct {
		serve serve
		want  error // nil: any
	}{
		"refuses": {func(c net.Conn, r *request) {
			c.Write(append(binary.BigEndian.AppendUint32(nil, 18), "Server unavailable"...))
		}, ErrRefused},
		"acknowledges with 4 GiB": {func(c net.Conn, r *request) { c.Write([]byte{255, 255, 255, 255}) }, ErrMalformed},
		"closes":                  {func(c net.Conn, r *request) {}, nil},
		"never acknowledges":      {func(c net.Conn, r *request) { io.Copy(io.Discard, c) }, context.DeadlineExceeded},
		"never connects": {func(c net.Conn, r *request) {
			c.Write(make([]byte, 4))
			io.Copy(io.Discard, c)
		}, context.DeadlineExceeded},
		"never answers":             {answers(), context.DeadlineExceeded},
		"never ends":                {answers(prologue), context.DeadlineExceeded},
		"prologue of error":         {answers(frame(`{"error":"no"}`, nil)), ErrRefused},
		"garbage":                   {answers(bytes.Repeat([]byte{0xc1}, 1000)), ErrMalformed},
		"no JSON":                   {answers(frame(`{`, nil)), ErrMalformed},
		"control message":           {answers(prologue, frame(`"kill"`, nil)), ErrMalformed},
		"announces 300 MiB":         {answers(prologue, announced(0, 300<<20)), ErrTooLong},
		"announces 2^64 bytes":      {answers(prologue, announced(0, 1<<64-1)), ErrTooLong},
		"header of 2^64 bytes":      {answers(prologue, announced(1<<64-1, 0)), ErrMalformed},
		"sends more than the limit": {answers(prologue, bytes.Repeat(frame("", make([]byte, 1000)), 2000)), ErrTooLong},
		"sends empty parts":         {answers(prologue, bytes.Repeat(frame("", nil), 100_000)), ErrTooLong},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorker(t, nil, c.serve)
			patience := time.Minute
			if errors.Is(c.want, context.DeadlineExceeded) {
				patience = 200 * time.Millisecond
			}
			parts, err := newPlane(t, Config{}).Ask(within(t, patience), w.endpoint(), nil, 1<<20)
			if err == nil || c.want != nil && !errors.Is(err, c.want) {
				t.Errorf("%d parts, error %v, want %v", len(parts), err, c.want)
			}
		})
	}
}

// TestStrangers: connections without a subject that kvepp waits for end, and do not delay a response.
func TestStrangers(t *testing.T) {
	w := newWorker(t, nil, func(c net.Conn, r *request) {
		var all []net.Conn
		for _, text := range [][]byte{frame(`{"subject":"x"}`, nil), frame(`{"subject":""}`, nil),
			[]byte("GET / HTTP/1.1\r\n\r\n"),
			frame("[]", nil), frame("", []byte("x")), nil} {
			stranger, err := net.Dial("tcp", r.answer.Address)
			if err != nil {
				t.Error(err)
				return
			}
			defer stranger.Close()
			stranger.Write(text)
			all = append(all, stranger)
		}
		answer(c, r, prologue, frame("", []byte("x")), frame(sentinel, nil))
		for _, stranger := range all[:len(all)-1] {
			stranger.SetReadDeadline(time.Now().Add(time.Minute))
			if _, err := stranger.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a stranger's connection is still open")
			}
		}
	})
	p := newPlane(t, Config{})
	if parts, err := p.Ask(within(t, time.Minute), w.endpoint(), nil, 100); err != nil || len(parts) != 1 {
		t.Fatalf("%q, %v", parts, err)
	}
	if len(p.waiting) != 0 {
		t.Errorf("%d questions wait", len(p.waiting))
	}
}

func TestInvalidAddresses(t *testing.T) {
	for _, callback := range []string{"", "host", "host:x", "host:70000"} {
		if _, err := New(Config{Callback: callback}); err == nil {
			t.Errorf("callback address %q is accepted", callback)
		}
	}
	p := newPlane(t, Config{})
	for _, endpoint := range []string{"", "host:1", "host/path", "127.0.0.1:1/" + strings.Repeat("x", 70000)} {
		if _, err := p.Ask(within(t, time.Minute), endpoint, nil, 1); err == nil {
			t.Errorf("endpoint %.50q is accepted", endpoint)
		}
	}
}

// TestClose: requests that wait for a response fail at once, and later ones too.
func TestClose(t *testing.T) {
	took := make(chan bool, 1)
	w := newWorker(t, nil, func(c net.Conn, r *request) {
		c.Write(make([]byte, 4))
		took <- true
		io.Copy(io.Discard, c)
	})
	p := newPlane(t, Config{})
	ended := make(chan error)
	go func() {
		_, err := p.Ask(within(t, time.Minute), w.endpoint(), nil, 1)
		ended <- err
	}()
	<-took
	p.Close()
	if err := <-ended; !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
	if _, err := p.Ask(within(t, time.Minute), w.endpoint(), nil, 1); !errors.Is(err, net.ErrClosed) {
		t.Error(err)
	}
}

// files writes a certificate for localhost, which signed itself, and returns its files.
func files(t *testing.T) (cert, key string) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true,
		BasicConstraintsValid: true, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    []string{"dynamo-worker"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}}
	public, err := x509.CreateCertificate(rand.Reader, c, c, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "tls.crt"), filepath.Join(dir, "tls.key")
	for file, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: public},
		key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// TestTLS: both connections are encrypted and both sides know each other, by Dynamo's variables.
func TestTLS(t *testing.T) {
	own, ownKey := files(t)
	theirs, theirKey := files(t)
	for name, value := range map[string]string{"CERT_PATH": own, "KEY_PATH": ownKey, "CLIENT_CA_CERT_PATH": theirs,
		"CA_CERT_PATH": theirs, "CLIENT_CERT_PATH": own, "CLIENT_KEY_PATH": ownKey} {
		t.Setenv("DYN_TCP_TLS_"+name, value)
	}
	config := TLSFromEnv()
	identity, err := tls.LoadX509KeyPair(theirs, theirKey)
	if err != nil {
		t.Fatal(err)
	}
	trusted, err := authorities(own)
	if err != nil {
		t.Fatal(err)
	}
	both := &tls.Config{Certificates: []tls.Certificate{identity}, RootCAs: trusted, ClientCAs: trusted,
		ClientAuth: tls.RequireAndVerifyClientCert, ServerName: "127.0.0.1"}
	w := newWorker(t, both, func(c net.Conn, r *request) {
		c.Write(make([]byte, 4))
		back, err := tls.Dial("tcp", r.answer.Address, both)
		if err != nil {
			t.Error(err)
			return
		}
		defer back.Close()
		back.Write(bytes.Join([][]byte{frame(`{"subject":"`+r.answer.Subject+`"}`, nil), frame(`{"error":null}`, nil),
			frame("", []byte("x")), frame(sentinel, nil)}, nil))
		io.Copy(io.Discard, back)
	})
	ask := func(c TLS, patience time.Duration) error {
		parts, err := newPlane(t, Config{TLS: c}).Ask(within(t, patience), w.endpoint(), nil, 100)
		if err == nil && len(parts) != 1 {
			err = errors.New("no response")
		}
		return err
	}
	if err := ask(config, time.Minute); err != nil {
		t.Fatal(err)
	}
	named := config
	named.ServerName = "dynamo-worker"
	if err := ask(named, time.Minute); err != nil {
		t.Errorf("with the name in the certificate: %v", err)
	}
	named.ServerName = "other"
	if err := ask(named, time.Minute); err == nil {
		t.Error("a certificate of another name is accepted")
	}
	named.Insecure = true
	if err := ask(named, time.Minute); err != nil {
		t.Errorf("any certificate: %v", err)
	}
	if err := ask(TLS{CA: own}, time.Minute); err == nil {
		t.Error("a certificate of another authority is accepted")
	}
	if err := ask(TLS{}, 500*time.Millisecond); err == nil {
		t.Error("plain TCP works")
	}
	for name, bad := range map[string]TLS{"no key": {Cert: own}, "no certificate": {ClientKey: ownKey},
		"authority alone": {ClientCA: own}, "missing file": {CA: own + "x"}, "no PEM": {CA: ownKey},
		"wrong key": {Cert: own, Key: theirKey}} {
		if _, err := New(Config{Callback: ":0", TLS: bad}); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

func FuzzReceive(f *testing.F) {
	f.Add(append(prologue, frame(sentinel, nil)...))
	f.Add(bytes.Join([][]byte{prologue, frame("", []byte("x")), frame(`"stop"`, nil)}, nil))
	f.Fuzz(func(t *testing.T, text []byte) {
		ours, theirs := net.Pipe()
		go func() {
			theirs.Write(text)
			theirs.Close()
		}()
		parts, err := receive(ours, 1000)
		ours.Close()
		n := 0
		for _, p := range parts {
			n += len(p)
		}
		if err == nil && n > 1000 {
			t.Errorf("%d bytes", n)
		}
	})
}
