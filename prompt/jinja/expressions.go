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
	eval(s *scope) any
}

type literal struct{ value any }

func (n literal) eval(*scope) any { return n.value }

type variable string

func (n variable) eval(s *scope) any { return s.get(string(n)) }

// sequence is a list or tuple display, as in [a, b].
type sequence struct {
	items []expression
	kind  values.ListKind
}

func (n *sequence) eval(s *scope) any {
	s.x.chargeList(len(n.items))
	return &values.List{Items: evalAll(s, n.items), Kind: n.kind}
}

func evalAll(s *scope, list []expression) []any {
	values := make([]any, len(list))
	for i, e := range list {
		values[i] = e.eval(s)
	}
	return values
}

// dictNode is a dict display, as in {a: b}.
type dictNode struct{ keys, values []expression }

func (n *dictNode) eval(s *scope) any {
	s.x.chargeDict(len(n.keys))
	d := values.NewDict()
	for i := range n.keys {
		key := n.keys[i].eval(s)
		s.x.put(d, key, n.values[i].eval(s))
	}
	return d
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

func (n *conditional) eval(s *scope) any {
	for _, c := range slices.Backward(n.choices) {
		if truth(c.condition.eval(s)) {
			continue
		}
		if c.otherwise == nil {
			return Undefined{reason: "the inline if-expression evaluated to false and no else section was defined"}
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

func (n *shortCircuit) eval(s *scope) (v any) {
	if s.x.mini && allLiterals(n.items) {
		panic(failure{unsupported("an \"and\" or \"or\" of constants alone")})
	}
	for _, item := range n.items {
		if v = item.eval(s); truth(v) == n.stopAt {
			break
		}
	}
	return v
}

// negation is one or more operators not.
type negation struct {
	value    expression
	negative bool
}

func (n *negation) eval(s *scope) any {
	return truth(n.value.eval(s)) != n.negative
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

func (n *comparison) eval(s *scope) any {
	left := n.first.eval(s)
	for _, op := range n.rest {
		right := op.operand.eval(s)
		if !s.x.compare(op.operator, left, right) {
			return false
		}
		left = right
	}
	return true
}

// arithmetic is a sequence of operators of one precedence, evaluated from left to right.
type arithmetic struct {
	first expression
	rest  []operation
}

func (n *arithmetic) eval(s *scope) any {
	var buffer [8]string
	v, texts := n.evalTexts(s, buffer[:0])
	if texts != nil {
		return s.x.concatAll(texts)
	}
	return v
}

// evalTexts evaluates the operators. A sum of only strings is returned as these strings, appended to texts: most sums
// are printed at once and need not be joined. Any other result is returned as a value with nil texts.
func (n *arithmetic) evalTexts(s *scope, texts []string) (any, []string) {
	v := n.first.eval(s)
	text, sum := v.(string)
	texts = append(texts, text)
	size := len(text)
	for _, op := range n.rest {
		right := op.operand.eval(s)
		if text, ok := right.(string); ok && sum && op.operator == "+" {
			// Count the same as x.add, which would join both here.
			size += len(text)
			s.x.step(2)
			s.x.checkSize(size)
			texts = append(texts, text)
			continue
		}
		if sum {
			v = s.x.concatAll(texts)
			sum = false
		}
		v = s.x.arithmetic(op.operator, v, right)
	}
	if sum {
		return nil, texts
	}
	return v, nil
}

// concatenation is a ~ b ~ c.
type concatenation struct{ items []expression }

func (n *concatenation) eval(s *scope) any {
	return s.x.join("", evalAll(s, n.items))
}

// sign is -value or +value.
type sign struct {
	value    expression
	negative bool
}

func (n *sign) eval(s *scope) any {
	return s.x.signed(n.value.eval(s), n.negative)
}

// chain is a value followed by links. Each link is applied to the result of the link before it.
type chain struct {
	first expression
	links []link
}

type link interface {
	apply(s *scope, v any) any
}

func (n *chain) eval(s *scope) any {
	v := n.first.eval(s)
	for _, l := range n.links {
		v = l.apply(s, v)
	}
	return v
}

// evalWithCaller evaluates a chain that ends in a call, with the additional argument caller.
func (n *chain) evalWithCaller(s *scope, caller *function) any {
	last := len(n.links) - 1
	v := (&chain{n.first, n.links[:last]}).eval(s)
	var list *argumentList
	switch l := n.links[last].(type) {
	case *callLink:
		list = l.arguments
	case *methodLink:
		v = s.x.attribute(v, l.name)
		list = l.arguments
	}
	a := list.eval(s)
	a.add("caller", caller)
	return s.x.call(v, a)
}

// attributeLink is value.name.
type attributeLink string

func (l attributeLink) apply(s *scope, v any) any {
	s.x.step(1)
	return s.x.attribute(v, string(l))
}

// itemLink is value[item].
type itemLink struct{ item expression }

func (l *itemLink) apply(s *scope, v any) any {
	item := l.item.eval(s)
	s.x.step(1)
	return s.x.item(v, item)
}

// tupleItemLink is value[a, b].
type tupleItemLink struct{}

func (tupleItemLink) apply(_ *scope, v any) any {
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	return Undefined{Name: "tuple", missingFrom: kindName(v)}
}

// sliceLink is value[start:stop:step].
type sliceLink struct{ bounds [3]expression }

func (l *sliceLink) apply(s *scope, v any) any {
	var bounds [3]any
	for i, e := range l.bounds {
		if e != nil {
			bounds[i] = e.eval(s)
		}
	}
	return s.x.slice(v, bounds)
}

// callLink is value(arguments).
type callLink struct{ arguments *argumentList }

func (l *callLink) apply(s *scope, v any) any {
	return s.x.call(v, l.arguments.eval(s))
}

// methodLink is value.name(arguments).
type methodLink struct {
	name      string
	arguments *argumentList
}

func (l *methodLink) apply(s *scope, v any) any {
	if s.x.mini {
		return l.applyMini(s, v)
	}
	if text, ok := v.(string); ok && stringMethods[l.name] != nil {
		a := l.arguments.eval(s) // saves the allocation of a function value
		s.x.step(1)
		return callNamed(s.x, l.name, stringMethods[l.name], text, a)
	}
	f := s.x.attribute(v, l.name)
	return s.x.call(f, l.arguments.eval(s))
}

// filterLink is value|name(arguments).
type filterLink struct {
	name      string
	filter    builtin
	arguments *argumentList
}

func (l *filterLink) apply(s *scope, v any) any {
	a := l.arguments.eval(s)
	s.x.step(1)
	return s.x.callFilter(l.name, l.filter, v, a)
}

// testLink is value is name(arguments).
type testLink struct {
	name      string
	test      builtin
	negative  bool
	arguments *argumentList
}

func (l *testLink) apply(s *scope, v any) any {
	a := l.arguments.eval(s)
	s.x.step(1)
	return truth(s.x.callTest(l.name, l.test, v, a)) != l.negative
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

func (l *argumentList) eval(s *scope) *arguments {
	a := &arguments{}
	if len(l.positional) > 0 {
		a.positional = evalAll(s, l.positional)
	}
	if len(l.names) > 0 {
		a.values = evalAll(s, l.values)
		a.names = slices.Clone(l.names)
	}
	if l.star != nil {
		items := s.x.iterate(l.star.eval(s))
		s.x.chargeList(len(items))
		a.positional = append(a.positional, items...)
	}
	if l.doubleStar == nil {
		return a
	}
	v := l.doubleStar.eval(s)
	d, ok := v.(*values.Dict)
	if !ok {
		panic(failure{fmt.Errorf("argument after ** must be a mapping, not %s", kindName(v))})
	}
	s.x.chargeList(d.Len())
	for key, value := range d.All() {
		name, ok := key.(string)
		if _, marked := key.(markup); marked {
			panic(failure{unsupported("markup as a keyword")})
		}
		if !ok {
			panic(failure{errors.New("keywords must be strings")})
		}
		s.x.step(1 + len(a.names)/manyNames) // the cost of named
		if _, twice := a.named(name); twice {
			panic(failure{fmt.Errorf("got multiple values for keyword argument %q", short(name))})
		}
		a.add(name, value)
	}
	return a
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
func (a *arguments) bind(parameters ...string) []any {
	if len(a.positional) > len(parameters) {
		panic(failure{fmt.Errorf("takes at most %d argument(s), got %d", len(parameters), len(a.positional))})
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
			panic(failure{fmt.Errorf("got multiple values for argument %q", name)})
		case i < len(a.positional):
			values[i] = a.positional[i]
		case given:
			values[i] = v
		case optional:
			values[i] = absent{}
		default:
			panic(failure{fmt.Errorf("missing argument %q", name)})
		}
	}
	if used < len(a.names) {
		panic(failure{fmt.Errorf("unexpected keyword argument among %s", shortNames(a.names))})
	}
	return values
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
	call  func(x *execution, a *arguments) any
}

// builtin is a filter, a test or a method: a function of a value and arguments.
type builtin func(x *execution, v any, a *arguments) any

// callNamed calls a builtin. The error of a failure in it begins with the name.
func callNamed(x *execution, name string, f builtin, v any, a *arguments) any {
	x.calls = append(x.calls, name)
	result := f(x, v, a)
	x.calls = x.calls[:len(x.calls)-1]
	return result
}

// call calls a value.
func (x *execution) call(v any, a *arguments) any {
	x.step(1)
	switch f := v.(type) {
	case *function:
		return f.call(x, a)
	case Undefined:
		panic(failure{f.err()})
	case *loop:
		values := a.bind("iterable")
		if f.recurse == nil {
			panic(failure{errors.New("the loop must have the 'recursive' marker to be called recursively")})
		}
		return f.recurse(values[0])
	}
	panic(failure{fmt.Errorf("'%s' object is not callable", kindName(v))})
}
