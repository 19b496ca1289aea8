package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"kvepp/serve/logs"
)

func TestIndexerFlags(t *testing.T) {
	for _, c := range []struct {
		args, env string // env is the value of KVEPP_INDEXER_WORKERS
		want      string // of the error; empty for none
	}{
		{"", "", ""},
		{"--workers 1=tcp://a:1,1:3=tcp://b:2 --block-size 16", "", ""},
		{"--block-size 16", "1=tcp://a:1", ""},
		{"--workers 1=tcp://a:1", "", "needs --block-size"},
		{"--block-size 16", "", "that --workers names"},
		{"--workers 1 --block-size 16", "", "must look like INSTANCE"},
		{"--workers x=tcp://a:1 --block-size 16", "", "must look like INSTANCE"},
		{"--workers 1:-1=tcp://a:1 --block-size 16", "", "must look like INSTANCE"},
		{"--peers http://a:1,https://b", "", ""},
		{"--peers a:1", "", "--peers"},
		{"--port 0", "", "--port"},
		{"--index-max-bytes 1", "", "--index-max-bytes"},
		{"more", "", "unexpected argument"},
	} {
		var o indexerOptions
		err := parseIndexer(&o, strings.Fields(c.args), func(name string) string {
			if name == "KVEPP_INDEXER_WORKERS" {
				return c.env
			}
			return ""
		})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q with %q: %v, want %q", c.args, c.env, err, c.want)
		}
	}
}

// TestIndexerThatCannotStart: an indexer that cannot start exits, also while it holds events back for --peers.
func TestIndexerThatCannotStart(t *testing.T) {
	var o indexerOptions
	if err := parseIndexer(&o, strings.Fields(
		"--workers 1=tcp://127.0.0.1:9,1=tcp://127.0.0.1:9 --block-size 16 --peers http://127.0.0.1:9 --log-level "+
			"error"),
		func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	o.LogTo(logs.Start(io.Discard))
	ended := make(chan error, 1)
	go func() { ended <- runIndexer(&o) }()
	select {
	case err := <-ended:
		if err == nil || !strings.Contains(err.Error(), "already registered") {
			t.Errorf("runIndexer returns %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("runIndexer does not return")
	}
}
