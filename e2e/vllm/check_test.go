package vllm

import (
	"os/exec"
	"strings"
)

// testCheck: `kvepp check` finds nothing wrong with a whole vLLM, and asks it all that it can.
func testCheck(b *bench) {
	t := b.t
	out, err := exec.CommandContext(t.Context(), "../../bin/kvepp", append(append([]string{"check"}, b.stack.EndpointFlags()...), "--engine=vllm", "--probe")...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, says := range []string{"vLLM answers", "announces blocks", "32 tokens, by the events", "prefix caching  ok", "ids of a text are the engine's", "the second time"} {
		if !strings.Contains(string(out), says) {
			t.Errorf("nowhere %q in\n%s", says, out)
		}
	}
}
