package kvblock

import (
	"errors"
	"testing"
)

// goldenLoad is a frame that a mocker of Dynamo 1.6.1 sent.
const goldenLoad = "01000000ac85ac7075626c69736865725f6964cf001f8619f2da061ca873657175656e636503ac7075626c6973686564" +
	"5f6174cf000001a1ffcd1d55a5746f706963aa" +
	"6b765f6d657472696373a77061796c6f6164c45a85a9776f726b65725f6964cf08f01dcbdbed6b64a764705f72616e6b01b461637469766" +
	"55f6465636f64655f626c6f636b73c0" +
	"b56163746976655f70726566696c6c5f746f6b656e73c0ae6b765f757365645f626c6f636b7360"

func loadOf(payload pairs) []byte { return envelopeOf(pack(nil, payload)) }

func TestDecodePlaneLoad(t *testing.T) {
	golden, err := UnframePlane(mustHex(goldenLoad))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name     string
		envelope []byte
		want     PlaneLoad
	}{
		{"Dynamo's own bytes", golden, PlaneLoad{Instance: 0x08f01dcbdbed6b64, Rank: 1, UsedBlocks: 96,
			HasUsedBlocks: true}},
		{"the router's own numbers", loadOf(pairs{"worker_id", 7, "dp_rank", 0, "active_decode_blocks", 5,
			"active_prefill_tokens", 100, "kv_used_blocks", nil}), PlaneLoad{Instance: 7}},
		{"an unknown key", loadOf(pairs{"worker_id", 7, "new", []any{1, "a"}, "kv_used_blocks", 3}),
			PlaneLoad{Instance: 7, UsedBlocks: 3, HasUsedBlocks: true}},
	} {
		if got, err := DecodePlaneLoad(c.envelope); err != nil || got != c.want {
			t.Errorf("%s: %+v, %v, want %+v", c.name, got, err, c.want)
		}
	}
	whole := loadOf(pairs{"worker_id", 7, "dp_rank", 0, "kv_used_blocks", 3})
	for _, bad := range [][]byte{nil, whole[:len(whole)-1], append(whole[:len(whole):len(whole)], 0),
		loadOf(pairs{"dp_rank", 0}), loadOf(pairs{"worker_id", -1}),
		loadOf(pairs{"worker_id", 1, "kv_used_blocks", "3"}), loadOf(pairs{"worker_id", 1, "dp_rank", uint64(1) << 40}),
		envelopeOf([]byte{0x81}), envelopeOf([]byte{0x90}),
		envelopeOf(append(pack(nil, pairs{"worker_id", 1}), 0))} {
		if got, err := DecodePlaneLoad(bad); !errors.Is(err, ErrMalformed) || got != (PlaneLoad{}) {
			t.Errorf("%x: %+v, %v", bad, got, err)
		}
	}
}

func FuzzDecodePlaneLoad(f *testing.F) {
	golden, err := UnframePlane(mustHex(goldenLoad))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(golden)
	f.Add(loadOf(pairs{"worker_id", 7, "active_prefill_tokens", 100, "kv_used_blocks", nil}))
	f.Fuzz(func(t *testing.T, envelope []byte) {
		l, err := DecodePlaneLoad(envelope)
		if err != nil && !errors.Is(err, ErrMalformed) {
			t.Error(err)
		}
		if err != nil && l != (PlaneLoad{}) || !l.HasUsedBlocks && l.UsedBlocks != 0 {
			t.Errorf("%+v, %v", l, err)
		}
	})
}
