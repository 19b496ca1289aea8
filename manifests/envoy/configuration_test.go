package envoy

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kvepp/prompt"
)

const someEndpoints = `endpoints:
- {name: a, address: "10.0.0.1:8000"}
- {name: b, address: "10.0.0.1:8000", dataParallelStartRank: 1}
- {name: c, address: "[fd00::1]:8000"}
- {name: d, role: prefill}
`

// TestEnvoyAnchors: each line that kvepp envoy replaces is in both configurations once.
func TestEnvoyAnchors(t *testing.T) {
	for name, text := range map[string]string{
		"override-host": OverrideHost, "stock-engines": StockEngines, "shadow": Shadow,
	} {
		for _, anchor := range []string{adminLines, listenerPort, poolHead, poolAddresses, pickerHead, pickerAddress,
			tlsReason + tlsLines} {
			if n := strings.Count(text, anchor); n != 1 {
				t.Errorf("%s.yaml has %d times:\n%s", name, n, anchor)
			}
		}
	}
}

// TestEnvoyEngines: the flag knows the engines of package prompt.
func TestEnvoyEngines(t *testing.T) {
	if text := fmt.Sprint(engines); text != fmt.Sprint(prompt.Engines) {
		t.Errorf("%s, but kvepp knows %v", text, prompt.Engines)
	}
}

// TestEnvoyConfiguration: the configuration has exactly the endpoints' addresses, and what the flags say.
func TestEnvoyConfiguration(t *testing.T) {
	file := filepath.Join(t.TempDir(), "endpoints.yaml")
	print := func(endpoints string, args ...string) (text, errs string, status int) {
		if err := os.WriteFile(file, []byte(endpoints), 0o600); err != nil {
			t.Fatal(err)
		}
		var c Config
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		c.AddFlags(f)
		if err := f.Parse(append(args, "--endpoints", file)); err != nil {
			t.Fatal(err)
		}
		if err := c.Validate(); err != nil {
			return "", err.Error(), 2
		}
		var out bytes.Buffer
		if err := c.Run(&out); err != nil {
			return "", err.Error(), 1
		}
		return out.String(), "", 0
	}
	for _, c := range []struct {
		endpoints  string
		args       []string
		has, lacks []string
	}{
		// Without --engine the endpoints say what the engine is.
		{"endpoints:\n- {name: a, address: '10.0.0.1:8000'}\n", nil, []string{"previous_hosts"}, nil},
		{"endpoints:\n- {name: a, address: '10.0.0.1:8000', dynamo: d/backend/generate}\n", nil, nil,
			[]string{"previous_hosts"}},
		{someEndpoints, []string{"--engine=dynamo"},
			[]string{`{address: "10.0.0.1", port_value: 8000}`, `{address: "fd00::1", port_value: 8000}`,
				`{address: "127.0.0.1", port_value: 9002}`, "port_value: 10080", "19900", "self-signed",
				"for 2 endpoints"},
			[]string{"8001", "8002", "previous_hosts", "STRICT_DNS", "Remove this", "To adapt it"}},
		{someEndpoints, []string{"--engine=vllm", "--listen-port=8080", "--envoy-admin-port=0",
			"--kvepp-address=kvepp:9002",
			"--secure-serving=false"},
			[]string{"previous_hosts", "port_value: 8080", "STRICT_DNS", `{address: "kvepp", port_value: 9002}`,
				"--fallback-endpoints 2"},
			[]string{"admin:", "UpstreamTlsContext", "self-signed"}},
		{"endpoints:\n- {name: a, address: 'vllm-0:8000'}\n", []string{"--engine=sglang", "--dns-lookup-family=ALL",
			"--engine-tls", "--engine-ca=/ca.pem"},
			[]string{"dns_lookup_family: ALL", `{address: "vllm-0", port_value: 8000}`, `filename: "/ca.pem"`}, nil},
		{someEndpoints, []string{"--shadow"}, []string{"observability_mode: true", "upstream.address", "ROUND_ROBIN",
			`{address: "10.0.0.1", port_value: 8000}`, "kvepp serve with --shadow"}, []string{"override_host", "8001"}},
	} {
		text, errs, status := print(c.endpoints, c.args...)
		if status != 0 {
			t.Fatalf("%v: status %d, %s", c.args, status, errs)
		}
		var parsed any
		if err := yaml.Unmarshal([]byte(text), &parsed); err != nil {
			t.Errorf("%v: %v", c.args, err)
		}
		for _, want := range c.has {
			if !strings.Contains(text, want) {
				t.Errorf("%v: %q is missing in\n%s", c.args, want, text)
			}
		}
		for _, bad := range c.lacks {
			if strings.Contains(text, bad) {
				t.Errorf("%v: has %q", c.args, bad)
			}
		}
		if n := strings.Count(text, "10.0.0.1"); n > 1 {
			t.Errorf("%v: an address stands %d times", c.args, n)
		}
	}
	for _, c := range []struct {
		endpoints, want string
		status          int
		args            []string
	}{
		{"endpoints: 5\n", "line 1", 1, nil},
		{"endpoints:\n- {name: d, role: prefill}\n", "no endpoint has an address", 1, nil},
		{someEndpoints, "give one of vllm, ", 2, []string{"--engine=vlm"}},
		{someEndpoints, "--kvepp-address", 2, []string{"--kvepp-address=9002"}},
		{someEndpoints, "give --engine-tls too", 2, []string{"--engine-ca=/x"}},
		{someEndpoints, "--dns-lookup-family V4", 2, []string{"--dns-lookup-family=V4"}},
	} {
		if _, errs, status := print(c.endpoints, c.args...); status != c.status || !strings.Contains(errs, c.want) {
			t.Errorf("%v: status %d, %s; want %d, %s", c.args, status, errs, c.status, c.want)
		}
	}
}
