package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/kube"
	"kvepp/router"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/scoring/replica"
	"kvepp/scoring/replica/link"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/listen"
	"kvepp/serve/secrets"
)

const (
	resolveEvery   = 5 * time.Second        // host names of --replica-peers
	tellBookEvery  = 250 * time.Millisecond // how stale the copies are
	teachEvery     = time.Second            // what the book has learned; of new workers, every tellBookEvery
	namesEvery     = 100 * time.Millisecond // workers that joined or left, and what waits in the queues
	snapshotWithin = 3 * time.Second        // the start waits for the peers' bookings
)

// replicas shares the load book and the sessions with other replicas. Its methods also work on nil: there are none.
type replicas struct {
	*options
	node     *link.Node
	pool     *pool.Pool
	book     *scoring.ActiveSequences
	sessions *session.Table
	stored   *session.Table // workers by stored response
	log      *slog.Logger
	warmed   atomic.Bool                   // the index of this process may be copied
	router   atomic.Pointer[router.Router] // nil: not yet
	origin   uint64
	reader   atomic.Pointer[indexerapi.Reader] // gives the index; nil: there is none yet

	mu      sync.Mutex // guards what follows; the innermost lock of the process
	pending changes

	own     workerNames // for one's own changes; used under the node's lock of sending
	drained changes     // scratch memory; used under the node's lock of sending

	theirs  workerNames // for copies; used under the node's lock of receiving
	copies  map[uint64]*scoring.Copies
	scratch []scoring.Change
	refused atomic.Uint64 // sessions with a version too far ahead
	waits   waits
}

// waits says what waits in each replica's queue, as it was told.
type waits struct {
	mu     sync.Mutex // guards all
	peers  map[uint64]peerWaits
	own    router.Waits
	waited bool // own was told last, and not that none waits
}

// peerWaits is what a peer told, and when.
type peerWaits struct {
	router.Waits
	told time.Time
}

// waitsHold is how long what a peer told holds. It tells it again every namesEvery while a request waits.
const waitsHold = time.Second

// hear takes what a peer tells.
func (w *waits) hear(origin uint64, e *replica.Entry) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if e.Blocks == 0 {
		delete(w.peers, origin)
		return
	}
	if w.peers == nil {
		w.peers = map[uint64]peerWaits{}
	}
	now := time.Now()
	all := peerWaits{router.Waits{Since: now.Add(-e.Age)}, now}
	for _, c := range e.Classes {
		all.Classes = append(all.Classes,
			router.ClassWait{Class: c.Class, Since: now.Add(-c.Age), Quantum: c.Quantum, Cost: c.Cost})
	}
	w.peers[origin] = all
}

// forget forgets a peer.
func (w *waits) forget(origin uint64) {
	w.mu.Lock()
	delete(w.peers, origin)
	w.mu.Unlock()
}

// of returns what waits at each of these replicas. This one has the index number.
func (w *waits) of(origins []uint64, number int) []router.Waits {
	w.mu.Lock()
	defer w.mu.Unlock()
	all := make([]router.Waits, len(origins))
	for i, origin := range origins {
		if x := w.peers[origin]; time.Since(x.told) < waitsHold {
			all[i] = x.Waits
		}
	}
	all[number] = w.own
	return all
}

// tellWaits tells the peers what waits here: how many requests, and since when the oldest of each class. Of more than
// replica.MaxClasses classes it tells those whose oldest requests have waited longest.
func (r *replicas) tellWaits() {
	to := r.router.Load()
	if to == nil {
		return
	}
	own, waiting := to.Waits()
	slices.SortFunc(own.Classes, func(a, b router.ClassWait) int { return a.Since.Compare(b.Since) })
	own.Classes = own.Classes[:min(len(own.Classes), replica.MaxClasses)]
	r.waits.mu.Lock()
	told := r.waits.waited
	r.waits.own, r.waits.waited = own, waiting > 0
	r.waits.mu.Unlock()
	if waiting == 0 && !told {
		return
	}
	r.mu.Lock()
	e := r.add(replica.Waits, 0)
	if e.Blocks = waiting; waiting > 0 {
		for _, c := range own.Classes {
			e.Classes = append(e.Classes, replica.ClassWait{Class: c.Class, Quantum: c.Quantum, Cost: c.Cost,
				At: e.At - time.Since(c.Since)})
		}
		e.At -= time.Since(own.Since)
	}
	r.mu.Unlock()
	r.node.Changed()
}

// changes are what the book and the sessions have told since the log was written.
type changes struct {
	entries []pendingEntry
	hashes  []kvblock.SequenceHash
	chains  [][]kvblock.SequenceHash
	since   time.Duration // when the first was told
}

// pendingEntry is an entry whose worker has a number instead of a name.
type pendingEntry struct {
	replica.Entry
	worker kvblock.Worker
}

// workerNames translates between numbers and names of workers. It holds a snapshot of the pool, so that the numbers are
// not given to other workers meanwhile.
type workerNames struct {
	mu       sync.Mutex // guards all; only for own, where two goroutines refresh
	snapshot *pool.Snapshot
	byNumber map[kvblock.Worker]replica.Worker
	byName   map[replica.Worker]kvblock.Worker
}

// refresh takes the pool's present snapshot. It returns the workers that are new and those that have gone.
func (n *workerNames) refresh(p *pool.Pool) (joined, left []replica.Worker) {
	s := p.Acquire()
	if s == n.snapshot {
		s.Release()
		return nil, nil
	}
	byNumber := make(map[kvblock.Worker]replica.Worker, len(s.Workers))
	byName := make(map[replica.Worker]kvblock.Worker, len(s.Workers))
	for i := range s.Workers {
		w := &s.Workers[i]
		name := replica.Worker{Name: w.Name, Rank: w.Rank}
		byNumber[w.Worker], byName[name] = name, w.Worker
		if was, known := n.byName[name]; !known || was != w.Worker {
			joined = append(joined, name)
			if known {
				left = append(left, name)
			}
		}
	}
	for name := range n.byName {
		if _, there := byName[name]; !there {
			left = append(left, name)
		}
	}
	if n.snapshot != nil {
		n.snapshot.Release()
	}
	n.snapshot, n.byNumber, n.byName = s, byNumber, byName
	return joined, left
}

// newReplicas starts to share; nil without --replica-peers and --replica-service. It has no peers before follow.
func (s *server) newReplicas(ctx context.Context) (*replicas, error) {
	if !s.shares() {
		return nil, nil
	}
	security, err := replicaSecurity(s.options, s.secrets)
	if err != nil {
		return nil, err
	}
	r := &replicas{options: s.options, pool: s.pool, book: s.book, sessions: s.sessions, stored: s.responses,
		log:    s.log,
		copies: map[uint64]*scoring.Copies{}}
	at, err := listen.At("replica-port", net.JoinHostPort(s.bindAddress, strconv.Itoa(int(s.replicaPort))))
	if err != nil {
		return nil, err
	}
	limited := listen.Limit(at, "replica", listen.Connections(), s.m)
	self := replica.Identity{Origin: rand.Uint64() | 1, Epoch: uint64(time.Now().UnixNano())}
	r.origin = self.Origin
	group := replicaGroup(s.options, s.cluster)
	r.node = link.New(link.Config{Self: self, Group: group, Timeout: replica.DefaultTimeout, Security: security,
		Name:  cmp.Or(os.Getenv("POD_NAME"), fmt.Sprintf("%s:%d", hostName(), s.replicaPort)),
		Known: r.known, Drain: r.drain, Snapshot: r.snapshotSessions, Apply: r.apply, Dump: r.dump,
		InUse:    func(ctx context.Context) func() { return listen.MarkInUse(ctx, limited) },
		Measured: func(d time.Duration) { s.m.ReplicaStaleness(d) }, Log: s.log})
	r.book.Observe(r.observeBook)
	r.sessions.Observe(self.Origin, r.observeSession)
	r.stored.Observe(self.Origin, r.observeSession)
	s.log.Info("listening", "for", "replicas", "address", at.Addr().String(), "tls", security.Mode(), "replica",
		fmt.Sprintf("%x", self.Origin))
	go func() {
		// A stream alone does not keep its connection: only those of admitted peers do, see link.Config.InUse.
		if err := r.node.Serve(limited, listen.Options(nil, nil)...); err != nil {
			s.log.Error("the port for replicas does not serve any more", "error", err)
		}
	}()
	s.closeWith(r.node.Close)
	go r.keep(ctx)
	exportReplicas(s.m, r)
	return r, nil
}

// replicaGroup names whose endpoints this process picks from.
func replicaGroup(o *options, cluster *kube.Cluster) string {
	if cluster == nil {
		return "endpoints file"
	}
	return cluster.Namespace + "/" + cmp.Or(o.sources.Kube.PoolName, o.sources.Kube.EndpointSelector)
}

// replicaSecurity returns how replicas recognise one another. The certificates and the token follow their files.
func replicaSecurity(o *options, files *secrets.Files) (link.Security, error) {
	token, err := files.Token("--replica-token-file", o.replicaTokenFile)
	certified := o.CertPath != "" && o.ClientCA != ""
	if err != nil || token == nil && !certified {
		return link.Security{}, err
	}
	certificates, err := files.Certificates(o.transport)
	if err != nil {
		return link.Security{}, err
	}
	security := link.Security{Certificate: certificates.Own}
	if certified {
		security.Authorities = certificates.Authorities
	}
	if token != nil {
		security.Token = token.Text
	}
	return security, nil
}

// observeBook takes a change of the book, under the book's lock.
func (r *replicas) observeBook(c *scoring.Change) {
	kind := bookKinds[c.Kind]
	if kind == 0 {
		return
	}
	r.mu.Lock()
	p := r.add(kind, c.Worker)
	p.Number, p.BlockSize, p.PrefillTokens, p.Blocks = c.Number, c.BlockSize, c.PrefillTokens, c.Blocks
	if kind == replica.Output {
		p.Blocks, p.Left = c.Output, c.Left
	}
	if len(c.Chains) > 0 {
		first := len(r.pending.chains)
		for _, chain := range c.Chains {
			from := len(r.pending.hashes)
			r.pending.hashes = append(r.pending.hashes, chain...)
			to := len(r.pending.hashes)
			r.pending.chains = append(r.pending.chains, r.pending.hashes[from:to:to])
		}
		p.Chains = r.pending.chains[first:len(r.pending.chains):len(r.pending.chains)]
	}
	wake := len(r.pending.entries) == 1
	r.mu.Unlock()
	if wake {
		r.node.Changed()
	}
}

// bookKinds are the kinds of entries for changes of the book.
var bookKinds = [...]replica.Kind{
	scoring.Booked: replica.Booked, scoring.PrefillDone: replica.PrefillDone,
	scoring.PrefillReleased: replica.PrefillReleased, scoring.Freed: replica.Freed, scoring.Moved: replica.Moved,
	scoring.Output: replica.Output,
}

// changeKinds are the changes of a book for kinds of entries; 0: none.
var changeKinds = func() (kinds [replica.Waits + 1]scoring.ChangeKind) {
	for change, kind := range bookKinds {
		kinds[kind] = scoring.ChangeKind(change)
	}
	return kinds
}()

// sessionKinds are the kinds of entries for events of sessions.
var sessionKinds = [...]replica.Kind{session.Bound: replica.Bound, session.Used: replica.Used,
	session.Ended: replica.Ended}

// add adds an entry to those that wait. The caller holds r.mu.
func (r *replicas) add(kind replica.Kind, w kvblock.Worker) *pendingEntry {
	now := r.node.Now()
	if len(r.pending.entries) == 0 {
		r.pending.since = now
	}
	r.pending.entries = append(r.pending.entries, pendingEntry{replica.Entry{Kind: kind, At: now}, w})
	return &r.pending.entries[len(r.pending.entries)-1]
}

// observeSession takes an event of a session, under the lock of the sessions.
func (r *replicas) observeSession(e *session.Event) {
	r.mu.Lock()
	p := r.add(sessionKinds[e.Kind], e.Worker)
	setSession(&p.Entry, e)
	wake := len(r.pending.entries) == 1
	r.mu.Unlock()
	if wake {
		r.node.Changed()
	}
}

func setSession(e *replica.Entry, from *session.Event) {
	e.Key, e.Version, e.Writer, e.TTL = from.Key, from.Version.Lamport, from.Version.Origin, from.TTL
	e.At -= from.Age
}

// drain gives the node what has changed. It runs under the node's lock of sending.
func (r *replicas) drain(add func(*replica.Entry)) time.Duration {
	r.mu.Lock()
	r.pending, r.drained = r.drained, r.pending
	r.mu.Unlock()
	r.own.mu.Lock()
	defer r.own.mu.Unlock()
	r.own.refresh(r.pool)
	d := &r.drained
	for i := range d.entries {
		e := &d.entries[i]
		switch e.Kind {
		case replica.Booked, replica.Moved, replica.Bound, replica.Used, replica.Learned:
			var known bool
			if e.Worker, known = r.own.byNumber[e.worker]; !known {
				continue // it has left, and its requests have ended
			}
		}
		add(&e.Entry)
	}
	waited := r.node.Now() - d.since
	d.clear()
	return waited
}

// keptChanges bounds the memory that is kept for later changes, in hashes.
const keptChanges = 1 << 20

func (c *changes) clear() {
	if cap(c.hashes) > keptChanges {
		*c = changes{}
		return
	}
	c.entries, c.hashes, c.chains = c.entries[:0], c.hashes[:0], c.chains[:0]
}

// snapshotSessions returns all sessions and stored responses for a peer that has none. It runs under the node's lock of
// sending.
func (r *replicas) snapshotSessions() (all []replica.Entry) {
	r.own.mu.Lock()
	defer r.own.mu.Unlock()
	r.own.refresh(r.pool)
	for _, table := range []*session.Table{r.sessions, r.stored} {
		table.Snapshot(func() {}, func(e *session.Event) {
			if name, known := r.own.byNumber[e.Worker]; known {
				x := replica.Entry{Kind: sessionKinds[e.Kind], Worker: name, At: r.node.Now()}
				setSession(&x, e)
				all = append(all, x)
			}
		})
	}
	return all
}

// known reports whether this process knows a worker. It runs under the node's lock of receiving.
func (r *replicas) known(w replica.Worker) bool {
	_, known := r.theirs.byName[w]
	return known
}

// apply changes the copies of a peer. It runs under the node's lock of receiving.
func (r *replicas) apply(e *replica.Effect) {
	c := r.copies[e.Origin]
	if c == nil {
		c = r.book.NewCopies()
		r.copies[e.Origin] = c
	}
	switch e.Kind {
	case replica.BeginSnapshot:
		c.BeginSnapshot()
	case replica.EndSnapshot:
		c.EndSnapshot()
		r.released()
	case replica.FreeAll:
		c.FreeAll()
		r.waits.forget(e.Origin)
		r.released()
		delete(r.copies, e.Origin)
	case replica.Apply:
		r.applyEntries(c, e.Origin, e.Entries)
	}
}

func (r *replicas) applyEntries(c *scoring.Copies, origin uint64, entries []replica.Entry) {
	r.scratch = r.scratch[:0]
	for i := range entries {
		e := &entries[i]
		switch e.Kind {
		case replica.Bound, replica.Used, replica.Ended:
			x := session.Event{Kind: session.EventKind(slices.Index(sessionKinds[:], e.Kind)), Key: e.Key,
				Worker: r.theirs.byName[e.Worker], Version: session.Version{Lamport: e.Version, Origin: e.Writer},
				TTL: e.TTL, Age: e.Age}
			table := r.sessions
			if x.Key.IsResponse() {
				table = r.stored
			}
			if table.Apply(&x) == session.Refused {
				r.refused.Add(1)
			}
			continue
		case replica.Waits:
			r.waits.hear(origin, e)
			continue
		case replica.Learned:
			if w, known := r.theirs.byName[e.Worker]; known && !c.Learned(w, e.Values) {
				r.refused.Add(1)
			}
			continue
		}
		x := scoring.Change{Kind: changeKinds[e.Kind], Number: e.Number, BlockSize: e.BlockSize,
			PrefillTokens: e.PrefillTokens, Blocks: e.Blocks, Chains: e.Chains, Age: e.Age}
		if e.Kind == replica.Output {
			x.Blocks, x.Output, x.Left = 0, e.Blocks, e.Left
		}
		if e.Worker.Name != "" {
			x.Worker = r.theirs.byName[e.Worker]
		}
		if e.Kind == replica.Booked {
			x.Left = scoring.NotKnown
		}
		r.scratch = append(r.scratch, x)
	}
	c.Apply(r.scratch)
	if to := r.router.Load(); to != nil {
		to.PeersBooked(r.scratch)
	}
	r.released()
	clear(r.scratch)
}

// routedBy gives the router, which hears of the peers' bookings from now on.
func (r *replicas) routedBy(to *router.Router) {
	if r != nil {
		r.router.Store(to)
	}
}

// released lets requests go that wait.
func (r *replicas) released() {
	if to := r.router.Load(); to != nil {
		to.PeersReleased()
	}
}

// tellRouter tells the router what waits at the replicas, how many there are, and how stale the copies are.
func (r *replicas) tellRouter(late time.Duration) {
	to := r.router.Load()
	if to == nil {
		return
	}
	origins := []uint64{r.origin}
	for _, x := range r.node.Peers() {
		if x.State == replica.Live {
			origins = append(origins, x.Origin)
		}
	}
	slices.Sort(origins)
	number := slices.Index(origins, r.origin)
	to.SetPeers(late, number, len(origins))
	to.SetPeersWaits(r.waits.of(origins, number))
}

// teach tells the peers what the book has learned of the workers where more than this part of it is untold.
func (r *replicas) teach(untold float64) {
	if r.scoring.Policy != scoring.Time {
		return
	}
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	taught := false
	for i := range snapshot.Workers {
		w := snapshot.Workers[i].Worker
		if r.book.Untold(w) <= untold {
			continue
		}
		values := r.book.LearnedNumbers(w, nil)
		r.mu.Lock()
		r.add(replica.Learned, w).Values = values
		r.mu.Unlock()
		taught = true
	}
	if taught {
		r.node.Changed()
	}
}

// keep follows the pool's workers, and tells the book how stale the copies are, until ctx ends. While the last requests
// drain after that, the copies do not matter any more.
func (r *replicas) keep(ctx context.Context) {
	tick := time.NewTicker(namesEvery)
	defer tick.Stop()
	var late time.Duration
	booked, taught := map[uint64]uint64{}, time.Now()
	for told := taught; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.refreshNames()
		r.tellWaits()
		if now := time.Now(); now.Sub(told) >= tellBookEvery {
			late, told = staleness(r.node.Peers(), booked), now
			r.sessions.Refresh()
			untold := scoring.MuchUntold
			if now.Sub(taught) >= teachEvery {
				taught, untold = now, 0
			}
			r.teach(untold)
		}
		r.tellRouter(late)
	}
}

// refreshNames takes over workers that joined and left.
func (r *replicas) refreshNames() {
	r.own.mu.Lock()
	r.own.refresh(r.pool)
	r.own.mu.Unlock()
	var joined, left []replica.Worker
	r.node.Locked(func() { joined, left = r.theirs.refresh(r.pool) })
	for _, w := range left {
		r.node.WorkerLeft(w)
	}
	for _, w := range joined {
		r.node.WorkerJoined(w)
	}
}

// staleness returns how stale the copies are: the mean of the live peers, weighted by how many bookings of each came
// since the last call. booked has these counts, from call to call.
func staleness(peers []replica.Peer, booked map[uint64]uint64) time.Duration {
	was := maps.Clone(booked)
	clear(booked)
	var sum, weights float64
	for _, x := range peers {
		booked[x.Origin] = x.Booked
		if before, known := was[x.Origin]; known && x.State == replica.Live {
			weight := float64(x.Booked-before) + 1e-3 // so that all count if none books
			sum += weight * float64(x.Staleness)
			weights += weight
		}
	}
	if weights == 0 {
		return 0
	}
	return time.Duration(sum / weights)
}

// follow gives the node its peers, and waits until their bookings and sessions are here, at most snapshotWithin. k is
// nil without a cluster.
func (r *replicas) follow(ctx context.Context, k *kube.Cluster) {
	if r == nil {
		return
	}
	r.refreshNames()
	if k != nil && k.Replicas != nil {
		go k.Replicas.Run(ctx, func(hosts []string) {
			addresses := make([]string, 0, len(hosts))
			for _, host := range hosts {
				addresses = append(addresses, r.replicaAddress(host))
			}
			r.node.SetPeers(addresses)
		})
	} else {
		go r.resolve(ctx)
	}
	t := time.NewTimer(min(snapshotWithin, r.warmUpTimeout))
	defer t.Stop()
	select {
	case <-r.node.Synced():
	case <-ctx.Done():
	case <-t.C:
		r.log.Warn("not all replicas have sent their bookings; this one begins without them", "peers",
			r.node.Addresses())
	}
}

// resolve gives the node the addresses of --replica-peers, and again when they change.
func (r *replicas) resolve(ctx context.Context) {
	known := map[string][]string{} // by peer; those of a name that cannot be resolved stay
	failed := map[string]bool{}
	update := func() {
		var all []string
		for _, peer := range r.replicaPeers {
			addresses, err := resolvePeer(ctx, peer)
			if err == nil {
				known[peer] = addresses
			}
			if (err != nil) != failed[peer] && ctx.Err() == nil {
				if failed[peer] = err != nil; err != nil {
					r.log.Warn("the name of a replica cannot be resolved; its former addresses stay", "peer", peer,
						"error", err)
				}
			}
			all = append(all, known[peer]...)
		}
		slices.Sort(all)
		if all = slices.Compact(all); len(all) > maxReplicaAddresses {
			all = all[:maxReplicaAddresses]
		}
		if ctx.Err() == nil {
			r.node.SetPeers(all)
		}
	}
	update()
	tick := time.NewTicker(resolveEvery)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			update()
		}
	}
}

// maxReplicaAddresses bounds the addresses of all peers.
const maxReplicaAddresses = 256

// resolvePeer returns the addresses of a peer, HOST:PORT.
func resolvePeer(ctx context.Context, peer string) (addresses []string, err error) {
	host, port, err := net.SplitHostPort(peer)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, resolveEvery)
	defer cancel()
	found, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	for _, a := range found {
		addresses = append(addresses, net.JoinHostPort(a.Unmap().String(), port))
	}
	return addresses, err
}

// dump gives a peer that starts this process's index.
func (r *replicas) dump(_ context.Context, w io.Writer) error {
	reader := r.reader.Load()
	if reader == nil || !r.warmed.Load() {
		return errors.New("this replica starts itself")
	}
	err := reader.WriteDump(w)
	if errors.Is(err, indexerapi.ErrBusy) {
		return link.ErrBusy
	}
	return err
}

// sources returns the peers as givers of an index.
func (r *replicas) sources() (all []indexerapi.Source) {
	if r == nil {
		return nil
	}
	for _, at := range r.node.Addresses() {
		all = append(all, indexerapi.Source{Name: at, Open: func(ctx context.Context) (io.ReadCloser, error) {
			body, err := r.node.OpenIndex(ctx, at)
			if errors.Is(err, link.ErrBusy) {
				err = indexerapi.ErrBusy
			}
			return body, err
		}})
	}
	return all
}

// serveIndex lets peers copy this process's index from now on.
func (r *replicas) serveIndex(reader *indexerapi.Reader) {
	if r != nil {
		r.reader.Store(reader)
		r.warmed.Store(true)
	}
}

// exportReplicas exports what is shared with replicas.
func exportReplicas(m *metrics.Metrics, r *replicas) {
	m.CollectReplicas(func() metrics.Replicas {
		s := r.node.Stats()
		now := metrics.Replicas{Peers: map[string]int{}, Bookings: s.Bookings, Parked: s.Parked,
			Events: map[[2]string]uint64{}, Snapshots: map[string]uint64{}, Refused: map[string]uint64{},
			Closed: map[string]uint64{}, Freed: map[string]uint64{},
			ConnectFailures: s.Failed, Flat: s.Outcomes.Flat}
		for _, state := range replica.States() {
			now.Peers[string(state)] = 0
		}
		for _, p := range s.Peers {
			now.Peers[string(p.State)]++
			now.ByPeer = append(now.ByPeer,
				metrics.ReplicaPeer{Name: p.Name, Bookings: p.Bookings, Staleness: p.Staleness})
		}
		now.Unpriced = r.book.PeersStale()
		now.Load = map[string]int{"requests": 0, "prefill_tokens": 0, "active_blocks": 0}
		for _, l := range r.book.CopiedLoads(nil) {
			now.Load["requests"] += l.Requests
			now.Load["prefill_tokens"] += l.PrefillTokens
			now.Load["active_blocks"] += l.ActiveBlocks
		}
		now.Peers["absent"] = max(s.Known-len(s.Peers), 0)
		for kind := replica.Booked; kind <= replica.Waits; kind++ {
			now.Events[[2]string{kind.String(), "applied"}] = s.Outcomes.AppliedBy(kind)
		}
		for outcome, n := range map[string]uint64{"ignored": s.Outcomes.Ignored, "parked": s.Outcomes.Parked,
			"lapsed": s.Outcomes.Lapsed, "refused": s.Outcomes.Refused, "duplicate": s.Outcomes.Duplicated} {
			now.Events[[2]string{"", outcome}] = n
		}
		now.Events[[2]string{"session", "refused"}] = r.refused.Load()
		for _, reason := range replica.SnapshotReasons() {
			now.Snapshots[string(reason)] = s.Served[reason]
		}
		for _, reason := range replica.Reasons() {
			now.Refused[string(reason)] = s.Refused[reason]
			now.Closed[string(reason)] = s.Closed[reason]
		}
		for _, cause := range replica.Causes() {
			now.Freed[string(cause)] = s.Freed[cause]
		}
		return now
	})
}

// replicaState is a replica as /debug/replicas describes it.
type replicaState struct {
	Replica     string  `json:"replica"` // identity of its process
	Name        string  `json:"name"`
	Address     string  `json:"address"`
	State       string  `json:"state"`
	Bookings    int     `json:"bookings"`
	Parked      int     `json:"parked"`
	Seq         uint64  `json:"seq"`
	HeardAgo    float64 `json:"heard_ago_seconds"`
	StalenessMS float64 `json:"staleness_ms"`
}

// readerState is a replica that reads from this one.
type readerState struct {
	Replica     string  `json:"replica"`
	Behind      uint64  `json:"behind"` // changes that it has not acknowledged
	StalenessMS float64 `json:"staleness_ms"`
}

// handle answers GET /debug/replicas.
func (r *replicas) handle(w http.ResponseWriter, _ *http.Request) {
	answer := map[string]any{"shares": r != nil}
	if r != nil {
		s := r.node.Stats()
		peers, readers := []replicaState{}, []readerState{}
		for _, p := range s.Peers {
			peers = append(peers, replicaState{fmt.Sprintf("%x", p.Origin), p.Name, p.Address, string(p.State),
				p.Bookings, p.Parked, p.Seq, (r.node.Now() - p.Heard).Seconds(), inMilliseconds(p.Staleness)})
		}
		for _, p := range s.Readers {
			readers = append(readers, readerState{fmt.Sprintf("%x", p.Origin), p.Behind, inMilliseconds(p.Staleness)})
		}
		self := map[string]any{"replica": fmt.Sprintf("%x", r.node.Self().Origin), "bookings": s.Live, "seq": s.Last,
			"group": r.node.Group(), "flush_ms": inMilliseconds(s.Flush)}
		answer["self"], answer["addresses"] = self, r.node.Addresses()
		answer["peers"], answer["readers"] = peers, readers
	}
	api.Reply(w, http.StatusOK, answer, nil)
}

func inMilliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
