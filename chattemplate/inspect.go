package chattemplate

import (
	"slices"
	"strings"
)

// What engines ask of a template without rendering it: does it read a message's content as a list of parts? They look at
// the template's nodes; a macro or a variable in between may hide the answer from them, and then it is wrong in the same
// way here.

// LoopsOverContent reports whether some loop runs over the content of an item of messages, also through assignments,
// namespaces, filters, slices and macro parameters.
// Source: vLLM 0.33.0, renderers/hf, _iter_nodes_assign_content_item.
func (t *Template) LoopsOverContent() bool {
	nodes := t.nodes()
	items, ok := messageNames(nodes)
	if !ok {
		return false
	}
	isContent := func(e expression) bool {
		return slices.ContainsFunc(items, func(name string) bool { return reads(e, name, "content") })
	}
	inMacro := map[*forNode]bool{}
	contentParameters := map[*forNode][]string{} // of the innermost macro around, if any
	for _, node := range nodes {
		m, isMacro := node.(*macroNode)
		if !isMacro {
			continue
		}
		parameters := m.macro.contentParameters(nodes, isContent)
		walk(m.macro.body, func(node any) {
			if loop, ok := node.(*forNode); ok {
				inMacro[loop] = true
				if len(parameters) > 0 {
					contentParameters[loop] = parameters
				}
			}
		})
	}
	for _, node := range nodes {
		loop, ok := node.(*forNode)
		if !ok {
			continue
		}
		name, isName := loop.items.(variable)
		if isContent(loop.items) || isName && (slices.Contains(contentParameters[loop], string(name)) || !inMacro[loop] && name == "content") {
			_, ok := loop.target.(nameTarget)
			return ok // on two names vLLM's search stops, having found nothing
		}
	}
	return false
}

// contentParameters returns the parameters of m that some call gives a message's content.
func (m *macro) contentParameters(nodes []any, isContent func(expression) bool) []string {
	var names []string
	for _, node := range nodes {
		c, ok := node.(*chain)
		if !ok || c.first != variable(m.name) || len(c.links) == 0 {
			continue
		}
		call, ok := c.links[0].(*callLink)
		if !ok {
			continue
		}
		for i, e := range call.arguments.positional {
			if i < len(m.parameters) && isContent(e) {
				names = append(names, m.parameters[i].name)
			}
		}
		for i, e := range call.arguments.values {
			name := call.arguments.names[i]
			if isContent(e) && slices.ContainsFunc(m.parameters, func(p parameter) bool { return p.name == name }) {
				names = append(names, name)
			}
		}
	}
	return names
}

// messageNames returns the names of the items of loops over messages; ok is false when such a loop has several names,
// where vLLM gives up.
func messageNames(nodes []any) (names []string, ok bool) {
	lists := messageLists(nodes)
	for _, node := range nodes {
		loop, isLoop := node.(*forNode)
		if !isLoop || !slices.ContainsFunc(lists, func(name string) bool { return reads(loop.items, name, "") }) {
			continue
		}
		name, isName := loop.target.(nameTarget)
		if !isName {
			return nil, false
		}
		names = append(names, string(name))
	}
	return names, true
}

// messageLists returns messages and every other name, "a" or "a.b", that some assignment gives it or a part of it.
func messageLists(nodes []any) []string {
	lists := []string{"messages"}
	add := func(name string) {
		if !slices.Contains(lists, name) {
			lists = append(lists, name)
		}
	}
	for i := 0; i < len(lists); i++ {
		for _, node := range nodes {
			set, ok := node.(*setNode)
			if !ok || set.value == nil {
				continue
			}
			switch target := set.target.(type) {
			case nameTarget:
				if reads(set.value, lists[i], "") {
					add(string(target))
				}
				c, isChain := set.value.(*chain)
				if !isChain || c.first != variable("namespace") || len(c.links) != 1 {
					continue
				}
				if call, isCall := c.links[0].(*callLink); isCall {
					for j, value := range call.arguments.values {
						if reads(value, lists[i], "") {
							add(string(target) + "." + call.arguments.names[j])
						}
					}
				}
			case attributeTarget:
				if reads(set.value, lists[i], "") {
					add(target.name + "." + target.attribute)
				}
			}
		}
	}
	return lists
}

// LoopsOver reports whether some loop runs over the attribute of a variable, as itself or filtered or sliced.
// Source: SGLang 0.5.21, parser/jinja_template_utils.
func (t *Template) LoopsOver(name, attribute string) bool {
	return slices.ContainsFunc(t.nodes(), func(node any) bool {
		loop, ok := node.(*forNode)
		return ok && reads(loop.items, name, attribute)
	})
}

// reads reports whether e is the variable, or the attribute of it unless attribute is empty, seen through filters, tests
// and slices. name may be dotted: "ns.rest".
func reads(e expression, name, attribute string) bool {
	var links []link
	if c, ok := e.(*chain); ok {
		e, links = c.first, c.links
	}
	base, ok := e.(variable)
	if !ok {
		return false
	}
	path := []string{string(base)}
	through := false // from here on only filters, tests and slices
	for _, l := range links {
		key := ""
		switch l := l.(type) {
		case attributeLink:
			key = string(l)
		case *itemLink:
			if item, ok := l.item.(literal); ok {
				key, _ = item.value.(string)
			}
			if key == "" || attribute == "" || len(path) != strings.Count(name, ".")+1 {
				return false
			}
		case *filterLink, *sliceLink:
			through = true
			continue
		case *testLink:
			if l.negative {
				return false
			}
			through = true
			continue
		default:
			return false
		}
		if through || key == "" {
			return false
		}
		path = append(path, key)
	}
	if attribute != "" {
		name += "." + attribute
	}
	return strings.Join(path, ".") == name
}

// nodes returns every node of the template, outer before inner, in the order of the source.
func (t *Template) nodes() []any {
	var all []any
	walk(t.body, func(node any) { all = append(all, node) })
	return all
}

// walk visits a node and all in it.
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
	case *withNode:
		each(n.values)
		walk(n.body, visit)
	case *scopedNode:
		walk(n.body, visit)
	case *macroNode:
		n.macro.walk(visit)
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
