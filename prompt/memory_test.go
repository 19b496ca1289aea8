package prompt

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"kvepp/internal/bodytest"
	"kvepp/kvblock"
	"kvepp/prompt/body"
	"kvepp/prompt/bpe"
)

// memorySlack is the tolerance of the measured memory, in bytes. It covers garbage, the test's own memory, and the
// cache of pieces of one encoding. That cache takes 4 MiB of heap and touches 2 MiB of them.
const memorySlack = 8 << 20

// boundedModels returns, by name, a model for each way to tokenize, without a segment cache.
func boundedModels(t testing.TB) map[string]*Model {
	models := map[string]*Model{}
	for _, name := range modelNames {
		for _, engine := range Engines {
			m, err := Load(filepath.Join(modelsDir, name), Options{Engine: engine})
			if err != nil {
				t.Fatal(err)
			}
			m.encoder.DisableCache()
			models[fmt.Sprint(name, " on ", engine)] = m
		}
	}
	return models
}

func read(m *Model, payload bodytest.Body) (prompts []Prompt, r *body.Request, parseErr, err error) {
	if r, parseErr = body.ParseRequest(payload.Path, payload.JSON); parseErr == nil && r.TooLarge == nil {
		prompts, err = m.Tokenize(context.Background(), r)
	}
	return prompts, r, parseErr, err
}

// holdMemory parses and tokenizes a body, and compares the memory taken with ReadCost.
func holdMemory(t *testing.T, name string, m *Model, payload bodytest.Body) {
	t.Helper()
	var r *body.Request
	var prompts []Prompt
	var parseErr, err error
	allocated := 0
	peak := bodytest.Peak(func() {
		allocated = bodytest.Allocated(func() { prompts, r, parseErr, err = read(m, payload) })
	})
	most := body.ReadCost(len(payload.JSON))
	if allocated > 12*most+memorySlack { // such as joining texts one by one, which also takes quadratic time
		t.Errorf(
			"%s, %s: %d bytes allocated %d bytes in all, %.1f for each",
			name,
			payload.Name,
			len(payload.JSON),
			allocated,
			float64(allocated)/float64(len(payload.JSON)),
		)
	}
	if peak > most+most/4+memorySlack {
		ids := 0
		for _, p := range prompts {
			ids += len(p.IDs)
		}
		t.Errorf(
			"%s, %s: %d bytes took %d bytes, %.1f for each; at most %d are allowed; %d ids, %v, %v",
			name,
			payload.Name,
			len(payload.JSON),
			peak,
			float64(peak)/float64(len(payload.JSON)),
			most,
			ids,
			parseErr,
			err,
		)
	}
	runtime.KeepAlive(r)
	runtime.KeepAlive(prompts)
}

// TestMemoryOfRequests: for every shape of body, reading and tokenizing stay within the memory of ReadCost.
func TestMemoryOfRequests(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	bodies := bodytest.All(1 << 20)
	models := boundedModels(t)
	for i, name := range slices.Sorted(maps.Keys(models)) {
		m := models[name]
		holdMemory(t, name, m, bodies[0]) // allocations of a first request
		for k, body := range bodies {
			text := m.options.Engine == VLLM &&
				(strings.HasPrefix(body.Name, "prompt: ") || strings.HasPrefix(body.Name, "content: "))
			if slowerBuild == 1 && text || (k+i)%(3*slowerBuild*len(models)) == 0 {
				holdMemory(t, name, m, body)
			}
		}
	}
}

// TestMemoryOfRandomRequests is TestMemoryOfRequests with random shapes.
func TestMemoryOfRandomRequests(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	const seed = 1
	chance := rand.New(rand.NewPCG(seed, 0))
	for name, m := range boundedModels(t) {
		for i := range 8 {
			body := bodytest.Random(chance, 1<<20)
			body.Name += fmt.Sprintf(" (seed %d, number %d)", seed, i)
			holdMemory(t, name, m, body)
		}
	}
}

// TestMemoryOfGeneralPatterns: the encoder does not collect all pieces of a general pattern before it encodes them.
func TestMemoryOfGeneralPatterns(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	raw, err := os.ReadFile(filepath.Join(modelsDir, "tiny-bytelevel", tokenizerFile))
	if err != nil {
		t.Fatal(err)
	}
	var file map[string]any
	if err := json.Unmarshal(raw, &file); err != nil {
		t.Fatal(err)
	}
	split := func(pattern string) map[string]any {
		return map[string]any{
			"type":     "Split",
			"pattern":  map[string]any{"Regex": pattern},
			"behavior": "Isolated",
			"invert":   false,
		}
	}
	file["pre_tokenizer"] = map[string]any{
		"type": "Sequence",
		"pretokenizers": []any{split(`(?<=b)a|[^ab]+`), split(`[a-m](?!z)`),
			map[string]any{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}},
	}
	changed, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	m, err := Load(copyModel(t, "tiny-bytelevel", map[string]string{tokenizerFile: string(changed)}), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !m.GeneralPattern() {
		t.Fatal("the pattern has a scanner of its own")
	}
	m.encoder.DisableCache()
	for name, repeated := range map[string]string{"words": "the quiet harbour ", "letters": "ba"} {
		var ids []kvblock.Token
		var text string
		var peak int
		// On a busy machine the searches in a long text reach their time limit: try shorter texts.
		for n := 1 << 19 / slowerBuild; n >= 1<<13; n /= 2 {
			text = strings.Repeat(repeated, n/len(repeated))
			peak = bodytest.Peak(func() { ids, err = m.Encode(text, false) })
			t.Logf("%s: %.1f bytes for each of %d, %v", name, float64(peak)/float64(len(text)), len(text), err)
			if err == nil || !strings.Contains(err.Error(), "takes too long") {
				break
			}
		}
		if err != nil || len(ids) < len(text)/8 || peak > 16*len(text)+memorySlack {
			t.Errorf("%s: %d ids, %v, %d bytes for %d", name, len(ids), err, peak, len(text))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		budget := bpe.NewBudget(ctx, 0)
		if _, err := m.encoder.Encode(&budget, text, false); !errors.Is(err, context.Canceled) {
			t.Errorf("%s, after the context ended: %v", name, err)
		}
	}
}

// TestAgentsBodiesAreTokenized: requests of agents are tokenized for every engine, at any length.
func TestAgentsBodiesAreTokenized(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	many := func(n int, of func(i int) string) string {
		all := make([]string, n)
		for i := range all {
			all[i] = of(i)
		}
		return strings.Join(all, ",")
	}
	property := func(i int) string {
		return fmt.Sprintf(`"field_%d":{"type":"string","description":"What field %d holds.","enum":["a","b"]}`, i, i)
	}
	tool := func(i int) string {
		return fmt.Sprintf(
			`{"type":"function","function":{"name":"tool_%d","description":"Does %d.","parameters":{"type":"object",`+
				`"properties":{%s},"required":["field_0"]}}}`,
			i,
			i,
			many(25, property),
		)
	}
	small := func(i int) string {
		return fmt.Sprintf(
			`{"type":"function","function":{"name":"tool_%d","description":"Does %d.","parameters":{"type":"object",`+
				`"properties":{%s}}}}`,
			i,
			i,
			many(3, property),
		)
	}
	turn := func(i int) string {
		return fmt.Sprintf(
			`{"role":"assistant","content":"","tool_calls":[{"id":"call_%d","type":"function",`+
				`"function":{"name":"read","arguments":"{\"path\":\"/a/%d\",\"lines\":[1,%d]}"}}]},{"role":"tool",`+
				`"tool_call_id":"call_%d","content":"%s"}`,
			i,
			i,
			i,
			i,
			strings.Repeat(`if err != nil {\n\treturn err\n}\n`, 10),
		)
	}
	user := `{"role":"user","content":"x"},`
	for name, payload := range map[string]string{
		"128 large tools, a chat of 1 MB": `"messages":[` + user + many(1500, turn) + `],"tools":[` + many(128, tool) +
			`]`,
		"1,000 tools": `"messages":[{"role":"user","content":"x"}],"tools":[` + many(1000, small) +
			`]`,
		"2,000 calls": `"messages":[` + user + many(2000, turn) + `]`,
		"6,000 short messages": `"messages":[` +
			many(3000, func(int) string {
				return `{"role":"user","content":"do it"},{"role":"assistant",` +
					`"content":"yes"}`
			}) + `]`,
		"10,000 parts": `"messages":[` + many(10_000, func(i int) string {
			return fmt.Sprintf(`{"role":"%s","content":[{"type":"text","text":"This is part %d of the text, of which `+
				`there are some more."}]}`, [2]string{"user", "assistant"}[i%2], i)
		}) + `]`,
		"1 MB of code": `"messages":[{"role":"user","content":"` + strings.Repeat(`\tif x == \"y\" {\n`, 60_000) +
			`"}]`,
	} {
		for _, engine := range Engines {
			m, err := Load(filepath.Join(modelsDir, "tiny-bytelevel"), Options{Engine: engine})
			if err != nil {
				t.Fatal(err)
			}
			raw := []byte(`{"model":"m",` + payload + `}`)
			r, err := body.ParseRequest(bodytest.Chat, raw)
			if err != nil || r.TooLarge != nil {
				t.Errorf("%s: %v, %v", name, err, r.TooLarge)
				continue
			}
			prompts, err := m.Tokenize(t.Context(), r)
			if err != nil || len(prompts) != 1 || len(prompts[0].IDs) < len(raw)/20 {
				t.Errorf("%s of %d bytes on %s: %d prompts, %v", name, len(raw), engine, len(prompts), err)
			}
		}
	}
	ids := `{"model":"m","prompt":[` + strings.TrimSuffix(strings.Repeat("128000,", 200_000), ",") + `]}`
	r, err := body.ParseRequest(bodytest.Completions, []byte(ids))
	if err != nil || r.TooLarge != nil || len(r.Prompts) != 1 || len(r.Prompts[0].Tokens) != 200_000 {
		t.Errorf("200,000 ids: %v", err)
	}
}
