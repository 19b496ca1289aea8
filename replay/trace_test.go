package replay

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"
	"testing"
	"time"

	"kvepp/kvblock"
)

func read(t *testing.T, format Format, text string) ([]*Request, error) {
	t.Helper()
	r, err := NewReader("trace", strings.NewReader(text), format, ReaderOptions{BlockSize: 4, TraceBlockSize: 8})
	if err != nil {
		return nil, err
	}
	var all []*Request
	for {
		q, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		all = append(all, q)
	}
}

func TestMooncake(t *testing.T) {
	all, err := read(t, Mooncake, `
{"timestamp": 5, "hash_ids": [7, 9], "input_length": 13, "output_length": 3}
{"created_time": 6.5, "hash_ids": [7, 8], "output_tokens": 0, "priority": 2, "request_id": "b"}
{"timestamp": 7, "session_id": "s", "hash_ids": [1], "output_length": 2}
{"delay": 1500, "session_id": "s", "hash_ids": [1, 2], "output_length": 2}`)
	if err != nil {
		t.Fatal(err)
	}
	// Blocks of 4 tokens, of hash ids with 8 tokens each.
	tokens := []kvblock.Token{7, 7, 7, 7, 7, 7, 7, 7, 9, 9, 9, 9, 9}
	want := kvblock.AppendSequenceHashes(nil, kvblock.AppendLocalHashes(nil, tokens, kvblock.HashOptions{BlockSize: 4}))
	if got := fmt.Sprint(all[0].Chain); got != fmt.Sprint(want) || all[0].Prompt != 13 || all[0].Output != 3 {
		t.Errorf("%+v, want the chain %v", all[0], want)
	}
	if b := all[1]; b.At != 6500*time.Microsecond || b.Prompt != 16 || b.Output != 1 || b.Priority != 2 ||
		b.ID != "b" ||
		b.Chain[1] != want[1] || b.Chain[2] == want[2] {
		t.Errorf("%+v", b)
	}
	if all[2].Delay != -1 || all[3].Delay != 1500*time.Millisecond || all[3].Session != "s" {
		t.Errorf("%+v %+v", all[2], all[3])
	}
}

// TestMooncakeDelta: a later turn continues its session's prompt and response.
func TestMooncakeDelta(t *testing.T) {
	all, err := read(t, MooncakeDelta, `
{"timestamp": 0, "session_id": "s", "hash_ids": [1], "output_length": 6}
{"delay": 10, "session_id": "s", "hash_ids": [2], "output_length": 1}
{"timestamp": 20, "hash_ids": [1], "output_length": 6}`)
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := all[0], all[1], all[2]
	if a.Prompt != 8 || len(a.Chain) != 3 || b.Prompt != 22 || fmt.Sprint(b.Chain[:3]) != fmt.Sprint(a.Chain) {
		t.Errorf("%+v, then %+v", a, b)
	}
	if len(c.Chain) != 2 || c.Chain[1] != a.Chain[1] {
		t.Errorf("%+v", c)
	}
}

const dynamoLine = `{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_end",` +
	`"agent_context":{"session_id":"S"},` +
	`"request":{"request_id":"r","output_tokens":5,"request_received_ms":%d,` +
	`"replay":{"trace_block_size":%d,"input_length":9,"input_sequence_hashes":[%s]}}}}` + "\n"

func TestDynamoTrace(t *testing.T) {
	text := `{"event":{"schema":"dynamo.request.trace.v1","event_type":"request_payload"}}` + "\n" +
		fmt.Sprintf(dynamoLine, 100, 4, "11,12,13") + fmt.Sprintf(dynamoLine, 200, 4, "11,15")
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	io.WriteString(z, text)
	z.Close()
	for _, text := range []string{text, packed.String()} {
		all, err := read(t, Dynamo, text)
		if err != nil || len(all) != 2 {
			t.Fatal(all, err)
		}
		a, b := all[0], all[1]
		if a.At != 100*time.Millisecond || a.Prompt != 9 || a.Output != 5 || a.Session != "S" || len(a.Chain) != 2 ||
			a.Chain[0] != b.Chain[0] || a.Chain[1] == b.Chain[1] {
			t.Errorf("%+v, %+v", a, b)
		}
	}
}

// TestBadTraces: errors name the line and the reason.
func TestBadTraces(t *testing.T) {
	good := `{"timestamp": 5, "hash_ids": [7], "output_length": 3}` + "\n"
	for _, c := range []struct {
		format     Format
		text, want string
	}{
		{Mooncake, good + `{"timestamp": 5, "hash_ids": [7], "outp`, "line 2: the line ends in the middle of its JSON"},
		{Mooncake, good + "\n\nnonsense\n", "line 4: invalid character"},
		{Mooncake, `{"output_length": 3}`, "line 1: no hash_ids"},
		{Mooncake, `{"hash_ids": [1]}`, "line 1: no output_length"},
		{Mooncake, `{"hash_ids": [], "output_length": 1}`, "no input_length"},
		{Mooncake, `{"hash_ids": [1], "input_length": 9, "output_length": 1}`, "more than its 1 hash ids of 8 tokens"},
		{Mooncake, `{"hash_ids": [1], "output_length": -1}`, "output_length -1: must be 0 to"},
		{Mooncake, `{"hash_ids": [1], "output_length": 1, "timestamp": -4}`, "timestamp -4: must be"},
		{Mooncake, `{"hash_ids": [1], "output_length": 1, "delay": 1e300}`, "delay 1e+300: must be"},
		{Mooncake, `{"hash_ids": [-1], "output_length": 1}`, "line 1: json"},
		{Mooncake, "\x1f\x8b nonsense", "gzip: invalid header"},
		{Mooncake, strings.Repeat(" ", maxLine+70000), "line 1: the line is longer than"},
		{Dynamo, good, `line 1: schema ""`},
		{Dynamo, fmt.Sprintf(dynamoLine, 1, 4, "1,2") + fmt.Sprintf(dynamoLine, 1, 8, "1"),
			"line 2: trace_block_size 8 after 4"},
		{Dynamo, fmt.Sprintf(dynamoLine, 1, 8, "1,2"), "set --block-size=8"},
		{Dynamo, fmt.Sprintf(dynamoLine, 1, 4, "1"), "1 input_sequence_hashes for 9 tokens"},
		{"other", good, `trace format "other"`},
	} {
		if _, err := read(t, c.format, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%.60s: %v, want %q", c.text, err, c.want)
		}
	}
}

func FuzzMooncake(f *testing.F) {
	f.Add(`{"timestamp": 5, "hash_ids": [7, 9], "input_length": 13, "output_length": 3, "priority": 4}`)
	f.Add(`{"hash_ids": [18446744073709551615], "output_length": 1, "timestamp": 1e12, "output_token_ids": [5]}`)
	f.Fuzz(func(t *testing.T, text string) { fuzzed(t, Mooncake, text) })
}

func FuzzMooncakeDelta(f *testing.F) {
	f.Add(`{"session_id": "s", "hash_ids": [1], "output_length": 6, "input_length": 3}
{"delay": 10, "session_id": "s", "hash_ids": [2], "output_length": 1, "output_token_ids": [5]}`)
	f.Fuzz(func(t *testing.T, text string) { fuzzed(t, MooncakeDelta, text) })
}

func FuzzDynamo(f *testing.F) {
	f.Add(fmt.Sprintf(dynamoLine, 100, 4, "11,12,13"))
	f.Fuzz(func(t *testing.T, text string) { fuzzed(t, Dynamo, text) })
}

// manyTokens are rows of a trace whose reading takes seconds: the fuzzer calls 10 s a hang.
var manyTokens = regexp.MustCompile(`(?i)(length|tokens)"\s*:\s*\d{6}`)

// fuzzed reads a trace, also as if it were compressed, and checks what Run relies on.
func fuzzed(t *testing.T, format Format, text string) {
	if manyTokens.MatchString(text) {
		return
	}
	all, _ := read(t, format, text)
	for _, q := range all {
		if q.Prompt < 1 || q.Output < 1 || len(q.Chain) != len(q.Locals) || len(q.Chain) < q.Prompt/4 ||
			len(q.Chain) > (q.Prompt+q.Output)/4 || q.At < 0 || q.Delay < -1 {
			t.Errorf("%+v", q)
		}
	}
	_, _ = read(t, format, "\x1f\x8b\x08\x00"+text)
}

// TestHostileTraces: what is made to exhaust memory ends with the line and a reason.
func TestHostileTraces(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	packed := func(text string, times int) string {
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		for range times {
			io.WriteString(z, text)
		}
		z.Close()
		return b.String()
	}
	good := `{"timestamp": 5, "hash_ids": [7], "output_length": 3}` + "\n"
	half := packed(strings.Repeat(good, 3), 1)
	for _, c := range []struct{ name, text, want string }{
		{"a bomb", packed(strings.Repeat(" ", 1<<20-1)+"\n", 80), "unpack to more than"},
		{"a bomb of one line", packed(strings.Repeat(" ", 1<<20), 20), "line 1: the line is longer than"},
		{"blank lines", strings.Repeat("\n", maxSkipped+2), "blank lines: is this a trace?"},
		{"cut off", half[:len(half)-9], "the gzip data ends early"},
		{"another checksum", half[:len(half)-8] + "12345678", "gzip: invalid checksum"},
		{"a huge number", `{"hash_ids": [1], "output_length": 1, "timestamp": 1e999}`, "line 1: json: cannot"},
		{"a huge prompt", `{"hash_ids": [` + strings.Repeat("1,", maxTokens/8) + `1], "output_length": 1}`,
			"must be 1 to 16777216"},
		{"a huge priority", `{"hash_ids": [1], "output_length": 1, "priority": 1e300}`, "line 1: priority 1e+300"},
		{"nesting", strings.Repeat("[", 1<<20), "line 1: invalid character '[' exceeded max depth"},
		{"no text", "\x00\xff\xfe" + good, "line 1: invalid character"},
	} {
		if _, err := read(t, Mooncake, c.text); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// TestSessionsMakeRoom: histories of sessions are bounded. A turn of one that had to make room is refused, rather than
// replayed without what was before it.
func TestSessionsMakeRoom(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	row := func(session int) string {
		return fmt.Sprintf(`{"session_id": "s%d", "hash_ids": [1], "input_length": 6000000, "output_length": 1}`+"\n",
			session)
	}
	r, err := NewReader("trace", strings.NewReader(row(0)+row(1)+row(2)+row(0)), MooncakeDelta,
		ReaderOptions{BlockSize: 1, TraceBlockSize: maxTokens})
	if err != nil {
		t.Fatal(err)
	}
	for line := 1; ; line++ {
		_, err := r.Next()
		if line == 4 {
			if err == nil || !strings.Contains(err.Error(), `line 4: a turn of the session "s0"`) {
				t.Error(err)
			}
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if r.blocks > maxSessionBlocks {
			t.Errorf("%d blocks after line %d", r.blocks, line)
		}
	}
}

// TestSorted: requests of a dynamo trace, which stand in the order of their ends, come in the order of arrival, if none
// took more than 10 minutes.
func TestSorted(t *testing.T) {
	minutes := func(at, ended int) *Request {
		return &Request{At: time.Duration(at) * time.Minute, ended: time.Duration(ended) * time.Minute}
	}
	sorted := func(requests []*Request) (got []time.Duration, err error) {
		next := Sorted(func() (*Request, error) {
			if len(requests) == 0 {
				return nil, io.EOF
			}
			q := requests[0]
			requests = requests[1:]
			return q, nil
		})
		for {
			q, err := next()
			if err != nil {
				return got, err
			}
			got = append(got, q.At/time.Minute)
		}
	}
	got, err := sorted([]*Request{minutes(1, 2), minutes(3, 5), minutes(0, 8), minutes(7, 9), minutes(30, 31),
		minutes(25, 32)})
	if !errors.Is(err, io.EOF) || fmt.Sprint(got) != fmt.Sprint([]time.Duration{0, 1, 3, 7, 25, 30}) {
		t.Error(got, err)
	}
}
