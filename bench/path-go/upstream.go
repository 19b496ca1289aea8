package main

import (
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// The headers with which a request for a stream says how it is to be.
const (
	chunksHeader   = "x-bench-chunks"
	intervalHeader = "x-bench-interval-ms"
)

// serveUpstream answers as an engine does, at once: a JSON object, or a stream of pieces that carry the time they were sent.
func serveUpstream(port string) error {
	whole := []byte(`{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"ok"},` +
		`"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}`)
	return http.ListenAndServe("127.0.0.1:"+port, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		chunks, _ := strconv.Atoi(r.Header.Get(chunksHeader))
		if chunks == 0 {
			w.Header().Set("Content-Type", "application/json")
			w.Write(whole)
			return
		}
		interval, _ := strconv.Atoi(r.Header.Get(intervalHeader))
		w.Header().Set("Content-Type", "text/event-stream")
		tick := time.NewTicker(max(1, time.Duration(interval)) * time.Millisecond)
		defer tick.Stop()
		for range chunks {
			select {
			case <-tick.C:
			case <-r.Context().Done():
				return
			}
			fmt.Fprintf(w, "data: {\"id\":\"%d\",\"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[{\"index\":0,"+
				"\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n", time.Now().UnixNano())
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}))
}
