package enginemetrics

import (
	"cmp"
	"encoding/binary"
	"time"

	"kvepp/internal/natssub"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// loadTopic is the prefix of all messages of a publisher of loads.
const loadTopic = "kv_metrics"

// instanceRank names a worker on Dynamo's event plane.
type instanceRank struct {
	instance uint64
	rank     uint32
}

// planeWorker is a worker whose load comes from the event plane.
type planeWorker struct {
	member
	blocks int // total KV blocks
}

// followChannels subscribes to the loads of the workers in s without a page, and ends unused subscriptions. Only Run's
// goroutine calls it.
func (g *Gauges) followChannels(s *pool.Snapshot) {
	wanted := map[pool.EventChannel]bool{}
	workers := map[instanceRank]planeWorker{}
	g.mu.Lock()
	for i := range s.Workers {
		w := &s.Workers[i]
		if len(w.LoadChannels) == 0 || w.Role == pool.Encode || w.TotalKVBlocks <= 0 || g.page(w) != "" {
			continue
		}
		for _, c := range w.LoadChannels {
			if c.ZMQ != "" || g.cfg.NATSServer != "" {
				wanted[c] = true
			}
		}
		workers[instanceRank{w.InstanceID, w.Rank}] = planeWorker{
			member{w.Worker, g.slot(w.Worker).generation, w.Rank, w.String(), w.Address},
			w.TotalKVBlocks,
		}
	}
	g.planeWorkers = workers
	g.mu.Unlock()
	for c, leave := range g.channels {
		if !wanted[c] {
			leave() // not under g.mu: it waits until the current message is processed
			delete(g.channels, c)
		}
	}
	for c := range wanted {
		if g.channels[c] != nil {
			continue
		}
		l := &loads{Gauges: g, from: cmp.Or(c.ZMQ, c.Subject)}
		leave, err := g.subscribe(c, l)
		if err != nil {
			g.logFailure(l.String(), "", unreachable, err)
			continue
		}
		g.channels[c] = leave
	}
}

// subscribe passes the messages of a channel to l until leave is called.
func (g *Gauges) subscribe(c pool.EventChannel, l *loads) (leave func(), err error) {
	if c.ZMQ == "" {
		if g.nats == nil {
			if g.nats, err = natssub.Connect(natssub.Config{Server: g.cfg.NATSServer, Purpose: "loads",
				Log: g.log}); err != nil {
				return nil, err
			}
		}
		s, err := g.nats.Subscribe(c.Subject, maxPendingLoads, l.envelope)
		if err != nil {
			return nil, err
		}
		return s.Close, nil
	}
	if g.hub == nil {
		if g.hub, err = zmqsub.NewHub(); err != nil {
			return nil, err
		}
	}
	s, err := g.hub.Subscribe(
		zmqsub.Config{
			Endpoint:        c.ZMQ,
			Topic:           loadTopic,
			Publisher:       binary.BigEndian.AppendUint64(nil, c.Publisher),
			MaxMessageBytes: maxLoadBytes,
		},
		l,
	)
	if err != nil {
		return nil, err
	}
	return s.Close, nil
}

const (
	// maxLoadBytes bounds a message, which has about 200 bytes.
	maxLoadBytes = 64 << 10
	// maxPendingLoads bounds the waiting messages of one NATS subject, in bytes.
	maxPendingLoads = 1 << 20
)

// loads receives the messages of one channel, from one publisher or, over NATS, from all of a Dynamo path. Lost
// messages and restarts do not matter, because each message has the complete load.
type loads struct {
	*Gauges
	from string
}

func (l *loads) String() string { return "loads on Dynamo's event plane at " + l.from }

// Message stores one worker's load, in the framing of a publisher's own socket.
func (l *loads) Message(_ uint64, _, payload []byte) {
	envelope, err := kvblock.UnframePlane(payload)
	if err != nil {
		l.Malformed(err)
		return
	}
	l.envelope(envelope)
}

// envelope stores one worker's load.
func (l *loads) envelope(data []byte) {
	load, err := kvblock.DecodePlaneLoad(data)
	if err != nil {
		l.Malformed(err)
		return
	}
	if !load.HasUsedBlocks {
		return
	}
	g := l.Gauges
	g.mu.Lock()
	defer g.mu.Unlock()
	w, known := g.planeWorkers[instanceRank{load.Instance, load.Rank}]
	if !known {
		return
	}
	if g.slot(w.worker).generation != w.generation {
		return
	}
	v := noValues
	v[usage] = min(float64(load.UsedBlocks)/float64(w.blocks), 1)
	g.storeValues(w.worker, v, time.Now())
	g.outcomes[ok].Add(1)
}

// Malformed counts an invalid message.
func (l *loads) Malformed(err error) {
	l.outcomes[malformed].Add(1)
	l.logFailure(l.String(), "", malformed, err)
}

func (*loads) Gap(expected, got uint64)        {}
func (*loads) Restart()                        {}
func (*loads) Replayed(_ zmqsub.Replay, _ int) {}

// Cut counts a connection that was closed because of its data.
func (l *loads) Cut(err error) { l.Malformed(err) }

func (*loads) Connected()    {}
func (*loads) Disconnected() {}

// closeChannels ends all subscriptions.
func (g *Gauges) closeChannels() {
	if g.hub != nil {
		g.hub.Close() // an error means that libzmq is broken; the process ends anyway
	}
	if g.nats != nil {
		g.nats.Close()
	}
}
