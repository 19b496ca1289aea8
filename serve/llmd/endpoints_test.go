package llmd

import (
	"strings"
	"testing"
)

func TestEndpoints(t *testing.T) {
	const text = `endpoints:
- {name: a, namespace: ns, address: 10.0.0.1, port: "8000"}
- {name: b, address: 10.0.0.2, port: "8000", labels: {llm-d.ai/role: prefill}}
- {name: c, address: 10.0.0.3, port: "8000", labels: {llm-d.ai/role: decode}}
- {name: d, address: 10.0.0.4, port: "8000", labels: {llm-d.ai/role: both}}
- {name: e, address: 10.0.0.5, port: "8000", labels: {llm-d.ai/role: encode}}
- {name: a, address: 10.0.0.6, port: "8000"}
- {name: f, address: host, port: "8000"}
- {name: g, address: 10.0.0.7, port: "0"}
`
	file, skipped, err := Endpoints([]byte(text), nil)
	var got []string
	for _, line := range strings.Split(string(file), "\n") {
		if _, value, found := strings.Cut(line, ": "); found {
			got = append(got, value)
		}
	}
	want := "a 10.0.0.1:8000 aggregated b 10.0.0.2:8000 prefill c 10.0.0.3:8000 decode d 10.0.0.4:8000 aggregated"
	if err != nil || strings.Join(got, " ") != want || len(skipped) != 3 || !strings.HasPrefix(skipped[0], "line 7: ") {
		t.Errorf("%q, %q, %v", got, skipped, err)
	}
	if _, _, err := Endpoints([]byte("endpoints:\n- {name: a, port: 8000}\n"), nil); err == nil ||
		!strings.Contains(err.Error(), "line 2: endpoints[0].port") {
		t.Errorf("a port that is no text: %v", err)
	}
	if file, _, err := Endpoints(nil, nil); err != nil || string(file) != "endpoints: []\n" {
		t.Errorf("an empty file: %q, %v", file, err)
	}
}
