package check

import (
	"context"
	"net"
	"strings"
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// eventRecorder records what a worker's event socket sends.
type eventRecorder struct {
	rank uint32

	mu         sync.Mutex // guards all below
	changed    chan struct{}
	connected  bool
	messages   int
	stores     int
	otherRank  *uint32
	malformed  error
	replay     zmqsub.Replay // "": no result yet
	normalizer *kvblock.Normalizer
	batch      kvblock.Batch
	operations []kvblock.Operation
}

func newEventRecorder(rank uint32) *eventRecorder {
	return &eventRecorder{rank: rank, changed: make(chan struct{}), normalizer: kvblock.NewNormalizer(0)}
}

// update applies f under the lock and wakes the waiting goroutines.
func (r *eventRecorder) update(f func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f()
	close(r.changed)
	r.changed = make(chan struct{})
}

// wait waits until holds returns true, and returns false if ctx ends first. It calls holds under the lock.
func (r *eventRecorder) wait(ctx context.Context, holds func() bool) bool {
	for {
		r.mu.Lock()
		done, changed := holds(), r.changed
		r.mu.Unlock()
		if done {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (r *eventRecorder) blockSize() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.normalizer.Traits().BlockSize
}

// Message records a batch.
func (r *eventRecorder) Message(_ uint64, _, payload []byte) {
	r.update(func() {
		r.messages++
		if err := kvblock.DecodeBatch(payload, &r.batch); err != nil {
			r.malformed = err
			return
		}
		if r.batch.HasRank && r.batch.Rank != r.rank {
			rank := r.batch.Rank
			r.otherRank = &rank
		}
		r.operations = r.normalizer.Normalize(&r.batch, r.operations[:0])
		for i := range r.operations {
			op := &r.operations[i]
			if op.Kind == kvblock.OpStored || op.Kind == kvblock.OpDropped && op.Event == kvblock.BlockStored &&
				(op.Reason == kvblock.DropUnplaced || op.Reason == kvblock.DropNonMainAttention) {
				r.stores++ // of a model without full attention too, whose blocks kvepp may not know
			}
		}
	})
}

// The other callbacks of a subscription record only what a short test needs.

func (r *eventRecorder) Gap(uint64, uint64) {}
func (r *eventRecorder) Restart()           {}
func (r *eventRecorder) Replayed(outcome zmqsub.Replay, _ int) {
	r.update(func() { r.replay = outcome })
}
func (r *eventRecorder) Cut(error)           {} // Disconnected records it
func (r *eventRecorder) Malformed(err error) { r.update(func() { r.malformed = err }) }
func (r *eventRecorder) Connected()          { r.update(func() { r.connected = true }) }
func (r *eventRecorder) Disconnected()       { r.update(func() { r.connected = false }) }

// askEvents subscribes to the worker's events for a short time, and sends the probe meanwhile.
func (q *workerCheck) askEvents(ctx context.Context) {
	address, replay := q.w.KVEventsAddress(), q.w.KVReplayAddress()
	events := newEventRecorder(q.w.Rank)
	if q.WithoutEvents {
		q.ok(AboutEvents, "not used: kvepp predicts the worker's cache from the requests that it sends")
		q.probe(ctx, events)
		return
	}
	if address == "" {
		channel, found := q.w.EventChannel()
		switch {
		case q.w.Role == pool.Decode:
			q.ok(AboutEvents, "a decode worker sends no events about prompts")
		case found:
			q.unknown(AboutEvents, "",
				"sent over Dynamo's event plane (%s), which kvepp check does not read. It has full attention's blocks "+
					"alone: for a hybrid model (sliding windows, chunks, states), predictions are exact only with "+
					"kvEvents, the engine's own socket", channel.Transport())
		default:
			q.wrong(AboutEvents,
				"set kvEvents in the endpoints file, --kv-events-port or the Pod's annotation; and start the engine "+
					"with "+eventsFix[q.engine], "no event address, so kvepp does not know the worker's cache")
		}
		q.probe(ctx, events)
		return
	}
	s, err := q.Hub.Subscribe(
		zmqsub.Config{Endpoint: address, ReplayEndpoint: replay, Topic: q.w.KVTopic, ReplayTimeout: q.Wait}, events)
	if err != nil {
		q.wrong(AboutEvents, "correct the address", "%s: %v", address, err)
		q.probe(ctx, events)
		return
	}
	defer s.Close()
	within, cancel := q.withTimeout(ctx)
	connected := events.wait(within, func() bool { return events.connected })
	cancel()
	switch q.eventsMissing = !connected; {
	case connected:
	case q.acceptsConnections(ctx, address):
		q.wrong(AboutEvents,
			"write the port of the engine's KV events, not that of its HTTP server or of its replay socket "+
				"(kvEvents, --kv-events-port or the Pod's annotation)",
			"%s accepts connections, but publishes no KV events", address)
	default:
		q.wrong(AboutEvents,
			"start the engine with "+eventsFix[q.engine]+"; check that its event port is open and is the one in "+
				"kvEvents, --kv-events-port or the Pod's annotation", "no publisher answers at %s", address)
	}
	q.probe(ctx, events)
	if connected {
		within, cancel = context.WithTimeout(ctx, q.patience())
		announced := events.wait(within,
			func() bool { return events.stores > 0 || events.malformed != nil || events.otherRank != nil })
		cancel()
		q.reportEvents(events, address, announced)
	}
	q.reportReplay(ctx, events, connected, replay)
}

// acceptsConnections reports whether something listens at a ZMQ address over TCP.
func (q *workerCheck) acceptsConnections(ctx context.Context, address string) bool {
	at, ok := strings.CutPrefix(address, "tcp://")
	if !ok {
		return false
	}
	ctx, cancel := q.withTimeout(ctx)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", at)
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// patience is how long to wait for a first event. Without a probe a correct worker may send none.
func (q *workerCheck) patience() time.Duration {
	if q.prompt != nil && q.prompt.err() == nil {
		return q.Wait
	}
	return min(q.Wait, time.Second)
}

func (q *workerCheck) reportEvents(events *eventRecorder, address string, announced bool) {
	events.mu.Lock()
	defer events.mu.Unlock()
	switch {
	case events.malformed != nil:
		q.wrong(AboutEvents, "check that this is the engine's event port",
			"%s sends a message that is not a KV event: %v", address, events.malformed)
	case events.otherRank != nil:
		q.wrong(AboutEvents, "correct dataParallelStartRank or kvEvents",
			"%s announces rank %d", address, *events.otherRank)
	case announced:
		q.ok(AboutEvents, "%s announces blocks%s", address, otherLayers(events.normalizer.Traits()))
	case q.prompt != nil && q.prompt.err() == nil:
		q.wrong(AboutEvents,
			"start the engine with "+eventsFix[q.engine]+"; check the event port and its topic, and that prefix "+
				"caching is on", "%s is connected, but sent no event for a prompt of %d tokens", address,
			q.prompt.second.response.promptTokens)
	default:
		q.unknown(AboutEvents, "use --probe: it sends a prompt whose blocks the worker must announce",
			"%s is connected; no event has come yet", address)
	}
}

// otherLayers says what the events show of layers without full attention.
func otherLayers(t kvblock.Traits) string {
	switch {
	case t.UpperBound && t.BlockSize == 0:
		return ", but none of full attention, so kvepp does not know the worker's cache"
	case t.UpperBound:
		return "; the model also has layers without full attention, and they do not tell enough of these: " +
			"predictions are an upper bound"
	case t.Classes.Len() > 0:
		return " of a hybrid model: beside full attention, " + t.Classes.String()
	}
	return ""
}

func (q *workerCheck) reportReplay(ctx context.Context, events *eventRecorder, connected bool, replay string) {
	if replay == "" {
		q.unknown(AboutReplay,
			`set "replay_endpoint" in the engine's --kv-events-config, and kvReplay, --kv-replay-port or the Pod's `+
				`annotation`,
			"no replay socket: after a lost event, or a restart of kvepp, kvepp does not know the worker's cache")
		return
	}
	if !connected {
		return // the finding about events reports the problem
	}
	ctx, cancel := q.withTimeout(ctx)
	defer cancel()
	events.wait(ctx, func() bool { return events.replay != "" })
	events.mu.Lock()
	defer events.mu.Unlock()
	if events.replay == zmqsub.ReplayComplete {
		q.ok(AboutReplay, "%s answers", replay)
		return
	}
	q.wrong(AboutReplay,
		`set "replay_endpoint" in the engine's --kv-events-config; check that its port is this one and open`,
		"%s does not answer", replay)
}
