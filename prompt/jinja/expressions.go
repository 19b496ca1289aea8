package jinja

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/values"
)

// expression is a part of a template that has a value.
type expression interface {
	eval(s *scope) (any, error)
}

type literal struct{ value any }

func (n literal) eval(*scope) (any, error) { return n.value, nil }

type variable string

func (n variable) eval(s *scope) (any, error) { return s.get(string(n)) }

// sequence is a list or tuple display, as in [a, b].
type sequence struct {
	items []expression
	kind  values.ListKind
}

func (n *sequence) eval(s *scope) (any, error) {
	if err := s.x.chargeList(len(n.items)); err != nil {
		return nil, err
	}
	items, err := evalAll(s, n.items)
	return &values.List{Items: items, Kind: n.kind}, err
}

func evalAll(s *scope, list []expression) ([]any, error) {
	values := make([]any, len(list))
	for i, e := range list {
		var err error
		if values[i], err = e.eval(s); err != nil {
			return nil, err
		}
	}
	return values, nil
}

// dictNode is a dict display, as in {a: b}.
type dictNode struct{ keys, values []expression }

func (n *dictNode) eval(s *scope) (any, error) {
	if err := s.x.chargeDict(len(n.keys)); err != nil {
		return nil, err
	}
	d := values.NewDict()
	for i := range n.keys {
		key, err := n.keys[i].eval(s)
		if err != nil {
			return nil, err
		}
		value, err := n.values[i].eval(s)
		if err != nil {
			return nil, err
		}
		if !hashable(key) {
			return nil, unhashable(key)
		}
		if err := s.x.chargeLookup(key); err != nil {
			return nil, err
		}
		d.Put(key, value)
	}
	return d, nil
}

// conditional is value if c1 else o1 if c2 else o2 ...: the last condition is the outermost.
type conditional struct {
	value   expression
	choices []choice
}

type choice struct {
	condition expression
	otherwise expression // nil means undefined
}

func (n *conditional) eval(s *scope) (any, error) {
	for _, c := range slices.Backward(n.choices) {
		v, err := c.condition.eval(s)
		if err != nil {
			return nil, err
		}
		if truth(v) {
			continue
		}
		if c.otherwise == nil {
			return Undefined{reason: "the inline if-expression evaluated to false and no else section was defined"}, nil
		}
		return c.otherwise.eval(s)
	}
	return n.value.eval(s)
}

// shortCircuit is a or b or ... (stopAt is true), or a and b and ... (stopAt is false).
type shortCircuit struct {
	items  []expression
	stopAt bool
}

func (n *shortCircuit) eval(s *scope) (v any, err error) {
	if s.x.mini && allLiterals(n.items) {
		return nil, unsupported("an \"and\" or \"or\" of constants alone")
	}
	for _, item := range n.items {
		if v, err = item.eval(s); err != nil || truth(v) == n.stopAt {
			return v, err
		}
	}
	return v, nil
}

// negation is one or more operators not.
type negation struct {
	value    expression
	negative bool
}

func (n *negation) eval(s *scope) (any, error) {
	v, err := n.value.eval(s)
	return truth(v) != n.negative, err
}

// operation is an operator and its right operand.
type operation struct {
	operator string
	operand  expression
}

// comparison is a < b < c: true if every pair compares true.
type comparison struct {
	first expression
	rest  []operation
}

func (n *comparison) eval(s *scope) (any, error) {
	left, err := n.first.eval(s)
	if err != nil {
		return nil, err
	}
	for _, op := range n.rest {
		right, err := op.operand.eval(s)
		if err != nil {
			return nil, err
		}
		ok, err := s.x.compare(op.operator, left, right)
		if err != nil || !ok {
			return false, err
		}
		left = right
	}
	return true, nil
}

// arithmetic is a sequence of operators of one precedence, evaluated from left to right.
type arithmetic struct {
	first expression
	rest  []operation
}

func (n *arithmetic) eval(s *scope) (any, error) {
	var buffer [8]string
	v, texts, err := n.evalTexts(s, buffer[:0])
	if texts != nil {
		return s.x.concatAll(texts)
	}
	return v, err
}

// evalTexts evaluates the operators. A sum of only strings is returned as these strings, appended to texts: most sums
// are printed at once and need not be joined. Any other result is returned as a value with nil texts.
func (n *arithmetic) evalTexts(s *scope, texts []string) (any, []string, error) {
	v, err := n.first.eval(s)
	if err != nil {
		return nil, nil, err
	}
	text, sum := v.(string)
	texts = append(texts, text)
	size := len(text)
	for _, op := range n.rest {
		right, err := op.operand.eval(s)
		if err != nil {
			return nil, nil, err
		}
		if text, ok := right.(string); ok && sum && op.operator == "+" {
			// Count the same as x.add, which would join both here.
			size += len(text)
			if err := s.x.step(2); err != nil {
				return nil, nil, err
			}
			if err := s.x.checkSize(size); err != nil {
				return nil, nil, err
			}
			texts = append(texts, text)
			continue
		}
		if sum {
			if v, err = s.x.concatAll(texts); err != nil {
				return nil, nil, err
			}
			sum = false
		}
		if v, err = s.x.arithmetic(op.operator, v, right); err != nil {
			return nil, nil, err
		}
	}
	if sum {
		return nil, texts, nil
	}
	return v, nil, nil
}

// concatenation is a ~ b ~ c.
type concatenation struct{ items []expression }

func (n *concatenation) eval(s *scope) (any, error) {
	values, err := evalAll(s, n.items)
	if err != nil {
		return nil, err
	}
	return s.x.join("", values)
}

// sign is -value or +value.
type sign struct {
	value    expression
	negative bool
}

func (n *sign) eval(s *scope) (any, error) {
	v, err := n.value.eval(s)
	if err != nil {
		return nil, err
	}
	return s.x.signed(v, n.negative)
}

// chain is a value followed by links. Each link is applied to the result of the link before it.
type chain struct {
	first expression
	links []link
}

type link interface {
	apply(s *scope, v any) (any, error)
}

func (n *chain) eval(s *scope) (any, error) {
	v, err := n.first.eval(s)
	for _, l := range n.links {
		if err != nil {
			return nil, err
		}
		v, err = l.apply(s, v)
	}
	return v, err
}

// evalWithCaller evaluates a chain that ends in a call, with the additional argument caller.
func (n *chain) evalWithCaller(s *scope, caller *function) (any, error) {
	last := len(n.links) - 1
	v, err := (&chain{n.first, n.links[:last]}).eval(s)
	if err != nil {
		return nil, err
	}
	var list *argumentList
	switch l := n.links[last].(type) {
	case *callLink:
		list = l.arguments
	case *methodLink:
		if v, err = s.x.attribute(v, l.name); err != nil {
			return nil, err
		}
		list = l.arguments
	}
	a, err := list.eval(s)
	if err != nil {
		return nil, err
	}
	a.add("caller", caller)
	return s.x.call(v, a)
}

// attributeLink is value.name.
type attributeLink string

func (l attributeLink) apply(s *scope, v any) (any, error) {
	if err := s.x.step(1); err != nil {
		return nil, err
	}
	return s.x.attribute(v, string(l))
}

// itemLink is value[item].
type itemLink struct{ item expression }

func (l *itemLink) apply(s *scope, v any) (any, error) {
	item, err := l.item.eval(s)
	if err != nil {
		return nil, err
	}
	if err := s.x.step(1); err != nil {
		return nil, err
	}
	return s.x.item(v, item)
}

// tupleItemLink is value[a, b].
type tupleItemLink struct{}

func (tupleItemLink) apply(_ *scope, v any) (any, error) {
	if u, ok := v.(Undefined); ok {
		return nil, u.err()
	}
	return Undefined{Name: "tuple", missingFrom: kindName(v)}, nil
}

// sliceLink is value[start:stop:step].
type sliceLink struct{ bounds [3]expression }

func (l *sliceLink) apply(s *scope, v any) (any, error) {
	var bounds [3]any
	for i, e := range l.bounds {
		if e == nil {
			continue
		}
		var err error
		if bounds[i], err = e.eval(s); err != nil {
			return nil, err
		}
	}
	return s.x.slice(v, bounds)
}

// callLink is value(arguments).
type callLink struct{ arguments *argumentList }

func (l *callLink) apply(s *scope, v any) (any, error) {
	a, err := l.arguments.eval(s)
	if err != nil {
		return nil, err
	}
	return s.x.call(v, a)
}

// methodLink is value.name(arguments).
type methodLink struct {
	name      string
	arguments *argumentList
}

func (l *methodLink) apply(s *scope, v any) (any, error) {
	if s.x.mini {
		return l.applyMini(s, v)
	}
	if text, ok := v.(string); ok && stringMethods[l.name] != nil {
		a, err := l.arguments.eval(s) // saves the allocation of a function value
		if err != nil {
			return nil, err
		}
		if err := s.x.step(1); err != nil {
			return nil, err
		}
		return callNamed(s.x, l.name, stringMethods[l.name], text, a)
	}
	f, err := s.x.attribute(v, l.name)
	if err != nil {
		return nil, err
	}
	a, err := l.arguments.eval(s)
	if err != nil {
		return nil, err
	}
	return s.x.call(f, a)
}

// filterLink is value|name(arguments).
type filterLink struct {
	name      string
	filter    builtin
	arguments *argumentList
}

func (l *filterLink) apply(s *scope, v any) (any, error) {
	a, err := l.arguments.eval(s)
	if err != nil {
		return nil, err
	}
	if err := s.x.step(1); err != nil {
		return nil, err
	}
	return s.x.callFilter(l.name, l.filter, v, a)
}

// testLink is value is name(arguments).
type testLink struct {
	name      string
	test      builtin
	negative  bool
	arguments *argumentList
}

func (l *testLink) apply(s *scope, v any) (any, error) {
	a, err := l.arguments.eval(s)
	if err != nil {
		return nil, err
	}
	if err := s.x.step(1); err != nil {
		return nil, err
	}
	result, err := s.x.callTest(l.name, l.test, v, a)
	if err != nil {
		return nil, err
	}
	return truth(result) != l.negative, nil
}

// argumentList is the arguments of a call in the source.
type argumentList struct {
	positional []expression
	names      []string
	values     []expression // of names
	star       expression   // *args; may be nil
	doubleStar expression   // **kwargs; may be nil
}

// arguments are the evaluated arguments of a call.
type arguments struct {
	positional []any
	names      []string
	values     []any // of names
}

func (l *argumentList) eval(s *scope) (*arguments, error) {
	a := &arguments{}
	var err error
	if len(l.positional) > 0 {
		if a.positional, err = evalAll(s, l.positional); err != nil {
			return nil, err
		}
	}
	if len(l.names) > 0 {
		if a.values, err = evalAll(s, l.values); err != nil {
			return nil, err
		}
		a.names = slices.Clone(l.names)
	}
	if l.star != nil {
		v, err := l.star.eval(s)
		if err != nil {
			return nil, err
		}
		items, err := s.x.iterate(v)
		if err == nil {
			err = s.x.chargeList(len(items))
		}
		if err != nil {
			return nil, err
		}
		a.positional = append(a.positional, items...)
	}
	if l.doubleStar == nil {
		return a, nil
	}
	v, err := l.doubleStar.eval(s)
	if err != nil {
		return nil, err
	}
	d, ok := v.(*values.Dict)
	if !ok {
		return nil, fmt.Errorf("argument after ** must be a mapping, not %s", kindName(v))
	}
	if err := s.x.chargeList(d.Len()); err != nil {
		return nil, err
	}
	for key, value := range d.All() {
		name, ok := key.(string)
		if _, marked := key.(markup); marked {
			return nil, unsupported("markup as a keyword")
		}
		if !ok {
			return nil, errors.New("keywords must be strings")
		}
		if err := s.x.step(1 + len(a.names)/manyNames); err != nil { // the cost of named
			return nil, err
		}
		if _, twice := a.named(name); twice {
			return nil, fmt.Errorf("got multiple values for keyword argument %q", short(name))
		}
		a.add(name, value)
	}
	return a, nil
}

func (a *arguments) add(name string, value any) {
	a.names = append(a.names, name)
	a.values = append(a.values, value)
}

func (a *arguments) named(name string) (any, bool) {
	for i, n := range a.names {
		if n == name {
			return a.values[i], true
		}
	}
	return nil, false
}

// absent is the value of an optional argument that was not given.
type absent struct{}

// bind returns the arguments in the order of the parameters. A parameter that ends in "=" is optional and may be
// absent.
func (a *arguments) bind(parameters ...string) ([]any, error) {
	if len(a.positional) > len(parameters) {
		return nil, fmt.Errorf("takes at most %d argument(s), got %d", len(parameters), len(a.positional))
	}
	values := make([]any, len(parameters))
	used := 0
	for i, parameter := range parameters {
		name, optional := strings.CutSuffix(parameter, "=")
		v, given := a.named(name)
		if given {
			used++
		}
		switch {
		case i < len(a.positional) && given:
			return nil, fmt.Errorf("got multiple values for argument %q", name)
		case i < len(a.positional):
			values[i] = a.positional[i]
		case given:
			values[i] = v
		case optional:
			values[i] = absent{}
		default:
			return nil, fmt.Errorf("missing argument %q", name)
		}
	}
	if used < len(a.names) {
		return nil, fmt.Errorf("unexpected keyword argument among %s", shortNames(a.names))
	}
	return values, nil
}

// orDefault returns an optional argument, or fallback if it is absent.
func orDefault(v, fallback any) any {
	if v == (any)(absent{}) {
		return fallback
	}
	return v
}

// function is a value that a template can call.
type function struct {
	name  string
	macro bool
	call  func(x *execution, a *arguments) (any, error)
}

// builtin is a filter, a test or a method: a function of a value and arguments.
type builtin func(x *execution, v any, a *arguments) (any, error)

// callNamed calls a builtin and prefixes its error with the name.
func callNamed(x *execution, name string, f builtin, v any, a *arguments) (any, error) {
	result, err := f(x, v, a)
	if err != nil && !errors.Is(err, ErrLimit) {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return result, err
}

// call calls a value.
func (x *execution) call(v any, a *arguments) (any, error) {
	if err := x.step(1); err != nil {
		return nil, err
	}
	switch f := v.(type) {
	case *function:
		return f.call(x, a)
	case Undefined:
		return nil, f.err()
	case *loop:
		values, err := a.bind("iterable")
		if err != nil {
			return nil, err
		}
		if f.recurse == nil {
			return nil, errors.New("the loop must have the 'recursive' marker to be called recursively")
		}
		return f.recurse(values[0])
	}
	return nil, fmt.Errorf("'%s' object is not callable", kindName(v))
}
