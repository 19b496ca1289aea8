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

// syncedWithin is how long the start waits for the peers' bookings.
const syncedWithin = 3 * time.Second

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
func New(c *Config, p Parts) *Sharing {
	s := &Sharing{config: c, Parts: p}
	s.node = replica.New(replica.Config{Group: p.Group, Name: p.Name, Security: p.Security, Book: p.Book, Pool: p.Pool,
		Sessions: p.Sessions, Stored: p.Stored, Changed: s.changed, Dump: s.dump, Log: p.Log,
		Measured: p.Metrics.ReplicaStaleness})
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
		now := metrics.Replicas{Counts: s.node.Counts(), Peers: map[string]int{}, Unpriced: s.Book.PeersStale()}
		for _, state := range replica.States() {
			now.Peers[string(state)] = 0
		}
		peers := s.node.Peers()
		for _, p := range peers {
			now.Peers[string(p.State)]++
			now.Bookings += p.Bookings
		}
		now.Peers["absent"] = max(len(s.node.Addresses())-len(peers), 0)
		for _, l := range s.Book.CopiedLoads(nil) {
			now.Requests += l.Requests
			now.PrefillTokens += l.PrefillTokens
			now.ActiveBlocks += l.ActiveBlocks
		}
		return now
	})
}

// Handle handles GET /debug/replicas.
func (s *Sharing) Handle(w http.ResponseWriter, _ *http.Request) {
	response := map[string]any{"shares": s != nil}
	if s != nil {
		response["self"] = map[string]any{"replica": s.node.Origin(), "bookings": s.Book.Len(), "group": s.Group}
		response["addresses"], response["peers"] = s.node.Addresses(), s.node.Peers()
		response["readers"] = s.node.Readers()
	}
	api.Reply(w, http.StatusOK, response, nil)
}
