package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

func TestCalledAsPicker(t *testing.T) {
	for _, c := range []struct{ argv, want []string }{
		{[]string{"/app/epp", "", "--pool-name", "p"}, []string{"epp", "", "--pool-name", "p"}},
		{[]string{"/app/epp"}, []string{"epp"}},
		{[]string{"/kvepp", "--pool-name", "p"}, []string{"epp", "--pool-name", "p"}},
		{[]string{"/kvepp", "-v=2"}, []string{"epp", "-v=2"}},
		{[]string{"/bin/sleep", "15"}, []string{"sleep", "15"}},
		{[]string{"/kvepp", "--version"}, []string{"--version"}},
		{[]string{"kvepp", "--help"}, []string{"--help"}},
		{[]string{"kvepp", "serve", "--pool-name=p"}, []string{"serve", "--pool-name=p"}},
		{[]string{"kvepp"}, []string{}},
	} {
		if got := arguments(c.argv); !slices.Equal(got, c.want) {
			t.Errorf("%q: %q, want %q", c.argv, got, c.want)
		}
	}
	for args, want := range map[string]struct {
		status int
		says   string
	}{
		"sleep 0.001":      {0, ""},
		"sleep 1ms":        {0, ""},
		"sleep":            {2, "give one time"},
		"sleep -1":         {2, "give one time"},
		"epp --help":       {0, "--zap-encoder"},
		"epp --pool-nam=p": {2, "did you mean --pool-name?"},
		"epp --print-config --endpoints=e -v=5 x": {0, "log-level: debug"},
		"epp --drain-timeout=x":                   {2, "must be a duration"},
	} {
		var out bytes.Buffer
		if got := start(strings.Fields(args), nil, &out, &out, nil); got != want.status ||
			!strings.Contains(out.String(), want.says) {
			t.Errorf("%s: status %d\n%s", args, got, out.String())
		}
	}
	var out bytes.Buffer
	if start([]string{"epp"}, nil, &out, &out, []string{"KVEPP_GRPC_PROT=1"}) != 2 ||
		!strings.Contains(out.String(), "KVEPP_GRPC_PROT") {
		t.Errorf("a misspelt variable: %s", out.String())
	}
}

func TestExplainConfig(t *testing.T) {
	for file, want := range map[string]struct {
		status int
		says   []string
	}{
		"guide-precise": {0, []string{"index (precise-prefix-cache-producer): approximated --kv-events-port=5556",
			"ids (token-producer): maps to --pick-timeout=4s: token ids from http://localhost:8000"}},
		"guide-bands": {1, []string{"featureGates (flowControl): refused: ", "docs/overload-and-queue.md"}},
		"none":        {1, []string{"no such file"}},
	} {
		var out bytes.Buffer
		status := start([]string{"check", "--config-file", "../../serve/llmd/testdata/" + file + ".yaml"}, nil, &out,
			&out, nil)
		for _, says := range want.says {
			if status != want.status || !strings.Contains(out.String(), says) {
				t.Errorf("%s: status %d, want %q\n%s", file, status, says, out.String())
			}
		}
	}
}
