package client

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/serve/admin"
)

// fakeKvepp serves the admin API with one endpoint, whose state the test chooses.
type fakeKvepp struct {
	mu    sync.Mutex
	now   admin.Endpoint
	gets  int
	after func(gets int, e *admin.Endpoint) // called before each response to GET; may change e
	*httptest.Server
}

func newFakeKvepp(t *testing.T, after func(int, *admin.Endpoint)) *fakeKvepp {
	d := &fakeKvepp{
		after: after,
		now:   admin.Endpoint{Name: "a", InPool: true, RunningRequests: 3, Workers: []admin.Worker{}},
	}
	d.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		d.mu.Lock()
		defer d.mu.Unlock()
		switch req.Method + " " + req.URL.Path {
		case "POST /workers/a/drain":
			d.now.Cordon = &admin.Cordon{As: "draining", By: []string{admin.Operator}}
		case "GET /workers/a":
			d.gets++
			d.after(d.gets, &d.now)
		default:
			http.NotFound(w, req)
			return
		}
		json.NewEncoder(w).Encode(d.now)
	}))
	t.Cleanup(d.Close)
	return d
}

// elapsed matches the time in a line.
var elapsed = regexp.MustCompile(`after [0-9ms]+`)

// TestDrainWaits: the command prints how many requests run, and returns when the last one ends. If it ends for another
// reason, it says what to do.
func TestDrainWaits(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for name, c := range map[string]struct {
		after                  func(gets int, e *admin.Endpoint)
		timeout                time.Duration
		err, printed, progress string
	}{
		"requests end": {after: func(gets int, e *admin.Endpoint) { e.RunningRequests = max(3-gets, 0) },
			printed: `a: drained after N s, no request runs. "kvepp uncordon a" brings it back.`,
			progress: "a: draining, 3 requests run after N s\na: draining, 2 requests run after N s\na: draining, 1 " +
				"request runs after N s\n"},
		"requests do not end": {after: func(int, *admin.Endpoint) {}, timeout: 2 * time.Second,
			err: `--timeout is over after N s: 3 requests run on a. It stays cordoned: drain it again to wait ` +
				`further, stop the engine to break them off, or bring it back with "kvepp uncordon a"`},
		"the endpoint leaves": {after: func(_ int, e *admin.Endpoint) { e.InPool = false },
			err: "a has left the pool: kvepp cannot count its running requests any more. Look at the engine itself " +
				"before you stop it"},
		"uncordoned": {after: func(_ int, e *admin.Endpoint) { e.Cordon = nil },
			err: "a is not cordoned any more, and 3 requests run on it: kvepp has restarted, or an operator has " +
				"uncordoned it. Drain it again"},
		"only the Pod annotation cordons it": {after: func(_ int,
			e *admin.Endpoint) {
			e.Cordon.By = []string{"Pod annotation"}
		}, err: "a is not cordoned any more"},
	} {
		t.Run(name, func(t *testing.T) {
			d := newFakeKvepp(t, c.after)
			var progress, out bytes.Buffer
			at := &server{address: strings.TrimPrefix(d.URL, "http://")}
			err := at.drain(t.Context(), "a", c.timeout, time.Millisecond, &out, &progress)
			if got := elapsed.ReplaceAllString(fmt.Sprint(err), "after N s"); c.err != "" &&
				!strings.Contains(got, c.err) ||
				c.err == "" && err != nil {
				t.Errorf("error %q, want %q", got, c.err)
			}
			if got := elapsed.ReplaceAllString(strings.TrimSpace(out.String()), "after N s"); got != c.printed {
				t.Errorf("printed %q, want %q", got, c.printed)
			}
			if got := elapsed.ReplaceAllString(progress.String(), "after N s"); c.progress != "" && got != c.progress {
				t.Errorf("progress %q, want %q", got, c.progress)
			}
		})
	}
}
