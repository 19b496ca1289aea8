package check

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"

	"kvepp/internal/apibody"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/tokenizer"
)

// probe is a prompt that nobody has asked before, sent twice.
type probe struct {
	heard  *hearing
	text   string
	tokens int   // by the engine's count; 0: it did not say
	cached *int  // the second time; nil: it did not say
	err    error // of either
}

// probeWords is how many words a probe has: enough tokens for a few blocks, and few enough for any model.
const probeWords = 150

// probe sends a prompt twice, if that is wanted and the worker can be sent one.
func (q *inquiry) probe(ctx context.Context, heard *hearing) {
	if !q.Probe || !q.reads || q.model == "" || q.w.Role == pool.Prefill || q.w.Role == pool.Encode {
		return
	}
	words := make([]string, probeWords)
	for i := range words {
		words[i] = fmt.Sprintf("%05x", rand.N(1<<20))
	}
	q.prompt = &probe{heard: heard, text: "kvepp check: " + strings.Join(words, " ")}
	for range 2 {
		if q.prompt.err = q.send(ctx, q.prompt); q.prompt.err != nil {
			return
		}
	}
}

func (q *inquiry) send(ctx context.Context, p *probe) error {
	ctx, cancel := q.bounded(ctx)
	defer cancel()
	body, err := json.Marshal(map[string]any{"model": q.model, "prompt": p.text, "max_tokens": 1, "temperature": 0})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+q.w.Address+"/v1/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	rank := strconv.FormatUint(uint64(q.w.Rank), 10)
	if q.answers == tokenizer.Dynamo {
		req.Header.Set("x-dynamo-worker-instance-id", strconv.FormatUint(q.w.InstanceID, 10))
		req.Header.Set("x-dynamo-dp-rank", rank)
	} else if !q.w.RankByAddress && q.w.DataParallelSize > 1 {
		req.Header.Set("x-data-parallel-rank", rank)
	}
	resp, err := q.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var answer struct {
		Usage struct {
			PromptTokens        int `json:"prompt_tokens"`
			PromptTokensDetails *struct {
				CachedTokens *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %.200s", resp.Status, text)
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return err
	}
	if p.tokens, p.cached = answer.Usage.PromptTokens, nil; answer.Usage.PromptTokensDetails != nil {
		p.cached = answer.Usage.PromptTokensDetails.CachedTokens
	}
	return nil
}

// askUsage says whether the second of the probe's answers told what was cached.
func (q *inquiry) askUsage() {
	p := q.prompt
	switch {
	case p == nil:
	case p.err != nil:
		q.found(AboutCachedUsed, Wrong, "send the engine a completion yourself", "a prompt of %d words was answered: %s", probeWords, brief(p.err))
	case p.cached == nil:
		q.found(AboutCachedUsed, Wrong, usageFix[q.answers], "not reported: kvepp cannot compare its predictions")
	case *p.cached == 0:
		q.found(AboutCachedUsed, Wrong, "is prefix caching on? Do others fill the cache?", "reported, and none of a prompt's %d tokens was cached the second time", p.tokens)
	default:
		q.found(AboutCachedUsed, OK, "", "reported: %d of %d the second time", *p.cached, p.tokens)
	}
}

// someText is tokenized by both sides: scripts, digits, blanks and marks that tokenizers differ in.
const someText = "The 12,345 crème brûlées cost €7.50;\n\tнаука 温度計 ١٢٣ don't  WON'T <|end|> 👩‍🚀 x²"

// askTokenizer compares token ids where the engine tells its own, else their number.
func (q *inquiry) askTokenizer(ctx context.Context) {
	model := q.Models[q.model]
	if model == nil || !q.reads {
		return
	}
	own := func(text string) ([]kvblock.Token, error) {
		body, err := json.Marshal(map[string]any{"model": q.model, "prompt": text})
		if err != nil {
			return nil, err
		}
		request, err := apibody.ParseRequest("/v1/completions", body)
		if err != nil {
			return nil, err
		}
		prompts, err := model.Tokenize(request)
		if err != nil {
			return nil, err
		}
		return prompts[0].IDs, nil
	}
	if q.answers == tokenizer.VLLM || q.answers == tokenizer.SGLang {
		mine, err := own(someText)
		if err != nil {
			q.found(AboutTokenizer, Wrong, "kvepp tokenize --text shows more", "kvepp cannot tokenize a text: %v", err)
			return
		}
		theirs, err := q.tokenize(ctx, someText)
		if err != nil {
			q.found(AboutTokenizer, Unknown, "", "the engine does not say: %s", brief(err))
			return
		}
		for i := range max(len(mine), len(theirs)) {
			if i >= len(mine) || i >= len(theirs) || mine[i] != theirs[i] {
				q.found(AboutTokenizer, Wrong, "give --model the engine's own folder and version", "the ids of a text differ from the engine's at token %d: no block would match", i)
				return
			}
		}
		q.found(AboutTokenizer, OK, "", "the %d ids of a text are the engine's", len(mine))
		return
	}
	if q.prompt == nil || q.prompt.err != nil || q.prompt.tokens == 0 {
		q.found(AboutTokenizer, Unknown, "--probe compares the number of a prompt's tokens", "the engine does not say its ids")
		return
	}
	mine, err := own(q.prompt.text)
	switch {
	case err != nil:
		q.found(AboutTokenizer, Wrong, "kvepp tokenize --text shows more", "kvepp cannot tokenize a text: %v", err)
	case len(mine) != q.prompt.tokens:
		q.found(AboutTokenizer, Wrong, "give --model the engine's own folder and version", "a prompt has %d tokens, by the engine %d: no block would match", len(mine), q.prompt.tokens)
	default:
		q.found(AboutTokenizer, OK, "", "a prompt's %d tokens are as many as the engine's", len(mine))
	}
}

// tokenize asks vLLM or SGLang for the ids of a text.
func (q *inquiry) tokenize(ctx context.Context, text string) ([]kvblock.Token, error) {
	ctx, cancel := q.bounded(ctx)
	defer cancel()
	body, err := json.Marshal(map[string]any{"model": q.model, "prompt": text})
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+q.w.Address+"/tokenize", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := q.HTTP.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("POST /tokenize: %s", resp.Status)
	}
	var answer struct {
		Tokens []kvblock.Token `json:"tokens"`
	}
	err = json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&answer)
	return answer.Tokens, err
}
