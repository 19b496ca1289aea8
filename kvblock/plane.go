package kvblock

// PlaneBatch is one message about KV blocks on Dynamo's event plane. It holds events that the worker's own normaliser
// has processed. The zero value is empty. One goroutine may use it at a time.
type PlaneBatch struct {
	Publisher uint64 // id of the publisher, which is one rank of one worker process
	Sequence  uint64 // number of the message; a publisher starts at 0
	Events    []RouterEvent

	UnknownKeys int // map keys skipped

	blocks []StoredBlock
	hashes []EngineHash
}

// RouterEvent is one change of a worker's blocks. The slices of Operation are buffers of the PlaneBatch: the next
// DecodePlane overwrites them.
type RouterEvent struct {
	Instance  uint64 // Dynamo's id of the worker process
	Rank      uint32 // the data-parallel rank
	ID        uint64 // counts a publisher's events from 1
	Operation Operation
}

// planeVersion is the first byte of every frame of the event plane over ZMQ.
const planeVersion = 1

// UnframePlane returns the envelope in a frame of the event plane over ZMQ. A frame is a version byte, the envelope's
// length in four bytes (big-endian), and the envelope. Over NATS, envelopes have no frame.
//
// Errors wrap ErrMalformed. Source: dynamo-runtime 1.6.1, transports::event_plane.
func UnframePlane(frame []byte) (envelope []byte, err error) {
	s := &scanner{b: frame}
	version, err := s.bigEndian(1)
	if err != nil {
		return nil, err
	}
	if version != planeVersion {
		return nil, s.fail("event plane frame of version %d, want %d", version, planeVersion)
	}
	if envelope, err = s.sized(4); err != nil {
		return nil, err
	}
	if s.p != len(frame) {
		return nil, s.fail("%d bytes after the envelope", len(frame)-s.p)
	}
	return envelope, nil
}

// DecodePlane decodes the envelope of one message into b, replacing what it held. Block hashes are already Dynamo's
// own, so that events need no normaliser. Events about blocks that the worker does not own, or in an unknown tier,
// become dropped operations.
//
// Errors wrap ErrMalformed; the contents of b are then meaningless.
//
// Source: dynamo-runtime 1.6.1, transports::event_plane (EventEnvelope); dynamo-kv-router 1.6.1, protocols
// (RouterEvent).
func DecodePlane(envelope []byte, b *PlaneBatch) error {
	*b = PlaneBatch{Events: b.Events[:0], blocks: b.blocks[:0], hashes: b.hashes[:0]}
	s := &scanner{b: envelope}
	payload, err := b.envelope(s)
	if err != nil {
		return err
	}
	if s.p != len(envelope) {
		return s.fail("%d bytes after the envelope", len(envelope)-s.p)
	}
	s = &scanner{b: payload}
	n, err := s.array("router events")
	if err != nil {
		return err
	}
	if n > maxEvents {
		return s.fail("%d events, want at most %d", n, maxEvents)
	}
	for range n {
		b.Events = append(b.Events, RouterEvent{})
		if err := b.routerEvent(s, &b.Events[len(b.Events)-1]); err != nil {
			return err
		}
	}
	if s.p != len(payload) {
		return s.fail("%d bytes after the router events", len(payload)-s.p)
	}
	return nil
}

// unknown skips and counts the value of an unknown key.
func (b *PlaneBatch) unknown(s *scanner) error {
	b.UnknownKeys++
	return s.skip()
}

func (b *PlaneBatch) envelope(s *scanner) (payload []byte, err error) {
	n, err := s.dict("envelope")
	if err != nil {
		return nil, err
	}
	var publisher, sequence bool
	for range n {
		key, err := s.text("envelope key")
		if err != nil {
			return nil, err
		}
		switch string(key) {
		case "publisher_id":
			publisher = true
			b.Publisher, err = s.count("publisher_id")
		case "sequence":
			sequence = true
			b.Sequence, err = s.count("sequence")
		case "payload":
			payload, err = s.bytes("payload")
		case "published_at", "topic":
			err = s.skip()
		default:
			err = b.unknown(s)
		}
		if err != nil {
			return nil, err
		}
	}
	if !publisher || !sequence || payload == nil {
		return nil, s.fail("envelope without publisher_id, sequence or payload")
	}
	return payload, nil
}

func (b *PlaneBatch) routerEvent(s *scanner, e *RouterEvent) error {
	n, err := s.dict("router event")
	if err != nil {
		return err
	}
	tier, known, local, owned := TierDevice, true, true, false
	op := &e.Operation
	for range n {
		key, err := s.text("router event key")
		if err != nil {
			return err
		}
		switch string(key) {
		case "worker_id":
			owned = true
			e.Instance, err = s.count("worker_id")
		case "storage_tier":
			var name []byte
			if name, err = s.text("storage_tier"); err == nil {
				tier, known = TierNamed(string(name))
			}
		case "residency_domain":
			var domain []byte
			domain, err = s.text("residency_domain")
			local = string(domain) == "worker"
		case "event":
			err = b.event(s, e)
		default:
			err = b.unknown(s)
		}
		if err != nil {
			return err
		}
	}
	op.Stored.Tier, op.Removed.Tier = tier, tier
	switch {
	case !owned || op.Kind == 0:
		return s.fail("router event without worker_id or data")
	case op.Kind == OpDropped:
	case !local:
		*op = Operation{Kind: OpDropped, Event: op.Event, Reason: DropNonLocal}
	case !known:
		*op = Operation{Kind: OpDropped, Event: op.Event, Reason: DropUnknownMedium}
	}
	return nil
}

func (b *PlaneBatch) event(s *scanner, e *RouterEvent) error {
	n, err := s.dict("event")
	if err != nil {
		return err
	}
	for range n {
		key, err := s.text("event key")
		if err != nil {
			return err
		}
		switch string(key) {
		case "event_id":
			e.ID, err = s.count("event_id")
		case "dp_rank":
			e.Rank, err = s.uint32("dp_rank")
		case "data":
			e.Operation = Operation{}
			err = b.change(s, &e.Operation)
		default:
			err = b.unknown(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// count reads a number from 0 to 2^64-1.
func (s *scanner) count(what string) (uint64, error) {
	v, negative, err := s.integer(what)
	if err == nil && negative {
		return 0, s.fail("%s: negative", what)
	}
	return v, err
}

// TierNamed returns the tier whose String is name, and whether there is one.
func TierNamed(name string) (Tier, bool) {
	for t := TierDevice; t <= TierExternal; t++ {
		if name == t.String() {
			return t, true
		}
	}
	return 0, false
}

// change reads the data of an event: {"stored": …}, {"removed": …} or "cleared".
func (b *PlaneBatch) change(s *scanner, op *Operation) error {
	var tag []byte
	var err error
	bare := s.peek() == kindString
	if bare {
		tag, err = s.text("event data")
	} else {
		var n int
		if n, err = s.dict("event data"); err == nil && n != 1 {
			return s.fail("event data of %d kinds, want 1", n)
		}
		if err == nil {
			tag, err = s.text("event data")
		}
	}
	if err != nil {
		return err
	}
	switch {
	case string(tag) == "stored" && !bare:
		op.Kind, op.Event = OpStored, BlockStored
		return b.storedBlocks(s, &op.Stored)
	case string(tag) == "removed" && !bare:
		op.Kind, op.Event = OpRemoved, BlockRemoved
		return b.removedBlocks(s, &op.Removed)
	case string(tag) == "cleared":
		op.Kind, op.Event = OpCleared, AllBlocksCleared
	default:
		op.Kind, op.Event, op.Reason = OpDropped, Ignored, DropIgnored
	}
	if bare {
		return nil
	}
	return s.skip()
}

func (b *PlaneBatch) storedBlocks(s *scanner, stored *Stored) error {
	n, err := s.dict("stored")
	if err != nil {
		return err
	}
	begin := len(b.blocks)
	for range n {
		key, err := s.text("stored key")
		if err != nil {
			return err
		}
		switch string(key) {
		case "parent_hash":
			if stored.HasParent = !s.skipNil(); stored.HasParent {
				stored.Parent, err = s.hash()
			}
		case "start_position":
			err = s.skip()
		case "blocks":
			var count int
			if count, err = s.array("blocks"); err != nil {
				return err
			}
			for range count {
				if err := b.storedBlock(s); err != nil {
					return err
				}
			}
		default:
			err = b.unknown(s)
		}
		if err != nil {
			return err
		}
	}
	if stored.Blocks = b.blocks[begin:len(b.blocks):len(b.blocks)]; len(stored.Blocks) == 0 {
		return s.fail("stored without blocks")
	}
	return nil
}

func (b *PlaneBatch) storedBlock(s *scanner) error {
	n, err := s.dict("block")
	if err != nil {
		return err
	}
	var block StoredBlock
	var named, hashed bool
	for range n {
		key, err := s.text("block key")
		if err != nil {
			return err
		}
		switch string(key) {
		case "block_hash":
			named = true
			block.Engine, err = s.hash()
		case "tokens_hash":
			hashed = true
			var v uint64
			v, _, err = s.integer("tokens_hash")
			block.Local = LocalHash(v)
		case "mm_extra_info": // tokens_hash already covers it
			err = s.skip()
		default:
			err = b.unknown(s)
		}
		if err != nil {
			return err
		}
	}
	if !named || !hashed {
		return s.fail("block without block_hash or tokens_hash")
	}
	b.blocks = append(b.blocks, block)
	return nil
}

func (b *PlaneBatch) removedBlocks(s *scanner, removed *Removed) error {
	n, err := s.dict("removed")
	if err != nil {
		return err
	}
	begin := len(b.hashes)
	for range n {
		key, err := s.text("removed key")
		if err != nil {
			return err
		}
		if string(key) != "block_hashes" {
			if err := b.unknown(s); err != nil {
				return err
			}
			continue
		}
		count, err := s.array("block_hashes")
		if err != nil {
			return err
		}
		for range count {
			h, err := s.hash()
			if err != nil {
				return err
			}
			b.hashes = append(b.hashes, h)
		}
	}
	removed.Hashes = b.hashes[begin:len(b.hashes):len(b.hashes)]
	return nil
}
