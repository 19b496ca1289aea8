package jinja

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvepp/prompt/values"
)

// ErrLimit is wrapped by the error of a render that exceeds one of its Limits. The error names the limit.
var ErrLimit = errors.New("jinja: limit exceeded")

// Limits bound one render. A zero field means the default.
type Limits struct {
	// Steps bounds the work: one step for each statement, operation, call and loop item, for each 64 bytes of text
	// copied or searched, and for each 8 bytes processed character by character. Default 5,000,000: about a hundred
	// times what a conversation of 8k tokens needs.
	Steps int
	// Depth bounds nested macro calls, and the nesting of a value that is printed or compared. Default 200; at most
	// 500, because a goroutine's stack is finite.
	Depth int
	// OutputBytes bounds the rendered text and every intermediate string. Default 16 MiB.
	OutputBytes int
	// Timeout bounds the time of the render. Default 2 s. It is checked every 1,024 steps.
	Timeout time.Duration
	// Memory bounds the total allocations of the render for values and text, in bytes, including those no longer in
	// use. Default: MemoryBase, and MemoryPerByte for each byte of the variables.
	Memory int
}

const (
	// MemoryBase is the memory that every render may allocate, in bytes.
	MemoryBase = 64 << 20
	// MemoryPerByte is the additional memory for each byte of the render's variables.
	MemoryPerByte = 4
)

const (
	defaultSteps       = 5_000_000
	defaultDepth       = 200
	maxDepth           = 500
	defaultOutputBytes = 16 << 20
	defaultTimeout     = 2 * time.Second

	// maxSource is the longest template, in bytes. The longest known ones are below 64 KiB.
	maxSource = 1 << 20
)

// withDefaults replaces zero fields by their defaults.
func (l Limits) withDefaults() Limits {
	if l.Steps <= 0 {
		l.Steps = defaultSteps
	}
	if l.Depth <= 0 {
		l.Depth = defaultDepth
	}
	l.Depth = min(l.Depth, maxDepth)
	if l.OutputBytes <= 0 {
		l.OutputBytes = defaultOutputBytes
	}
	if l.Timeout <= 0 {
		l.Timeout = defaultTimeout
	}
	return l
}

// RaiseError is the error of a template that called raise_exception: the request breaks a rule of the model.
type RaiseError struct {
	// Message is the template's message.
	Message string
}

func (e *RaiseError) Error() string { return "chat template: " + e.Message }

// Error adds the position in a template to an error.
type Error struct {
	Template string
	Line     int // from 1; 0 before the first tag
	Err      error
}

func (e *Error) Error() string { return fmt.Sprintf("%s:%d: %v", e.Template, e.Line, e.Err) }

// Unwrap returns the error without its position.
func (e *Error) Unwrap() error { return e.Err }

// Template is a compiled chat template, immutable and safe for concurrent use.
type Template struct {
	name    string
	dialect Dialect
	body    block
	now     func() time.Time
}

// Compile parses a template of the dialect Python. name is for messages. The error is an *Error: a syntax error, or a
// tag, filter or test that Jinja2 or this package does not have.
func Compile(name, source string) (*Template, error) { return Python.Compile(name, source) }

// Compile parses a template of the dialect; see the function Compile.
func (d Dialect) Compile(name, source string) (*Template, error) {
	if len(source) > maxSource {
		err := fmt.Errorf("source of %d bytes is longer than %d", len(source), maxSource)
		return nil, &Error{Template: name, Line: 1, Err: err}
	}
	if err := d.checkSource(source); err != nil {
		return nil, &Error{Template: name, Line: 1, Err: err}
	}
	tokens, err := lex(source, d)
	if err != nil {
		err.Template = name
		return nil, err
	}
	p := &parser{tokens: tokens, dialect: d}
	body := p.template()
	if p.err != nil {
		p.err.Template = name
		return nil, p.err
	}
	return &Template{name: name, dialect: d, body: body, now: time.Now}, nil
}

// Render renders the template with the variables in vars, whose keys are names. It never changes vars or its values.
// The render ends when ctx ends. Errors: *RaiseError if the template rejects the request, ErrLimit, ctx's error, and
// for all of them and for Jinja2's own errors an *Error with the position.
func (t *Template) Render(ctx context.Context, vars *values.Dict, limits Limits) (string, error) {
	x := newExecution(ctx, t, limits.withDefaults())
	x.vars = vars
	return x.render()
}

// render runs the template.
func (x *execution) render() (text string, err error) {
	err = x.try(func() {
		s := &scope{x: x, frame: &frame{vars: x.vars}, out: &output{x: x}}
		s.out.grow(min(sizeOf(x.vars, maxInitialBuffer), x.limits.OutputBytes))
		x.template.body.run(s)
		text = s.out.text()
	})
	if err != nil {
		return "", &Error{Template: x.template.name, Line: x.line, Err: err}
	}
	return text, nil
}

// mostLikely bounds the initial buffer of a render, in bytes.
const maxInitialBuffer = 1 << 20

// sizeOf returns the approximate size of a value in bytes: its strings, down to the nesting of messages with parts, and
// a constant for each value. The size of a render's variables also estimates the length of its text. It stops at most.
func sizeOf(value any, most int) int {
	const (
		overhead = 48 // bytes of each value in addition to its text
		maxLevel = 6  // vars, messages, a message, its parts, a part, its text
	)
	total := 0
	var add func(v any, depth int)
	add = func(v any, depth int) {
		total += overhead
		switch c := v.(type) {
		case string:
			total += len(c)
		case *values.List:
			for i := 0; depth < maxLevel && i < c.Len() && total < most; i++ {
				add(c.Items[i], depth+1)
			}
		case *values.Dict:
			for i := 0; depth < maxLevel && i < c.Len() && total < most; i++ {
				add(c.Values()[i], depth+1)
			}
		}
	}
	add(value, 1)
	return min(total, most)
}

// frame holds the names set in one scope. They are few, so a linear search is faster than a map.
type frame struct {
	bindings []binding
	parent   *frame
	vars     *values.Dict // the render's variables; only in the outermost frame
}

type binding struct {
	name  string
	value any
}

func (f *frame) set(name string, value any) {
	for i := range f.bindings {
		if f.bindings[i].name == name {
			f.bindings[i].value = value
			return
		}
	}
	f.bindings = append(f.bindings, binding{name, value})
}

// get returns the value of a name, and how many names were compared.
func (f *frame) get(name string) (v any, looked int) {
	for ; ; f = f.parent {
		for i := range f.bindings {
			if f.bindings[i].name == name {
				return f.bindings[i].value, looked + i
			}
		}
		looked += 1 + len(f.bindings)
		if f.parent == nil {
			break
		}
	}
	if v, ok := f.vars.Get(name); ok {
		return v, looked
	}
	if v, ok := globals[name]; ok {
		return v, looked
	}
	return Undefined{Name: name}, looked
}

// manyNames is how many comparisons of names cost one step.
const manyNames = 16

// get returns the value of a name.
func (s *scope) get(name string) any {
	v, looked := s.frame.get(name)
	if looked > manyNames {
		s.x.step(looked / manyNames)
	}
	return v
}

// set sets a name in the scope.
func (s *scope) set(name string, value any) {
	s.frame.set(name, value)
	if n := len(s.frame.bindings); n > manyNames {
		s.x.step(n / manyNames)
	}
}

// scope is the environment of a statement: the names that it sees and the text that it writes.
type scope struct {
	x     *execution
	frame *frame
	out   *output
}

// inner returns a scope with a frame of its own and the same output.
func (s *scope) inner() *scope {
	block := &struct { // one allocation, because each loop iteration has a scope
		scope    scope
		frame    frame
		bindings [4]binding
	}{}
	block.frame = frame{bindings: block.bindings[:0], parent: s.frame}
	block.scope = scope{x: s.x, frame: &block.frame, out: s.out}
	return &block.scope
}

// capture runs a block and returns its text. Unless it is open, the block has a scope of its own; in MiniJinja the
// bodies of set and filter are open.
func (s *scope) capture(b block, open bool) (string, exit) {
	c := &scope{x: s.x, frame: s.frame, out: &output{x: s.x}}
	if !open {
		c.frame = &frame{parent: s.frame}
	}
	exit := b.run(c)
	return c.out.text(), exit
}
