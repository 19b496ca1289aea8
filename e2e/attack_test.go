package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"kvepp/internal/bodytest"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// attackBudget is the most that kvepp may have resident, in bytes, under any attack. Without a limit of Go's, the heap
// may be twice the memory in use, which is --max-buffered-bytes for requests.
const (
	attackBudget = 448 << 20 // as in a container of 2 GiB
	attackMemory = 1400 << 20
)

// attacked is kvepp and Envoy in front of a server that checks its requests, with ordinary clients.
type attacked struct {
	t      *testing.T
	s      *stack.Stack
	served atomic.Int64 // requests of ordinary clients
	stop   chan struct{}
	all    sync.WaitGroup
	took   []time.Duration // of ordinary requests; read when all are done
	mu     sync.Mutex      // guards took
}

// sumHeader has the hash of the body. A request with holdHeader gets no response.
const (
	sumHeader  = "x-sum"
	holdHeader = "x-hold"
)

// startAttacked starts so many ordinary clients, which send requests until ordinary is called.
func startAttacked(t *testing.T, clients int, flags ...string) *attacked {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		Protocols: new(http.Protocols),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			sum := sha256.New()
			if _, err := io.Copy(sum, r.Body); err != nil {
				return // its client closed the connection
			}
			if want := r.Header.Get(sumHeader); want != "" && want != fmt.Sprintf("%x", sum.Sum(nil)) {
				t.Errorf("the body of a request to %s arrived changed", r.URL.Path)
			}
			if r.Header.Get(holdHeader) != "" {
				<-r.Context().Done() // its client has gone
				return
			}
			io.WriteString(w, `{"choices":[{"message":{"content":"x"}}]}`)
		}),
	}
	server.Protocols.SetHTTP1(true)
	go server.Serve(l)
	t.Cleanup(func() { server.Close() })
	a := &attacked{t: t, stop: make(chan struct{})}
	a.s = start(t, stack.Config{Workers: -1, Kill: true, Servers: []string{l.Addr().String()},
		KveppFlags: append(
			[]string{"--router-kv-events=false", "--log-level=info", fmt.Sprint("--max-buffered-bytes=", attackBudget)},
			flags...)})
	both := stormClients(t)
	for i := range clients {
		a.all.Go(func() {
			client, text := both[i%2 == 0], strings.Repeat("an ordinary question ", 20+i*10)
			for turn := 0; ; turn++ {
				select {
				case <-a.stop:
					return
				default:
				}
				body := fmt.Appendf(
					nil,
					`{"model":%q,"messages":[{"role":"user","content":"%d %d %s"}]}`,
					stack.Model,
					i,
					turn,
					text,
				)
				began := time.Now()
				if status, err := post(context.Background(), client, a.s.Envoy.URL, "/v1/chat/completions",
					body); err != nil ||
					status != http.StatusOK {
					t.Errorf("an ordinary request: status %d, %v", status, err)
					return
				}
				a.mu.Lock()
				a.took = append(a.took, time.Since(began))
				a.mu.Unlock()
				a.served.Add(1)
				<-time.After(20 * time.Millisecond)
			}
		})
	}
	return a
}

// post returns the response's status. A status of 500 or more is an error with the response's text.
func post(ctx context.Context, client *http.Client, url, path string, body []byte) (status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+path, bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	req.Header.Set("content-type", "application/json")
	req.Header.Set(sumHeader, fmt.Sprintf("%x", sha256.Sum256(body)))
	resp, err := client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	response, err := io.ReadAll(resp.Body)
	if resp.StatusCode >= http.StatusInternalServerError {
		err = errors.Join(err, fmt.Errorf("the response is %.300q", response))
	}
	return resp.StatusCode, err
}

// ordinary stops the ordinary clients, and checks kvepp's memory.
func (a *attacked) ordinary(most int) {
	a.t.Helper()
	close(a.stop)
	a.all.Wait()
	n, err := a.s.KveppMemory()
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Logf(
		"%d ordinary requests, %s; kvepp's memory has peaked at %d MiB, its CPU time is %v",
		a.served.Load(),
		percentiles(a.took),
		n>>20,
		cpuTime(a.t, a.s),
	)
	if n > most {
		a.t.Errorf("kvepp's memory has peaked at %d MiB, more than %d", n>>20, most>>20)
	}
	if a.served.Load() == 0 {
		a.t.Error("no ordinary request was served")
	}
	allFreed(a.t, a.s)
}

// percentiles returns the requests' durations as a text. The test has no bound for them: they depend on the machine.
func percentiles(took []time.Duration) string {
	if len(took) == 0 {
		return "none"
	}
	sorted := slices.Sorted(slices.Values(took))
	at := func(p float64) time.Duration { return sorted[int(p*float64(len(sorted)-1))].Round(time.Millisecond) }
	return fmt.Sprintf("p50 %v, p99 %v, at most %v", at(0.5), at(0.99), at(1))
}

// cpuTime returns kvepp's CPU time, by the system's clock of 100 Hz.
func cpuTime(t *testing.T, s *stack.Stack) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", s.KveppPID()))
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(text), ") ")
	fields := strings.Fields(after) // from the third field on, see proc(5)
	user, err1 := strconv.Atoi(fields[11])
	system, err2 := strconv.Atoi(fields[12])
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	return time.Duration(user+system) * 10 * time.Millisecond
}

// whole reports whether to run the long forms of the tests (make storm).
func whole() bool { return *stormRequests >= 5000 }

// TestStormOfBodies sends bodies that are costly to parse, four at once and as large as allowed. Memory stays within
// its bound, other clients get their responses, and every body arrives unchanged.
func TestStormOfBodies(t *testing.T) {
	const size = 31_000_000
	a := startAttacked(t, 50)
	clients := stormClients(t)
	var sent atomic.Int64
	var statuses sync.Map
	attack := func(b bodytest.Body) {
		status, err := post(t.Context(), clients[false], a.s.Envoy.URL, b.Path, b.JSON)
		if err != nil ||
			status != http.StatusOK && status != http.StatusBadRequest && status != http.StatusTooManyRequests &&
				status != http.StatusNotFound {
			t.Errorf("%s: status %d, %v", b.Name, status, err)
		}
		n, _ := statuses.LoadOrStore(status, new(atomic.Int64))
		n.(*atomic.Int64).Add(1)
		sent.Add(int64(len(b.JSON)))
	}
	began := time.Now()
	if !whole() {
		var four sync.WaitGroup
		for _, value := range []string{"[]", "0", `""`, "{}"} {
			four.Go(func() {
				attack(
					bodytest.Body{
						Name: value,
						Path: bodytest.Completions,
						JSON: fmt.Appendf(
							nil,
							`{"model":%q,"prompt":[%s%s]}`,
							stack.Model,
							strings.Repeat(value+",", size/(len(value)+1)),
							value,
						),
					},
				)
			})
		}
		four.Wait()
	}
	var attackers sync.WaitGroup
	for i := range 4 {
		attackers.Go(func() {
			chance := rand.New(rand.NewPCG(*stormSeed, uint64(i)))
			for whole() && time.Since(began) < time.Minute {
				b := bodytest.Random(chance, []int{1000, 100_000, 3_000_000, size}[chance.IntN(4)])
				if chance.IntN(2) == 0 {
					b.JSON = bytes.Replace(
						b.JSON,
						[]byte(`"model":"m"`),
						fmt.Appendf(nil, `"model":%q`, stack.Model),
						1,
					)
				}
				if len(b.JSON) < 40_000_000 {
					attack(b)
				}
			}
		})
	}
	attackers.Wait()
	statuses.Range(func(status, n any) bool { t.Logf("status %v: %d", status, n.(*atomic.Int64).Load()); return true })
	t.Logf("%d MB of bodies in %v", sent.Load()/1e6, time.Since(began).Round(time.Second))
	a.ordinary(attackMemory)
}

// TestStormOfPieces sends bodies in pieces of one or a few bytes, over HTTP/1.1 and HTTP/2. They take only the memory
// that kvepp counts for them, which is near their size, and arrive unchanged.
func TestStormOfPieces(t *testing.T) {
	pieces := 20_000
	if whole() {
		pieces = 1_000_000
	}
	a := startAttacked(t, 20)
	chance := rand.New(rand.NewPCG(*stormSeed, 1))
	body := append(fmt.Appendf(nil, `{"model":%q,"prompt":"Hello"}`, stack.Model), bytes.Repeat([]byte(" "), pieces)...)
	sum := fmt.Sprintf("%x", sha256.Sum256(body))
	conn, err := net.Dial("tcp", strings.TrimPrefix(a.s.Envoy.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprintf(
		conn,
		"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%s: %s\r\ntransfer-encoding: "+
			"chunked\r\n\r\n",
		sumHeader,
		sum,
	)
	f, err := dialFrames(t.Context(), a.s.Envoy.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.open(1, false); err != nil {
		t.Fatal(err)
	}
	var chunks bytes.Buffer
	for at := 0; at < len(body); {
		n := min(1+chance.IntN(2)*chance.IntN(3), len(body)-at)
		fmt.Fprintf(&chunks, "%x\r\n%s\r\n", n, body[at:at+n])
		if err := f.send(1, false, body[at:at+n]); err != nil {
			t.Fatal(err)
		}
		at += n
	}
	if _, err := conn.Write(chunks.Bytes()); err != nil {
		t.Fatal(err)
	}
	held := 0.0
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := errors.Join(f.out.Flush(), process.Until(ctx, func() error {
		if held = metric(t, a.s, "kvepp_held_body_bytes"); held < float64(2*len(body)) {
			return fmt.Errorf("kvepp holds %v bytes of %d", held, 2*len(body))
		}
		return nil
	})); err != nil {
		t.Fatal(err)
	}
	t.Logf("kvepp holds %v bytes for 2 bodies of %d", held, len(body))
	if held > float64(4*len(body)+8<<20) { // 8 MiB for ordinary requests
		t.Errorf("kvepp holds %v bytes for 2 bodies of %d", held, len(body))
	}
	fmt.Fprint(conn, "0\r\n\r\n")
	if err := f.send(1, true, nil); err != nil {
		t.Fatal(err)
	}
	if how := f.wait(1); how != "200" {
		t.Errorf("the request over HTTP/2 ended with %s", how)
	}
	response := make([]byte, 12)
	if _, err := io.ReadFull(conn, response); err != nil || string(response) != "HTTP/1.1 200" {
		t.Errorf("the request over HTTP/1.1: %q, %v", response, err)
	}
	a.ordinary(256 << 20)
}

// TestStormOfPrompts sends completions of 2,048 short prompts that the endpoint does not answer. What kvepp keeps of
// them stays within the budget, and other clients get their responses.
func TestStormOfPrompts(t *testing.T) {
	const budget = 64 << 20
	requests := 700
	if whole() {
		requests = 7000
	}
	a := startAttacked(t, 10, fmt.Sprint("--max-buffered-bytes=", budget), "--index-max-bytes=4000000")
	client := stormClients(t)[true]
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	var refused atomic.Int64
	for i := range requests {
		var b strings.Builder
		for j := range 2048 {
			fmt.Fprintf(&b, ",[%d,%d%s]", i+1, j+1, strings.Repeat(",3", stack.BlockSize-2))
		}
		all.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, a.s.Envoy.URL+"/v1/completions",
				strings.NewReader(fmt.Sprintf(`{"model":%q,"prompt":[%s]}`, stack.Model, b.String()[1:])))
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set(holdHeader, "yes")
			if resp, err := client.Do(req); err == nil {
				resp.Body.Close()
				refused.Add(1)
			}
		})
		if i%32 == 31 || i == requests-1 { // more bodies at once would be refused
			eventually(t, func() error {
				if n := int(metric(t, a.s, "kvepp_active_requests")) + int(refused.Load()); n < i+1 {
					return fmt.Errorf("%d of %d requests are routed or refused", n, i+1)
				}
				return nil
			})
		}
	}
	t.Logf("%d of %d requests were refused", refused.Load(), requests)
	if n := refused.Load(); n > int64(requests/10) {
		t.Errorf("%d of %d requests were refused", n, requests)
	}
	cancel()
	all.Wait()
	// 192 MiB without requests; the heap may double between two collections. An open request takes memory however few
	// prompts it has: kvepp peaked at 363 MiB with 7,000 of one prompt each.
	a.ordinary(192<<20 + 2*budget + requests*44<<10)
}
