package zmqsub

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// digestSeed is random: digests are comparable within this process only.
var digestSeed = maphash.MakeSeed()

// burst is how many messages are taken in a row before the connection's state and the end of the subscription are
// checked again.
const burst = 1024

// coalesceDelay is how long a relay in dense traffic waits before it reads more. All messages that come meanwhile cost
// one wake-up together; wake-ups are most of the cost of receiving.
const coalesceDelay = 100 * time.Microsecond

// run serves the subscription until it is stopped. No other goroutine uses its sockets or calls its handler.
func (s *Subscription) run() {
	defer s.again.Stop()
	t := &s.hub.timing
	pause := t.reconnect
	for !s.stopped() {
		next := min(2*pause, t.reconnectMax)
		live, err := s.hub.connect(s.stop, zmq.SUB, s.config.Endpoint, &s.config, t.connect)
		if err == nil {
			s.live = live
			connected, lasted := s.serve()
			cut := live.cut()
			live.close()
			if connected {
				pause, next = t.reconnect, t.reconnect
			}
			if cut != nil {
				if connected && lasted > t.cutPauseMax {
					s.cutPause = t.cutPause
				}
				pause, next = s.cutPause, t.reconnect
				s.cutPause = min(2*s.cutPause, t.cutPauseMax)
			}
			s.lost(connected, cut)
		}
		wait := time.NewTimer(pause)
		select {
		case <-wait.C:
		case <-s.stop.Done():
		}
		wait.Stop()
		pause = next
	}
}

// serve handles one connection until it ends. connected says whether the handshake succeeded, and lasted how long the
// connection lasted after it.
func (s *Subscription) serve() (connected bool, lasted time.Duration) {
	select {
	case <-s.live.greeted:
	case <-s.live.ended:
		select {
		case <-s.live.greeted:
		default:
			return false, 0
		}
	case <-s.stop.Done():
		return false, 0
	}
	since := time.Now()
	s.connect()
	for {
		select {
		case <-s.stop.Done():
			return true, time.Since(since)
		case <-s.live.ready:
			s.takeLive(burst)
		case <-s.again.C:
			s.runReplay()
		case <-s.live.ended:
			for s.live.cut() == nil && s.takeLive(burst) == burst {
			}
			return true, time.Since(since)
		}
	}
}

// stopped reports whether the subscription must end.
func (s *Subscription) stopped() bool { return s.stop.Err() != nil }

// takeLive handles up to n live messages and returns their number. If it returns n, more may wait.
func (s *Subscription) takeLive(n int) (taken int) {
	for range n {
		if s.stopped() {
			return taken
		}
		frames, ok := s.live.receive()
		if !ok {
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
	if !bytes.HasPrefix(frames[0], []byte(s.config.Topic)) {
		return // publishers filter topics, but need not
	}
	if s.config.Many {
		if len(frames) != 4 || len(frames[1]) != 8 || len(frames[2]) != 8 {
			s.malformed("live message of %d frames, want 4 with an id and a number of 8 bytes", len(frames))
			return
		}
		s.handler.Message(binary.BigEndian.Uint64(frames[2]), frames[1], frames[3])
		return
	}
	if publisher := s.config.Publisher; len(publisher) > 0 {
		if len(frames) != 4 {
			s.malformed("live message of %d frames, want 4", len(frames))
			return
		}
		if !bytes.Equal(frames[1], publisher) {
			s.malformed("live message of publisher %x, want %x", frames[1], publisher)
			return
		}
		frames = append(frames[:1], frames[2:]...)
	}
	if len(frames) != 3 {
		s.malformed("live message of %d frames, want 3", len(frames))
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
		st = s.sequence.afterReplay(seq)
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

// connect handles the success of the handshake.
func (s *Subscription) connect() {
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
}

// lost handles the end of a connection. After a cut, the next connection begins a new epoch.
func (s *Subscription) lost(connected bool, cut error) {
	s.again.Stop()
	if s.stopped() {
		return
	}
	if connected {
		s.handler.Disconnected()
	}
	switch {
	case cut != nil:
		s.sequence = sequence{replays: s.sequence.replays}
		if s.released() {
			s.handler.Cut(cut)
		}
	case connected && !s.sequence.replays && len(s.config.Publisher) == 0:
		s.doubt()
	}
}

// doubt ends the epoch because the connection did.
func (s *Subscription) doubt() {
	if st := s.sequence.onDoubt(); st.restart {
		s.apply(st, 0, nil, nil, 0)
	}
}

// released waits until Config.Hold is closed. It returns false if the subscription ends meanwhile.
func (s *Subscription) released() bool {
	if s.config.Hold == nil {
		return !s.stopped()
	}
	select {
	case <-s.config.Hold:
		s.config.Hold = nil
		return true
	case <-s.stop.Done():
		return false
	}
}

// parseSeq reads a message's number: 8 bytes, big-endian.
func parseSeq(frame []byte) (seq uint64, ok bool) {
	if len(frame) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(frame), true
}
