package kube

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
)

// Health is the state of a kind of objects.
type Health string

// The states of a Kind. If a Kind is not Followed, its last known objects stay.
const (
	Starting  Health = "starting"
	Followed  Health = "followed"
	Absent    Health = "absent"    // the cluster has no such kind: its CRD is not installed
	Forbidden Health = "forbidden" // kvepp may not read it
	Failing   Health = "failing"   // anything else
)

// Kind is a kind of objects that kvepp follows, or tries to follow. It outlives its watches.
type Kind struct {
	Name string // plural, as in the API
	log  *slog.Logger

	errors   atomic.Uint64
	changed  func() // called when the result of exists changes; may be nil
	mu       sync.Mutex
	health   Health
	readable bool          // the API server's last response let kvepp read it
	tried    chan struct{} // closed when the first list arrived or failed
}

func newKind(name string, log *slog.Logger) *Kind {
	return &Kind{Name: name, log: log, health: Starting, tried: make(chan struct{})}
}

// Health returns the current state.
func (k *Kind) Health() Health {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.health
}

// exists reports whether the cluster has the kind and lets kvepp read it. While the API server is away, its last
// response counts.
func (k *Kind) exists() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.readable
}

// Errors returns how often a list or a watch failed.
func (k *Kind) Errors() uint64 { return k.errors.Load() }

// set changes the health, and reports whether it was another before.
func (k *Kind) set(now Health) bool {
	k.mu.Lock()
	was, there := k.health, k.readable
	k.health = now
	switch now {
	case Followed:
		k.readable = true
	case Absent, Forbidden:
		k.readable = false
	}
	another := there != k.readable
	if was == Starting {
		close(k.tried)
	}
	k.mu.Unlock()
	if another && k.changed != nil {
		k.changed()
	}
	return was != now
}

// failed records the error of a list or a watch. It logs each new state once, not each attempt.
func (k *Kind) failed(err error) {
	if apierrors.IsResourceExpired(err) || apierrors.IsGone(err) {
		return // the next list has the missed changes
	}
	k.errors.Add(1)
	switch {
	case apierrors.IsNotFound(err):
		if k.set(Absent) {
			k.log.Info("the cluster has no objects of this kind; kvepp retries until its CRD is installed",
				"kind", k.Name)
		}
	case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err):
		if k.set(Forbidden) {
			k.log.Error(
				"kvepp may not read objects of this kind; kvepp retries: give its service account the verbs get, "+
					"list and watch", "kind", k.Name, "error", err)
		}
	default:
		if k.set(Failing) {
			k.log.Warn(
				"kvepp cannot read objects of this kind from the API server; kvepp retries, and the known objects stay",
				"kind", k.Name, "error", err)
		}
	}
}

// followed records that a list or a watch succeeded.
func (k *Kind) followed() {
	if k.set(Followed) {
		k.log.Info("following objects", "kind", k.Name)
	}
}

// follower receives the objects of one watch. Its functions are called from one goroutine.
type follower struct {
	strip   func(any) (any, error) // removes unneeded fields before an object is kept; idempotent; may be nil
	put     func(any)              // an object that was added or changed
	remove  func(any)              // an object that was deleted, in its last state
	replace func([]any)            // the whole list: objects that are not in it were deleted
}

const (
	firstRetry = 500 * time.Millisecond
	lastRetry  = 15 * time.Second
)

// requests are the list and the watch of a kind of objects.
type requests struct {
	list  func(context.Context, metav1.ListOptions) (runtime.Object, error)
	watch func(context.Context, metav1.ListOptions) (watch.Interface, error)
	with  any // the client of both requests
}

// narrowed returns the requests for the objects of an API that narrow's options select. L is the type of their list.
func narrowed[L runtime.Object](api interface {
	List(context.Context, metav1.ListOptions) (L, error)
	Watch(context.Context, metav1.ListOptions) (watch.Interface, error)
}, with any, narrow func(*metav1.ListOptions)) requests {
	return requests{
		list: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			narrow(&options)
			return api.List(ctx, options)
		},
		watch: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			narrow(&options)
			return api.Watch(ctx, options)
		},
		with: with,
	}
}

// labelled selects objects by their labels.
func labelled(selector string) func(*metav1.ListOptions) {
	return func(o *metav1.ListOptions) { o.LabelSelector = selector }
}

// follow lists and watches until ctx ends; expected is an object of the kind. After a failure it waits, twice as long
// each time, up to lastRetry. Half of the wait is random, so that replicas do not retry at the same time.
func (k *Kind) follow(ctx context.Context, ask requests, expected any, to follower) {
	store := &intake{kind: k, follower: to}
	// Failures are recorded here, and not by the caller of the Reflector, which hides some of them.
	source := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			ctx, try := k.attempt(ctx)
			list, err := ask.list(ctx, options)
			if err != nil && ctx.Err() == nil && !try.noResponse.Load() {
				k.failed(err)
			}
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, options metav1.ListOptions) (watch.Interface, error) {
			ctx, try := k.attempt(ctx)
			w, err := ask.watch(ctx, options)
			// if a stream of the initial objects fails, the Reflector lists them instead
			listing := options.SendInitialEvents != nil && *options.SendInitialEvents
			switch {
			case ctx.Err() != nil || try.noResponse.Load():
			case err != nil && (!listing || apierrors.IsTooManyRequests(err)): // the Reflector repeats the same request
				k.failed(err)
			case err == nil && !listing:
				k.followed()
			}
			return w, err
		},
	}
	reflector := cache.NewReflectorWithOptions(
		cache.ToListWatcherWithWatchListSemantics(source, ask.with),
		expected,
		store,
		cache.ReflectorOptions{
			Name:    k.Name,
			Backoff: &wait.Backoff{Duration: firstRetry, Factor: 2, Steps: 6, Cap: lastRetry, Jitter: 0.5},
		},
	)
	again := firstRetry
	for {
		lists := store.lists
		if err := reflector.ListAndWatchWithContext(ctx); err == nil || store.lists != lists {
			again = firstRetry
		}
		if !pause(ctx, again/2+rand.N(again/2)) {
			return
		}
		again = min(2*again, lastRetry)
	}
}

// attempt is one list or watch. unanswered: the server did not answer the latest request, which is recorded already.
type attempt struct {
	kind       *Kind
	noResponse atomic.Bool
}

type attemptKey struct{}

// attempt returns a context for one list or watch.
func (k *Kind) attempt(ctx context.Context) (context.Context, *attempt) {
	t := &attempt{kind: k}
	return context.WithValue(ctx, attemptKey{}, t), t
}

// observedTransport sends requests to the API server, and records if the server does not answer. client-go retries for
// minutes, and then reports some of these failures as a watch without events.
type observedTransport struct{ http.RoundTripper }

func (w observedTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := w.RoundTripper.RoundTrip(req)
	if t, ok := req.Context().Value(attemptKey{}).(*attempt); ok && req.Context().Err() == nil {
		t.noResponse.Store(err != nil)
		if err != nil {
			t.kind.failed(err)
		}
	}
	return resp, err
}

// WrappedRoundTripper returns the inner transport, which client-go looks for.
func (w observedTransport) WrappedRoundTripper() http.RoundTripper { return w.RoundTripper }

// intake receives the objects of a Reflector in place of a cache: no code reads the objects back.
type intake struct {
	kind *Kind
	follower
	lists int
}

func (i *intake) Add(o any) error    { return i.take(o, i.put) }
func (i *intake) Update(o any) error { return i.take(o, i.put) }
func (i *intake) Delete(o any) error { return i.take(o, i.remove) }
func (i *intake) Resync() error      { return nil }

// Transformer makes a Reflector strip the objects of a list while it arrives.
func (i *intake) Transformer() cache.TransformFunc {
	if i.strip == nil {
		return nil
	}
	return i.strip
}

func (i *intake) take(o any, to func(any)) error {
	if i.strip != nil {
		var err error
		if o, err = i.strip(o); err != nil {
			return err
		}
	}
	to(o)
	return nil
}

// Replace receives a list: the first, or the one after a watch that could not resume.
func (i *intake) Replace(list []any, _ string) error {
	i.lists++
	stripped := make([]any, 0, len(list))
	for _, o := range list {
		if err := i.take(o, func(o any) { stripped = append(stripped, o) }); err != nil {
			return err
		}
	}
	i.replace(stripped)
	i.kind.followed()
	return nil
}
