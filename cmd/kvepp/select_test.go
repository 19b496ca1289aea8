package main

import (
	"strings"
	"testing"
	"time"
)

func TestSelectFlags(t *testing.T) {
	for _, c := range []struct {
		args string
		env  string // NAME=VALUE
		want string // of the error; empty for none
	}{
		{"", "", ""},
		{"--port 1 --threads 2 --no-router-assume-kv-reuse", "", ""},
		{"", "KVEPP_SELECT_PORT=0", "--port"},
		{"", "DYN_ROUTER_TEMPERATURE=-1", "temperature"},
		{"--router-kv-overlap-score-credit 1", "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT=-1", ""},
		{"--selection-cache-ttl-secs 0", "", "--selection-cache-ttl-secs"},
		{"--selection-cache-max-entries 0", "", "--selection-cache-max-entries"},
		{"--active-request-expiry-secs 0", "", "--active-request-expiry-secs"},
		{"--active-request-expiry-secs 18446744073709551615", "", "--active-request-expiry-secs"},
		{"--router-ttl-secs 0", "", "--router-ttl-secs"},
		{"--index-max-bytes 1", "", "--index-max-bytes"},
		{"--router-tracking-hash keyed-xxh3-v1", "", "--router-tracking-hash"},
		{"--router-tracking-key-file f", "", "--router-tracking-key-file"},
		{"--replica-sync-port 1", "", "--replica-sync-port"},
		{"--replica-sync-peers tcp://a:1", "", "--replica-sync-peers"},
		{"--indexer-peers http://a", "", "--indexer-peers"},
		{"--session-affinity-ttl-secs 60", "", ""},
		{"--session-affinity-ttl-secs 0", "", "--session-affinity-ttl-secs"},
		{"--session-affinity-ttl-secs 31536001", "", "--session-affinity-ttl-secs"},
		{"more", "", "unexpected argument"},
	} {
		var o selectOptions
		err := parseSelect(&o, strings.Fields(c.args), func(name string) string {
			if env, value, _ := strings.Cut(c.env, "="); env == name {
				return value
			}
			return ""
		})
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%q with %q: %v, want %q", c.args, c.env, err, c.want)
		}
	}
	var o selectOptions
	if err := parseSelect(&o, strings.Fields("--router-kv-overlap-score-credit 0 "+
		"--router-prefill-load-scale 0 --no-router-kv-events"),
		func(name string) string {
			return map[string]string{"DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "7", "DYN_ROUTER_TTL_SECS": "2.5"}[name]
		}); err != nil {
		t.Fatal(err)
	}
	if s := o.selector; s.Events || s.PredictTTL != 2500*time.Millisecond || s.Expiry() != 7*time.Second ||
		s.PendingTTL != 2*time.Minute ||
		s.Scoring.OverlapScoreCredit != 0 || s.Scoring.PrefillLoadScale != 0 ||
		s.Scoring.HostCacheHitWeight != 0.75 {
		t.Errorf("the settings are %+v", s)
	}
}
