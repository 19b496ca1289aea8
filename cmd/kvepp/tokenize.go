package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/scoring"
)

const tokenizeHelp = `kvepp tokenize shows how kvepp tokenizes a request: the prompt, its token ids, and with ` +
	`--blocks the
block hashes. Compare the ids with the engine's: vLLM's POST /tokenize takes the same body.

Usage:       kvepp tokenize --model-path DIR [flags] < body.json
Example:     kvepp tokenize --model-path DIR --text < prompt.txt     raw text, no chat template
             kvepp tokenize --model-path DIR --jsonl < bodies.jsonl  a body and an answer per line
             kvepp tokenize --model-path DIR --blocks --kv-cache-block-size 16 < body.json
Precedence:  flag, variable KVEPP_<FLAG>, Dynamo's variable (in brackets), default

The answer is {"prompt": text, "token_ids": [...], "certain": n}: the first n ids equal the
engine's. These are all ids, except in a chat with images, video or audio: there n counts the ids
before the first of these. For a request with several prompts the answer is an array. With --jsonl,
the answer to an invalid line is {"error": message}, and the exit status at the end is 1.
`

// tokenizeOptions are the flags of `kvepp tokenize`.
type tokenizeOptions struct {
	modelPath string
	engine    string
	prompts   promptFlags
	api       string
	text      bool
	special   bool
	jsonl     bool
	blocks    bool
	blockSize int
	lora      string
	cacheSalt string
}

func tokenizeFlags(o *tokenizeOptions) *pflag.FlagSet {
	f := newFlags("kvepp tokenize")
	f.StringVar(
		&o.modelPath,
		"model-path",
		"",
		"the model's `FOLDER`: tokenizer.json, tokenizer_config.json, the chat template",
	)
	f.StringVar(
		&o.engine,
		"engine",
		string(prompt.VLLM),
		"`ENGINE` whose rules build the prompt: vllm, sglang, trtllm or dynamo",
	)
	values(f, "engine", engineNames()...)
	o.prompts.add(f)
	f.StringVar(
		&o.api,
		"api",
		"",
		"the `API` of the body: chat, completions, responses or messages. Empty: chat if the body has messages, else "+
			"completions",
	)
	f.BoolVar(&o.text, "text", false, "the input is prompt text, not a body; with --jsonl, one JSON string a line")
	f.BoolVar(
		&o.special,
		"add-special-tokens",
		true,
		"with --text, add the special tokens that the tokenizer puts around a prompt",
	)
	f.BoolVar(&o.jsonl, "jsonl", false, "one input per line, one answer per line")
	f.BoolVar(&o.blocks, "blocks", false, "add the blocks' local_hashes and sequence_hashes, as in Dynamo")
	f.IntVar(&o.blockSize, "kv-cache-block-size", 0, "`TOKENS` per block, for --blocks")
	f.StringVar(&o.lora, "lora", "", "adapter `NAME` that salts the hashes")
	f.StringVar(&o.cacheSalt, "cache-salt", "", "cache `NAMESPACE` that salts the hashes. Empty: the request's own")
	section(f, "Flags of kvepp tokenize")
	documentEnvironment(f, "")
	return f
}

// tokenize runs `kvepp tokenize`. It returns the exit status.
func tokenize(args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	var o tokenizeOptions
	f := tokenizeFlags(&o)
	err := parseArgs(f, args)
	if errors.Is(err, pflag.ErrHelp) {
		showHelp(stdout, f, err)
		return 0
	}
	if err == nil {
		err = fromEnvironment(f, getenv)
	}
	if err == nil {
		err = o.check(f)
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n\"kvepp tokenize --help\" shows how to use it.\n", err)
		return 2
	}
	engine, err := o.prompts.options(prompt.Engine(o.engine))
	if err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n", err)
		return 2
	}
	model, err := prompt.Load(o.modelPath, engine)
	if err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: --model-path %s: %v\n", o.modelPath, err)
		return 1
	}
	out := bufio.NewWriter(stdout)
	status := o.run(out, model, stdin, stderr)
	if err := out.Flush(); err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: writing: %v\n", err)
		return 1
	}
	return status
}

// run answers the whole input. It returns the exit status.
func (o *tokenizeOptions) run(out *bufio.Writer, model *prompt.Model, stdin io.Reader, stderr io.Writer) int {
	if !o.jsonl {
		input, err := io.ReadAll(stdin)
		if err == nil {
			err = o.answer(out, model, input)
		}
		if err != nil {
			fmt.Fprintf(stderr, "kvepp tokenize: %v\n", err)
			return 1
		}
		return 0
	}
	status := 0
	lines := bufio.NewReaderSize(stdin, 1<<16)
	for {
		line, err := lines.ReadBytes('\n')
		if len(bytes.TrimSpace(line)) > 0 {
			if err := o.answer(out, model, line); err != nil {
				status = 1
				if err := encode(out, map[string]string{"error": err.Error()}); err != nil {
					return 1
				}
			}
			// The program that writes the lines may wait for each answer before it writes the next line. The caller
			// reports a failure.
			if out.Flush() != nil {
				return 1
			}
		}
		if err != nil {
			if err != io.EOF {
				fmt.Fprintf(stderr, "kvepp tokenize: reading: %v\n", err)
				status = 1
			}
			return status
		}
	}
}

func (o *tokenizeOptions) check(f *pflag.FlagSet) error {
	switch {
	case f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: the input comes from standard input", f.Arg(0))
	case o.modelPath == "":
		return errors.New("--model-path FOLDER is needed")
	case o.api != "" && o.text:
		return errors.New("--api is about bodies, but with --text the input is not a body")
	case o.blocks && (o.blockSize < 1 || o.blockSize > scoring.MaxBlockSize):
		return errors.New("--blocks needs --kv-cache-block-size TOKENS, the engine's (vLLM: --block-size)")
	case !o.blocks && (o.blockSize != 0 || o.lora != "" || o.cacheSalt != ""):
		return errors.New("--kv-cache-block-size, --lora and --cache-salt are about hashes: add --blocks")
	}
	if o.api != "" {
		if err := oneOf("api", o.api, "chat", "completions", "responses", "messages"); err != nil {
			return err
		}
	}
	_, err := parseEngine(o.engine)
	return err
}

// apiPaths are the paths of the APIs that --api names.
var apiPaths = map[string]string{
	"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses",
	"messages": "/v1/messages",
}

// tokenized is one prompt's answer.
type tokenized struct {
	Prompt         string                 `json:"prompt"`
	TokenIDs       []kvblock.Token        `json:"token_ids"`
	Certain        int                    `json:"certain"`
	LocalHashes    []kvblock.LocalHash    `json:"local_hashes,omitzero"` // nil without --blocks
	SequenceHashes []kvblock.SequenceHash `json:"sequence_hashes,omitzero"`
}

// answer writes the answer to one input, as one line.
func (o *tokenizeOptions) answer(out io.Writer, model *prompt.Model, input []byte) error {
	if o.text {
		text := string(input)
		if o.jsonl {
			if err := json.Unmarshal(input, &text); err != nil {
				return fmt.Errorf("with --text and --jsonl each line is a JSON string: %w", err)
			}
		}
		ids, err := model.Encode(text, o.special)
		if err != nil {
			return err
		}
		return encode(out, o.tokenized(prompt.Prompt{Text: text, IDs: ids, Certain: len(ids)}, ""))
	}
	path := apiPaths[o.api]
	if path == "" {
		if path = apiPaths["completions"]; hasMessages(input) {
			path = apiPaths["chat"]
		}
	}
	how := body.Parser{Python: prompt.Engine(o.engine) != prompt.Dynamo}
	request, err := how.Parse(path, input)
	if err != nil {
		return err
	}
	prompts, err := model.Prompts(context.Background(), request)
	if err != nil {
		return fmt.Errorf("the token ids of this request are not certain, so it would be routed by load: %w", err)
	}
	answers := make([]tokenized, len(prompts))
	for i, p := range prompts {
		answers[i] = o.tokenized(p, request.CacheSalt)
	}
	if len(answers) == 1 {
		return encode(out, answers[0])
	}
	return encode(out, answers)
}

func (o *tokenizeOptions) tokenized(p prompt.Prompt, salt string) tokenized {
	t := tokenized{Prompt: p.Text, TokenIDs: p.IDs, Certain: p.Certain}
	if t.TokenIDs == nil {
		t.TokenIDs = []kvblock.Token{}
	}
	if o.blocks {
		if o.cacheSalt != "" {
			salt = o.cacheSalt
		}
		t.LocalHashes = kvblock.AppendLocalHashes(
			[]kvblock.LocalHash{},
			p.IDs[:p.Certain],
			kvblock.HashOptions{BlockSize: o.blockSize, LoRAName: o.lora, CacheNamespace: salt},
		)
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
