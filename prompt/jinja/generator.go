package jinja

import "kvepp/prompt/values"

// generator is a Python generator or another iterator without a length. It is true, and can be read once.
type generator struct {
	next nextItem
}

// nextItem returns the next item; ok is false after the last one.
type nextItem func() (item any, ok bool)

// generate returns a generator. MiniJinja's filters return lists where Python's return generators.
func (x *execution) generate(next nextItem) any {
	g := &generator{next}
	if x.mini {
		return &values.List{Items: x.iterate(g)}
	}
	x.alloc(2 * valueSize)
	return g
}

// pull returns the next item of a generator. Generators that read each other count as depth.
func (x *execution) pull(g *generator) (any, bool) {
	x.enter()
	defer x.leave()
	x.step(1)
	return g.next()
}

// iterator returns a function that returns the items of a value one after the other.
func (x *execution) iterator(v any) nextItem {
	if g, ok := v.(*generator); ok {
		return func() (any, bool) { return x.pull(g) }
	}
	return nextOf(x.iterate(v))
}

func nextOf(items []any) nextItem {
	return func() (item any, ok bool) {
		if len(items) == 0 {
			return nil, false
		}
		item, items = items[0], items[1:]
		return item, true
	}
}

// transform returns a generator that calls each for the items of a value, and returns its results unless skip is true.
func (x *execution) transform(v any, each func(item any) (result any, skip bool)) any {
	return x.lazily(func() nextItem {
		next := x.iterator(v)
		return func() (any, bool) {
			for {
				item, ok := next()
				if !ok {
					return nil, false
				}
				x.step(1)
				if result, skip := each(item); !skip {
					return result, true
				}
			}
		}
	})
}

// lazily returns a generator that begins as a Python generator does: when its first item is asked for.
func (x *execution) lazily(begin func() nextItem) any {
	var next nextItem
	return x.generate(func() (any, bool) {
		if next == nil {
			next = begin()
		}
		return next()
	})
}
