package e2e

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/test/harness/stack"
	"kvepp/zmqsub"
)

// parityBlock is the block size of the mockers whose events show token ids. It is small, so that full blocks cover
// nearly the whole prompt.
const parityBlock = 4

// storedBlocks collects the blocks that a mocker announced, by predecessor and tokens.
type storedBlocks struct {
	mu        sync.Mutex
	next      map[string]kvblock.EngineHash
	connected chan struct{}
	once      sync.Once
	problem   error
}

func blockKey(parent kvblock.EngineHash, hasParent bool, tokens []kvblock.Token) string {
	return fmt.Sprint(hasParent, parent, tokens)
}

func (s *storedBlocks) Message(_ uint64, _, payload []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var batch kvblock.Batch
	if err := kvblock.DecodeBatch(payload, &batch); err != nil {
		s.problem = err
		return
	}
	for _, e := range batch.Events {
		if e.Kind != kvblock.BlockStored {
			continue
		}
		parent, hasParent := e.Parent, e.HasParent
		for i, hash := range e.Hashes {
			s.next[blockKey(parent, hasParent, e.Tokens[i*parityBlock:(i+1)*parityBlock])] = hash
			parent, hasParent = hash, true
		}
	}
}

func (s *storedBlocks) Gap(expected, got uint64) {
	s.Malformed(fmt.Errorf("messages %d to %d are lost", expected, got-1))
}
func (s *storedBlocks) Restart()                    {}
func (s *storedBlocks) Cut(error)                   {}
func (s *storedBlocks) Replayed(zmqsub.Replay, int) {}
func (s *storedBlocks) Connected()                  { s.once.Do(func() { close(s.connected) }) }
func (s *storedBlocks) Disconnected()               {}
func (s *storedBlocks) Malformed(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problem = err
}

// holds returns an error that names the first of a prompt's full blocks that was not stored.
func (s *storedBlocks) holds(ids []kvblock.Token) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.problem != nil {
		return s.problem
	}
	var parent kvblock.EngineHash
	for i := 0; i+parityBlock <= len(ids); i += parityBlock {
		hash, ok := s.next[blockKey(parent, i > 0, ids[i:i+parityBlock])]
		if !ok {
			return fmt.Errorf("block %d, %v, was not stored", i/parityBlock, ids[i:i+parityBlock])
		}
		parent = hash
	}
	return nil
}

// parityModel is a model that a mocker serves, as kvepp reads it.
type parityModel struct {
	folder string
	model  *prompt.Model
	blocks *storedBlocks
}

// withTemplate returns a copy of a model's folder with another chat template.
func withTemplate(t *testing.T, template string) string {
	t.Helper()
	dir := t.TempDir()
	from := "../test/models/tiny-bytelevel"
	files, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		path := filepath.Join(from, f.Name())
		if f.Name() == "chat_template.jinja" {
			path = filepath.Join("testdata/dynamo", template)
		}
		raw, err := os.ReadFile(path)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, f.Name()), raw, 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// realModel returns a folder with a real model's tokenizer and chat template, and a configuration that mockers accept.
func realModel(t *testing.T, from string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), filepath.Base(from))
	err := os.Mkdir(dir, 0o755)
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json"} {
		err = errors.Join(err, os.Symlink(filepath.Join(from, name), filepath.Join(dir, name)))
	}
	for _, name := range []string{"config.json", "generation_config.json"} {
		raw, errRead := os.ReadFile(filepath.Join("../test/models/tiny-bytelevel", name))
		raw = bytes.ReplaceAll(raw, []byte(`"qwen3"`), []byte(`"llama"`))
		err = errors.Join(err, errRead, os.WriteFile(filepath.Join(dir, name), raw, 0o644))
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

const (
	weather = `{"type":"function","function":{"name":"get_weather","description":"The weather \"now\" <b>",` +
		`"parameters":{"type":"object","properties":{"items":{"type":"array","items":{"type":"string"},` +
		`"default":["x"]},"city":{"type":"string","default":null},"days":{"type":"integer","default":1.5,` +
		`"minimum":1e-7}},"required":["city"]},"strict":false,"extra":1}}`
	bare = `{"type":"function","function":{"name":"now"}},{"type":"function","function":{"name":"then",` +
		`"parameters":{}}},{"type":"function","function":{"parameters":{"properties":{"a":{"enum":[1,true,null]}}},` +
		`"name":"x","description":null}}`
	called = `{"role":"assistant","content":null,"tool_calls":[{"id":"c1","function":{"arguments":"{\"city\": ` +
		`\"Zürich\", \"n\": [1, 2.0, null, true]}","name":"get_weather"},"type":"function","index":0},{"id":"c2",` +
		`"type":"function","function":{"name":"now","arguments":{"b":1.0,"a":{"x":"é","y":[]}}}},{"id":"c3",` +
		`"type":"function","function":{"name":"now","arguments":" {\"s\":\"\\u00e9\", \"s\": 1e3}"}}]},` +
		`{"role":"tool","tool_call_id":"c1","content":"{\"t\": 21.5}","name":"get_weather"},{"role":"tool",` +
		`"tool_call_id":"c2","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}`
)

// parityRequests are an API and a body's fields. NONCE makes a prompt unique.
var parityRequests = []struct{ api, fields string }{
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE Hello"}]`},
	{
		"chat/completions",
		`"messages":[{"role":"system","content":"NONCE Be brief.","name":"n","other":1},{"role":"user",` +
			`"content":"Grüße 漢字 😀 e\u0301 \u200b \u0001 \u0000 \"q\" 'a' \\ \t\r\n end","name":"bob"}]`,
	},
	{"chat/completions", `"messages":[{"role":"developer","content":"NONCE Be brief."},{"role":"user","content":"x"}]`},
	{
		"chat/completions",
		`"messages":[{"content":[{"text":"NONCE a","type":"text","x":1},{"type":"text","text":"b\n"}],"role":"user"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":[{"type":"text","text":"yes"}]},` +
			`{"role":"user","content":[]}]`,
	},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE weather?"}],"tools":[` + weather + `]`},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE weather?"}],"tools":[` + weather + `,` + bare +
			`],"tool_choice":"auto"`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE weather?"}],"tools":[` + weather + `],"tool_choice":"none"`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE weather?"},` + called + `],"tools":[` + weather + `]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE weather?"},` + called +
			`,{"role":"assistant","content":"21.5"},{"role":"user","content":"and then?"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":"","function_call":{"name":"f",` +
			`"arguments":"{\"a\": 1}"}},{"role":"user","content":"x"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":"4","reasoning_content":" 2+2 ",` +
			`"refusal":"no"},{"role":"user","content":"x"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":null,"reasoning":["a","","b"],` +
			`"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{}"}}]},{"role":"tool",` +
			`"tool_call_id":"1","content":"r"},{"role":"user","content":"x"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"system","content":"NONCE s0"},{"role":"system","content":"s1"},{"role":"user",` +
			`"content":"u0"},{"role":"user","content":"u1"},{"role":"system","content":"late"},{"role":"assistant",` +
			`"content":"a"},{"role":"user","content":[{"type":"text","text":"p"}]},{"role":"user","content":"q"}]`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"}],"chat_template_args":{"list":["a",null,true,1.5],` +
			`"object":{"k":"v","n":{"x":[]}},"number":1e-7,"truth":true,"nothing":null,"bos_token":"B","messages":[],` +
			`"add_generation_prompt":false}`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"}],"chat_template_kwargs":{"enable_thinking":false,` +
			`"number":12345678901234,"list":[[],{}],"object":"s"}`,
	},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE"}],"reasoning_effort":"high"`},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE"}],"reasoning_effort":"none"`},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE"}],"thinking":{"type":"disabled"}`},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"}],"thinking":true,` +
			`"chat_template_kwargs":{"thinking_mode":"chat"}`,
	},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE"}],"add_generation_prompt":false`},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":"The answer is  "}],` +
			`"add_generation_prompt":false,"continue_final_message":true`,
	},
	{
		"chat/completions",
		`"messages":[{"role":"user","content":[{"type":"text","text":"NONCE and"},{"type":"text","text":"more"}]}],` +
			`"add_generation_prompt":false,"continue_final_message":true`,
	},
	{"chat/completions", `"messages":[{"role":"user","content":"NONCE"}],"nvext":{"token_data":[5,6,7,8,9,10,11,12]}`},

	{"completions", `"prompt":"NONCE Once upon a time, 漢字 😀 \u0000 there was"`},
	{"completions", `"prompt":["NONCE one prompt in a list"]`},
	{"completions", `"prompt":[700,701,702,703,704,705,706,707,708]`},

	{"responses", `"input":"NONCE Hello"`},
	{
		"responses",
		`"instructions":"NONCE Be brief.","input":[{"role":"developer","content":"And kind."},{"role":"user",` +
			`"content":"Hi"},{"type":"message","role":"user","content":[{"type":"input_text","text":"one"},` +
			`{"type":"input_text","text":"two"}]}]`,
	},
	{
		"responses",
		`"input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"NONCE weather?"}]},` +
			`{"type":"reasoning","id":"r1","summary":[{"type":"summary_text","text":"I think"}]},` +
			`{"type":"function_call","call_id":"c1","name":"get_weather","arguments":"{\"city\": \"Z\"}"},` +
			`{"type":"function_call_output","call_id":"c1","output":"sunny"},{"type":"message","id":"m1",` +
			`"status":"completed","role":"assistant","content":[{"type":"output_text","text":"It is ",` +
			`"annotations":[]},{"type":"refusal","refusal":"sunny."}]},{"role":"user","content":"and then?"}],` +
			`"tools":[{"type":"function","name":"get_weather","description":"w","parameters":{"type":"object",` +
			`"properties":{"city":{"type":"string"}}},"strict":false}]`,
	},
	{
		"responses",
		`"input":[{"role":"user","content":"NONCE"},{"role":"assistant","content":"a"},{"type":"function_call",` +
			`"call_id":"c1","name":"f","arguments":"{}"},{"type":"function_call","call_id":"c2","name":"g",` +
			`"arguments":"{\"x\":1}"},{"type":"function_call_output","call_id":"c1","output":[{"type":"input_text",` +
			`"text":"p"},{"type":"input_text","text":"q"}]},{"type":"function_call_output","call_id":"c2",` +
			`"output":""}],"reasoning":{"effort":"low"}`,
	},
	{
		"responses",
		`"input":[{"role":"system","content":"NONCE s"},{"role":"user","content":"x"}],"tool_choice":"none",` +
			`"tools":[{"type":"function","name":"f","parameters":{}}],"chat_template_kwargs":{"list":[1]}`,
	},

	{"messages", `"system":"NONCE Be brief.","messages":[{"role":"user","content":"Hello"}]`},
	{
		"messages",
		`"system":[{"type":"text","text":"NONCE Be brief."},{"type":"text","text":"And kind.",` +
			`"cache_control":{"type":"ephemeral"}}],"messages":[{"role":"user","content":[{"type":"text",` +
			`"text":"one"},{"type":"text","text":"two"}]}],"thinking":{"type":"enabled","budget_tokens":2000}`,
	},
	{
		"messages",
		`"messages":[{"role":"user","content":"NONCE weather?"},{"role":"assistant","content":[{"type":"thinking",` +
			`"thinking":"I think","signature":"s"},{"type":"text","text":"Let me see."},{"type":"tool_use","id":"t1",` +
			`"name":"get_weather","input":{"city":"Zürich","n":[1,2.5,null]}},{"type":"thinking","thinking":"more",` +
			`"signature":"s"},{"type":"tool_use","id":"t2","name":"now","input":{}}]},{"role":"user",` +
			`"content":[{"type":"tool_result","tool_use_id":"t1","content":"sunny"},{"type":"tool_result",` +
			`"tool_use_id":"t2","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},{"type":"text",` +
			`"text":"and then?"}]}],"tools":[{"name":"get_weather","description":"w","input_schema":{"type":"object",` +
			`"properties":{"city":{"type":"string"}}}},{"name":"now","input_schema":{}}]`,
	},
	{
		"messages",
		`"messages":[{"role":"user","content":"NONCE"},{"role":"assistant","content":[{"type":"thinking",` +
			`"thinking":"t","signature":"s"},{"type":"text","text":"a"}]},{"role":"user","content":"x"}],` +
			`"tools":[{"name":"f","input_schema":{"type":"object"}}],"tool_choice":{"type":"none"}`,
	},
}

// startParity starts a real frontend and a mocker for each folder. runtimeConfigs are added to runtime_config in the
// mockers' cards.
func startParity(t *testing.T, folders, runtimeConfigs []string) (*stack.Frontend, []*parityModel) {
	t.Helper()
	cfg := stack.Config{Root: "..", Tools: os.Getenv("KVEPP_TOOLS"), RuntimeConfigs: runtimeConfigs}
	frontend, err := stack.StartFrontend(t.Context(), cfg, folders, parityBlock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(frontend.Close)
	hub, err := zmqsub.NewHub()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { hub.Close() })
	models := make([]*parityModel, len(folders))
	for i, folder := range folders {
		m := &parityModel{
			folder: folder,
			blocks: &storedBlocks{next: map[string]kvblock.EngineHash{}, connected: make(chan struct{})},
		}
		if m.model, err = prompt.Load(folder, prompt.Options{Engine: prompt.Dynamo}); err != nil {
			t.Fatal(err)
		}
		if i < len(runtimeConfigs) {
			settings, err := prompt.ParseDynamoSettings([]byte(runtimeConfigs[i]))
			if err != nil {
				t.Fatal(err)
			}
			m.model.SetDynamo([]prompt.DynamoSettings{settings})
		}
		if _, err := hub.Subscribe(zmqsub.Config{Endpoint: frontend.Events[i], ReplayEndpoint: frontend.Replay[i]},
			m.blocks); err != nil {
			t.Fatal(err)
		}
		models[i] = m
	}
	deadline := time.After(time.Minute)
	for _, m := range models {
		select {
		case <-m.blocks.connected:
		case <-deadline:
			t.Fatalf("no connection to the events of %s", m.folder)
		}
	}
	return frontend, models
}

// outcome is the result of a comparison.
type outcome string

const (
	equal   outcome = "equal"
	refused outcome = "refused by the frontend"
	unknown outcome = "not known here"
	differs outcome = "differs"
)

// compare sends a request through the frontend and compares the frontend's token ids with kvepp's: all of them, or with
// media those that are certain.
func compare(t *testing.T, frontend *stack.Frontend, m *parityModel, api, payload string) outcome {
	t.Helper()
	limit := "max_tokens"
	if api == "responses" {
		limit = "max_output_tokens"
	}
	status, promptTokens, response := askFrontend(t, frontend.URL+"/v1/"+api,
		fmt.Sprintf(`{%q:1,%s`, limit, payload[1:]))
	if status != http.StatusOK { // such a request reaches no worker
		t.Logf("%s refuses with %d: %.200s\n\t%s", filepath.Base(m.folder), status, response, payload)
		return refused
	}
	request, err := body.ParseRequest("/v1/"+api, []byte(payload))
	if err != nil {
		t.Errorf("%s: %v", payload, err)
		return differs
	}
	prompts, err := m.model.Tokenize(t.Context(), request)
	switch {
	case err != nil && prompt.IsUnknown(err):
		return unknown
	case err != nil || len(prompts) != 1:
		t.Errorf("%s of %s: %v", payload, m.folder, err)
		return differs
	}
	p := prompts[0]
	if promptTokens != len(p.IDs) || request.HasMedia == (p.Certain == len(p.IDs)) {
		t.Errorf(
			"%s of %s\n%d tokens, %d certain; the frontend counts %d",
			payload,
			m.folder,
			len(p.IDs),
			p.Certain,
			promptTokens,
		)
		return differs
	}
	if err := settled(func() error { return m.blocks.holds(p.IDs[:p.Certain]) }); err != nil {
		t.Errorf("%s of %s\n%v", payload, m.folder, err)
		return differs
	}
	return equal
}

// TestDynamoParity sends requests of all four APIs through a real frontend, and reads the frontend's token ids from the
// mockers' KV events. kvepp's must be the same. KVEPP_MODELS names folders of further real models.
func TestDynamoParity(t *testing.T) {
	folders := []string{"../test/models/tiny-bytelevel", "../test/models/tiny-sentencepiece",
		withTemplate(t, "printing.jinja"), withTemplate(t, "parts.jinja"), withTemplate(t, "strict.jinja")}
	for _, folder := range strings.Fields(os.Getenv("KVEPP_MODELS")) {
		folders = append(folders, realModel(t, folder))
	}
	frontend, models := startParity(t, folders, nil)
	compared, outcomes := map[string]int{}, map[outcome]int{}
	for n, c := range parityRequests {
		for i, m := range models {
			fields := strings.ReplaceAll(c.fields, "NONCE", fmt.Sprintf("%d-%d-%d", n, i, os.Getpid()))
			got := compare(t, frontend, m, c.api, fmt.Sprintf(`{"model":%q,%s}`, stack.ServedName(i), fields))
			outcomes[got]++
			switch got {
			case equal:
				compared[c.api]++
			case unknown:
				t.Errorf("kvepp has no token ids for %s of %s", fields, m.folder)
			}
		}
	}
	t.Logf("equal ids: %v; the frontend refused %d requests", compared, outcomes[refused])
	if outcomes[refused] > len(parityRequests) {
		t.Errorf("the frontend refused %d requests", outcomes[refused])
	}
	for _, api := range []string{"chat/completions", "completions", "responses", "messages"} {
		if compared[api] < 15 {
			t.Errorf("only %d requests to %s were compared", compared[api], api)
		}
	}
}

// pixel is a PNG image of one pixel.
const pixel = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

// mediaRequests contain images and videos.
var mediaRequests = []string{
	`"messages":[{"role":"system","content":"NONCE You see."},{"role":"user","content":[{"type":"text","text":"Look ` +
		`at this one"},IMAGE,{"type":"text","text":"and tell"}]}]`,
	`"messages":[{"role":"user","content":"NONCE What is there?"},{"role":"assistant","content":"Where?"},` +
		`{"role":"user","content":[IMAGE,IMAGE]}]`,
	`"messages":[{"role":"user","content":"NONCE a <image> in words, and"},{"role":"user",` +
		`"content":[{"type":"video_url","video_url":{"url":"http://127.0.0.1:9/v.mp4"}},{"type":"text",` +
		`"text":"this"}]}]`,
	`"messages":[{"role":"user","content":[{"type":"text","text":"NONCE <|image_pad|> and more"},IMAGE]}]`,
}

// TestDynamoSettings does the same with settings in workers' cards, and with media.
func TestDynamoSettings(t *testing.T) {
	marks := []string{"<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"}
	folders, runtimeConfigs := []string{withMarks(t, "media.jinja", marks)}, []string{""}
	for _, settings := range []string{
		`{"reasoning_parser":"qwen3","tool_call_parser":"hermes"}`,
		`{"reasoning_parser":"kimi_k25"}`,
		`{"reasoning_parser":"qwen3","runtime_data":{"default_thinking_mode":"disabled"}}`,
		`{"runtime_data":{"default_thinking_mode":"enabled"},"exclude_tools_when_tool_choice_none":false}`,
		`{"reasoning_parser":"kimi_k25","tool_call_parser":"glm47",` +
			`"runtime_data":{"default_thinking_mode":"disabled"}}`,
	} {
		folders, runtimeConfigs = append(folders, withTemplate(t, "printing.jinja")), append(runtimeConfigs, settings)
	}
	frontend, models := startParity(t, folders, runtimeConfigs)
	outcomes := map[outcome]int{}
	send := func(n, i int, api, fields string) {
		fields = strings.ReplaceAll(fields, "NONCE", fmt.Sprintf("%d-%d-%d", n, i, os.Getpid()))
		fields = strings.ReplaceAll(
			fields,
			"IMAGE",
			`{"type":"image_url","image_url":{"url":"data:image/png;base64,`+pixel+`"}}`,
		)
		outcomes[compare(t, frontend, models[i], api, fmt.Sprintf(`{"model":%q,%s}`, stack.ServedName(i), fields))]++
	}
	for n, fields := range mediaRequests {
		send(1000+n, 0, "chat/completions", fields)
	}
	media := outcomes[equal]
	for n, c := range parityRequests {
		for i := range models[1:] {
			send(n, i+1, c.api, c.fields)
		}
	}
	t.Logf("%v", outcomes)
	if media != len(mediaRequests) || outcomes[equal] < 150 || outcomes[unknown] > 10 {
		t.Errorf("%d of %d requests with media are equal; in all: %v", media, len(mediaRequests), outcomes)
	}
}

// withMarks is withTemplate for an architecture with images, with the tokens that mark them.
func withMarks(t *testing.T, template string, marks []string) string {
	t.Helper()
	dir := withTemplate(t, template)
	path := filepath.Join(dir, "tokenizer.json")
	raw, err := os.ReadFile(path)
	var file map[string]json.RawMessage
	var added []json.RawMessage
	if err = errors.Join(err, json.Unmarshal(raw, &file), json.Unmarshal(file["added_tokens"], &added)); err != nil {
		t.Fatal(err)
	}
	for i, mark := range marks {
		added = append(
			added,
			fmt.Appendf(
				nil,
				`{"id":%d,"content":%q,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false,`+
					`"special":true}`,
				3079+i,
				mark,
			),
		)
	}
	file["added_tokens"], err = json.Marshal(added)
	raw, errFile := json.Marshal(file)
	config, errConfig := os.ReadFile(filepath.Join(dir, "config.json"))
	var fields map[string]any
	err = errors.Join(err, errFile, errConfig, json.Unmarshal(config, &fields), os.WriteFile(path, raw, 0o644))
	fields["architectures"] = []string{"Qwen2VLForConditionalGeneration"}
	fields["vocab_size"] = 3200
	config, errConfig = json.Marshal(fields)
	if err = errors.Join(err, errConfig, os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// settled calls f until it returns nil, for at most a second: events may take that long.
func settled(f func() error) error {
	deadline := time.Now().Add(2 * time.Second)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		<-time.After(5 * time.Millisecond)
	}
}

// askFrontend posts a body and returns the number of prompt tokens in the response.
func askFrontend(t *testing.T, url, body string) (status, promptTokens int, response string) {
	t.Helper()
	client := http.Client{Timeout: time.Minute}
	resp, err := client.Post(url, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var read struct {
		Usage struct {
			PromptTokens int `json:"prompt_tokens"`
			InputTokens  int `json:"input_tokens"`
			CacheRead    int `json:"cache_read_input_tokens"`
		}
		Message string
	}
	var text strings.Builder
	err = json.NewDecoder(io.TeeReader(resp.Body, &text)).Decode(&read)
	if err != nil && resp.StatusCode == http.StatusOK {
		t.Fatalf("%s: %v", body, err)
	}
	return resp.StatusCode, max(read.Usage.PromptTokens, read.Usage.InputTokens+read.Usage.CacheRead), text.String()
}
