package main

import (
	"cmp"
	"context"
	"net/http"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
	"kvepp/serve/listen"
)

// indexerOptions are the flags of "kvepp indexer".
type indexerOptions struct {
	httpService
	indexerapi.Config
}

// indexerPrefix separates the environment variables of these flags from those of "kvepp serve".
const indexerPrefix = "indexer-"

func indexerFlags(o *indexerOptions) *pflag.FlagSet {
	return declared("indexer", indexerPrefix, func(f *pflag.FlagSet) { o.Web.AddFlags(f, 8090) }, o.Config.AddFlags,
		o.addFlags)
}

// parseIndexer reads the arguments, and then sets the remaining flags from the environment.
func parseIndexer(o *indexerOptions, args []string, getenv func(string) string) error {
	f := indexerFlags(o)
	o.reads(f, getenv)
	if err := parse(f, args, &o.Path, getenv); err != nil {
		return err
	}
	return flags.WithSource(f, cmp.Or(o.check(), o.Config.Validate()))
}

// runIndexer runs the service until SIGTERM or SIGINT.
func runIndexer(o *indexerOptions) error {
	m := metrics.New()
	log := o.Logger(m)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	o.logStart("indexer", log)
	limitMemory(memlimit.FromCgroup, m, log)
	index, err := indexer.New(indexer.Config{MaxBytes: o.bounds.Bytes(debug.SetMemoryLimit(-1))})
	if err != nil {
		return err
	}
	workers := pool.New(log)
	events, err := feed.New(feed.Config{}, workers, index, m, log)
	if err != nil {
		return err
	}
	defer events.Close()
	if len(o.Peers()) > 0 {
		events.Hold()
	}
	workers.Watch(events)
	workers.OnLeave(index.Forget)
	registry := indexerapi.NewRegistry(workers, index, events, log)
	if err := registry.Begin(ctx, &o.Config); err != nil {
		return err
	}

	mux := http.NewServeMux()
	registry.Handle(mux)
	mux.Handle("GET /metrics", listen.MetricsPage(m))
	indexerGauges(m, registry, events, index)
	return o.Web.Serve(ctx, "the indexer's requests", api.Counted(mux, m.NewIndexerService()), m, log)
}

// indexerGauges exports the counts of the registry, the feed and the index.
func indexerGauges(m *metrics.Metrics, registry *indexerapi.Registry, events *feed.Feed, index *indexer.Index) {
	index.Export(m)
	metrics.Gauges(m, metrics.IndexerListeners, "status", func() map[string]int {
		active, pending := events.Subscriptions()
		return map[string]int{"active": active, "pending": pending}
	})
}
