package replicas

import (
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/router/session"
	"kvepp/scoring"
	"kvepp/scoring/replica"
)

// started starts a replica with a worker.
func started(t *testing.T) (s *Sharing, address string) {
	t.Helper()
	at, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	log := slog.New(slog.DiscardHandler)
	p := pool.New(log)
	s = New(&Config{}, replica.Config{Book: scoring.NewActiveSequences(), Pool: p,
		Sessions: session.NewTable(session.Config{TTL: time.Minute}),
		Stored:   session.NewTable(session.Config{TTL: time.Hour}), Log: log}, metrics.New())
	p.Update([]pool.Endpoint{{Name: "a", Address: "10.0.0.1:8000"}})
	go s.Serve(at)
	t.Cleanup(s.Close)
	return s, at.Addr().String()
}

// TestSessionsAreShared: what a replica tells of stored responses and of sessions goes into the table of each, a
// replica that starts later gets both, and the end of a session is its end everywhere.
func TestSessionsAreShared(t *testing.T) {
	a, atA := started(t)
	b, atB := started(t)
	response, conversation := session.ResponseKeyOf("resp_1"), session.KeyOf("m", "resp_1")
	a.parts.Stored.Put(response, 0)
	lease, _ := a.parts.Sessions.Hold(conversation, 0, false, 0, 0)
	a.config.Peers, b.config.Peers = []string{atA, atB}, []string{atA, atB}
	a.Follow(t.Context(), t.Context(), nil)
	b.Follow(t.Context(), t.Context(), nil)
	eventually(t, "b to have both", func() bool {
		return b.parts.Stored.Active() == 1 && b.parts.Sessions.Active() == 1
	})
	if _, known := b.parts.Stored.Find(response); !known {
		t.Error("the response is in the other table")
	}
	b.parts.Stored.Put(session.ResponseKeyOf("resp_2"), 0)
	lease.Release(true)
	eventually(t, "the changes", func() bool { return a.parts.Stored.Active() == 2 && b.parts.Sessions.Active() == 0 })
	page := httptest.NewRecorder()
	a.Handle(page, nil)
	if body := page.Body.String(); !strings.Contains(body, `"shares":true`) || !strings.Contains(body, atB) {
		t.Error(body)
	}
	var none *Sharing
	page = httptest.NewRecorder()
	none.Handle(page, nil)
	none.RoutedBy(nil)
	none.GiveIndex(nil)
	none.Follow(t.Context(), t.Context(), nil)
	if body := page.Body.String(); !strings.Contains(body, `"shares":false`) || none.Sources() != nil {
		t.Error(body)
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(fmt.Sprint("not within 30 s: ", what))
		}
	}
}
