package parity

import (
	"encoding/json"
	"strings"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// TestCacheUse compares which requests skip the prefix cache with what vLLM's and SGLang's own code makes of them.
func TestCacheUse(t *testing.T) {
	if testing.Short() {
		t.Log("make parity asks the engines' own code which requests read their cache")
		return
	}
	members := [][]string{
		{``, `"prompt_logprobs":null`, `"prompt_logprobs":0`, `"prompt_logprobs":2`, `"prompt_logprobs":-1`},
		{``, `"echo":true`, `"echo":false`, `"echo":"yes"`, `"echo":null`},
		{``, `"logprobs":null`, `"logprobs":0`, `"logprobs":1`, `"logprobs":true`, `"logprobs":3`},
		{``, `"top_logprobs":null`, `"top_logprobs":0`, `"top_logprobs":1`},
		{``, `"use_beam_search":true`},
	}
	prompts := map[string]string{
		"completions":      `"model":"m","prompt":"a"`,
		"chat/completions": `"model":"m","messages":[{"role":"user","content":"a"}]`,
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			var questions []any
			var requests []*body.Request
			for api, input := range prompts {
				if engine == prompt.SGLang && api != "completions" {
					continue // logprob_start_len is -1 in the source
				}
				bodies := []string{input}
				for _, choice := range members {
					var more []string
					for _, payload := range bodies {
						for _, member := range choice {
							more = append(more, strings.TrimSuffix(payload+","+member, ","))
						}
					}
					bodies = more
				}
				for _, payload := range bodies {
					payload = "{" + payload + "}"
					request, err := body.Parser{Python: true}.Parse("/v1/"+api, []byte(payload))
					if err != nil {
						t.Fatal(err)
					}
					requests = append(requests, request)
					questions = append(questions, map[string]any{"cache": api, "body": json.RawMessage(payload)})
				}
			}
			responses := engineResults[struct {
				WritesOnly bool `json:"writes_only"`
				Error      string
			}](t, engine, version, "../models/tiny-bytelevel", questions)
			served, writes := 0, 0
			for i, response := range responses {
				if response.Error != "" {
					continue // the engine refuses it
				}
				served++
				if response.WritesOnly {
					writes++
				}
				question, _ := json.Marshal(questions[i])
				// 0.31.0 took null for no number, later versions take it for 0.
				if version == "0.31.0" && strings.Contains(string(question), `"top_logprobs":null`) {
					continue
				}
				if got := prompt.WritesCacheOnly(engine, requests[i]); got != response.WritesOnly {
					t.Errorf("%s %s, %s: %v", engine, version, question, got)
				}
			}
			t.Logf("%s %s: %d of %d requests served, %d skip the cache",
				engine, version, served, len(responses), writes)
			if served < len(responses)/10 || writes == 0 || writes == served {
				t.Errorf("%s %s: too few of them", engine, version)
			}
		}
	}
}
