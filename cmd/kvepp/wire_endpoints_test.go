package main

import "testing"

// Cache salts in the events of stock engines are the clients' own, unless kvepp marks them.
func TestWhoMarksSalts(t *testing.T) {
	for _, c := range []struct {
		flags    []string
		unmarked bool
	}{
		{[]string{"--engine=vllm"}, true},
		{[]string{"--engine=sglang"}, true},
		{[]string{"--engine=vllm", "--tenant-cache-salt"}, false},
		{[]string{"--engine=dynamo"}, false},
	} {
		if s := serveHere(t, threeWorkers, c.flags...); s.options.feed.UnmarkedSalts != c.unmarked {
			t.Errorf("%q: unmarked %v", c.flags, s.options.feed.UnmarkedSalts)
		}
	}
}
