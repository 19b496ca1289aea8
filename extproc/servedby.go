package extproc

import (
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/peer"

	"kvepp/router"
)

// workerHeaderShown and chosenHeaderShown are the response headers that name the worker that answered a request, and
// the chosen worker if it is another.
const (
	workerHeaderShown = "x-kvepp-worker"
	chosenHeaderShown = "x-kvepp-chosen-worker"
)

// reconcile moves the booking to the endpoint that answered the request. If that is not the chosen one, it logs the
// likely cause, and corrects the headers that show the decision.
func (x *exchange) reconcile(e *effect) {
	outcome := x.router.Reconcile(x.route, e.ServedBy, e.Tries)
	if outcome == router.ServedByChosen {
		return
	}
	level := slog.LevelDebug
	if x.moved.add(move{x.route.Address, outcome}) {
		level = slog.LevelWarn
	}
	servedBy := &x.route.ServedBy
	x.log.Log(
		context.Background(),
		level,
		"an endpoint that kvepp did not choose answered a request. kvepp logs further such requests of the same "+
			"chosen endpoint at debug level",
		"request_id",
		x.head.id,
		"chosen",
		x.route.Address,
		"chosen_worker",
		x.route.WorkerName(),
		"served",
		servedBy.Address,
		"served_worker",
		servedBy.Worker,
		"outcome",
		outcome,
		"likely_cause",
		likelyCause(x.route, e.Tries),
	)
	if x.Server.cfg.DecisionHeaders {
		name := servedBy.Worker
		if name == "" {
			name = "unknown (" + servedBy.Address + ")"
		}
		showServingWorker(e.Send, name, x.route.WorkerName())
	}
}

// likelyCause says why the proxy sent a request to another endpoint than the chosen one, and what to change. tries is
// how many endpoints the proxy reports it tried; 0: unknown.
func likelyCause(route *router.Route, tries int) string {
	switch {
	case tries > 1:
		return "the chosen endpoint failed, and the proxy retried on another one"
	case route.ServedBy.Outcome == router.ServedByUnknown:
		return "the proxy's cluster and kvepp do not have the same endpoints: kvepp has none at the address that " +
			"answered. List the same ones in the endpoints file (or the pool's selector) and in the cluster"
	case tries == 0 && slices.Contains(route.Fallbacks, route.ServedBy.Address):
		return "the chosen endpoint failed, and the proxy retried on a fallback endpoint of kvepp's; or the proxy's " +
			"cluster does not have the chosen address"
	}
	return "the proxy's cluster does not have the chosen address, or its health checks took it out. Add it to the " +
		"cluster as IP:port, or remove it from kvepp's endpoints"
}

// showServingWorker corrects the response headers that show the decision: it sets the worker that answered, and adds
// the chosen one.
func showServingWorker(messages []*extprocv3.ProcessingResponse, serving, chosen string) {
	for _, m := range messages {
		mutation := m.GetResponseHeaders().GetResponse().GetHeaderMutation()
		for _, h := range mutation.GetSetHeaders() {
			if h.GetHeader().GetKey() == workerHeaderShown {
				h.Header.RawValue = []byte(serving)
				mutation.SetHeaders = append(mutation.SetHeaders, set(chosenHeaderShown, chosen))
				return
			}
		}
	}
}

// move is what is logged once when another endpoint than the chosen one answered.
type move struct{ address, outcome string }

// seenSet is a set that forgets all its keys when it has maxSeen. The zero value is empty. Safe for concurrent use.
type seenSet[K comparable] struct {
	mu   sync.Mutex
	keys map[K]bool // guarded by mu
}

// maxSeen bounds the memory.
const maxSeen = 1024

// add reports whether the key is new.
func (s *seenSet[K]) add(key K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.keys[key] {
		return false
	}
	if s.keys == nil || len(s.keys) >= maxSeen {
		s.keys = map[K]bool{}
	}
	s.keys[key] = true
	return true
}

func (s *seenSet[K]) has(key K) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.keys[key]
}

func (s *seenSet[K]) remove(key K) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.keys, key)
}

// learnLists remembers whether a response shows that the proxy takes several endpoints: it says which one served
// (override_host) and after how many attempts. Others take a list for one address, and all their requests would fail:
// if one fails so, another proxy may have come to this host.
func (x *exchange) learnLists(e *effect) {
	switch {
	case e.Status == "" || x.route == nil || len(x.route.Fallbacks) == 0:
	case x.takesLists:
		if e.ServedBy == "" && e.Status >= "500" {
			x.listTakers.remove(x.proxy)
		}
	case e.ServedBy != "" && e.Tries > 0:
		x.listTakers.add(x.proxy)
	case e.OfEndpoint:
		x.note("--fallback-endpoints: the proxy does not say which endpoint served a request after how many " +
			"attempts, so it may not take several endpoints; kvepp names it one (docs/gateways.md)")
	}
}

// proxyOf returns the host that a stream comes from; "": unknown.
func proxyOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok || p.Addr == nil {
		return ""
	}
	host, _, err := net.SplitHostPort(p.Addr.String())
	if err != nil {
		return p.Addr.String()
	}
	return host
}
