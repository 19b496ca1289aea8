package kvblock

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
)

// goldenQuery is the question for all blocks of rank 0 as dynamo-kv-router 1.6.1 encodes it.
const goldenQuery = "86a9776f726b65725f6964cf6b18a2748beb2c16a764705f72616e6b00ae73746172745f6576656e745f6964c0ac65" +
	"6e645f6576656e745f6964c0b9737570706f7274735f747265655f64756d705f6661696c6564c3a46b696e64a87265636f76657279"

func TestPlaneQuery(t *testing.T) {
	const instance = 0x6b18a2748beb2c16
	if got := hex.EncodeToString(AppendPlaneQuery(nil, instance, 0, nil)); got != goldenQuery {
		t.Errorf("question for all blocks is\n%s, want\n%s", got, goldenQuery)
	}
	from := uint64(7)
	want := strings.Replace(strings.Replace(goldenQuery, "6e6b00", "6e6bce00000100", 1), "6964c0ac",
		"6964cf0000000000000007ac", 1)
	if got := hex.EncodeToString(AppendPlaneQuery(nil, instance, 256, &from)); got != want {
		t.Errorf("question from event 7 is\n%s, want\n%s", got, want)
	}
}

// The parts of a response of dynamo.mocker 1.6.1 with one block, and the last part of every response.
const (
	goldenDump = "82a46461746181a85472656544756d7083a66576656e747391" + goldenDumpEvent +
		"ad6c6173745f6576656e745f696405ab72657365745f73636f7065a3616c6cae636f6d706c6574655f66696e616cc2"
	goldenDumpEvent = "84a9776f726b65725f6964cf389968f9bf581f74ac73746f726167655f74696572a6646576696365b0726573696465" +
		"6e63795f646f6d61696ea6776f726b6572a56576656e7483a86576656e745f696400a46461746181a673746f72656483ab706172656e" +
		"745f68617368c0ae73746172745f706f736974696f6ec0a6626c6f636b739183aa626c6f636b5f68617368cf5af4806aae5c4d62ab74" +
		"6f6b656e735f68617368cf5af4806aae5c4d62ad6d6d5f65787472615f696e666fc0a764705f72616e6b00"
	goldenLast = "81ae636f6d706c6574655f66696e616cc3"
)

func unhex(t testing.TB, text string) []byte {
	t.Helper()
	b, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPlaneResponse(t *testing.T) {
	a, err := DecodePlaneResponse([][]byte{unhex(t, goldenDump), unhex(t, goldenLast)})
	if err != nil || a.Kind != PlaneTreeDump || a.LastEvent != 5 {
		t.Fatalf("answer %+v, %v", a, err)
	}
	var b PlaneBatch
	if any, err := a.Next(&b, 10); !any || err != nil {
		t.Fatal(any, err)
	}
	e := b.Events[0]
	if len(b.Events) != 1 || e.Instance != 4078406359427063668 || e.Operation.Kind != OpStored ||
		e.Operation.Stored.Blocks[0].Local != 0x5af4806aae5c4d62 {
		t.Errorf("events %+v", b.Events)
	}
	if any, err := a.Next(&b, 10); any || err != nil || len(b.Events) != 0 {
		t.Error(any, err, b.Events)
	}
	for _, c := range []struct{ name, answer, kind, message string }{
		{"too new", "81a6546f6f4e657781b06e65776573745f617661696c61626c6507", "TooNew", ""},
		{"an error", "81a54572726f72a3626164", "Error", "bad"},
		{"a failed dump", "81ae5472656544756d704661696c656481a76d657373616765a3626164", "TreeDumpFailed", "bad"},
	} {
		a, err := DecodePlaneResponse([][]byte{unhex(t, "81a464617461"+c.answer), unhex(t, goldenLast)})
		if err != nil || string(a.Kind) != c.kind || a.Message != c.message {
			t.Errorf("%s: %+v, %v", c.name, a, err)
		}
	}
}

func TestMalformedPlaneResponses(t *testing.T) {
	last := unhex(t, goldenLast)
	dump := unhex(t, goldenDump)
	for name, parts := range map[string][][]byte{
		"nothing":            nil,
		"no response":        {last},
		"no end":             {dump},
		"more after the end": {dump, last, last},
		"two kinds":          {unhex(t, "81a46461746182a54572726f72a162a54572726f72a162"), last},
		"not a map":          {unhex(t, "81a46461746191a54572726f72"), last},
		"many elements":      {unhex(t, "81a46461746181a64576656e747381a66576656e7473ddffffffff"), last},
		"cut":                {dump[:len(dump)/2], last},
	} {
		if a, err := DecodePlaneResponse(parts); !errors.Is(err, ErrMalformed) {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	other := bytes.Replace(dump, []byte("all"), []byte("gpu"), 1)
	if _, err := DecodePlaneResponse([][]byte{other, last}); !errors.Is(err, ErrMalformed) {
		t.Errorf("a dump of one tier: %v", err)
	}
}

func FuzzPlaneResponse(f *testing.F) {
	f.Add(unhex(f, goldenDump))
	f.Add(unhex(f, "81a464617461"+"81a6546f6f4e657781b06e65776573745f617661696c61626c6507"))
	f.Fuzz(func(t *testing.T, part []byte) {
		a, err := DecodePlaneResponse([][]byte{part, unhex(t, goldenLast)})
		if err != nil {
			if !errors.Is(err, ErrMalformed) {
				t.Error(err)
			}
			return
		}
		var b PlaneBatch
		for n := 0; ; n += len(b.Events) {
			any, err := a.Next(&b, 2)
			if err != nil && !errors.Is(err, ErrMalformed) || n > len(part) || len(b.Events) > 2 {
				t.Fatal(n, err)
			}
			if !any {
				return
			}
		}
	})
}
