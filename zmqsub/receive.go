package zmqsub

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// digestSeed makes digests that mean something within this process only.
var digestSeed = maphash.MakeSeed()

// receive reads the live messages until the subscription is closed.
func (s *Subscription) receive() {
	defer s.live.close()
	drain := func() bool {
		for !s.closed.Load() {
			frames, ok, err := s.live.receive()
			if err != nil {
				return true // the context ended
			}
			if !ok {
				return false
			}
			s.onLive(frames)
		}
		return true
	}
	for {
		// First lift the effect of the last wake, then look why it came: a wake after the look is seen by the read.
		if err := s.live.setDeadline(time.Time{}); err != nil || s.closed.Load() {
			return
		}
		if s.revive.Swap(false) {
			// Nothing may be left in the queue: libzmq aborts the process when a socket is read on in the middle of a
			// message of a connection that was taken away (zeromq/libzmq#2163).
			if drain() {
				return
			}
			// It may be gone already, which is all that could go wrong; Subscribe has shown that it can be connected.
			_ = s.live.socket.Disconnect(s.config.Endpoint)
			_ = s.live.socket.Connect(s.config.Endpoint)
		}
		if s.resync.Swap(false) && s.sequence.replays {
			s.runReplay()
		}
		if err := s.live.read(drain); !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
	}
}

// onLive handles a live message: frames topic, number, payload; with a publisher's id, after the topic.
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

// apply tells the handler of a step, unless the subscription was closed.
func (s *Subscription) apply(st step, seq uint64, topic, payload []byte, digest uint64) {
	s.calls.Lock()
	defer s.calls.Unlock()
	if s.closed.Load() {
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
	s.calls.Lock()
	defer s.calls.Unlock()
	if !s.closed.Load() {
		s.handler.Malformed(fmt.Errorf("zmqsub: "+format, args...))
	}
}

// digest is needed only to compare with a replay.
func (s *Subscription) digest(payload []byte) uint64 {
	if !s.sequence.replays {
		return 0
	}
	return maphash.Bytes(digestSeed, payload)
}

// observedEvents are those that tell the state of a connection, and whether libzmq goes on trying.
const observedEvents = zmq.EVENT_CONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED |
	zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH

// observe follows the state of the live connection until the subscription is closed.
func (s *Subscription) observe() {
	defer s.monitor.close()
	connected := false
	change := func(to bool) {
		if connected == to {
			return
		}
		connected = to
		s.calls.Lock()
		defer s.calls.Unlock()
		switch {
		case s.closed.Load():
		case to:
			s.handler.Connected()
			s.resync.Store(true)
			s.live.wake()
		default:
			s.handler.Disconnected()
		}
	}
	drain := func() bool {
		for !s.closed.Load() {
			frames, ok, err := s.monitor.receive()
			if err != nil {
				return true // the context ended
			}
			if !ok {
				return false
			}
			// The first frame begins with the event's number, 16 bits in the machine's byte order.
			if len(frames[0]) < 2 {
				continue
			}
			deadline := time.Time{}
			switch zmq.Event(binary.NativeEndian.Uint16(frames[0])) {
			case zmq.EVENT_CONNECTED, zmq.EVENT_CONNECT_RETRIED:
			case zmq.EVENT_HANDSHAKE_SUCCEEDED:
				change(true)
			default:
				change(false)
				deadline = time.Now().Add(reviveAfter)
			}
			// A wake that this undoes came after closed was set, which is looked at next.
			if err := s.monitor.setDeadline(deadline); err != nil {
				return true
			}
		}
		return true
	}
	for errors.Is(s.monitor.read(drain), os.ErrDeadlineExceeded) && !s.closed.Load() {
		s.revive.Store(true)
		s.live.wake()
		if err := s.monitor.setDeadline(time.Time{}); err != nil {
			return
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
