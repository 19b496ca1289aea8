package prompt

import (
	"strings"
	"testing"

	"kvepp/prompt/body"
)

// parsedWith returns a request as an engine's server reads it. fields are members of its body, in addition to the rest.
func parsedWith(t *testing.T, path, fields string) *body.Request {
	t.Helper()
	payload := `{"model":"m","prompt":["a","b"],"input":"a","messages":[{"role":"user","content":"a"}]`
	if fields != "" {
		payload += "," + fields
	}
	r, err := body.Parser{Python: true}.Parse("/v1/"+path, []byte(payload+"}"))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestWritesCacheOnly: which requests vLLM, SGLang, TensorRT-LLM and Dynamo's workers compute in whole.
func TestWritesCacheOnly(t *testing.T) {
	for _, c := range []struct{ path, fields, engines string }{
		{"completions", ``, ""},
		{"completions", `"logprobs":1`, ""},
		{"completions", `"prompt_logprobs":null`, ""},
		{"completions", `"prompt_logprobs":1`, "vllm dynamo"},
		{"completions", `"prompt_logprobs":0`, "vllm dynamo"},
		{"completions", `"prompt_logprobs":-1`, "vllm dynamo"},
		{"completions", `"prompt_logprobs":true`, "vllm dynamo"},
		{"completions", `"prompt_logprobs":1,"use_beam_search":true`, "dynamo"},
		{"completions", `"echo":true`, "dynamo"},
		{"completions", `"echo":true,"logprobs":null`, "dynamo"},
		{"completions", `"echo":true,"logprobs":1`, "vllm sglang dynamo"},
		{"completions", `"echo":"yes","logprobs":5`, "vllm sglang dynamo"},
		{"completions", `"echo":true,"logprobs":0`, "vllm dynamo"}, // SGLang asks whether there are any
		{"completions", `"echo":true,"top_logprobs":1`, "dynamo"},
		{"completions", `"echo":false,"logprobs":1`, ""},
		{"completions", `"sampling_params":{"prompt_logprobs":0}`, "vllm dynamo"}, // of /inference/v1/generate
		{"completions", `"return_logprob":true,"logprob_start_len":0`, "sglang"},  // of /generate
		{"completions", `"return_logprob":true,"logprob_start_len":-1`, ""},
		{"completions", `"return_logprob":false,"logprob_start_len":0`, ""},
		{"chat/completions", ``, ""},
		{"chat/completions", `"logprobs":true,"top_logprobs":5`, ""},
		{"chat/completions", `"prompt_logprobs":0`, "vllm dynamo"},
		{"chat/completions", `"echo":true`, "vllm"}, // vLLM's default is top_logprobs 0
		{"chat/completions", `"echo":true,"top_logprobs":null`, "vllm"},
		{"chat/completions", `"echo":true,"logprobs":true,"top_logprobs":2`, "vllm"},
		{"responses", `"prompt_logprobs":1,"top_logprobs":3,"echo":true`, ""}, // no field of theirs
		{"messages", `"prompt_logprobs":1,"max_tokens":1`, ""},
	} {
		r := parsedWith(t, c.path, c.fields)
		for _, engine := range append([]Engine{""}, Engines...) {
			name := string(engine)
			if name == "" {
				name = "vllm"
			}
			want := strings.Contains(" "+c.engines+" ", " "+name+" ")
			if got := WritesCacheOnly(engine, r); got != want {
				t.Errorf("%s, %s on %q: %v, want %v", c.path, c.fields, engine, got, want)
			}
		}
	}
}

// TestSGLangSpace: the adapter, the salt and the extra key of each prompt.
func TestSGLangSpace(t *testing.T) {
	const b, bs = `extra_key "b" `, `extra_key "b" s`
	for _, c := range []struct {
		path, adapter, fields string
		want                  [2]Space
		unnamed, differ       bool
	}{
		{"completions", "", ``, [2]Space{}, false, false},
		{"completions", "", `"cache_salt":"s"`, [2]Space{{"", "s"}, {"", "s"}}, false, false},
		{"completions", "", `"cache_salt":["s",""]`, [2]Space{{"", "s"}, {}}, false, true},
		{"completions", "", `"cache_salt":["s"]`, [2]Space{{"", "s"}, {}}, false, true},
		{"completions", "", `"cache_salt":"","extra_key":""`, [2]Space{}, false, false},
		{"completions", "", `"cache_salt":null,"extra_key":null,"lora_path":null`, [2]Space{}, false, false},
		{"completions", "", `"extra_key":"b"`, [2]Space{{"", b}, {"", b}}, true, false},
		{"completions", "", `"extra_key":["","b"]`, [2]Space{{}, {"", b}}, true, true},
		{"completions", "", `"extra_key":"b","cache_salt":["s",""]`, [2]Space{{"", bs}, {"", b}}, true, true},
		{"completions", "", `"lora_path":"sql"`, [2]Space{{"sql", ""}, {"sql", ""}}, false, false},
		{"completions", "", `"lora_path":""`, [2]Space{}, false, false},
		{"completions", "", `"lora_path":[null,"sql"]`, [2]Space{{}, {"sql", ""}}, false, true},
		{"completions", "law", `"lora_path":[null,"sql"]`, [2]Space{{"law", ""}, {"law", ""}}, false, true},
		{"completions", "law", `"lora_path":"sql","extra_key":"b"`, [2]Space{{"law", b}, {"law", b}}, true, false},
		{"chat/completions", "", `"lora_path":"sql","cache_salt":"s"`, [2]Space{{"sql", "s"}, {"sql", "s"}}, false,
			false},
		{"chat/completions", "", `"lora_path":["sql"]`, [2]Space{{"sql", ""}, {}}, false, false},
		// /v1/responses knows no adapters, /v1/messages no fields.
		{"responses", "law", `"lora_path":"sql","cache_salt":"s"`, [2]Space{{"", "s"}, {"", "s"}}, false, false},
		{"responses", "", `"extra_key":"b"`, [2]Space{{"", b}, {"", b}}, true, false},
		{"messages", "law", `"lora_path":"sql","extra_key":"b","max_tokens":1`, [2]Space{{"law", ""}, {"law", ""}},
			false, false},
	} {
		r := parsedWith(t, c.path, c.fields)
		unnamed := false
		for i, want := range c.want {
			got, hidden := SGLangSpace(r, c.adapter, i)
			if unnamed = unnamed || hidden; got != want {
				t.Errorf("%s, %q, %s, prompt %d: %+v, want %+v", c.path, c.adapter, c.fields, i, got, want)
			}
		}
		if unnamed != c.unnamed || SGLangSpacesDiffer(r) != c.differ {
			t.Errorf("%s, %s: unnamed %v, differ %v", c.path, c.fields, unnamed, SGLangSpacesDiffer(r))
		}
	}
}
