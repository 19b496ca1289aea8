package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestCheckPeer: without its program a peer ends the run with what to do; with it, its systems play beside the others.
func TestCheckPeer(t *testing.T) {
	before := slices.Clone(systems)
	defer func() { systems = before }()
	program := filepath.Join(t.TempDir(), "epp")
	if err := os.WriteFile(program, nil, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o    options
		want string // of the error
	}{
		{options{peer: "llm-d"}, "LLMD_EPP=FILE"},
		{options{peer: "llm-d", program: program + "-missing"}, "build ./cmd/epp"},
		{options{peer: "gaie"}, "-program"},
		{options{peer: "other", program: program}, "must be llm-d or gaie"},
	} {
		if err := c.o.checkPeer(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.o, err, c.want)
		}
	}
	o := options{peer: "llm-d", program: program, seeds: 1}
	if err := o.checkPeer(); err != nil {
		t.Fatal(err)
	}
	if err := o.check(nil); err != nil {
		t.Fatal(err)
	}
	for i := range scenarios {
		var names []string
		for _, sys := range o.playing(&scenarios[i]) {
			names = append(names, sys.name)
		}
		peers := slices.Contains(names, "llm-d approx") && slices.Contains(names, "llm-d precise")
		if !slices.Contains(names, "kvepp text") || peers != (scenarios[i].later == 0) {
			t.Errorf("%s is played by %v", scenarios[i].name, names)
		}
	}
}

func TestLargest(t *testing.T) {
	m := map[string]float64{`inference_pool_ready_pods{name="a"}`: 3, `inference_pool_ready_pods{name="b"}`: 4,
		"not_ready_pods_x": 9, "other": 7}
	if n := largest(m, "pool_ready_pods", "pool_ready_endpoints"); n != 4 {
		t.Errorf("%v", n)
	}
	if n := largest(m, admissions); n != 0 {
		t.Errorf("%v of a counter that is not there", n)
	}
}

func TestTicksOf(t *testing.T) {
	for range 50_000_000 {
		if ticksOf(os.Getpid()) > 0 {
			break
		}
	}
	if own, none := ticksOf(os.Getpid()), ticksOf(0); own <= 0 || none != 0 {
		t.Errorf("%v of this process, %v of none", own, none)
	}
}
