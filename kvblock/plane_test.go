package kvblock

import (
	"bytes"
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// goldenStored is one stored event as dynamo-kv-router 1.6.1 encodes it.
const goldenStored = "9184a9776f726b65725f696407ac73746f726167655f74696572a6646576696365b07265736964656e63795f646f6d" +
	"61696ea6776f726b6572a56576656e7483a8" +
	"6576656e745f696401a46461746181a673746f72656483ab706172656e745f68617368c0ae73746172745f706f736974696f6ec0a6626c6" +
	"f636b739183aa626c6f636b5f6861" +
	"736864ab746f6b656e735f68617368ccc8ad6d6d5f65787472615f696e666fc0a764705f72616e6b00"

func envelopeOf(payload []byte) []byte {
	return pack(
		nil,
		pairs{
			"publisher_id",
			uint64(1) << 52,
			"sequence",
			9,
			"published_at",
			uint64(1795269895674),
			"topic",
			"kv-events",
			"payload",
			payload,
		},
	)
}

// routerEvents encodes events given as {worker, tier, domain, rank, data}.
func routerEvents(events ...[5]any) []byte {
	var list []any
	for i, e := range events {
		list = append(list, pairs{"worker_id", e[0], "storage_tier", e[1], "residency_domain", e[2],
			"event", pairs{"event_id", i + 1, "data", e[4], "dp_rank", e[3]}})
	}
	return envelopeOf(pack(nil, list))
}

func TestDecodePlane(t *testing.T) {
	block := func(engine, local int) pairs {
		return pairs{"block_hash", engine, "tokens_hash", local, "mm_extra_info", nil}
	}
	all := routerEvents(
		[5]any{
			uint64(1) << 63,
			"host_pinned",
			"worker",
			1,
			pairs{
				"stored",
				pairs{"parent_hash", 99, "start_position", 4, "blocks", []any{block(100, 200), block(101, 201)}},
			},
		},
		[5]any{7, "disk", "worker", 0, pairs{"removed", pairs{"block_hashes", []any{100, uint64(1) << 63}}}},
		[5]any{7, "device", "worker", 2, "cleared"},
		[5]any{7, "tape", "worker", 0, "cleared"},
		[5]any{7, "device", "pool", 0, pairs{"removed", pairs{"block_hashes", []any{1}}}},
		[5]any{7, "device", "worker", 0, pairs{"moved", []any{1, 2}}},
	)
	for _, c := range []struct {
		name     string
		envelope []byte
		want     []RouterEvent
	}{
		{"Dynamo's own bytes", envelopeOf(mustHex(goldenStored)), []RouterEvent{{Instance: 7, ID: 1,
			Operation: Operation{Kind: OpStored, Event: BlockStored,
				Stored: Stored{Blocks: []StoredBlock{{100, 200}}}}}}},
		{"every kind", all, []RouterEvent{
			{Instance: 1 << 63, Rank: 1, ID: 1, Operation: Operation{Kind: OpStored, Event: BlockStored,
				Stored: Stored{HasParent: true, Parent: 99, Blocks: []StoredBlock{{100, 200}, {101, 201}},
					Tier: TierHostPinned},
				Removed: Removed{Tier: TierHostPinned}}},
			{Instance: 7, ID: 2, Operation: Operation{Kind: OpRemoved, Event: BlockRemoved,
				Removed: Removed{Hashes: []EngineHash{100, 1 << 63}, Tier: TierDisk}, Stored: Stored{Tier: TierDisk}}},
			{Instance: 7, Rank: 2, ID: 3, Operation: Operation{Kind: OpCleared, Event: AllBlocksCleared}},
			{Instance: 7, ID: 4, Operation: Operation{Kind: OpDropped, Event: AllBlocksCleared,
				Reason: DropUnknownMedium}},
			{Instance: 7, ID: 5, Operation: Operation{Kind: OpDropped, Event: BlockRemoved, Reason: DropNonLocal}},
			{Instance: 7, ID: 6, Operation: Operation{Kind: OpDropped, Event: Ignored, Reason: DropIgnored}},
		}},
		{"none", envelopeOf(pack(nil, []any{})), nil},
	} {
		var b PlaneBatch
		if err := DecodePlane(c.envelope, &b); err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if b.Publisher != 1<<52 || b.Sequence != 9 || len(b.Events) != len(c.want) {
			t.Errorf("%s: publisher %d, message %d, %d events", c.name, b.Publisher, b.Sequence, len(b.Events))
		}
		for i := range c.want {
			if !reflect.DeepEqual(b.Events[i], c.want[i]) {
				t.Errorf("%s: event %d is %+v, want %+v", c.name, i, b.Events[i], c.want[i])
			}
		}
	}
}

// DecodePlane must reject malformed envelopes and every truncation of a valid one.
func TestDecodePlaneRefuses(t *testing.T) {
	var b PlaneBatch
	good := envelopeOf(mustHex(goldenStored))
	for n := range good {
		if err := DecodePlane(good[:n], &b); !errors.Is(err, ErrMalformed) {
			t.Errorf("the first %d bytes: %v", n, err)
		}
	}
	for _, c := range []struct {
		why      string
		envelope []byte
	}{
		{"bytes after the envelope", append(slices.Clone(good), 0xc0)},
		{"bytes after the router events", envelopeOf(append(mustHex(goldenStored), 0xc0))},
		{"without publisher_id", pack(nil, pairs{"sequence", 1, "payload", mustHex(goldenStored)})},
		{"negative", pack(nil, pairs{"publisher_id", -1})},
		{"without worker_id", envelopeOf(pack(nil, []any{pairs{"event", pairs{"data", "cleared"}}}))},
		{"stored without blocks", routerEvents([5]any{7, "device", "worker", 0,
			pairs{"stored", pairs{"parent_hash", nil, "blocks", []any{}}}})},
		{"block without block_hash or tokens_hash", routerEvents([5]any{7, "device", "worker", 0,
			pairs{"stored", pairs{"blocks", []any{pairs{"block_hash", 1}}}}})},
	} {
		if err := DecodePlane(c.envelope, &b); !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), c.why) {
			t.Errorf("%s: %v", c.why, err)
		}
	}
}

func TestUnframePlane(t *testing.T) {
	frame := func(version byte, length int, body string) []byte {
		return append(binary.BigEndian.AppendUint32([]byte{version}, uint32(length)), body...)
	}
	if got, err := UnframePlane(frame(1, 3, "abc")); err != nil || string(got) != "abc" {
		t.Errorf("got %q, %v", got, err)
	}
	for _, bad := range [][]byte{nil, {1}, frame(2, 3, "abc"), frame(1, 4, "abc"), frame(1, 2, "abc"),
		frame(1, 1<<31, "abc")} {
		if _, err := UnframePlane(bad); !errors.Is(err, ErrMalformed) {
			t.Errorf("%x: %v", bad, err)
		}
	}
}

// DecodePlane must not allocate when buffers of an earlier message are large enough.
func TestDecodePlaneAllocates(t *testing.T) {
	envelope := envelopeOf(mustHex(goldenStored))
	var b PlaneBatch
	if n := testing.AllocsPerRun(100, func() {
		if err := DecodePlane(envelope, &b); err != nil {
			t.Fatal(err)
		}
	}); n > 0 {
		t.Errorf("%v allocations a message", n)
	}
}

func FuzzDecodePlane(f *testing.F) {
	f.Add(envelopeOf(mustHex(goldenStored)))
	f.Add(
		routerEvents(
			[5]any{7, "disk", "worker", 0, pairs{"removed", pairs{"block_hashes", []any{100, 200}}}},
			[5]any{7, "device", "worker", 2, "cleared"},
		),
	)
	f.Fuzz(func(t *testing.T, envelope []byte) {
		var b, again PlaneBatch
		before := bytes.Clone(envelope)
		err := DecodePlane(envelope, &b)
		if err != nil && !errors.Is(err, ErrMalformed) {
			t.Fatalf("error does not wrap ErrMalformed: %v", err)
		}
		if !bytes.Equal(before, envelope) {
			t.Fatal("the input was changed")
		}
		if cap(b.hashes) > 64+2*len(envelope) || cap(b.blocks) > 64+2*len(envelope) {
			t.Fatalf("buffers of %d hashes and %d blocks for %d bytes", cap(b.hashes), cap(b.blocks), len(envelope))
		}
		if err != nil {
			return
		}
		if err := DecodePlane(envelope, &again); err != nil || !reflect.DeepEqual(b.Events, again.Events) {
			t.Fatalf("the second decoding differs: %v", err)
		}
		for i := range b.Events {
			if op := &b.Events[i].Operation; op.Kind == 0 || (op.Kind == OpDropped) != (op.Reason != "") {
				t.Fatalf("operation %d with reason %q", op.Kind, op.Reason)
			}
		}
	})
}
