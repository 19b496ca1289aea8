package replay

import (
	"kvepp/kvblock"
	"kvepp/router/queue"
)

// holds gives an arrived request its turn in its conversation. It reports whether the request waits for admission, or
// is refused because too many wait.
func (s *Simulation) holds(f *flight) bool {
	size := s.cfg.Engine.BlockSize
	if s.admission == nil || f.Prompt < size {
		return false
	}
	f.turn = s.admission.Arrive(f.Chain[:f.Prompt/size], f.Prompt, s.mostCached(f))
	if f.turn.Continues() {
		return false
	}
	s.wait(s.held, f, queue.Request{Lane: queue.Any, Tokens: f.Prompt, Jump: f.Priority,
		StrictPriority: f.StrictPriority})
	s.admit()
	return true
}

// admit sends on the requests that wait for admission and whose conversations a worker has room for now.
func (s *Simulation) admit() {
	if s.admission == nil {
		return
	}
	for s.held.Len() > 0 {
		s.loads = s.replicas[0].book.Loads(s.loads[:0])
		item := s.held.Pop(func(_ *queue.Class, i *queue.Item[*flight]) bool { return s.hasRoom(i.Value) })
		if item == nil {
			return
		}
		item.Value.item = nil
		s.enqueue(item.Value)
	}
}

// hasRoom reports whether a worker has room for a request's conversation, by s.loads.
func (s *Simulation) hasRoom(f *flight) bool {
	only, bound := s.boundTo(f)
	bound = bound && !s.cfg.SessionSoft
	for w, e := range s.engines {
		if bound && w != only {
			continue
		}
		if w >= len(s.loads) || f.turn.Fits(kvblock.Worker(w), e.cfg.Blocks*e.cfg.BlockSize, s.loads[w].Requests,
			s.loads[w].ActiveTokens) {
			return true
		}
	}
	return false
}

// mostCached returns the most tokens of a prompt that a worker has cached.
func (s *Simulation) mostCached(f *flight) int {
	s.match(f)
	most := 0
	for w := range s.engines {
		most = max(most, s.scores.Blocks(kvblock.Worker(w)))
	}
	return most * s.cfg.Engine.BlockSize
}
