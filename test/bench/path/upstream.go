package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"
)

// The headers with which a request describes the stream that it wants.
const (
	chunksHeader   = "x-bench-chunks"
	intervalHeader = "x-bench-interval-ms"
)

// upstreamAddresses are the addresses of the upstream: two endpoints, so that processors must choose.
var upstreamAddresses = []string{"127.0.0.1", "127.0.0.2"}

// engineMetrics is the part of vLLM's metrics that endpoint pickers read, for an idle engine.
const engineMetrics = `# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="m"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="m"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="100000"} 1
# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="0",running_lora_adapters="",waiting_lora_adapters=""} 1
`

// serveUpstream answers at once as an engine does: a JSON object, or a stream of pieces with their send times.
func serveUpstream(port string) error {
	whole := []byte(
		`{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant",` +
			`"content":"ok"},` +
			`"finish_reason":"stop"}],"usage":{"prompt_tokens":10,"completion_tokens":1,"total_tokens":11}}`,
	)
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		if r.URL.Path == "/metrics" {
			w.Header().Set("Content-Type", "text/plain; version=0.0.4")
			io.WriteString(w, engineMetrics)
			return
		}
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
			fmt.Fprintf(
				w,
				"data: {\"id\":\"%d\",\"object\":\"chat.completion.chunk\",\"model\":\"m\",\"choices\":[{\"index\":0,"+
					"\"delta\":{\"content\":\" word\"},\"finish_reason\":null}]}\n\n",
				time.Now().UnixNano(),
			)
			w.(http.Flusher).Flush()
		}
		io.WriteString(w, "data: [DONE]\n\n")
	})}
	failed := make(chan error, len(upstreamAddresses))
	for _, address := range upstreamAddresses {
		l, err := net.Listen("tcp", net.JoinHostPort(address, port))
		if err != nil {
			return err
		}
		go func() { failed <- server.Serve(l) }()
	}
	return <-failed
}
