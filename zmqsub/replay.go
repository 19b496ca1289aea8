package zmqsub

import (
	"encoding/binary"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// runReplay asks the publisher for the messages that the sequence wants, and delivers them. Live messages meanwhile wait in
// the live socket's queue, whose high-water mark bounds them. It returns when the replay is complete, timed out, or the
// subscription was closed; the sequence knows what is still missing.
//
// Protocol: a DEALER sends ["", first number]; the answer is a message for each past one at or after it,
// ["", number, payload] or ["", topic, number, payload] (vLLM from 0.26), and at the end one with an empty payload.
// Source: vllm/distributed/kv_events.py.
func (s *Subscription) runReplay() {
	deadline := time.Now().Add(s.config.ReplayTimeout)
	for s.replayOnce(deadline) {
	}
}

// replayOnce runs one exchange, and says whether another must follow because the publisher turned out to be in a new life.
// In a new life nothing was delivered, so that the other cannot ask for a third.
func (s *Subscription) replayOnce(deadline time.Time) (again bool) {
	// A socket for each exchange: a late answer to one that timed out cannot be taken for an answer to the next.
	src, err := s.hub.connect(zmq.DEALER, s.config.ReplayEndpoint, &s.config, nil)
	if err != nil {
		s.malformed("cannot replay: %w", err)
		return false
	}
	defer src.close()
	s.replayMu.Lock()
	s.replay = src
	s.replayMu.Unlock()
	defer func() {
		s.replayMu.Lock()
		s.replay = nil
		s.replayMu.Unlock()
	}()
	// From here on stop wakes src; if it ran before, closed tells.
	if err := src.setDeadline(deadline); err != nil || s.closed.Load() {
		return false
	}
	request := binary.BigEndian.AppendUint64(nil, s.sequence.onReplayStart())
	if _, err := src.socket.SendMessageDontwait("", request); err != nil {
		s.malformed("cannot ask for a replay: %w", err)
		return false
	}
	// The error, if any, is that time is up or the subscription closed: the sequence knows what is missing.
	_ = src.read(func() bool {
		for !s.closed.Load() && time.Now().Before(deadline) {
			frames, ok, err := src.receive()
			if err != nil {
				return true
			}
			if !ok {
				return false
			}
			var done bool
			if done, again = s.onReplayed(frames); done {
				return true
			}
		}
		return true
	})
	return again
}

// onReplayed handles one message of a replay, and says whether it was the last, and whether to replay anew.
func (s *Subscription) onReplayed(frames [][]byte) (done, again bool) {
	var topic, number, payload []byte
	switch {
	case len(frames) == 3 && len(frames[0]) == 0:
		number, payload = frames[1], frames[2]
	case len(frames) == 4 && len(frames[0]) == 0:
		topic, number, payload = frames[1], frames[2], frames[3]
	default:
		s.malformed("replayed message of %s frames, want an empty one and 2 or 3 more", frameCount(frames))
		return false, false
	}
	if len(payload) == 0 {
		st := s.sequence.onReplayEnd()
		s.apply(st, 0, nil, nil, 0)
		return true, st.replay
	}
	seq, ok := parseSeq(number)
	if !ok {
		s.malformed("replayed message with a number of %d bytes, want 8", len(number))
		return false, false
	}
	digest := s.digest(payload)
	st := s.sequence.onReplayed(seq, digest)
	s.apply(st, seq, topic, payload, digest)
	return st.replay, st.replay
}
