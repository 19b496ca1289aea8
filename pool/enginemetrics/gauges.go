// Package enginemetrics reads the load that engines report: running and waiting requests, and KV cache usage.
//
// It owns the scrapes of the engines' metrics pages (every few seconds, with jitter), the format of these pages, the
// loads that Dynamo's workers without a page publish on the event plane, and the latest values of each worker. It
// never reads an engine during a request: callers get the latest values from memory, and stale values count as unknown.
// It makes no decisions. It only logs and counts load that bypasses kvepp.
//
// Concurrency: everything is safe from any goroutine.
package enginemetrics

import (
	"cmp"
	"context"
	"crypto/tls"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/natssub"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// Config configures Gauges.
type Config struct {
	// Interval is the time between two reads of one page, with a jitter of a tenth. It must be above 0.
	Interval time.Duration
	// Stale is the age after which values count as unknown. 0: three intervals.
	Stale time.Duration
	// Scheme, Port and Path make a page's URL from the address of an endpoint without Metrics. Port 0: the address's
	// port.
	Scheme string
	Port   uint16
	Path   string
	// SkipVerify disables the check of certificates of https pages.
	SkipVerify bool
	// TLS takes the place of SkipVerify. nil: it does not. No flag sets it.
	TLS *tls.Config
	// Frontends says that addresses are those of Dynamo's frontends, which have no metrics of engines. Pages are then
	// read only if the endpoint has Metrics, or if Port is set.
	Frontends bool
	// Running, Waiting, Usage and LoRA (adapters in use, as vLLM's) replace the metrics of all known engines for a
	// quantity, unless they are zero.
	Running, Waiting, Usage, LoRA Metric
	metrics                       string // their flag
	// NATSServer is the URL of the NATS server on which some of Dynamo's workers publish their loads. Empty: none.
	NATSServer string
	// FirstToken is called with the id of each request whose first token a worker notes on the event plane. The id is
	// valid during the call. nil: kvepp does not subscribe to these notes.
	FirstToken func(id []byte)
	// Booked returns the number of requests in kvepp's load book for a worker.
	Booked func(kvblock.Worker) int
	// Adapters receives what a worker's engine says of LoRA adapters, after each read of the page of one that says
	// anything. nil: engines are not asked.
	Adapters func(kvblock.Worker, pool.Adapters)
	// Health receives the state of a worker's page after each read, and when the page becomes silent. Run's goroutine
	// makes all calls, in order, without a lock; Health must return soon. A call for a worker may come after its first
	// WorkerLeft, never after the second. nil: no calls, and failed pages are read with exponential backoff.
	Health func(w kvblock.Worker, s PageState)
	// SilentAfter is the time without a response after which a page that answered before is PageSilent. 0: 5 seconds.
	SilentAfter time.Duration
}

const (
	staleAfter = 3 // intervals

	// maxTimeout bounds one read, unless Config.SilentAfter is longer. It may be longer than an interval.
	maxTimeout = 5 * time.Second
	// maxDelay bounds the backoff of a page that cannot be read, in intervals.
	maxDelay = 12
)

// readSlots bounds the concurrent reads: of pages whose last read succeeded, and of all others. So pages that do not
// answer cannot delay the reads of pages that do.
var readSlots = [2]int{32, 64}

// Gauges reads the engines' pages. Create it with New. The zero value has no values, and Run must not be called on it.
type Gauges struct {
	cfg    Config
	pool   *pool.Pool
	client *http.Client
	log    *slog.Logger
	pages  sync.Pool // *page

	outcomes       [len(outcomeNames)]atomic.Uint64
	loggedFailures [len(outcomeNames)]atomic.Bool // the first failure of each kind was logged

	// Only Run's goroutine uses these.
	followed *pool.Snapshot               // the targets and channels are for this one
	hub      *zmqsub.Hub                  // nil until it is needed
	nats     *natssub.Conn                // likewise
	channels map[pool.EventChannel]func() // each value ends its subscription

	began time.Time // origin of usageEntry.until

	wake chan struct{} // a token makes Run continue before the next tick

	mu           sync.Mutex         // guards everything below
	slots        []slot             // indexed by worker
	usages       []usageEntry       // indexed by worker: the result of Usage; not in slots, so that Usage is fast
	targets      map[string]*target // by URL
	reading      [2]int             // concurrent reads, by index in readSlots
	unseen       int                // workers in alarm
	planeWorkers map[instanceRank]planeWorker

	unreported []string  // URLs of the pages whose state Config.Health must get
	checked    time.Time // when checkReads last ran
}

// slot holds the values of one worker. The zero value has none.
type slot struct {
	generation   uint32    // changes when the worker leaves, so that late values do not count for its successor
	at           time.Time // when values were read; zero: never
	values       values
	exceedsSince time.Time // start of the time with more requests than kvepp sent; zero: not now
	alarmed      bool
	page         string // URL of its page; may be empty
}

// usageEntry is the fraction (0..1) of a worker's KV blocks in use, and its expiry since Gauges.began.
type usageEntry struct {
	usage float64
	until time.Duration
}

// member is a worker of a page.
type member struct {
	worker     kvblock.Worker
	generation uint32
	rank       uint32
	name       string
	address    string // host:port; may be empty
}

// target is one page.
type target struct {
	url       string
	members   []member // of different ranks; never changed
	due       time.Time
	busy      bool
	began     time.Time // of the current read
	slotClass int       // of the current read: an index in readSlots
	failed    int       // failed reads in a row; 1 before the first read
	health    *pageHealth
	list      *modelList
}

// ClientTLS returns the settings of https connections to the engines.
func (c *Config) ClientTLS() *tls.Config {
	return cmp.Or(c.TLS, &tls.Config{InsecureSkipVerify: c.SkipVerify})
}

// New returns Gauges of the workers in p. There are no values before Run.
func New(cfg Config, p *pool.Pool, log *slog.Logger) *Gauges {
	if cfg.Stale == 0 {
		cfg.Stale = staleAfter * cfg.Interval
	}
	if cfg.SilentAfter == 0 {
		cfg.SilentAfter = defaultSilentAfter
	}
	transport := &http.Transport{
		// One connection is kept for each page. Engines' servers close idle connections after 5 s.
		MaxIdleConnsPerHost:    1,
		IdleConnTimeout:        maxDelay * cfg.Interval,
		DisableCompression:     true, // it would cost the engine more than it saves
		WriteBufferSize:        512,
		ReadBufferSize:         4 << 10, // longer reads bypass it
		MaxResponseHeaderBytes: 64 << 10,
		TLSClientConfig:        cfg.ClientTLS(),
	}
	g := &Gauges{
		began:    time.Now(),
		wake:     make(chan struct{}, 1),
		cfg:      cfg,
		pool:     p,
		log:      log,
		targets:  map[string]*target{},
		channels: map[pool.EventChannel]func(){},
		client: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	wanted := newNames([quantities]Metric{running: cfg.Running, waiting: cfg.Waiting, usage: cfg.Usage,
		adapters: cfg.LoRA})
	g.pages.New = func() any { return newPage(wanted) }
	return g
}

// Run reads pages until ctx ends, and then waits for the current reads.
func (g *Gauges) Run(ctx context.Context) {
	var reads sync.WaitGroup
	defer g.closeChannels()
	defer g.client.CloseIdleConnections()
	defer reads.Wait()
	tick := time.NewTicker(min(max(g.cfg.Interval/50, time.Millisecond), maxTick))
	defer tick.Stop()
	for {
		s := g.pool.Acquire()
		g.follow(s)
		g.checkReads(time.Now())
		g.report()
		s.Release()
		for _, t := range g.takeDue(time.Now()) {
			reads.Go(func() { g.read(ctx, t) })
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-g.wake:
		}
	}
}

// follow replaces the targets by those of the workers in s, the current snapshot.
func (g *Gauges) follow(s *pool.Snapshot) {
	if s == g.followed {
		return
	}
	g.followed = s
	g.followChannels(s)
	members := map[string][]member{}
	g.mu.Lock()
	for i := range s.Workers {
		w := &s.Workers[i]
		url := g.page(w)
		slot := g.slot(w.Worker)
		slot.page = url
		if url != "" {
			members[url] = append(members[url], member{w.Worker, slot.generation, w.Rank, w.String(), w.Address})
		}
	}
	g.mu.Unlock()
	for url, of := range members {
		if rank, twice := sameRank(of); twice {
			if !g.loggedFailures[sharedPage].Swap(true) {
				g.log.Warn(
					"several workers have the same metrics page and rank: kvepp cannot know which worker the page "+
						"is about, and does not read it; set metrics for each engine in the endpoints file. Logged "+
						"once",
					"page",
					url,
					"rank",
					rank,
					"workers",
					len(of),
					"for_example",
					of[0].name,
				)
			}
			delete(members, url)
		}
	}
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	for url := range g.targets {
		if members[url] == nil {
			delete(g.targets, url)
		}
	}
	for url, of := range members {
		// A current read keeps the old target with its members, to which the result belongs.
		t := &target{url: url, members: of, due: now.Add(rand.N(g.cfg.Interval)), failed: 1, health: new(pageHealth),
			list: new(modelList)}
		if was := g.targets[url]; was != nil {
			t.due, t.failed = was.due, was.failed
			if shareWorker(was.members, of) {
				t.health, t.list = was.health, was.list
			}
			if was.busy {
				t.due = now.Add(g.cfg.Interval)
			}
		}
		g.targets[url] = t
	}
}

// shareWorker reports whether the lists have a worker in common.
func shareWorker(a, b []member) bool {
	return slices.ContainsFunc(a, func(x member) bool {
		return slices.ContainsFunc(b,
			func(y member) bool { return x.worker == y.worker && x.generation == y.generation })
	})
}

// page returns the URL of a worker's metrics page, or "".
func (g *Gauges) page(w *pool.Worker) string {
	switch {
	case w.Role == pool.Encode:
		return ""
	case w.Metrics != "":
		return w.Metrics
	case w.Address == "" || g.cfg.Frontends && g.cfg.Port == 0:
		return ""
	}
	address := w.Address
	if g.cfg.Port != 0 {
		address = address[:strings.LastIndexByte(address, ':')+1] + strconv.Itoa(int(g.cfg.Port))
	}
	return g.cfg.Scheme + "://" + address + g.cfg.Path
}

// sameRank reports whether two members have the same rank, and which.
func sameRank(of []member) (rank uint32, twice bool) {
	if len(of) < 2 {
		return 0, false
	}
	seen := make(map[uint32]bool, len(of))
	for i := range of {
		if seen[of[i].rank] {
			return of[i].rank, true
		}
		seen[of[i].rank] = true
	}
	return 0, false
}

// slot returns the slot of a worker. The caller holds g.mu.
func (g *Gauges) slot(w kvblock.Worker) *slot {
	if n := int(w) + 1; n > len(g.slots) {
		g.slots = append(g.slots, make([]slot, n-len(g.slots))...)
		g.usages = append(g.usages, make([]usageEntry, n-len(g.usages))...)
	}
	return &g.slots[w]
}

// storeValues stores new values of a worker. The caller holds g.mu.
func (g *Gauges) storeValues(w kvblock.Worker, v values, now time.Time) {
	s := g.slot(w)
	s.values, s.at = v, now
	g.usages[w] = usageEntry{}
	if v[usage] > 0 { // not NaN
		g.usages[w] = usageEntry{v[usage], now.Add(g.cfg.Stale).Sub(g.began)}
	}
}

// takeDue returns the pages that are due, as far as readSlots allow, those with the fewest failures first.
func (g *Gauges) takeDue(now time.Time) (taken []*target) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var due []*target
	for _, t := range g.targets {
		if !t.busy && !now.Before(t.due) {
			due = append(due, t)
		}
	}
	slices.SortFunc(due,
		func(a, b *target) int { return cmp.Or(cmp.Compare(a.failed, b.failed), a.due.Compare(b.due)) })
	for _, t := range due {
		if c := t.class(); g.reading[c] < readSlots[c] {
			g.reading[c]++
			t.busy, t.slotClass, t.began = true, c, now
			t.health.began(now)
			taken = append(taken, t)
		}
	}
	return taken
}

// class returns the index in readSlots of a page.
func (t *target) class() int {
	if t.failed > 0 {
		return 1
	}
	return 0
}

// read reads one page and stores its values.
func (g *Gauges) read(ctx context.Context, t *target) {
	ranks, active, how, err := g.fetch(ctx, t.url)
	if ctx.Err() != nil {
		return // Run ends: not a failure of the page
	}
	g.outcomes[how].Add(1)
	if how != ok {
		g.logFailure(t.url, t.members[0].name, how, err)
	}
	for _, a := range g.finishRead(t, ranks, how, readResult(how, err), g.booked(t, how)) {
		g.logAlarm(a)
	}
	if how == ok {
		g.reportCaches(t)
		g.reportAdapters(ctx, t, active)
	}
}

// reportCaches tells the pool what a page says of its workers' KV caches.
func (g *Gauges) reportCaches(t *target) {
	for i := range t.members {
		m := &t.members[i]
		g.mu.Lock()
		s := *g.slot(m.worker)
		g.mu.Unlock()
		if size, count := s.values.cache(); s.generation == m.generation {
			g.pool.ReportCache(m.worker, size, count)
		}
	}
}

// booked returns the booked requests of each worker of a page, or nil if the page was not read.
func (g *Gauges) booked(t *target, how outcome) []int {
	if how != ok {
		return nil
	}
	all := make([]int, len(t.members))
	for i := range t.members {
		all[i] = g.cfg.Booked(t.members[i].worker)
	}
	return all
}

// finishRead stores the result of a read, and returns the new alarms.
func (g *Gauges) finishRead(t *target, ranks []rankValues, how outcome, server PageState,
	booked []int) (news []unseenAlarm) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading[t.slotClass]-- // not t.class(): another target of the page may have changed t.failed in the meantime
	now := time.Now()
	if how == ok {
		t.failed = 0
		news = g.storePage(t, ranks, booked, now)
	} else {
		t.failed++
	}
	t.busy = false
	before := t.health.state
	t.health.ended(server, t.began)
	g.mustReport(t)
	if t.health.state != before {
		g.wakeRun() // report the change before the next tick
	}
	t.due = g.nextRead(t, now)
	if current := g.targets[t.url]; current != nil && current != t { // the pool has changed
		current.failed, current.due = t.failed, t.due
	}
	return news
}

// nextRead returns when to read a page again whose read has ended now. The caller holds g.mu.
func (g *Gauges) nextRead(t *target, now time.Time) time.Time {
	h := t.health
	if g.cfg.Health == nil || !h.responded && h.state != PageRefused {
		return now.Add(g.readDelay(t.failed))
	}
	// No backoff, so that the state stays recent. The interval includes the time of a read without a response.
	next := now.Add(g.readDelay(0))
	if !h.silentSince.IsZero() {
		next = later(now, t.began.Add(g.readDelay(0)))
	}
	if h.reread > 0 {
		if soon := later(now, t.began.Add(h.reread)); soon.Before(next) {
			next = soon
		}
		if h.reread *= 2; h.reread >= g.cfg.Interval {
			h.reread = 0
		}
	}
	return next
}

// readDelay returns the time until the next read after so many failures: one interval, doubled by each failure after
// the first, at most maxDelay intervals, with a jitter of a tenth.
func (g *Gauges) readDelay(failed int) time.Duration {
	intervals := 1.0
	if failed > 1 {
		intervals = min(math.Pow(2, float64(min(failed-1, 10))), maxDelay)
	}
	return time.Duration(float64(g.cfg.Interval) * intervals * (0.9 + 0.2*rand.Float64()))
}

// storePage stores the values of a page's workers, and returns the new alarms. The caller holds g.mu.
func (g *Gauges) storePage(t *target, ranks []rankValues, booked []int, now time.Time) (news []unseenAlarm) {
	for i := range t.members {
		m := &t.members[i]
		s := g.slot(m.worker)
		if s.generation != m.generation {
			continue // the worker has left
		}
		read, found := noValues, false
		if len(t.members) == 1 {
			read, found = mergeRanks(ranks), true
		}
		for r := range ranks {
			if len(t.members) > 1 && ranks[r].rank == m.rank {
				read, found = ranks[r].values, true
			}
		}
		if !found {
			continue
		}
		if !g.fresh(s, now) {
			g.endAlarm(s) // an alarm must not outlast a time without values
		}
		g.storeValues(m.worker, read, now)
		if e, is := g.checkUnseen(m, s, booked[i], now); is {
			news = append(news, e)
		}
	}
	return news
}

// logFailure logs the first failure of each kind at level info, the others at level debug. worker may be empty.
func (g *Gauges) logFailure(what, worker string, how outcome, err error) {
	level := slog.LevelDebug
	if !g.loggedFailures[how].Swap(true) {
		level = slog.LevelInfo
	}
	g.log.Log(
		context.Background(),
		level,
		"an engine's load, or its list of models, cannot be read; kvepp retries with backoff. Later failures of this "+
			"kind are only in kvepp_engine_readings_total and in the debug log",
		"of",
		what,
		"worker",
		worker,
		"outcome",
		how.String(),
		"error",
		err,
	)
}

// WorkerJoined does nothing: Run reads the snapshots.
func (g *Gauges) WorkerJoined(pool.Worker) {}

// WorkerLeft removes the values of a worker.
func (g *Gauges) WorkerLeft(w kvblock.Worker) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.slot(w)
	g.endAlarm(s)
	*s = slot{generation: s.generation + 1}
	g.usages[w] = usageEntry{}
}

// fresh reports whether a worker has values that are not stale. The caller holds g.mu.
func (g *Gauges) fresh(s *slot, now time.Time) bool {
	return !s.at.IsZero() && now.Sub(s.at) <= g.cfg.Stale
}

// Known returns the number of workers with values that are not stale.
func (g *Gauges) Known() int {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	n := 0
	for i := range g.slots {
		if g.fresh(&g.slots[i], now) {
			n++
		}
	}
	return n
}

// Usage appends to dst the fraction (0..1) of KV blocks in use that each worker's engine reports, indexed by worker
// number. Unknown and stale values are 0. Workers beyond the end have no value.
func (g *Gauges) Usage(dst []float64) []float64 {
	now := time.Since(g.began)
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.usages {
		if p.until < now {
			p.usage = 0
		}
		dst = append(dst, p.usage)
	}
	return dst
}

// Load holds what an engine reports of one rank: running and waiting requests, and the fraction (0..1) of KV blocks in
// use. NaN: unknown or stale.
type Load struct {
	Running, Waiting, Usage float64
}

// Of returns the load of a worker.
func (g *Gauges) Of(w kvblock.Worker) Load {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.slot(w); g.fresh(s, now) {
		return Load{s.values[running], s.values[waiting], s.values[usage]}
	}
	return Load{math.NaN(), math.NaN(), math.NaN()}
}
