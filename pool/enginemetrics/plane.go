package enginemetrics

import (
	"cmp"
	"encoding/binary"
	"time"

	"kvepp/kvblock"
	"kvepp/natssub"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// loadTopic begins every message of a publisher of loads.
const loadTopic = "kv_metrics"

// instanceRank is how Dynamo's event plane names a worker.
type instanceRank struct {
	instance uint64
	rank     uint32
}

// heard is a worker of whose KV blocks the event plane tells.
type heard struct {
	member
	blocks int // that it has
}

// listen subscribes to the loads of the workers in s that show no page, and ends what is not needed any more. Only
// Run's goroutine calls it.
func (g *Gauges) listen(s *pool.Snapshot) {
	wanted := map[pool.EventChannel]bool{}
	workers := map[instanceRank]heard{}
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
		workers[instanceRank{w.InstanceID, w.Rank}] = heard{
			member{w.Worker, g.slot(w.Worker).generation, w.Rank, w.String(), w.Address},
			w.TotalKVBlocks,
		}
	}
	g.heard = workers
	g.mu.Unlock()
	for c, leave := range g.channels {
		if !wanted[c] {
			leave() // without the lock: it waits for a message that is being taken in
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
			g.complain(l.String(), "", unreachable, err)
			continue
		}
		g.channels[c] = leave
	}
}

// subscribe gives l what is said at one place, until leave is called.
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
	// maxLoadBytes bounds a message, which has about 200.
	maxLoadBytes = 64 << 10
	// maxPendingLoads bounds the bytes of one NATS subject's messages that wait.
	maxPendingLoads = 1 << 20
)

// loads takes in what is said at one place, by one publisher or, over NATS, by all of a Dynamo path. That messages were
// lost, or that another process sends them now, is no matter: each says all there is to say.
type loads struct {
	*Gauges
	from string
}

func (l *loads) String() string { return "loads on Dynamo's event plane at " + l.from }

// Message notes one worker's load, as publishers' own sockets frame it.
func (l *loads) Message(_ uint64, _, payload []byte) {
	envelope, err := kvblock.UnframePlane(payload)
	if err != nil {
		l.Malformed(err)
		return
	}
	l.envelope(envelope)
}

// envelope notes one worker's load.
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
	w, there := g.heard[instanceRank{load.Instance, load.Rank}]
	if !there {
		return
	}
	if g.slot(w.worker).generation != w.generation {
		return
	}
	said := nothingTold
	said[usage] = min(float64(load.UsedBlocks)/float64(w.blocks), 1)
	g.tell(w.worker, said, time.Now())
	g.outcomes[ok].Add(1)
}

// Malformed counts what is no load.
func (l *loads) Malformed(err error) {
	l.outcomes[malformed].Add(1)
	l.complain(l.String(), "", malformed, err)
}

func (*loads) Gap(expected, got uint64)        {}
func (*loads) Restart()                        {}
func (*loads) Replayed(_ zmqsub.Replay, _ int) {}

// Cut counts a connection that was ended because of what came on it.
func (l *loads) Cut(err error) { l.Malformed(err) }

func (*loads) Connected()    {}
func (*loads) Disconnected() {}

// stopListening ends all subscriptions.
func (g *Gauges) stopListening() {
	if g.hub != nil {
		g.hub.Close() // fails only if libzmq is broken, and the process ends
	}
	if g.nats != nil {
		g.nats.Close()
	}
}
