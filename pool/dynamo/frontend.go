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

	"kvepp/internal/useragent"
)

// View holds the workers and models that a frontend of Dynamo knows, from any kind of discovery.
type View struct {
	// Workers are the live instances of endpoints named generate, ordered by path and id.
	Workers []FrontendWorker
	// Models are by name.
	Models map[string]FrontendModel
}

// FrontendWorker is a live worker.
type FrontendWorker struct {
	Path       string // NAMESPACE/COMPONENT/ENDPOINT
	InstanceID uint64
	IP         string // of its request port; empty: not TCP
}

// FrontendModel is a model that a frontend serves. Zero fields are unknown.
type FrontendModel struct {
	BlockSize     int // tokens
	TotalKVBlocks int
}

const (
	frontendTimeout = 2 * time.Second
	maxFrontendBody = 16 << 20 // bytes of a response; thousands of workers need 1 MB
)

var frontendClient = &http.Client{
	Timeout:   frontendTimeout,
	Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true},
}

// QueryFrontend returns the view of the frontend at HOST:PORT.
//
// Source: what `python -m dynamo.frontend` 1.6.1 answers to GET /health and GET /metrics.
func QueryFrontend(ctx context.Context, address string) (View, error) {
	v := View{Models: map[string]FrontendModel{}}
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
			v.Workers = append(v.Workers,
				FrontendWorker{in.Namespace + "/" + in.Component + "/" + in.Endpoint, in.InstanceID,
					transportIP(in.Transport)})
		}
	}
	sortWorkers(v.Workers)
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
	useragent.Add(req)
	response, err := frontendClient.Do(req)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	// A frontend without workers answers 503.
	if response.StatusCode != http.StatusOK && response.StatusCode != http.StatusServiceUnavailable {
		return fmt.Errorf("%s: %s", url, response.Status)
	}
	if err := read(io.LimitReader(response.Body, maxFrontendBody)); err != nil {
		return fmt.Errorf("%s: %w", url, err)
	}
	return nil
}

// transportIP returns the IP address in {"tcp": "IP:PORT/..."}, or "".
func transportIP(raw json.RawMessage) string {
	var t struct {
		TCP string `json:"tcp"`
	}
	if json.Unmarshal(raw, &t) != nil { // another transport, whose value may be a string
		return ""
	}
	address, _, _ := strings.Cut(t.TCP, "/")
	host, _, err := net.SplitHostPort(address)
	if ip := net.ParseIP(host); err == nil && ip != nil {
		return ip.String()
	}
	return ""
}

// gauge parses the line `name{model="MODEL"} N` of a metrics page. ok is false for other lines and for invalid numbers.
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
	if err != nil || !(f >= 0 && f <= 1<<40) { // excludes NaN, too
		return "", 0, false
	}
	return model, int(f), true
}

func sortWorkers(list []FrontendWorker) {
	slices.SortFunc(list, func(a, b FrontendWorker) int {
		return byPathAndID(a.Path, a.InstanceID, b.Path,
			b.InstanceID)
	})
}

// WorkerAt returns the worker at one of the addresses. It returns false if there is none or if there are several: one
// of those may be dead, with a lease that has not ended.
func (v *View) WorkerAt(ips ...string) (found FrontendWorker, ok bool) {
	for _, s := range v.Workers {
		if s.IP == "" || !slices.Contains(ips, s.IP) {
			continue
		}
		if ok {
			return FrontendWorker{}, false
		}
		found, ok = s, true
	}
	return found, ok
}

// OnlyModel returns the model of a frontend with exactly one model.
func (v *View) OnlyModel() (name string, m FrontendModel, ok bool) {
	if len(v.Models) != 1 {
		return "", FrontendModel{}, false
	}
	for name, m = range v.Models {
	}
	return name, m, true
}

// queryInterval is the mean time between two queries of frontends.
const queryInterval = time.Second

// Frontends reads Dynamo's discovery, of any backend, through its frontends. Cards only have the model and its block
// counts, and only if the frontend has one model.
type Frontends struct {
	addresses []string // HOST:PORT
	log       *slog.Logger
	firstSeen map[key]time.Time
	failing   bool
}

// NewFrontends returns a discovery that uses the first frontend that answers. Each address is HOST:PORT.
func NewFrontends(addresses []string, log *slog.Logger) *Frontends {
	return &Frontends{addresses: addresses, log: log, firstSeen: map[key]time.Time{}}
}

// Watch calls apply with the live instances, now and after each change, until ctx ends. The first call ends before
// Watch returns. While no frontend answers, the earlier instances stay.
func (f *Frontends) Watch(ctx context.Context, apply func([]Instance)) {
	last, _ := f.query(ctx)
	apply(last)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-time.After(queryInterval/2 + rand.N(queryInterval)):
			}
			if now, ok := f.query(ctx); ok && !reflect.DeepEqual(now, last) {
				last = now
				apply(now)
			}
		}
	}()
}

// query returns the instances that the first answering frontend knows. It returns false if none answers.
func (f *Frontends) query(ctx context.Context) ([]Instance, bool) {
	var failed error
	for _, address := range f.addresses {
		v, err := QueryFrontend(ctx, address)
		if err != nil {
			failed = err
			continue
		}
		if f.failing {
			f.log.Info("a frontend answers queries for workers again", "frontend", address)
		}
		f.failing = false
		return f.instances(&v, time.Now()), true
	}
	if !f.failing && ctx.Err() == nil {
		f.failing = true
		f.log.Warn("no frontend answers queries for workers; kvepp retries, and the earlier workers stay", "error",
			failed)
	}
	return nil, false
}

// instances returns the instances of a view with the times when they were first seen.
func (f *Frontends) instances(v *View, now time.Time) []Instance {
	var all []Instance
	alive := map[key]time.Time{}
	for _, w := range v.Workers {
		k := key{w.Path, w.InstanceID}
		seen, known := f.firstSeen[k]
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
	f.firstSeen = alive
	return all
}
