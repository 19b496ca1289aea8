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
	s := &scanner{b: envelope}
	var outer PlaneBatch
	payload, err := outer.envelope(s)
	if err != nil {
		return PlaneLoad{}, err
	}
	if s.p != len(envelope) {
		return PlaneLoad{}, s.fail("%d bytes after the envelope", len(envelope)-s.p)
	}
	s = &scanner{b: payload}
	n, err := s.dict("load")
	if err != nil {
		return PlaneLoad{}, err
	}
	owned := false
	for range n {
		key, err := s.text("load key")
		if err != nil {
			return PlaneLoad{}, err
		}
		switch string(key) {
		case "worker_id":
			owned = true
			l.Instance, err = s.count("worker_id")
		case "dp_rank":
			l.Rank, err = s.uint32("dp_rank")
		case "kv_used_blocks":
			if l.HasUsedBlocks = !s.skipNil(); l.HasUsedBlocks {
				l.UsedBlocks, err = s.count("kv_used_blocks")
			}
		default:
			err = s.skip()
		}
		if err != nil {
			return PlaneLoad{}, err
		}
	}
	if !owned {
		return PlaneLoad{}, s.fail("load without worker_id")
	}
	if s.p != len(payload) {
		return PlaneLoad{}, s.fail("%d bytes after the load", len(payload)-s.p)
	}
	return l, nil
}
