package extproc

import (
	"bytes"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/extproc/extproctest"
	"kvepp/internal/metrics/metricstest"
)

// TestStreamsAreLimited: one request more than may be followed is told to come again, in a way that a proxy passes on even when
// it fails open.
func TestStreamsAreLimited(t *testing.T) {
	b := newBench(t, Config{MaxStreams: 3, RetryAfter: 2})
	var running, done sync.WaitGroup
	end := make(chan struct{})
	for range 3 {
		running.Add(1)
		done.Go(func() {
			out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}, Upstream: func(r *extproctest.Routed) extproctest.Response {
				running.Done()
				<-end
				return answer("x")(r)
			}})
			if err != nil || out.Immediate != nil {
				t.Error(out, err)
			}
		})
	}
	running.Wait()
	if n := b.server.Streams(); n != 3 {
		t.Errorf("%d streams are followed, want 3", n)
	}
	out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 || out.Set["retry-after"] != "2" || out.Set[reasonHeader] != "too_many_requests" ||
		out.Set[droppedHeader] != "rejected-saturated" || out.Immediate.GetDetails() != "kvepp_too_many_requests" {
		t.Errorf("%v %v %v", err, out.Immediate, out.Set)
	}
	close(end)
	done.Wait()
	b.idle(t)
	for deadline := time.Now().Add(30 * time.Second); b.server.Streams() > 0 && time.Now().Before(deadline); {
		<-time.After(time.Millisecond)
	}
	if out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}, Upstream: answer("x")}); err != nil || out.Immediate != nil {
		t.Errorf("after the others have ended: %v %v", err, out)
	}
}

// TestHeldBytesAreLimited counts what is held until it is sent on, and not beyond.
func TestHeldBytesAreLimited(t *testing.T) {
	b := newBench(t, Config{MaxHeldBytes: 100_000, MaxParseBytes: 90_000})
	blank := bytes.Repeat([]byte(" "), 50_000)
	for name, body := range map[string][][]byte{
		"short":           {[]byte(chatBody)},
		"streamed beyond": {blank, blank[:45_000], blank, blank, blank}, // by load once it is above --max-parse-bytes
	} {
		out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: body, Upstream: func(r *extproctest.Routed) extproctest.Response {
			b.holdsNothing(t, name+", while it is answered")
			return answer("x")(r)
		}})
		if err != nil || out.Immediate != nil {
			t.Errorf("%s: %v %v", name, err, out.Immediate)
		}
	}
	out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{blank, bytes.Repeat(blank, 2)}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 || !strings.Contains(string(out.Immediate.GetBody()), `"code":"too_many_bytes"`) {
		t.Errorf("%v %v", err, out)
	}
	// Memory that is set aside for what is announced counts as well, as it is set aside: at first four times of what has come.
	announced := map[string]string{"content-length": "1000000"}
	for k, v := range chat {
		announced[k] = v
	}
	out, err = newBench(t, Config{MaxHeldBytes: 100_000}).Do(t.Context(), &extproctest.Request{Header: announced, Body: [][]byte{blank[:30_000]}})
	if err != nil || out.Immediate.GetStatus().GetCode() != 429 {
		t.Errorf("%v %v", err, out)
	}
	// A client that goes away gives back what it held.
	if _, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{blank}}); err != nil {
		t.Error(err)
	}
	b.idle(t)
	b.holdsNothing(t, "when all is over")
}

// holdsNothing waits until no bytes of requests are held, which is a moment after the last of them was sent on.
func (b *bench) holdsNothing(t *testing.T, when string) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); b.server.HeldBytes() != 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Errorf("%s: %d bytes are held", when, b.server.HeldBytes())
			return
		}
	}
}

// TestCompressedAnswersPass and are counted as not looked into.
func TestCompressedAnswersPass(t *testing.T) {
	b := newBench(t, Config{})
	for _, encoding := range []string{"gzip", "identity", ""} {
		out, err := b.Do(t.Context(), &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}, Upstream: func(*extproctest.Routed) extproctest.Response {
			return extproctest.Response{Header: map[string]string{":status": "200", "content-encoding": encoding}, Body: [][]byte{{0x1f, 0x8b, 0x08}}}
		}})
		if err != nil || !bytes.Equal(out.Body, []byte{0x1f, 0x8b, 0x08}) {
			t.Errorf("%s: %v %v", encoding, err, out)
		}
	}
	b.idle(t)
	if n := metricstest.Read(t, b.metrics.Registry).Of("kvepp_unread_answers_total").Value(); n != 1 {
		t.Errorf("%v answers are counted as unread, want 1", n)
	}
}
