package jinja

import (
	"fmt"
	"slices"
	"strings"

	"kvepp/prompt/values"
)

// maxNesting bounds the nesting of tags and expressions in a source. With Limits.Depth it bounds the stack of a render.
// Chains of operators, filters and elifs do not nest; they are evaluated in loops.
const maxNesting = 200

// maxKeywords bounds the keyword arguments of a call and the parameters of a macro in the source.
const maxKeywords = 1000

// parser builds a template's nodes from its tokens. It is a recursive-descent parser modelled on Jinja2 3.1.6's. The
// first error is kept and moves the parser to the end of the tokens, so that all functions return. Nodes built after an
// error are not used.
type parser struct {
	tokens  []token
	pos     int
	depth   int
	err     *Error
	loops   int          // number of enclosing loops within the current macro or call
	macros  []*macroUses // enclosing macros
	dialect Dialect
	// unknown are the filters and tests that do not exist. Those in an if or an inline if are an error only where a
	// render reaches them. A loop, macro or other scope within the if takes that away. Source: Jinja2 3.1.6, compiler,
	// _filter_test_common, Frame.soft.
	unknown []*Error
}

// macroUses records which special names a macro's body reads. A macro that does not read a name rejects its arguments.
type macroUses struct{ caller, varargs, kwargs bool }

func (p *parser) current() token { return p.tokens[p.pos] }

func (p *parser) peek() token { return p.tokens[min(p.pos+1, len(p.tokens)-1)] }

func (p *parser) advance() token {
	t := p.tokens[p.pos]
	if p.pos < len(p.tokens)-1 {
		p.pos++
	}
	return t
}

func (p *parser) fail(format string, args ...any) {
	if p.err == nil {
		p.err = &Error{Line: p.current().line, Err: fmt.Errorf(format, args...)}
	}
	p.pos = len(p.tokens) - 1
}

// noSuch notes an unknown filter or test, and returns what a render calls in its place.
func (p *parser) noSuch(kind, name string) builtin {
	err := fmt.Errorf("unknown %s %q", kind, short(name))
	if p.dialect == Python {
		p.unknown = append(p.unknown, &Error{Line: p.current().line, Err: err})
	}
	return func(*execution, any, *arguments) any { panic(failure{err}) }
}

// failUnknown fails for the first unknown filter or test after the known ones.
func (p *parser) failUnknown(known int) {
	if p.err == nil && len(p.unknown) > known {
		p.err = p.unknown[known]
		p.pos = len(p.tokens) - 1
	}
}

// enter counts a level of nesting. leave undoes it.
func (p *parser) enter() {
	if p.depth++; p.depth > maxNesting {
		p.fail("nested deeper than %d", maxNesting)
	}
}

func (p *parser) leave() { p.depth-- }

func (p *parser) isOperator(text string) bool {
	t := p.current()
	return t.kind == tokenOperator && t.text == text
}

func (p *parser) isName(text string) bool {
	t := p.current()
	return t.kind == tokenName && t.text == text
}

func (p *parser) takeOperator(text string) bool {
	if p.isOperator(text) {
		p.advance()
		return true
	}
	return false
}

func (p *parser) takeName(text string) bool {
	if p.isName(text) {
		p.advance()
		return true
	}
	return false
}

func (p *parser) wantOperator(text string) {
	if !p.takeOperator(text) {
		p.fail("expected %q, got %s", text, p.current().describe())
	}
}

func (p *parser) wantKind(kind tokenKind) {
	if p.current().kind != kind {
		p.fail("expected %s, got %s", token{kind: kind}.describe(), p.current().describe())
		return
	}
	p.advance()
}

func (p *parser) wantName() string {
	if p.current().kind != tokenName {
		p.fail("expected a name, got %s", p.current().describe())
		return ""
	}
	return p.advance().text
}

// template parses a whole source.
func (p *parser) template() block {
	b := p.block("")
	if p.err == nil && p.current().kind != tokenEnd {
		p.fail("unexpected %s", p.current().describe())
	}
	p.failUnknown(0)
	return b
}

// block parses text and tags up to a tag with one of the names ends, and stops before that name. Without ends it parses
// up to the end of the source. tag is the name of the tag whose body it is, for messages.
func (p *parser) block(tag string, ends ...string) block {
	p.enter()
	defer p.leave()
	var b block
	for p.err == nil {
		t := p.current()
		switch t.kind {
		case tokenEnd:
			if len(ends) > 0 {
				p.fail("tag %q is not closed: expected %s", tag, strings.Join(ends, " or "))
			}
			return b
		case tokenData:
			p.advance()
			b = append(b, textNode(t.text))
		case tokenVariableBegin:
			p.advance()
			b = append(b, &printNode{line: t.line, values: []expression{p.tuple(true)}})
			p.wantKind(tokenVariableEnd)
		case tokenBlockBegin:
			p.advance()
			if name := p.current(); name.kind == tokenName && slices.Contains(ends, name.text) {
				return b
			}
			if node := p.statement(); node != nil {
				b = append(b, node)
			}
			p.wantKind(tokenBlockEnd)
		default:
			p.fail("unexpected %s", t.describe())
		}
	}
	return b
}

// body parses a tag's body: the end of the opening tag, the block, and the name of the closing tag.
func (p *parser) body(tag string, ends ...string) (block, string) {
	p.takeOperator(":") // Jinja2 allows a colon as in Python
	p.wantKind(tokenBlockEnd)
	known := len(p.unknown)
	b := p.block(tag, ends...)
	if tag != "if" {
		p.failUnknown(known)
	}
	return b, p.wantName()
}

// statement parses a block tag up to its %}.
func (p *parser) statement() statement {
	line := p.current().line
	if p.current().kind != tokenName {
		p.fail("expected a tag's name, got %s", p.current().describe())
		return nil
	}
	switch name := p.advance().text; name {
	case "if":
		return p.ifStatement()
	case "for":
		return p.forStatement(line)
	case "set":
		return p.setStatement(line)
	case "macro":
		return p.macroStatement(line)
	case "call":
		return p.callStatement(line)
	case "filter":
		return p.filterStatement(line)
	case "print":
		return p.printStatement(line)
	case "generation":
		uses, loops := p.openMacro()
		b, _ := p.body("generation", "endgeneration")
		p.closeMacro(loops)
		return &scopedNode{line: line, body: b, uses: *uses}
	case "break", "continue":
		if p.loops == 0 {
			p.fail("%s outside of a loop", name)
		}
		if name == "break" {
			return loopExit(breaks)
		}
		return loopExit(continues)
	case "include", "import", "from", "extends", "block", "autoescape", "with":
		for p.err == nil && p.current().kind != tokenBlockEnd {
			p.advance()
		}
		if name == "block" || name == "autoescape" || name == "with" {
			p.body(name, "end"+name)
			p.takeName(p.current().text) // of the block
		}
		return unsupportedTag{line, name}
	case "elif", "else", "endif", "endfor", "endset", "endmacro", "endcall", "endfilter", "endwith", "endgeneration",
		"endblock", "endautoescape":
		p.fail("unexpected tag %q", name)
	default:
		p.fail("unknown tag %q", short(name))
	}
	return nil
}

func (p *parser) ifStatement() statement {
	node := &ifNode{}
	known := len(p.unknown)
	for p.err == nil {
		branch := ifBranch{line: p.current().line, condition: p.tuple(false)}
		var end string
		branch.body, end = p.body("if", "elif", "else", "endif")
		node.branches = append(node.branches, branch)
		if end == "elif" {
			continue
		}
		if end == "else" {
			node.otherwise, _ = p.body("if", "endif")
		}
		break
	}
	p.unknown = p.unknown[:known]
	return node
}

func (p *parser) forStatement(line int) statement {
	node := &forNode{line: line, target: p.target("in")}
	if !p.takeName("in") {
		p.fail("expected \"in\", got %s", p.current().describe())
	}
	node.items = p.tuple(false, "recursive")
	if p.takeName("if") {
		known := len(p.unknown)
		node.condition = p.conditional()
		p.failUnknown(known)
	}
	node.recursive = p.takeName("recursive")
	p.loops++
	var end string
	node.body, end = p.body("for", "endfor", "else")
	p.loops--
	if end == "else" {
		node.otherwise, _ = p.body("for", "endfor")
	}
	return node
}

func (p *parser) setStatement(line int) statement {
	node := &setNode{line: line, target: p.target("")}
	if p.takeOperator("=") {
		node.value = p.tuple(true)
		return node
	}
	node.filters = p.filters()
	node.body, _ = p.body("set", "endset")
	return node
}

func (p *parser) printStatement(line int) statement {
	node := &printNode{line: line}
	for p.err == nil && p.current().kind != tokenBlockEnd {
		if len(node.values) > 0 {
			p.wantOperator(",")
		}
		node.values = append(node.values, p.conditional())
	}
	return node
}

func (p *parser) filterStatement(line int) statement {
	known := len(p.unknown)
	node := &filterNode{line: line, filters: []*filterLink{p.filter()}}
	node.filters = append(node.filters, p.filters()...)
	p.failUnknown(known)
	node.body, _ = p.body("filter", "endfilter")
	return node
}

// filters parses the filters of a set block or of a filter block after the first.
func (p *parser) filters() []*filterLink {
	known := len(p.unknown)
	var filters []*filterLink
	for p.takeOperator("|") && p.err == nil {
		filters = append(filters, p.filter())
	}
	p.failUnknown(known)
	return filters
}

// openMacro starts a macro's body, in which break cannot leave an outer loop. closeMacro ends the body.
func (p *parser) openMacro() (uses *macroUses, loops int) {
	uses, loops = &macroUses{}, p.loops
	p.macros = append(p.macros, uses)
	p.loops = 0
	return uses, loops
}

func (p *parser) closeMacro(loops int) {
	p.macros = p.macros[:len(p.macros)-1]
	p.loops = loops
}

func (p *parser) macroStatement(line int) statement {
	m := &macro{name: p.wantName(), line: line}
	m.parameters = p.parameters()
	uses, loops := p.openMacro()
	m.body, _ = p.body("macro", "endmacro")
	p.closeMacro(loops)
	m.uses = *uses
	return &macroNode{m}
}

func (p *parser) callStatement(line int) statement {
	node := &callNode{line: line, caller: &macro{name: "caller", line: line}}
	if p.isOperator("(") {
		node.caller.parameters = p.parameters()
	}
	call, ok := p.conditional().(*chain)
	if ok {
		switch call.links[len(call.links)-1].(type) {
		case *callLink, *methodLink:
		default:
			ok = false
		}
	}
	if !ok {
		p.fail("expected a call")
	}
	node.call = call
	uses, loops := p.openMacro()
	node.caller.body, _ = p.body("call", "endcall")
	p.closeMacro(loops)
	node.caller.uses = *uses
	return node
}

func (p *parser) parameters() []parameter {
	var list []parameter
	p.wantOperator("(")
	defaults := false
	known := len(p.unknown)
	for p.err == nil && !p.isOperator(")") {
		if len(list) > 0 {
			p.wantOperator(",")
		}
		if len(list) == maxKeywords {
			p.fail("more than %d parameters", maxKeywords)
		}
		param := parameter{name: p.wantName()}
		if p.takeOperator("=") {
			param.fallback = p.conditional()
			defaults = true
		} else if defaults {
			p.fail("parameter %q without a default follows a parameter with one", param.name)
		}
		list = append(list, param)
	}
	p.failUnknown(known)
	p.wantOperator(")")
	return list
}

// target parses an assignment target, up to the name end if that is not empty.
func (p *parser) target(end string) target {
	p.enter()
	defer p.leave()
	var list []target
	isTuple := false
	for p.err == nil {
		if len(list) > 0 {
			p.wantOperator(",")
			isTuple = true
			if k := p.current(); k.kind != tokenName && !p.isOperator("(") || k.kind == tokenName && k.text == end {
				break // a tuple may end in a comma
			}
		}
		list = append(list, p.oneTarget())
		if !p.isOperator(",") {
			break
		}
	}
	if isTuple {
		return tupleTarget(list)
	}
	if len(list) == 0 {
		return tupleTarget(nil)
	}
	return list[0]
}

// constants are names whose value cannot change.
var constants = map[string]any{"true": true, "True": true, "false": false, "False": false, "none": nil, "None": nil}

func (p *parser) oneTarget() target {
	if p.takeOperator("(") {
		t := p.target("")
		p.wantOperator(")")
		return t
	}
	name := p.wantName()
	if _, constant := constants[name]; constant {
		p.fail("cannot assign to %s", short(name))
	}
	if p.takeOperator(".") {
		return attributeTarget{name, p.wantName()}
	}
	return nameTarget(name)
}

// tuple parses an expression, or several separated by commas as a tuple. conditionals says whether "a if b else c" is
// allowed at the top level. The names in end stop it.
func (p *parser) tuple(conditionals bool, end ...string) expression {
	first := true
	var items []expression
	isTuple := false
	for p.err == nil {
		if !first {
			if !p.takeOperator(",") {
				break
			}
			isTuple = true
		}
		t := p.current()
		if t.kind == tokenVariableEnd || t.kind == tokenBlockEnd || p.isOperator(")") ||
			t.kind == tokenName && slices.Contains(end, t.text) {
			break
		}
		first = false
		if conditionals {
			items = append(items, p.conditional())
		} else {
			items = append(items, p.or())
		}
	}
	switch {
	case isTuple:
		return &sequence{items: items, kind: values.Tuple}
	case len(items) == 0:
		p.fail("expected an expression, got %s", p.current().describe())
		return nil
	}
	return items[0]
}

// conditional parses any expression: "a", or "a if b else c".
func (p *parser) conditional() expression {
	p.enter()
	defer p.leave()
	known := len(p.unknown)
	value := p.or()
	if !p.isName("if") {
		return value
	}
	node := &conditional{value: value}
	for p.err == nil && p.takeName("if") {
		choice := choice{condition: p.or()}
		if p.takeName("else") {
			choice.otherwise = p.conditional()
		}
		node.choices = append(node.choices, choice)
	}
	p.unknown = p.unknown[:known]
	return node
}

func (p *parser) or() expression {
	left := p.and()
	if !p.isName("or") {
		return left
	}
	node := &shortCircuit{stopAt: true, items: []expression{left}}
	for p.takeName("or") && p.err == nil {
		node.items = append(node.items, p.and())
	}
	return node
}

func (p *parser) and() expression {
	left := p.not()
	if !p.isName("and") {
		return left
	}
	node := &shortCircuit{stopAt: false, items: []expression{left}}
	for p.takeName("and") && p.err == nil {
		node.items = append(node.items, p.not())
	}
	return node
}

func (p *parser) not() expression {
	nots := 0
	for p.takeName("not") {
		nots++
	}
	value := p.compare()
	if nots == 0 {
		return value
	}
	return &negation{value: value, negative: nots%2 == 1}
}

func (p *parser) compare() expression {
	first := p.sum()
	var rest []operation
	for p.err == nil {
		op := ""
		switch t := p.current(); {
		case t.kind == tokenOperator && strings.Contains(" == != < > <= >= ", " "+t.text+" "):
			op = t.text
		case p.isName("in"):
			op = "in"
		case p.isName("not") && p.peek().kind == tokenName && p.peek().text == "in":
			p.advance()
			op = "not in"
		}
		if op == "" {
			break
		}
		p.advance()
		rest = append(rest, operation{op, p.sum()})
	}
	if rest == nil {
		return first
	}
	return &comparison{first, rest}
}

// binary parses operands separated by any of the operators.
func (p *parser) binary(operand func() expression, operators ...string) expression {
	first := operand()
	var rest []operation
	for p.err == nil && p.current().kind == tokenOperator && slices.Contains(operators, p.current().text) {
		op := p.advance().text
		rest = append(rest, operation{op, operand()})
	}
	if rest == nil {
		return first
	}
	return &arithmetic{first, rest}
}

func (p *parser) sum() expression { return p.binary(p.concat, "+", "-") }

func (p *parser) concat() expression {
	first := p.product()
	if !p.isOperator("~") {
		return first
	}
	node := &concatenation{items: []expression{first}}
	for p.takeOperator("~") && p.err == nil {
		node.items = append(node.items, p.product())
	}
	return node
}

func (p *parser) product() expression { return p.binary(p.power, "*", "/", "//", "%") }

func (p *parser) power() expression {
	return p.binary(func() expression { return p.unary(true) }, "**")
}

func (p *parser) unary(filters bool) expression {
	p.enter()
	defer p.leave()
	var node expression
	switch {
	case p.takeOperator("-"):
		node = &sign{value: p.unary(false), negative: true}
	case p.takeOperator("+"):
		node = &sign{value: p.unary(false)}
	default:
		node = p.primary()
	}
	links := p.postfix()
	if filters {
		links = append(links, p.filtersAndTests()...)
	}
	if links == nil {
		return node
	}
	return &chain{node, links}
}

func (p *parser) primary() expression {
	switch t := p.current(); t.kind {
	case tokenName:
		p.advance()
		if value, ok := constants[t.text]; ok {
			return literal{value}
		}
		for _, m := range p.macros {
			m.caller = m.caller || t.text == "caller"
			m.varargs = m.varargs || t.text == "varargs"
			m.kwargs = m.kwargs || t.text == "kwargs"
		}
		return variable(t.text)
	case tokenString:
		var b strings.Builder
		for p.current().kind == tokenString {
			b.WriteString(p.advance().text)
		}
		return literal{b.String()}
	case tokenNumber:
		p.advance()
		return literal{t.value}
	case tokenOperator:
		switch t.text {
		case "(":
			return p.parenthesis()
		case "[":
			return p.list()
		case "{":
			return p.dict()
		}
	}
	p.fail("unexpected %s", p.current().describe())
	return nil
}

func (p *parser) parenthesis() expression {
	p.advance()
	if p.takeOperator(")") {
		return &sequence{kind: values.Tuple}
	}
	value := p.tuple(true)
	p.wantOperator(")")
	return value
}

func (p *parser) list() expression {
	node := &sequence{}
	p.separated("[", "]", func() { node.items = append(node.items, p.conditional()) })
	return node
}

// separated parses what stands between two operators, separated by commas, with item. The last may end in a comma.
func (p *parser) separated(open, end string, item func()) {
	p.wantOperator(open)
	for p.err == nil && !p.isOperator(end) {
		item()
		if !p.isOperator(end) {
			p.wantOperator(",")
		}
	}
	p.wantOperator(end)
}

func (p *parser) dict() expression {
	node := &dictNode{}
	p.separated("{", "}", func() {
		node.keys = append(node.keys, p.conditional())
		p.wantOperator(":")
		node.values = append(node.values, p.conditional())
	})
	return node
}

// postfix parses attributes, items and calls.
func (p *parser) postfix() []link {
	var links []link
	for p.err == nil {
		switch {
		case p.takeOperator("."):
			links = append(links, p.attribute())
		case p.takeOperator("["):
			links = append(links, p.subscript())
		case p.isOperator("("):
			links = append(links, &callLink{p.arguments()})
		default:
			return links
		}
	}
	return links
}

func (p *parser) attribute() link {
	t := p.advance()
	switch t.kind {
	case tokenNumber:
		if n, ok := t.value.(int64); ok {
			return &itemLink{literal{n}}
		}
	case tokenName:
		if p.isOperator("(") {
			return &methodLink{t.text, p.arguments()}
		}
		return attributeLink(t.text)
	}
	p.fail("expected a name or number after \".\"")
	return nil
}

func (p *parser) subscript() link {
	var items []link
	for p.err == nil && !p.isOperator("]") {
		if len(items) > 0 {
			p.wantOperator(",")
		}
		items = append(items, p.subscribed())
	}
	p.wantOperator("]")
	if len(items) == 1 {
		return items[0]
	}
	return tupleItemLink{} // no value of a template has an item x[1, 2]
}

func (p *parser) subscribed() link {
	var bounds [3]expression
	if !p.isOperator(":") {
		bounds[0] = p.conditional()
		if !p.isOperator(":") {
			return &itemLink{bounds[0]}
		}
	}
	for i := 1; i < 3 && p.takeOperator(":"); i++ {
		if !p.isOperator(":") && !p.isOperator("]") && !p.isOperator(",") {
			bounds[i] = p.conditional()
		}
	}
	return &sliceLink{bounds}
}

func (p *parser) arguments() *argumentList {
	list := &argumentList{}
	p.separated("(", ")", func() {
		switch {
		case p.isOperator("*"):
			if list.star != nil || list.doubleStar != nil {
				p.fail("invalid arguments")
			}
			p.advance()
			list.star = p.conditional()
		case p.isOperator("**"):
			if list.doubleStar != nil {
				p.fail("invalid arguments")
			}
			p.advance()
			list.doubleStar = p.conditional()
		case p.current().kind == tokenName && p.peek().kind == tokenOperator && p.peek().text == "=":
			if list.doubleStar != nil {
				p.fail("invalid arguments")
			}
			name := p.advance().text
			p.advance()
			if slices.Contains(list.names, name) {
				p.fail("keyword argument %q is repeated", short(name))
			}
			if len(list.names) == maxKeywords {
				p.fail("more than %d keyword arguments", maxKeywords)
			}
			list.names = append(list.names, name)
			list.values = append(list.values, p.conditional())
		default:
			if list.star != nil || list.doubleStar != nil || list.names != nil {
				p.fail("positional argument after other arguments")
			}
			list.positional = append(list.positional, p.conditional())
		}
	})
	return list
}

// filtersAndTests parses what may follow an expression: filters, tests, and calls of their results.
func (p *parser) filtersAndTests() []link {
	var links []link
	for p.err == nil {
		switch {
		case p.takeOperator("|"):
			links = append(links, p.filter())
		case p.takeName("is"):
			links = append(links, p.test())
		case p.isOperator("("):
			links = append(links, &callLink{p.arguments()})
		default:
			return links
		}
	}
	return links
}

// dotted parses a name that may contain dots.
func (p *parser) dotted() string {
	names := []string{p.wantName()}
	for p.err == nil && p.takeOperator(".") {
		names = append(names, p.wantName())
	}
	return strings.Join(names, ".")
}

func (p *parser) filter() *filterLink {
	name := p.dotted()
	f, ok := p.dialect.filter(name)
	if !ok && p.err == nil {
		f = p.noSuch("filter", name)
	}
	link := &filterLink{name: name, filter: f, arguments: &argumentList{}}
	if p.isOperator("(") {
		link.arguments = p.arguments()
	}
	return link
}

func (p *parser) test() link {
	negative := p.takeName("not")
	name := p.dotted()
	f, ok := p.dialect.test(name)
	if !ok && p.err == nil {
		f = p.noSuch("test", name)
	}
	link := &testLink{name: name, test: f, negative: negative, arguments: &argumentList{}}
	t := p.current()
	switch {
	case p.isOperator("("):
		link.arguments = p.arguments()
	case t.kind == tokenName && (t.text == "else" || t.text == "or" || t.text == "and"):
	case p.isName("is"):
		p.fail("tests cannot follow one another")
	case t.kind == tokenName || t.kind == tokenString || t.kind == tokenNumber || p.isOperator("[") ||
		p.isOperator("{"):
		p.enter()
		var argument = p.primary()
		if links := p.postfix(); links != nil {
			argument = &chain{argument, links}
		}
		p.leave()
		link.arguments.positional = []expression{argument}
	}
	return link
}
