package zmqsub

// sequence decides from message numbers alone which messages are in order, lost, repeated, or from a new epoch. It is
// pure: numbers in, steps out.
//
// It keeps two watermarks, because after a replay the live queue still holds messages that the replay delivered: next
// follows what was delivered, lastLive follows the live connection. Only a live number that does not grow shows a new
// epoch.
//
// A publisher that restarted and has sent as many messages as before looks like one that continues. A replay tells
// them apart: it begins at the last message delivered, and that message must have the same digest. If no replay shows
// it, the lost connection ends the epoch, without waiting for the next message: an engine that restarted may send none
// for long. To report one epoch too many is safe, to join two is not.
//
// A replay may be ahead of the live connection by the messages in flight, and by no more. The sequence rejects a
// replayed number beyond that, or all later live messages would count as delivered. The live connection decides.
type sequence struct {
	replays bool // the publisher answers replay requests

	next     uint64 // number of the next message to deliver; 0: nothing was delivered in this epoch
	oldest   uint64 // if next > 0: all messages from oldest to next-1 were delivered, and oldest-1 was not
	digest   uint64 // of the payload of message next-1
	lastLive watermark

	publisher publisherState
	replay    replayState
	replayed  int // messages that the latest replay delivered
	missing   missingState
	inFlight  inFlightState
}

// watermark is the number of the latest live message in this epoch. The zero value says that there was none.
type watermark struct {
	seq uint64
	set bool
}

// publisherState says whether the publisher is the one that sent message next-1.
type publisherState uint8

const (
	publisherSame       publisherState = iota // it is, or no message was delivered
	publisherUnverified                       // the connection is new, and no replay has shown message next-1
)

// replayState is the state of the latest replay. One that ends early keeps its state.
type replayState uint8

const (
	replayIncomplete replayState = iota // none ran, or a replay was needed and put off
	replayVerifying                     // runs from message next-1, which must come first and be the same
	replayFromStart                     // runs from message 0; if it has older messages than oldest, a new epoch begins
	replayDelivering                    // runs, and may bring any message
	replayComplete                      // the publisher said that it sent everything it has
)

// missingState says whether messages of this epoch are missing that the publisher may still have.
type missingState uint8

const (
	missingNothing     missingState = iota
	missingNotReplayed              // a gap was reported, and no replay that came to its end covers it
)

// inFlightState says whether messages that the latest replay delivered may still come on the live connection.
type inFlightState uint8

const (
	inFlightPossible inFlightState = iota
	inFlightNone                   // the live queue was empty for long enough
)

// maxAhead is how many messages a replay may be ahead of the live connection. It is more than the queues of publishers
// (100,000) and of subscriptions (131,072) hold.
const maxAhead = 1 << 20

// step is what to do, in the order of the fields.
type step struct {
	restart bool   // report a new epoch
	gap     bool   // report that the messages from expect on are lost
	expect  uint64 //
	deliver bool   // deliver the message
	replay  bool   // run a replay: from onReplayStart to onReplayEnd, then, for a live message, afterReplay
}

// onLive returns the step for a live message.
func (q *sequence) onLive(seq uint64) step {
	var st step
	repeated := q.lastLive.set && seq <= q.lastLive.seq
	disproved := !repeated && q.disproves(seq)
	if repeated || disproved || q.publisher == publisherUnverified {
		q.newEpoch(&st)
	}
	q.lastLive, q.inFlight = watermark{seq, true}, inFlightPossible
	if disproved { // the next replay would name the same wrong number
		st.gap, st.deliver = seq > 0, true
		return st
	}
	if q.replays && seq > q.next {
		st.replay = true
		return st
	}
	q.place(seq, &st)
	return st
}

// disproves reports whether a live message shows that a replay named a number that the publisher never reached.
func (q *sequence) disproves(seq uint64) bool {
	return seq < q.next && (q.inFlight == inFlightNone || q.next-seq > maxAhead)
}

// awaitsLive reports whether a replay delivered messages that may still come on the live connection.
func (q *sequence) awaitsLive() bool {
	ahead := q.next > 0 && (!q.lastLive.set || q.lastLive.seq < q.next-1)
	return q.replays && ahead && q.inFlight == inFlightPossible
}

// onDrained notes that no message of the latest replay can still come on the live connection.
func (q *sequence) onDrained() { q.inFlight = inFlightNone }

// onReconnect notes that the connection is new. A replay should follow.
func (q *sequence) onReconnect() {
	q.publisher = publisherSame
	if q.next > 0 {
		q.publisher = publisherUnverified
	}
}

// onDoubt returns the step for a connection that has ended, or begun, without a replay that shows that the publisher is
// the same: what was delivered is over.
func (q *sequence) onDoubt() step {
	var st step
	if q.next > 0 {
		q.newEpoch(&st)
		q.lastLive = watermark{}
	}
	return st
}

// onReplaySkipped notes that a replay was needed and put off: the publisher was not asked for what is missing now.
func (q *sequence) onReplaySkipped() { q.replay = replayIncomplete }

// onReplayStart returns the number from which to ask. If a gap is unanswered, that is 0: the order is lost already, and
// what the publisher has from before the gap is worth more than what came after it.
func (q *sequence) onReplayStart() (from uint64) {
	q.replayed, q.inFlight = 0, inFlightPossible
	switch {
	case q.missing == missingNotReplayed:
		q.replay = replayFromStart
	case q.next > 0:
		q.replay = replayVerifying
		return q.next - 1
	default:
		q.replay = replayDelivering
	}
	return 0
}

// onReplayed returns the step for a replayed message, whose payload has the digest. If the step asks for a replay, the
// one that runs is of no further use.
func (q *sequence) onReplayed(seq, digest uint64) step {
	var st step
	if q.replay == replayFromStart {
		q.missing, q.replay = missingNothing, replayDelivering
		if q.next > 0 && seq >= q.oldest {
			q.replay = replayVerifying // the publisher's buffer is short: it has nothing from before the gap
		} else {
			q.newEpoch(&st)
		}
	}
	switch {
	case q.replay == replayVerifying && seq < q.next-1:
		return st // not requested
	case q.replay == replayVerifying:
		q.replay = replayDelivering
		switch {
		case seq == q.next-1 && digest != q.digest:
			q.restart(&st)
			return st
		case seq == q.next:
			// The publisher's buffer no longer has message next-1, so nothing shows that these belong together.
			q.restart(&st)
			st.replay = false
		}
		q.publisher = publisherSame
	}
	if seq > q.next && q.replayed > 0 {
		// A publisher whose socket is full drops messages (SGLang's keeps 1,000): ask for them again.
		st.replay = true
		return st
	}
	q.place(seq, &st) // a gap here is final: the publisher has nothing older
	if st.deliver {
		q.replayed++
	}
	return st
}

// onReplayEnd returns the step for the end of a replay that the publisher said was complete.
func (q *sequence) onReplayEnd() step {
	var st step
	if q.replay == replayVerifying {
		// The publisher has neither the last message that it sent to us, nor any later one.
		q.restart(&st)
	}
	q.replay, q.missing = replayComplete, missingNothing
	return st
}

// afterReplay returns the step for the live message that made a replay necessary. Call it after that replay.
func (q *sequence) afterReplay(seq uint64) step {
	var st step
	q.lastLive = watermark{seq, true}
	if q.disproves(seq) {
		q.newEpoch(&st)
	}
	q.place(seq, &st)
	if st.gap && q.replay != replayComplete {
		q.missing = missingNotReplayed
	}
	return st
}

// delivered must follow each message that a step said to deliver. The digest matters only with replays.
func (q *sequence) delivered(seq, digest uint64) {
	if q.next == 0 || seq != q.next {
		q.oldest = seq
	}
	q.next, q.digest = seq+1, digest
}

// restart begins the new epoch that a replay showed, and asks for a replay of it.
func (q *sequence) restart(st *step) {
	q.newEpoch(st)
	st.replay = true
	q.lastLive, q.replay = watermark{}, replayDelivering
}

// newEpoch begins a new epoch: no message of it was delivered.
func (q *sequence) newEpoch(st *step) {
	st.restart = true
	q.next, q.publisher = 0, publisherSame
}

// place delivers a message that was not delivered before, and reports a gap before it.
func (q *sequence) place(seq uint64, st *step) {
	if seq < q.next {
		return
	}
	if seq > q.next {
		st.gap, st.expect = true, q.next
	}
	st.deliver = true
}
