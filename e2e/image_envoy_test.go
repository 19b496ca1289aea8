package e2e

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"kvepp/test/harness/parts"
	"kvepp/test/harness/stack"
)

// imageEnvoy returns the folder of the Envoy with the minor version of the image in chart, overlays and
// examples/compose. The other tests run a newer one, because no digest of its image is confirmed (docs/security.md).
func imageEnvoy(t *testing.T) string {
	t.Helper()
	folder, err := parts.Folder("KVEPP_IMAGE_ENVOY", "envoy")
	if err != nil {
		t.Fatal(err)
	}
	return folder
}

// bothEnvoys runs a test with the Envoy of most tests (envoyTools is empty) and with that of the manifests' image.
func bothEnvoys(t *testing.T, test func(t *testing.T, envoyTools string)) {
	t.Run("newest", func(t *testing.T) { test(t, "") })
	t.Run("image", func(t *testing.T) { test(t, imageEnvoy(t)) })
}

// TestImageEnvoyVersion: the Envoy of the tests of the image has the image's minor version.
func TestImageEnvoyVersion(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), filepath.Join(imageEnvoy(t), "bin/envoy"), "--version").Output()
	if err != nil {
		t.Fatal(err)
	}
	running := regexp.MustCompile(`/(\d+\.\d+)\.\d+/`).FindSubmatch(out)
	image := regexp.MustCompile(`:distroless-v(\d+\.\d+)\.\d+@`).FindStringSubmatch(composeServices(t)["envoy"].Image)
	if running == nil || image == nil || string(running[1]) != image[1] {
		t.Errorf("the Envoy of KVEPP_IMAGE_ENVOY is %sthe image is %q: update test/tools/images with the image",
			out, composeServices(t)["envoy"].Image)
	}
}

// TestImageEnvoy: with the Envoy of the manifests' image, the configurations of chart and kustomize and the one that
// `kvepp envoy` prints for Dynamo route a conversation to the engine that has its blocks. Names of Services are the
// local host's. TestCompose does the same with the one that `kvepp envoy` prints for vLLM.
func TestImageEnvoy(t *testing.T) {
	program := buildEngine(t)
	printed := filepath.Join(t.TempDir(), "envoy.yaml")
	endpoints := write(t, "endpoints.yaml", "endpoints:\n- {name: a, address: '127.0.0.1:8000'}\n")
	text, err := exec.CommandContext(t.Context(), "../bin/kvepp", "envoy", "--endpoints", endpoints,
		"--engine=dynamo").Output()
	if err != nil {
		t.Fatalf("kvepp envoy: %v", err)
	}
	if err := os.WriteFile(printed, text, 0o600); err != nil {
		t.Fatal(err)
	}
	folder, err := filepath.Abs("../manifests/envoy")
	if err != nil {
		t.Fatal(err)
	}
	manifest, err := filepath.Rel(folder, printed)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name, manifest string
		byName         []string // clusters that find their endpoints by name
		fallbacks      string
	}{
		{"chart", "../chart/envoy/stock-engines.yaml", []string{"pool", "kvepp"}, "2"},
		{"kustomize", "../kustomize/components/envoy/envoy-config.yaml", []string{"kvepp"}, "0"},
		{"printed", manifest, nil, "0"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var names []string
			engines := []*stack.Engine{standIn(t, program, "engine-a"), standIn(t, program, "engine-b")}
			s := start(t, stack.Config{Workers: -1, Engines: engines, EnvoyTools: imageEnvoy(t), Manifest: c.manifest,
				KveppFlags: []string{"--engine=vllm", "--decision-headers", "--fallback-endpoints=" + c.fallbacks},
				EditEnvoy: func(config any) {
					for _, cluster := range stack.At(config, "static_resources", "clusters").([]any) {
						if stack.At(cluster, "type") == "STRICT_DNS" {
							names = append(names, stack.At(cluster, "name").(string))
							byLocalName(cluster)
						}
					}
				}})
			if fmt.Sprint(names) != fmt.Sprint(c.byName) {
				t.Errorf("the clusters %v find endpoints by name, want %v", names, c.byName)
			}
			stays(t, s)
		})
	}
}

// byLocalName gives a cluster's endpoints the local host's name. The stack's servers have no IPv6.
func byLocalName(cluster any) {
	cluster.(map[string]any)["dns_lookup_family"] = "V4_ONLY"
	for _, e := range stack.At(cluster, "load_assignment", "endpoints", 0, "lb_endpoints").([]any) {
		stack.At(e, "endpoint", "address", "socket_address").(map[string]any)["address"] = "localhost"
	}
}

// stays checks that the engine that kvepp chose answers, with as many cached tokens as kvepp predicted, and that
// kvepp's own response to a bad request reaches the client.
func stays(t *testing.T, s *stack.Stack) {
	t.Helper()
	messages := conversation(t.Name(), 2)
	var a *stack.Response
	eventually(t, func() error {
		if a = chat(t, s.Envoy.URL, messages, true, nil); a.KveppCached < a.PromptTokens/2 {
			return fmt.Errorf("%d of %d tokens are predicted", a.KveppCached, a.PromptTokens)
		}
		return nil
	})
	if engine := a.Header.Get("x-engine"); engine+"/0" != a.Worker || a.Reason != "kv" ||
		a.CachedTokens != expect(a.KveppCached, a.PromptTokens) {
		t.Errorf("kvepp chose %s (%s), %q answered; %d cached tokens are predicted, %d reported", a.Worker, a.Reason,
			engine, a.KveppCached, a.CachedTokens)
	}
	if unknown := metric(t, s, `kvepp_served_total{outcome="unknown"}`); unknown != 0 {
		t.Errorf("%v requests were served by unknown endpoints", unknown)
	}
	refused, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+"/v1/chat/completions", nil, "no object")
	if err != nil || refused.Status != http.StatusBadRequest ||
		!strings.Contains(refused.Body, `"invalid_request_error"`) {
		t.Errorf("a body that is no object: %v %+v", err, refused)
	}
	allFreed(t, s)
}
