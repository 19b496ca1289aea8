package parity

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvepp/kvblock"
	"kvepp/prompt"
	"kvepp/prompt/body"
)

// TestMediaProcessors runs vLLM's own media processors on prompts with images. For every image, vLLM's ids begin with
// those that kvepp calls certain. It needs a whole vLLM: make test-vllm.
func TestMediaProcessors(t *testing.T) {
	if testing.Short() {
		t.Log("make test-vllm runs vLLM's media processors")
		return
	}
	for architecture, marks := range map[string][]string{
		"LlavaForConditionalGeneration":   {"<image>"},
		"Qwen2VLForConditionalGeneration": {"<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"},
	} {
		folder := mediaFolder(t, architecture, marks)
		template := filepath.Join(t.TempDir(), "template.jinja")
		if err := os.WriteFile(template, []byte(stringsOfMedia), 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := prompt.Load(folder, prompt.Options{ChatTemplate: template})
		if err != nil {
			t.Fatal(err)
		}
		var prompts []prompt.Prompt
		var input bytes.Buffer
		for i, before := range []string{"", "Hello", "Hello there, ", "日本語の文 ", strings.Repeat("A longer text. ", 40)} {
			const image = `{"type":"image_url","image_url":{"url":"http://h/i"}}`
			turns := fmt.Sprintf(
				`{"role":"system","content":%q},{"role":"user","content":[{"type":"text","text":"what is"},%s,`+
					`{"type":"text","text":"this?"}]}`,
				before,
				image,
			)
			images := 1
			if i%2 == 1 {
				turns += `,{"role":"assistant","content":"A cat."},{"role":"user","content":[` + image + `]}`
				images++
			}
			request, err := body.ParseRequest("/v1/chat/completions", []byte(`{"model":"m","messages":[`+turns+`]}`))
			if err != nil {
				t.Fatal(err)
			}
			prompted, err := m.Tokenize(t.Context(), request)
			if err != nil {
				t.Fatal(err)
			}
			prompts = append(prompts, prompted[0])
			line, err := json.Marshal(map[string]any{"ids": prompted[0].IDs, "images": images})
			if err != nil {
				t.Fatal(err)
			}
			input.Write(append(line, '\n'))
		}
		cmd := exec.Command(filepath.Join(environment(t, "KVEPP_VLLM"), "bin/python"), "media.py", folder, architecture)
		cmd.Env = append(os.Environ(), "PYTHONPATH="+environment(t, "KVEPP_VLLM_MEDIA"))
		var stderr bytes.Buffer
		cmd.Stdin, cmd.Stderr = &input, &stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("%v: %v\n%s", cmd.Args, err, &stderr)
		}
		compared := 0
		for lines := bufio.NewScanner(bytes.NewReader(out)); lines.Scan(); {
			response, ok := strings.CutPrefix(lines.Text(), "ids ")
			if !ok {
				continue // vLLM's other output
			}
			var ids []kvblock.Token
			if err := json.Unmarshal([]byte(response), &ids); err != nil {
				t.Fatal(err)
			}
			p := prompts[compared]
			compared++
			if p.Certain == 0 || p.Certain >= len(p.IDs) || len(ids) <= len(p.IDs) ||
				!slices.Equal(ids[:p.Certain], p.IDs[:p.Certain]) {
				t.Errorf("%s: %d of %v are certain, and vLLM computes %v", architecture, p.Certain, p.IDs, ids)
			}
		}
		if compared != len(prompts) {
			t.Errorf("%s: %d answers to %d prompts", architecture, compared, len(prompts))
		}
		t.Logf("%s: %d prompts begin as vLLM's processor has them", architecture, compared)
	}
}
