// Package engineversion asks engines which version they are.
//
// It owns the requests to the engines and what they answered last. It knows no rules of any version and never changes
// a pool: its user reads the responses when the function given to New is called.
//
// Concurrency: a Finder's methods may be called from any goroutine.
package engineversion

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"kvepp/internal/useragent"
)

// Response is what a server says of its engine.
type Response struct {
	Version string // as the engine prints it; empty: not known
	// Several says that the responses alternate between versions, so that the address stands for several engines.
	Several bool
}

const (
	// interval is how long a response is good. A server without a response is asked again after retry.
	interval = time.Minute
	retry    = 10 * time.Second
	// timeout bounds one request.
	timeout = 5 * time.Second
	// maxBytes bounds a response. SGLang's lists all its arguments, some kilobytes for each rank.
	maxBytes = 4 << 20
	// maxVersionBytes bounds a version.
	maxVersionBytes = 64
	// parallel is how many servers are asked at once.
	parallel = 8
	// alternating changes of the version within alternatingFor mean several engines. A rollout and its rollback are
	// two.
	alternating    = 3
	alternatingFor = 10 * time.Minute
)

// PathsOf returns the paths at which an engine tells its version, in the order in which they are asked; nil for an
// engine that does not tell it.
//
// Source: vLLM 0.33.0, entrypoints/serve/instrumentator/basic; SGLang 0.5.23, entrypoints/http_server; a running
// frontend of Dynamo 1.6.1.
func PathsOf(engine string) []string {
	switch engine {
	case "vllm", "trtllm":
		return []string{"/version"}
	case "sglang":
		return []string{"/server_info", "/get_server_info"}
	case "dynamo":
		return []string{"/openapi.json"}
	}
	return nil
}

// server is what a Finder knows of one server.
type server struct {
	response Response
	due      time.Time   // when it is asked again
	changes  []time.Time // of the version; the latest ones
}

// Finder asks servers for their versions. Create it with New.
type Finder struct {
	paths   []string
	client  *http.Client
	changed func()
	wake    chan struct{}

	mu      sync.Mutex
	servers map[string]*server // by URL; those of Want
}

// New returns a Finder that asks at paths. It calls changed, never under a lock, after a response has changed.
func New(paths []string, client *http.Client, changed func()) *Finder {
	return &Finder{paths: paths, client: client, changed: changed, wake: make(chan struct{}, 1),
		servers: map[string]*server{}}
}

// Want sets the servers to ask, as URLs such as http://10.0.0.7:8000. Responses of those that stay are kept.
func (f *Finder) Want(urls []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	next := make(map[string]*server, len(urls))
	for _, url := range urls {
		if known := f.servers[url]; known != nil {
			next[url] = known
		} else {
			next[url] = new(server)
		}
	}
	f.servers = next
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Of returns the latest response of a server; the zero Response if there is none.
func (f *Finder) Of(url string) Response {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s := f.servers[url]; s != nil {
		return s.response
	}
	return Response{}
}

// Ask asks a server now, which need not be one of Want's, unless its version is known already.
func (f *Finder) Ask(ctx context.Context, url string) (Response, error) {
	if known := f.Of(url); known.Version != "" {
		return known, nil
	}
	version, err := f.fetch(ctx, url)
	return Response{Version: version}, err
}

// Run asks the servers of Want, again and again, until ctx ends.
func (f *Finder) Run(ctx context.Context) {
	for {
		next := f.round(ctx)
		timer := time.NewTimer(next)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-f.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// round asks the servers that are due and returns the time until the next one is.
func (f *Finder) round(ctx context.Context) time.Duration {
	now := time.Now()
	var due []string
	f.mu.Lock()
	for url, s := range f.servers {
		if !s.due.After(now) {
			due = append(due, url)
		}
	}
	f.mu.Unlock()
	slices.Sort(due)
	var (
		asked   sync.WaitGroup
		turn    = make(chan struct{}, parallel)
		changes = make([]bool, len(due))
	)
	for i, url := range due {
		turn <- struct{}{}
		asked.Add(1)
		go func() {
			defer func() { <-turn; asked.Done() }()
			version, err := f.fetch(ctx, url)
			changes[i] = f.learn(url, version, err, time.Now())
		}()
	}
	asked.Wait()
	if slices.Contains(changes, true) && ctx.Err() == nil {
		f.changed()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	next := interval
	for _, s := range f.servers {
		next = min(next, time.Until(s.due))
	}
	return max(next, time.Millisecond)
}

// learn keeps the result of asking a server, and returns whether its response changed. A failure keeps the last
// version: an engine that restarts is usually the same one.
func (f *Finder) learn(url, version string, err error, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.servers[url]
	if s == nil {
		return false // no longer wanted
	}
	s.due = now.Add(interval)
	var status statusError
	if err != nil && !errors.As(err, &status) {
		s.due = now.Add(retry)
	}
	before := s.response
	if err == nil {
		if before.Version != "" && before.Version != version {
			s.changes = append(s.changes, now)
			s.changes = s.changes[max(len(s.changes)-alternating, 0):]
		}
		s.response.Version = version
	}
	s.response.Several = len(s.changes) == alternating && now.Sub(s.changes[0]) < alternatingFor
	return s.response != before
}

// statusError is a response without a version: the server is there, and does not tell it.
type statusError string

func (e statusError) Error() string { return string(e) }

// fetch asks one server at each path until one answers with a version.
func (f *Finder) fetch(ctx context.Context, url string) (version string, err error) {
	for _, path := range f.paths {
		if version, err = f.get(ctx, strings.TrimSuffix(url, "/")+path); err == nil {
			return version, nil
		}
	}
	return "", err
}

func (f *Finder) get(ctx context.Context, url string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	useragent.Add(req)
	resp, err := f.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxBytes+1))
	if err != nil {
		return "", err
	}
	var said struct {
		Version string   `json:"version"`
		Info    struct { // of an OpenAPI document
			Version string `json:"version"`
		} `json:"info"`
	}
	switch {
	case resp.StatusCode != http.StatusOK:
		return "", statusError(fmt.Sprintf("engineversion: %s answers %s", url, resp.Status))
	case len(body) > maxBytes:
		return "", statusError(fmt.Sprintf("engineversion: %s answers more than %d bytes", url, maxBytes))
	}
	err = json.Unmarshal(body, &said)
	version := cmp.Or(said.Version, said.Info.Version)
	if err != nil || version == "" || len(version) > maxVersionBytes {
		return "", statusError(fmt.Sprintf("engineversion: %s answers no JSON object with a version", url))
	}
	return version, nil
}
