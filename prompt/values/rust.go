package values

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unsafe"
)

// CheckRustNumbers returns ErrUnsupported if v holds a number that the Rust crate serde_json may read differently from
// this package. serde_json reads integers beyond 64 bits as floats, and may round floats of more than 15 digits or with
// a large exponent differently.
func CheckRustNumbers(v any) error {
	switch c := v.(type) {
	case *big.Int:
		if !c.IsUint64() {
			return unsupported("an integer of more than 64 bits")
		}
	case float64:
		if !exactInSerde(c) {
			return unsupported("a float of more than 15 digits")
		}
	case *List:
		for _, item := range c.Items {
			if err := CheckRustNumbers(item); err != nil {
				return err
			}
		}
	case *Dict:
		for _, item := range c.values {
			if err := CheckRustNumbers(item); err != nil {
				return err
			}
		}
	}
	return nil
}

// exactInSerde reports whether the digits and the power of ten are both exact in a float64. Then serde_json's single
// multiplication or division rounds correctly.
func exactInSerde(f float64) bool {
	if f == 0 {
		return true
	}
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(math.Abs(f), 'e', -1, 64), "e")
	power, _ := strconv.Atoi(exponent)
	digits := len(strings.Replace(mantissa, ".", "", 1))
	power -= digits - 1
	return digits <= 15 && power >= -22 && power <= 22
}

// RustJSON formats a JSON value as the Rust crate serde_json does, without white space. The error is ErrUnsupported, as
// in CheckRustNumbers.
func RustJSON(v any) (string, error) {
	if err := CheckRustNumbers(v); err != nil {
		return "", err
	}
	b, err := appendRustJSON(make([]byte, 0, RustJSONSize(v)), v)
	return unsafe.String(unsafe.SliceData(b), len(b)), err
}

// RustJSONSize returns the approximate length of RustJSON's text in bytes. It is too short only for texts with escapes.
func RustJSONSize(v any) int {
	switch c := v.(type) {
	case nil:
		return 4
	case bool:
		return 5
	case int64:
		n := 2
		for ; c > 9 || c < -9; c /= 10 {
			n++
		}
		return n
	case *big.Int:
		return c.BitLen()/3 + 2
	case float64:
		return 24
	case string:
		return len(c) + 2
	case *List:
		n := 2
		for _, item := range c.Items {
			n += 1 + RustJSONSize(item)
		}
		return n
	case *Dict:
		n := 2
		for i, key := range c.keys {
			n += 2 + RustJSONSize(key) + RustJSONSize(c.values[i])
		}
		return n
	}
	return 0
}

func appendRustJSON(b []byte, v any) ([]byte, error) {
	var err error
	switch c := v.(type) {
	case nil:
		return append(b, "null"...), nil
	case bool:
		return strconv.AppendBool(b, c), nil
	case int64:
		return strconv.AppendInt(b, c, 10), nil
	case *big.Int:
		return c.Append(b, 10), nil
	case float64:
		return appendRustFloat(b, c), nil
	case string:
		return appendJSONString(b, c), nil
	case *List:
		for i, item := range c.Items {
			b = append(b, "[,"[min(i, 1)])
			if b, err = appendRustJSON(b, item); err != nil {
				return nil, err
			}
		}
		if len(c.Items) == 0 {
			b = append(b, '[')
		}
		return append(b, ']'), nil
	case *Dict:
		for i, key := range c.keys {
			name, ok := key.(string)
			if !ok {
				return nil, unsupported("a key that is a %T", key)
			}
			b = append(b, "{,"[min(i, 1)])
			b = append(appendJSONString(b, name), ':')
			if b, err = appendRustJSON(b, c.values[i]); err != nil {
				return nil, err
			}
		}
		if len(c.keys) == 0 {
			b = append(b, '{')
		}
		return append(b, '}'), nil
	}
	return nil, unsupported("JSON of a %T", v)
}

// appendRustFloat appends the shortest digits: as a decimal from 1e-5 to below 1e16, with an exponent otherwise.
func appendRustFloat(b []byte, f float64) []byte {
	a := math.Abs(f)
	if a == 0 || a >= 1e-5 && a < 1e16 {
		b = strconv.AppendFloat(b, f, 'f', -1, 64)
		if f == math.Trunc(f) {
			b = append(b, ".0"...)
		}
		return b
	}
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(f, 'e', -1, 64), "e")
	n, _ := strconv.Atoi(exponent)
	return strconv.AppendInt(append(append(b, mantissa...), 'e'), int64(n), 10)
}
