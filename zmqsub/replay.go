package zmqsub

import (
	"encoding/binary"
	"errors"
	"syscall"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// Replay is the outcome of asking a publisher for past messages.
type Replay string

// The outcomes. Whatever a replay did not bring is reported by Gap.
const (
	ReplayComplete    Replay = "replayed"           // the publisher answered to the end of what it has
	ReplayTimedOut    Replay = "replay_timed_out"   // no answer, or no end of one, within ReplayTimeout
	ReplayUnreachable Replay = "replay_unreachable" // no connection
	ReplayCut         Replay = "replay_cut"         // the live connection ended meanwhile: there will be another replay
	ReplaySkipped     Replay = "replay_skipped"     // not asked, because it failed a moment ago
)

// lastSeq is the greatest number that is believed: publishers count from 0, and mark with the greatest numbers what is
// no past message.
const lastSeq = 1 << 62

// maxReplayTimeouts bounds all that follows from one need for a replay, in ReplayTimeouts: a publisher that always
// answers a little must not hold its live messages for ever.
const maxReplayTimeouts = 6

// runReplay asks the publisher for the messages that the sequence wants, if there is anybody to ask, and delivers them.
// Live messages meanwhile wait in the live socket's queue, which is bounded (source.bound). It returns when the replay
// is complete, failed, or the subscription was closed; the sequence knows what is still missing.
//
// A replay socket that is not there must not hold live messages for long, so a connection has to come about within a
// second, and one that failed is not asked again for a while; then all is asked for that was lost meanwhile. An answer
// that stops in the middle is asked for again from there, as long as that brings anything.
//
// Protocol: a DEALER sends ["", first number]; the answer is a message for each past one at or after it,
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
	// Turns are taken, so that thousands of subscriptions that connect at once do not need twice the descriptors.
	watch := time.NewTicker(s.hub.timing.watch)
	defer watch.Stop()
	for turn := false; !turn; {
		select {
		case s.hub.replays <- struct{}{}:
			turn = true
		case <-watch.C:
			s.live.bound()
		case <-s.stop:
			return
		}
	}
	defer func() { <-s.hub.replays }()
	began, brought := time.Now(), false
	defer func() { s.chargeReplay(began, brought) }()
	defer func() {
		if len(s.unhandled) > 0 {
			s.monitor.signal()
		}
	}()
	all := 0
	end := time.Now().Add(maxReplayTimeouts * s.config.ReplayTimeout)
	for again := true; again; {
		var outcome Replay
		var messages int
		outcome, messages, again = s.replayOnce(time.Now().Add(s.config.ReplayTimeout), watch)
		again = again && time.Now().Before(end)
		brought = brought || s.sequence.progress
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

// freeReplays is how many replays that brought nothing may follow each other at once.
const freeReplays = 4

// chargeReplay bounds the time that a subscription spends in replays, so that a publisher whose numbers jump again and
// again cannot keep kvepp busy. A replay costs the time that it took, and one that brought nothing costs replayAgain
// more. The debt falls by half of the time that passes. Beyond the cost of freeReplays empty replays, the next one waits.
func (s *Subscription) chargeReplay(began time.Time, brought bool) {
	now := time.Now()
	s.replayDebt = max(0, s.replayDebt-now.Sub(s.replayed)/2) + now.Sub(began)
	if !brought {
		s.replayDebt += s.hub.timing.replayAgain
	}
	s.replayed = now
	excess := s.replayDebt - s.freeReplayDebt()
	if until := now.Add(2 * excess); excess > 0 && until.After(s.noReplayUntil) {
		s.noReplayUntil = until
	}
}

// freeReplayDebt is the debt up to which replays need not wait.
func (s *Subscription) freeReplayDebt() time.Duration { return freeReplays * s.hub.timing.replayAgain }

// replayOnce runs one exchange, and says whether another must follow: because the publisher turned out to be in a new
// life, or because the answer stopped after it brought something.
func (s *Subscription) replayOnce(deadline time.Time, watch *time.Ticker) (outcome Replay, messages int, again bool) {
	// A socket for each exchange: a late answer to one that timed out cannot be taken for an answer to the next.
	src, err := s.hub.connect(zmq.DEALER, s.config.ReplayEndpoint, &s.config, (*source).onlyConnected)
	if err != nil {
		s.malformed("cannot replay: %w", err)
		return ReplayUnreachable, 0, false
	}
	defer src.close()
	request := binary.BigEndian.AppendUint64(nil, s.sequence.onReplayStart())
	outcome = ReplayUnreachable
	patience := time.NewTimer(min(s.hub.timing.replayConnect, time.Until(deadline)))
	defer patience.Stop()
	for {
		for {
			frames, ok, err := src.receive()
			if err != nil || s.stopped() || time.Now().After(deadline) {
				return outcome, messages, s.sequence.progress
			}
			if !ok {
				break
			}
			done, again := s.onReplayed(frames)
			if done {
				return ReplayComplete, messages, again
			}
			if messages++; messages%64 == 0 {
				s.live.bound()
			}
		}
		switch {
		case outcome == ReplayUnreachable:
			// After receive, which alone looks at once whether there is a connection now.
			switch err := src.request(request); {
			case err == nil:
				outcome = ReplayTimedOut // unless it answers
				patience.Reset(time.Until(deadline))
				continue
			case !errors.Is(err, syscall.EAGAIN):
				s.malformed("cannot ask for a replay: %w", err)
				return outcome, 0, false
			}
		case messages > 0:
			patience.Reset(min(s.hub.timing.replayIdle, time.Until(deadline)))
		}
		select {
		case <-src.ready:
		case <-watch.C:
			s.live.bound()
		case <-s.monitor.ready:
			if s.disconnects() {
				return ReplayCut, messages, false
			}
		case <-s.stop:
			return outcome, messages, false
		case <-patience.C:
			return outcome, messages, s.sequence.progress
		}
	}
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
	if seq > lastSeq {
		s.malformed(
			"replayed message numbered %d, which is none of a past message: the rest of the answer is not read",
			seq,
		)
		return true, false
	}
	digest := s.digest(payload)
	st := s.sequence.onReplayed(seq, digest)
	s.apply(st, seq, topic, payload, digest)
	return st.replay, st.replay
}
