// Command engine stands in for a stock vLLM or SGLang in a Pod. It serves chats and completions of one model, keeps the
// blocks of every prompt, announces them as that engine does, and reports how many prompt tokens were cached.
//
// It owns its blocks and its two sockets for KV events. It generates meaningless text and never evicts a block. Its
// token ids are kvepp's own; other tests compare those with the engines'. It answers the requests of `kvepp check`, and
// serves the model's tokenizer as a model hub does.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

type engine struct {
	name       string
	like       prompt.Engine // VLLM or SGLang
	served     string        // the model's name
	model      *prompt.Model
	blockSize  int
	pace       time.Duration // time for one token
	promptPace time.Duration // time for one token of the prompt that is not cached
	events     *publisher

	withoutCache, withoutUsage bool // see the flags

	mu   sync.Mutex
	held map[uint64]bool // blocks, by hash
}

func main() {
	e := &engine{held: map[uint64]bool{}}
	hostname, _ := os.Hostname() // in a Pod its name
	flag.StringVar(&e.name, "name", hostname, "its name in the response header x-engine")
	flag.StringVar((*string)(&e.like), "like", string(prompt.VLLM), "the engine to imitate: vllm or sglang")
	folder := flag.String("model", "", "folder of the model's tokenizer")
	flag.StringVar(&e.served, "served-model-name", "tiny", "the model's name")
	template := flag.String("chat-template", "", "chat template `FILE` in place of the model folder's")
	host := flag.String("host", "", "address of its sockets; empty: all of the machine's")
	port := flag.Int("port", 8000, "port of the HTTP server")
	events := flag.Int("kv-events-port", 5557, "port of KV events; 0: no events and no replays")
	replay := flag.Int("kv-replay-port", 5657, "port of replays; 0: none")
	flag.IntVar(&e.blockSize, "block-size", 16, "tokens per block")
	flag.BoolVar(&e.withoutCache, "no-prefix-caching", false, "keep no blocks, as an engine without prefix caching")
	flag.BoolVar(&e.withoutUsage, "no-cached-tokens", false, "do not report cached tokens")
	flag.DurationVar(&e.pace, "token-time", 5*time.Millisecond, "time for one token")
	flag.DurationVar(&e.promptPace, "prompt-token-time", 100*time.Microsecond,
		"time for one token of the prompt that is not cached")
	flag.Parse()
	if err := e.run(*folder, *template, *host, *port, *events, *replay); err != nil {
		log.Fatalf("engine: %v", err)
	}
}

func (e *engine) run(folder, template, host string, port, events, replay int) (err error) {
	if e.like != prompt.VLLM && e.like != prompt.SGLang {
		return fmt.Errorf("-like %s: must be vllm or sglang", e.like)
	}
	if e.model, err = prompt.Load(folder, prompt.Options{Engine: e.like, ChatTemplate: template}); err != nil {
		return err
	}
	if e.events, err = publish(e.like, cmp.Or(host, "*"), events, replay); err != nil {
		return err
	}
	http.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("GET /blocks", func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		fmt.Fprintln(w, len(e.held))
	})
	http.HandleFunc("POST /v1/chat/completions", e.generate)
	http.HandleFunc("POST /v1/completions", e.generate)
	e.tell()
	hub(folder)
	return http.ListenAndServe(net.JoinHostPort(host, strconv.Itoa(port)), new(faults).around(http.DefaultServeMux))
}

// generate answers a chat or a completion, in one piece or as a stream.
func (e *engine) generate(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("x-engine", e.name)
	request, prompt, ok := e.read(w, r, r.URL.Path)
	if !ok {
		return
	}
	cached, err := e.prefill(prompt)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	time.Sleep(time.Duration(len(prompt)-cached) * e.promptPace)
	tokens := max(request.MaxTokens, 1)
	usage := map[string]any{
		"prompt_tokens":     len(prompt),
		"completion_tokens": tokens,
		"total_tokens":      len(prompt) + tokens,
	}
	if !e.withoutUsage {
		usage["prompt_tokens_details"] = map[string]int{"cached_tokens": cached}
	}
	// said returns a choice with so much text, under its key in a chat's response (message) or chunk (delta).
	said := func(chat, text, finish string) map[string]any {
		choice := map[string]any{"index": 0, "text": text}
		if request.API == body.ChatCompletions {
			choice = map[string]any{"index": 0, chat: map[string]string{"content": text}}
		}
		if finish != "" {
			choice["finish_reason"] = finish
		}
		return choice
	}
	if !request.Stream {
		time.Sleep(time.Duration(tokens) * e.pace)
		respond(
			w,
			map[string]any{
				"model":   request.Model,
				"usage":   usage,
				"choices": []any{said("message", strings.Repeat("word ", tokens), "length")},
			},
		)
		return
	}
	w.Header().Set("content-type", "text/event-stream")
	send := func(chunk map[string]any) {
		chunk["model"] = request.Model
		text, _ := json.Marshal(chunk) // only strings and numbers, so no error
		fmt.Fprintf(w, "data: %s\n\n", text)
		http.NewResponseController(w).Flush()
	}
	for range tokens {
		time.Sleep(e.pace)
		send(map[string]any{"choices": []any{said("delta", "word ", "")}})
	}
	send(map[string]any{"choices": []any{}, "usage": usage})
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// read reads an API request and tokenizes its prompt. If ok is false, it has answered with an error.
func (e *engine) read(
	w http.ResponseWriter,
	r *http.Request,
	path string,
) (request *body.Request, prompt []kvblock.Token, ok bool) {
	payload, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, nil, false // the client closed the connection
	}
	request, prompts, ok := e.prompts(w, path, payload)
	if !ok {
		return nil, nil, false
	}
	return request, prompts[0].IDs, true
}

// prompts tokenizes the prompts of a body for an API path. If ok is false, it has answered with an error.
func (e *engine) prompts(
	w http.ResponseWriter,
	path string,
	payload []byte,
) (request *body.Request, prompts []prompt.Prompt, ok bool) {
	request, err := body.Parser{Python: true}.Parse(path, payload)
	if err == nil {
		if prompts, err = e.model.Tokenize(context.Background(), request); err == nil {
			return request, prompts, true
		}
	}
	http.Error(w, err.Error(), http.StatusBadRequest)
	return nil, nil, false
}

// tokenize answers with the token ids of a prompt, of a chat rendered with the engine's template, and with SGLang of
// several prompts. Sources: vLLM 0.33.0, entrypoints/serve/tokenize; SGLang 0.5.21,
// entrypoints/openai/serving_tokenize.
func (e *engine) tokenize(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client closed the connection
	}
	var given struct{ Prompt, Messages json.RawMessage }
	if err := json.Unmarshal(body, &given); err != nil || (given.Prompt == nil) == (given.Messages == nil) {
		http.Error(w, "want exactly one of prompt and messages", http.StatusBadRequest)
		return
	}
	path := "/v1/completions"
	if given.Messages != nil {
		path = "/v1/chat/completions"
	}
	_, prompts, ok := e.prompts(w, path, body)
	switch {
	case !ok:
	case given.Messages == nil && given.Prompt[0] == '[' && e.like == prompt.SGLang:
		tokens, counts := make([][]kvblock.Token, len(prompts)), make([]int, len(prompts))
		for i := range prompts {
			tokens[i], counts[i] = prompts[i].IDs, len(prompts[i].IDs)
		}
		respond(w, map[string]any{"tokens": tokens, "count": counts})
	default:
		respond(w, map[string]any{"tokens": prompts[0].IDs, "count": len(prompts[0].IDs)})
	}
}

// respond writes JSON.
func respond(w http.ResponseWriter, value any) {
	w.Header().Set("content-type", "application/json")
	json.NewEncoder(w).Encode(value)
}

// tell serves the engine's information: the model, the token ids of a text, and the cache's configuration.
func (e *engine) tell() {
	http.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		respond(
			w,
			map[string]any{
				"object": "list",
				"data":   []any{map[string]string{"id": e.served, "object": "model", "owned_by": string(e.like)}},
			},
		)
	})
	http.HandleFunc("POST /tokenize", e.tokenize)
	if e.like == prompt.SGLang {
		http.HandleFunc("GET /model_info", func(w http.ResponseWriter, _ *http.Request) {
			respond(w, map[string]any{"has_image_understanding": false, "has_audio_understanding": false})
		})
		http.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) {
			respond(
				w,
				map[string]any{
					"page_size":           e.blockSize,
					"disable_radix_cache": e.withoutCache,
					"enable_cache_report": !e.withoutUsage,
				},
			)
		})
		return
	}
	http.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		caching := "True"
		if e.withoutCache {
			caching = "False"
		}
		fmt.Fprintf(
			w,
			"# TYPE vllm:cache_config_info gauge\nvllm:cache_config_info{block_size=\"%d\",enable_prefix_caching=%q} "+
				"1.0\n",
			e.blockSize,
			caching,
		)
	})
}

// prefill stores the blocks of a prompt, announces the new ones, and returns how many of its tokens were cached. As
// with vLLM that is never the whole prompt: the last token is always computed.
func (e *engine) prefill(prompt []kvblock.Token) (cached int, err error) {
	if e.withoutCache {
		return 0, nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	var fresh []uint64
	var parent uint64 // parent of the first new block; 0: none
	name := uint64(0)
	first := 0 // index of the first new block
	for i := range len(prompt) / e.blockSize {
		before := name
		name = blockName(before, prompt[i*e.blockSize:(i+1)*e.blockSize])
		if e.held[name] && len(fresh) == 0 {
			cached = min((i+1)*e.blockSize, (len(prompt)-1)/e.blockSize*e.blockSize)
			continue
		}
		if len(fresh) == 0 {
			parent, first = before, i
		}
		fresh = append(fresh, name)
		e.held[name] = true
	}
	if len(fresh) == 0 {
		return cached, nil
	}
	return cached, e.events.stored(fresh, parent, prompt[first*e.blockSize:][:len(fresh)*e.blockSize], e.blockSize)
}

// blockName returns the engine's own hash of a block, from its tokens and its parent; never 0. (FNV-1a)
func blockName(parent uint64, tokens []kvblock.Token) uint64 {
	h := uint64(14695981039346656037)
	mix := func(v uint64) {
		for range 8 {
			h = (h ^ v&0xff) * 1099511628211
			v >>= 8
		}
	}
	mix(parent)
	for _, t := range tokens {
		mix(uint64(t))
	}
	return max(h, 1)
}
