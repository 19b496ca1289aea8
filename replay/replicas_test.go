package replay

import (
	"bytes"
	"fmt"
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

// The policy time loses by delay and more without sharing, on prompts that share nothing.
func TestSharingPays(t *testing.T) {
	run := func(change func(*Config)) float64 {
		return replicated(t, "none", scoring.Time, func(c *Config) { c.SessionTTL = 0; change(c) }).TTFT.Mean
	}
	one := run(func(*Config) {})
	shared := run(func(c *Config) { c.Replicas, c.ReplicaDelay = 4, 2*time.Millisecond })
	unshared := run(func(c *Config) { c.Replicas, c.Unshared = 4, true })
	if !(shared < unshared) || shared > 1.05*one {
		t.Errorf("mean TTFT %v s of one, %v s shared, %v s unshared", one, shared, unshared)
	}
}

// Of three requests of one moment, more go to idle workers of their own if the replicas know of each other soon enough
// for requests to settle.
func TestRequestsOfOneMomentSettle(t *testing.T) {
	var trace bytes.Buffer
	hash := 0
	for round := range 100 {
		for range 3 {
			fmt.Fprintf(&trace, `{"timestamp": %d, "input_length": 1280, "output_length": 2, "hash_ids": [`,
				5000*round)
			for range 19 {
				fmt.Fprintf(&trace, "%d, ", hash)
				hash++
			}
			fmt.Fprintf(&trace, "%d]}\n", hash)
			hash++
		}
	}
	mean := func(change func(*Config)) float64 {
		c := Config{Workers: 4, Engine: DefaultEngineConfig(), Scoring: scoring.DefaultConfig(), ArrivalSpeed: 1,
			Seed: 1}
		c.Scoring.Policy = scoring.Time
		change(&c)
		reader, err := NewReader("trace", bytes.NewReader(trace.Bytes()), Mooncake,
			ReaderOptions{BlockSize: c.Engine.BlockSize, TraceBlockSize: 64})
		if err != nil {
			t.Fatal(err)
		}
		report, err := Run(t.Context(), c, reader.Next, nil)
		if err != nil {
			t.Fatal(err)
		}
		return report.TTFT.Mean
	}
	one := mean(func(*Config) {})
	four := func(delay time.Duration) float64 {
		return mean(func(c *Config) { c.Replicas, c.ReplicaDelay = 4, delay })
	}
	soon, late := four(time.Millisecond), four(4*time.Millisecond)
	never := mean(func(c *Config) { c.Replicas, c.ReplicaDelay, c.NeverSettle = 4, time.Millisecond, true })
	unshared := mean(func(c *Config) { c.Replicas, c.Unshared = 4, true })
	if lost := late - one; soon-one > lost/2 || lost < 0.1*one || never-one < lost/2 || unshared-one < 0.1*one {
		t.Errorf("mean TTFT %v s of one replica; of four %v s if they know of bookings soon, %v s if late, %v s if "+
			"they never settle, and %v s if they share nothing", one, soon, late, never, unshared)
	}
}
