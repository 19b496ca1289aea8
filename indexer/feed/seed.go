package feed

import (
	"errors"

	"kvepp/kvblock"
)

// A replica that starts does not know what the engines stored before. A running replica does: it dumps the blocks of
// each worker, and the position in the worker's messages up to which they were applied. The new replica subscribes
// first, holds the messages that arrive, loads the dump, and continues from its position: it skips messages that the
// dump includes. If a message between is missing, it clears the worker's blocks, as after any gap.

// Position is how far a worker's messages were applied. The zero value means unknown.
type Position struct {
	Known     bool
	Next      uint64  // number of the message after the last one applied
	Timestamp float64 // of that last one, as its publisher wrote it, in seconds since 1970; 0 where messages have none
}

// Errors of Seed.
var (
	ErrNotSubscribed = errors.New("feed: kvepp is not subscribed to the worker's events, so they cannot correct a dump")
	ErrBegun         = errors.New("feed: the worker's own events were already applied")
)

// Hold delays all events until Release. Call it at most once, before the first worker joins.
func (f *Feed) Hold() { f.released = make(chan struct{}) }

// Release ends Hold. Close calls it too. Later calls do nothing, and neither does a call without Hold.
func (f *Feed) Release() {
	if f.released != f.never {
		f.release.Do(func() { close(f.released) })
	}
}

// Seed loads one store of a dump of w's blocks. at is the position of the dump, the same for each of its stores. Events
// must be on hold. at is unknown if the dumping service does not report it: then every message that arrives is applied
// after the dump, although the dump may include it.
//
// Errors: ErrNotSubscribed, ErrBegun, those of indexer.Load.
func (f *Feed) Seed(w kvblock.Worker, at Position, stored kvblock.Stored) error {
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	f.mu.Unlock()
	if !ok {
		return ErrNotSubscribed
	}
	s.applying.Lock()
	defer s.applying.Unlock()
	switch {
	case !s.online || s.hold == f.never:
		return ErrNotSubscribed
	case s.begun:
		return ErrBegun
	}
	s.seeded, s.position = true, at
	return f.index.Load(w, stored)
}

// Dump calls yield with stores that together contain w's blocks, as indexer.Dump does, and with their position, the
// same for each. It leaves out the blocks of classes. w's own events wait meanwhile.
func (f *Feed) Dump(w kvblock.Worker, yield func(at Position, stored kvblock.Stored) bool) {
	var at Position
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	f.mu.Unlock()
	if ok {
		s.applying.Lock()
		defer s.applying.Unlock()
		at = s.position
	}
	f.index.Dump(w, func(s kvblock.Stored) bool {
		return s.Tier > kvblock.TierExternal || yield(at, s) // the blocks of classes have no place in Dynamo's format
	})
}

// begin waits while events are on hold. It returns false if the worker leaves meanwhile; else end must follow.
func (s *subscriber) begin() bool {
	select {
	case <-s.hold:
	case <-s.left:
		return false
	}
	s.applying.Lock()
	return true
}

func (s *subscriber) end() { s.applying.Unlock() }

// reached notes that a message is about to be applied. It returns true if the seed includes the message.
func (s *subscriber) reached(seq uint64, timestamp float64) (contained bool) {
	if s.seeded && !s.begun {
		switch at := s.position; {
		case !at.Known && seq == 0:
			s.empty() // the publisher's first message: those that follow are complete
		case !at.Known:
			s.unnumbered = true
		case seq < at.Next && timestamp <= at.Timestamp:
			return true
		case seq < at.Next:
			// The number is older and the time newer: the publisher is another process.
			s.restart()
		}
	}
	s.begun = true
	s.position = Position{Known: true, Next: seq + 1, Timestamp: timestamp}
	return false
}

// bridged reports whether the seed includes the messages before got.
func (s *subscriber) bridged(got uint64) bool {
	return s.seeded && !s.begun && (!s.position.Known || got <= s.position.Next)
}

// unseed forgets the seed.
func (s *subscriber) unseed() {
	s.seeded, s.unnumbered = false, false
	if !s.begun {
		s.position = Position{}
	}
}
