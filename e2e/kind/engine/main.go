// Command engine stands in for a stock vLLM in a Pod: it serves chats of one model, keeps the blocks of every prompt that it has
// seen, announces them as vLLM does, and reports how many tokens of a prompt it found.
//
// It owns its blocks and its two sockets for KV events. It generates no text worth reading, never forgets a block, and knows no
// other engine. Tokens are kvepp's own: that they are the engines' is shown elsewhere. It also serves the model's tokenizer as a
// model hub does.
package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
	"kvepp/tokenizer"
)

type engine struct {
	name      string
	model     *tokenizer.Model
	blockSize int
	pace      time.Duration // of one token
	events    *publisher

	mu   sync.Mutex
	held map[uint64]bool // blocks, by name
}

func main() {
	e := &engine{held: map[uint64]bool{}}
	hostname, _ := os.Hostname() // a Pod's name; the flag's default says what it is
	flag.StringVar(&e.name, "name", hostname, "how it calls itself in the response header x-engine")
	folder := flag.String("model", "", "folder of the model's tokenizer")
	port := flag.Int("port", 8000, "where it serves HTTP")
	events := flag.Int("kv-events-port", 5557, "where it announces KV events")
	replay := flag.Int("kv-replay-port", 5657, "where it repeats them")
	flag.IntVar(&e.blockSize, "block-size", 16, "tokens of a block")
	flag.DurationVar(&e.pace, "token-time", 5*time.Millisecond, "how long it takes for a token")
	flag.Parse()
	if err := e.run(*folder, *port, *events, *replay); err != nil {
		log.Fatalf("engine: %v", err)
	}
}

func (e *engine) run(folder string, port, events, replay int) (err error) {
	if e.model, err = tokenizer.Load(folder, tokenizer.Options{}); err != nil {
		return err
	}
	if e.events, err = publish(fmt.Sprintf("tcp://*:%d", events), fmt.Sprintf("tcp://*:%d", replay)); err != nil {
		return err
	}
	http.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	http.HandleFunc("GET /blocks", func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		fmt.Fprintln(w, len(e.held))
	})
	http.HandleFunc("POST /v1/chat/completions", e.chat)
	hub(folder)
	return http.ListenAndServe(fmt.Sprintf(":%d", port), nil)
}

// chat answers a chat, in one piece or as a stream.
func (e *engine) chat(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("x-engine", e.name)
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client has gone
	}
	request, err := apibody.ParseRequest(r.URL.Path, body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	prompts, err := e.model.Tokenize(request)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	prompt := prompts[0].IDs
	cached, err := e.prefill(prompt)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	generate := max(request.MaxTokens, 1)
	usage := map[string]any{"prompt_tokens": len(prompt), "completion_tokens": generate, "total_tokens": len(prompt) + generate,
		"prompt_tokens_details": map[string]int{"cached_tokens": cached}}
	if !request.Stream {
		time.Sleep(time.Duration(generate) * e.pace)
		w.Header().Set("content-type", "application/json")
		json.NewEncoder(w).Encode(map[string]any{"object": "chat.completion", "model": request.Model, "usage": usage, "choices": []any{
			map[string]any{"index": 0, "finish_reason": "length", "message": map[string]string{"role": "assistant", "content": strings.Repeat("word ", generate)}}}})
		return
	}
	w.Header().Set("content-type", "text/event-stream")
	send := func(chunk map[string]any) {
		chunk["object"], chunk["model"] = "chat.completion.chunk", request.Model
		text, _ := json.Marshal(chunk) // strings and numbers alone
		fmt.Fprintf(w, "data: %s\n\n", text)
		http.NewResponseController(w).Flush()
	}
	for range generate {
		time.Sleep(e.pace)
		send(map[string]any{"choices": []any{map[string]any{"index": 0, "delta": map[string]string{"content": "word "}}}})
	}
	send(map[string]any{"choices": []any{}, "usage": usage})
	fmt.Fprint(w, "data: [DONE]\n\n")
}

// prefill takes in the blocks of a prompt, announces those that are new, and returns how many of its tokens were there. As with
// vLLM that is never the whole prompt: its last token is always computed.
func (e *engine) prefill(prompt []kvblock.Token) (cached int, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var fresh []uint64
	var parent uint64 // of the first that is new; 0: there is none before it
	name := uint64(0)
	first := 0 // the first new block's number
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

// blockName is the engine's own name of a block, which follows from its tokens and the block before; never 0. (FNV-1a)
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
