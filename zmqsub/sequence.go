package zmqsub

// sequence decides, from the numbers of messages alone, what is in order, lost, repeated, or from a new life of the
// publisher. It is pure: numbers in, steps out.
//
// Two watermarks are kept, because after a replay the live queue still holds messages that the replay delivered: next
// is about what was delivered, lastLive about what the live connection carried. Only a live number that does not grow
// means a new life.
//
// A publisher that restarted and has already sent as many messages as before looks like one that goes on. A replay
// tells them apart: each one begins at the last message delivered, and that message must be the same. A connection made
// anew without one leaves a doubt, and the next message is then taken for a new life's: better a new life too many than
// two taken for one.
//
// A replay may be ahead of the live connection by what is still on its way there, and by no more: what it names beyond
// is not believed, or all that the publisher sends from now on would count as delivered. The live connection decides.
type sequence struct {
	replays bool // gaps can be asked about

	next     uint64 // number of the next message to deliver; 0: nothing was delivered in this life
	digest   uint64 // of the payload of message next-1
	live     bool   // lastLive is set
	lastLive uint64
	anchored bool // a replay runs, and has yet to show message next-1
	// the connection is another than that of message next-1, and nothing shows that the publisher is the same
	doubt    bool
	answered bool // the latest replay came to its end
	// a gap was reported though the publisher may still have its messages: it was asked and did not answer
	owed     bool
	fresh    bool // a replay runs that begins all over, because something is owed
	progress bool // the replay that runs has brought a message
	late     bool // nothing is on its way any more that the latest replay can have brought before
}

// maxAhead is how many messages a replay may be ahead of the live connection: more than the queues of publishers and
// subscriptions hold: 100,000 at the publishers, 131,072 here.
const maxAhead = 1 << 20

// step is what to do, in the order of the fields.
type step struct {
	restart bool   // report a new life
	gap     bool   // report that messages from expected on are lost
	expect  uint64 //
	deliver bool   // deliver the message
	replay  bool   // run a replay: from onReplayStart to onReplayEnd, then, for a live message, onSettled
}

// onLive is the step for a live message.
func (q *sequence) onLive(seq uint64) step {
	var st step
	back := q.live && seq <= q.lastLive
	lied := !back && q.unbelieved(seq)
	if back || q.doubt || lied {
		st.restart = true
		q.next, q.doubt = 0, false
	}
	q.live, q.lastLive, q.late = true, seq, false
	if lied { // the next replay would say the same
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

// unbelieved says whether a live message shows that a replay named a number that cannot have been.
func (q *sequence) unbelieved(seq uint64) bool {
	return seq < q.next && (q.late || q.next-seq > maxAhead)
}

// ahead says whether a replay brought messages that have yet to come on the live connection.
func (q *sequence) ahead() bool {
	return q.replays && q.next > 0 && (!q.live || q.lastLive < q.next-1)
}

// onReconnect says that the connection is a new one. A replay should follow.
func (q *sequence) onReconnect() { q.doubt = q.next > 0 }

// onReplaySkipped says that a replay was needed and is put off: what is missing now has not been asked for.
func (q *sequence) onReplaySkipped() { q.answered = false }

// onReplayStart returns the number from which to ask. If something is owed it is the beginning: once anything was lost,
// what came later is not worth more than what the publisher has, and the order is lost with it.
func (q *sequence) onReplayStart() (from uint64) {
	q.answered, q.progress, q.late = false, false, false
	q.fresh = q.owed
	q.anchored = q.next > 0 && !q.fresh
	if q.anchored {
		return q.next - 1
	}
	return 0
}

// onReplayed is the step for a replayed message, whose payload has the digest. If it asks for a replay, this one is of
// no use any more.
func (q *sequence) onReplayed(seq, digest uint64) step {
	var st step
	if q.fresh {
		st.restart = true
		q.next, q.doubt, q.owed, q.fresh = 0, false, false, false
	}
	if q.anchored {
		if seq < q.next-1 {
			return st // not asked for
		}
		q.anchored = false
		switch {
		case seq == q.next-1 && digest != q.digest:
			q.restart(&st)
			return st
		case seq == q.next:
			// The one before is gone from the publisher's buffer, so that nothing shows that these belong
			// together: better a new life too many than two taken for one.
			q.restart(&st)
			st.replay = false
		}
		q.doubt = false
	}
	if seq > q.next && q.progress {
		// Publishers whose socket is full leave out what comes next (SGLang's keeps 1,000 messages): ask for it again.
		st.replay = true
		return st
	}
	q.answered = true // where this one is not, nothing before it is either
	q.place(seq, &st)
	q.answered = false
	q.progress = q.progress || st.deliver
	return st
}

// onReplayEnd is the step for the end of a replay that the publisher said was complete.
func (q *sequence) onReplayEnd() step {
	var st step
	if q.anchored {
		// It does not have the message that it sent us last, nor any later one.
		q.restart(&st)
	}
	q.answered, q.owed, q.fresh = true, false, false
	return st
}

// onSettled is the step for the live message that made a replay necessary, after it.
func (q *sequence) onSettled(seq uint64) step {
	var st step
	q.live, q.lastLive = true, seq
	if q.unbelieved(seq) {
		st.restart = true
		q.next, q.doubt = 0, false
	}
	q.place(seq, &st)
	return st
}

// delivered must be called after each message that a step said to deliver; the digest matters only if there are
// replays.
func (q *sequence) delivered(seq, digest uint64) {
	q.next, q.digest = seq+1, digest
}

// restart begins a new life that a replay showed.
func (q *sequence) restart(st *step) {
	st.restart, st.replay = true, true
	q.next, q.live, q.anchored, q.doubt = 0, false, false, false
}

func (q *sequence) place(seq uint64, st *step) {
	if seq < q.next {
		return
	}
	if seq > q.next {
		st.gap, st.expect = true, q.next
		q.owed = q.replays && !q.answered
	}
	st.deliver = true
}
