package vllm

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

// testCheck: `kvepp check` reports no problem with a whole vLLM, runs all its checks, and predicts conversations
// exactly. It reports a template that is not vLLM's.
func testCheck(b *bench) {
	t := b.t
	check := func(flags ...string) (string, error) {
		args := append(append([]string{"check", "--wait=2m", "--engine=vllm"}, b.stack.EndpointFlags()...), flags...)
		out, err := exec.CommandContext(t.Context(), "../../bin/kvepp", args...).Output()
		t.Logf("kvepp check %s: %v\n%s", strings.Join(flags, " "), err, out)
		return string(out), err
	}
	out, err := check("--probe", "--conversations=8")
	if err != nil {
		t.Errorf("kvepp check failed on a correct setup: %v", err)
	}
	for _, says := range []string{"vLLM answers", "announces blocks", "32 tokens, as in the events",
		"prefix caching  ok",
		"ids of a text equal the engine's", "ids of a chat equal the engine's",
		"the second time, as predicted"} {
		if !strings.Contains(out, says) {
			t.Errorf("nowhere %q", says)
		}
	}
	if !regexp.MustCompile(`vllm/0 +40 +\d+ +[1-9]\d* +[1-9]\d* +\d+\.\d % +ok`).MatchString(out) {
		t.Error("no line about 40 requests of conversations")
	}
	template := filepath.Join(t.TempDir(), "template.jinja")
	if err := os.WriteFile(template, []byte("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"),
		0o600); err != nil {
		t.Fatal(err)
	}
	out, err = check("--chat-template=" + template)
	if err == nil || !strings.Contains(out, "ids of a chat differ from the engine's") {
		t.Errorf("another template: %v", err)
	}
}
