package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
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

// blocks returns how many of a prompt's blocks each worker has cached, as the kvepp at an admin address knows, and the
// most of them.
func blocks(t *testing.T, admin, about string) (all string, most int) {
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
		Reason     string `json:"reason"`
		Candidates []struct {
			Name         string `json:"name"`
			Rank         int    `json:"dp_rank"`
			DeviceBlocks int    `json:"device_blocks"`
		} `json:"candidates"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
		t.Fatal(err)
	}
	for _, c := range p.Candidates {
		most = max(most, c.DeviceBlocks)
	}
	return fmt.Sprint(p.Reason, p.Candidates), most
}

// differences counts the prompts whose cached blocks another kvepp and the stack's know differently.
func differences(t *testing.T, s *stack.Stack, other *stack.Another, about string, n int) (differ, cached int) {
	t.Helper()
	for i := range n {
		name := fmt.Sprint(about, i)
		ours, most := blocks(t, s.Admin(), name)
		if theirs, _ := blocks(t, other.Admin(), name); ours != theirs {
			differ++
		}
		if most > 0 { // prompts have no block in common
			cached++
		}
	}
	return differ, cached
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
			same(t, s, other, plane, 100)

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
			same(t, s, other, plane, 100)
			same(t, s, other, plane+" later ", min(100, int(later.Load())))
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

// same waits until another kvepp knows the same cached blocks of n prompts. Most of them must be cached somewhere.
func same(t *testing.T, s *stack.Stack, other *stack.Another, about string, n int) {
	t.Helper()
	eventually(t, func() error {
		differ, cached := differences(t, s, other, about, n)
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

// mirror copies Dynamo's discovery to a folder, again and again, with a relay in place of each worker's event socket.
func mirror(t *testing.T, from string) (to string, relays func() []*relay) {
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
	to, relays := mirror(t, s.Discovery())
	other := another(t, s, "--dynamo-discovery", "file:"+to)
	converse(t, s, "before", 50)
	same(t, s, other, "before", 50)
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
	same(t, s, other, "before", 50)
	same(t, s, other, "during 0 ", 20)
	m, err := other.Metrics(t.Context())
	if err != nil || m[`kvepp_events_total{kind="subscription",outcome="gap"}`] != 0 {
		t.Errorf("%v; questions %v", err, questions(m))
	}
	t.Logf("%d messages were dropped; questions %v", dropped(), questions(m))
}
