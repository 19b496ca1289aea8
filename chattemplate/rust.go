package chattemplate

import (
	"math"
	"math/big"
	"strconv"
	"strings"
)

// CheckRustNumbers reports whether the Rust crate serde_json reads the numbers in a JSON value as this package does. It
// makes floats of integers beyond 64 bits, and may round floats of more than 15 digits or with a large exponent
// otherwise: ErrUnsupported says that v holds such a number.
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

// exactInSerde reports whether digits and power of ten are both exact in a float64, so that one multiplication or
// division, which is how serde_json reads floats, rounds correctly.
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
