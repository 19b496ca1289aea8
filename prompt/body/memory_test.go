package body

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"

	"kvepp/internal/bodytest"
)

// slack is the error of the memory measurement: garbage, and memory that the test itself holds.
const slack = 2 << 20

// holdParse parses a body and compares the memory and time with ReadCost.
func holdParse(t *testing.T, body bodytest.Body) {
	t.Helper()
	var r *Request
	var err error
	allocated := 0
	peak := bodytest.Peak(func() {
		allocated = bodytest.Allocated(func() { r, err = ParseRequest(body.Path, body.JSON) })
	})
	// detects, for example, texts that are joined one by one, which also takes too much time
	if most := 4*ReadCost(len(body.JSON)) + slack; allocated > most {
		t.Errorf(
			"%s: parsing %d bytes allocated %d bytes in total; at most %d are allowed",
			body.Name,
			len(body.JSON),
			allocated,
			most,
		)
	}
	if most := ReadCost(len(body.JSON)) + ReadCost(len(body.JSON))/8 + slack; peak > most {
		t.Errorf(
			"%s: parsing %d bytes took %d bytes, %.1f for each byte; at most %d are allowed; prompt read: %v, error: "+
				"%v",
			body.Name,
			len(body.JSON),
			peak,
			float64(peak)/float64(len(body.JSON)),
			most,
			r != nil && r.TooLarge == nil,
			err,
		)
	}
	runtime.KeepAlive(r)
	var bad *Error
	if err != nil && !errors.As(err, &bad) && !errors.Is(err, ErrTooManyValues) {
		t.Errorf("%s: %v", body.Name, err)
	}
}

// TestMemoryOfBodies: for every shape of a body, parsing takes at most ReadCost.
func TestMemoryOfBodies(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	for i, body := range bodytest.All(1 << 20) {
		if i%(2*slowerBuild) == 0 ||
			slowerBuild == 1 && (strings.HasPrefix(body.Name, "prompt: ") || strings.HasPrefix(body.Name, "tools: ")) {
			holdParse(t, body)
		}
	}
}

// TestMemoryOfRandomBodies: the same for random bodies. FuzzMemoryOfBodies generates more.
func TestMemoryOfRandomBodies(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const seed = 1
	chance := rand.New(rand.NewPCG(seed, 0))
	for i := range 60 / slowerBuild {
		body := bodytest.Random(chance, 1<<20)
		body.Name += fmt.Sprintf(" (seed %d, number %d)", seed, i)
		holdParse(t, body)
	}
}

func FuzzMemoryOfBodies(f *testing.F) {
	for seed := range uint64(8) {
		f.Add(seed, uint32(100_000))
	}
	f.Fuzz(func(t *testing.T, seed uint64, size uint32) {
		holdParse(t, bodytest.Random(rand.New(rand.NewPCG(seed, uint64(size))), int(size%(4<<20))))
	})
}

// TestDenseBodiesAreRead: bodies of agents are read at any size, and leave much of the allowed memory unused.
func TestDenseBodiesAreRead(t *testing.T) {
	tool := func(i int) string {
		return fmt.Sprintf(
			`{"type":"function","function":{"name":"tool_%d","description":"Does %d.","parameters":{"type":"object",`+
				`"properties":{"path":{"type":"string","description":"A path."},"lines":{"type":"array",`+
				`"items":{"type":"integer"}},"deep":{"type":"boolean","default":false},"kind":{"type":"string",`+
				`"enum":["a","b","c"]}},"required":["path","lines"],"additionalProperties":false}}}`,
			i,
			i,
		)
	}
	many := func(n int, of func(i int) string) string {
		var b strings.Builder
		for i := range n {
			b.WriteString(of(i))
			b.WriteByte(',')
		}
		return strings.TrimSuffix(b.String(), ",")
	}
	turn := `{"role":"user","content":"ok"},{"role":"assistant","content":"yes"}`
	call := func(i int) string {
		return fmt.Sprintf(
			`{"role":"assistant","content":null,"tool_calls":[{"id":"call_%d","type":"function",`+
				`"function":{"name":"read","arguments":"{\"path\":\"/a/%d\"}"}}]},{"role":"tool",`+
				`"tool_call_id":"call_%d","content":"%d"}`,
			i,
			i,
			i,
			i,
		)
	}
	for name, body := range map[string]string{
		"tools":          `"messages":[{"role":"user","content":"x"}],"tools":[` + many(20_000, tool) + `]`,
		"short messages": `"messages":[` + many(60_000, func(int) string { return turn }) + `]`,
		"tool calls":     `"messages":[` + many(20_000, call) + `]`,
		"parts": `"messages":[` + many(60_000, func(i int) string {
			return fmt.Sprintf(`{"role":"user","content":[{"type":"text","text":"part %d"}]}`, i)
		}) + `]`,
	} {
		raw := []byte(`{"model":"m",` + body + `}`)
		r, err := ParseRequest("/v1/chat/completions", raw)
		if err != nil || r.TooLarge != nil {
			t.Fatalf("%s: %v, %v", name, r.TooLarge, err)
		}
		taken := ReadCost(len(raw)) - r.RemainingCost
		t.Logf("%s: %.2f bytes for each byte of %d", name, float64(taken)/float64(len(raw)), len(raw))
		if taken > 5*len(raw) {
			t.Errorf("%s: the values of a body of %d bytes take %d bytes", name, len(raw), taken)
		}
	}
}

// TestTooLargeBodies: the routing fields of a body with too many values are still read.
func TestTooLargeBodies(t *testing.T) {
	const rest = `"nvext":{"agent_hints":{"priority":3},"token_data":[1,2]},"cache_salt":"s","stream":true}`
	r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":["`+strings.Repeat(`","`, 3000)+`"],`+rest))
	if err != nil || r.TooLarge == nil || r.Prompts != nil {
		t.Errorf("3,001 prompts: %+v, %v", r, err)
	}
	r, err = ParseRequest(
		"/v1/chat/completions",
		[]byte(
			`{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[`+strings.Repeat(
				`{},`,
				1<<20,
			)+`{}],`+rest,
		),
	)
	if err != nil || !errors.Is(r.TooLarge, ErrTooManyValues) || r.Model != "m" || r.CacheSalt != "s" || !r.Stream ||
		r.Hints.Priority == nil ||
		r.Messages != nil ||
		r.Tools != nil {
		t.Errorf("empty tools: %+v, %v", r, err)
	}
	t.Log(r.TooLarge)
	_, err = ParseRequest(
		"/v1/completions",
		[]byte(`{"model":"m","prompt":"x","nvext":{"agent_hints":[`+strings.Repeat(`{},`, 1<<20)+`{}]}}`),
	)
	if !errors.Is(err, ErrTooManyValues) {
		t.Errorf("nvext: %v", err)
	}
	_, err = ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":[`+strings.Repeat(`{},`, 1<<20)+`{}`))
	var bad *Error
	if !errors.As(err, &bad) || bad.Code != CodeInvalidJSON {
		t.Errorf("too many values and no end: %v", err)
	}
}
