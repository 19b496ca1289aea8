package extproc

import (
	"log/slog"
	"strings"
	"testing"

	"kvepp/extproc/extproctest"
	"kvepp/internal/logtest"
)

// TestRefusalsAreLoggedWithinLimits: thousands of refused requests cause few and short log lines.
func TestRefusalsAreLoggedWithinLimits(t *testing.T) {
	b := newBench(t, Config{})
	b.pool.Update(nil)
	var said logtest.Log
	b.server.log = slog.New(slog.NewTextHandler(&said, nil))
	path := "/v1/models/" + strings.Repeat("x", 10_000)
	for range 100 {
		if out, err := b.Do(t.Context(),
			&extproctest.Request{Header: map[string]string{":method": "GET", ":path": path,
				"x-request-id": "r"}}); err != nil ||
			out.Immediate.GetStatus().GetCode() != 503 {
			t.Fatalf("%v, %v", out, err)
		}
	}
	if n := said.Count("request refused"); n < 5 || n > 8 || len(said.String()) > n*1000 {
		t.Errorf("%d lines of %d bytes", n, len(said.String()))
	}
}

// TestHeadersHoldNoLineBreaks: text from a client or an engine cannot start a new header.
func TestHeadersHoldNoLineBreaks(t *testing.T) {
	h := set("x-kvepp-session", "a\r\nx-evil: 1\x00\x7f\tb").GetHeader()
	if got := string(h.GetRawValue()); got != "a__x-evil: 1__\tb" {
		t.Errorf("%q", got)
	}
}
