// Package replicas connects the parts of a running kvepp with its other replicas: it gives package replica the load
// book and the sessions, follows the peers' addresses, and exports metrics. It owns the flags about replicas.
package replicas

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/scoring/replica"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
)

const (
	keepEvery    = 250 * time.Millisecond // how stale the copies are, and long requests of sessions
	syncedWithin = 3 * time.Second        // the start waits for the peers' bookings
)

// Parts are what replicas share, and how they recognise one another.
type Parts struct {
	Book             *scoring.ActiveSequences
	Pool             *pool.Pool
	Sessions, Stored *session.Table // the second has the workers by stored response
	Security         replica.Security
	Group, Name      string // see replica.Config
	Metrics          *metrics.Metrics
	Log              *slog.Logger
}

// Sharing shares with the other replicas. A nil one shares nothing.
type Sharing struct {
	config *Config
	Parts
	node   *replica.Node
	router atomic.Pointer[router.Router]     // nil: not yet
	reader atomic.Pointer[indexerapi.Reader] // gives the index; nil: it may not be copied yet
}

// New starts to share. It has no peers before Follow.
func New(ctx context.Context, c *Config, p Parts) *Sharing {
	s := &Sharing{config: c, Parts: p}
	s.node = replica.New(replica.Config{Group: p.Group, Name: p.Name, Security: p.Security,
		Book: p.Book, Pool: p.Pool, Sessions: s.snapshot, HeardSession: s.heardSession, Heard: s.heard,
		Released: s.released, Dump: s.dump, Measured: p.Metrics.ReplicaStaleness, Log: p.Log})
	for _, table := range s.tables() {
		table.Observe(func(e session.Event) { s.node.TellSession(sessionOf(e)) })
	}
	go s.keep(ctx)
	s.export()
	return s
}

// Serve serves peers at a listener until Close.
func (s *Sharing) Serve(at net.Listener) {
	s.Log.Info("listening", "for", "replicas", "address", at.Addr().String(), "tls", s.Security.Mode(), "replica",
		s.node.Origin())
	if err := s.node.Serve(at); err != nil {
		s.Log.Error("the port for replicas does not serve any more", "error", err)
	}
}

// Close says goodbye to the peers.
func (s *Sharing) Close() { s.node.Close() }

func (s *Sharing) tables() []*session.Table { return []*session.Table{s.Sessions, s.Stored} }

// sessionKinds are the kinds of replica.Session by session.EventKind.
var sessionKinds = [...]replica.Kind{session.Bound: replica.Bound, session.Used: replica.Used,
	session.Ended: replica.Ended}

func sessionOf(e session.Event) *replica.Session {
	return &replica.Session{Kind: sessionKinds[e.Kind], Key: e.Key, Worker: e.Worker, TTL: e.TTL, Age: e.Age}
}

func (s *Sharing) heardSession(e *replica.Session) {
	x := session.Event{Kind: session.EventKind(slices.Index(sessionKinds[:], e.Kind)), Key: e.Key, Worker: e.Worker,
		TTL: e.TTL, Age: e.Age}
	if x.Key.IsResponse() {
		s.Stored.Apply(x)
	} else {
		s.Sessions.Apply(x)
	}
}

// snapshot gives all sessions and stored responses to each.
func (s *Sharing) snapshot(each func(*replica.Session)) {
	for _, table := range s.tables() {
		for _, e := range table.Snapshot() {
			each(sessionOf(e))
		}
	}
}

// RoutedBy gives the router, which hears of the peers' bookings from now on.
func (s *Sharing) RoutedBy(to *router.Router) {
	if s != nil {
		s.router.Store(to)
	}
}

func (s *Sharing) heard(changes []scoring.Change) {
	if to := s.router.Load(); to != nil {
		to.PeersBooked(changes)
	}
}

func (s *Sharing) released() {
	if to := s.router.Load(); to != nil {
		to.PeersReleased()
	}
}

// keep tells the book how stale the copies are, until ctx ends.
func (s *Sharing) keep(ctx context.Context) {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			s.Book.SetPeersStaleness(staleness(s.node.Peers()))
			s.Sessions.Refresh()
		}
	}
}

// staleness returns how stale the copies are: the mean of the live peers, weighted by their bookings.
func staleness(peers []replica.Peer) time.Duration {
	var sum, weights float64
	for _, p := range peers {
		if p.State == replica.Live {
			weight := float64(p.Bookings + 1)
			sum += weight * float64(p.Staleness)
			weights += weight
		}
	}
	return time.Duration(sum / max(weights, 1))
}

// Follow gives the node its peers, and waits until their bookings and sessions are here, for a few seconds at most.
func (s *Sharing) Follow(ctx, within context.Context, service Service) {
	if s == nil {
		return
	}
	failing := map[string]bool{}
	go s.config.followPeers(ctx, service, s.node.SetPeers, func(peer string, err error) {
		if err != nil && !failing[peer] && ctx.Err() == nil {
			s.Log.Warn("the name of a replica cannot be resolved; its former addresses stay", "peer", peer, "error",
				err)
		}
		failing[peer] = err != nil
	})
	within, cancel := context.WithTimeout(within, syncedWithin)
	defer cancel()
	select {
	case <-s.node.Synced():
	case <-within.Done():
		if ctx.Err() == nil {
			s.Log.Warn("not all replicas have sent their bookings; this one begins without them", "peers",
				s.node.Addresses())
		}
	}
}

// dump gives a peer that starts this process's index.
func (s *Sharing) dump(_ context.Context, w io.Writer) error {
	reader := s.reader.Load()
	if reader == nil {
		return replica.ErrBusy // it starts itself
	}
	err := reader.WriteDump(w)
	if errors.Is(err, indexerapi.ErrBusy) {
		return replica.ErrBusy
	}
	return err
}

// Sources returns the peers as givers of an index.
func (s *Sharing) Sources() (all []indexerapi.Source) {
	if s == nil {
		return nil
	}
	for _, at := range s.node.Addresses() {
		all = append(all, indexerapi.Source{Name: at, Open: func(ctx context.Context) (io.ReadCloser, error) {
			body, err := s.node.OpenIndex(ctx, at)
			if errors.Is(err, replica.ErrBusy) {
				err = indexerapi.ErrBusy
			}
			return body, err
		}})
	}
	return all
}

// GiveIndex lets peers copy this process's index from now on.
func (s *Sharing) GiveIndex(reader *indexerapi.Reader) {
	if s != nil {
		s.reader.Store(reader)
	}
}

// export exports what is shared as metrics.
func (s *Sharing) export() {
	s.Metrics.CollectReplicas(func() metrics.Replicas {
		counts := s.node.Counts()
		now := metrics.Replicas{Peers: map[string]int{}, Events: map[[2]string]uint64{},
			ConnectFailures: counts[replica.Counted{What: replica.Failed}],
			Flat:            counts[replica.Counted{What: replica.Limited}], Unpriced: s.Book.PeersStale(),
			Load: map[string]int{"requests": 0, "prefill_tokens": 0, "active_blocks": 0}}
		for _, state := range replica.States() {
			now.Peers[string(state)] = 0
		}
		peers := s.node.Peers()
		for _, p := range peers {
			now.Peers[string(p.State)]++
			now.Bookings += p.Bookings
			now.ByPeer = append(now.ByPeer,
				metrics.ReplicaPeer{Name: p.Name, Bookings: p.Bookings, Staleness: p.Staleness})
		}
		now.Peers["absent"] = max(len(s.node.Addresses())-len(peers), 0)
		for _, l := range s.Book.CopiedLoads(nil) {
			now.Load["requests"] += l.Requests
			now.Load["prefill_tokens"] += l.PrefillTokens
			now.Load["active_blocks"] += l.ActiveBlocks
		}
		for kind, n := range by(counts, replica.Events, replica.Kinds()) {
			now.Events[[2]string{kind, "applied"}] = n
		}
		now.Events[[2]string{"", "ignored"}] = counts[replica.Counted{What: replica.Events}]
		now.Snapshots = by(counts, replica.Snapshots, replica.SnapshotReasons())
		now.Refused = by(counts, replica.Refused, replica.Reasons())
		now.Closed = by(counts, replica.Closed, replica.Reasons())
		now.Freed = by(counts, replica.Freed, replica.Causes())
		return now
	})
}

// by returns counts of something by each of the values.
func by[T ~string](counts map[replica.Counted]uint64, what string, values []T) map[string]uint64 {
	all := map[string]uint64{}
	for _, v := range values {
		all[string(v)] = counts[replica.Counted{What: what, By: string(v)}]
	}
	return all
}

// peerState is a replica as /debug/replicas describes it.
type peerState struct {
	Replica     string  `json:"replica"` // identity of its process
	Name        string  `json:"name"`
	Address     string  `json:"address"`
	State       string  `json:"state"`
	Bookings    int     `json:"bookings"`
	HeardAgo    float64 `json:"heard_ago_seconds"`
	StalenessMS float64 `json:"staleness_ms"`
}

// Handle answers GET /debug/replicas.
func (s *Sharing) Handle(w http.ResponseWriter, _ *http.Request) {
	response := map[string]any{"shares": s != nil}
	if s != nil {
		peers := []peerState{}
		for _, p := range s.node.Peers() {
			peers = append(peers, peerState{p.Origin, p.Name, p.Address, string(p.State), p.Bookings,
				p.HeardAgo.Seconds(), float64(p.Staleness) / float64(time.Millisecond)})
		}
		response["self"] = map[string]any{"replica": s.node.Origin(), "bookings": s.Book.Len(), "group": s.Group}
		response["addresses"], response["peers"] = s.node.Addresses(), peers
		response["readers"] = s.node.Readers()
	}
	api.Reply(w, http.StatusOK, response, nil)
}
