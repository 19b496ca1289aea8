package zmqsub

import (
	"encoding/binary"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// Replay is the outcome of asking a publisher for past messages.
type Replay string

// The outcomes. Gap reports the messages that a replay did not bring.
const (
	ReplayComplete    Replay = "replayed"           // the publisher sent everything it has
	ReplayTimedOut    Replay = "replay_timed_out"   // no response, or no complete one, within ReplayTimeout
	ReplayUnreachable Replay = "replay_unreachable" // no connection
	ReplayCut         Replay = "replay_cut"         // the live connection ended; the next one causes another replay
	ReplaySkipped     Replay = "replay_skipped"     // put off, because a replay failed a moment ago
)

// lastSeq is the greatest accepted number of a replayed message. Publishers count from 0, and use the greatest numbers
// as markers.
const lastSeq = 1 << 62

// maxReplayTimeouts bounds the exchanges that one need for a replay causes, in ReplayTimeouts: a publisher whose
// responses never end must not block its live messages for ever.
const maxReplayTimeouts = 6

// runReplay asks the publisher for the messages that the sequence needs, and delivers them. Without a replay endpoint
// it does nothing. Live messages meanwhile wait in the live socket's queue, which is bounded (relay.go). It returns
// when the replay is complete, when it failed, or when the subscription was closed; the sequence knows what is still
// missing.
//
// An unreachable replay endpoint must not block live messages for long. Therefore a connection must come about within a
// second, and after a failure the next replay waits; it then asks for everything that was lost meanwhile. If a response
// stops in the middle, runReplay asks again from there, as long as that brings messages.
//
// Protocol: a DEALER sends ["", first number]; the response is a message for each past one at or after it,
// ["", number, payload] or ["", topic, number, payload] (vLLM from 0.26), and at the end one with an empty payload.
// Source: vllm/distributed/kv_events.py.
func (s *Subscription) runReplay() {
	if !s.sequence.replays || s.stopped() {
		return
	}
	if wait := time.Until(s.noReplayUntil); wait > 0 {
		s.sequence.onReplaySkipped()
		s.again.Reset(wait)
		s.handler.Replayed(ReplaySkipped, 0)
		return
	}
	// Few replays run at once, so that thousands of subscriptions that connect together do not need twice the
	// descriptors.
	select {
	case s.hub.replays <- struct{}{}:
	case <-s.stop.Done():
		return
	}
	defer func() { <-s.hub.replays }()
	began, brought := time.Now(), false
	defer func() { s.chargeReplay(began, brought) }()
	all := 0
	end := time.Now().Add(maxReplayTimeouts * s.config.ReplayTimeout)
	for again := true; again; {
		var outcome Replay
		var messages int
		outcome, messages, again = s.replayOnce(time.Now().Add(s.config.ReplayTimeout))
		again = again && time.Now().Before(end)
		brought = brought || s.sequence.replayed > 0
		all += messages
		switch {
		case s.stopped():
			return
		case again:
		case outcome == ReplayComplete:
			s.pause = s.hub.timing.replayPause
			s.handler.Replayed(outcome, all)
		case outcome == ReplayCut:
			s.handler.Replayed(outcome, all)
		default:
			s.noReplayUntil = time.Now().Add(s.pause)
			s.again.Reset(s.pause)
			s.pause = min(2*s.pause, 16*s.hub.timing.replayPause)
			s.handler.Replayed(outcome, all)
		}
	}
}

// freeReplays is how many replays without messages may follow each other without a wait.
const freeReplays = 4

// chargeReplay bounds the time that a subscription spends in replays, so that a publisher whose numbers keep jumping
// cannot keep kvepp busy. A replay costs the time that it took; one without messages costs emptyReplayCost more. The
// debt falls by half of the time that passes. Above the cost of freeReplays empty replays, the next one waits.
func (s *Subscription) chargeReplay(began time.Time, brought bool) {
	now := time.Now()
	s.replayDebt = max(0, s.replayDebt-now.Sub(s.replayed)/2) + now.Sub(began)
	if !brought {
		s.replayDebt += s.hub.timing.emptyReplayCost
	}
	s.replayed = now
	excess := s.replayDebt - s.freeReplayDebt()
	if until := now.Add(2 * excess); excess > 0 && until.After(s.noReplayUntil) {
		s.noReplayUntil = until
	}
}

// freeReplayDebt is the debt up to which replays need not wait.
func (s *Subscription) freeReplayDebt() time.Duration {
	return freeReplays * s.hub.timing.emptyReplayCost
}

// replayOnce runs one exchange. again says that another must follow, because the publisher turned out to be in a new
// epoch, or because the response stopped after it brought messages.
func (s *Subscription) replayOnce(deadline time.Time) (outcome Replay, messages int, again bool) {
	// Each exchange has its own socket, so that a late response to one is not taken for a response to the next.
	patience := time.NewTimer(min(s.hub.timing.replayConnect, time.Until(deadline)))
	defer patience.Stop()
	src, err := s.connectReplay(patience)
	if err != nil {
		return ReplayUnreachable, 0, false
	}
	defer src.close()
	if err := src.request(binary.BigEndian.AppendUint64(nil, s.sequence.onReplayStart())); err != nil {
		s.malformed("cannot ask for a replay: %w", err)
		return ReplayUnreachable, 0, false
	}
	outcome = ReplayUnreachable
	for greeted, ended := src.greeted, false; ; {
		for {
			if s.stopped() || time.Now().After(deadline) {
				return outcome, messages, s.sequence.replayed > 0
			}
			frames, ok := src.receive()
			if !ok {
				break
			}
			done, again := s.onReplayed(frames)
			if done {
				return ReplayComplete, messages, again
			}
			messages++
		}
		if ended {
			return outcome, messages, s.sequence.replayed > 0
		}
		if messages > 0 {
			patience.Reset(min(s.hub.timing.replayIdle, time.Until(deadline)))
		}
		select {
		case <-greeted:
			greeted, outcome = nil, ReplayTimedOut // until it answers
			patience.Reset(time.Until(deadline))
		case <-src.ready:
		case <-src.ended:
			ended = true
		case <-s.live.ended:
			return ReplayCut, messages, false
		case <-s.stop.Done():
			return outcome, messages, false
		case <-patience.C:
			return outcome, messages, s.sequence.replayed > 0
		}
	}
}

// connectReplay connects to the replay endpoint, which may open a moment after the live one.
func (s *Subscription) connectReplay(patience *time.Timer) (*source, error) {
	t := &s.hub.timing
	again := time.NewTicker(t.reconnect)
	defer again.Stop()
	for {
		src, err := s.hub.connect(s.stop, zmq.DEALER, s.config.ReplayEndpoint, &s.config, t.replayConnect)
		if err == nil {
			return src, nil
		}
		select {
		case <-again.C:
		case <-patience.C:
			return nil, err
		case <-s.live.ended:
			return nil, err
		case <-s.stop.Done():
			return nil, err
		}
	}
}

// onReplayed handles one message of a replay. done: it was the last; again: another replay must follow.
func (s *Subscription) onReplayed(frames [][]byte) (done, again bool) {
	var topic, number, payload []byte
	switch {
	case len(frames) == 3 && len(frames[0]) == 0:
		number, payload = frames[1], frames[2]
	case len(frames) == 4 && len(frames[0]) == 0:
		topic, number, payload = frames[1], frames[2], frames[3]
	default:
		s.malformed("replayed message of %d frames, want an empty one and 2 or 3 more", len(frames))
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
	if seq > lastSeq {
		s.malformed("replayed message has number %d, want at most 2^62: kvepp ignores the rest of the response", seq)
		return true, false
	}
	digest := s.digest(payload)
	st := s.sequence.onReplayed(seq, digest)
	s.apply(st, seq, topic, payload, digest)
	return st.replay, st.replay
}
