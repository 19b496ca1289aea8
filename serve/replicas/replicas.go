// Package replicas connects the parts of a running kvepp with its other replicas: it gives package replica the load
// book and the sessions, follows the peers' addresses, and exports metrics. It owns the flags about replicas.
package replicas

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/router"
	"kvepp/scoring"
	"kvepp/scoring/replica"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
)

// syncedWithin is how long the start waits for the peers' bookings.
const syncedWithin = 3 * time.Second

// Sharing shares with the other replicas. A nil one shares nothing.
type Sharing struct {
	*replica.Node
	config *Config
	parts  replica.Config
	router atomic.Pointer[router.Router]     // nil: not yet
	reader atomic.Pointer[indexerapi.Reader] // gives the index; nil: it may not be copied yet
}

// New starts to share what parts has, all but the functions. It has no peers before Follow.
func New(c *Config, parts replica.Config, m *metrics.Metrics) *Sharing {
	s := &Sharing{config: c, parts: parts}
	parts.Changed, parts.Dump, parts.Measured, parts.Count = s.changed, s.dump, m.ReplicaStaleness, m.ReplicaCounters()
	parts.Charged = s.charged
	parts.Busy = indexerapi.ErrBusy
	s.Node = replica.New(parts)
	m.CollectReplicas(s.metrics)
	return s
}

// Serve serves peers at a listener until Close.
func (s *Sharing) Serve(at net.Listener) {
	s.parts.Log.Info("listening", "for", "replicas", "address", at.Addr().String(), "tls", s.parts.Security.Mode(),
		"replica", s.Origin())
	if err := s.Node.Serve(at); err != nil {
		s.parts.Log.Error("the port for replicas does not serve any more", "error", err)
	}
}

// RoutedBy gives the router, which hears of the peers' bookings from now on.
func (s *Sharing) RoutedBy(to *router.Router) {
	if s != nil {
		s.router.Store(to)
	}
}

func (s *Sharing) changed(changes []scoring.Change) {
	if to := s.router.Load(); to != nil {
		to.PeersChanged(changes)
	}
}

func (s *Sharing) charged(tenant uint64, tokens int, turn, waits bool) {
	if to := s.router.Load(); to != nil {
		to.HeardTenant(tenant, tokens, turn, waits)
	}
}

// Follow gives the node its peers, and waits until their bookings and sessions are here, for a few seconds at most.
func (s *Sharing) Follow(ctx, within context.Context, service Service) {
	if s == nil {
		return
	}
	failing := map[string]bool{}
	go s.config.followPeers(ctx, service, s.SetPeers, func(peer string, err error) {
		if err != nil && !failing[peer] && ctx.Err() == nil {
			s.parts.Log.Warn("the name of a replica cannot be resolved; its former addresses stay", "peer", peer,
				"error", err)
		}
		failing[peer] = err != nil
	})
	within, cancel := context.WithTimeout(within, syncedWithin)
	defer cancel()
	select {
	case <-s.Synced():
	case <-within.Done():
		if ctx.Err() == nil {
			s.parts.Log.Warn("not all replicas have sent their bookings; this one begins without them", "peers",
				s.Addresses())
		}
	}
}

// dump gives a peer that starts this process's index; nothing if this process starts itself or gives it to another.
func (s *Sharing) dump(_ context.Context, w io.Writer) error {
	if reader := s.reader.Load(); reader != nil {
		return reader.WriteDump(w)
	}
	return nil
}

// Sources returns the peers as givers of an index.
func (s *Sharing) Sources() (all []indexerapi.Source) {
	if s == nil {
		return nil
	}
	for _, at := range s.Addresses() {
		all = append(all, indexerapi.Source{Name: at, Open: func(ctx context.Context) (io.ReadCloser, error) {
			return s.OpenIndex(ctx, at)
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

// metrics returns what is shared now.
func (s *Sharing) metrics() metrics.Replicas {
	peers, load := s.Peers(), s.parts.Book.CopiedLoad()
	now := metrics.Replicas{Requests: load.Requests, PrefillTokens: load.PrefillTokens, ActiveBlocks: load.ActiveBlocks,
		Unpriced: s.parts.Book.PeersStale(), Peers: map[string]int{replica.Joining: 0, replica.Live: 0,
			replica.Suspect: 0, "absent": max(len(s.Addresses())-len(peers), 0)}}
	for _, p := range peers {
		now.Peers[p.State]++
	}
	return now
}

// Handle handles GET /debug/replicas.
func (s *Sharing) Handle(w http.ResponseWriter, _ *http.Request) {
	response := map[string]any{"shares": s != nil}
	if s != nil {
		response["self"] = map[string]any{"replica": s.Origin(), "bookings": s.parts.Book.Len(), "group": s.parts.Group}
		response["addresses"], response["peers"] = s.Addresses(), s.Peers()
		response["readers"] = s.Readers()
	}
	api.Reply(w, http.StatusOK, response, nil)
}
