package jinja

import (
	"slices"
	"strings"
)

// Engines inspect a template without rendering it, to decide whether it reads a message's content as a list of parts.
// They search the template's nodes. A macro or a variable between can hide the response from them; this file gives the
// same wrong response then.

// LoopsOverContent reports whether a loop runs over the content of an item of messages. It follows assignments,
// filters, slices and macro parameters, and namespaces if asked to; without them it gives up at messages in a
// namespace's attribute.
//
// Source: vLLM 0.33.0, renderers/hf, _iter_nodes_assign_content_item; 0.32.0 does not follow namespaces.
func (t *Template) LoopsOverContent(followNamespaces bool) bool {
	nodes := t.nodes()
	items, ok := messageNames(nodes, followNamespaces)
	if !ok {
		return false
	}
	isContent := func(e expression) bool {
		p := pathOf(e)
		name, found := strings.CutSuffix(p.text, ".content")
		return found && items[name] && p.reads(name, "content")
	}
	calls := contentCalls(nodes, isContent)
	type enclosing struct{ contentParameters []string } // of the innermost macro with such parameters
	var macros []enclosing
	for _, node := range nodes {
		switch n := node.(type) {
		case *macroNode:
			parameters := n.macro.contentParameters(calls)
			if len(parameters) == 0 && len(macros) > 0 {
				parameters = macros[len(macros)-1].contentParameters
			}
			macros = append(macros, enclosing{parameters})
		case macroEnd:
			macros = macros[:len(macros)-1]
		case *forNode:
			name, isName := n.items.(variable)
			inMacro := len(macros) > 0
			if isContent(n.items) || isName &&
				(inMacro && slices.Contains(macros[len(macros)-1].contentParameters, string(name)) || !inMacro &&
					name == "content") {
				_, ok := n.target.(nameTarget)
				return ok // at a loop with several targets, vLLM stops and finds nothing
			}
		}
	}
	return false
}

// contentArguments are the arguments that are a message's content in the calls of one name.
type contentArguments struct {
	positions map[int]bool
	names     map[string]bool
}

// contentCalls returns for each called name the arguments that are content. The name may be a macro's.
func contentCalls(nodes []any, isContent func(expression) bool) map[string]contentArguments {
	calls := map[string]contentArguments{}
	for _, node := range nodes {
		c, ok := node.(*chain)
		if !ok || len(c.links) == 0 {
			continue
		}
		name, isName := c.first.(variable)
		call, isCall := c.links[0].(*callLink)
		if !isName || !isCall {
			continue
		}
		found, ok := calls[string(name)]
		if !ok {
			found = contentArguments{map[int]bool{}, map[string]bool{}}
			calls[string(name)] = found
		}
		for i, e := range call.arguments.positional {
			if isContent(e) {
				found.positions[i] = true
			}
		}
		for i, e := range call.arguments.values {
			if isContent(e) {
				found.names[call.arguments.names[i]] = true
			}
		}
	}
	return calls
}

// contentParameters returns the parameters of m that receive a message's content in some call.
func (m *macro) contentParameters(calls map[string]contentArguments) []string {
	var names []string
	found := calls[m.name]
	for i, p := range m.parameters {
		if found.positions[i] || found.names[p.name] {
			names = append(names, p.name)
		}
	}
	return names
}

// messageNames returns the names of the items of loops over messages. ok is false if such a loop has several names,
// where vLLM gives up.
func messageNames(nodes []any, followNamespaces bool) (names map[string]bool, ok bool) {
	lists := messageLists(nodes, followNamespaces)
	if lists[""] {
		return nil, false
	}
	names = map[string]bool{}
	for _, node := range nodes {
		loop, isLoop := node.(*forNode)
		if !isLoop {
			continue
		}
		if p := pathOf(loop.items); !lists[p.text] || !p.reads(p.text, "") {
			continue
		}
		name, isName := loop.target.(nameTarget)
		if !isName {
			return nil, false
		}
		names[string(name)] = true
	}
	return names, true
}

// messageLists returns "messages" and every other name, "a" or "a.b", to which messages or a part of it is assigned.
// Without namespaces, "" stands for all targets that are no name.
func messageLists(nodes []any, followNamespaces bool) map[string]bool {
	given := map[string][]string{} // the names to which a name is assigned
	assigned := func(value expression, to string) {
		if p := pathOf(value); p.text != "" && p.reads(p.text, "") {
			given[p.text] = append(given[p.text], to)
		}
	}
	for _, node := range nodes {
		set, ok := node.(*setNode)
		if !ok || set.value == nil {
			continue
		}
		name, isName := set.target.(nameTarget)
		switch {
		case isName:
			assigned(set.value, string(name))
		case !followNamespaces:
			assigned(set.value, "")
		}
		if !followNamespaces {
			continue
		}
		switch target := set.target.(type) {
		case nameTarget:
			c, isChain := set.value.(*chain)
			if !isChain || c.first != variable("namespace") || len(c.links) != 1 {
				continue
			}
			if call, isCall := c.links[0].(*callLink); isCall {
				for j, value := range call.arguments.values {
					assigned(value, string(target)+"."+call.arguments.names[j])
				}
			}
		case attributeTarget:
			assigned(set.value, target.name+"."+target.attribute)
		}
	}
	lists := map[string]bool{"messages": true}
	for next := []string{"messages"}; len(next) > 0; {
		name := next[0]
		next = next[1:]
		for _, to := range given[name] {
			if !lists[to] {
				lists[to] = true
				next = append(next, to)
			}
		}
	}
	return lists
}

// LoopsOver reports whether a loop runs over the attribute of a variable, directly or through filters and slices.
//
// Source: SGLang 0.5.21, parser/jinja_template_utils.
func (t *Template) LoopsOver(name, attribute string) bool {
	return slices.ContainsFunc(t.nodes(), func(node any) bool {
		loop, ok := node.(*forNode)
		return ok && reads(loop.items, name, attribute)
	})
}

// reads reports whether e is the variable name, or its attribute unless that is empty, disregarding filters, tests and
// slices. name may be dotted: "ns.rest".
func reads(e expression, name, attribute string) bool { return pathOf(e).reads(name, attribute) }

// path is a variable with the attributes that are looked up in it.
type path struct {
	text string // joined by dots; empty for any other expression
	// item is the number of names before the one that is looked up as an item, ["x"]; 0: none.
	item int
}

// reads reports whether the path is the variable name, or its attribute unless that is empty. An item matches only as
// that attribute.
func (p path) reads(name, attribute string) bool {
	if p.item > 0 && (attribute == "" || p.item != strings.Count(name, ".")+1) {
		return false
	}
	if attribute != "" {
		rest, ok := strings.CutSuffix(p.text, "."+attribute)
		return ok && rest == name
	}
	return p.text != "" && p.text == name
}

// pathOf returns the path of an expression, disregarding filters, tests and slices.
func pathOf(e expression) path {
	var links []link
	if c, ok := e.(*chain); ok {
		e, links = c.first, c.links
	}
	base, ok := e.(variable)
	if !ok {
		return path{}
	}
	names := []string{string(base)}
	item := 0
	through := false // a filter, test or slice was found; no name may follow it
	for _, l := range links {
		key := ""
		switch l := l.(type) {
		case attributeLink:
			key = string(l)
		case *itemLink:
			if item > 0 {
				return path{}
			}
			item = len(names)
			if literal, ok := l.item.(literal); ok {
				key, _ = literal.value.(string)
			}
		case *filterLink, *sliceLink:
			through = true
			continue
		case *testLink:
			if l.negative {
				return path{}
			}
			through = true
			continue
		default:
			return path{}
		}
		if through || key == "" {
			return path{}
		}
		names = append(names, key)
	}
	return path{text: strings.Join(names, "."), item: item}
}

// nodes returns every node of the template, outer before inner, in source order.
func (t *Template) nodes() []any {
	var all []any
	walk(t.body, func(node any) { all = append(all, node) })
	return all
}

// macroEnd is visited at the end of a macro.
type macroEnd struct{}

// walk visits a node and all nodes in it. It is one switch over all node types.
func walk(node any, visit func(any)) {
	each := func(list []expression) {
		for _, e := range list {
			walk(e, visit)
		}
	}
	arguments := func(a *argumentList) {
		if a != nil {
			each(a.positional)
			each(a.values)
			walk(a.star, visit)
			walk(a.doubleStar, visit)
		}
	}
	filters := func(list []*filterLink) {
		for _, f := range list {
			walk(f, visit)
		}
	}
	if node == nil {
		return
	}
	visit(node)
	switch n := node.(type) {
	case block:
		for _, s := range n {
			walk(s, visit)
		}
	case *printNode:
		each(n.values)
	case *ifNode:
		for _, b := range n.branches {
			walk(b.condition, visit)
			walk(b.body, visit)
		}
		walk(n.otherwise, visit)
	case *forNode:
		walk(n.items, visit)
		walk(n.body, visit)
		walk(n.otherwise, visit)
		walk(n.condition, visit)
	case *setNode:
		walk(n.value, visit)
		filters(n.filters)
		walk(n.body, visit)
	case *filterNode:
		filters(n.filters)
		walk(n.body, visit)
	case *scopedNode:
		walk(n.body, visit)
	case *macroNode:
		n.macro.walk(visit)
		visit(macroEnd{})
	case *callNode:
		walk(n.call, visit)
		n.caller.walk(visit)
	case *sequence:
		each(n.items)
	case *dictNode:
		for i := range n.keys {
			walk(n.keys[i], visit)
			walk(n.values[i], visit)
		}
	case *conditional:
		walk(n.value, visit)
		for _, c := range n.choices {
			walk(c.condition, visit)
			walk(c.otherwise, visit)
		}
	case *shortCircuit:
		each(n.items)
	case *negation:
		walk(n.value, visit)
	case *comparison:
		walk(n.first, visit)
		for _, o := range n.rest {
			walk(o.operand, visit)
		}
	case *arithmetic:
		walk(n.first, visit)
		for _, o := range n.rest {
			walk(o.operand, visit)
		}
	case *concatenation:
		each(n.items)
	case *sign:
		walk(n.value, visit)
	case *chain:
		walk(n.first, visit)
		for _, l := range n.links {
			walk(l, visit)
		}
	case *itemLink:
		walk(n.item, visit)
	case *sliceLink:
		each(n.bounds[:])
	case *callLink:
		arguments(n.arguments)
	case *methodLink:
		arguments(n.arguments)
	case *filterLink:
		arguments(n.arguments)
	case *testLink:
		arguments(n.arguments)
	}
}

func (m *macro) walk(visit func(any)) {
	for _, p := range m.parameters {
		walk(p.fallback, visit)
	}
	walk(m.body, visit)
}
