package main

import (
	"testing"

	"kvepp/kvblock"
)

// kvblock decodes the messages, uses every event, and the index afterwards has the announced blocks, which decode
// checks.
func TestMessages(t *testing.T) {
	for kind, blocks := range map[string]int{"prefill16": 64, "prefill64": 16, "decode16": 40} {
		m, err := newMessages(kind, 40*decodeTogether)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := decode(m); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		var b kvblock.Batch
		if err := kvblock.DecodeBatch(m.payloads[len(m.payloads)-1], &b); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
		n := 0
		for _, e := range b.Events {
			n += len(e.Hashes)
		}
		if n != blocks || b.UnknownTags+b.UnknownKeys != 0 {
			t.Errorf(
				"%s: a message announces %d blocks, want %d; %d tags and %d keys are unknown",
				kind,
				n,
				blocks,
				b.UnknownTags,
				b.UnknownKeys,
			)
		}
	}
}
