package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os/signal"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/serve/api"
	indexerapi "kvepp/serve/dynamo/indexer"
)

const indexerHelp = `kvepp indexer follows the KV events of workers, and answers over HTTP how much of a prompt each
worker has cached. It replaces "python -m dynamo.indexer": the same requests, the same responses.

Usage:       kvepp indexer [--workers WORKERS --block-size TOKENS] [flags]
Example:     kvepp indexer --port 8090 --block-size 16 --workers 1=tcp://10.0.0.7:5557
             curl localhost:8090/query -H 'Content-Type: application/json' \
               -d '{"model_name": "default", "token_ids": [1, 2, 3]}'
Precedence:  flag, variable KVEPP_INDEXER_<FLAG>, --config FILE, default
`

// indexerOptions are the flags of "kvepp indexer".
type indexerOptions struct {
	httpService
	blockSize int
	workers   string
	model     string
	group     string
	peers     string

	registrations []indexerapi.Registration // parsed from workers
}

// indexerPrefix separates the environment variables of these flags from those of "kvepp serve".
const indexerPrefix = "indexer-"

func indexerFlags(o *indexerOptions) *pflag.FlagSet {
	f := newFlags("kvepp indexer")
	o.httpService.add(f, 8090)
	f.IntVar(&o.blockSize, "block-size", 0, "`TOKENS` per KV block of the workers that --workers names")
	f.StringVar(
		&o.workers,
		"workers",
		"",
		"`WORKERS` at the start: INSTANCE[:RANK]=tcp://HOST:PORT, separated by commas; more can be registered over "+
			"HTTP",
	)
	f.StringVar(&o.model, "model-name", "default", "the `MODEL` that those workers serve")
	f.StringVar(&o.group, "routing-group", "default", "the routing `GROUP` of those workers")
	f.StringVar(
		&o.peers,
		"peers",
		"",
		"`URLS` of other indexers, separated by commas: at start kvepp copies the index of the workers in --workers "+
			"from the first peer that answers",
	)
	o.indexMemory.add(f)
	o.logging.AddFlags(f, "")
	o.settingsFile.AddFlags(f)
	section(f, "Flags of kvepp indexer")
	flags.Retire(f, "threads", false) // of Dynamo's program; each worker has its own here
	documentEnvironment(f, indexerPrefix)
	return f
}

// parseIndexer reads the arguments, and then sets the remaining flags from the environment.
func parseIndexer(o *indexerOptions, args []string, getenv func(string) string) error {
	f := indexerFlags(o)
	o.flags = f
	if err := parse(f, args, &o.Path, getenv); err != nil {
		return err
	}
	if err := o.check(); err != nil {
		return err
	}
	if err := checkPeers("--peers", o.peerList()); err != nil {
		return err
	}
	if o.workers == "" {
		if o.blockSize != 0 {
			return errors.New(
				"--block-size is that of the workers that --workers names; those registered over HTTP bring their own",
			)
		}
		return nil
	}
	if o.blockSize == 0 {
		return errors.New("--workers needs --block-size: the tokens per KV block of these workers")
	}
	for _, w := range strings.Split(o.workers, ",") {
		r, err := o.registration(w)
		if err != nil {
			return fmt.Errorf("--workers: %w", err)
		}
		o.registrations = append(o.registrations, r)
	}
	return nil
}

func (o *indexerOptions) peerList() []string {
	return strings.FieldsFunc(o.peers, func(c rune) bool { return c == ',' })
}

// registration parses one element of --workers.
func (o *indexerOptions) registration(worker string) (r indexerapi.Registration, err error) {
	name, address, ok := strings.Cut(worker, "=")
	instance, ranked, hasRank := strings.Cut(name, ":")
	id, err := strconv.ParseUint(instance, 10, 64)
	rank := uint64(0)
	if hasRank && err == nil {
		rank, err = strconv.ParseUint(ranked, 10, 32)
	}
	if !ok || err != nil {
		return r, fmt.Errorf("%q must look like INSTANCE[:RANK]=tcp://HOST:PORT, both numbers decimal", worker)
	}
	rank32 := uint32(rank)
	return indexerapi.Registration{
		InstanceID: &id,
		Rank:       &rank32,
		Endpoint:   &address,
		Model:      &o.model,
		Group:      &o.group,
		BlockSize:  &o.blockSize,
	}, nil
}

// warmUpTimeout bounds how long the start waits for --peers.
const warmUpTimeout = 10 * time.Second

// runIndexer runs the service until SIGTERM or SIGINT.
func runIndexer(o *indexerOptions) error {
	m := metrics.New()
	log := o.Logger(m)
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()

	o.logStart("indexer", log)
	limitMemory(memlimit.FromCgroup, m, log)
	index, err := indexer.New(indexer.Config{MaxBytes: o.indexBytes(debug.SetMemoryLimit(-1))})
	if err != nil {
		return err
	}
	workers := pool.New(log)
	events, err := feed.New(feed.Config{}, workers, index, m, log)
	if err != nil {
		return err
	}
	defer events.Close()
	peers := o.peerList()
	if len(peers) > 0 {
		events.Hold()
	}
	workers.Watch(events)
	workers.OnLeave(index.Forget)
	registry := indexerapi.NewRegistry(workers, index, events, log)
	for _, r := range o.registrations {
		if err := registry.Register(r); err != nil {
			return fmt.Errorf("--workers: %w", err)
		}
	}
	for _, peer := range peers {
		if err := registry.AddPeer(peer); err != nil {
			return fmt.Errorf("--peers: %w", err)
		}
	}
	if len(peers) > 0 {
		warm, cancel := context.WithTimeout(ctx, warmUpTimeout)
		registry.WarmUp(warm, peers, "")
		cancel()
	}

	mux := http.NewServeMux()
	registry.Handle(mux)
	mux.Handle("GET /metrics", metricsPage(m, promhttp.HandlerOpts{}))
	indexerGauges(m, registry, events, index)
	return o.serve(ctx, "the indexer's requests", api.Counted(mux, m.NewIndexerService()), m, log)
}

// indexerGauges exports the counts of the registry, the feed and the index.
func indexerGauges(m *metrics.Metrics, registry *indexerapi.Registry, events *feed.Feed, index *indexer.Index) {
	index.Export(m)
	for _, status := range []string{"active", "pending"} {
		m.GaugeFunc(
			metrics.IndexerListeners,
			metrics.IndexerListenersHelp,
			prometheus.Labels{"status": status},
			func() float64 {
				active, pending := events.Subscriptions()
				if status == "active" {
					return float64(active)
				}
				return float64(pending)
			},
		)
	}
}
