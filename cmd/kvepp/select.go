package main

import (
	"context"
	"net/http"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router/budget"
	"kvepp/router/queue"
	"kvepp/scoring"
	"kvepp/serve/dynamo/selector"
	"kvepp/serve/listen"
)

// selectOptions are the flags of "kvepp select".
type selectOptions struct {
	httpService

	queue    queue.Config
	selector selector.Config
}

// selectPrefix separates kvepp's environment variables of these flags from those of "kvepp serve".
const selectPrefix = "select-"

func selectFlags(o *selectOptions) *pflag.FlagSet {
	return declared("select", selectPrefix, func(f *pflag.FlagSet) { o.Web.AddFlags(f, 8092) }, o.selector.AddFlags,
		o.selector.Scoring.AddWeightFlags, o.queue.AddFlags, o.addFlags)
}

// parseSelect reads the arguments, and then sets the remaining flags from the environment.
func parseSelect(o *selectOptions, args []string, getenv func(string) string) error {
	f := selectFlags(o)
	o.reads(f, getenv)
	if err := parse(f, args, &o.Path, getenv); err != nil {
		return err
	}
	if err := o.queue.Read(f, absentFlag); err != nil {
		return err
	}
	if err := o.queue.Validate(); err != nil {
		return err
	}
	o.selector.Queue = o.queue.Room()
	if err := o.selector.Scoring.Validate(); err != nil {
		return err
	}
	if err := o.httpService.check(); err != nil {
		return err
	}
	return o.selector.Validate()
}

// runSelect runs the service until SIGTERM or SIGINT.
func runSelect(o *selectOptions) error {
	m := metrics.New()
	log := o.Logger(m)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	o.logStart("select", log)
	limitMemory(memlimit.FromCgroup, m, log)
	bounds := indexer.Config{MaxBytes: o.bounds.Bytes(debug.SetMemoryLimit(-1))}
	if !o.selector.Events {
		bounds.MaxPredicted, bounds.PruneTarget = indexer.DefaultMaxPredicted, indexer.DefaultPruneTarget
	}
	index, err := indexer.New(bounds)
	if err != nil {
		return err
	}
	workers, book := pool.New(log), scoring.NewActiveSequences()
	var events *feed.Feed
	if o.selector.Events {
		if events, err = feed.New(feed.Config{}, workers, index, m, log); err != nil {
			return err
		}
		defer events.Close()
		workers.Watch(events)
	}
	if buffered, _, err := new(extproc.Config).Buffers(debug.SetMemoryLimit(-1)); err == nil { // as of kvepp serve
		book.MaxBytes = budget.New(buffered).BookedLimit()
	}
	book.Expiry = o.selector.Expiry()
	workers.OnLeave(index.Forget)
	workers.OnLeave(book.Forget)
	if sessions := o.selector.Sessions; sessions != nil {
		sessions.Export(m)
		workers.OnLeave(sessions.Forget)
	}
	service := selector.New(o.selector, workers, index, events, book, m.NewSelectionService(), log)

	mux := http.NewServeMux()
	mux.Handle("/", service.Handler())
	mux.Handle("GET /metrics", listen.MetricsPage(m))
	index.Export(m)
	book.Export(m)
	service.Export(m)
	return o.Web.Serve(ctx, "selections", mux, m, log)
}
