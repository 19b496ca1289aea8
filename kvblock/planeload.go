package kvblock

// PlaneLoad is a worker's report of its load on Dynamo's event plane.
type PlaneLoad struct {
	Instance      uint64 // Dynamo's id of the worker process
	Rank          uint32 // the data-parallel rank
	UsedBlocks    uint64 // KV blocks that its requests hold
	HasUsedBlocks bool   // whether UsedBlocks was sent; some workers send only other numbers
}

// DecodePlaneLoad decodes the envelope of one message of the topic kv_metrics.
//
// Errors wrap ErrMalformed. Source: dynamo-kv-router 1.6.1, protocols (ActiveLoad), as Dynamo's mocker sends it.
func DecodePlaneLoad(envelope []byte) (l PlaneLoad, err error) {
	var outer PlaneBatch
	payload, err := outer.envelope(envelope)
	if err != nil {
		return PlaneLoad{}, err
	}
	s := &scanner{b: payload}
	owned := false
	for range s.dict("load") {
		switch string(s.text("load key")) {
		case "worker_id":
			owned, l.Instance = true, s.count("worker_id")
		case "dp_rank":
			l.Rank = s.uint32("dp_rank")
		case "kv_used_blocks":
			if l.HasUsedBlocks = !s.skipNil(); l.HasUsedBlocks {
				l.UsedBlocks = s.count("kv_used_blocks")
			}
		default:
			s.skip()
		}
	}
	if !owned {
		s.fail("load without worker_id")
	}
	if err := s.end("load"); err != nil {
		return PlaneLoad{}, err
	}
	return l, nil
}

// DecodePlaneFirstTokens appends to dst the ids of the requests whose first token one message of the topic
// active_sequences_events reports. The ids share the message's memory. Over ZMQ a message has many events, over NATS
// one.
//
// Errors wrap ErrMalformed. Source: dynamo-kv-router 1.6.1, protocols (ActiveSequenceEvent).
func DecodePlaneFirstTokens(envelope []byte, dst [][]byte) ([][]byte, error) {
	payload, err := new(PlaneBatch).envelope(envelope)
	if err != nil {
		return nil, err
	}
	s := &scanner{b: payload}
	event := func() {
		var id []byte
		first := false
		for range s.dict("event") {
			switch key := string(s.text("event key")); {
			case key == "request_id":
				id = s.text(key)
			case key == "data" && s.peek() == kindString:
				first = string(s.text(key)) == "MarkPrefillCompleted"
			default:
				s.skip()
			}
		}
		if first && len(id) > 0 {
			dst = append(dst, id)
		}
	}
	if batch := (&scanner{b: payload}); batch.dict("event") == 1 && string(batch.text("event key")) == "events" {
		s = batch
		for range s.array("events") {
			event()
		}
	} else {
		event()
	}
	if err := s.end("event"); err != nil {
		return nil, err
	}
	return dst, nil
}
