package main

import (
	"context"
	"fmt"
	"net/http"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/KimMachineGun/automemlimit/memlimit"
	"github.com/spf13/pflag"

	"kvepp/extproc"
	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router/budget"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/serve/dynamo/selector"
	"kvepp/serve/listen"
)

const selectHelp = `kvepp select chooses and reserves workers for prompts, over HTTP. Its clients send the requests to
the workers themselves. It replaces "python -m dynamo.select_service": the same requests and
responses.

Usage:       kvepp select [flags]
Example:     kvepp select --port 8092
             alias post="curl -H 'Content-Type: application/json'"
             post localhost:8092/workers -d '{"worker_id": 1, "endpoint": "http://10.0.0.7:8000",
               "block_size": 16, "kv_events_endpoint": "tcp://10.0.0.7:5557"}'
             post localhost:8092/select_and_reserve -d '{"selection_id": "a",
               "token_ids": [1, 2, 3]}'
             curl -X DELETE localhost:8092/reservations/a
Precedence:  flag, KVEPP_SELECT_<FLAG>, --config FILE, Dynamo's variable (in brackets), default
`

// selectOptions are the flags of "kvepp select".
type selectOptions struct {
	httpService

	affinitySeconds  uint64
	cacheSeconds     uint64
	reservationsSecs uint64
	ttlSecs          float64

	queue    queue.Config
	selector selector.Config
}

// selectPrefix separates kvepp's environment variables of these flags from those of "kvepp serve".
const selectPrefix = "select-"

func selectFlags(o *selectOptions) *pflag.FlagSet {
	f := newFlags("kvepp select")
	o.Web.AddFlags(f, 8092)
	f.Uint64Var(
		&o.cacheSeconds,
		"selection-cache-ttl-secs",
		120,
		"how many `SECONDS` kvepp keeps a selection that is not reserved yet",
	)
	f.IntVar(
		&o.selector.PendingEntries,
		"selection-cache-max-entries",
		4096,
		"kvepp keeps at most `N` selections that are not reserved yet; beyond that it drops the oldest",
	)
	f.IntVar(&o.selector.PendingBytes, "selection-cache-max-bytes", 256<<20, "most `BYTES` of unreserved selections")
	f.Uint64Var(
		&o.reservationsSecs,
		"active-request-expiry-secs",
		300,
		"`SECONDS` after which kvepp ends a reservation that its client has not ended",
	)
	o.selector.Scoring.AddWeightFlags(f)
	f.BoolVar(
		&o.selector.Events,
		"router-kv-events",
		true,
		"subscribe to the workers' KV events. Off: kvepp assumes that a worker caches the prompts it was sent, for "+
			"--router-ttl-secs",
	)
	f.Float64Var(
		&o.ttlSecs,
		"router-ttl-secs",
		120,
		"without events, how many `SECONDS` after its latest reservation a block is assumed to stay cached",
	)
	negatable(f, "router-kv-events")
	o.queue.AddFlags(f)
	o.bounds.AddFlags(f)
	f.Uint64Var(
		&o.affinitySeconds,
		"session-affinity-ttl-secs",
		0,
		"keep the reservations of a session (session_id) on one worker, until `SECONDS` after the latest one ended. "+
			"0: off",
	)
	o.logging.AddFlags(f, "")
	o.settingsFile.AddFlags(f)
	section(f, "Flags of kvepp select")
	flags.Retire(f, "threads", false) // of Dynamo's program; each worker has its own here
	documentEnvironment(f, selectPrefix)
	return f
}

// parseSelect reads the arguments, and then sets the remaining flags from the environment.
func parseSelect(o *selectOptions, args []string, getenv func(string) string) error {
	f := selectFlags(o)
	o.flags = f
	if err := parse(f, args, &o.Path, getenv); err != nil {
		return err
	}
	o.selector.Scoring.ApplyOverlapScoreWeight()
	if err := o.queue.Read(f, absentFlag); err != nil {
		return err
	}
	if err := o.queue.Validate(); err != nil {
		return err
	}
	o.selector.Queue = o.queue.Room()
	o.selector.Scoring.DecodeRole = true // for all roles of workers, as in dynamo.select_service
	if err := o.selector.Scoring.Validate(); err != nil {
		return err
	}
	if err := o.httpService.check(); err != nil {
		return err
	}
	limit := uint64(maxTTL / time.Second)
	switch {
	case o.cacheSeconds < 1 || o.cacheSeconds > limit:
		return fmt.Errorf("--selection-cache-ttl-secs %d: must be from 1 to a year, for example 120", o.cacheSeconds)
	case o.reservationsSecs < 1 || o.reservationsSecs > limit:
		return fmt.Errorf(
			"--active-request-expiry-secs %d: must be from 1 to a year, for example 300",
			o.reservationsSecs,
		)
	case o.affinitySeconds > limit || f.Lookup("session-affinity-ttl-secs").Changed && o.affinitySeconds == 0:
		return fmt.Errorf(
			"--session-affinity-ttl-secs %d: must be from 1 to %d, for example 600",
			o.affinitySeconds,
			limit,
		)
	case !(o.ttlSecs > 0 && o.ttlSecs <= maxTTL.Seconds()):
		return fmt.Errorf(
			"--router-ttl-secs %v: must be a positive number of seconds, at most a year, for example 120",
			o.ttlSecs,
		)
	case o.selector.PendingEntries < 1 || o.selector.PendingBytes < 1:
		return fmt.Errorf(
			"--selection-cache-max-entries %d, --selection-cache-max-bytes %d: must be at least 1, for example 4096 "+
				"and %d",
			o.selector.PendingEntries,
			o.selector.PendingBytes,
			256<<20,
		)
	}
	o.selector.PredictTTL = seconds(o.ttlSecs)
	o.selector.PendingTTL = time.Duration(o.cacheSeconds) * time.Second
	return nil
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
	book.Expiry = time.Duration(o.reservationsSecs) * time.Second
	workers.OnLeave(index.Forget)
	workers.OnLeave(book.Forget)
	if o.affinitySeconds > 0 {
		o.selector.Sessions = session.NewTable(session.Config{TTL: time.Duration(o.affinitySeconds) * time.Second})
		o.selector.Sessions.Export(m)
		workers.OnLeave(o.selector.Sessions.Forget)
	}
	service := selector.New(o.selector, workers, index, events, book, m.NewSelectionService(), log)

	mux := http.NewServeMux()
	mux.Handle("/", service.Handler())
	mux.Handle("GET /metrics", listen.MetricsPage(m))
	index.Export(m)
	book.Export(m)
	m.GaugeFunc(
		metrics.SelectionReservations,
		metrics.SelectionReservationsHelp,
		nil,
		func() float64 { return float64(service.Stats().Reservations) },
	)
	m.CounterFunc(
		metrics.SelectionExpired,
		metrics.SelectionExpiredHelp,
		nil,
		func() float64 { return float64(book.Expired()) },
	)
	m.GaugeFunc(
		metrics.SelectionWaiting,
		metrics.SelectionWaitingHelp,
		nil,
		func() float64 { return float64(service.Stats().Waiting) },
	)
	return o.Web.Serve(ctx, "selections", mux, m, log)
}
