package enginemetrics

import (
	"cmp"
	"encoding/binary"
	"strings"
	"time"

	"kvepp/internal/natssub"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/zmqsub"
)

// loadTopic and firstTopic are the prefixes of all messages of publishers of loads, and of notes of first tokens.
const (
	loadTopic  = "kv_metrics"
	firstTopic = "active_sequences_events"
)

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

// followChannels subscribes to the loads of the workers in s without a page and to all workers' notes of first tokens,
// and ends unused subscriptions. Only Run's goroutine calls it.
func (g *Gauges) followChannels(s *pool.Snapshot) {
	wanted := map[pool.EventChannel]bool{}
	workers := map[instanceRank]planeWorker{}
	g.mu.Lock()
	for i := range s.Workers {
		w := &s.Workers[i]
		reads := w.Role != pool.Encode && w.TotalKVBlocks > 0 && g.page(w) == ""
		for _, c := range w.LoadChannels {
			heard := c.Transport() == "zmq" || g.cfg.NATSServer != ""
			if heard && (reads || c.FirstTokens && g.cfg.FirstToken != nil) {
				wanted[c] = true
			}
		}
		if !reads || len(w.LoadChannels) == 0 {
			continue
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
		l := &loads{Gauges: g, from: cmp.Or(c.ZMQ, c.Brokers, c.Subject), firstTokens: c.FirstTokens}
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
	if c.Transport() == "nats" {
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
	of := zmqsub.Config{Topic: loadTopic, Publisher: binary.BigEndian.AppendUint64(nil, c.Publisher),
		MaxMessageBytes: maxLoadBytes}
	if c.FirstTokens {
		of.Topic = firstTopic
	}
	if c.Brokers != "" { // each passes on all messages; one that comes again changes nothing
		of.Topic, of.Publisher, of.Many = c.Subject, nil, true
	}
	var all []*zmqsub.Subscription
	leave = func() {
		for _, s := range all {
			s.Close()
		}
	}
	for address := range strings.SplitSeq(cmp.Or(c.ZMQ, c.Brokers), ";") {
		own := *l // subscriptions do not wait for one another
		own.from, of.Endpoint = address, address
		s, err := g.hub.Subscribe(of, &own)
		if err != nil {
			leave()
			return nil, err
		}
		all = append(all, s)
	}
	return leave, nil
}

const (
	// maxLoadBytes bounds a message. One has about 200 bytes, or 150 for each of at most 256 first tokens.
	maxLoadBytes = 64 << 10
	// maxPendingLoads bounds the waiting messages of one NATS subject, in bytes.
	maxPendingLoads = 1 << 20
)

// loads receives the messages of one channel, from one publisher or, over NATS and brokers, of a Dynamo path. Lost
// messages and restarts do not matter, because each message has the complete load.
type loads struct {
	*Gauges
	from        string
	firstTokens bool     // the messages are notes of these
	ids         [][]byte // scratch memory
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

// envelope stores one worker's load, or reports first tokens.
func (l *loads) envelope(data []byte) {
	if l.firstTokens {
		ids, err := kvblock.DecodePlaneFirstTokens(data, l.ids[:0])
		if err != nil {
			l.Malformed(err)
		}
		for l.ids = ids; len(ids) > 0; ids = ids[1:] {
			l.cfg.FirstToken(ids[0])
		}
		return
	}
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
