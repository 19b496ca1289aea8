// Package kvblocktest encodes KV events in MessagePack as engines do, for tests and benchmarks. It decodes nothing and
// keeps no state.
package kvblocktest

import (
	"encoding/binary"
	"math"
	"reflect"
)

// Pairs is a map in a fixed order: key, value, key, value.
type Pairs []any

// Raw is bytes that Append copies unchanged, valid MessagePack or not.
type Raw []byte

// Append appends v as MessagePack: nil and bool, int in its shortest form, uint64 and float64 in their longest, string
// of less than 256 bytes, []byte of less than 65,536 bytes, Pairs, Raw, and slices of any of these. It panics on other
// types.
func Append(b []byte, v any) []byte {
	switch v := v.(type) {
	case nil:
		return append(b, 0xc0)
	case bool:
		if v {
			return append(b, 0xc3)
		}
		return append(b, 0xc2)
	case int:
		if v < 0 {
			return binary.BigEndian.AppendUint64(append(b, 0xd3), uint64(v))
		}
		return AppendUint(b, uint64(v))
	case uint64:
		return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
	case float64:
		return binary.BigEndian.AppendUint64(append(b, 0xcb), math.Float64bits(v))
	case string:
		return append(append(b, 0xd9, byte(len(v))), v...)
	case []byte:
		return append(binary.BigEndian.AppendUint16(append(b, 0xc5), uint16(len(v))), v...)
	case Pairs:
		b = binary.BigEndian.AppendUint16(append(b, 0xde), uint16(len(v)/2))
		for _, e := range v {
			b = Append(b, e)
		}
		return b
	case Raw:
		return append(b, v...)
	}
	list := reflect.ValueOf(v)
	b = binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(list.Len()))
	for i := range list.Len() {
		b = Append(b, list.Index(i).Interface())
	}
	return b
}

// AppendUint appends a number in its shortest form, which is the one that engines use.
func AppendUint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}
