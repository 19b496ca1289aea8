package zmqsub

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestReplayOnConnectAndOnGap(t *testing.T) {
	for _, shape := range []struct {
		name  string
		topic string
		reply func(from, to uint64) [][]any
	}{{"three frames", "", threeFrames}, {"four frames", "kv", fourFrames}} {
		t.Run(shape.name, func(t *testing.T) {
			var sent atomic.Uint64
			sent.Store(3)
			replays := offerReplay(t, func(from uint64) [][]any { return shape.reply(from, sent.Load()) })
			p := publish(t, "")
			r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
			p.subscribed(1)
			want := []string{"0 kv:p0", "1 kv:p1", "2 kv:p2"}
			for i := range want {
				want[i] = strings.Replace(want[i], "kv", shape.topic, 1)
			}
			r.want(t, want...)

			// 3 to 5 are lost. The replay asks from the last one delivered, 2, and its response already has 7.
			sent.Store(8)
			for _, seq := range []uint64{6, 7, 8} {
				p.send("live", seq, fmt.Sprintf("p%d", seq))
			}
			for seq := 3; seq < 8; seq++ {
				want = append(want, fmt.Sprintf("%d %s:p%d", seq, shape.topic, seq))
			}
			r.want(t, append(want, "8 live:p8")...)
			if first, second := <-replays.asked, <-replays.asked; first != 0 || second != 2 {
				t.Errorf("asked for replays from %d and %d, want 0 and 2", first, second)
			}
		})
	}
}

func TestReplayIncomplete(t *testing.T) {
	replays := offerReplay(t, func(from uint64) [][]any {
		if from == 0 {
			return [][]any{{endNumber, ""}}
		}
		return threeFrames(4, 6) // the buffer no longer has the older ones
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	p.subscribed(1)
	// Wait for the replay of the connection: if it came after message 0, it would show a new epoch.
	if from := <-replays.asked; from != 0 {
		t.Fatalf("the first replay was asked from %d, want 0", from)
	}
	p.send("", 0, "p0")
	p.send("", 1, "p1")
	p.send("", 7, "p7")
	r.want(t, "0 :p0", "1 :p1", "gap 2-4", "4 :p4", "5 :p5", "gap 6-7", "7 :p7")
}

func TestReplayTimesOut(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	replays := offerReplay(t, func(from uint64) [][]any { return threeFrames(from, 2)[:2-from] }) // never an end
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint, ReplayTimeout: time.Second})
	p.subscribed(1)
	r.want(t, "0 :p0", "1 :p1")
	p.send("", 4, "p4")
	r.want(t, "0 :p0", "1 :p1", "gap 2-4", "4 :p4")
}

func TestReplayUnreachable(t *testing.T) {
	gone, _ := reserve(t)
	p := publish(t, "")
	h := newHub(t)
	h.timing.replayConnect = 50 * time.Millisecond
	r := newRecorder()
	if _, err := h.Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: gone, ReplayTimeout: time.Hour},
		r); err != nil {
		t.Fatal(err)
	}
	p.subscribed(1)
	p.send("", 2, "p2")
	p.send("", 4, "p4")
	r.want(t, "gap 0-2", "2 :p2", "gap 3-4", "4 :p4")
	// After one failure the others are skipped. Each gap needs one, and the connection one, unless the first message
	// was read before it.
	if tried, skipped := r.count("replay_unreachable"), r.count("replay_skipped"); tried != 1 || skipped < 1 ||
		skipped > 2 {
		t.Errorf("%d replays tried and %d skipped, want 1 and 1 or 2", tried, skipped)
	}
}

// When the replay socket is up again, messages that were lost while it was down are delivered. If the publisher no
// longer has them, those after the loss stay.
func TestReplayComesLater(t *testing.T) {
	for _, test := range []struct {
		name   string
		oldest uint64 // that the publisher still has
		want   []string
	}{
		{"all", 0, []string{"restart", "0 :p0", "1 :p1", "2 :p2", "3 :p3", "4 :p4", "5 :p5"}},
		{"short buffer", 3, []string{"4 :p4", "5 :p5"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			gone, free := reserve(t)
			p := publish(t, "")
			h := newHub(t)
			h.timing.replayConnect, h.timing.replayPause = 50*time.Millisecond, 200*time.Millisecond
			r := newRecorder()
			if _, err := h.Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: gone}, r); err != nil {
				t.Fatal(err)
			}
			p.subscribed(1)
			p.send("", 2, "p2")
			p.send("", 3, "p3")
			before := []string{"gap 0-2", "2 :p2", "3 :p3"}
			r.want(t, before...)
			free()
			offerReplayAt(t, gone, func(from uint64) [][]any { return threeFrames(max(from, test.oldest), 5) })
			r.until(t, "the replay", func() bool { return r.count("4 :p4") == 1 })
			p.send("", 5, "p5")
			r.want(t, append(before, test.want...)...)
		})
	}
}

// A publisher whose socket is full drops the next messages of its response, even the end.
func TestReplayInPieces(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	asked := 0
	replays := offerReplay(t, func(from uint64) [][]any {
		whole := threeFrames(from, 8)
		switch asked++; asked {
		case 1:
			return whole[:3] // 0 to 2
		case 2:
			return append(slices.Clone(whole[:3]), whole[5:]...) // 2 to 4, then 7
		}
		return whole
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	p.subscribed(1)
	r.want(t, "0 :p0", "1 :p1", "2 :p2", "3 :p3", "4 :p4", "5 :p5", "6 :p6", "7 :p7")
	for _, want := range []uint64{0, 2, 4} {
		if from := <-replays.asked; from != want {
			t.Errorf("asked from %d, want %d", from, want)
		}
	}
}

// A publisher that dies before it answers does not block the subscription.
func TestReplayCut(t *testing.T) {
	replays := offerReplay(t, func(uint64) [][]any { return nil })
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint, ReplayTimeout: time.Hour})
	p.subscribed(1)
	<-replays.asked
	p.close()
	r.until(
		t,
		"the end of the replay and of the connection",
		func() bool { return r.count("replay_cut") == 1 && r.count("disconnected") == 1 },
	)
}

// The second replay brings a message that was sent after the first replay and before the subscription arrived.
func TestSecondLook(t *testing.T) {
	asked := 0
	replays := offerReplay(t, func(from uint64) [][]any {
		asked++
		return threeFrames(0, uint64(asked)-1)
	})
	p := publish(t, "")
	h := newHub(t)
	h.timing.secondReplay = 50 * time.Millisecond
	r := newRecorder()
	if _, err := h.Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint}, r); err != nil {
		t.Fatal(err)
	}
	p.subscribed(1)
	r.want(t, "0 :p0")
}

func TestReplayMalformed(t *testing.T) {
	replays := offerReplay(t, func(from uint64) [][]any {
		strange := [][]any{{"x"}, {"1", "2", "3", "4"}, {"seven77", "x"}}
		replies := append(strange, threeFrames(from, 2)[:2-from]...)
		return append(
			replies,
			[]any{binary.BigEndian.AppendUint64(nil, math.MaxUint64-1), "a snapshot follows"},
			[]any{"not", "read"},
		)
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	p.subscribed(1)
	r.want(
		t,
		"malformed: zmqsub: replayed message of 2 frames, want an empty one and 2 or 3 more",
		"malformed: zmqsub: replayed message of 5 frames, want an empty one and 2 or 3 more",
		"malformed: zmqsub: replayed message with a number of 7 bytes, want 8",
		"0 :p0",
		"1 :p1",
		"malformed: zmqsub: replayed message has number 18446744073709551614, want at most 2^62: kvepp ignores the "+
			"rest of the response",
	)
	p.send("", 2, "p2")
	r.until(t, "a live message", func() bool { return r.count("2 :p2") == 1 })
}

// The publisher restarts and sends more messages than before until the connection is back: only the replay shows it.
func TestRestartBehindHigherNumbers(t *testing.T) {
	var life atomic.Value
	life.Store("old")
	replays := offerReplay(t, func(from uint64) (replies [][]any) {
		for _, reply := range threeFrames(from, 3) {
			if reply[1] != "" {
				reply[1] = life.Load().(string) + reply[1].(string)
			}
			replies = append(replies, reply)
		}
		return replies
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	p.subscribed(1)
	before := []string{"0 :oldp0", "1 :oldp1", "2 :oldp2"}
	r.want(t, before...)
	p.close()
	r.until(t, "the disconnect", func() bool { return r.count("disconnected") == 1 })
	life.Store("new")
	q := publish(t, p.endpoint)
	q.subscribed(1)
	r.want(t, append(before, "restart", "0 :newp0", "1 :newp1", "2 :newp2")...)
}

// The publisher restarts, and its replay socket does not answer: what it sent before is over before it sends again.
func TestRestartWithoutItsReplay(t *testing.T) {
	var silent atomic.Bool
	replays := offerReplay(t, func(from uint64) [][]any {
		if silent.Load() {
			return nil
		}
		return threeFrames(from, 3)
	})
	p := publish(t, "")
	config := Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint, ReplayTimeout: time.Second}
	r, _ := subscribe(t, config)
	p.subscribed(1)
	r.want(t, "0 :p0", "1 :p1", "2 :p2")
	silent.Store(true)
	p.close()
	r.until(t, "the disconnect", func() bool { return r.count("disconnected") == 1 })
	if r.count("restart") != 0 {
		t.Error("the epoch ended before the replay on the next connection")
	}
	publish(t, p.endpoint).subscribed(1)
	r.want(t, "0 :p0", "1 :p1", "2 :p2", "restart")
}

func TestCloseDuringReplay(t *testing.T) {
	replays := offerReplay(t, func(uint64) [][]any { return nil })
	p := publish(t, "")
	_, s := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint, ReplayTimeout: time.Hour})
	p.subscribed(1)
	select {
	case <-replays.asked:
	case <-time.After(patience):
		t.Fatal("no replay request came")
	}
	closed := make(chan struct{})
	go func() { s.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(patience):
		t.Fatal("Close did not return")
	}
}

// After a replay with a far too great number, the subscription still delivers live messages.
func TestFarReplay(t *testing.T) {
	replays := offerReplay(t, func(uint64) [][]any {
		return [][]any{{binary.BigEndian.AppendUint64(nil, 1<<61), "far"}, {endNumber, ""}}
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	p.subscribed(1)
	r.until(t, "the replay", func() bool { return len(r.all()) == 2 })
	for seq := range uint64(3) {
		p.send("", seq, "x")
	}
	r.until(t, "the live messages", func() bool { return r.count("2 :x") == 1 })
	if r.count("0 :x") != 1 || r.count("1 :x") != 1 {
		t.Errorf("reported %q", r.all())
	}
}

// A replay may be a little ahead of the live messages, but only until all messages in flight must have arrived.
func TestReplayAhead(t *testing.T) {
	replays := offerReplay(t, func(uint64) [][]any { return threeFrames(0, 100) })
	p := publish(t, "")
	h := newHub(t)
	h.timing.catchUp, h.timing.secondReplay = 50*time.Millisecond, time.Hour
	r := newRecorder()
	if _, err := h.Subscribe(Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint}, r); err != nil {
		t.Fatal(err)
	}
	p.subscribed(1)
	r.until(t, "the replay", func() bool { return r.count("99 :p99") == 1 })
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for seq := uint64(0); r.count("restart") == 0; seq++ {
		if seq == 95 {
			t.Fatalf("none of %d live messages was delivered", seq)
		}
		p.send("", seq, "live")
		<-tick.C
	}
	r.until(t, "a live message", func() bool { return strings.HasSuffix(r.all()[len(r.all())-1], ":live") })
}

// A publisher whose numbers jump with each message, and which replays nothing, gets a few requests at once, and then
// one in two seconds.
func TestJumpsDoNotReplayWithoutEnd(t *testing.T) {
	var asked atomic.Int64
	replays := offerReplay(t, func(uint64) [][]any {
		asked.Add(1)
		return [][]any{{endNumber, ""}}
	})
	p := publish(t, "")
	r, _ := subscribe(t, Config{Endpoint: p.endpoint, ReplayEndpoint: replays.endpoint})
	go func() {
		for range replays.asked {
		}
	}()
	p.subscribed(1)
	began := time.Now()
	const jumps = 2000
	last := ""
	for i := range uint64(jumps) {
		seq := 10 * i
		if i%3 == 0 {
			seq = jumps - i // back
		}
		last = fmt.Sprintf("%d :", seq)
		p.send("", seq, "")
	}
	r.until(t, "the last message", func() bool { return r.count(last) > 0 })
	if n := asked.Load(); n > freeReplays+2+int64(time.Since(began)/(2*time.Second)) {
		t.Errorf("%d replays within %v", n, time.Since(began))
	}
	t.Logf("%d replays within %v", asked.Load(), time.Since(began))
}
