// Package gauges knows what the engines say of their own load: how many requests they run and keep waiting, and how
// much of their KV cache these hold.
//
// It owns the reading of the engines' metrics pages, a few seconds apart and jittered, the format of these pages, the
// loads that Dynamo's workers publish on its event plane, where they show no page, and the latest of what was told of
// each worker. It never takes part in a request: whoever asks is answered from memory, and what is old counts as not
// known. It decides nothing; that load goes around kvepp it only says.
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

	"kvepp/kvblock"
	"kvepp/natssub"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// Config says where the engines' pages are and how often they are read.
type Config struct {
	// Interval is the time between two readings of one page, give or take a tenth. It must be above 0.
	Interval time.Duration
	// Stale is how long after a reading it no longer counts. 0: three intervals.
	Stale time.Duration
	// Scheme, Port and Path make the page of an endpoint that does not name its own, from its address. Port 0: the
	// address's.
	Scheme string
	Port   uint16
	Path   string
	// SkipVerify has certificates of https pages go unchecked.
	SkipVerify bool
	// Frontends says that addresses are those of Dynamo's frontends, which tell nothing of engines: pages are read
	// where an endpoint names one, or Port gives it another than the address's.
	Frontends bool
	// Running, Waiting and Usage replace the metrics of all known engines for a quantity. The zero value does not.
	Running, Waiting, Usage Metric
	// NATSServer is the URL of the NATS server over which some of Dynamo's workers publish their loads. Empty: those
	// are not heard.
	NATSServer string
	// Booked says how many requests kvepp has running on a worker.
	Booked func(kvblock.Worker) int
	// Health gets the state of a worker's page after each read of it, and when the page becomes silent. Run's goroutine
	// makes all calls, in order, without a lock; it must return soon. A call for a worker may come after the first
	// WorkerLeft of that worker, never after the second. nil: no calls, and failed pages are read less and less often.
	Health func(w kvblock.Worker, s PageState)
	// SilentAfter is how long a page that answered before must not answer before it is PageSilent. 0: 5 seconds.
	SilentAfter time.Duration
}

const (
	staleAfter = 3 // intervals

	// maxTimeout bounds one read, unless Config.SilentAfter is longer. It may be longer than an interval.
	maxTimeout = 5 * time.Second
	// maxPause is how many intervals a page that cannot be read is left alone at most.
	maxPause = 12
)

// places are how many pages are read at once: of those that were read the last time, and of those that were not, or
// never were. However many of the latter do not answer, the former do not wait for them.
var places = [2]int{32, 64}

// Gauges reads the engines' pages. Create it with New; the zero value knows nothing, and cannot Run.
type Gauges struct {
	cfg    Config
	pool   *pool.Pool
	client *http.Client
	log    *slog.Logger
	pages  sync.Pool // *page

	outcomes [len(outcomeNames)]atomic.Uint64
	said     [len(outcomeNames)]atomic.Bool // the first trouble of each kind was logged

	// Only Run's goroutine uses these.
	seen     *pool.Snapshot               // for which targets and channels are
	hub      *zmqsub.Hub                  // nil until it is needed
	nats     *natssub.Conn                // likewise
	channels map[pool.EventChannel]func() // which end the subscription

	began time.Time // what part.until counts from

	wake chan struct{} // has a token when Run must not wait for the next tick

	mu      sync.Mutex         // guards everything below
	slots   []slot             // indexed by worker
	parts   []part             // likewise: what Usage tells, apart from the rest so that it is soon told
	targets map[string]*target // by URL
	reading [2]int             // how many are read now: of those that were read the last time, and of the others
	unseen  int                // workers in alarm
	heard   map[instanceRank]heard

	unreported []string  // URLs of the pages whose state Config.Health must get
	checked    time.Time // when checkReads last ran
}

// slot is what is known of one worker. The zero value: nothing.
type slot struct {
	generation uint32    // changes when the worker leaves, so that nothing said of it is taken for its successor's
	at         time.Time // of told; zero: never
	told       told
	exceeds    time.Time // since when it has more requests than kvepp sent it; zero: it has not
	alarmed    bool
	page       string // URL of its page; may be empty
}

// part is the part of its KV blocks that a worker's requests hold, and until when that counts.
type part struct {
	usage float64
	until time.Duration
}

// member is a worker that a page tells of.
type member struct {
	worker     kvblock.Worker
	generation uint32
	rank       uint32
	name       string
	address    string // host:port; may be empty
}

// target is one page.
type target struct {
	url     string
	members []member // of different ranks; not changed once it is here
	due     time.Time
	busy    bool
	began   time.Time // of the reading under way
	place   int       // in places, of the reading under way
	failed  int       // times in a row; at first 1, since it was not read yet
	health  *pageHealth
}

// New returns gauges of the workers in p, of which nothing is known before Run.
func New(cfg Config, p *pool.Pool, log *slog.Logger) *Gauges {
	if cfg.Stale == 0 {
		cfg.Stale = staleAfter * cfg.Interval
	}
	if cfg.SilentAfter == 0 {
		cfg.SilentAfter = defaultSilentAfter
	}
	transport := &http.Transport{
		// One connection is kept for each page. Engines' servers end idle ones after 5 s, and then it is made anew.
		MaxIdleConnsPerHost:    1,
		IdleConnTimeout:        maxPause * cfg.Interval,
		DisableCompression:     true, // it would cost the engine more than it saves
		WriteBufferSize:        512,
		ReadBufferSize:         4 << 10, // what is longer is read past it
		MaxResponseHeaderBytes: 64 << 10,
		TLSClientConfig:        &tls.Config{InsecureSkipVerify: cfg.SkipVerify}, // a flag of its own says so
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
	wanted := newNames([quantities]Metric{running: cfg.Running, waiting: cfg.Waiting, usage: cfg.Usage})
	g.pages.New = func() any { return newPage(wanted) }
	return g
}

// Run reads pages until ctx ends, and then waits for those that are being read.
func (g *Gauges) Run(ctx context.Context) {
	var reads sync.WaitGroup
	defer g.stopListening()
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
		for _, t := range g.take(time.Now()) {
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

// follow makes the targets those of the workers in s, the current snapshot.
func (g *Gauges) follow(s *pool.Snapshot) {
	if s == g.seen {
		return
	}
	g.seen = s
	g.listen(s)
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
			if !g.said[shared].Swap(true) {
				g.log.Warn(
					"several workers have the same metrics page and rank, so that it cannot be told of which one it "+
						"speaks: it is not read; "+
						"name the page of each engine with metrics in the endpoints file. Said once",
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
		// A page that is being read keeps its target with the former members: what comes of it is theirs.
		t := &target{url: url, members: of, due: now.Add(rand.N(g.cfg.Interval)), failed: 1, health: new(pageHealth)}
		if was := g.targets[url]; was != nil {
			t.due, t.failed = was.due, was.failed
			if shareWorker(was.members, of) {
				t.health = was.health
			}
			if was.busy {
				t.due = now.Add(g.cfg.Interval)
			}
		}
		g.targets[url] = t
	}
}

// shareWorker reports whether a worker is in both lists.
func shareWorker(a, b []member) bool {
	return slices.ContainsFunc(a, func(x member) bool {
		return slices.ContainsFunc(
			b,
			func(y member) bool { return x.worker == y.worker && x.generation == y.generation },
		)
	})
}

// page returns where a worker's gauges are; "" if that is not known.
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

// sameRank reports whether two members have one rank, and which.
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

// slot returns a worker's. The caller holds g.mu.
func (g *Gauges) slot(w kvblock.Worker) *slot {
	if n := int(w) + 1; n > len(g.slots) {
		g.slots = append(g.slots, make([]slot, n-len(g.slots))...)
		g.parts = append(g.parts, make([]part, n-len(g.parts))...)
	}
	return &g.slots[w]
}

// tell keeps what was told of a worker now. The caller holds g.mu.
func (g *Gauges) tell(w kvblock.Worker, said told, now time.Time) {
	s := g.slot(w)
	s.told, s.at = said, now
	g.parts[w] = part{}
	if said[usage] > 0 { // not NaN
		g.parts[w] = part{said[usage], now.Add(g.cfg.Stale).Sub(g.began)}
	}
}

// take returns the pages whose time has come, as far as there is room: first those that failed least often.
func (g *Gauges) take(now time.Time) (taken []*target) {
	g.mu.Lock()
	defer g.mu.Unlock()
	var due []*target
	for _, t := range g.targets {
		if !t.busy && !now.Before(t.due) {
			due = append(due, t)
		}
	}
	slices.SortFunc(
		due,
		func(a, b *target) int { return cmp.Or(cmp.Compare(a.failed, b.failed), a.due.Compare(b.due)) },
	)
	for _, t := range due {
		if c := t.class(); g.reading[c] < places[c] {
			g.reading[c]++
			t.busy, t.place, t.began = true, c, now
			t.health.began(now)
			taken = append(taken, t)
		}
	}
	return taken
}

// class says which places a page has to be read at.
func (t *target) class() int {
	if t.failed > 0 {
		return 1
	}
	return 0
}

// read reads one page and notes what it tells.
func (g *Gauges) read(ctx context.Context, t *target) {
	ranks, how, err := g.fetch(ctx, t.url)
	if ctx.Err() != nil {
		return // the end, and not the page's fault
	}
	g.outcomes[how].Add(1)
	if how != ok {
		g.complain(t.url, t.members[0].name, how, err)
	}
	for _, a := range g.took(t, ranks, how, readResult(how, err), g.booked(t, how)) {
		g.alarm(a)
	}
}

// booked returns how many requests kvepp has on each of the workers of a page that was read.
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

// took notes what came of a reading, and says of which workers there is news.
func (g *Gauges) took(t *target, ranks []ofRank, how outcome, server PageState, booked []int) (news []excess) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.reading[t.place]-- // t may have failed, or not, as another target of its page says, since it was taken
	now := time.Now()
	if how == ok {
		t.failed = 0
		news = g.note(t, ranks, booked, now)
	} else {
		t.failed++
	}
	t.busy = false
	before := t.health.state
	t.health.ended(server, t.began)
	g.mustReport(t)
	if t.health.state != before {
		g.wakeRun() // else the next tick is soon enough
	}
	t.due = g.nextRead(t, now)
	if current := g.targets[t.url]; current != nil && current != t { // the pool changed meanwhile
		current.failed, current.due = t.failed, t.due
	}
	return news
}

// nextRead returns when a page must be read again whose read has ended now. The caller holds g.mu.
func (g *Gauges) nextRead(t *target, now time.Time) time.Time {
	h := t.health
	if g.cfg.Health == nil || !h.answered && h.state != PageRefused {
		return now.Add(g.pause(t.failed))
	}
	// The state of the page must not become old, so the interval stays the same and includes the time of a read without
	// answer.
	next := now.Add(g.pause(0))
	if !h.unansweredSince.IsZero() {
		next = later(now, t.began.Add(g.pause(0)))
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

// pause returns how long a page is left alone that could not be read so many times: an interval, and with each time
// twice as long, give or take a tenth.
func (g *Gauges) pause(failed int) time.Duration {
	intervals := 1.0
	if failed > 1 {
		intervals = min(math.Pow(2, float64(min(failed-1, 10))), maxPause)
	}
	return time.Duration(float64(g.cfg.Interval) * intervals * (0.9 + 0.2*rand.Float64()))
}

// note stores what a page told of its workers. The caller holds g.mu.
func (g *Gauges) note(t *target, ranks []ofRank, booked []int, now time.Time) (news []excess) {
	for i := range t.members {
		m := &t.members[i]
		s := g.slot(m.worker)
		if s.generation != m.generation {
			continue // it has left
		}
		said, there := nothingTold, false
		if len(t.members) == 1 {
			said, there = together(ranks), true
		}
		for r := range ranks {
			if len(t.members) > 1 && ranks[r].rank == m.rank {
				said, there = ranks[r].told, true
			}
		}
		if !there {
			continue
		}
		if !g.fresh(s, now) {
			g.calm(s) // what was so before nothing was known is over
		}
		g.tell(m.worker, said, now)
		if e, is := g.compare(m, s, booked[i], now); is {
			news = append(news, e)
		}
	}
	return news
}

// complain logs the first trouble of each kind. worker is "" if it is not one's.
func (g *Gauges) complain(what, worker string, how outcome, err error) {
	level := slog.LevelDebug
	if !g.said[how].Swap(true) {
		level = slog.LevelInfo
	}
	g.log.Log(
		context.Background(),
		level,
		"an engine's gauges cannot be read; pages are tried again at longer and longer intervals. "+
			"Of further such trouble only kvepp_engine_readings_total and the debug log tell",
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

// WorkerJoined does nothing: Run sees who is there.
func (g *Gauges) WorkerJoined(pool.Worker) {}

// WorkerLeft forgets a worker.
func (g *Gauges) WorkerLeft(w kvblock.Worker) {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.slot(w)
	g.calm(s)
	*s = slot{generation: s.generation + 1}
	g.parts[w] = part{}
}

// fresh reports whether what is known of a worker counts. The caller holds g.mu.
func (g *Gauges) fresh(s *slot, now time.Time) bool {
	return !s.at.IsZero() && now.Sub(s.at) <= g.cfg.Stale
}

// Known returns of how many workers anything is known.
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

// Usage appends to dst the part of its KV blocks, 0 to 1, that each worker's requests hold by its engine's own account;
// indexed by worker number. 0 for those of which it is not known, or was told too long ago; so is what is behind the
// end.
func (g *Gauges) Usage(dst []float64) []float64 {
	now := time.Since(g.began)
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, p := range g.parts {
		if p.until < now {
			p.usage = 0
		}
		dst = append(dst, p.usage)
	}
	return dst
}

// Load is what an engine says of one of its ranks: numbers of requests, and the part of the KV blocks that they hold.
// NaN: not known, or told too long ago.
type Load struct {
	Running, Waiting, Usage float64
}

// Of returns what is known of a worker.
func (g *Gauges) Of(w kvblock.Worker) Load {
	now := time.Now()
	g.mu.Lock()
	defer g.mu.Unlock()
	if s := g.slot(w); g.fresh(s, now) {
		return Load{s.told[running], s.told[waiting], s.told[usage]}
	}
	return Load{math.NaN(), math.NaN(), math.NaN()}
}
