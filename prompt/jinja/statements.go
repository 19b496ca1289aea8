package jinja

import (
	"errors"
	"fmt"
	"math"

	"kvepp/prompt/values"
)

// statement is a part of a template that writes text or sets names.
type statement interface {
	run(s *scope) error
}

// block is a sequence of statements.
type block []statement

func (b block) run(s *scope) error {
	for _, node := range b {
		if err := node.run(s); err != nil {
			return err
		}
	}
	return nil
}

// at adds the line to an error, unless it has a position already or is errBreak or errContinue.
func (s *scope) at(line int, err error) error {
	if err == nil || errors.Is(err, errBreak) || errors.Is(err, errContinue) {
		return err
	}
	var placed *Error
	if errors.As(err, &placed) {
		return err
	}
	return &Error{Template: s.x.template.name, Line: line, Err: err}
}

// textNode is text outside tags.
type textNode string

func (n textNode) run(s *scope) error { return s.out.write(string(n)) }

// printNode is {{ value }} and {% print value, value %}.
type printNode struct {
	line   int
	values []expression
}

func (n *printNode) run(s *scope) error {
	for _, value := range n.values {
		if err := n.print(s, value); err != nil {
			return s.at(n.line, err)
		}
	}
	return nil
}

func (n *printNode) print(s *scope, value expression) error {
	var v any
	var err error
	if sum, ok := value.(*arithmetic); ok {
		var buffer [8]string
		var texts []string
		if v, texts, err = sum.evalTexts(s, buffer[:0]); texts != nil {
			return s.out.write(texts...)
		}
	} else {
		v, err = value.eval(s)
	}
	if err != nil {
		return err
	}
	text, err := s.x.str(v)
	if err != nil {
		return err
	}
	return s.out.write(text)
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

func (n *ifNode) run(s *scope) error {
	for i := range n.branches {
		branch := &n.branches[i]
		v, err := branch.condition.eval(s)
		if err == nil {
			err = s.x.step(1)
		}
		if err != nil {
			return s.at(branch.line, err)
		}
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
	depth   int                             // recursion depth, from 0
	changed *values.List                    // the arguments of the last loop.changed
	recurse func(items any) (string, error) // nil unless the loop is recursive
}

// has reports whether the loop has the item of an index. It makes the items up to that one.
func (l *loop) has(x *execution, index int) (bool, error) {
	for l.next != nil && index >= len(l.items) {
		item, ok, err := l.next()
		if err == nil && ok {
			err = x.alloc(2 * itemSize)
		}
		if err != nil {
			return false, err
		}
		if !ok {
			l.next = nil
			break
		}
		l.items = append(l.items, item)
	}
	return index < len(l.items), nil
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

func (n *forNode) run(s *scope) error {
	v, err := n.items.eval(s)
	if err != nil {
		return s.at(n.line, err)
	}
	return n.over(s, v, 0)
}

// over runs the loop over the items of a value, at this recursion depth.
func (n *forNode) over(s *scope, v any, depth int) error {
	l, err := n.start(s, v)
	if err == nil {
		err = s.x.alloc(valueSize)
	}
	if err != nil {
		return s.at(n.line, err)
	}
	l.depth = depth
	if n.recursive {
		l.recurse = func(items any) (string, error) {
			if err := s.x.enter(); err != nil {
				return "", err
			}
			defer s.x.leave()
			c := &scope{x: s.x, frame: s.frame, out: &output{x: s.x}}
			if err := n.over(c, items, depth+1); err != nil {
				return "", err
			}
			return c.out.text()
		}
	}
	// Jinja2 runs the else unless the body has reached its end, without a continue or break. MiniJinja runs it without
	// an item, and after a break at the first one.
	completed := false
	for i := 0; ; i++ {
		if ok, err := l.has(s.x, i); err != nil {
			return s.at(n.line, err)
		} else if !ok {
			break
		}
		l.index = i
		body := s.inner()
		body.frame.set("loop", l)
		err := s.x.step(1)
		if err == nil {
			err = n.target.assign(body, l.items[i])
		}
		if err == nil {
			err = n.body.run(body)
		}
		if err == nil {
			completed = true
		} else if errors.Is(err, errBreak) {
			break
		} else if !errors.Is(err, errContinue) {
			return s.at(n.line, err)
		}
		completed = completed || s.x.mini
	}
	switch {
	case completed || n.otherwise == nil:
		return nil
	case s.x.mini:
		return n.otherwise.run(s)
	}
	return n.otherwise.run(s.inner())
}

// start returns the loop over the items of a value. Python evaluates the loop's condition for an item when the loop
// reaches it, and MiniJinja for all items first.
func (n *forNode) start(s *scope, v any) (*loop, error) {
	_, lazy := v.(*generator)
	if !lazy && n.condition == nil {
		items, err := s.x.iterate(v)
		return &loop{items: items}, err
	}
	next, err := s.x.iterator(v)
	l := &loop{next: next}
	if err != nil || n.condition == nil {
		return l, err
	}
	l.next = func() (any, bool, error) {
		for {
			item, ok, err := next()
			if err == nil && ok {
				err = s.x.step(1)
			}
			if err != nil || !ok {
				return nil, false, err
			}
			inner := s.inner()
			if err := n.target.assign(inner, item); err != nil {
				return nil, false, err
			}
			if v, err := n.condition.eval(inner); err != nil || truth(v) {
				return item, true, err
			}
		}
	}
	if s.x.mini {
		_, err = l.has(s.x, math.MaxInt)
	}
	return l, err
}

// loopExit is {% break %} or {% continue %}.
type loopExit struct{ err error }

func (n loopExit) run(s *scope) error { return n.err }

// unsupportedTag is a tag that this package does not have. With include, import and extends Jinja2 fails, too, because
// Transformers gives it no other templates.
type unsupportedTag struct {
	line int
	name string
}

func (n unsupportedTag) run(s *scope) error { return s.at(n.line, unsupported("the tag %s", n.name)) }

// target is something that can be assigned to.
type target interface {
	assign(s *scope, value any) error
}

type nameTarget string

func (t nameTarget) assign(s *scope, value any) error {
	return s.set(string(t), value)
}

// attributeTarget is an attribute of a namespace.
type attributeTarget struct{ name, attribute string }

func (t attributeTarget) assign(s *scope, value any) error {
	v, err := s.get(t.name)
	if err != nil {
		return err
	}
	ns, ok := v.(*namespace)
	if !ok {
		return errors.New("cannot assign attribute on non-namespace object")
	}
	return ns.set(s.x, t.attribute, value)
}

type tupleTarget []target

func (t tupleTarget) assign(s *scope, value any) error {
	items, err := s.x.iterate(value)
	if err != nil {
		return err
	}
	if len(items) != len(t) {
		return fmt.Errorf("%d values cannot be unpacked into %d names", len(items), len(t))
	}
	for i, target := range t {
		if err := target.assign(s, items[i]); err != nil {
			return err
		}
	}
	return nil
}

// setNode is {% set target = value %}, or {% set target %}body{% endset %}.
type setNode struct {
	line    int
	target  target
	value   expression // nil for the second form
	filters []*filterLink
	body    block
}

func (n *setNode) run(s *scope) error {
	var v any
	var err error
	if n.value != nil {
		v, err = n.value.eval(s)
	} else {
		v, err = n.text(s)
	}
	if err == nil {
		err = s.x.step(1)
	}
	if err == nil {
		err = n.target.assign(s, v)
	}
	return s.at(n.line, err)
}

func (n *setNode) text(s *scope) (any, error) {
	text, err := s.captureOpen(n.body)
	if err != nil {
		return nil, err
	}
	return applyFilters(s, text, n.filters)
}

func applyFilters(s *scope, v any, filters []*filterLink) (any, error) {
	for _, f := range filters {
		var err error
		if v, err = f.apply(s, v); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// filterNode is {% filter name %}body{% endfilter %}.
type filterNode struct {
	line    int
	filters []*filterLink
	body    block
}

func (n *filterNode) run(s *scope) error {
	text, err := s.captureOpen(n.body)
	if err != nil {
		return err
	}
	v, err := applyFilters(s, text, n.filters)
	if err == nil {
		text, err = s.x.str(v)
	}
	if err == nil {
		err = s.out.write(text)
	}
	return s.at(n.line, err)
}

// withNode is {% with target = value, ... %}. The values cannot see the targets. In MiniJinja they see earlier targets.
type withNode struct {
	line    int
	targets []target
	values  []expression
	body    block
}

func (n *withNode) run(s *scope) error {
	inner := s.inner()
	for i, value := range n.values {
		visible := s
		if s.x.mini {
			visible = inner
		}
		v, err := value.eval(visible)
		if err == nil {
			err = n.targets[i].assign(inner, v)
		}
		if err != nil {
			return s.at(n.line, err)
		}
	}
	return n.body.run(inner)
}

// scopedNode is {% generation %}. Like Transformers, it runs its body in a scope of its own, as a macro's body.
type scopedNode struct {
	line int
	body block
	uses macroUses
}

func (n *scopedNode) run(s *scope) error {
	text, err := s.capture(n.body)
	if err == nil {
		err = s.out.write(text)
	}
	return s.at(n.line, err)
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
	return &function{name: m.name, macro: true, call: func(_ *execution, a *arguments) (any, error) {
		// bind searches the arguments for each parameter.
		if err := x.step(1 + (len(m.parameters)+len(a.positional))*(1+len(a.names))/manyNames); err != nil {
			return nil, err
		}
		if err := x.enter(); err != nil {
			return nil, err
		}
		defer x.leave()
		inner := &scope{x: x, frame: &frame{parent: defined}, out: &output{x: x}}
		if err := m.bind(inner, a); err != nil {
			return nil, inner.at(m.line, err)
		}
		if err := m.body.run(inner); err != nil {
			return nil, err
		}
		return inner.out.text()
	}}
}

// bind sets a macro's parameters and special names from a call's arguments.
func (m *macro) bind(s *scope, a *arguments) error {
	if s.x.mini && (m.uses.varargs || m.uses.kwargs) {
		return unsupported("varargs and kwargs")
	}
	used := 0 // keyword arguments
	for i, param := range m.parameters {
		keyword, given := a.named(param.name)
		if given {
			used++
		}
		v, err := m.argument(s, a, i, keyword, given)
		if err != nil {
			return err
		}
		if err := s.set(param.name, v); err != nil {
			return err
		}
	}
	if m.uses.caller {
		caller, given := a.named("caller")
		if given {
			used++
		} else {
			caller = Undefined{Name: "caller", reason: "no caller defined"}
		}
		if err := s.set("caller", caller); err != nil {
			return err
		}
	}
	return m.bindRest(s, a, used)
}

// argument returns the value of parameter i. keyword is the keyword argument with its name, if given.
func (m *macro) argument(s *scope, a *arguments, i int, keyword any, given bool) (any, error) {
	param := m.parameters[i]
	if s.x.mini && param.fallback != nil && !(i < len(a.positional) && given) {
		v := keyword
		if i < len(a.positional) {
			v, given = a.positional[i], true
		}
		if _, undefined := v.(Undefined); !given || undefined {
			return m.miniDefault(s, param.fallback)
		}
		return v, nil
	}
	switch {
	case i < len(a.positional) && given:
		return nil, fmt.Errorf("macro %q got two values for %q", m.name, param.name)
	case i < len(a.positional):
		return a.positional[i], nil
	case given:
		return keyword, nil
	case param.fallback != nil:
		return param.fallback.eval(s)
	}
	return Undefined{Name: param.name, reason: fmt.Sprintf("parameter %q was not provided", short(param.name))}, nil
}

// bindRest sets varargs and kwargs if the macro reads them, and else rejects the arguments that go there. used is the
// number of keyword arguments that are bound already.
func (m *macro) bindRest(s *scope, a *arguments, used int) error {
	rest := newTuple()
	if len(a.positional) > len(m.parameters) {
		rest.Items = a.positional[len(m.parameters):]
	}
	if m.uses.varargs {
		if err := s.set("varargs", rest); err != nil {
			return err
		}
	} else if len(rest.Items) > 0 {
		return fmt.Errorf("macro %q takes not more than %d argument(s)", m.name, len(m.parameters))
	}
	if m.uses.kwargs {
		if err := s.x.chargeDict(len(a.names)); err != nil {
			return err
		}
		return s.set("kwargs", m.others(a))
	}
	if used < len(a.names) {
		return fmt.Errorf("macro %q takes no such keyword argument: %s", m.name, shortNames(a.names))
	}
	return nil
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

func (n *macroNode) run(s *scope) error {
	if err := s.x.chargeMacro(); err != nil {
		return err
	}
	return s.set(n.macro.name, n.macro.function(s))
}

// callNode is {% call %}. The callee gets the body as the function caller.
type callNode struct {
	line   int
	call   *chain
	caller *macro
}

func (n *callNode) run(s *scope) error {
	err := s.x.chargeMacro()
	var v any
	if err == nil {
		v, err = n.call.evalWithCaller(s, n.caller.function(s))
	}
	var text string
	if err == nil {
		text, err = s.x.str(v)
	}
	if err == nil {
		err = s.out.write(text)
	}
	return s.at(n.line, err)
}
