package body

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

func TestParseRequestPaths(t *testing.T) {
	const chat = `{"model":"m","messages":[{"role":"user","content":"x"}]}`
	const completion = `{"model":"m","prompt":"x"}`
	for path, want := range map[string]API{
		"/v1/chat/completions":         ChatCompletions,
		"/v1/chat/completions?a=b/v1/": ChatCompletions,
		"/openai/v1/chat/completions":  ChatCompletions,
		"/v1/completions":              Completions,
		"/tenant/7/v1/completions?x=1": Completions,
		"/v1/chat/completions/render":  0,
		"/v1/embeddings":               0,
		"/v1/responses":                Responses,
		"/v1/messages":                 Messages,
		"/v1/messages/count_tokens":    0,
		"/x?/v1/completions":           0,
		"/":                            0,
		"/generate/x":                  0,
		"/generate":                    0, // the body is a chat: another server's
	} {
		body := chat
		if want == Completions {
			body = completion
		}
		if want == Responses {
			body = `{"model":"m","input":"x"}`
		}
		r, err := ParseRequest(path, []byte(body))
		switch {
		case want == 0 && !errors.Is(err, ErrUnknownAPI):
			t.Errorf("%q: got %v, %v; want ErrUnknownAPI", path, r, err)
		case want != 0 && (err != nil || r.API != want):
			t.Errorf("%q: got %v, %v; want %v", path, r, err, want)
		}
	}
	if _, err := ParseRequest("/v1/embeddings", []byte("not JSON")); !errors.Is(err, ErrUnknownAPI) {
		t.Errorf("the body of an unknown API was read: %v", err)
	}
}

func TestParseRequestErrors(t *testing.T) {
	for _, c := range []struct {
		path, body, code, param, message string
	}{
		{"chat/completions", `{"model":`, CodeInvalidJSON, "", "byte 9: unexpected end"},
		{"chat/completions", ``, CodeInvalidJSON, "", "is empty: it must be a JSON object"},
		{"chat/completions", `[]`, CodeInvalidType, "", "must be a JSON object"},
		{"chat/completions", `{}`, CodeMissingField, "model", "'model' is required"},
		{"chat/completions", `{"model":null}`, CodeMissingField, "model", "'model' is required"},
		{"chat/completions", `{"model":7}`, CodeInvalidType, "model", "'model' must be a string"},
		{"chat/completions", `{"model":""}`, CodeInvalidValue, "model", "must not be empty"},
		{"chat/completions", `{"model":"m"}`, CodeMissingField, "messages", "'messages' is required"},
		{"chat/completions", `{"model":"m","messages":"hi"}`, CodeInvalidType, "messages", "list of messages"},
		{"chat/completions", `{"model":"m","messages":[]}`, CodeInvalidValue, "messages", "at least one message"},
		{"chat/completions", `{"model":"m","messages":[{},"x"]}`, CodeInvalidType, "messages[1]", "an object"},
		{"completions", `{"model":"m"}`, CodeMissingField, "prompt", "'prompt' is required"},
		{"completions", `{"model":"m","prompt":{}}`, CodeInvalidType, "prompt", "a string, a list of strings"},
		{"completions", `{"model":"m","prompt":7}`, CodeInvalidType, "prompt", "a string, a list of strings"},
		{"completions", `{"model":"m","prompt":[]}`, CodeInvalidValue, "prompt", "empty list"},
		{"completions", `{"model":"m","prompt":[null]}`, CodeInvalidType, "prompt", "a string, a list of strings"},
		{"completions", `{"model":"m","prompt":["a",1]}`, CodeInvalidType, "prompt", "a string, a list of strings"},
		{"completions", `{"model":"m","prompt":[1,"a"]}`, CodeInvalidType, "prompt[1]", "a token id"},
		{"completions", `{"model":"m","prompt":[1,-1]}`, CodeInvalidType, "prompt[1]", "a token id"},
		{"completions", `{"model":"m","prompt":[4294967296]}`, CodeInvalidType, "prompt[0]", "0 to 4294967295"},
		{"completions", `{"model":"m","prompt":[1.5]}`, CodeInvalidType, "prompt[0]", "a token id"},
		{"completions", `{"model":"m","prompt":[99999999999999999999]}`, CodeInvalidType, "prompt[0]", "a token id"},
		{"completions", `{"model":"m","prompt":[[1],[2,true]]}`, CodeInvalidType, "prompt[1][1]", "a token id"},
		{"completions", `{"model":"m","prompt":[[1],2]}`, CodeInvalidType, "prompt", "list of lists"},
	} {
		r, err := ParseRequest("/v1/"+c.path, []byte(c.body))
		var e *Error
		if !errors.As(err, &e) || e.Code != c.code || e.Param != c.param || !strings.Contains(e.Message, c.message) ||
			r != nil {
			t.Errorf("%s: got %v, %#v; want %s of %q: ...%s...", c.body, r, err, c.code, c.param, c.message)
		}
	}
}

func TestParsePrompts(t *testing.T) {
	for prompt, want := range map[string]string{
		`"one"`:            `[{one [] false}]`,
		`""`:               `[{ [] false}]`,
		`["one","two"]`:    `[{one [] false} {two [] false}]`,
		`[1,2,4294967295]`: `[{ [1 2 4294967295] true}]`,
		`[[1],[],[2,3]]`:   `[{ [1] true} { [] true} { [2 3] true}]`,
	} {
		r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":`+prompt+`}`))
		if err != nil || fmt.Sprint(r.Prompts) != want || r.HasMedia || r.Messages != nil {
			t.Errorf("%s: got %+v, %v; want %s", prompt, r, err, want)
		}
	}
	r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt_embeds":"AAAA"}`))
	if err != nil || !r.HasMedia || r.Prompts != nil {
		t.Errorf("prompt_embeds: got %+v, %v", r, err)
	}
}

func TestParseChatFields(t *testing.T) {
	r, err := ParseRequest("/v1/chat/completions", []byte(`{
		"model": "org/model", "stream": true, "max_tokens": 5, "max_completion_tokens": 16, "cache_salt": "top",
		"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}], "documents": [{"text": "d"}],
		"add_generation_prompt": false, "continue_final_message": true, "add_special_tokens": true,
		"chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low", "chat_template": "x",
		"nvext": {"cache_salt": "inner", "token_data": [1, 2]}, "other": 1}`))
	if err != nil {
		t.Fatal(err)
	}
	thinking, _ := r.ChatTemplateKwargs.Get("enable_thinking")
	other, _ := r.Body.Get("other") // no code reads it, so it is skipped
	if r.Model != "org/model" || !r.Stream || r.MaxTokens != 16 || r.CacheSalt != "inner" || r.Messages.Len() != 1 ||
		r.Tools.Len() != 1 || r.Documents.Len() != 1 || *r.AddGenerationPrompt || !r.ContinueFinalMessage ||
		!*r.AddSpecialTokens || thinking != false || r.ReasoningEffort != "low" || r.ChatTemplate != "x" ||
		fmt.Sprint(r.TokenData) != "[1 2]" || other != nil || r.HasMedia || r.Prompts != nil {
		t.Errorf("got %+v", r)
	}

}

// Optional fields of a wrong type count as absent, or are read as pydantic reads them.
func TestParseLenientChatFields(t *testing.T) {
	r, err := ParseRequest(
		"/v1/chat/completions",
		[]byte(`{"model": "m", "messages": [{"role": "user", "content": null}],
		"stream": null, "max_tokens": "7", "tools": null, "documents": "x", "nvext": {"token_data": [1, "x"]}, `+
			`"cache_salt": "top",
		"chat_template_args": {"a": 1}, "add_generation_prompt": "false", "continue_final_message": 0, `+
			`"max_completion_tokens": 0}`),
	)
	if err != nil {
		t.Fatal(err)
	}
	if r.Stream || r.MaxTokens != 7 || r.Tools != nil || r.Documents != nil || r.TokenData != nil ||
		r.CacheSalt != "top" || r.ChatTemplateKwargs.Len() != 1 || r.AddGenerationPrompt == nil ||
		*r.AddGenerationPrompt || r.ContinueFinalMessage || r.AddSpecialTokens != nil {
		t.Errorf("got %+v", r)
	}
}

func TestHasMedia(t *testing.T) {
	for content, want := range map[string]bool{
		`"text"`:                       false,
		`null`:                         false,
		`[]`:                           false,
		`["bare"]`:                     false,
		`[{"type":"text","text":"a"}]`: false,
		`[{"text":"a"}]`:               false,
		`[{"type":"text","text":"a"},{"type":"refusal"}]`:   false,
		`[{"type":"text"},{"type":"image_url"}]`:            true,
		`[{"type":"input_audio"}]`:                          true,
		`[{"type":"video_url"}]`:                            true,
		`[{"image_url":{"url":"x"}}]`:                       true,
		`[{"type":"file"}]`:                                 true,
		`[{"type":7}]`:                                      true,
		`[{"type":"text","text":"a","image_url":"unread"}]`: false,
	} {
		body := `{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":` + content + `}]}`
		r, err := ParseRequest("/v1/chat/completions", []byte(body))
		if err != nil || r.HasMedia != want {
			t.Errorf("%s: got %+v, %v; want media %v", content, r, err, want)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	for _, seed := range []string{
		`{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"tools":[],` +
			`"nvext":{"token_data":[1]}}`,
		`{"model":"m","prompt":[[1,2],[3]]}`, `{"model":"m","prompt":["a"]}`, `{"model":"m","prompt":"\u00e9"}`, `{`,
		`[]`,
		`{"model":"m","prompt":[1e3]}`, `{"model":"m","messages":[1]}`, `{"model":"m","max_tokens":1e300,"prompt":""}`,
		`{"model":"m","input":[{"type":"message","role":"assistant","content":[{"type":"refusal"}]},` +
			`{"type":"reasoning","content":[1]},{"type":"function_call"},{"type":"function_call_output",` +
			`"output":[null]}],"tools":[null]}`,
		`{"model":"m","system":[{"text":"a"}],"messages":[{"role":"user","content":[{"type":"tool_result",` +
			`"content":[null]},null]},{"role":"assistant","content":[{"type":"tool_use","input":1},7]}],"tools":[1]}`,
		`{"text":["a"],"input_ids":null,"sampling_params":{"n":2,"max_new_tokens":1}}`,
		`{"token_ids":[1],"features":null}`,
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"", "/generate", "/inference/v1/generate"} {
			r, err := ParseRequest(path, []byte(body))
			if invalid := (*Error)(nil); err != nil && !errors.Is(err, ErrUnknownAPI) &&
				(path != "/inference/v1/generate" || !errors.As(err, &invalid)) {
				t.Fatalf("%s %q: %#v", path, body, err)
			} else if err == nil && r.API == Completions && len(r.Prompts) == 0 && !r.HasMedia {
				t.Fatalf("%s %q: no prompt: %+v", path, body, r)
			}
		}
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"} {
			r, err := ParseRequest(path, []byte(body))
			python, pythonErr := (Parser{Python: true}).Parse(path, []byte(body))
			if err == nil && (pythonErr != nil || python.TooLarge == nil != (r.TooLarge == nil)) {
				t.Fatalf("%q: Python's JSON: %+v, %v", body, python, pythonErr)
			}
			if errors.Is(err, ErrPythonJSON) {
				t.Fatalf("%q: %v", body, err)
			}
			var e *Error
			switch {
			case err != nil && (!errors.As(err, &e) || e.Message == "" || e.Code == ""):
				t.Fatalf("error without a code or message: %#v", err)
			case err != nil:
			case r.Model == "" || r.Body == nil || r.MaxTokens < 0:
				t.Fatalf("%q: %+v", body, r)
			case r.API == ChatCompletions && r.Messages.Len() == 0,
				r.API == Completions && len(r.Prompts) == 0 && !r.HasMedia:
				t.Fatalf("%q: no prompt: %+v", body, r)
			case (r.API == Responses || r.API == Messages) && r.Messages == nil:
				t.Fatalf("%q: no messages: %+v", body, r)
			}
		}
	})
}

func BenchmarkParseRequest(b *testing.B) {
	body := []byte(`{"model":"m","stream":true,"messages":[` +
		strings.Repeat(`{"role":"user","content":"`+strings.Repeat("The harbour was quiet. ", 80)+`\n"},`, 19) +
		`{"role":"assistant","content":"end"}],"max_tokens":100}`)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := ParseRequest("/v1/chat/completions", body); err != nil {
			b.Fatal(err)
		}
	}
}

// TestWithoutPath: without a path the body's keys tell the API, and what is no request of one is not refused.
func TestWithoutPath(t *testing.T) {
	for text, want := range map[string]API{
		`{"model":"m","messages":[{"role":"user","content":"hi"}]}`:                     ChatCompletions,
		`{"model":"m","system":"be brief","messages":[{"role":"user","content":"hi"}]}`: Messages,
		`{"model":"m","prompt":"hi"}`:                                                   Completions,
		`{"model":"m","prompt":[1,2,3]}`:                                                Completions,
		`{"model":"m","input":"hi"}`:                                                    Responses,
		`{"model":"m","query":"hi","documents":["a"]}`:                                  0,
		`{"model":"m","messages":null}`:                                                 0,
		`{"model":"m","messages":"hi"}`:                                                 0,
		`{"messages":[{"role":"user","content":"hi"}]}`:                                 0,
		`[]`: 0, `{`: 0, "": 0, "--boundary\r\n": 0,
	} {
		r, err := ParseRequest("", []byte(text))
		switch {
		case want == 0 && !errors.Is(err, ErrUnknownAPI):
			t.Errorf("%s: %v, %v", text, r, err)
		case want != 0 && (err != nil || r.API != want):
			t.Errorf("%s: %v, %v; want %v", text, r, err, want)
		}
	}
}

// TestGenerate: the token ids and texts of the engines' own /generate are prompts.
func TestGenerate(t *testing.T) {
	const vllm, sglang = "/inference/v1/generate", "/x/generate?y=1"
	for _, c := range []struct{ path, body, want string }{
		{vllm, `{"token_ids":[1,2,3],"sampling_params":{"max_tokens":7,"n":2},"model":"m","cache_salt":"s",` +
			`"stream":true}`,
			"m [{ [1 2 3] true}] 14 s true false"},
		{vllm, `{"token_ids":[1],"max_tokens":1,"n":3,"sampling_params":{"max_tokens":7}}`,
			" [{ [1] true}] 7  false false"},
		{"/v1/completions", `{"model":"m","prompt":"a","max_tokens":5,"sampling_params":{"max_tokens":1,"n":2}}`,
			"m [{a [] false}] 5  false false"},
		{vllm, `{"token_ids":[1],"features":null}`, " [{ [1] true}] 0  false false"},
		{vllm, `{"token_ids":[1],"features":{"mm_hashes":{"image":["x"]}}}`, " [] 0  false true"},
		{vllm, `{"token_ids":[1,-2]}`, "'token_ids[1]' must be a token id"},
		{vllm, `{"token_ids":[]}`, "'token_ids' must not be an empty list"},
		{vllm, `{"token_ids":{"a":1}}`, "'token_ids' must be"},
		{vllm, `{"input_ids":[1]}`, "'token_ids' is required"},
		{sglang, `{"input_ids":[4,5],"sampling_params":{"max_new_tokens":9}}`, " [{ [4 5] true}] 9  false false"},
		{sglang, `{"input_ids":[[4],[5]],"sampling_params":[{"max_new_tokens":9},{}]}`,
			" [{ [4] true} { [5] true}] 0  false false"},
		{sglang, `{"text":"a","model":7}`, ErrUnknownAPI.Error()},
		{sglang, `{"text":["a","b"],"input_ids":null}`, " [{a [] false} {b [] false}] 0  false false"},
		{sglang, `{"text":"a","image_data":"http://x"}`, " [] 0  false true"},
		{sglang, `{"text":"a","session_params":{"id":"x"}}`, " [] 0  false true"},
		{sglang, `{"inputs":"a"}`, ErrUnknownAPI.Error()},
		{sglang, `{"text":{"format":1}}`, ErrUnknownAPI.Error()},
		{sglang, `{"text":[]}`, ErrUnknownAPI.Error()},
		{sglang, `{"text":[[]]}`, ErrUnknownAPI.Error()},
		{sglang, `{"input_ids":["a",1]}`, ErrUnknownAPI.Error()},
		{sglang, `{"input_ids":[1,4294967296]}`, ErrUnknownAPI.Error()},
		{sglang, `[]`, ErrUnknownAPI.Error()},
	} {
		r, err := ParseRequest(c.path, []byte(c.body))
		got := fmt.Sprint(err)
		if err == nil {
			got = fmt.Sprint(r.Model, " ", r.Prompts, " ", r.MostTokens(), " ", r.CacheSalt, " ", r.Stream, " ",
				r.HasMedia)
		}
		if !strings.Contains(got, c.want) {
			t.Errorf("%s: %s\n got %s\nwant %s", c.path, c.body, got, c.want)
		}
	}
}
