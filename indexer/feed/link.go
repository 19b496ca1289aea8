package feed

import (
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// connectPatience is how long a subscription may take to connect before kvepp logs a warning.
const connectPatience = 10 * time.Second

// link tracks whether one subscription is connected, for log and metrics. Its methods are safe for concurrent use.
type link struct {
	connected func() // called on the first connection, and on the first one after each call of late
	// late is called once for each time without a connection that lasts connectPatience.
	late func(connecting time.Duration)

	mu     sync.Mutex // guards what follows, and is held during the two calls
	online bool
	quiet  bool        // do not report the next connection
	timer  *time.Timer // runs while there is no connection; nil before begin
	left   bool
}

// begin starts the timer of the first connection, unless there is one already.
func (c *link) begin() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.online {
		c.await()
	}
}

// await starts the timer. The caller holds c.mu.
func (c *link) await() {
	if c.timer != nil {
		c.timer.Stop()
	}
	if !c.left {
		c.timer = time.AfterFunc(connectPatience, c.expired)
	}
}

func (c *link) expired() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.online && !c.left {
		c.quiet = false
		c.late(connectPatience)
	}
}

// up notes a connection, down its end, and leave the end of the subscription. After leave nothing is called.
func (c *link) up() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.online = true; c.timer != nil {
		c.timer.Stop()
	}
	if !c.quiet && !c.left {
		c.quiet = true
		c.connected()
	}
}

func (c *link) down() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.online = false
	c.await()
}

func (c *link) leave() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.left = true; c.timer != nil {
		c.timer.Stop()
	}
}

func (c *link) isUp() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.online
}

// newLink returns a link that logs the state of a worker's subscription.
func (f *Feed) newLink(w pool.Worker) *link {
	name, address := w.String(), f.eventsAddress(&w)
	return &link{
		connected: func() { f.log.Info("connected to a worker's KV events", "worker", name, "address", address) },
		late: func(connecting time.Duration) {
			f.log.Warn(
				"kvepp cannot connect to a worker's KV events, and learns nothing of its cache until it can. Is the "+
					"address right, can kvepp reach it, and does the engine publish events?",
				"worker",
				name,
				"address",
				address,
				"connecting_for",
				connecting,
				"engine_flag",
				engineFlag(f.config.Engine),
			)
		},
	}
}

// eventsAddress returns the source of a worker's KV events, for log lines. It contains no password.
func (f *Feed) eventsAddress(w *pool.Worker) string {
	c, ok := w.EventChannel()
	switch {
	case !ok:
		return w.KVEventsAddress()
	case c.Transport() == "zmq":
		return c.ZMQ + c.Brokers
	}
	return "NATS subject " + c.Subject
}

// Subscription is the state of one worker's subscription.
type Subscription struct {
	Connected bool
	LastEvent time.Time // when the last KV event was applied; zero: none yet
}

// Subscription returns the state of a worker's subscription; false if it has none.
func (f *Feed) Subscription(w kvblock.Worker) (Subscription, bool) {
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	f.mu.Unlock()
	if !ok {
		return Subscription{}, false
	}
	state := Subscription{Connected: s.link.isUp()}
	if at := s.lastEvent.Load(); at != 0 {
		state.LastEvent = time.Unix(0, at)
	}
	return state, true
}
