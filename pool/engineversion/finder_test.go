package engineversion

import (
	"context"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// engines answers requests without a network: by URL, a status and a body; a URL that is not there is unreachable.
type engines struct {
	mu        sync.Mutex
	responses map[string]string // "200 body"
	asked     map[string]int
}

func (e *engines) set(url, response string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.responses[url] = response
}

func (e *engines) RoundTrip(req *http.Request) (*http.Response, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	url := req.URL.String()
	e.asked[url]++
	response, there := e.responses[url]
	if !there {
		return nil, io.ErrUnexpectedEOF
	}
	code, body, _ := strings.Cut(response, " ")
	status := http.StatusOK
	if code != "200" {
		status = http.StatusNotFound
	}
	return &http.Response{StatusCode: status, Status: code, Body: io.NopCloser(strings.NewReader(body)),
		Header: http.Header{}, Request: req}, nil
}

func newEngines() *engines { return &engines{responses: map[string]string{}, asked: map[string]int{}} }

// TestFinder: versions are found at the paths of each engine, again when they change, and kept while a server is away.
func TestFinder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngines()
		e.set("http://a/server_info", `200 {"version":"0.5.23","internal_states":[{}]}`)
		e.set("http://b/server_info", `404 {}`)
		e.set("http://b/get_server_info", `200 {"version":"0.5.21"}`)
		e.set("http://c/server_info", `200 not JSON`)
		e.set("http://c/get_server_info", `200 {"version":7}`)
		changes := 0
		f := New(PathsOf("sglang"), &http.Client{Transport: e}, func() { changes++ })
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		f.Want([]string{"http://a", "http://b", "http://c", "http://d"})
		go f.Run(ctx)
		synctest.Wait()
		for url, want := range map[string]Response{"http://a": {Version: "0.5.23"}, "http://b": {Version: "0.5.21"},
			"http://c": {}, "http://d": {}, "http://other": {}} {
			if got := f.Of(url); got != want {
				t.Errorf("%s: %+v, want %+v", url, got, want)
			}
		}
		if changes != 1 {
			t.Errorf("%d changes were reported, want one for the first round", changes)
		}
		// A server that was away is asked sooner than one that answered.
		e.set("http://d/server_info", `200 {"version":"0.5.22"}`)
		e.set("http://b/get_server_info", `200 {"version":"0.5.22"}`)
		<-time.After(retry + time.Second)
		synctest.Wait()
		if d, b := f.Of("http://d"), f.Of("http://b"); d.Version != "0.5.22" || b.Version != "0.5.21" {
			t.Errorf("after %v: %+v and %+v, want 0.5.22 of the one that was away alone", retry, d, b)
		}
		<-time.After(interval)
		synctest.Wait()
		if b := f.Of("http://b"); b != (Response{Version: "0.5.22"}) {
			t.Errorf("after an update: %+v, want 0.5.22", b)
		}
		e.mu.Lock()
		delete(e.responses, "http://b/get_server_info")
		delete(e.responses, "http://b/server_info")
		e.mu.Unlock()
		<-time.After(2 * interval)
		synctest.Wait()
		if b := f.Of("http://b"); b.Version != "0.5.22" {
			t.Errorf("while away: %+v, want the last version", b)
		}
		f.Want([]string{"http://a"})
		if b := f.Of("http://b"); b != (Response{}) {
			t.Errorf("no longer wanted: %+v", b)
		}
	})
}

// TestSeveral: an address whose responses alternate stands for several engines; a rollout with its rollback does not.
func TestSeveral(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := newEngines()
		f := New(PathsOf("vllm"), &http.Client{Transport: e}, func() {})
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		say := func(version string) Response {
			e.set("http://a/version", `200 {"version":"`+version+`"}`)
			<-time.After(interval)
			synctest.Wait()
			return f.Of("http://a")
		}
		e.set("http://a/version", `200 {"version":"0.32.0"}`)
		f.Want([]string{"http://a"})
		go f.Run(ctx)
		synctest.Wait()
		say("0.33.0")
		if a := say("0.32.0"); a.Several {
			t.Error("a rollback counts as several engines")
		}
		if a := say("0.33.0"); !a.Several {
			t.Error("answers that alternate do not count as several engines")
		}
		for range alternatingFor/interval + 1 {
			say("0.33.0")
		}
		if a := f.Of("http://a"); a != (Response{Version: "0.33.0"}) {
			t.Errorf("after %v of one version: %+v", alternatingFor, a)
		}
	})
}

// TestDynamo: a frontend of Dynamo tells its version in its OpenAPI document.
func TestDynamo(t *testing.T) {
	e := newEngines()
	e.set("http://a/openapi.json", `200 {"openapi":"3.1.0","info":{"title":"t","version":"1.6.1"},"paths":{}}`)
	e.set("http://b/openapi.json", `200 {"openapi":"3.1.0","info":{}}`)
	f := New(PathsOf("dynamo"), &http.Client{Transport: e}, func() {})
	if a, err := f.Ask(t.Context(), "http://a"); err != nil || a.Version != "1.6.1" {
		t.Errorf("%+v, %v", a, err)
	}
	if a, err := f.Ask(t.Context(), "http://b"); err == nil {
		t.Errorf("a document without a version gives %+v", a)
	}
}

// TestAsk: a server can be asked at once, and is not asked again if its version is known.
func TestAsk(t *testing.T) {
	e := newEngines()
	e.set("http://a/version", `200 {"version":"0.33.0"}`)
	f := New(PathsOf("vllm"), &http.Client{Transport: e}, func() {})
	if a, err := f.Ask(t.Context(), "http://a/"); err != nil || a.Version != "0.33.0" {
		t.Errorf("%+v, %v", a, err)
	}
	e.set("http://a/version", "200 "+strings.Repeat(" ", maxBytes)+`{"version":"0.33.0"}`)
	if a, err := f.Ask(t.Context(), "http://a"); err == nil {
		t.Errorf("an endless response gives %+v", a)
	}
}
