package jinja

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/big"
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
func (x *execution) arithmetic(op string, left, right any) (any, error) {
	if err := x.step(1); err != nil {
		return nil, err
	}
	if format, ok := textOf(left); ok && op == "%" && !x.mini {
		_, isMarkup := left.(markup)
		text, err := x.percentFormat(format, right, isMarkup)
		if isMarkup {
			return markup(text), err
		}
		return text, err
	}
	for _, v := range [2]any{left, right} {
		if u, ok := v.(Undefined); ok {
			return nil, u.err()
		}
	}
	if a, ok := left.(int64); ok {
		if b, ok := right.(int64); ok && !(x.mini && b < 0) {
			if v, ok := smallArithmetic(op, a, b); ok {
				return v, nil
			}
		}
	}
	a, aInt := asInt(left)
	b, bInt := asInt(right)
	if x.mini {
		if v, done, err := miniArithmetic(op, left, right); done {
			return v, err
		}
	}
	if aInt && bInt {
		if err := x.chargeBigInts(a, b); err != nil {
			return nil, err
		}
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
	return nil, unsupportedOperands(op, left, right)
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

func intArithmetic(op string, a, b *big.Int) (any, error) {
	r := new(big.Int)
	switch op {
	case "+":
		r.Add(a, b)
	case "-":
		r.Sub(a, b)
	case "*":
		if a.BitLen()+b.BitLen() > maxIntBits {
			return nil, fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)
		}
		r.Mul(a, b)
	case "/":
		if b.Sign() == 0 {
			return nil, errZeroDivision
		}
		f, _ := new(big.Rat).SetFrac(a, b).Float64()
		if a.Sign() == 0 && b.Sign() < 0 {
			f = math.Copysign(0, -1)
		}
		if math.IsInf(f, 0) {
			return nil, errors.New("integer division result too large for a float")
		}
		return f, nil
	case "//", "%":
		if b.Sign() == 0 {
			return nil, errZeroDivision
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
			return nil, fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)
		}
		if a.BitLen() <= 1 { // powers of 0, 1 and -1 are small for every exponent
			return smallPower(a, b), nil
		}
		r.Exp(a, b, nil)
	}
	if r.BitLen() > maxIntBits {
		return nil, fmt.Errorf("%w: an integer of more than %d bits", ErrLimit, maxIntBits)
	}
	return values.NormalInt(r), nil
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

func floatArithmetic(op string, a, b float64) (any, error) {
	switch op {
	case "+":
		return a + b, nil
	case "-":
		return a - b, nil
	case "*":
		return a * b, nil
	case "/":
		if b == 0 {
			return nil, errZeroDivision
		}
		return a / b, nil
	case "//", "%":
		if b == 0 {
			return nil, errZeroDivision
		}
		quotient, remainder := floatDivMod(a, b)
		if op == "%" {
			return remainder, nil
		}
		return quotient, nil
	}
	switch {
	case a == 0 && b < 0:
		return nil, errors.New("0.0 cannot be raised to a negative power")
	case a < 0 && b != math.Trunc(b) && !math.IsInf(a, 0):
		return nil, unsupported("complex numbers")
	}
	power := math.Pow(a, b)
	if math.IsInf(power, 0) && !math.IsInf(a, 0) && !math.IsInf(b, 0) {
		return nil, errors.New("result too large")
	}
	return power, nil
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
func (x *execution) add(left, right any) (any, error) {
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
		return nil, fmt.Errorf("can only concatenate str (not \"%s\") to str", kindName(right))
	case *values.List:
		b, ok := right.(*values.List)
		kind := a.Kind
		if x.mini {
			kind = values.View
		}
		if ok && (x.mini || a.Kind == b.Kind && (a.Kind == values.PlainList || a.Kind == values.Tuple)) {
			if err := x.chargeList(len(a.Items) + len(b.Items)); err != nil {
				return nil, err
			}
			items := make([]any, 0, len(a.Items)+len(b.Items))
			return &values.List{Items: append(append(items, a.Items...), b.Items...), Kind: kind}, nil
		}
	}
	return nil, unsupportedOperands("+", left, right)
}

// repeat is v * times for a string or list, as in "ab" * 3 and [1, 2] * 3.
func (x *execution) repeat(v, times any) (any, error) {
	n, ok := smallInt(times)
	if x.mini && n < 0 {
		return nil, unsupportedOperands("*", v, times)
	}
	n = max(n, 0)
	switch a := v.(type) {
	case markup:
		text, err := x.repeat(string(a), times)
		return marked(text), err
	case string:
		if !ok || len(a) > 0 && n > x.limits.OutputBytes/len(a) {
			return nil, x.chargeString(math.MaxInt)
		}
		if err := x.chargeString(len(a) * n); err != nil {
			return nil, err
		}
		return strings.Repeat(a, n), nil
	case *values.List:
		kind := a.Kind
		if x.mini {
			kind = values.View
		} else if a.Kind != values.PlainList && a.Kind != values.Tuple {
			break
		}
		if !ok || len(a.Items) > 0 && n > x.limits.Steps/len(a.Items) {
			return nil, x.chargeList(math.MaxInt32)
		}
		if err := x.chargeList(len(a.Items) * n); err != nil {
			return nil, err
		}
		items := make([]any, 0, len(a.Items)*n)
		for range n {
			items = append(items, a.Items...)
		}
		return &values.List{Items: items, Kind: kind}, nil
	}
	return nil, unsupportedOperands("*", v, times)
}

// signed is -v or +v.
func (x *execution) signed(v any, negative bool) (any, error) {
	if u, ok := v.(Undefined); ok {
		return nil, u.err()
	}
	if f, ok := v.(float64); ok {
		if negative {
			f = -f
		}
		return f, nil
	}
	n, ok := asInt(v)
	if !ok {
		return nil, fmt.Errorf("bad operand type for a sign: '%s'", kindName(v))
	}
	if err := x.chargeBigInt(n); err != nil {
		return nil, err
	}
	if negative {
		n = new(big.Int).Neg(n)
	}
	return values.NormalInt(n), nil
}

// compareNumbers compares two numbers exactly, as Python does; ordered is false if one of them is NaN.
func (x *execution) compareNumbers(left, right any) (order int, ordered bool, err error) {
	if a, ok := left.(int64); ok {
		if b, ok := right.(int64); ok {
			return cmp.Compare(a, b), true, nil
		}
	}
	a, aInt := asInt(left)
	b, bInt := asInt(right)
	if err := x.chargeBigInts(a, b); err != nil {
		return 0, false, err
	}
	if aInt && bInt {
		return a.Cmp(b), true, nil
	}
	f, _ := asFloat(left)
	g, _ := asFloat(right)
	switch {
	case math.IsNaN(f) || math.IsNaN(g):
		return 0, false, nil
	case math.IsInf(f, 0) || math.IsInf(g, 0):
		return cmp.Compare(f, g), true, nil
	}
	return exact(left, a).Cmp(exact(right, b)), true, nil
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
func (x *execution) equal(left, right any) (bool, error) {
	if err := x.step(1); err != nil {
		return false, err
	}
	if isNumber(left) && isNumber(right) {
		order, ordered, err := x.compareNumbers(left, right)
		return ordered && order == 0, err
	}
	switch a := left.(type) {
	case nil:
		return right == nil, nil
	case markup:
		return x.equal(string(a), right)
	case string:
		b, ok := textOf(right)
		if !ok || len(a) != len(b) {
			return false, nil
		}
		return a == b, x.step(len(a) / bytesPerStep)
	case Undefined:
		_, ok := right.(Undefined)
		return ok, nil
	case *values.List:
		b, ok := right.(*values.List)
		if ok && x.mini {
			return x.equalItems(a.Items, b.Items)
		}
		if !ok || a.Kind != b.Kind {
			return false, nil
		}
		if a == b || a.Kind == values.View {
			return a == b, nil
		}
		return x.equalItems(a.Items, b.Items)
	case *values.Dict:
		b, ok := right.(*values.Dict)
		if !ok || a.Len() != b.Len() {
			return false, nil
		}
		return x.equalDicts(a, b)
	case *namespace, *loop, *function, *generator:
		return left == right, nil
	}
	return false, nil
}

func (x *execution) equalItems(a, b []any) (bool, error) {
	if len(a) != len(b) {
		return false, nil
	}
	if err := x.enter(); err != nil {
		return false, err
	}
	defer x.leave()
	for i := range a {
		if ok, err := x.equal(a[i], b[i]); err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

func (x *execution) equalDicts(a, b *values.Dict) (bool, error) {
	if err := x.enter(); err != nil {
		return false, err
	}
	defer x.leave()
	for key, v := range a.All() {
		if err := x.chargeLookup(key); err != nil {
			return false, err
		}
		w, ok := b.Lookup(key)
		if !ok {
			return false, nil
		}
		if ok, err := x.equal(v, w); err != nil || !ok {
			return false, err
		}
	}
	return true, nil
}

// compare is Python's comparison with an operator.
func (x *execution) compare(op string, left, right any) (bool, error) {
	switch op {
	case "==":
		return x.equal(left, right)
	case "!=":
		ok, err := x.equal(left, right)
		return !ok, err
	case "in":
		return x.contains(right, left)
	case "not in":
		ok, err := x.contains(right, left)
		return !ok, err
	}
	order, ordered, err := x.order(op, left, right)
	if err != nil || !ordered {
		return false, err
	}
	switch op {
	case "<":
		return order < 0, nil
	case ">":
		return order > 0, nil
	case "<=":
		return order <= 0, nil
	}
	return order >= 0, nil
}

// order compares two values; ordered is false for NaN.
func (x *execution) order(op string, left, right any) (order int, ordered bool, err error) {
	if err := x.step(1); err != nil {
		return 0, false, err
	}
	for _, v := range [2]any{left, right} {
		if u, ok := v.(Undefined); ok {
			if x.mini {
				return 0, false, unsupported("the order of an undefined value")
			}
			return 0, false, u.err()
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
			return cmp.Compare(a, b), true, x.step(min(len(a), len(b)) / bytesPerStep)
		}
	case *values.List:
		if b, ok := right.(*values.List); ok && a.Kind == b.Kind &&
			(a.Kind == values.PlainList || a.Kind == values.Tuple) {
			return x.orderItems(op, a.Items, b.Items)
		}
	}
	if x.mini { // MiniJinja can order values of any two types
		return 0, false, unsupported("the order of %s and %s", kindName(left), kindName(right))
	}
	return 0, false, fmt.Errorf(
		"'%s' not supported between instances of '%s' and '%s'",
		op,
		kindName(left),
		kindName(right),
	)
}

func (x *execution) orderItems(op string, a, b []any) (order int, ordered bool, err error) {
	if err := x.enter(); err != nil {
		return 0, false, err
	}
	defer x.leave()
	for i := range min(len(a), len(b)) {
		same, err := x.equal(a[i], b[i])
		if err != nil {
			return 0, false, err
		}
		if !same {
			return x.order(op, a[i], b[i])
		}
	}
	return cmp.Compare(len(a), len(b)), true, nil
}

// contains is Python's "item in container".
func (x *execution) contains(container, item any) (bool, error) {
	if err := x.step(1); err != nil {
		return false, err
	}
	switch c := container.(type) {
	case markup:
		return x.contains(string(c), item)
	case string:
		text, ok := textOf(item)
		if !ok && x.mini {
			var err error
			if text, err = x.display(item); err != nil {
				return false, err
			}
			ok = true
		}
		if !ok {
			return false, fmt.Errorf("'in <string>' requires string as left operand, not %s", kindName(item))
		}
		if err := x.chargeBytes(len(c)); err != nil {
			return false, err
		}
		return strings.Contains(c, text), nil
	case *values.Dict:
		if !hashable(item) {
			return false, unhashable(item)
		}
		return c.Find(item) >= 0, x.chargeLookup(item)
	case *generator: // stops at the item
		for {
			v, ok, err := x.pull(c)
			if err == nil && ok {
				ok, err = x.equal(v, item)
			} else if !ok {
				return false, err
			}
			if ok || err != nil {
				return ok, err
			}
		}
	case *values.List, Undefined:
		items, err := x.iterate(c)
		if err != nil {
			return false, err
		}
		for _, v := range items {
			if ok, err := x.equal(v, item); err != nil || ok {
				return ok, err
			}
		}
		return false, nil
	}
	return false, fmt.Errorf("argument of type '%s' is not iterable", kindName(container))
}

// iterate returns the items of a loop over a value. It empties a generator. The caller must not change the slice.
func (x *execution) iterate(v any) ([]any, error) {
	switch c := v.(type) {
	case *values.List:
		return c.Items, nil
	case *generator:
		items := &pieces{x: x}
		for {
			item, ok, err := x.pull(c)
			if err == nil && ok {
				err = items.add(item)
			}
			if err != nil || !ok {
				return items.items, err
			}
		}
	case *values.Dict:
		return c.Keys(), nil
	case markup:
		return x.iterate(string(c))
	case string:
		if err := x.chargeBytes(len(c)); err != nil {
			return nil, err
		}
		n := utf8.RuneCountInString(c)
		if err := x.chargeList(n); err != nil {
			return nil, err
		}
		items := make([]any, 0, n)
		count := x.meter(c)
		for i, r := range c {
			if err := count.at(i); err != nil {
				return nil, err
			}
			items = append(items, character(r))
		}
		return items, nil
	case nil:
		if x.mini {
			return nil, nil
		}
	case Undefined:
		return nil, nil
	}
	return nil, fmt.Errorf("'%s' object is not iterable", kindName(v))
}
