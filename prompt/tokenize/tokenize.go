// Package tokenize shows how kvepp tokenizes requests: `kvepp tokenize`.
//
// Concurrency: a Config is for one caller at a time.
package tokenize

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// Help is the beginning of the command's help.
const Help = `kvepp tokenize shows how kvepp tokenizes a request: the prompt, its token ids, and with --blocks
the block hashes. Compare the ids with the engine's: vLLM's POST /tokenize takes the same body.

Usage:       kvepp tokenize --model-path DIR [flags] < body.json
Example:     kvepp tokenize --model-path DIR --text < prompt.txt     raw text, no chat template
             kvepp tokenize --model-path DIR --jsonl < bodies.jsonl  a body and a response per line
             kvepp tokenize --model-path DIR --blocks --kv-cache-block-size 16 < body.json
Precedence:  flag, variable KVEPP_<FLAG>, Dynamo's variable (in brackets), default

The response is {"prompt": text, "token_ids": [...], "certain": n}: the first n ids equal the
engine's. These are all ids, except in a chat with images, video or audio: there n counts the ids
before the first of these. For a request with several prompts the response is an array. With
--jsonl, the response to an invalid line is {"error": message}, and the exit status at the end is 1.
`

// Config are the command's flags, but for those of the engine's that change prompts.
type Config struct {
	Engine prompt.Engine

	modelPath, engine, api       string
	text, special, jsonl, blocks bool
	blockSize                    int
	lora, cacheSalt              string
}

// AddFlags declares the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&c.modelPath, "model-path", "",
		"the model's `FOLDER`: tokenizer.json, tokenizer_config.json, the chat template")
	f.StringVar(&c.engine, "engine", string(prompt.VLLM),
		"`ENGINE` whose rules build the prompt: vllm, sglang, trtllm or dynamo")
	flags.Values(f, "engine", prompt.EngineNames()...)
	f.StringVar(&c.api, "api", "",
		"the `API` of the body: chat, completions, responses or messages. Empty: chat if the body has messages, else "+
			"completions")
	f.BoolVar(&c.text, "text", false, "the input is prompt text, not a body; with --jsonl, one JSON string a line")
	f.BoolVar(&c.special, "add-special-tokens", true,
		"with --text, add the special tokens that the tokenizer puts around a prompt")
	f.BoolVar(&c.jsonl, "jsonl", false, "one input per line, one response per line")
	f.BoolVar(&c.blocks, "blocks", false, "add the blocks' local_hashes and sequence_hashes, as in Dynamo")
	f.IntVar(&c.blockSize, "kv-cache-block-size", 0, "`TOKENS` per block, for --blocks")
	flags.Inherit(f, "kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE")
	f.StringVar(&c.lora, "lora", "", "adapter `NAME` that salts the hashes")
	f.StringVar(&c.cacheSalt, "cache-salt", "", "cache `NAMESPACE` that salts the hashes. Empty: the request's own")
}

// Validate checks the flags and arguments.
func (c *Config) Validate(args []string) (err error) {
	switch {
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q: the input comes from standard input", args[0])
	case c.modelPath == "":
		return errors.New("--model-path FOLDER is needed")
	case c.api != "" && c.text:
		return errors.New("--api is about bodies, but with --text the input is not a body")
	case c.blocks && (c.blockSize < 1 || c.blockSize > kvblock.MaxBlockSize):
		return errors.New("--blocks needs --kv-cache-block-size TOKENS, the engine's (vLLM: --block-size)")
	case !c.blocks && (c.blockSize != 0 || c.lora != "" || c.cacheSalt != ""):
		return errors.New("--kv-cache-block-size, --lora and --cache-salt are about hashes: add --blocks")
	}
	if c.api != "" {
		if err := flags.OneOf("api", c.api, "chat", "completions", "responses", "messages"); err != nil {
			return err
		}
	}
	if c.Engine, err = prompt.ParseEngine(c.engine); err != nil {
		return flags.OneOf("engine", c.engine, prompt.EngineNames()...)
	}
	return nil
}

// Run answers the whole input. It reports whether nothing failed, and says on stderr what did, except for lines of
// --jsonl, whose responses say so.
func (c *Config) Run(options prompt.Options, stdin io.Reader, stdout, stderr io.Writer) bool {
	model, err := prompt.Load(c.modelPath, options)
	if err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: --model-path %s: %v\n", c.modelPath, err)
		return false
	}
	out, all := bufio.NewWriter(stdout), true
	if c.jsonl {
		all, err = c.lines(out, model, stdin)
	} else {
		var input []byte
		if input, err = io.ReadAll(stdin); err == nil {
			err = c.respond(out, model, input)
		}
	}
	if err = errors.Join(err, out.Flush()); err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n", err)
	}
	return all && err == nil
}

// lines answers each line. It reports whether all lines are valid.
func (c *Config) lines(out *bufio.Writer, model *prompt.Model, stdin io.Reader) (all bool, err error) {
	all = true
	lines := bufio.NewReaderSize(stdin, 1<<16)
	for {
		line, end := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			if err := c.respond(out, model, line); err != nil {
				all = false
				if err := encode(out, map[string]string{"error": err.Error()}); err != nil {
					return false, err
				}
			}
			// The program that writes the lines may wait for each response before it writes the next line.
			if err := out.Flush(); err != nil {
				return false, err
			}
		}
		switch {
		case end == io.EOF:
			return all, nil
		case end != nil:
			return false, fmt.Errorf("reading: %w", end)
		}
	}
}

// apiPaths are the paths of the APIs that --api names.
var apiPaths = map[string]string{
	"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
	"messages": "/v1/messages",
}

// tokenized is one prompt's response.
type tokenized struct {
	Prompt         string                 `json:"prompt"`
	TokenIDs       []kvblock.Token        `json:"token_ids"`
	Certain        int                    `json:"certain"`
	LocalHashes    []kvblock.LocalHash    `json:"local_hashes,omitzero"` // nil without --blocks
	SequenceHashes []kvblock.SequenceHash `json:"sequence_hashes,omitzero"`
}

// respond writes the response to one input, as one line.
func (c *Config) respond(out io.Writer, model *prompt.Model, input []byte) error {
	if c.text {
		text := string(input)
		if c.jsonl {
			if err := json.Unmarshal(input, &text); err != nil {
				return fmt.Errorf("with --text and --jsonl each line is a JSON string: %w", err)
			}
		}
		ids, err := model.Encode(text, c.special)
		if err != nil {
			return err
		}
		return encode(out, c.tokenized(prompt.Prompt{Text: text, IDs: ids, Certain: len(ids)}, ""))
	}
	path := apiPaths[c.api]
	if path == "" {
		if path = apiPaths["completions"]; hasMessages(input) {
			path = apiPaths["chat"]
		}
	}
	how := body.Parser{Python: c.Engine != prompt.Dynamo}
	request, err := how.Parse(path, input)
	if err != nil {
		return err
	}
	prompts, err := model.Prompts(context.Background(), request)
	if err != nil {
		return fmt.Errorf("the token ids of this request are not certain, so it would be routed by load: %w", err)
	}
	responses := make([]tokenized, len(prompts))
	for i, p := range prompts {
		responses[i] = c.tokenized(p, request.CacheSalt)
	}
	if len(responses) == 1 {
		return encode(out, responses[0])
	}
	return encode(out, responses)
}

func (c *Config) tokenized(p prompt.Prompt, salt string) tokenized {
	t := tokenized{Prompt: p.Text, TokenIDs: p.IDs, Certain: p.Certain}
	if t.TokenIDs == nil {
		t.TokenIDs = []kvblock.Token{}
	}
	if c.blocks {
		salt = cmp.Or(c.cacheSalt, salt)
		t.LocalHashes = kvblock.AppendLocalHashes([]kvblock.LocalHash{},
			p.IDs[:p.Certain], kvblock.HashOptions{BlockSize: c.blockSize, LoRAName: c.lora, CacheNamespace: salt})
		t.SequenceHashes = kvblock.AppendSequenceHashes([]kvblock.SequenceHash{}, t.LocalHashes)
	}
	return t
}

// hasMessages reports whether a body looks like a chat request. If the body is not JSON, the parser reports the error
// later.
func hasMessages(body []byte) bool {
	var b struct {
		Messages json.RawMessage `json:"messages"`
	}
	return json.Unmarshal(body, &b) != nil && strings.Contains(string(body), `"messages"`) || b.Messages != nil
}

func encode(out io.Writer, v any) error {
	e := json.NewEncoder(out)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
