package gauges

import (
	"encoding/binary"
	"time"

	"kvepp/kvblock"
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

// listen subscribes to the loads of the workers in s that show no page, and ends what is not needed any more. Only Run's goroutine
// calls it.
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
			wanted[c] = true
		}
		workers[instanceRank{w.InstanceID, w.Rank}] = heard{member{w.Worker, g.slot(w.Worker).generation, w.Rank, w.String()}, w.TotalKVBlocks}
	}
	g.heard = workers
	g.mu.Unlock()
	for c, subscription := range g.channels {
		if !wanted[c] {
			subscription.Close() // without the lock: it waits for a message that is being taken in
			delete(g.channels, c)
		}
	}
	for c := range wanted {
		if g.channels[c] != nil {
			continue
		}
		subscription, err := g.subscribe(c)
		if err != nil {
			g.complain("loads on Dynamo's event plane at "+c.ZMQ, "", unreachable, err)
			continue
		}
		g.channels[c] = subscription
	}
}

// subscribe subscribes to one publisher of loads.
func (g *Gauges) subscribe(c pool.EventChannel) (*zmqsub.Subscription, error) {
	if g.hub == nil {
		hub, err := zmqsub.NewHub()
		if err != nil {
			return nil, err
		}
		g.hub = hub
	}
	return g.hub.Subscribe(zmqsub.Config{Endpoint: c.ZMQ, Topic: loadTopic, Publisher: binary.BigEndian.AppendUint64(nil, c.Publisher), MaxMessageBytes: maxLoadBytes},
		&loads{Gauges: g, from: c.ZMQ})
}

// maxLoadBytes bounds a message, which has about 200.
const maxLoadBytes = 64 << 10

// loads takes in what one publisher says. That messages were lost, or that another process sends them now, is no matter: each says
// all there is to say.
type loads struct {
	*Gauges
	from string
}

// Message notes one worker's load.
func (l *loads) Message(_ uint64, _, payload []byte) {
	var load kvblock.PlaneLoad
	envelope, err := kvblock.UnframePlane(payload)
	if err == nil {
		load, err = kvblock.DecodePlaneLoad(envelope)
	}
	if err != nil {
		l.Malformed(err)
		return
	}
	if !load.Told {
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
	l.complain("loads on Dynamo's event plane at "+l.from, "", malformed, err)
}

func (*loads) Gap(expected, got uint64)        {}
func (*loads) Restart()                        {}
func (*loads) Replayed(_ zmqsub.Replay, _ int) {}
func (*loads) Connected()                      {}
func (*loads) Disconnected()                   {}

// stopListening ends all subscriptions.
func (g *Gauges) stopListening() {
	if g.hub != nil {
		g.hub.Close() // fails only if libzmq is broken, and the process ends
	}
}
