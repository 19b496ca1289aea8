package zmqsub

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// digestSeed is random: digests are comparable within this process only.
var digestSeed = maphash.MakeSeed()

// burst is how many messages are taken in a row before the connection's state and the end of the subscription are
// checked again.
const burst = 1024

// coalesceDelay is how long a subscription in dense traffic waits before it receives more. All messages that come
// meanwhile cost one wake-up together; wake-ups are most of the cost of receiving.
const coalesceDelay = 100 * time.Microsecond

// run serves the subscription until it is stopped. No other goroutine uses its sockets or calls its handler.
func (s *Subscription) run() {
	defer func() {
		s.live.unmonitor()
		s.live.close()
		s.monitor.close()
	}()
	pause := time.NewTimer(time.Hour)
	defer pause.Stop()
	defer s.revive.Stop()
	defer s.again.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-s.live.ready:
			if s.takeLive(burst) > 1 {
				pause.Reset(coalesceDelay)
				select {
				case <-pause.C:
				case <-s.stop:
				}
			}
		case <-s.monitor.ready:
			s.followConnection()
		case <-s.again.C:
			s.runReplay()
		case <-s.revive.C:
			// libzmq gave up the endpoint: connect again. The queue must be empty before: libzmq aborts the process if
			// a socket is read in the middle of a message whose connection was removed (zeromq/libzmq#2163).
			for s.takeLive(burst) == burst {
			}
			// The only possible error of Disconnect is that the connection is gone already. Connect cannot fail:
			// Subscribe has connected to this endpoint before.
			if !s.cut {
				_ = s.live.Disconnect(s.config.Endpoint)
			}
			s.cut = false
			_ = s.live.Connect(s.config.Endpoint)
		}
	}
}

// stopped reports whether the subscription must end.
func (s *Subscription) stopped() bool {
	select {
	case <-s.stop:
		return true
	default:
		return false
	}
}

// takeLive handles up to n live messages and returns their number. If it returns n, more may wait.
func (s *Subscription) takeLive(n int) (taken int) {
	for range n {
		if s.stopped() {
			return taken
		}
		// Handle a new connection before its messages. While there is a connection, the monitor's token reports a
		// change early enough; reading the monitor costs a system call.
		if !s.live.buffered() && (!s.connected || len(s.monitor.ready) > 0) {
			s.followConnection()
		}
		frames, ok, err := s.live.receive()
		if err != nil || !ok { // an error means that the context was terminated
			if s.sequence.awaitsLive() && time.Since(s.replayed) > s.hub.timing.catchUp {
				s.sequence.onDrained()
			}
			return taken
		}
		s.onLive(frames)
		taken++
	}
	s.live.signal()
	return taken
}

// onLive handles a live message: frames topic, number, payload. If Config.Publisher is set, its id follows the topic.
func (s *Subscription) onLive(frames [][]byte) {
	if publisher := s.config.Publisher; len(publisher) > 0 {
		if len(frames) != 4 {
			s.malformed("live message of %s frames, want 4", frameCount(frames))
			return
		}
		if !bytes.Equal(frames[1], publisher) {
			s.malformed("live message of publisher %x, want %x", frames[1], publisher)
			return
		}
		frames = append(frames[:1], frames[2:]...)
	}
	if len(frames) != 3 {
		s.malformed("live message of %s frames, want 3", frameCount(frames))
		return
	}
	seq, ok := parseSeq(frames[1])
	if !ok {
		s.malformed("live message with a number of %d bytes, want 8", len(frames[1]))
		return
	}
	st := s.sequence.onLive(seq)
	if st.replay {
		s.apply(step{restart: st.restart}, seq, nil, nil, 0)
		s.runReplay()
		st = s.sequence.onSettled(seq)
	}
	s.apply(st, seq, frames[0], frames[2], s.digest(frames[2]))
}

// apply reports a step to the handler, unless the subscription was closed.
func (s *Subscription) apply(st step, seq uint64, topic, payload []byte, digest uint64) {
	if !s.released() {
		return
	}
	if st.restart {
		s.handler.Restart()
	}
	if st.gap {
		s.handler.Gap(st.expect, seq)
	}
	if st.deliver {
		s.handler.Message(seq, topic, payload)
		s.sequence.delivered(seq, digest)
	}
}

func (s *Subscription) malformed(format string, args ...any) {
	if s.released() {
		s.handler.Malformed(fmt.Errorf("zmqsub: "+format, args...))
	}
}

// digest returns the payload's digest, to compare it with a replay; 0 if there are no replays.
func (s *Subscription) digest(payload []byte) uint64 {
	if !s.sequence.replays {
		return 0
	}
	return maphash.Bytes(digestSeed, payload)
}

// followConnection handles the events of the live connection.
func (s *Subscription) followConnection() {
	s.takeEvents()
	for len(s.unhandled) > 0 && !s.stopped() {
		c := s.unhandled[0]
		s.unhandled = s.unhandled[1:]
		s.onConnection(c)
	}
}

// disconnects reports whether the live connection has ended and followConnection has not handled it yet.
func (s *Subscription) disconnects() bool {
	s.takeEvents()
	return slices.ContainsFunc(s.unhandled, func(c change) bool {
		return c.event != zmq.EVENT_CONNECTED && c.event != zmq.EVENT_CONNECT_RETRIED &&
			c.event != zmq.EVENT_HANDSHAKE_SUCCEEDED
	})
}

// takeEvents reads the monitor's events of the live connection.
func (s *Subscription) takeEvents() {
	for {
		frames, ok, err := s.monitor.receive()
		if err != nil || !ok {
			return
		}
		// The first frame has the event's number, 16 bits in the machine's byte order, and a value of 32 bits: for a
		// connection, its descriptor.
		if len(frames[0]) < 6 {
			continue
		}
		c := change{event: zmq.Event(binary.NativeEndian.Uint16(frames[0]))}
		switch c.event {
		case zmq.EVENT_CONNECTED:
			// libzmq may report it after the handshake, because another of its threads does.
			s.live.countFor(int(int32(binary.NativeEndian.Uint32(frames[0][2:]))))
		case zmq.EVENT_CONNECT_RETRIED:
		case zmq.EVENT_HANDSHAKE_SUCCEEDED:
			if !guarded() {
				c.cut = errors.New(
					"zmqsub: libzmq does not read its connections through kvepp's guard, which bounds their memory: " +
						"this build of kvepp cannot subscribe",
				)
			}
		default:
			s.seenCut, c.cut = s.live.cutAfter(s.seenCut)
		}
		s.unhandled = append(s.unhandled, c)
	}
}

// change is one event of the live connection.
type change struct {
	event zmq.Event
	cut   error // why kvepp ends or ended the connection; nil: it does not
}

// onConnection handles a change.
func (s *Subscription) onConnection(c change) {
	if s.cut {
		return // a late event of the connection that was cut
	}
	s.revive.Stop()
	switch {
	case c.cut != nil:
		s.cutOff(c.cut)
	case c.event == zmq.EVENT_CONNECTED, c.event == zmq.EVENT_CONNECT_RETRIED:
	case c.event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
		if s.connected {
			return
		}
		s.connected, s.since = true, time.Now()
		s.handler.Connected()
		if len(s.config.Publisher) == 0 { // an id shows that it is the same publisher
			s.sequence.onReconnect()
		}
		if s.replayDebt <= s.freeReplayDebt() {
			s.noReplayUntil = time.Time{} // it may be another publisher
		}
		s.again.Reset(s.hub.timing.secondReplay)
		s.runReplay()
		if s.sequence.publisher == publisherUnverified {
			s.doubt()
		}
	default:
		s.disconnected()
		if !s.sequence.replays && len(s.config.Publisher) == 0 {
			s.doubt()
		}
		s.revive.Reset(s.hub.timing.revive)
	}
}

// doubt ends the epoch because the connection did.
func (s *Subscription) doubt() {
	if st := s.sequence.onDoubt(); st.restart {
		s.apply(st, 0, nil, nil, 0)
	}
}

func (s *Subscription) disconnected() {
	if s.connected {
		s.connected = false
		s.handler.Disconnected()
	}
}

// cutOff disconnects a publisher that exceeded a bound, for a while. The next connection begins a new epoch.
func (s *Subscription) cutOff(why error) {
	if s.connected && time.Since(s.since) > s.hub.timing.cutPauseMax {
		s.cutPause = s.hub.timing.cutPause
	}
	for { // empty the queue before Disconnect; run says why
		if _, ok, err := s.live.receive(); !ok || err != nil || s.stopped() {
			break
		}
	}
	_ = s.live.Disconnect(s.config.Endpoint)
	s.cut = true
	s.sequence = sequence{replays: s.sequence.replays}
	s.again.Stop()
	s.disconnected()
	if s.released() {
		s.handler.Cut(why)
	}
	s.revive.Reset(s.cutPause)
	s.cutPause = min(2*s.cutPause, s.hub.timing.cutPauseMax)
}

// released waits until Config.Hold is closed. It returns false if the subscription ends meanwhile.
func (s *Subscription) released() bool {
	if s.config.Hold == nil {
		return !s.stopped()
	}
	if !s.wait(s.config.Hold) {
		return false
	}
	s.config.Hold = nil
	return true
}

// wait waits for until, and bounds the bytes of live messages that wait meanwhile. It returns false if the subscription
// ends.
func (s *Subscription) wait(until <-chan struct{}) bool {
	watch := time.NewTicker(s.hub.timing.watch)
	defer watch.Stop()
	for {
		select {
		case <-until:
			return true
		case <-s.stop:
			return false
		case <-watch.C:
			s.live.bound()
		}
	}
}

// parseSeq reads a message's number: 8 bytes, big-endian.
func parseSeq(frame []byte) (seq uint64, ok bool) {
	if len(frame) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(frame), true
}

func frameCount(frames [][]byte) string {
	if len(frames) == maxFrames {
		return fmt.Sprintf("%d or more", maxFrames)
	}
	return fmt.Sprint(len(frames))
}
