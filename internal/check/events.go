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

// note applies f under the lock and wakes the waiting goroutines.
func (h *eventRecorder) note(f func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	f()
	close(h.changed)
	h.changed = make(chan struct{})
}

// wait waits until holds returns true, and returns false if ctx ends first. It calls holds under the lock.
func (h *eventRecorder) wait(ctx context.Context, holds func() bool) bool {
	for {
		h.mu.Lock()
		is, changed := holds(), h.changed
		h.mu.Unlock()
		if is {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (h *eventRecorder) blockSize() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.normalizer.Traits().BlockSize
}

// Message records a batch.
func (h *eventRecorder) Message(_ uint64, _, payload []byte) {
	h.note(func() {
		h.messages++
		if err := kvblock.DecodeBatch(payload, &h.batch); err != nil {
			h.malformed = err
			return
		}
		if h.batch.HasRank && h.batch.Rank != h.rank {
			rank := h.batch.Rank
			h.otherRank = &rank
		}
		h.operations = h.normalizer.Normalize(&h.batch, h.operations[:0])
		for i := range h.operations {
			if h.operations[i].Kind == kvblock.OpStored {
				h.stores++
			}
		}
	})
}

// The other callbacks of a subscription record only what a short look needs.

func (h *eventRecorder) Gap(uint64, uint64) {}
func (h *eventRecorder) Restart()           {}
func (h *eventRecorder) Replayed(outcome zmqsub.Replay, _ int) {
	h.note(func() { h.replay = outcome })
}
func (h *eventRecorder) Cut(error)           {} // Disconnected records it
func (h *eventRecorder) Malformed(err error) { h.note(func() { h.malformed = err }) }
func (h *eventRecorder) Connected()          { h.note(func() { h.connected = true }) }
func (h *eventRecorder) Disconnected()       { h.note(func() { h.connected = false }) }

// askEvents subscribes to the worker's events for a short time, and sends the probe meanwhile.
func (q *workerCheck) askEvents(ctx context.Context) {
	address, replay := q.w.KVEventsAddress(), q.w.KVReplayAddress()
	heard := newEventRecorder(q.w.Rank)
	if q.WithoutEvents {
		q.found(AboutEvents, OK, "", "not used: kvepp predicts the worker's cache from the requests that it sends")
		q.probe(ctx, heard)
		return
	}
	if address == "" {
		channel, there := q.w.EventChannel()
		switch {
		case q.w.Role == pool.Decode:
			q.found(AboutEvents, OK, "", "a decode worker sends no events about prompts")
		case there:
			q.found(
				AboutEvents,
				Unknown,
				"",
				"sent over Dynamo's event plane (%s), which kvepp check does not read",
				channel.Transport(),
			)
		default:
			q.found(
				AboutEvents,
				Wrong,
				"set kvEvents in the endpoints file, --kv-events-port or the Pod's annotation; and start the engine "+
					"with "+
					eventsFix[q.engine],
				"no event address, so kvepp does not know the worker's cache",
			)
		}
		q.probe(ctx, heard)
		return
	}
	s, err := q.Hub.Subscribe(
		zmqsub.Config{Endpoint: address, ReplayEndpoint: replay, Topic: q.w.KVTopic, ReplayTimeout: q.Wait},
		heard,
	)
	if err != nil {
		q.found(AboutEvents, Wrong, "correct the address", "%s: %v", address, err)
		q.probe(ctx, heard)
		return
	}
	defer s.Close()
	within, cancel := q.bounded(ctx)
	connected := heard.wait(within, func() bool { return heard.connected })
	cancel()
	switch q.eventsMissing = !connected; {
	case connected:
	case q.accepts(ctx, address):
		q.found(
			AboutEvents,
			Wrong,
			"write the port of the engine's KV events, not that of its HTTP server or of its replay socket "+
				"(kvEvents, --kv-events-port or the Pod's annotation)",
			"%s accepts connections, but publishes no KV events",
			address,
		)
	default:
		q.found(
			AboutEvents,
			Wrong,
			"start the engine with "+eventsFix[q.engine]+"; check that its event port is open and is the one in "+
				"kvEvents, --kv-events-port or the Pod's annotation",
			"no publisher answers at %s",
			address,
		)
	}
	q.probe(ctx, heard)
	if connected {
		within, cancel = context.WithTimeout(ctx, q.patience())
		spoke := heard.wait(
			within,
			func() bool { return heard.stores > 0 || heard.malformed != nil || heard.otherRank != nil },
		)
		cancel()
		q.reportEvents(heard, address, spoke)
	}
	q.reportReplay(ctx, heard, connected, replay)
}

// accepts reports whether something listens at a ZMQ address over TCP.
func (q *workerCheck) accepts(ctx context.Context, address string) bool {
	at, ok := strings.CutPrefix(address, "tcp://")
	if !ok {
		return false
	}
	ctx, cancel := q.bounded(ctx)
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

func (q *workerCheck) reportEvents(heard *eventRecorder, address string, spoke bool) {
	heard.mu.Lock()
	defer heard.mu.Unlock()
	switch {
	case heard.malformed != nil:
		q.found(
			AboutEvents,
			Wrong,
			"check that this is the engine's event port",
			"%s sends a message that is not a KV event: %v",
			address,
			heard.malformed,
		)
	case heard.otherRank != nil:
		q.found(
			AboutEvents,
			Wrong,
			"correct dataParallelStartRank or kvEvents",
			"%s announces rank %d",
			address,
			*heard.otherRank,
		)
	case spoke:
		q.found(AboutEvents, OK, "", "%s announces blocks", address)
	case q.prompt != nil && q.prompt.err() == nil:
		q.found(
			AboutEvents,
			Wrong,
			"start the engine with "+eventsFix[q.engine]+"; check the event port and its topic, and that prefix "+
				"caching is on",
			"%s is connected, but sent no event for a prompt of %d tokens",
			address,
			q.prompt.second.answer.promptTokens,
		)
	default:
		q.found(
			AboutEvents,
			Unknown,
			"use --probe: it sends a prompt whose blocks the worker must announce",
			"%s is connected; no event has come yet",
			address,
		)
	}
}

func (q *workerCheck) reportReplay(ctx context.Context, heard *eventRecorder, connected bool, replay string) {
	if replay == "" {
		q.found(
			AboutReplay,
			Unknown,
			`set "replay_endpoint" in the engine's --kv-events-config, and kvReplay, --kv-replay-port or the Pod's `+
				`annotation`,
			"no replay socket: after a lost event, or a restart of kvepp, kvepp does not know the worker's cache",
		)
		return
	}
	if !connected {
		return // the finding about events reports the problem
	}
	ctx, cancel := q.bounded(ctx)
	defer cancel()
	heard.wait(ctx, func() bool { return heard.replay != "" })
	heard.mu.Lock()
	defer heard.mu.Unlock()
	if heard.replay == zmqsub.ReplayComplete {
		q.found(AboutReplay, OK, "", "%s answers", replay)
		return
	}
	q.found(
		AboutReplay,
		Wrong,
		`set "replay_endpoint" in the engine's --kv-events-config; check that its port is this one and open`,
		"%s does not answer",
		replay,
	)
}
