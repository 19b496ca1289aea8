package parity

import (
	"encoding/json"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// completionFields are further fields of a request to /v1/completions. Only add_special_tokens, suffix and
// truncate_prompt_tokens change a prompt, in engines that have them.
var completionFields = []string{
	`"add_special_tokens":false`, `"add_special_tokens":true`, `"add_special_tokens":null`, `"add_special_tokens":0`,
	`"echo":true`, `"max_tokens":7`, `"max_tokens":null`, `"suffix":"end"`, `"suffix":null`, `"suffix":""`,
	`"truncate_prompt_tokens":2`, `"truncate_prompt_tokens":-1`, `"truncation_side":"left"`, `"n":2`, `"best_of":2`,
	`"stop":["\n"]`, `"stream":true`, `"stream_options":{"include_usage":true}`, `"temperature":0.5`,
	`"return_token_ids":true`, `"skip_special_tokens":false`, `"cache_salt":"s"`, `"logprobs":1`, `"user":"u"`,
	`"response_format":{"type":"json_object"}`, `"seed":1`, `"kv_transfer_params":{"prompt_token_ids":[1,2]}`,
	`"input_ids":[5,6]`, `"prompt_token_ids":[5,6]`, `"messages":[]`, `"chat_template":"x"`, `"text":"y"`,
	`"extra_key":"k"`, `"priority":1`, `"return_token_offsets":true`, `"prompt_logprobs":1`, `"unknown":{"a":1}`,
}

// completionPrompts returns a random value of the field prompt. It has no ids such as 1.0 and true, which vLLM and
// SGLang read as numbers, and kvepp refuses, as OpenAI's API does.
func completionPrompts(random *rand.Rand) string {
	text := func() string {
		var b strings.Builder
		for range random.IntN(12) {
			b.WriteString(words[random.IntN(len(words))])
			b.WriteString([]string{"", " ", "\n"}[random.IntN(3)])
		}
		return b.String()
	}
	ids := func() []int {
		list := make([]int, random.IntN(9))
		for i := range list {
			list[i] = random.IntN(250)
		}
		return list
	}
	var prompt any
	switch random.IntN(8) {
	case 0:
		prompt = ids()
	case 1:
		prompt = [][]int{ids(), ids()}
	case 2, 3:
		texts := make([]string, random.IntN(4))
		for i := range texts {
			texts[i] = text()
		}
		prompt = texts
	case 4:
		return []string{`""`, `null`, `[]`, `[[]]`, `7`, `{"prompt":"a"}`, `["a",1]`, `[1,-1]`, `["a",["b"]]`,
			`[1,[2]]`}[random.IntN(10)]
	default:
		prompt = text()
	}
	value, err := json.Marshal(prompt)
	if err != nil {
		panic(err) // texts and numbers
	}
	return string(value)
}

// TestCompletions compares the ids of random requests to /v1/completions with those of the engines' own code.
func TestCompletions(t *testing.T) {
	if testing.Short() {
		t.Log("make test-long runs the engine's own code")
		return
	}
	for _, engine := range []prompt.Engine{prompt.VLLM, prompt.SGLang} {
		for _, version := range compared(t, engine) {
			t.Run(string(engine)+"/"+version, func(t *testing.T) {
				t.Parallel()
				// The prompts of this model begin with a special token.
				compareCompletions(t, engine, version, "../models/tiny-sentencepiece")
			})
		}
	}
}

func negative(ids []int64) bool { return len(ids) > 0 && slices.Min(ids) < 0 }

func compareCompletions(t *testing.T, engine prompt.Engine, version, folder string) {
	m, err := prompt.Load(folder, prompt.Options{Engine: engine, Version: version})
	if err != nil {
		t.Fatal(err)
	}
	random := rand.New(rand.NewPCG(11, 3))
	type question struct {
		Body json.RawMessage `json:"completions"`
	}
	var questions []any
	for range atLeast(1500, 1) {
		fields := []string{`"model":"m"`, `"prompt":` + completionPrompts(random)}
		for range random.IntN(3) {
			fields = append(fields, completionFields[random.IntN(len(completionFields))])
		}
		random.Shuffle(len(fields), func(i, k int) { fields[i], fields[k] = fields[k], fields[i] })
		questions = append(questions, question{json.RawMessage("{" + strings.Join(fields, ",") + "}")})
	}
	type response struct {
		Prompts [][]int64 `json:"prompts"`
		Error   string    `json:"error"`
	}
	equal, refused, unknown, wrong, refusals := 0, 0, 0, 0, map[string]int{}
	for i, a := range engineResults[response](t, engine, version, folder, questions) {
		// vLLM accepts a list of no prompts and has nothing to do then. SGLang refuses negative ids later.
		if a.Error != "" || len(a.Prompts) == 0 || slices.ContainsFunc(a.Prompts, negative) {
			refused++
			cause, _, _ := strings.Cut(a.Error, "\n")
			refusals[cause]++
			continue
		}
		payload := questions[i].(question).Body //nolint:errcheck // all are questions
		var ids [][]int64
		request, err := body.ParseRequest("/v1/completions", payload)
		if err == nil {
			var prompts []prompt.Prompt
			prompts, err = m.Prompts(t.Context(), request)
			for _, input := range prompts {
				one := make([]int64, len(input.IDs))
				for i, id := range input.IDs {
					one[i] = int64(id)
				}
				ids = append(ids, one)
			}
		}
		switch {
		case err != nil && prompt.IsUnknown(err):
			unknown++
		case err != nil || !slices.EqualFunc(ids, a.Prompts, slices.Equal):
			wrong++
			t.Errorf("%s\n got %v, %v\nwant %v", payload, ids, err, a.Prompts)
		default:
			equal++
		}
	}
	t.Logf("%s %s: %d equal, %d refused by the engine, %d not known here, %d differ",
		engine, version, equal, refused, unknown, wrong)
	if equal < len(questions)*3/5 || unknown > equal/5 {
		t.Errorf("too few results are equal for a conclusion; the engine refused: %v", refusals)
	}
	count(equal+wrong, 0, wrong)
}
