package kvblock

import (
	"encoding/binary"
	"fmt"
)

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
			s.fail("a part after the last one")
		}
		for range s.dict("response part") {
			switch key := string(s.text("response part")); {
			case key == "data" && a == nil && s.peek() != kindNil:
				a = &PlaneResponse{}
				a.read(s)
				continue
			case key == "complete_final":
				final = s.peek() == kindBool && s.b[s.p] == 0xc3
			}
			s.skip()
		}
		if s.err != nil {
			return nil, s.err
		}
	}
	if a == nil || !final {
		return nil, fmt.Errorf("%w: %d parts without a response, or without the last part", ErrMalformed, len(parts))
	}
	return a, nil
}

// read reads {KIND: content}.
func (a *PlaneResponse) read(s *scanner) {
	if n := s.dict("response"); n != 1 {
		s.fail("response of %d kinds, want 1", n)
	}
	switch a.Kind = PlaneResponseKind(s.text("response")); a.Kind {
	case PlaneError:
		a.Message = string(s.text("Error"))
		return
	case PlaneTreeDump, PlaneEvents, PlaneTooNew, PlaneInvalidRange, PlaneTreeDumpFailed:
	default:
		s.fail("response of kind %.40q", string(a.Kind))
	}
	var last, events bool
	all := true
	for range s.dict(string(a.Kind)) {
		switch key := string(s.text("response")); key {
		case "last_event_id", "newest_available":
			last, a.LastEvent = true, s.count(key)
		case "message":
			a.Message = string(s.text(key))
		case "reset_scope":
			all = string(s.text(key)) == "all"
		case "events":
			events, a.left = true, s.array(key)
			a.events = *s
			for range a.left {
				s.skip()
			}
		default:
			s.skip()
		}
	}
	dump := a.Kind == PlaneTreeDump
	switch {
	case (dump || a.Kind == PlaneEvents) && !(last && events):
		s.fail("%s without events or last_event_id", a.Kind)
	case dump && !all:
		s.fail("TreeDump that does not replace all blocks")
	}
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
		if b.routerEvent(&a.events, &b.Events[len(b.Events)-1]); a.events.err != nil {
			return false, a.events.err
		}
	}
	return len(b.Events) > 0, nil
}
