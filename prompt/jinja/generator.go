package jinja

import "kvepp/prompt/values"

// generator is a Python generator or another iterator without a length. It is true, and can be read once.
type generator struct {
	next nextItem
}

// nextItem returns the next item; ok is false after the last one.
type nextItem func() (item any, ok bool, err error)

// generate returns a generator. MiniJinja's filters return lists where Python's return generators.
func (x *execution) generate(next nextItem) (any, error) {
	g := &generator{next}
	if x.mini {
		items, err := x.iterate(g)
		return &values.List{Items: items}, err
	}
	return g, x.alloc(2 * valueSize)
}

// pull returns the next item of a generator. Generators that read each other count as depth.
func (x *execution) pull(g *generator) (any, bool, error) {
	if err := x.enter(); err != nil {
		return nil, false, err
	}
	defer x.leave()
	if err := x.step(1); err != nil {
		return nil, false, err
	}
	return g.next()
}

// iterator returns a function that returns the items of a value one after the other.
func (x *execution) iterator(v any) (nextItem, error) {
	if g, ok := v.(*generator); ok {
		return func() (any, bool, error) { return x.pull(g) }, nil
	}
	items, err := x.iterate(v)
	return nextOf(items), err
}

func nextOf(items []any) nextItem {
	return func() (item any, ok bool, err error) {
		if len(items) == 0 {
			return nil, false, nil
		}
		item, items = items[0], items[1:]
		return item, true, nil
	}
}

// transform returns a generator that calls each for the items of a value, and returns its results unless skip is true.
func (x *execution) transform(v any, each func(item any) (result any, skip bool, err error)) (any, error) {
	return x.lazily(func() (nextItem, error) {
		next, err := x.iterator(v)
		return func() (result any, ok bool, err error) {
			for skip := true; skip && err == nil; {
				var item any
				if item, ok, err = next(); err == nil && ok {
					err = x.step(1)
				}
				if err != nil || !ok {
					return nil, false, err
				}
				result, skip, err = each(item)
			}
			return result, err == nil, err
		}, err
	})
}

// lazily returns a generator that begins as a Python generator does: when its first item is asked for.
func (x *execution) lazily(begin func() (nextItem, error)) (any, error) {
	var next nextItem
	return x.generate(func() (_ any, _ bool, err error) {
		if next == nil {
			if next, err = begin(); err != nil {
				return nil, false, err
			}
		}
		return next()
	})
}
