package extproc

import (
	"context"
	"hash/maphash"
	"maps"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"kvepp/extproc/extproctest"
	"kvepp/internal/metrics/metricstest"
)

// again returns the headers of a request as the next filter of the proxy's chain sees them.
func again(header map[string]string, routed *extproctest.Routed) map[string]string {
	next := maps.Clone(header)
	for _, name := range routed.Removed {
		delete(next, name)
	}
	maps.Copy(next, routed.Set)
	return next
}

// requests waits until no stream is left, and returns how many requests and decisions were counted.
func (b *bench) requests(t *testing.T) (requests, decisions float64) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); b.server.Streams() > 0; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d streams are left", b.server.Streams())
		}
	}
	all := metricstest.Read(t, b.metrics.Registry)
	return all.Of("kvepp_requests_total").Value(), all.Of("kvepp_decisions_total").Value()
}

// TestAskedTwice: a proxy that asks again for a request whose stream is open gets the same decision, and the request is
// counted and booked once. Anything else is a new request.
func TestAskedTwice(t *testing.T) {
	large := make([]byte, 5000)
	for _, c := range []struct {
		name     string
		body     []byte
		trailers bool
		change   func(header map[string]string) // of the second call
		second   []byte                         // its body; nil: the same
		repeat   bool
	}{
		{name: "the same", body: []byte(chatBody), repeat: true},
		{name: "a body that is not read", body: large, repeat: true},
		{name: "trailers", body: []byte(chatBody), trailers: true, repeat: true},
		{name: "another body with trailers", body: []byte(chatBody), trailers: true, second: []byte(chatBody + " ")},
		{name: "no body", repeat: true},
		{name: "another body", body: []byte(chatBody), second: []byte(chatBody + " ")},
		{name: "another id", body: []byte(chatBody), change: func(h map[string]string) { h["x-request-id"] = "s" }},
		{name: "another path", body: []byte(chatBody),
			change: func(h map[string]string) { h[":path"] = "/m/v1/chat/completions" }},
		{name: "another endpoint", body: []byte(chatBody),
			change: func(h map[string]string) { h[endpointHeader] = "10.0.0.9:8000" }},
		{name: "a forged name", body: []byte(chatBody),
			change: func(h map[string]string) { h[repeatHeader] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ" }},
		{name: "no name", body: []byte(chatBody), change: func(h map[string]string) { delete(h, repeatHeader) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := newBench(t, Config{MaxParseBytes: 4096})
			pieces := func(body []byte) [][]byte {
				if body == nil {
					return nil
				}
				return [][]byte{body[:10], body[10:]}
			}
			header := maps.Clone(chat)
			if header[repeatHeader] = "forged by the client"; c.body == nil {
				header[":method"] = "GET"
			}
			var inner *extproctest.Outcome
			outer, err := b.Do(t.Context(), &extproctest.Request{Header: header, Body: pieces(c.body),
				Trailers: c.trailers,
				Upstream: func(first *extproctest.Routed) extproctest.Response {
					second := &extproctest.Request{Header: again(header, first), Body: pieces(c.body),
						Trailers: c.trailers,
						Upstream: func(*extproctest.Routed) extproctest.Response {
							if n := b.book.Len(); (n == 1) != c.repeat {
								t.Errorf("%d bookings", n)
							}
							return response("x")(nil)
						}}
					if c.change != nil {
						c.change(second.Header)
					}
					if c.second != nil {
						second.Body = pieces(c.second)
					}
					var err error
					if inner, err = b.Do(t.Context(), second); err != nil {
						t.Fatal(err)
					}
					return response("x")(nil)
				}})
			if err != nil || outer.Immediate != nil || inner.Immediate != nil {
				t.Fatal(err, outer, inner)
			}
			one, two := outer.Routed.Set, inner.Routed.Set
			if one[repeatHeader] == header[repeatHeader] || (one[repeatHeader] == two[repeatHeader]) != c.repeat ||
				c.repeat && one[endpointHeader] != two[endpointHeader] {
				t.Errorf("%v, then %v", one, two)
			}
			want := 2.0
			if c.repeat {
				want = 1
			}
			if r, d := b.requests(t); r != want || d != want || b.book.Len() != 0 {
				t.Errorf("%v requests and %v decisions were counted, and %d bookings are left", r, d, b.book.Len())
			}
		})
	}
}

// TestAskedAfterTheEnd: a decision is not repeated when its request has ended, nor without end, and none is kept.
func TestAskedAfterTheEnd(t *testing.T) {
	b := newBench(t, Config{})
	repeated := 0
	first := &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)}}
	first.Upstream = func(routed *extproctest.Routed) extproctest.Response {
		for range maxRepeats + 5 {
			second, err := b.Do(t.Context(), &extproctest.Request{Header: again(chat, routed), Body: first.Body,
				Upstream: response("x")})
			if err != nil {
				t.Fatal(err)
			}
			if second.Routed.Set[repeatHeader] == routed.Set[repeatHeader] {
				repeated++
			}
		}
		return response("x")(nil)
	}
	out, err := b.Do(t.Context(), first)
	if err != nil || repeated != maxRepeats {
		t.Fatalf("%v, %d repeats", err, repeated)
	}
	b.requests(t)
	late, err := b.Do(t.Context(), &extproctest.Request{Header: again(chat, out.Routed), Body: first.Body,
		Upstream: response("x")})
	if err != nil || late.Routed.Set[repeatHeader] == out.Routed.Set[repeatHeader] {
		t.Fatal(err, late)
	}
	if r, _ := b.requests(t); r != 7 || len(b.server.open.byName) != 0 {
		t.Errorf("%v requests, %d names are left", r, len(b.server.open.byName))
	}
}

// TestAskedWhileOthersAsk: no stream waits for the digest of another one's body.
func TestAskedWhileOthersAsk(t *testing.T) {
	o := &newBench(t, Config{}).server.open
	first := &answered{}
	o.add("a", first)
	if o.repeated("a", func() uint64 { o.add("b", &answered{}); return 0 }) != first {
		t.Error("not repeated")
	}
}

// TestAskedInBufferedMode: the proxy sends a whole body before trailers that are still to come. It is compared.
func TestAskedInBufferedMode(t *testing.T) {
	seed := maphash.MakeSeed()
	digest := func(body string) uint64 {
		s := &stream{cfg: &Config{MaxParseBytes: 10}, requestMode: buffered, phase: collect, replyPlace: inBody}
		if e := s.requestBody(&extprocv3.HttpBody{Body: []byte(body)}); !e.Ask || s.ended {
			t.Fatalf("%+v", e)
		}
		return s.digest(seed, "")
	}
	if first, again := digest("a"), digest("a"); first != again || first == digest("b") {
		t.Error("equal bodies have different digests, or other bodies the same")
	}
}

// TestFirstStreamEndsFirst: a repeated decision stays usable when the stream that it was made for has ended.
func TestFirstStreamEndsFirst(t *testing.T) {
	b := newBench(t, Config{DecisionHeaders: true})
	ctx, leave := context.WithCancel(t.Context())
	var inner *extproctest.Outcome
	b.Do(ctx, &extproctest.Request{Header: chat, Body: [][]byte{[]byte(chatBody)},
		Upstream: func(first *extproctest.Routed) extproctest.Response {
			var err error
			inner, err = b.Do(t.Context(), &extproctest.Request{Header: again(chat, first),
				Body: [][]byte{[]byte(chatBody)}, Upstream: func(*extproctest.Routed) extproctest.Response {
					leave()
					for deadline := time.Now().Add(30 * time.Second); b.server.Streams() > 1; {
						if <-time.After(time.Millisecond); time.Now().After(deadline) {
							t.Fatal("the first stream does not end")
						}
					}
					return response("x")(nil)
				}})
			if err != nil {
				t.Error(err)
			}
			return response("x")(nil)
		}})
	if inner == nil || inner.Set[workerHeaderShown] == "" || string(inner.Body) != "x" {
		t.Errorf("%+v", inner)
	}
	if r, _ := b.requests(t); r != 1 || b.book.Len() != 0 || len(b.server.open.byName) != 0 {
		t.Errorf("%v requests, %d bookings", r, b.book.Len())
	}
}
