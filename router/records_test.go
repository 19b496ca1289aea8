package router

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// ended routes a request and ends it with a response.
func (h *house) ended(id string, req *Request, a Response) {
	h.t.Helper()
	req.ID = id
	r := h.route(req)
	r.Free()
	r.Ended(a)
}

// TestOutcomes: a record has what became of its request, and queries select by it.
func TestOutcomes(t *testing.T) {
	h, _ := keeping(t, 10, workers(2)...)
	h.warm("w1", 0, tokens(0, 8), blocksOfFour)
	h.ended("right", completion("m", tokens(0, 10)),
		Response{Status: "200", Complete: true, Tokens: 5, CachedTokens: 8})
	h.ended("wrong", completion("m", tokens(0, 10)), Response{Status: "200", Complete: true, CachedTokens: 4})
	h.ended("failed", completion("m", tokens(0, 10)), Response{Status: "503", Complete: true, CachedTokens: -1})
	cold := completion("m", tokens(500, 10))
	cold.Allowed = func(address string) bool { return address == "10.0.0.1:8000" }
	h.ended("cold", cold, Response{Status: "200", CachedTokens: -1})
	running := completion("m", tokens(0, 10))
	running.ID = "running"
	defer h.route(running).Free()
	if _, err := h.Route(t.Context(), &Request{ID: "refused", Path: "/v1/completions",
		Body: []byte(`{"model":"other","prompt":[1]}`)}); err == nil {
		t.Fatal("another model was routed")
	}
	for _, c := range []struct {
		query Query
		want  string
	}{
		{Query{}, "refused running cold failed wrong right"},
		{Query{Wrong: true}, "wrong"},
		{Query{Cold: true}, "cold"},
		{Query{Status: "5xx"}, "failed"},
		{Query{Status: "200"}, "cold wrong right"},
		{Query{Worker: "w1", Status: "2xx", Model: "m", Reason: ReasonKV}, "wrong right"},
		{Query{Worker: "w1/0", Wrong: true}, "wrong"},
		{Query{Worker: "w1/1"}, ""},
		{Query{Slow: time.Nanosecond}, "cold failed wrong right"},
		{Query{Slow: time.Hour}, ""},
		{Query{RequestID: "right"}, "right"},
		{Query{Session: "moved"}, ""},
	} {
		var got []string
		for _, r := range h.Records(10, c.query) {
			got = append(got, r.RequestID)
		}
		if strings.Join(got, " ") != c.want {
			t.Errorf("%+v selects %v, want %s", c.query, got, c.want)
		}
	}
	o := h.Records(1, Query{RequestID: "right"})[0].Outcome
	if o == nil || o.Status != "200" || !o.Complete || o.Tokens != 5 || o.CachedTokens != 8 || o.Duration <= 0 {
		t.Errorf("outcome: %+v", o)
	}
	if o := h.Records(1, Query{RequestID: "running"})[0].Outcome; o != nil {
		t.Errorf("outcome of a running request: %+v", o)
	}
}

// TestRecordsAreBoundedInBytes: many candidates leave room for fewer records.
func TestRecordsAreBoundedInBytes(t *testing.T) {
	h, _ := keeping(t, 1000, workers(1000)...)
	for i := range 300 {
		h.ended(fmt.Sprint(i), completion("m", tokens(0, 10)), Response{Status: "200"})
	}
	all := h.Records(1000, Query{})
	if len(all) < 20 || len(all) > 200 || all[0].RequestID != "299" || h.records.bytes > maxRecordBytes {
		t.Errorf("%d records of %d bytes, the latest %s", len(all), h.records.bytes, all[0].RequestID)
	}
}

// TestFollow: a follower gets each selected record once, at the request's end, and learns how many it missed.
func TestFollow(t *testing.T) {
	h, _ := keeping(t, 5, workers(2)...)
	all, cold := h.Follow(Query{}, 0), h.Follow(Query{Status: "5xx"}, 0)
	h.ended("a", completion("m", tokens(0, 10)), Response{Status: "200"})
	h.ended("b", completion("m", tokens(0, 10)), Response{Status: "500"})
	if a, b := <-all.C, <-all.C; a.RequestID != "a" || b.RequestID != "b" || a.Outcome == nil {
		t.Errorf("followed %+v and %+v", a, b)
	}
	if r := <-cold.C; r.RequestID != "b" || len(cold.C) > 0 {
		t.Errorf("followed %+v and %d more", r, len(cold.C))
	}
	cold.Close()
	for i := range followerQueue + 7 {
		h.ended(fmt.Sprint(i), completion("m", tokens(0, 10)), Response{Status: "500"})
	}
	if n := all.Missed(); n != 7 || all.Missed() != 0 || len(cold.C) > 0 {
		t.Errorf("missed %d, want 7; the closed follower has %d", n, len(cold.C))
	}
	for range MaxFollowers - 1 {
		if f := h.Follow(Query{}, 0); f == nil {
			t.Fatal("a follower is refused")
		} else {
			defer f.Close()
		}
	}
	if h.Follow(Query{}, 0) != nil {
		t.Errorf("more than %d followers", MaxFollowers)
	}
}
