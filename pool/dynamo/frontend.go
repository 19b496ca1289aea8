package dynamo

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
)

// View is what a frontend of Dynamo's knows of workers and models, whatever its discovery is.
type View struct {
	// Workers are the live instances of endpoints called generate, ordered by path and id.
	Workers []Seen
	// Models are by name.
	Models map[string]Served
}

// Seen is a live worker.
type Seen struct {
	Path       string // NAMESPACE/COMPONENT/ENDPOINT
	InstanceID uint64
	IP         string // where it takes requests; empty: not over TCP
}

// Served is a model that a frontend serves. Zero fields are not known.
type Served struct {
	BlockSize     int // tokens
	TotalKVBlocks int
}

const (
	frontendTimeout = 2 * time.Second
	maxFrontendBody = 16 << 20 // of an answer: thousands of workers are a megabyte
)

var frontendClient = &http.Client{
	Timeout:   frontendTimeout,
	Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true},
}

// AskFrontend asks the frontend at HOST:PORT what it knows.
//
// Source: what `python -m dynamo.frontend` 1.6.1 answers to GET /health and GET /metrics.
func AskFrontend(ctx context.Context, address string) (View, error) {
	v := View{Models: map[string]Served{}}
	var health struct {
		Instances []struct {
			Namespace  string          `json:"namespace"`
			Component  string          `json:"component"`
			Endpoint   string          `json:"endpoint"`
			InstanceID uint64          `json:"instance_id"`
			Transport  json.RawMessage `json:"transport"`
		} `json:"instances"`
	}
	err := ask(
		ctx,
		"http://"+address+"/health",
		func(body io.Reader) error { return json.NewDecoder(body).Decode(&health) },
	)
	if err != nil {
		return v, err
	}
	for _, in := range health.Instances {
		if in.Endpoint == "generate" {
			v.Workers = append(
				v.Workers,
				Seen{in.Namespace + "/" + in.Component + "/" + in.Endpoint, in.InstanceID, transportIP(in.Transport)},
			)
		}
	}
	sortSeen(v.Workers)
	err = ask(ctx, "http://"+address+"/metrics", func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			if model, n, ok := gauge(lines.Text(), "dynamo_frontend_model_kv_cache_block_size"); ok {
				m := v.Models[model]
				m.BlockSize = n
				v.Models[model] = m
			}
			if model, n, ok := gauge(lines.Text(), "dynamo_frontend_model_total_kv_blocks"); ok {
				m := v.Models[model]
				m.TotalKVBlocks = n
				v.Models[model] = m
			}
		}
		return lines.Err()
	})
	return v, err
}

func ask(ctx context.Context, url string, read func(io.Reader) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := frontendClient.Do(req)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	// the latter of a frontend without workers
	if answer.StatusCode != http.StatusOK && answer.StatusCode != http.StatusServiceUnavailable {
		return fmt.Errorf("%s: %s", url, answer.Status)
	}
	if err := read(io.LimitReader(answer.Body, maxFrontendBody)); err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return nil
}

// transportIP reads the address in {"tcp": "IP:PORT/..."}; "" when there is none.
func transportIP(raw json.RawMessage) string {
	var t struct {
		TCP string `json:"tcp"`
	}
	if json.Unmarshal(raw, &t) != nil { // another kind, whose value may be a plain word
		return ""
	}
	address, _, _ := strings.Cut(t.TCP, "/")
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && ip != nil {
		return ip.String()
	}
	return ""
}

// gauge reads the line `name{model="MODEL"} N` of a metric; false for any other line, and for numbers that are no
// count.
func gauge(line, name string) (model string, n int, ok bool) {
	rest, ok := strings.CutPrefix(line, name+"{")
	if !ok {
		return "", 0, false
	}
	_, rest, ok = strings.Cut(rest, `model="`)
	if !ok {
		return "", 0, false
	}
	quoted, err := strconv.QuotedPrefix(`"` + rest)
	if err != nil {
		return "", 0, false
	}
	if model, err = strconv.Unquote(quoted); err != nil {
		return "", 0, false
	}
	_, value, _ := strings.Cut(rest[len(quoted)-1:], "}")
	f, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
	if err != nil || !(f >= 0 && f <= 1<<40) { // NaN is neither
		return "", 0, false
	}
	return model, int(f), true
}

func sortSeen(list []Seen) {
	slices.SortFunc(list, func(a, b Seen) int { return byPathAndID(a.Path, a.InstanceID, b.Path, b.InstanceID) })
}

// WorkerAt returns the worker at an address; false when there is none, or when there are several, of which one may be a
// dead one whose lease has not ended.
func (v *View) WorkerAt(ips ...string) (found Seen, ok bool) {
	for _, s := range v.Workers {
		if s.IP == "" || !slices.Contains(ips, s.IP) {
			continue
		}
		if ok {
			return Seen{}, false
		}
		found, ok = s, true
	}
	return found, ok
}

// OnlyModel returns the model that is served, false if there is not just one.
func (v *View) OnlyModel() (name string, m Served, ok bool) {
	if len(v.Models) != 1 {
		return "", Served{}, false
	}
	for name, m = range v.Models {
	}
	return name, m, true
}

// askEvery is the interval between two questions to a frontend that stands for a discovery.
const askEvery = time.Second

// Frontends is Dynamo's discovery as frontends know it: of any backend. Cards say no more than a frontend does: a model
// and its block size, and that only of a frontend with one model.
type Frontends struct {
	addresses []string // HOST:PORT
	log       *slog.Logger
	first     map[key]time.Time
	failing   bool
}

// NewFrontends returns a discovery that asks the first of some frontends that answers, each HOST:PORT.
func NewFrontends(addresses []string, log *slog.Logger) *Frontends {
	return &Frontends{addresses: addresses, log: log, first: map[key]time.Time{}}
}

// Watch gives the live instances to apply now and whenever they change, until ctx ends. The first call of apply happens
// before Watch returns. While no frontend answers, what was known stays.
func (f *Frontends) Watch(ctx context.Context, apply func([]Instance)) {
	last, _ := f.look(ctx)
	apply(last)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(askEvery/2 + rand.N(askEvery)):
			}
			if now, ok := f.look(ctx); ok && !reflect.DeepEqual(now, last) {
				last = now
				apply(now)
			}
		}
	}()
}

// look asks once.
func (f *Frontends) look(ctx context.Context) ([]Instance, bool) {
	var failed error
	for _, address := range f.addresses {
		v, err := AskFrontend(ctx, address)
		if err != nil {
			failed = err
			continue
		}
		if f.failing {
			f.log.Info("a frontend tells of the workers again", "frontend", address)
		}
		f.failing = false
		return f.instances(&v, time.Now()), true
	}
	if !f.failing && ctx.Err() == nil {
		f.failing = true
		f.log.Warn("no frontend tells of the workers; asking again, and what was known stays", "error", failed)
	}
	return nil, false
}

// instances are those of a view, with when each was first seen.
func (f *Frontends) instances(v *View, now time.Time) []Instance {
	var all []Instance
	alive := map[key]time.Time{}
	for _, w := range v.Workers {
		k := key{w.Path, w.InstanceID}
		seen, known := f.first[k]
		if !known {
			seen = now
		}
		alive[k] = seen
		card := &Card{}
		if model, m, ok := v.OnlyModel(); ok {
			card.Model, card.BlockSize, card.TotalKVBlocks = model, m.BlockSize, m.TotalKVBlocks
		}
		all = append(all, Instance{Path: w.Path, InstanceID: w.InstanceID, Seen: seen, Card: card})
	}
	f.first = alive
	return all
}
