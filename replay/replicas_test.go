package replay

import (
	"bytes"
	"testing"
	"time"

	"kvepp/scoring"
)

// replicated replays generated traffic with several replicas.
func replicated(t *testing.T, kind string, policy scoring.Policy, change func(*Config)) *Report {
	t.Helper()
	var trace bytes.Buffer
	if err := Generate(&trace, kind, 400, 40, 64, 1); err != nil {
		t.Fatal(err)
	}
	c := Config{Workers: 8, Engine: DefaultEngineConfig(), Scoring: scoring.DefaultConfig(), ArrivalSpeed: 1, Seed: 1,
		SessionTTL: time.Minute}
	c.Scoring.Policy = policy
	change(&c)
	reader, err := NewReader("trace", &trace, MooncakeDelta, ReaderOptions{BlockSize: c.Engine.BlockSize,
		TraceBlockSize: 64})
	if err != nil {
		t.Fatal(err)
	}
	report, err := Run(t.Context(), c, reader.Next, nil)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// Replicas that know of each other at once choose as one replica does. With a delay they choose otherwise, and without
// sharing they lose sessions: a conversation is bound at each replica anew.
func TestReplicasWithoutDelayEqualOne(t *testing.T) {
	one := replicated(t, "chat", scoring.Dynamo, func(*Config) {})
	at := func(change func(*Config)) *Report {
		return replicated(t, "chat", scoring.Dynamo, func(c *Config) { c.Replicas = 3; change(c) })
	}
	atOnce := at(func(*Config) {})
	if atOnce.CachedTokens != one.CachedTokens || atOnce.TTFT != one.TTFT || atOnce.E2E != one.E2E {
		t.Errorf("without delay: %d cached tokens, TTFT %v; one replica has %d, %v",
			atOnce.CachedTokens, atOnce.TTFT.Mean, one.CachedTokens, one.TTFT.Mean)
	}
	if atOnce.Sessions.New != one.Sessions.New || atOnce.Sessions.Kept != one.Sessions.Kept {
		t.Errorf("without delay: %+v, one replica has %+v", atOnce.Sessions, one.Sessions)
	}
	if late := at(func(c *Config) { c.ReplicaDelay = 20 * time.Millisecond }); late.TTFT == one.TTFT {
		t.Error("a delay changes nothing")
	}
	unshared := at(func(c *Config) { c.Unshared = true })
	if unshared.Sessions.New <= one.Sessions.New || unshared.Completed != one.Completed {
		t.Errorf("without sharing: %+v, %d completed; one replica has %+v, %d",
			unshared.Sessions, unshared.Completed, one.Sessions, one.Completed)
	}
}

// The policy time loses little by the delay that docs/replicas.md measured, and more without sharing, on prompts that
// share nothing.
func TestSharingPays(t *testing.T) {
	run := func(change func(*Config)) float64 {
		return replicated(t, "none", scoring.Time, func(c *Config) { c.SessionTTL = 0; change(c) }).TTFT.Mean
	}
	one := run(func(*Config) {})
	shared := run(func(c *Config) { c.Replicas, c.ReplicaDelay = 4, 350*time.Microsecond })
	unshared := run(func(c *Config) { c.Replicas, c.Unshared = 4, true })
	if !(shared < unshared) || shared > 1.03*one {
		t.Errorf("mean TTFT %v s of one, %v s shared, %v s unshared", one, shared, unshared)
	}
}
