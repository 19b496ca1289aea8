package parity

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"kvepp/prompt"
)

// TestOverlayArguments: the arguments of vLLM in overlays/vllm exist in the version of its image: each flag among those
// that vLLM's command line defines, and each field of --kv-events-config in its class.
func TestOverlayArguments(t *testing.T) {
	if testing.Short() {
		t.Skip("needs vLLM's Python files: make parity")
	}
	text, err := os.ReadFile("../../manifests/kustomize/overlays/vllm/engine.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var deployment struct {
		Spec struct {
			Template struct {
				Spec struct {
					Containers []struct {
						Image string
						Args  []string
					}
				}
			}
		}
	}
	if err := yaml.Unmarshal(text, &deployment); err != nil {
		t.Fatal(err)
	}
	container := deployment.Spec.Template.Spec.Containers[0]
	version := regexp.MustCompile(`^vllm/vllm-openai:v([0-9.]+)@`).FindStringSubmatch(container.Image)
	if version == nil {
		t.Fatalf("the image %q has no version", container.Image)
	}
	_, sources := oracle(t, prompt.VLLM, version[1])
	defined := source(t, sources, "vllm/engine/arg_utils.py") +
		source(t, sources, "vllm/entrypoints/launchers/cli_args.py")
	flags := 0
	for _, a := range container.Args {
		flag, value, _ := strings.Cut(a, "=")
		name, ok := strings.CutPrefix(flag, "--")
		if !ok {
			continue
		}
		flags++
		// A flag is defined by its name, or by a field of a class whose fields are flags.
		field := regexp.MustCompile(`(?m)^    ` + strings.ReplaceAll(name, "-", "_") + `: `)
		if !strings.Contains(defined, `"`+flag+`"`) && !field.MatchString(defined) {
			t.Errorf("vLLM %s has no flag %s", version[1], flag)
		}
		if name == "kv-events-config" {
			eventFields(t, value, source(t, sources, "vllm/config/kv_events.py"))
		}
	}
	if flags < 4 {
		t.Errorf("%d flags in %q", flags, container.Args)
	}
}

// eventFields checks that each field of a KV events configuration is one of the class in config.
func eventFields(t *testing.T, value, config string) {
	t.Helper()
	var fields map[string]any
	if err := json.Unmarshal([]byte(value), &fields); err != nil {
		t.Fatalf("--kv-events-config: %v", err)
	}
	for name := range fields {
		if !regexp.MustCompile(`(?m)^    ` + name + `: `).MatchString(config) {
			t.Errorf("--kv-events-config: KVEventsConfig has no field %s", name)
		}
	}
}

// source returns a file of an engine.
func source(t *testing.T, sources, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(sources, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
