package models

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// TestOthers: a server that knows one model is asked by that model's name, and the pool's engines by the request's.
func TestOthers(t *testing.T) {
	asked := ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var got struct{ Model string }
		if err := json.NewDecoder(r.Body).Decode(&got); err != nil {
			t.Error(err)
		}
		asked = got.Model
		io.WriteString(w, `{"token_ids":[1,2]}`)
	}))
	defer server.Close()
	log := slog.New(slog.DiscardHandler)
	p := pool.New(log)
	const text = `{"model":"served","messages":[{"role":"user","content":"hi"}]}`
	request, err := body.ParseRequest("/v1/chat/completions", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		others Others
		want   string
	}{
		{Others{URL: server.URL, Model: "/mnt/models/base", Timeout: time.Minute}, "/mnt/models/base"},
		{Others{URL: server.URL, Timeout: time.Minute}, "served"},
		{Others{Engines: true}, "served"},
	} {
		config := Config{Others: c.others, URLTimeout: time.Minute, Prompts: prompt.Config{}}
		config.Prompts.Engine = prompt.VLLM
		of, err := config.RemoteOf(p, nil, metrics.New(), log)
		if err != nil {
			t.Fatal(err)
		}
		if c.others.Engines {
			if of("served") != nil {
				t.Error("an engine of an empty pool")
			}
			p.Update([]pool.Endpoint{{Name: "w", Address: strings.TrimPrefix(server.URL, "http://"), Model: "served"}})
			if first := of("served"); of("another") != nil || first == nil || of("served") != first {
				t.Error("the engine of another model, or another client each time")
			}
		}
		asked = ""
		ids, err := of("served").Tokenize(t.Context(), request, []byte(text))
		if err != nil || len(ids) != 1 || len(ids[0]) != 2 || asked != c.want {
			t.Errorf("%+v: %v, %v, asked for %q", c.others, ids, err, asked)
		}
	}
	config := Config{Others: Others{URL: "tcp://x"}}
	if _, err := config.RemoteOf(p, nil, metrics.New(), log); err == nil {
		t.Error("a wrong URL is taken")
	}
	if of, err := new(Config).RemoteOf(p, nil, metrics.New(), log); err != nil || of != nil {
		t.Error("an engine without a name")
	}
}
