package feed

import (
	"errors"

	"kvepp/kvblock"
)

// A replica that starts knows nothing of what the engines stored before. Another one that ran does: it dumps what each
// worker holds, and up to which of the worker's messages that is so. The new one subscribes first, holds back what
// arrives, takes the dump over, and then goes on from there: messages that the dump has in it are passed over, and if
// one is missing between, the worker is emptied as after any gap.

// Position is how far a worker's messages were applied. The zero value says nothing.
type Position struct {
	Known     bool
	Next      uint64  // number of the message after the last one applied
	Timestamp float64 // of that last one, as its publisher wrote it, in seconds since 1970; 0 where messages have none
}

// Errors of Seed.
var (
	ErrNotSubscribed = errors.New(
		"feed: the worker's events are not heard, so that nothing would correct what is said of it",
	)
	ErrBegun = errors.New("feed: events of the worker itself were applied already")
)

// Hold makes all events wait until Release. Call it once at most, before the first worker joins.
func (f *Feed) Hold() { f.released = make(chan struct{}) }

// Release lets the events go on. Close does it too. Only the first call counts, and none without Hold.
func (f *Feed) Release() {
	if f.released != f.never {
		f.release.Do(func() { close(f.released) })
	}
}

// Seed adds one store to what w is believed to hold, from a dump that says what w held at that position, the same for
// each of its stores. Events must be on hold. An unknown position is one of a service that does not say: then every
// message that arrives is applied after the dump, although it may have been before.
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

// Dump calls yield with stores that together say what w holds, as indexer.Dump does, and with the position at which
// that is so, the same for each. w's own events wait meanwhile.
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
	f.index.Dump(w, func(s kvblock.Stored) bool { return yield(at, s) })
}

// begin waits while events are on hold. It returns false when the worker leaves meanwhile; else end must follow.
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

// reached notes that a message is about to be applied, and reports whether it is part of the seed instead.
func (s *subscriber) reached(seq uint64, timestamp float64) (contained bool) {
	if s.seeded && !s.begun {
		switch at := s.position; {
		case !at.Known && seq == 0:
			s.empty() // this and what follows is all there ever was
		case !at.Known:
			s.unnumbered = true
		case seq < at.Next && timestamp <= at.Timestamp:
			return true
		case seq < at.Next:
			// Older by its number, newer by its time: another process writes.
			s.restart()
		}
	}
	s.begun = true
	s.position = Position{Known: true, Next: seq + 1, Timestamp: timestamp}
	return false
}

// bridged reports whether lost messages are part of the seed.
func (s *subscriber) bridged(got uint64) bool {
	return s.seeded && !s.begun && (!s.position.Known || got <= s.position.Next)
}

// unseed forgets the seed with the rest of what is in doubt.
func (s *subscriber) unseed() {
	s.seeded, s.unnumbered = false, false
	if !s.begun {
		s.position = Position{}
	}
}
