package stack

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Message is one turn of a conversation.
type Message struct {
	Role    string `json:"role"`
	Content string `json:"content"`
}

// Response is a response as a client gets it, with kvepp's headers about its decision (--decision-headers).
type Response struct {
	Status int
	Header http.Header
	Body   string // as received
	Text   string // the model's output

	PromptTokens, CompletionTokens, CachedTokens int // as the response reports; -1: not reported
	TTFT                                         time.Duration
	LastToken                                    time.Duration // when the last piece of the text came; streams only

	Worker                   string // as "worker-0/0"
	Reason                   string
	KveppPrompt, KveppCached int // prompt tokens, and how many of them kvepp predicted to be cached
	Costs                    string
	UpstreamWorker           string    // the instance that Dynamo reports; "" unless requested
	PrefillWorker            string    // as Worker; "" without a prefill leg
	UpstreamPrefill          string    // the prefill instance that Dynamo reports; "" unless requested
	UpstreamRanks            [2]string // ranks of UpstreamPrefill and UpstreamWorker
	Finished                 bool      // the response is complete
}

// Chat sends a chat request. extra is merged into the body.
func Chat(
	ctx context.Context,
	client *http.Client,
	url string,
	header http.Header,
	messages []Message,
	stream bool,
	extra map[string]any,
) (*Response, error) {
	body := map[string]any{"model": Model, "messages": messages, "stream": stream, "max_tokens": 8}
	if stream {
		body["stream_options"] = map[string]any{"include_usage": true}
	}
	for k, v := range extra {
		body[k] = v
	}
	return Post(ctx, client, url+"/v1/chat/completions", header, body)
}

// Post sends a JSON body and reads the response to its end.
func Post(ctx context.Context, client *http.Client, url string, header http.Header, body any) (*Response, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, "POST", url, bytes.NewReader(text))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Header.Set("content-type", "application/json")
	return Do(client, req)
}

// Do sends a request and reads the response to its end.
func Do(client *http.Client, req *http.Request) (*Response, error) {
	start := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	a := &Response{Status: resp.StatusCode, Header: resp.Header,
		PromptTokens: -1, CompletionTokens: -1, CachedTokens: -1, Worker: resp.Header.Get("x-kvepp-worker"),
		Reason: resp.Header.Get("x-kvepp-reason"), Costs: resp.Header.Get("x-kvepp-costs"),
		PrefillWorker: resp.Header.Get("x-kvepp-prefill-worker")}
	a.KveppPrompt, _ = strconv.Atoi(resp.Header.Get("x-kvepp-prompt-tokens"))
	a.KveppCached, _ = strconv.Atoi(resp.Header.Get("x-kvepp-predicted-cached-tokens"))
	if !strings.HasPrefix(resp.Header.Get("content-type"), "text/event-stream") {
		all, err := io.ReadAll(resp.Body)
		if err != nil {
			return a, err
		}
		a.Body, a.TTFT, a.Finished = string(all), time.Since(start), true
		a.read(all)
		return a, nil
	}
	lines := bufio.NewReader(resp.Body)
	var body strings.Builder
	defer func() { a.Body = body.String() }()
	for {
		line, err := lines.ReadString('\n')
		body.WriteString(line)
		if data, ok := strings.CutPrefix(strings.TrimSpace(line), "data: "); ok {
			before := len(a.Text)
			if data == "[DONE]" {
				a.Finished = true
			} else if a.read([]byte(data)); len(a.Text) > before {
				a.LastToken = time.Since(start)
				if before == 0 {
					a.TTFT = a.LastToken
				}
			}
		}
		if err == io.EOF {
			return a, nil
		}
		if err != nil {
			return a, err
		}
	}
}

// read takes the fields of one JSON object of a response.
func (a *Response) read(object []byte) {
	var r struct {
		Choices []struct {
			Text           string
			Message, Delta struct{ Content string }
		}
		Usage *struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
			Details          *struct {
				Cached *int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		}
		NVExt struct {
			WorkerID struct {
				Decode  json.Number `json:"decode_worker_id"`
				Prefill json.Number `json:"prefill_worker_id"`

				DecodeRank  json.Number `json:"decode_dp_rank"`
				PrefillRank json.Number `json:"prefill_dp_rank"`
			} `json:"worker_id"`
		} `json:"nvext"`
	}
	if json.Unmarshal(object, &r) != nil {
		return
	}
	for _, c := range r.Choices {
		a.Text += c.Text + c.Message.Content + c.Delta.Content
	}
	if r.Usage != nil {
		a.PromptTokens, a.CompletionTokens = r.Usage.PromptTokens, r.Usage.CompletionTokens
		if r.Usage.Details != nil && r.Usage.Details.Cached != nil {
			a.CachedTokens = *r.Usage.Details.Cached
		}
	}
	if id := r.NVExt.WorkerID.Decode.String(); id != "" {
		a.UpstreamWorker = id
	}
	if id := r.NVExt.WorkerID.Prefill.String(); id != "" {
		a.UpstreamPrefill = id
		a.UpstreamRanks = [2]string{r.NVExt.WorkerID.PrefillRank.String(), r.NVExt.WorkerID.DecodeRank.String()}
	}
}
