package jinja

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
	"slices"
	"strings"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// maxIntBits bounds integers. It is a little more than the 4,300 digits that Python prints.
const maxIntBits = 1 << 14

var errZeroDivision = errors.New("division by zero")

// asInt returns an integer or bool as an integer.
func asInt(v any) (*big.Int, bool) {
	switch n := v.(type) {
	case int64:
		return big.NewInt(n), true
	case *big.Int:
		return n, true
	case bool:
		if n {
			return big.NewInt(1), true
		}
		return new(big.Int), true
	}
	return nil, false
}

// smallInt returns a value as an int if it is an integer of 32 bits. Every index and width must be one.
func smallInt(v any) (int, bool) {
	switch n := v.(type) {
	case int64:
		return int(n), n >= math.MinInt32 && n <= math.MaxInt32
	case bool:
		if n {
			return 1, true
		}
		return 0, true
	}
	return 0, false
}

// asFloat returns a number as a float.
func asFloat(v any) (float64, bool) {
	switch n := v.(type) {
	case float64:
		return n, true
	case int64:
		return float64(n), true
	case bool:
		if n {
			return 1, true
		}
		return 0, true
	case *big.Int:
		f, _ := new(big.Float).SetInt(n).Float64()
		return f, true
	}
	return 0, false
}

// arithmetic computes left op right as Python does.
func (x *execution) arithmetic(op string, left, right any) any {
	x.step(1)
	if format, ok := textOf(left); ok && op == "%" && !x.mini {
		_, isMarkup := left.(markup)
		text := x.percentFormat(format, right, isMarkup)
		if isMarkup {
			return markup(text)
		}
		return text
	}
	for _, v := range [2]any{left, right} {
		if u, ok := v.(Undefined); ok {
			panic(failure{u.err()})
		}
	}
	if a, ok := left.(int64); ok {
		if b, ok := right.(int64); ok && !(x.mini && b < 0) {
			if v, ok := smallArithmetic(op, a, b); ok {
				return v
			}
		}
	}
	a, aInt := asInt(left)
	b, bInt := asInt(right)
	if x.mini {
		if v, done := miniArithmetic(op, left, right); done {
			return v
		}
	}
	if aInt && bInt {
		x.chargeBigInts(a, b)
		return intArithmetic(op, a, b)
	}
	f, aNumber := asFloat(left)
	g, bNumber := asFloat(right)
	if aNumber && bNumber {
		return floatArithmetic(op, f, g)
	}
	switch op {
	case "+":
		return x.add(left, right)
	case "*":
		if bInt {
			return x.repeat(left, right)
		}
		if aInt {
			return x.repeat(right, left)
		}
	}
	panic(failure{unsupportedOperands(op, left, right)})
}

func unsupportedOperands(op string, left, right any) error {
	if kindName(left) == "dict view" || kindName(right) == "dict view" { // some are sets
		return unsupported("%s with a dict view", op)
	}
	return fmt.Errorf("unsupported operand type(s) for %s: '%s' and '%s'", op, kindName(left), kindName(right))
}

// smallArithmetic computes with small integers, the common case in templates; ok is false for other cases.
func smallArithmetic(op string, a, b int64) (v any, ok bool) {
	const limit = 1 << 31
	if a <= -limit || a >= limit || b <= -limit || b >= limit {
		return nil, false
	}
	switch op {
	case "+":
		return a + b, true
	case "-":
		return a - b, true
	case "*":
		return a * b, true
	case "//", "%":
		if b == 0 {
			return nil, false
		}
		quotient, remainder := a/b, a%b
		if remainder != 0 && (remainder < 0) != (b < 0) { // Python rounds down, Go towards zero
			quotient--
			remainder += b
		}
		if op == "%" {
			return remainder, true
		}
		return quotient, true
	}
	return nil, false
}

func intArithmetic(op string, a, b *big.Int) any {
	r := new(big.Int)
	switch op {
	case "+":
		r.Add(a, b)
	case "-":
		r.Sub(a, b)
	case "*":
		if a.BitLen()+b.BitLen() > maxIntBits {
			panic(failure{fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)})
		}
		r.Mul(a, b)
	case "/":
		if b.Sign() == 0 {
			panic(failure{errZeroDivision})
		}
		f, _ := new(big.Rat).SetFrac(a, b).Float64()
		if a.Sign() == 0 && b.Sign() < 0 {
			f = math.Copysign(0, -1)
		}
		if math.IsInf(f, 0) {
			panic(failure{errors.New("integer division result too large for a float")})
		}
		return f
	case "//", "%":
		if b.Sign() == 0 {
			panic(failure{errZeroDivision})
		}
		m := new(big.Int)
		r.QuoRem(a, b, m)
		if m.Sign() != 0 && (m.Sign() < 0) != (b.Sign() < 0) {
			r.Sub(r, big.NewInt(1))
			m.Add(m, b)
		}
		if op == "%" {
			r = m
		}
	case "**":
		if b.Sign() < 0 {
			f, _ := asFloat(a)
			g, _ := asFloat(b)
			return floatArithmetic(op, f, g)
		}
		if a.BitLen() > 1 && (!b.IsInt64() || b.Int64() > maxIntBits/int64(a.BitLen())) {
			panic(failure{fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)})
		}
		if a.BitLen() <= 1 { // powers of 0, 1 and -1 are small for every exponent
			return smallPower(a, b)
		}
		r.Exp(a, b, nil)
	}
	if r.BitLen() > maxIntBits {
		panic(failure{fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)})
	}
	return values.NormalInt(r)
}

func smallPower(a, b *big.Int) any {
	switch {
	case b.Sign() == 0 || a.Sign() > 0:
		return int64(1)
	case a.Sign() == 0:
		return int64(0)
	case b.Bit(0) == 1:
		return int64(-1)
	}
	return int64(1)
}

func floatArithmetic(op string, a, b float64) any {
	switch op {
	case "+":
		return a + b
	case "-":
		return a - b
	case "*":
		return a * b
	case "/":
		if b == 0 {
			panic(failure{errZeroDivision})
		}
		return a / b
	case "//", "%":
		if b == 0 {
			panic(failure{errZeroDivision})
		}
		quotient, remainder := floatDivMod(a, b)
		if op == "%" {
			return remainder
		}
		return quotient
	}
	switch {
	case a == 0 && b < 0:
		panic(failure{errors.New("0.0 cannot be raised to a negative power")})
	case a < 0 && b != math.Trunc(b) && !math.IsInf(a, 0):
		panic(failure{unsupported("complex numbers")})
	}
	power := math.Pow(a, b)
	if math.IsInf(power, 0) && !math.IsInf(a, 0) && !math.IsInf(b, 0) {
		panic(failure{errors.New("result too large")})
	}
	return power
}

// floatDivMod is Python's divmod of floats. The remainder has the divisor's sign.
func floatDivMod(a, b float64) (quotient, remainder float64) {
	remainder = math.Mod(a, b)
	quotient = (a - remainder) / b
	if remainder != 0 {
		if (b < 0) != (remainder < 0) {
			remainder += b
			quotient--
		}
	} else {
		remainder = math.Copysign(0, b)
	}
	if quotient == 0 {
		return math.Copysign(0, a/b), remainder
	}
	floor := math.Floor(quotient)
	if quotient-floor > 0.5 {
		floor++
	}
	return floor, remainder
}

// add concatenates strings, lists or tuples.
func (x *execution) add(left, right any) any {
	switch a := left.(type) {
	case markup:
		return x.addMarkup(left, right)
	case string:
		if b, ok := right.(string); ok {
			return x.concat(len(a)+len(b), a, b)
		}
		if _, ok := right.(markup); ok {
			return x.addMarkup(left, right)
		}
		panic(failure{fmt.Errorf("can only concatenate str (not \"%s\") to str", kindName(right))})
	case *values.List:
		b, ok := right.(*values.List)
		kind := a.Kind
		if x.mini {
			kind = values.View
		}
		if ok && (x.mini || a.Kind == b.Kind && (a.Kind == values.PlainList || a.Kind == values.Tuple)) {
			x.chargeList(len(a.Items) + len(b.Items))
			items := make([]any, 0, len(a.Items)+len(b.Items))
			return &values.List{Items: append(append(items, a.Items...), b.Items...), Kind: kind}
		}
	}
	panic(failure{unsupportedOperands("+", left, right)})
}

// repeat is v * times for a string or list, as in "ab" * 3 and [1, 2] * 3.
func (x *execution) repeat(v, times any) any {
	n, ok := smallInt(times)
	if x.mini && n < 0 {
		panic(failure{unsupportedOperands("*", v, times)})
	}
	n = max(n, 0)
	switch a := v.(type) {
	case markup:
		return marked(x.repeat(string(a), times))
	case string:
		if !ok || len(a) > 0 && n > x.limits.OutputBytes/len(a) {
			x.checkSize(math.MaxInt)
		}
		x.chargeString(len(a) * n)
		return strings.Repeat(a, n)
	case *values.List:
		kind := a.Kind
		if x.mini {
			kind = values.View
		} else if a.Kind != values.PlainList && a.Kind != values.Tuple {
			break
		}
		if !ok || len(a.Items) > 0 && n > x.limits.Steps/len(a.Items) {
			x.chargeList(math.MaxInt32)
		}
		x.chargeList(len(a.Items) * n)
		items := make([]any, 0, len(a.Items)*n)
		for range n {
			items = append(items, a.Items...)
		}
		return &values.List{Items: items, Kind: kind}
	}
	panic(failure{unsupportedOperands("*", v, times)})
}

// signed is -v or +v.
func (x *execution) signed(v any, negative bool) any {
	if u, ok := v.(Undefined); ok {
		panic(failure{u.err()})
	}
	if f, ok := v.(float64); ok {
		if negative {
			f = -f
		}
		return f
	}
	n, ok := asInt(v)
	if !ok {
		panic(failure{fmt.Errorf("bad operand type for a sign: '%s'", kindName(v))})
	}
	x.chargeBigInt(n)
	if negative {
		n = new(big.Int).Neg(n)
	}
	return values.NormalInt(n)
}

// compareNumbers compares two numbers exactly, as Python does; ordered is false if one of them is NaN.
func (x *execution) compareNumbers(left, right any) (order int, ordered bool) {
	if a, ok := left.(int64); ok {
		if b, ok := right.(int64); ok {
			return cmp.Compare(a, b), true
		}
	}
	a, aInt := asInt(left)
	b, bInt := asInt(right)
	x.chargeBigInts(a, b)
	if aInt && bInt {
		return a.Cmp(b), true
	}
	f, _ := asFloat(left)
	g, _ := asFloat(right)
	switch {
	case math.IsNaN(f) || math.IsNaN(g):
		return 0, false
	case math.IsInf(f, 0) || math.IsInf(g, 0):
		return cmp.Compare(f, g), true
	}
	return exact(left, a).Cmp(exact(right, b)), true
}

// exact returns a finite number without rounding. n is its value if it is an integer, else nil.
func exact(v any, n *big.Int) *big.Rat {
	if n != nil {
		return new(big.Rat).SetInt(n)
	}
	f, _ := v.(float64)
	return new(big.Rat).SetFloat64(f)
}

func isNumber(v any) bool {
	switch v.(type) {
	case bool, int64, *big.Int, float64:
		return true
	}
	return false
}

// equal is Python's ==.
func (x *execution) equal(left, right any) bool {
	x.step(1)
	if isNumber(left) && isNumber(right) {
		order, ordered := x.compareNumbers(left, right)
		return ordered && order == 0
	}
	switch a := left.(type) {
	case nil:
		return right == nil
	case markup:
		return x.equal(string(a), right)
	case string:
		b, ok := textOf(right)
		if !ok || len(a) != len(b) {
			return false
		}
		x.step(len(a) / bytesPerStep)
		return a == b
	case Undefined:
		_, ok := right.(Undefined)
		return ok
	case *values.List:
		b, ok := right.(*values.List)
		if ok && x.mini {
			return x.equalItems(a.Items, b.Items)
		}
		if !ok || a.Kind != b.Kind {
			return false
		}
		if a == b || a.Kind == values.View {
			return a == b
		}
		return x.equalItems(a.Items, b.Items)
	case *values.Dict:
		b, ok := right.(*values.Dict)
		if !ok || a.Len() != b.Len() {
			return false
		}
		return x.equalDicts(a, b)
	case *namespace, *loop, *function, *generator:
		return left == right
	}
	return false
}

func (x *execution) equalItems(a, b []any) bool {
	if len(a) != len(b) {
		return false
	}
	x.enter()
	defer x.leave()
	for i := range a {
		if !x.equal(a[i], b[i]) {
			return false
		}
	}
	return true
}

func (x *execution) equalDicts(a, b *values.Dict) bool {
	x.enter()
	defer x.leave()
	for key, v := range a.All() {
		x.chargeLookup(key)
		if w, ok := b.Lookup(key); !ok || !x.equal(v, w) {
			return false
		}
	}
	return true
}

// compare is Python's comparison with an operator.
func (x *execution) compare(op string, left, right any) bool {
	switch op {
	case "==":
		return x.equal(left, right)
	case "!=":
		return !x.equal(left, right)
	case "in":
		return x.contains(right, left)
	case "not in":
		return !x.contains(right, left)
	}
	order, ordered := x.order(op, left, right)
	if !ordered {
		return false
	}
	switch op {
	case "<":
		return order < 0
	case ">":
		return order > 0
	case "<=":
		return order <= 0
	}
	return order >= 0
}

// order compares two values; ordered is false for NaN.
func (x *execution) order(op string, left, right any) (order int, ordered bool) {
	x.step(1)
	for _, v := range [2]any{left, right} {
		if u, ok := v.(Undefined); ok {
			if x.mini {
				panic(failure{unsupported("the order of an undefined value")})
			}
			panic(failure{u.err()})
		}
	}
	if isNumber(left) && isNumber(right) {
		return x.compareNumbers(left, right)
	}
	switch a := left.(type) {
	case markup:
		return x.order(op, string(a), right)
	case string:
		if b, ok := textOf(right); ok {
			// The byte order of UTF-8 is the order of code points.
			x.step(min(len(a), len(b)) / bytesPerStep)
			return cmp.Compare(a, b), true
		}
	case *values.List:
		if b, ok := right.(*values.List); ok && a.Kind == b.Kind &&
			(a.Kind == values.PlainList || a.Kind == values.Tuple) {
			return x.orderItems(op, a.Items, b.Items)
		}
	}
	if x.mini { // MiniJinja can order values of any two types
		panic(failure{unsupported("the order of %s and %s", kindName(left), kindName(right))})
	}
	panic(failure{fmt.Errorf("'%s' not supported between instances of '%s' and '%s'",
		op, kindName(left), kindName(right))})
}

func (x *execution) orderItems(op string, a, b []any) (order int, ordered bool) {
	x.enter()
	defer x.leave()
	for i := range min(len(a), len(b)) {
		if !x.equal(a[i], b[i]) {
			return x.order(op, a[i], b[i])
		}
	}
	return cmp.Compare(len(a), len(b)), true
}

// contains is Python's "item in container".
func (x *execution) contains(container, item any) bool {
	x.step(1)
	switch c := container.(type) {
	case markup:
		return x.contains(string(c), item)
	case string:
		text, ok := textOf(item)
		if !ok && x.mini {
			text = x.display(item)
			ok = true
		}
		if !ok {
			panic(failure{fmt.Errorf("'in <string>' requires string as left operand, not %s", kindName(item))})
		}
		x.chargeBytes(len(c))
		return strings.Contains(c, text)
	case *values.Dict:
		if !hashable(item) {
			panic(failure{unhashable(item)})
		}
		x.chargeLookup(item)
		return c.Find(item) >= 0
	case *generator: // stops at the item
		for {
			v, ok := x.pull(c)
			if !ok || x.equal(v, item) {
				return ok
			}
		}
	case *values.List, Undefined:
		return slices.ContainsFunc(x.iterate(c), func(v any) bool { return x.equal(v, item) })
	}
	panic(failure{fmt.Errorf("argument of type '%s' is not iterable", kindName(container))})
}

// iterate returns the items of a loop over a value. It empties a generator. The caller must not change the slice.
func (x *execution) iterate(v any) []any {
	switch c := v.(type) {
	case *values.List:
		return c.Items
	case *generator:
		items := &pieces{x: x}
		for {
			item, ok := x.pull(c)
			if !ok {
				return items.items
			}
			items.add(item)
		}
	case *values.Dict:
		return c.Keys()
	case markup:
		return x.iterate(string(c))
	case string:
		x.chargeBytes(len(c))
		n := utf8.RuneCountInString(c)
		x.chargeList(n)
		items := make([]any, 0, n)
		count := x.meter(c)
		for i, r := range c {
			count.at(i)
			items = append(items, character(r))
		}
		return items
	case nil:
		if x.mini {
			return nil
		}
	case Undefined:
		return nil
	}
	panic(failure{fmt.Errorf("'%s' object is not iterable", kindName(v))})
}
