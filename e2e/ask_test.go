package e2e

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/test/harness/stack"
)

// converse sends a request of each of n conversations, some at once.
func converse(t *testing.T, s *stack.Stack, about string, n int) {
	t.Helper()
	places := make(chan struct{}, 8)
	var all sync.WaitGroup
	for i := range n {
		places <- struct{}{}
		all.Go(func() {
			defer func() { <-places }()
			messages := conversation(fmt.Sprint(about, i), 2)
			a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, messages, i%2 == 0, nil)
			if err != nil || a.Status != http.StatusOK {
				t.Errorf("conversation %d: %v, %+v", i, err, a)
			}
		})
	}
	all.Wait()
}

// blocks returns how many of a prompt's blocks each rank of a worker (NAME/RANK) has cached, as the kvepp at an admin
// address knows.
func blocks(t *testing.T, admin, about string) map[string]int {
	t.Helper()
	request, err := json.Marshal(map[string]any{"model": stack.Model, "messages": conversation(about, 2)})
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.Post(admin+"/pick", "application/json", strings.NewReader(string(request)))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var p struct {
		Candidates []struct {
			Name         string `json:"name"`
			Rank         int    `json:"dp_rank"`
			DeviceBlocks int    `json:"device_blocks"`
		} `json:"candidates"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
		t.Fatal(err)
	}
	found := map[string]int{}
	for _, c := range p.Candidates {
		found[fmt.Sprintf("%s/%d", c.Name, c.Rank)] = c.DeviceBlocks
	}
	return found
}

// same waits until another kvepp knows the same cached blocks of n prompts as the stack's, at all workers but one. Most
// prompts must be cached somewhere.
func same(t *testing.T, s *stack.Stack, other *stack.Another, about string, n int, but string) {
	t.Helper()
	eventually(t, func() error {
		differ, cached := 0, 0
		for i := range n {
			ours, theirs := blocks(t, s.Admin(), fmt.Sprint(about, i)), blocks(t, other.Admin(), fmt.Sprint(about, i))
			delete(ours, but)
			delete(theirs, but)
			if !maps.Equal(ours, theirs) {
				differ++
			}
			if len(ours) > 0 && slices.Max(slices.Collect(maps.Values(ours))) > 0 { // prompts have no block in common
				cached++
			}
		}
		if differ > 0 {
			return fmt.Errorf("%d of %d prompts differ", differ, n)
		}
		if cached < n/2 {
			return fmt.Errorf("only %d of %d prompts are cached", cached, n)
		}
		t.Logf("0 differences over %d prompts, %d of them cached", n, cached)
		return nil
	})
}

// TestWorkersAreAsked: a kvepp that starts late, or starts again under load, knows the same cached blocks as one that
// ran all along, because Dynamo's workers tell what they hold.
func TestWorkersAreAsked(t *testing.T) {
	for _, plane := range []string{"zmq", "nats"} {
		t.Run(plane, func(t *testing.T) {
			s := start(t, stack.Config{Workers: 2, Ranks: 2, Blocks: 16384, Speedup: 50, EventPlane: plane})
			nothingLeft(t, s)
			converse(t, s, plane, 200)
			other := another(t, s)
			same(t, s, other, plane, 100, "")

			load, stop := context.WithCancel(t.Context())
			defer stop()
			var running sync.WaitGroup
			var later atomic.Int32
			for range 4 {
				running.Go(func() {
					for load.Err() == nil {
						messages := conversation(fmt.Sprint(plane, " later ", later.Add(1)), 2)
						a, err := stack.Chat(t.Context(), http.DefaultClient, s.Envoy.URL, nil, messages, true, nil)
						if err != nil || a.Status != http.StatusOK {
							t.Errorf("under load: %v, %+v", err, a)
							return
						}
					}
				})
			}
			for range 3 {
				other.Kill()
				other = another(t, s)
			}
			before := later.Load()
			eventually(t, func() error {
				if n := later.Load(); n < before+20 {
					return fmt.Errorf("%d requests since the restart", n-before)
				}
				return nil
			})
			stop()
			running.Wait()
			same(t, s, other, plane, 100, "")
			same(t, s, other, plane+" later ", min(100, int(later.Load())), "")
			m, err := other.Metrics(t.Context())
			if err != nil || m[`kvepp_events_total{kind="query",outcome="all_blocks"}`] < 4 ||
				m[`kvepp_events_total{kind="query",outcome="given_up"}`] != 0 {
				t.Errorf("%v; questions: %v", err, questions(m))
			}
			t.Logf("questions of the last kvepp: %v", questions(m))
		})
	}
}

// questions are the counts of questions to workers.
func questions(m map[string]float64) map[string]float64 {
	found := map[string]float64{}
	for name, n := range m {
		if strings.Contains(name, `kind="query"`) && n > 0 || strings.Contains(name, `outcome="gap"`) {
			found[name] = n
		}
	}
	return found
}

// another starts another kvepp.
func another(t *testing.T, s *stack.Stack, flags ...string) *stack.Another {
	t.Helper()
	a, err := s.StartAnother(t.Context(), flags...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Kill)
	return a
}

// relay passes the messages of one worker's event socket on to those who subscribe at its own, or drops them.
type relay struct {
	address string
	drops   atomic.Bool
	dropped atomic.Int64
}

func newRelay(t *testing.T, publisher string) *relay {
	t.Helper()
	in, err := zmq.NewSocket(zmq.SUB)
	if err != nil {
		t.Fatal(err)
	}
	out, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{in.SetSubscribe(""), in.SetRcvhwm(0), out.SetSndhwm(0), out.SetLinger(0),
		in.SetRcvtimeo(50 * time.Millisecond), in.Connect(publisher), out.Bind("tcp://127.0.0.1:*")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	r := &relay{}
	if r.address, err = out.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		defer in.Close()
		defer out.Close()
		for t.Context().Err() == nil {
			frames, err := in.RecvMessageBytes(0)
			if err != nil {
				continue
			}
			if r.drops.Load() {
				r.dropped.Add(1)
				continue
			}
			if _, err := out.SendMessage(frames); err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() { <-ended })
	return r
}

// mirror copies Dynamo's discovery to a folder, again and again, with a relay in place of each worker's event socket,
// and each publisher's record as source changes it.
func mirror(t *testing.T, from string, source func(record string) string) (to string, relays func() []*relay) {
	t.Helper()
	to = t.TempDir()
	var mu sync.Mutex
	known := map[string]*relay{}
	copyAll := func() error {
		mu.Lock()
		defer mu.Unlock()
		return filepath.WalkDir(from, func(file string, d os.DirEntry, err error) error {
			if err != nil || d.IsDir() {
				return err
			}
			text, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if strings.Contains(file, "event_channels") && strings.Contains(file, "kv%2Devents") {
				_, rest, _ := strings.Cut(string(text), `"endpoint":"tcp://`)
				address, _, _ := strings.Cut(rest, `"`)
				if address == "" {
					return fmt.Errorf("no address in %s", text)
				}
				address = "tcp://" + address
				if known[address] == nil {
					known[address] = newRelay(t, address)
				}
				text = []byte(strings.Replace(string(text), address, known[address].address, 1))
			}
			if strings.Contains(file, "event_sources") {
				text = []byte(source(string(text)))
			}
			name := filepath.Join(to, strings.TrimPrefix(file, from))
			if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(name+".next", text, 0o644); err != nil {
				return err
			}
			return os.Rename(name+".next", name)
		})
	}
	if err := copyAll(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		again := time.NewTicker(500 * time.Millisecond)
		defer again.Stop()
		for {
			select {
			case <-again.C:
				copyAll() // a record may be gone: the next time tells
			case <-t.Context().Done():
				return
			}
		}
	}()
	t.Cleanup(func() { <-ended })
	return to, func() (all []*relay) {
		mu.Lock()
		defer mu.Unlock()
		for _, r := range known {
			all = append(all, r)
		}
		return all
	}
}

// TestLostMessagesCostNothing: 1,000 messages about KV blocks do not reach kvepp, which afterwards knows the same as a
// kvepp that got all.
func TestLostMessagesCostNothing(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Blocks: 65536, Speedup: 50, EventPlane: "zmq"})
	nothingLeft(t, s)
	to, relays := mirror(t, s.Discovery(), func(record string) string { return record })
	other := another(t, s, "--dynamo-discovery", "file:"+to)
	converse(t, s, "before", 50)
	same(t, s, other, "before", 50, "")
	dropped := func() (n int64) {
		for _, r := range relays() {
			n += r.dropped.Load()
		}
		return n
	}
	drop := func(drops bool) {
		for _, r := range relays() {
			r.drops.Store(drops)
		}
	}
	drop(true)
	for i := 0; dropped() < 1000; i++ {
		if i > 200 {
			t.Fatalf("%d messages in %d rounds", dropped(), i)
		}
		converse(t, s, fmt.Sprint("during ", i, " "), 20)
	}
	drop(false)
	converse(t, s, "after", 20)
	same(t, s, other, "before", 50, "")
	same(t, s, other, "during 0 ", 20, "")
	m, err := other.Metrics(t.Context())
	if err != nil || m[`kvepp_events_total{kind="subscription",outcome="gap"}`] != 0 {
		t.Errorf("%v; questions %v", err, questions(m))
	}
	t.Logf("%d messages were dropped; questions %v", dropped(), questions(m))
}

// callback is what a request on Dynamo's request plane says of where its response goes.
var callback = regexp.MustCompile(`\\"address\\":\\"([^\\]+)\\",\\"subject\\":\\"([^\\]+)\\"`)

// hostileIndexer takes questions and answers each as told.
func hostileIndexer(t *testing.T, answer func(question net.Conn, address, subject string)) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				text := make([]byte, 4096)
				n, _ := c.Read(text)
				if to := callback.FindSubmatch(text[:n]); to != nil {
					answer(c, string(to[1]), string(to[2]))
				}
			}()
		}
	}()
	return l.Addr().String()
}

// TestHostileIndexers: a worker that answers garbage, 300 MiB, nothing, or for another rank costs kvepp what it held
// before, and nothing else: not what the others hold, nor that worker's later events.
func TestHostileIndexers(t *testing.T) {
	s := start(t, stack.Config{Workers: 2, Ranks: 2, Blocks: 16384, Speedup: 50, EventPlane: "zmq"})
	nothingLeft(t, s)
	converse(t, s, "before", 60)
	part := func(header string, data uint64) []byte {
		b := binary.BigEndian.AppendUint64(nil, uint64(len(header)))
		b = binary.BigEndian.AppendUint64(b, data)
		return append(binary.BigEndian.AppendUint64(b, 0), header...)
	}
	answerWith := func(send func(c net.Conn)) func(net.Conn, string, string) {
		return func(question net.Conn, address, subject string) {
			question.Write(make([]byte, 4))
			c, err := net.Dial("tcp", address)
			if err != nil {
				return
			}
			defer c.Close()
			c.Write(part(fmt.Sprintf(`{"subject":%q,"stream_type":"response"}`, subject), 0))
			c.Write(part(`{"error":null}`, 0))
			send(c)
			io.Copy(io.Discard, c)
		}
	}
	for name, answer := range map[string]func(net.Conn, string, string){
		"malformed": answerWith(func(c net.Conn) {
			c.Write(append(part("", 9), "\xc1 garbage"...))
			c.Write(part(`"sentinel"`, 0))
		}),
		"too_long": answerWith(func(c net.Conn) {
			c.Write(part("", 300<<20))
			for zeros := make([]byte, 1<<20); ; {
				if _, err := c.Write(zeros); err != nil {
					return
				}
			}
		}),
		"timed_out": func(question net.Conn, _, _ string) { io.Copy(io.Discard, question) },
		"refused":   nil, // another rank's index
	} {
		t.Run(name, func(t *testing.T) {
			var replaced, by string
			target := regexp.MustCompile(`"tcp":"([^"]+)"`)
			records, err := filepath.Glob(filepath.Join(s.Discovery(), "v1/event_sources/*w0*"))
			if err != nil {
				t.Fatal(err)
			}
			for _, file := range records {
				text, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if at := target.FindSubmatch(text)[1]; strings.Contains(string(text), `"dp_rank":0`) {
					replaced = string(at)
				} else {
					by = string(at)
				}
			}
			if answer != nil {
				by = hostileIndexer(t, answer) + "/x"
			}
			replace := func(record string) string { return strings.Replace(record, replaced, by, 1) }
			to, _ := mirror(t, s.Discovery(), replace)
			other := another(t, s, "--dynamo-discovery", "file:"+to)
			defer other.Kill()
			same(t, s, other, "before", 60, "worker-0/0")
			eventually(t, func() error {
				m, err := other.Metrics(t.Context())
				if n := m[`kvepp_events_total{kind="query",outcome="given_up"}`]; err == nil && n == 0 {
					err = fmt.Errorf("kvepp has not given up; questions %v", questions(m))
				}
				if n := m[`kvepp_events_total{kind="query",outcome="`+name+`"}`]; err == nil && n < 3 {
					err = fmt.Errorf("questions %v, want 3 answers %s", questions(m), name)
				}
				return err
			})
			held := 0
			for i := range 60 {
				held += blocks(t, s.Admin(), fmt.Sprint("before", i))["worker-0/0"]
				if n := blocks(t, other.Admin(), fmt.Sprint("before", i))["worker-0/0"]; n > 0 {
					t.Errorf("kvepp knows %d blocks of the worker that did not tell", n)
				}
			}
			if held == 0 {
				t.Error("worker-0/0 holds nothing, so this test shows nothing")
			}
			converse(t, s, "after "+name, 20)
			same(t, s, other, "after "+name, 20, "")
		})
	}
}

// newBroker starts a broker of Dynamo's event plane.
func newBroker(t *testing.T) (xsub, xpub string, stop func()) {
	t.Helper()
	xsub, xpub, stop, err := stack.StartBroker()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return xsub, xpub, stop
}

// TestBrokers: workers publish over two ZMQ brokers. kvepp hears each event once, and first tokens, also after one of
// them has gone.
func TestBrokers(t *testing.T) {
	xsub, xpub, stop := newBroker(t)
	xsub2, xpub2, _ := newBroker(t)
	t.Setenv("DYN_ZMQ_BROKER_URL", fmt.Sprintf("xsub=%s;%s , xpub=%s;%s", xsub, xsub2, xpub, xpub2))
	s := start(t, stack.Config{Workers: 2, Speedup: 50, EventPlane: "zmq"})
	nothingLeft(t, s)
	for i := range 6 {
		warm(t, s.Envoy.URL, conversation(fmt.Sprint(t.Name(), i), 2), i%2 == 0, nil)
	}
	stop()
	for i := range 6 {
		warm(t, s.Envoy.URL, conversation(fmt.Sprint(t.Name(), "after", i), 2), i%2 == 0, nil)
	}
	m, err := s.Metrics(t.Context())
	if err != nil || m[`kvepp_events_total{kind="subscription",outcome="gap"}`]+
		m[`kvepp_events_total{kind="subscription",outcome="restart"}`] != 0 {
		t.Errorf("%v; questions %v", err, questions(m))
	}
	if text, err := s.Log(); err != nil || !strings.Contains(text, "address="+xpub+";"+xpub2) {
		t.Errorf("kvepp did not connect to the brokers (%v)", err)
	}
	if m["kvepp_first_tokens_noted_total"] == 0 || m["kvepp_workers_with_gauges"] != 2 {
		t.Errorf("over the brokers %v first tokens were noted, and %v workers have loads",
			m["kvepp_first_tokens_noted_total"], m["kvepp_workers_with_gauges"])
	}
	same(t, s, another(t, s), t.Name(), 6, "")
}

// TestWorkersAreAskedOverTLS: with Dynamo's variables, questions and answers are encrypted, and worker and kvepp know
// each other by certificates.
func TestWorkersAreAskedOverTLS(t *testing.T) {
	dir := t.TempDir()
	newAuthority(t).issue(t, dir, 2, "dynamo")
	for name, file := range map[string]string{"CERT_PATH": "tls.crt", "KEY_PATH": "tls.key", "CA_CERT_PATH": "ca.crt",
		"CLIENT_CA_CERT_PATH": "ca.crt", "CLIENT_CERT_PATH": "tls.crt", "CLIENT_KEY_PATH": "tls.key"} {
		t.Setenv("DYN_TCP_TLS_"+name, filepath.Join(dir, file))
	}
	t.Setenv("DYN_TCP_TLS_SERVER_NAME", "dynamo")
	s := start(t, stack.Config{Workers: 1, Speedup: 50, EventPlane: "zmq"})
	converse(t, s, "tls", 10)
	same(t, s, another(t, s), "tls", 10, "")
	t.Setenv("DYN_TCP_TLS_CA_CERT_PATH", "")
	plain := another(t, s)
	eventually(t, func() error {
		m, err := plain.Metrics(t.Context())
		if n := m[`kvepp_events_total{kind="query",outcome="given_up"}`]; err == nil && n == 0 {
			err = fmt.Errorf("a kvepp without TLS has not given up; questions %v", questions(m))
		}
		return err
	})
}
