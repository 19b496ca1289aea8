package feed

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"kvepp/indexer"
	"kvepp/kvblock"
)

// setClasses tells the index the worker's classes, if they changed. If some of the worker's blocks are from a dump
// without the blocks of classes, the index does not have these.
func (s *subscriber) setClasses(t kvblock.Traits) {
	h := indexer.Hybrid{Classes: t.Classes, BlockSize: cmp.Or(t.BlockSize, s.dumpSize), Chunk: s.layers.Chunk,
		Drop: s.eagleDrop, Incomplete: s.seeded && (!s.grouped || s.unnumbered)}
	if t.EAGLE {
		h.Drop = 0 // blocks are hashed together with the token behind them instead
	}
	if h.BlockSize == 0 || h.Classes.Len() == 0 && (h.Drop == 0 || t.UpperBound) {
		h = indexer.Hybrid{}
	}
	if h == s.hybrid {
		return
	}
	s.hybrid = h
	if h == (indexer.Hybrid{}) {
		s.feed.index.SetHybrid(s.worker, nil)
	} else {
		s.feed.index.SetHybrid(s.worker, &h)
	}
}

// compareLayers logs what the events say about the model's layers that its config.json does not, or the other way
// round. Each layer group announces itself with the first blocks that are stored.
func (s *subscriber) compareLayers() {
	if s.compared || !s.layers.Known || s.seeded {
		return
	}
	s.compared = true
	t := s.normalizer.Traits()
	if t.UpperBound {
		return // the classes are not known
	}
	if differences := s.layers.compare(&t.Classes); len(differences) > 0 {
		s.feed.log.Warn(
			"a worker's KV events and the config.json of --model differ about the model's layers. kvepp goes by the "+
				"events. Does the worker serve this model? (vLLM with --disable-hybrid-kv-cache-manager announces "+
				"full attention alone)",
			"worker",
			s.name,
			"differences",
			strings.Join(differences, "; "),
		)
	}
}

// compare lists the differences between config.json and the classes that events announce.
func (l *Layers) compare(classes *kvblock.Classes) (differences []string) {
	var windows []int
	chunk, state := false, false
	for _, c := range classes[:classes.Len()] {
		switch c.Kind {
		case kvblock.ClassWindow:
			windows = append(windows, int(c.Window))
		case kvblock.ClassChunk:
			chunk = true
		case kvblock.ClassState:
			state = true
		}
	}
	differ := func(what, events, config string) {
		differences = append(differences, fmt.Sprintf("%s: %s in the events, %s in config.json", what, events, config))
	}
	slices.Sort(windows)
	windows = slices.Compact(windows)
	if !slices.Equal(windows, l.Windows) {
		differ("windows", tokens(windows...), tokens(l.Windows...))
	}
	if chunk != (l.Chunk > 0) {
		differ("chunked layers", some(chunk), some(l.Chunk > 0))
	}
	if state != l.State {
		differ("layers with a state", some(state), some(l.State))
	}
	return differences
}

func some(are bool) string {
	if are {
		return "some"
	}
	return "none"
}

func tokens(windows ...int) string {
	if len(windows) == 0 {
		return "none"
	}
	return strings.Trim(fmt.Sprint(windows), "[]") + " tokens"
}
