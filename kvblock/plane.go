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
	if version := s.bigEndian(1); version != planeVersion {
		s.fail("event plane frame of version %d, want %d", version, planeVersion)
	}
	envelope = s.sized(4)
	return envelope, s.end("envelope")
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
	payload, err := b.envelope(envelope)
	if err != nil {
		return err
	}
	s := &scanner{b: payload}
	n := s.array("router events")
	if n > maxEvents {
		s.fail("%d events, want at most %d", n, maxEvents)
	}
	for ; n > 0 && s.err == nil; n-- {
		b.Events = append(b.Events, RouterEvent{})
		b.routerEvent(s, &b.Events[len(b.Events)-1])
	}
	return s.end("router events")
}

// unknown skips and counts the value of an unknown key.
func (b *PlaneBatch) unknown(s *scanner) {
	b.UnknownKeys++
	s.skip()
}

// envelope reads an envelope, and returns its payload.
func (b *PlaneBatch) envelope(envelope []byte) (payload []byte, err error) {
	s := &scanner{b: envelope}
	var publisher, sequence bool
	for range s.dict("envelope") {
		switch string(s.text("envelope key")) {
		case "publisher_id":
			publisher, b.Publisher = true, s.count("publisher_id")
		case "sequence":
			sequence, b.Sequence = true, s.count("sequence")
		case "payload":
			payload = s.bytes("payload")
		case "published_at", "topic":
			s.skip()
		default:
			b.unknown(s)
		}
	}
	if !publisher || !sequence || payload == nil {
		s.fail("envelope without publisher_id, sequence or payload")
	}
	return payload, s.end("envelope")
}

func (b *PlaneBatch) routerEvent(s *scanner, e *RouterEvent) {
	tier, known, local, owned := TierDevice, true, true, false
	op := &e.Operation
	for range s.dict("router event") {
		switch string(s.text("router event key")) {
		case "worker_id":
			owned, e.Instance = true, s.count("worker_id")
		case "storage_tier":
			tier, known = TierNamed(string(s.text("storage_tier")))
		case "residency_domain":
			local = string(s.text("residency_domain")) == "worker"
		case "event":
			b.event(s, e)
		default:
			b.unknown(s)
		}
	}
	op.Stored.Tier, op.Removed.Tier = tier, tier
	switch {
	case !owned || op.Kind == 0:
		s.fail("router event without worker_id or data")
	case op.Kind == OpDropped:
	case !local:
		*op = Operation{Kind: OpDropped, Event: op.Event, Reason: DropNonLocal}
	case !known:
		*op = Operation{Kind: OpDropped, Event: op.Event, Reason: DropUnknownMedium}
	}
}

func (b *PlaneBatch) event(s *scanner, e *RouterEvent) {
	for range s.dict("event") {
		switch string(s.text("event key")) {
		case "event_id":
			e.ID = s.count("event_id")
		case "dp_rank":
			e.Rank = s.uint32("dp_rank")
		case "data":
			e.Operation = Operation{}
			b.change(s, &e.Operation)
		default:
			b.unknown(s)
		}
	}
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
func (b *PlaneBatch) change(s *scanner, op *Operation) {
	bare := s.peek() == kindString
	if !bare {
		if n := s.dict("event data"); n != 1 {
			s.fail("event data of %d kinds, want 1", n)
		}
	}
	tag := string(s.text("event data"))
	switch {
	case tag == "stored" && !bare:
		op.Kind, op.Event = OpStored, BlockStored
		b.storedBlocks(s, &op.Stored)
		return
	case tag == "removed" && !bare:
		op.Kind, op.Event = OpRemoved, BlockRemoved
		b.removedBlocks(s, &op.Removed)
		return
	case tag == "cleared":
		op.Kind, op.Event = OpCleared, AllBlocksCleared
	default:
		op.Kind, op.Event, op.Reason = OpDropped, Ignored, DropIgnored
	}
	if !bare {
		s.skip()
	}
}

func (b *PlaneBatch) storedBlocks(s *scanner, stored *Stored) {
	begin := len(b.blocks)
	for range s.dict("stored") {
		switch string(s.text("stored key")) {
		case "parent_hash":
			if stored.HasParent = !s.skipNil(); stored.HasParent {
				stored.Parent = s.hash()
			}
		case "start_position":
			s.skip()
		case "blocks":
			for n := s.array("blocks"); n > 0 && s.err == nil; n-- {
				b.storedBlock(s)
			}
		default:
			b.unknown(s)
		}
	}
	if stored.Blocks = b.blocks[begin:len(b.blocks):len(b.blocks)]; len(stored.Blocks) == 0 {
		s.fail("stored without blocks")
	}
}

func (b *PlaneBatch) storedBlock(s *scanner) {
	var block StoredBlock
	var named, hashed bool
	for range s.dict("block") {
		switch string(s.text("block key")) {
		case "block_hash":
			named, block.Engine = true, s.hash()
		case "tokens_hash":
			v, _ := s.integer("tokens_hash")
			hashed, block.Local = true, LocalHash(v)
		case "mm_extra_info": // tokens_hash already covers it
			s.skip()
		default:
			b.unknown(s)
		}
	}
	if !named || !hashed {
		s.fail("block without block_hash or tokens_hash")
	}
	b.blocks = append(b.blocks, block)
}

func (b *PlaneBatch) removedBlocks(s *scanner, removed *Removed) {
	begin := len(b.hashes)
	for range s.dict("removed") {
		if string(s.text("removed key")) == "block_hashes" {
			b.hashes = s.hashes(b.hashes, s.array("block_hashes"))
		} else {
			b.unknown(s)
		}
	}
	removed.Hashes = b.hashes[begin:len(b.hashes):len(b.hashes)]
}
