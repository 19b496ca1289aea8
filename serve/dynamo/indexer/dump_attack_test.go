package indexer

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"kvepp/internal/connlimit"
	"kvepp/kvblock"
)

// TestUnreadDump: one dump is written at a time, and a client that does not read it is replaced by the next.
func TestUnreadDump(t *testing.T) {
	defer func(before time.Duration) { dumpPatience = before }(dumpPatience)
	dumpPatience = 20 * time.Millisecond
	h := newHouse(t)
	h.want("/register", `{"instance_id": 7, "endpoint": "tcp://127.0.0.1:9", "model_name": "m", "block_size": 4}`,
		http.StatusCreated, "ok")
	s := h.pool.Acquire()
	worker := s.Workers[0].Worker
	s.Release()
	const blocks = 100_000 // larger than what sockets buffer
	all := make([]kvblock.StoredBlock, blocks)
	for i := range all {
		all[i] = kvblock.StoredBlock{Engine: kvblock.EngineHash(i + 1), Local: kvblock.LocalHash(i + 1)}
	}
	if err := h.index.Stored(worker, kvblock.Stored{Blocks: all}); err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	h.registry.Handle(mux)
	server := httptest.NewUnstartedServer(mux)
	server.Listener = connlimit.New(server.Listener, 10)
	connlimit.HTTP(server.Config)
	server.Start()
	defer server.Close()
	c, err := net.Dial("tcp", server.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.(*net.TCPConn).SetReadBuffer(1 << 10)
	fmt.Fprint(c, "GET /dump HTTP/1.1\r\nHost: x\r\n\r\n")
	if _, err := c.Read(make([]byte, 12)); err != nil { // the first dump has begun
		t.Fatal(err)
	}
	deadline := time.Now().Add(30 * time.Second) // sooner than the write deadline of the first
	for {
		resp, err := http.Get(server.URL + "/dump")
		var text []byte
		if err == nil { // else this client was too slow itself, and is asked to try again
			text, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK && err == nil && json.Valid(text) && len(text) > blocks {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes, %v", len(text), err)
		}
	}
}
