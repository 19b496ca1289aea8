package feed

import (
	"errors"

	"kvepp/indexer"
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
	s, err := f.seeding(w)
	if err != nil {
		return err
	}
	defer s.applying.Unlock()
	s.seeded, s.position = true, at
	if class := int(stored.Tier) - int(kvblock.ClassTier(0)); class >= 0 {
		if !s.grouped || class >= s.hybrid.Classes.Len() {
			return indexer.ErrTier
		}
		s.normalizer.LoadBlocks(class, stored.Blocks)
	}
	err = f.index.Load(w, stored)
	s.setClasses(s.normalizer.Traits())
	return err
}

// SeedGroups tells which layer groups w's model has, with this block size of full attention, before the dump's first
// store. complete says that the dump has the blocks of all of them; otherwise w's overlap is an upper bound until its
// blocks are cleared. Without SeedGroups, a dump's blocks count as those of full attention alone.
//
// Errors: ErrNotSubscribed, ErrBegun.
func (f *Feed) SeedGroups(w kvblock.Worker, groups []kvblock.Group, blockSize int, complete bool) error {
	s, err := f.seeding(w)
	if err != nil {
		return err
	}
	defer s.applying.Unlock()
	s.seeded, s.grouped, s.dumpSize = true, complete, blockSize
	s.normalizer.LoadGroups(groups)
	t := s.normalizer.Traits()
	s.setClasses(t)
	if t.Classes.Len() > 0 {
		s.reportTraits(t)
	}
	return nil
}

// seeding returns the subscriber of w with applying locked.
func (f *Feed) seeding(w kvblock.Worker) (*subscriber, error) {
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	f.mu.Unlock()
	if !ok {
		return nil, ErrNotSubscribed
	}
	s.applying.Lock()
	switch {
	case !s.online || s.hold == f.never:
		s.applying.Unlock()
		return nil, ErrNotSubscribed
	case s.begun:
		s.applying.Unlock()
		return nil, ErrBegun
	}
	return s.subscriber, nil
}

// Source is what a dump says of its worker.
type Source struct {
	Position Position
	Groups   []kvblock.Group // the layer groups that its events named
	// Complete says that the dump has the blocks of all groups.
	Complete bool
}

// Dump calls yield with stores that together contain w's blocks, as indexer.Dump does, and with their source, the same
// for each. Blocks of class i are in the tier kvblock.ClassTier(i): classes are numbered as they occur in
// Source.Groups. w's own events wait meanwhile.
func (f *Feed) Dump(w kvblock.Worker, yield func(from *Source, stored kvblock.Stored) bool) {
	var from Source
	f.mu.Lock()
	s, ok := f.subscriptions[w]
	f.mu.Unlock()
	if ok {
		s.applying.Lock()
		defer s.applying.Unlock()
		from.Position = s.position
		from.Groups, from.Complete = s.normalizer.Groups()
		from.Complete = from.Complete && !s.hybrid.Incomplete
	}
	f.index.Dump(w, func(stored kvblock.Stored) bool {
		return stored.Tier > kvblock.TierExternal && !from.Complete || yield(&from, stored)
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
	s.seeded, s.unnumbered, s.grouped, s.dumpSize = false, false, false, 0
	if !s.begun {
		s.position = Position{}
	}
}
