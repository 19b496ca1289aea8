package bpe

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestLongText(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, name := range modelNames {
		e := loadEncoder(t, name)
		for _, text := range []string{strings.Repeat("a", 1<<18), strings.Repeat(" ", 1<<18),
			strings.Repeat("\u0301", 1<<16), strings.Repeat("<|im_start|", 1<<14)} {
			if ids, err := e.Encode(&Budget{}, text, true); err != nil || len(ids) == 0 {
				t.Errorf("%s: %.20q: %d ids, %v", name, text, len(ids), err)
			}
		}
	}
}

// TestEncodeStops: an encoding stops soon after its context ends, and returns no ids.
func TestEncodeStops(t *testing.T) {
	for _, name := range modelNames {
		e := loadEncoder(t, name)
		for what, text := range map[string]string{"words": strings.Repeat("The harbour was quiet. ", 1<<18),
			"one word": strings.Repeat("a", 4<<20)} {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			ids, err := e.append(NewBudget(ctx, 16*len(text)), nil, text, false, nil)
			if !errors.Is(err, context.Canceled) || cap(ids) > 64<<10 {
				t.Errorf("%s, %s: room for %d ids, %v", name, what, cap(ids), err)
			}
		}
	}
}

// TestIDsWithinRoom: an encoding fails if its ids need more room than the budget has, and succeeds if they fit.
func TestIDsWithinRoom(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for _, name := range modelNames {
		e := loadEncoder(t, name)
		for what, text := range map[string]string{"one id a byte": strings.Repeat("!1a?", 1<<16),
			"words": strings.Repeat("the ", 1<<16), "one word": strings.Repeat("x", 1<<18)} {
			want, err := e.Encode(&Budget{}, text, true)
			if err != nil {
				t.Fatal(err)
			}
			budget := Budget{room: 3 * idBytes * len(want)}
			ids, err := e.Encode(&budget, text, true)
			if err != nil || fmt.Sprint(ids) != fmt.Sprint(want) || budget.room > 2*idBytes*len(want) {
				t.Errorf("%s, %s: %d ids, %v; want %d; %d bytes left",
					name, what, len(ids), err, len(want), budget.room)
			}
			budget = Budget{room: idBytes * len(want) * 9 / 10}
			ids, err = e.Encode(&budget, text, true)
			if !errors.Is(err, ErrMemory) || ids != nil && cap(ids) > len(want) {
				t.Errorf("%s, %s, in too little room: %d ids, %v", name, what, len(ids), err)
			}
		}
	}
}
