package kvblock

import "encoding/binary"

// AppendPlaneQuery appends a question to one rank of a Dynamo worker: for all blocks that it holds, or with fromEvent
// for its events from that id on.
//
// Source: dynamo-kv-router 1.6.1, WorkerKvQueryRequest.
func AppendPlaneQuery(dst []byte, instance uint64, rank uint32, fromEvent *uint64) []byte {
	dst = append(dst, "\x86\xa9worker_id\xcf"...)
	dst = binary.BigEndian.AppendUint64(dst, instance)
	dst = append(dst, "\xa7dp_rank"...)
	if rank <= 0x7f {
		dst = append(dst, byte(rank))
	} else {
		dst = binary.BigEndian.AppendUint32(append(dst, 0xce), rank)
	}
	dst = append(dst, "\xaestart_event_id"...)
	if fromEvent == nil {
		dst = append(dst, 0xc0)
	} else {
		dst = binary.BigEndian.AppendUint64(append(dst, 0xcf), *fromEvent)
	}
	return append(dst, "\xacend_event_id\xc0\xb9supports_tree_dump_failed\xc3\xa4kind\xa8recovery"...)
}

// PlaneResponseKind says what a worker responded.
type PlaneResponseKind string

// The kinds of responses, by Dynamo's names. A response of another kind is malformed.
const (
	PlaneTreeDump       PlaneResponseKind = "TreeDump"       // all blocks, up to and including event LastEvent
	PlaneEvents         PlaneResponseKind = "Events"         // the events from the asked one to LastEvent
	PlaneTooNew         PlaneResponseKind = "TooNew"         // there is no such event yet; the newest one is LastEvent
	PlaneInvalidRange   PlaneResponseKind = "InvalidRange"   //
	PlaneTreeDumpFailed PlaneResponseKind = "TreeDumpFailed" // the worker could not collect its blocks; see Message
	PlaneError          PlaneResponseKind = "Error"          // Message says why
)

// PlaneResponse is a worker's response. Read its events with Next.
type PlaneResponse struct {
	Kind      PlaneResponseKind
	LastEvent uint64
	Message   string

	events scanner // at the next event
	left   int
}

// DecodePlaneResponse decodes a response of two parts; the second one says that it was the last. It keeps them.
//
// Errors wrap ErrMalformed. Source: dynamo-kv-router 1.6.1, WorkerKvQueryResponse; dynamo-runtime 1.6.1,
// NetworkStreamWrapper.
func DecodePlaneResponse(parts [][]byte) (*PlaneResponse, error) {
	var a *PlaneResponse
	final := false
	for _, part := range parts {
		s := &scanner{b: part}
		if final {
			return nil, s.fail("a part after the last one")
		}
		err := s.entries("response part", func(key string) (err error) {
			switch {
			case key == "complete_final":
				final = s.peek() == kindBool && s.b[s.p] == 0xc3
				return s.skip()
			case key == "data" && a == nil && !s.skipNil():
				a = &PlaneResponse{}
				return a.read(s)
			}
			return s.skip()
		})
		if err != nil {
			return nil, err
		}
	}
	if a == nil || !final {
		return nil, (&scanner{}).fail("%d parts without a response, or without the last part", len(parts))
	}
	return a, nil
}

// entries reads a map and calls value for each key, at its value.
func (s *scanner) entries(what string, value func(key string) error) error {
	n, err := s.dict(what)
	for i := 0; i < n && err == nil; i++ {
		var key []byte
		if key, err = s.text(what); err == nil {
			err = value(string(key))
		}
	}
	return err
}

// read reads {KIND: content}.
func (a *PlaneResponse) read(s *scanner) error {
	n, err := s.dict("response")
	if err != nil {
		return err
	}
	if n != 1 {
		return s.fail("response of %d kinds, want 1", n)
	}
	kind, err := s.text("response")
	if err != nil {
		return err
	}
	switch a.Kind = PlaneResponseKind(kind); a.Kind {
	case PlaneError:
		text, err := s.text("Error")
		a.Message = string(text)
		return err
	case PlaneTreeDump, PlaneEvents, PlaneTooNew, PlaneInvalidRange, PlaneTreeDumpFailed:
	default:
		return s.fail("response of kind %.40q", kind)
	}
	var last, events bool
	all := true
	err = s.entries(string(kind), func(key string) (err error) {
		switch key {
		case "last_event_id", "newest_available":
			last = true
			a.LastEvent, err = s.count(key)
		case "message":
			var text []byte
			text, err = s.text(key)
			a.Message = string(text)
		case "reset_scope":
			var scope []byte
			scope, err = s.text(key)
			all = string(scope) == "all"
		case "events":
			events = true
			if a.left, err = s.array(key); err != nil {
				return err
			}
			a.events = *s
			for i := 0; i < a.left && err == nil; i++ {
				err = s.skip()
			}
		default:
			err = s.skip()
		}
		return err
	})
	dump := a.Kind == PlaneTreeDump
	switch {
	case err != nil:
		return err
	case (dump || a.Kind == PlaneEvents) && !(last && events):
		return s.fail("%s without events or last_event_id", kind)
	case dump && !all:
		return s.fail("TreeDump that does not replace all blocks")
	}
	return nil
}

// Next decodes up to n further events into b, replacing what it held, and reports whether there were any. The ids of a
// TreeDump's events are not those of the worker's events.
//
// Errors wrap ErrMalformed.
func (a *PlaneResponse) Next(b *PlaneBatch, n int) (any bool, err error) {
	*b = PlaneBatch{Events: b.Events[:0], blocks: b.blocks[:0], hashes: b.hashes[:0]}
	for ; a.left > 0 && n > 0; n-- {
		a.left--
		b.Events = append(b.Events, RouterEvent{})
		if err := b.routerEvent(&a.events, &b.Events[len(b.Events)-1]); err != nil {
			return false, err
		}
	}
	return len(b.Events) > 0, nil
}
