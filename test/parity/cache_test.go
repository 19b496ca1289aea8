package parity

import (
	"encoding/json"
	"strings"
	"testing"

	"kvepp/internal/apibody"
	"kvepp/tokenizer"
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
	for _, engine := range []tokenizer.Engine{tokenizer.VLLM, tokenizer.SGLang} {
		for _, version := range compared(t, engine) {
			var questions []any
			var requests []*apibody.Request
			for api, prompt := range prompts {
				if engine == tokenizer.SGLang && api != "completions" {
					continue // logprob_start_len is -1 in the source
				}
				bodies := []string{prompt}
				for _, choice := range members {
					var more []string
					for _, body := range bodies {
						for _, member := range choice {
							more = append(more, strings.TrimSuffix(body+","+member, ","))
						}
					}
					bodies = more
				}
				for _, body := range bodies {
					body = "{" + body + "}"
					request, err := apibody.Parser{Python: true}.Parse("/v1/"+api, []byte(body))
					if err != nil {
						t.Fatal(err)
					}
					requests = append(requests, request)
					questions = append(questions, map[string]any{"cache": api, "body": json.RawMessage(body)})
				}
			}
			answers := engineAnswers[struct {
				WritesOnly bool `json:"writes_only"`
				Error      string
			}](t, engine, version, "../models/tiny-bytelevel", questions)
			served, writes := 0, 0
			for i, answer := range answers {
				if answer.Error != "" {
					continue // the engine refuses it
				}
				served++
				if answer.WritesOnly {
					writes++
				}
				question, _ := json.Marshal(questions[i])
				// 0.31.0 took null for no number, later versions take it for 0.
				if version == "0.31.0" && strings.Contains(string(question), `"top_logprobs":null`) {
					continue
				}
				if got := tokenizer.WritesCacheOnly(engine, requests[i]); got != answer.WritesOnly {
					t.Errorf("%s %s, %s: %v", engine, version, question, got)
				}
			}
			t.Logf("%s %s: %d of %d requests served, %d skip the cache", engine, version, served, len(answers), writes)
			if served < len(answers)/10 || writes == 0 || writes == served {
				t.Errorf("%s %s: too few of them", engine, version)
			}
		}
	}
}
