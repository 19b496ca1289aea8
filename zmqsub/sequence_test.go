package zmqsub

import (
	"fmt"
	"slices"
	"testing"
)

// reader runs a sequence as a subscription does, against a simulated publisher, and records the reports.
type reader struct {
	sequence sequence
	sent     int
	buffer   func() []message // what the publisher can replay; nil: its response has no end
	skip     bool             // replays are put off
	reports  []string
	messages []message // delivered; number -1 stands for a report of gap or restart
}

type message struct{ epoch, number int }

func (m message) digest() uint64 { return uint64(m.epoch)<<32 | uint64(m.number) }

func (r *reader) apply(st step, m message) {
	if st.restart {
		r.reports = append(r.reports, "restart")
		r.messages = append(r.messages, message{number: -1})
	}
	if st.gap {
		r.reports = append(r.reports, fmt.Sprintf("gap %d-%d", st.expect, m.number))
		r.messages = append(r.messages, message{number: -1})
	}
	if st.deliver {
		r.reports = append(r.reports, fmt.Sprint(m.number))
		r.messages = append(r.messages, m)
		r.sequence.delivered(uint64(m.number), m.digest())
	}
}

func (r *reader) live(m message) {
	st := r.sequence.onLive(uint64(m.number))
	if st.replay {
		r.apply(step{restart: st.restart}, m)
		r.replay()
		st = r.sequence.afterReplay(uint64(m.number))
	}
	r.apply(st, m)
}

// reconnect does what a subscription does on a new connection.
func (r *reader) reconnect() {
	r.sequence.onReconnect()
	if r.sequence.replays {
		r.replay()
	}
	if r.sequence.publisher == publisherUnverified {
		r.apply(r.sequence.onDoubt(), message{})
	}
}

func (r *reader) replay() {
	if r.skip {
		r.sequence.onReplaySkipped()
		return
	}
	for again := true; again; {
		again = false
		from := r.sequence.onReplayStart()
		buffer := r.buffer()
		for _, m := range buffer {
			if uint64(m.number) < from {
				continue
			}
			st := r.sequence.onReplayed(uint64(m.number), m.digest())
			r.apply(st, m)
			if again = st.replay; again {
				break
			}
		}
		if !again && buffer != nil {
			st := r.sequence.onReplayEnd()
			r.apply(st, message{})
			again = st.replay
		}
	}
}

func messages(epoch int, numbers ...int) []message {
	var ms []message
	for _, n := range numbers {
		ms = append(ms, message{epoch, n})
	}
	return ms
}

func TestSequence(t *testing.T) {
	for _, test := range []struct {
		name    string
		replays bool
		buffer  []message
		do      func(*reader)
		want    []string
	}{
		{
			name: "in order",
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 1}); r.live(message{1, 2}) },
			want: []string{"0", "1", "2"},
		},
		{
			name: "gap",
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 4}); r.live(message{1, 5}) },
			want: []string{"0", "gap 1-4", "4", "5"},
		},
		{
			name: "late joiner",
			do:   func(r *reader) { r.live(message{1, 7}); r.live(message{1, 8}) },
			want: []string{"gap 0-7", "7", "8"},
		},
		{
			name: "restart",
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 1}); r.live(message{2, 0}) },
			want: []string{"0", "1", "restart", "0"},
		},
		{
			name: "restart, first message missed",
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 1}); r.live(message{2, 1}) },
			want: []string{"0", "1", "restart", "gap 0-1", "1"},
		},
		{
			name: "greatest number",
			do: func(r *reader) {
				r.sequence.next = 1<<63 - 1
				r.live(message{1, 1<<63 - 1})
				r.live(message{1, 0})
			},
			want: []string{"9223372036854775807", "restart", "0"},
		},
		{
			name: "new connection, next number",
			do: func(r *reader) {
				r.live(message{1, 0})
				r.reconnect()
				r.live(message{2, 1})
				r.live(message{2, 2})
			},
			want: []string{"0", "restart", "gap 0-1", "1", "2"},
		},
		{
			name: "new connection, and the replay shows the same publisher", replays: true,
			buffer: messages(1, 0, 1),
			do: func(r *reader) {
				r.live(message{1, 0})
				r.reconnect()
				r.live(message{1, 2})
			},
			want: []string{"0", "1", "2"},
		},
		{
			name: "new connection, and the replay has no end", replays: true, buffer: nil,
			do: func(r *reader) {
				r.live(message{1, 0})
				r.reconnect()
				r.live(message{1, 1})
			},
			want: []string{"0", "restart", "gap 0-1", "1"},
		},
		{
			name: "gap, replayed; live messages that the replay delivered", replays: true,
			buffer: messages(1, 0, 1, 2, 3, 4, 5),
			do: func(r *reader) {
				r.live(message{1, 0})
				for _, n := range []int{3, 4, 5, 6} {
					r.live(message{1, n})
				}
			},
			want: []string{"0", "1", "2", "3", "4", "5", "6"},
		},
		{
			name: "late joiner, replayed", replays: true, buffer: messages(1, 0, 1, 2),
			do:   func(r *reader) { r.live(message{1, 2}) },
			want: []string{"0", "1", "2"},
		},
		{
			name: "replay on connect", replays: true, buffer: messages(1, 0, 1, 2),
			do:   func(r *reader) { r.replay(); r.live(message{1, 2}); r.live(message{1, 3}) },
			want: []string{"0", "1", "2", "3"},
		},
		{
			name: "a replay without a response, and a complete one later", replays: true, buffer: nil,
			do: func(r *reader) {
				r.live(message{1, 0})
				r.live(message{1, 4})
				r.live(message{1, 5})
				r.buffer = func() []message { return messages(1, 0, 1, 2, 3, 4, 5, 6, 7)[:r.sent] }
				r.sent = 7
				r.replay()
				r.live(message{1, 6})
				r.live(message{1, 7})
				r.sent = 8
				r.replay()
			},
			want: []string{"0", "gap 1-4", "4", "5", "restart", "0", "1", "2", "3", "4", "5", "6", "7"},
		},
		{
			name: "a replay with a gap that the next replay fills", replays: true,
			buffer: messages(1, 0, 1, 2, 3),
			do: func(r *reader) {
				whole, asked := r.buffer(), 0
				r.buffer = func() []message {
					if asked++; asked == 1 {
						return []message{whole[0], whole[1], whole[3]}
					}
					return whole
				}
				r.live(message{1, 4})
			},
			want: []string{"0", "1", "2", "3", "4"},
		},
		{
			name: "buffer too short", replays: true, buffer: messages(1, 4, 5),
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 6}) },
			want: []string{"0", "gap 1-4", "4", "5", "6"},
		},
		{
			name: "replay without an end message", replays: true, buffer: nil,
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 6}) },
			want: []string{"0", "gap 1-6", "6"},
		},
		{
			name: "replay with a gap", replays: true, buffer: messages(1, 0, 1, 3),
			do:   func(r *reader) { r.live(message{1, 0}); r.live(message{1, 4}) },
			want: []string{"0", "1", "gap 2-3", "3", "4"},
		},
		{
			name: "replay repeats messages", replays: true, buffer: messages(1, 0, 1, 2, 1, 0, 2, 3),
			do:   func(r *reader) { r.replay(); r.live(message{1, 4}) },
			want: []string{"0", "1", "2", "3", "4"},
		},
		{
			name: "restart, replayed from the beginning", replays: true, buffer: messages(2, 0, 1, 2),
			do:   func(r *reader) { r.live(message{1, 0}); r.deliverUpTo(5); r.live(message{2, 2}) },
			want: []string{"0", "1", "2", "3", "4", "restart", "0", "1", "2"},
		},
		{
			name: "restart, then as many messages as before", replays: true, buffer: messages(2, 0, 1, 2, 3),
			do:   func(r *reader) { r.deliverUpTo(3); r.replay(); r.live(message{2, 4}) },
			want: []string{"0", "1", "2", "restart", "0", "1", "2", "3", "4"},
		},
		{
			name: "restart, then fewer messages than before; the replay on connect shows it", replays: true,
			buffer: messages(2, 0),
			do:     func(r *reader) { r.deliverUpTo(3); r.replay(); r.live(message{2, 1}) },
			want:   []string{"0", "1", "2", "restart", "0", "1"},
		},
		{
			name: "a replay has a far number, and live messages continue", replays: true,
			buffer: messages(1, 0, 1, 1<<61),
			do: func(r *reader) {
				r.live(message{1, 2})
				r.live(message{1, 3})
				r.live(message{1, 4})
			},
			want: []string{"0", "1", "gap 2-2305843009213693952", "2305843009213693952", "restart", "gap 0-2", "2", "3",
				"4"},
		},
		{
			name: "a replay has a far number before the first live message", replays: true,
			buffer: messages(1, 1<<61),
			do: func(r *reader) {
				r.replay()
				r.live(message{1, 2})
				r.live(message{1, 3})
			},
			want: []string{"gap 0-2305843009213693952", "2305843009213693952", "restart", "gap 0-2", "2", "3"},
		},
		{
			name: "a replay is ahead of the messages in flight", replays: true,
			buffer: messages(1, 0, 1, 2, 3, 4, 5, 6),
			do: func(r *reader) {
				r.live(message{1, 2})
				if r.sequence.awaitsLive() { // and the queue is empty for a long time
					r.sequence.onDrained()
				}
				r.live(message{1, 3})
				r.live(message{1, 4})
			},
			want: []string{"0", "1", "2", "3", "4", "5", "6", "restart", "gap 0-3", "3", "4"},
		},
		{
			name: "a live message has a far number, and the next ones do not",
			do: func(r *reader) {
				r.live(message{1, 0})
				r.live(message{1, 1 << 61})
				r.live(message{1, 1})
				r.live(message{1, 2})
			},
			want: []string{"0", "gap 1-2305843009213693952", "2305843009213693952", "restart", "gap 0-1", "1", "2"},
		},
		{
			name: "a live message has a far number, and the next ones do not, with replays", replays: true,
			buffer: messages(1, 0),
			do: func(r *reader) {
				r.live(message{1, 0})
				r.live(message{1, 1 << 61})
				r.live(message{1, 1})
				r.live(message{1, 2})
			},
			want: []string{"0", "gap 1-2305843009213693952", "2305843009213693952", "restart", "0", "1", "2"},
		},
		{
			name: "a replay later fills a gap that came while replays were put off", replays: true,
			do: func(r *reader) {
				r.buffer = func() []message { return messages(1, 0, 1) }
				r.live(message{1, 0})
				r.live(message{1, 2})
				r.replayLate(messages(1, 4), messages(1, 0, 1, 2, 3, 4))
			},
			want: []string{"0", "1", "2", "gap 3-4", "4", "restart", "0", "1", "2", "3", "4"},
		},
		{
			name: "a replay that was put off has nothing older than what came after the gap", replays: true,
			do: func(r *reader) {
				r.live(message{1, 0})
				r.replayLate(messages(1, 2, 3, 4), messages(1, 3, 4, 5))
				r.live(message{1, 6})
			},
			want: []string{"0", "gap 1-2", "2", "3", "4", "5", "6"},
		},
		{
			name: "a replay that was put off has only the messages after the latest gap", replays: true,
			do: func(r *reader) {
				r.live(message{1, 0})
				r.replayLate(messages(1, 2, 4, 5), messages(1, 3, 4, 5))
			},
			want: []string{"0", "gap 1-2", "2", "gap 3-4", "4", "5", "restart", "gap 0-3", "3", "4", "5"},
		},
		{
			name: "a replay that was put off shows another publisher, whose buffer begins after the gap", replays: true,
			do: func(r *reader) {
				r.live(message{1, 0})
				r.replayLate(messages(1, 2, 3, 4), messages(2, 3, 4, 5))
			},
			want: []string{"0", "gap 1-2", "2", "3", "4", "restart", "gap 0-3", "3", "4", "5"},
		},
		{
			name: "numbers that go back",
			do: func(r *reader) {
				for _, n := range []int{2, 1, 0, 1} {
					r.live(message{1, n})
				}
			},
			want: []string{"gap 0-2", "2", "restart", "gap 0-1", "1", "restart", "0", "1"},
		},
		{
			name: "the buffer no longer has the last message", replays: true, buffer: messages(1, 3, 4),
			do:   func(r *reader) { r.deliverUpTo(3); r.replay() },
			want: []string{"0", "1", "2", "restart", "gap 0-3", "3", "4"},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := &reader{sequence: sequence{replays: test.replays}, buffer: func() []message { return test.buffer }}
			test.do(r)
			if !slices.Equal(r.reports, test.want) {
				t.Errorf("reported %q, want %q", r.reports, test.want)
			}
		})
	}
}

// deliverUpTo delivers those of the first n messages of epoch 1 that have not been delivered.
func (r *reader) deliverUpTo(n int) {
	for i := int(r.sequence.next); i < n; i++ {
		r.live(message{1, i})
	}
}

// replayLate takes live messages while replays are put off, and then a replay of what the publisher has.
func (r *reader) replayLate(live, has []message) {
	r.skip = true
	for _, m := range live {
		r.live(m)
	}
	r.skip, r.buffer = false, func() []message { return has }
	r.replay()
}

// consecutive returns how many messages were delivered since the latest report of a gap or restart, and the last one.
func (r *reader) consecutive() (n int, last message) {
	for n < len(r.messages) && r.messages[len(r.messages)-1-n].number >= 0 {
		n++
	}
	if n > 0 {
		last = r.messages[len(r.messages)-1]
	}
	return n, last
}

// For any order of sending, losing, restarting and reconnecting: messages that are delivered without a report between
// them are consecutive messages of one epoch, and the newest message always arrives. A replay does not lose what is
// known, unless the publisher restarted or has forgotten the last message of it.
func FuzzSequence(f *testing.F) {
	f.Add([]byte{0, 0, 1, 0, 2, 0, 1, 1, 0}, true)
	f.Add([]byte{0, 0, 0, 2, 0, 0, 0, 0}, false)
	f.Add([]byte{0, 0, 4, 1, 0, 0, 6, 0, 0, 4, 0, 0}, true)
	f.Add([]byte{0, 5, 0, 0, 6, 0, 0}, false)
	f.Add([]byte{1, 1, 1, 1, 1, 1, 0, 3, 0, 2, 1, 1, 1, 1, 1, 1, 3, 0}, true)
	f.Add([]byte{0, 7, 1, 0, 0, 0, 0, 0, 0, 7, 8, 0}, true)
	f.Fuzz(func(t *testing.T, ops []byte, replays bool) {
		const kept = 4
		now := message{epoch: 1}
		var buffer []message
		send := func() message {
			m := now
			now.number++
			if buffer = append(buffer, m); len(buffer) > kept {
				buffer = buffer[1:]
			}
			return m
		}
		var lies []message // replays send these after the true messages
		jumps, honest := 0, true
		r := &reader{sequence: sequence{replays: replays}, buffer: func() []message {
			if buffer == nil && lies == nil {
				return []message{}
			}
			return slices.Concat(buffer, lies)
		}}
		for _, op := range ops {
			switch op % 9 {
			case 4: // replays contain a far number that was never sent
				lies, honest = messages(now.epoch, now.number+maxAhead+2+int(op)<<40), false
			case 5:
				lies = nil
			case 6: // the publisher itself jumps, ahead or back
				jumps++
				now.number = int(op/9%4)<<50 + jumps<<30
				buffer, honest = nil, false
			case 0:
				r.live(send())
			case 1:
				send() // lost
			case 2: // a new epoch, which sends some messages before the connection is back
				now = message{epoch: now.epoch + 1}
				buffer = nil
				for range op / 9 % 8 {
					send()
				}
				r.reconnect()
			case 3: // the connection was lost and is back
				r.reconnect()
			case 7: // replays are put off from now on, or no longer
				r.skip = !r.skip
			case 8: // a replay that was put off is due
				if !replays {
					continue
				}
				before, last := r.consecutive()
				r.replay()
				after, _ := r.consecutive()
				forgot := len(buffer) == 0 || buffer[0].number > last.number
				if honest && last.epoch == now.epoch && !forgot && after < before {
					t.Fatalf("a replay left %d messages of %d: %q", after, before, r.reports)
				}
			}
		}
		last := send()
		r.live(last)
		before := message{number: -1}
		for _, m := range r.messages {
			if m.number >= 0 && before.number >= 0 && m != (message{before.epoch, before.number + 1}) {
				t.Fatalf("%v was delivered after %v without a report", m, before)
			}
			before = m
		}
		if before != last {
			t.Fatalf("the newest message, %v, was not delivered: %v", last, before)
		}
	})
}
