package jinja

import (
	"errors"
	"fmt"
	"math"

	"kvepp/prompt/values"
)

// statement is a part of a template that writes text or sets names. It sets execution.line before its own work.
type statement interface {
	run(s *scope) exit
}

// exit says how a statement ended.
type exit uint8

const (
	finished exit = iota
	breaks
	continues
)

// block is a sequence of statements.
type block []statement

func (b block) run(s *scope) exit {
	for _, node := range b {
		if exit := node.run(s); exit != finished {
			return exit
		}
	}
	return finished
}

// textNode is text outside tags.
type textNode string

func (n textNode) run(s *scope) exit {
	s.out.write(string(n))
	return finished
}

// printNode is {{ value }} and {% print value, value %}.
type printNode struct {
	line   int
	values []expression
}

func (n *printNode) run(s *scope) exit {
	s.x.line = n.line
	for _, value := range n.values {
		n.print(s, value)
	}
	return finished
}

func (n *printNode) print(s *scope, value expression) {
	sum, ok := value.(*arithmetic)
	if !ok {
		s.out.write(s.x.str(value.eval(s)))
		return
	}
	var buffer [8]string
	if v, texts := sum.evalTexts(s, buffer[:0]); texts != nil {
		s.out.write(texts...)
	} else {
		s.out.write(s.x.str(v))
	}
}

// ifNode is {% if %} with its elifs and else.
type ifNode struct {
	branches  []ifBranch
	otherwise block
}

type ifBranch struct {
	line      int
	condition expression
	body      block
}

func (n *ifNode) run(s *scope) exit {
	for i := range n.branches {
		branch := &n.branches[i]
		s.x.line = branch.line
		v := branch.condition.eval(s)
		s.x.step(1)
		if truth(v) {
			return branch.body.run(s)
		}
	}
	return n.otherwise.run(s)
}

// loop is the variable loop inside {% for %}.
type loop struct {
	items   []any    // the items so far: all of them if next is nil
	next    nextItem // makes further items
	index   int
	depth   int                    // recursion depth, from 0
	recurse func(items any) string // nil unless the loop is recursive
}

// has reports whether the loop has the item of an index. It makes the items up to that one.
func (l *loop) has(x *execution, index int) bool {
	for l.next != nil && index >= len(l.items) {
		item, ok := l.next()
		if !ok {
			l.next = nil
			break
		}
		x.alloc(2 * itemSize)
		l.items = append(l.items, item)
	}
	return index < len(l.items)
}

// forNode is {% for %}.
type forNode struct {
	line      int
	target    target
	items     expression
	condition expression // may be nil
	recursive bool
	body      block
	otherwise block
}

func (n *forNode) run(s *scope) exit {
	s.x.line = n.line
	return n.over(s, n.items.eval(s), 0)
}

// over runs the loop over the items of a value, at this recursion depth.
func (n *forNode) over(s *scope, v any, depth int) exit {
	l := n.start(s, v)
	s.x.alloc(valueSize)
	l.depth = depth
	if n.recursive {
		l.recurse = func(items any) string {
			line := s.x.line
			s.x.enter()
			c := &scope{x: s.x, frame: s.frame, out: &output{x: s.x}}
			n.over(c, items, depth+1)
			s.x.leave()
			s.x.line = line
			return c.out.text()
		}
	}
	// Jinja2 runs the else unless the body has reached its end, without a continue or break. MiniJinja runs it without
	// an item, and after a break at the first one.
	completed := false
	for i := 0; l.has(s.x, i); i++ {
		l.index = i
		body := s.inner()
		body.frame.set("loop", l)
		s.x.step(1)
		n.target.assign(body, l.items[i])
		exit := n.body.run(body)
		s.x.line = n.line
		if exit == breaks {
			break
		}
		completed = completed || exit == finished || s.x.mini
	}
	switch {
	case completed || n.otherwise == nil:
		return finished
	case s.x.mini:
		return n.otherwise.run(s)
	}
	return n.otherwise.run(s.inner())
}

// start returns the loop over the items of a value. Python evaluates the loop's condition for an item when the loop
// reaches it, and MiniJinja for all items first.
func (n *forNode) start(s *scope, v any) *loop {
	_, lazy := v.(*generator)
	if !lazy && n.condition == nil {
		return &loop{items: s.x.iterate(v)}
	}
	next := s.x.iterator(v)
	l := &loop{next: next}
	if n.condition == nil {
		return l
	}
	l.next = func() (any, bool) {
		for {
			item, ok := next()
			if !ok {
				return nil, false
			}
			s.x.step(1)
			inner := s.inner()
			n.target.assign(inner, item)
			if truth(n.condition.eval(inner)) {
				return item, true
			}
		}
	}
	if s.x.mini {
		l.has(s.x, math.MaxInt)
	}
	return l
}

// loopExit is {% break %} or {% continue %}.
type loopExit exit

func (n loopExit) run(*scope) exit { return exit(n) }

// unsupportedTag is a tag that this package does not have. With include, import and extends Jinja2 fails, too, because
// Transformers gives it no other templates.
type unsupportedTag struct {
	line int
	name string
}

func (n unsupportedTag) run(s *scope) exit {
	s.x.line = n.line
	panic(failure{unsupported("the tag %s", n.name)})
}

// target is something that can be assigned to.
type target interface {
	assign(s *scope, value any)
}

type nameTarget string

func (t nameTarget) assign(s *scope, value any) {
	s.set(string(t), value)
}

// attributeTarget is an attribute of a namespace.
type attributeTarget struct{ name, attribute string }

func (t attributeTarget) assign(s *scope, value any) {
	v := s.get(t.name)
	ns, ok := v.(*namespace)
	if !ok {
		panic(failure{errors.New("cannot assign attribute on non-namespace object")})
	}
	ns.set(s.x, t.attribute, value)
}

type tupleTarget []target

func (t tupleTarget) assign(s *scope, value any) {
	items := s.x.iterate(value)
	if len(items) != len(t) {
		panic(failure{fmt.Errorf("%d values cannot be unpacked into %d names", len(items), len(t))})
	}
	for i, target := range t {
		target.assign(s, items[i])
	}
}

// setNode is {% set target = value %}, or {% set target %}body{% endset %}.
type setNode struct {
	line    int
	target  target
	value   expression // nil for the second form
	filters []*filterLink
	body    block
}

func (n *setNode) run(s *scope) exit {
	s.x.line = n.line
	var v any
	if n.value != nil {
		v = n.value.eval(s)
	} else {
		text, exit := s.capture(n.body, s.x.mini)
		if exit != finished {
			return exit
		}
		s.x.line = n.line
		v = applyFilters(s, text, n.filters)
	}
	s.x.step(1)
	n.target.assign(s, v)
	return finished
}

func applyFilters(s *scope, v any, filters []*filterLink) any {
	for _, f := range filters {
		v = f.apply(s, v)
	}
	return v
}

// filterNode is {% filter name %}body{% endfilter %}.
type filterNode struct {
	line    int
	filters []*filterLink
	body    block
}

func (n *filterNode) run(s *scope) exit {
	text, exit := s.capture(n.body, s.x.mini)
	if exit != finished {
		return exit
	}
	s.x.line = n.line
	s.out.write(s.x.str(applyFilters(s, text, n.filters)))
	return finished
}

// scopedNode is {% generation %}. Like Transformers, it runs its body in a scope of its own, as a macro's body.
type scopedNode struct {
	line int
	body block
	uses macroUses
}

func (n *scopedNode) run(s *scope) exit {
	text, _ := s.capture(n.body, false)
	s.x.line = n.line
	s.out.write(text)
	return finished
}

// macro is a macro, or the body of a {% call %}.
type macro struct {
	name       string
	line       int
	parameters []parameter
	body       block
	uses       macroUses
}

type parameter struct {
	name     string
	fallback expression // the default value, or nil
}

// function returns the macro as a value. Its body sees the names of the scope that defines the macro.
func (m *macro) function(s *scope) *function {
	x, defined := s.x, s.frame
	return &function{name: m.name, macro: true, call: func(_ *execution, a *arguments) any {
		// bind searches the arguments for each parameter.
		x.step(1 + (len(m.parameters)+len(a.positional))*(1+len(a.names))/manyNames)
		x.enter()
		line := x.line
		x.line = m.line
		inner := &scope{x: x, frame: &frame{parent: defined}, out: &output{x: x}}
		m.bind(inner, a)
		m.body.run(inner)
		x.leave()
		x.line = line
		return inner.out.text()
	}}
}

// bind sets a macro's parameters and special names from a call's arguments.
func (m *macro) bind(s *scope, a *arguments) {
	if s.x.mini && (m.uses.varargs || m.uses.kwargs) {
		panic(failure{unsupported("varargs and kwargs")})
	}
	used := 0 // keyword arguments
	for i, param := range m.parameters {
		keyword, given := a.named(param.name)
		if given {
			used++
		}
		s.set(param.name, m.argument(s, a, i, keyword, given))
	}
	if m.uses.caller {
		caller, given := a.named("caller")
		if given {
			used++
		} else {
			caller = Undefined{Name: "caller", reason: "no caller defined"}
		}
		s.set("caller", caller)
	}
	m.bindRest(s, a, used)
}

// argument returns the value of parameter i. keyword is the keyword argument with its name, if given.
func (m *macro) argument(s *scope, a *arguments, i int, keyword any, given bool) any {
	param := m.parameters[i]
	if s.x.mini && param.fallback != nil && !(i < len(a.positional) && given) {
		v := keyword
		if i < len(a.positional) {
			v, given = a.positional[i], true
		}
		if _, undefined := v.(Undefined); !given || undefined {
			return m.miniDefault(s, param.fallback)
		}
		return v
	}
	switch {
	case i < len(a.positional) && given:
		panic(failure{fmt.Errorf("macro %q got two values for %q", m.name, param.name)})
	case i < len(a.positional):
		return a.positional[i]
	case given:
		return keyword
	case param.fallback != nil:
		return param.fallback.eval(s)
	}
	return Undefined{Name: param.name, reason: fmt.Sprintf("parameter %q was not provided", short(param.name))}
}

// bindRest sets varargs and kwargs if the macro reads them, and else rejects the arguments that go there. used is the
// number of keyword arguments that are bound already.
func (m *macro) bindRest(s *scope, a *arguments, used int) {
	rest := newTuple()
	if len(a.positional) > len(m.parameters) {
		rest.Items = a.positional[len(m.parameters):]
	}
	if m.uses.varargs {
		s.set("varargs", rest)
	} else if len(rest.Items) > 0 {
		panic(failure{fmt.Errorf("macro %q takes not more than %d argument(s)", m.name, len(m.parameters))})
	}
	if m.uses.kwargs {
		s.x.chargeDict(len(a.names))
		s.set("kwargs", m.others(a))
		return
	}
	if used < len(a.names) {
		panic(failure{fmt.Errorf("macro %q takes no such keyword argument: %s", m.name, shortNames(a.names))})
	}
}

// others returns the keyword arguments that are not parameters.
func (m *macro) others(a *arguments) *values.Dict {
	kwargs := values.NewDict()
next:
	for i, name := range a.names {
		if name == "caller" && m.uses.caller {
			continue
		}
		for _, param := range m.parameters {
			if param.name == name {
				continue next
			}
		}
		kwargs.Set(name, a.values[i])
	}
	return kwargs
}

// macroNode is {% macro %}.
type macroNode struct{ macro *macro }

func (n *macroNode) run(s *scope) exit {
	s.x.chargeMacro()
	s.set(n.macro.name, n.macro.function(s))
	return finished
}

// callNode is {% call %}. The callee gets the body as the function caller.
type callNode struct {
	line   int
	call   *chain
	caller *macro
}

func (n *callNode) run(s *scope) exit {
	s.x.line = n.line
	s.x.chargeMacro()
	s.out.write(s.x.str(n.call.evalWithCaller(s, n.caller.function(s))))
	return finished
}
