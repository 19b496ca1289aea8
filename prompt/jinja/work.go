package jinja

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
	"unsafe"

	"kvepp/prompt/values"
)

// The cost of a render is counted before it is spent: work in steps, and memory in bytes. An operation on a text or a
// list counts its length. Processing single characters is the slowest work; it is counted in chunks as it proceeds, so
// that the clock is checked at least every few milliseconds.

// execution is the state of one render, shared by all its scopes. One goroutine may use it.
type execution struct {
	ctx      context.Context
	template *Template
	vars     *values.Dict
	mini     bool // the dialect is MiniJinja
	limits   Limits
	steps    int  // remaining
	checkAt  int  // check the clock when steps is at or below this
	memory   int  // remaining, in bytes
	extended bool // the memory for the variables was added
	now      func() time.Time
	deadline time.Time
	depth    int      // nesting of macros and recursive loops
	line     int      // of the statement that runs
	calls    []string // the filters, tests and methods that run
	last     []byte   // the latest long text of concat
	scratch  []byte   // buffer of writeEach
}

func newExecution(ctx context.Context, t *Template, limits Limits) *execution {
	x := &execution{
		ctx:      ctx,
		template: t,
		mini:     t.dialect == MiniJinja,
		limits:   limits,
		steps:    limits.Steps,
		checkAt:  limits.Steps,
		now:      time.Now,
	}
	x.memory = limits.Memory
	if x.memory <= 0 {
		x.memory = MemoryBase
	}
	x.deadline = x.now().Add(limits.Timeout)
	return x
}

const (
	// clockInterval is the number of steps between two checks of the clock.
	clockInterval = 1024
	// bytesPerStep is how many bytes of copying, comparing or searching cost one step.
	bytesPerStep = 64
	// charactersPerStep is how many bytes of processing character by character cost one step.
	charactersPerStep = 8
	// stretch is how many bytes of character processing are counted at once.
	stretch = 4096

	// itemSize is the memory of a list item including its value, in bytes.
	itemSize = 32
	// entrySize is the memory of a dict entry including its slots in the index, in bytes.
	entrySize = 160
	// valueSize is the memory of a list, dict, namespace, loop or function without its contents, in bytes.
	valueSize = 96
	// frameSize is the memory of the names of a scope that a macro keeps alive, in bytes.
	frameSize = 384
)

// failure is the panic that ends a render with an error, as in text/template. try recovers it.
type failure struct{ err error }

// try runs f and returns the error of its failure, behind the names of the filters, tests and methods that failed.
func (x *execution) try(f func()) (err error) {
	depth, calls := x.depth, len(x.calls)
	defer func() {
		cause := recover()
		if cause == nil {
			return
		}
		failed, ok := cause.(failure)
		if !ok {
			panic(cause)
		}
		err = failed.err
		for _, name := range slices.Backward(x.calls[calls:]) {
			if !errors.Is(err, ErrLimit) {
				err = fmt.Errorf("%s: %w", name, err)
			}
		}
		x.depth, x.calls = depth, x.calls[:calls]
	}()
	f()
	return nil
}

// step counts n steps of work. Like all that counts, it fails beyond the limit.
func (x *execution) step(n int) {
	x.steps -= n
	if x.steps <= x.checkAt {
		x.checkLimits()
	}
}

// checkLimits fails if the steps or the time are used up, or the context has ended.
func (x *execution) checkLimits() {
	if x.steps < 0 {
		panic(failure{fmt.Errorf("%w: %d steps", ErrLimit, x.limits.Steps)})
	}
	x.checkAt = x.steps - clockInterval
	if x.now().After(x.deadline) {
		panic(failure{fmt.Errorf("%w: %v", ErrLimit, x.limits.Timeout)})
	}
	if err := x.ctx.Err(); err != nil {
		panic(failure{fmt.Errorf("jinja: %w", err)})
	}
}

// chargeBytes counts the work of searching or comparing text, and of other fast work on bytes.
func (x *execution) chargeBytes(bytes int) { x.step(1 + bytes/bytesPerStep) }

// alloc counts memory.
func (x *execution) alloc(bytes int) {
	x.memory -= bytes
	if x.memory >= 0 {
		return
	}
	if x.limits.Memory <= 0 && !x.extended {
		x.extended = true
		x.memory += MemoryPerByte * sizeOf(x.vars, 1<<30)
		if x.memory >= 0 {
			return
		}
	}
	panic(failure{fmt.Errorf("%w: more memory than %s", ErrLimit, x.memoryLimit())})
}

func (x *execution) memoryLimit() string {
	if x.limits.Memory > 0 {
		return fmt.Sprint(x.limits.Memory, " bytes")
	}
	return fmt.Sprintf("%d bytes and %d for each byte of the variables", MemoryBase, MemoryPerByte)
}

// chargeString checks the size of a new string, and counts the work and memory of making it.
func (x *execution) chargeString(bytes int) {
	x.checkSize(bytes)
	x.chargeBytes(bytes)
	x.alloc(bytes)
}

// checkSize checks the size of a string without counting anything.
func (x *execution) checkSize(bytes int) {
	if bytes > x.limits.OutputBytes || bytes < 0 {
		panic(failure{fmt.Errorf("%w: a string of more than %d bytes", ErrLimit, x.limits.OutputBytes)})
	}
}

// chargeList counts the work and memory of a list of n items.
func (x *execution) chargeList(n int) {
	x.step(1 + n)
	x.alloc(valueSize + n*itemSize)
}

// chargeDict counts the work and memory of a dict of n entries.
func (x *execution) chargeDict(n int) {
	x.step(1 + n)
	x.alloc(valueSize + n*entrySize)
}

// enter counts one level of depth. leave undoes it.
func (x *execution) enter() {
	if x.depth++; x.depth > x.limits.Depth {
		panic(failure{fmt.Errorf("%w: deeper than %d", ErrLimit, x.limits.Depth)})
	}
}

func (x *execution) leave() { x.depth-- }

// meter counts the work of processing a text character by character.
type meter struct {
	x    *execution
	size int
	next int // position of the next stretch
}

func (x *execution) meter(s string) meter { return meter{x: x, size: len(s)} }

// at counts the stretch that begins at position i, if one does.
func (m *meter) at(i int) {
	if i < m.next {
		return
	}
	m.next = i + stretch
	m.x.step(1 + min(m.size-i, stretch)/charactersPerStep)
}

// rewriter builds a text by rewriting another one character by character.
type rewriter struct {
	strings.Builder
	meter   meter
	counted int // memory counted so far, in bytes
}

// rewrite starts to rewrite s.
func (x *execution) rewrite(s string) *rewriter {
	w := &rewriter{meter: x.meter(s)}
	x.alloc(len(s))
	w.Grow(len(s))
	w.counted = len(s)
	return w
}

// at counts the text written so far, and the stretch of the source that begins at position i, if one does.
func (w *rewriter) at(i int) {
	if i < w.meter.next {
		return
	}
	x := w.meter.x
	x.checkSize(w.Len())
	if c := w.Cap(); c > w.counted {
		w.counted = c
		x.alloc(c)
	}
	w.meter.at(i)
}

// done returns the new text.
func (w *rewriter) done() string {
	w.meter.x.checkSize(w.Len())
	return w.String()
}

// longText is the size from which a concatenated text is kept, so that concat can append to it.
const longText = 1 << 10

// concat concatenates texts of this total size. A template often builds a text by many appends; to avoid copying it
// each time, concat appends to the buffer of the latest text if that is the first operand.
func (x *execution) concat(size int, texts ...string) string {
	x.checkSize(size)
	if size < longText {
		x.chargeString(size)
		return strings.Join(texts, "")
	}
	first := texts[0]
	extends := len(first) > 0 && len(first) == len(x.last) && unsafe.StringData(first) == unsafe.SliceData(x.last)
	if !extends && size < len(x.last) {
		x.chargeString(size)
		return strings.Join(texts, "")
	}
	buf := x.last
	switch {
	case !extends:
		x.chargeString(size)
		buf = append(make([]byte, 0, size), first...)
	case cap(buf) < size:
		room := min(2*size, x.limits.OutputBytes)
		x.chargeString(room)
		buf = append(make([]byte, 0, room), first...)
	default:
		x.chargeBytes(size - len(first))
	}
	for _, text := range texts[1:] {
		buf = append(buf, text...)
	}
	x.last = buf
	return unsafe.String(unsafe.SliceData(buf), len(buf))
}

// output collects the rendered text within the limits: full pieces, and one that is being filled.
type output struct {
	x    *execution
	full []string
	buf  []byte
	size int // of the full pieces, in bytes
}

const (
	// smallPiece is the size up to which a full piece is copied into a larger one instead of kept.
	smallPiece = 64 << 10
	// largestPiece bounds the memory that is allocated ahead of the text, in bytes.
	largestPiece = 1 << 20
)

// Len returns the length of the text so far, in bytes.
func (o *output) Len() int { return o.size + len(o.buf) }

// grow makes room for n more bytes.
func (o *output) grow(n int) {
	if cap(o.buf)-len(o.buf) >= n {
		return
	}
	if cap(o.buf) <= smallPiece {
		room := max(2*cap(o.buf), len(o.buf)+n, 64)
		o.x.alloc(room)
		o.buf = append(make([]byte, 0, room), o.buf...)
		return
	}
	room := max(n, min(2*cap(o.buf), largestPiece))
	o.x.alloc(room)
	o.full = append(o.full, unsafe.String(unsafe.SliceData(o.buf), len(o.buf)))
	o.size += len(o.buf)
	o.buf = make([]byte, 0, room)
}

// write writes the texts one after the other.
func (o *output) write(texts ...string) {
	size := 0
	for _, s := range texts {
		size += len(s)
	}
	if o.Len()+size > o.x.limits.OutputBytes {
		panic(failure{fmt.Errorf("%w: more than %d bytes of text", ErrLimit, o.x.limits.OutputBytes)})
	}
	o.x.chargeBytes(size)
	o.grow(size)
	for _, s := range texts {
		o.buf = append(o.buf, s...)
	}
}

// writeEach writes the result of add for s, one stretch at a time.
func (o *output) writeEach(s string, add func(to []byte, s string) []byte) {
	for s != "" {
		n := len(s)
		if n > stretch {
			for n = stretch; n > stretch-utf8.UTFMax && !utf8.RuneStart(s[n]); n-- {
			}
		}
		o.x.step(n / charactersPerStep)
		o.x.scratch = add(o.x.scratch[:0], s[:n])
		o.write(unsafe.String(unsafe.SliceData(o.x.scratch), len(o.x.scratch)))
		s = s[n:]
	}
}

// text returns the text. It ends the use of o.
func (o *output) text() string {
	if len(o.full) == 0 {
		return unsafe.String(unsafe.SliceData(o.buf), len(o.buf))
	}
	size := o.Len()
	o.x.alloc(size)
	all := make([]byte, 0, size)
	for _, piece := range o.full {
		all = append(all, piece...)
	}
	all = append(all, o.buf...)
	o.full, o.buf = nil, nil
	return unsafe.String(unsafe.SliceData(all), len(all))
}

// concatAll is concat for texts of unknown total length.
func (x *execution) concatAll(texts []string) string {
	size := 0
	for _, s := range texts {
		size += len(s)
	}
	x.step(1 + len(texts))
	return x.concat(size, texts...)
}

// chargeLookup counts the work of looking up a key in a dict.
func (x *execution) chargeLookup(key any) {
	switch k := key.(type) {
	case string:
		x.step(len(k) / bytesPerStep)
	case markup:
		x.step(len(k) / bytesPerStep)
	case *big.Int:
		x.chargeBigInt(k)
	}
}

// chargeBigInt counts the work of an operation on a big integer with quadratic time, and its memory.
func (x *execution) chargeBigInt(n *big.Int) {
	words := n.BitLen() / 64
	if words < 2 {
		return
	}
	x.step(words * words / bytesPerStep)
	x.alloc(8 * words)
}

// chargeMacro counts the creation of a macro, which keeps its scope alive.
func (x *execution) chargeMacro() {
	x.step(1)
	x.alloc(valueSize + frameSize)
}

// shortName is the most bytes of a name from a template or client that an error quotes.
const shortName = 100

// short returns the name, shortened to shortName bytes.
func short(name string) string {
	if len(name) <= shortName {
		return name
	}
	return strings.ToValidUTF8(name[:shortName], "") + "..."
}

func shortNames(names []string) string {
	const most = 10
	list := make([]string, 0, most)
	for _, name := range names[:min(len(names), most)] {
		list = append(list, short(name))
	}
	if len(names) > most {
		list = append(list, "...")
	}
	return fmt.Sprint(list)
}

// chargeBigInts counts the work and memory of an operation on two integers; either may be nil.
func (x *execution) chargeBigInts(a, b *big.Int) {
	for _, n := range [2]*big.Int{a, b} {
		if n != nil {
			x.chargeBigInt(n)
		}
	}
}

// asciiCharacters are the ASCII characters as values, so that a list of them needs no memory for its items.
var asciiCharacters = func() (values [utf8.RuneSelf]any) {
	for c := range values {
		values[c] = string(rune(c))
	}
	return values
}()

// character returns a character as a value.
func character(r rune) any {
	if r < utf8.RuneSelf && r >= 0 {
		return asciiCharacters[r]
	}
	return string(r)
}
