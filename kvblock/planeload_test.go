package kvblock

import (
	"bytes"
	"encoding/hex"
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

// goldenMark is a frame by which a mocker of Dynamo 1.6.1 reported a first token, and goldenFree a message over NATS
// that reports the end of a request.
const (
	goldenMark = "01000000f685ac7075626c69736865725f6964cf0019cfe34656cf99a873657175656e636500ac7075626c6973686564" +
		"5f6174cf000001a2061591f3a5746f706963b76163746976655f73657175656e6365735f6576656e7473a77061796c6f" +
		"6164c49781a66576656e74739185aa726571756573745f6964d92434393561623435332d323033312d346336652d6163" +
		"63612d353136316336326533353762a6776f726b657282a9776f726b65725f6964cfe5c110c4799ae35aa764705f7261" +
		"6e6b00a464617461b44d61726b50726566696c6c436f6d706c65746564a9726f757465725f6964cfe5c110c4799ae35a" +
		"a96c6f72615f6e616d65c0"
	goldenFree = "85ac7075626c69736865725f6964cf00006a843d7e615ba873657175656e636502ac7075626c69736865645f6174cf00" +
		"0001a20616de41a5746f706963b76163746976655f73657175656e6365735f6576656e7473a77061796c6f6164c47e85" +
		"aa726571756573745f6964d92461643762643938342d313635302d346437372d626335332d6632303333643739326634" +
		"33a6776f726b657282a9776f726b65725f6964cf85066c9964fc8280a764705f72616e6b00a464617461a446726565a9" +
		"726f757465725f6964cfd7c02b4c6dce05f3a96c6f72615f6e616d65c0"
)

func TestPlaneFirstTokens(t *testing.T) {
	frame, err := hex.DecodeString(goldenMark)
	if err != nil {
		t.Fatal(err)
	}
	mark, err := UnframePlane(frame)
	if err != nil {
		t.Fatal(err)
	}
	free, err := hex.DecodeString(goldenFree)
	if err != nil {
		t.Fatal(err)
	}
	event := func(id string, data any) pairs { return pairs{"request_id", id, "data", data} }
	for _, c := range []struct {
		name     string
		envelope []byte
		want     string
	}{
		{"golden mark", mark, "495ab453-2031-4c6e-acca-5161c62e357b"},
		{"golden end", free, ""},
		{"one over NATS", loadOf(event("a", "MarkPrefillCompleted")), "a"},
		{"several", loadOf(pairs{"events", []any{event("a", "MarkPrefillCompleted"), event("b", "Free"),
			event("c", pairs{"AddRequest", pairs{"token_sequence", []any{1}}}), event("d", "MarkPrefillCompleted"),
			event("", "MarkPrefillCompleted"), pairs{"data", "MarkPrefillCompleted"}}}), "a d"},
		{"none", loadOf(pairs{}), ""},
	} {
		got, err := DecodePlaneFirstTokens(c.envelope, nil)
		if joined := string(bytes.Join(got, []byte(" "))); err != nil || joined != c.want {
			t.Errorf("%s: %q, %v; want %q", c.name, joined, err, c.want)
		}
	}
	for name, envelope := range map[string][]byte{
		"cut":               mark[:len(mark)-1],
		"events of text":    loadOf(pairs{"events", "x"}),
		"an event of text":  loadOf(pairs{"events", []any{"x"}}),
		"an id of a number": loadOf(pairs{"events", []any{pairs{"request_id", 1}}}),
	} {
		if got, err := DecodePlaneFirstTokens(envelope, nil); !errors.Is(err, ErrMalformed) || got != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func FuzzDecodePlaneFirstTokens(f *testing.F) {
	f.Add([]byte(loadOf(pairs{"events", []any{pairs{"request_id", "a", "data", "MarkPrefillCompleted"}}})))
	f.Fuzz(func(t *testing.T, data []byte) {
		ids, err := DecodePlaneFirstTokens(data, nil)
		if (err != nil) != errors.Is(err, ErrMalformed) || err != nil && ids != nil || len(ids) > len(data) {
			t.Errorf("%q, %v", ids, err)
		}
	})
}
