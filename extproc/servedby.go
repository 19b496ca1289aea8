package extproc

import (
	"context"
	"log/slog"
	"slices"
	"sync"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

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
	if x.moved.first(x.route.Address, outcome) {
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

// loggedMoves remembers the chosen endpoints, by address, for which kvepp has logged that another one answered. The
// zero value is empty. Safe for concurrent use.
type loggedMoves struct {
	mu     sync.Mutex
	logged map[moveKey]bool // guarded by mu; at most maxLoggedMoves
}

type moveKey struct{ address, outcome string }

// maxLoggedMoves bounds the memory. Beyond it kvepp forgets all, and logs them again.
const maxLoggedMoves = 1024

// first reports whether this is the first request of its kind.
func (l *loggedMoves) first(address, outcome string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	key := moveKey{address, outcome}
	if l.logged[key] {
		return false
	}
	if l.logged == nil || len(l.logged) >= maxLoggedMoves {
		l.logged = map[moveKey]bool{}
	}
	l.logged[key] = true
	return true
}
