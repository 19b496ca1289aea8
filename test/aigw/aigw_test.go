// Package aigw tests kvepp behind Envoy AI Gateway: its standalone program, without Kubernetes (make e2e-aigw).
package aigw

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/parts"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

const (
	root       = "../.."
	gatewayURL = "http://127.0.0.1:36080"
	overlay    = root + "/manifests/kustomize/overlays/envoy-ai-gateway/"
)

func TestMain(m *testing.M) { os.Exit(parts.Run(m, "e2e-aigw", "KVEPP_AIGW")) }

// house is two engines and a kvepp for each of two pools.
type house struct {
	*testing.T
	folder string
	kvepp  map[string]*process.Process // by pool: "a", "b"
	ports  map[string]int              // of their metrics
}

func newHouse(t *testing.T) *house {
	h := &house{T: t, folder: t.TempDir(), kvepp: map[string]*process.Process{},
		ports: map[string]int{"a": 9090, "b": 9190}}
	engine, err := stack.BuildEngine(t.Context(), root, h.folder)
	h.must(err)
	for _, pool := range []string{"a", "b"} {
		endpoints := "endpoints:\n"
		for i := range 2 {
			e, err := stack.StartEngine(t.Context(), engine, h.folder, fmt.Sprintf("%s%d", pool, i),
				root+"/test/models/tiny-bytelevel", "-token-time", "10ms", "-prompt-token-time", "1us")
			h.must(err)
			t.Cleanup(e.Close)
			endpoints += e.Entry()
		}
		file := filepath.Join(h.folder, pool+".yaml")
		h.must(os.WriteFile(file, []byte(endpoints), 0o600))
		port := h.ports[pool]
		// The list of endpoints would fail every request here: kvepp has to notice that.
		p, err := process.Start(h.folder, "kvepp-"+pool, nil, root+"/bin/kvepp", "serve", "--endpoints", file,
			"--model", stack.Model+"="+root+"/test/models/tiny-bytelevel", "--grpc-port", fmt.Sprint(port-88),
			"--grpc-health-port", fmt.Sprint(port-87), "--metrics-port", fmt.Sprint(port), "--decision-headers",
			"--fallback-endpoints", "1", "--max-parse-bytes", "20000000", "--log-level", "debug")
		h.must(err)
		h.kvepp[pool] = p
		t.Cleanup(func() { h.end(p) })
		h.must(process.Up(t.Context(), "kvepp", func() error {
			m, err := h.metrics(pool)
			if err == nil && (m["kvepp_workers"] != 2 || m[`kvepp_subscriptions{state="connected"}`] != 2) {
				err = fmt.Errorf("%v workers, %v subscriptions", m["kvepp_workers"],
					m[`kvepp_subscriptions{state="connected"}`])
			}
			return err
		}, p))
	}
	return h
}

func (h *house) must(err error) {
	h.Helper()
	if err != nil {
		h.Fatal(err)
	}
}

func (h *house) end(p *process.Process) {
	p.Kill()
	if h.Failed() {
		h.Logf("last lines of %s:\n%s", p.Log, p.Tail(30))
	}
}

func (h *house) metrics(pool string) (map[string]float64, error) {
	url := fmt.Sprintf("http://127.0.0.1:%d/metrics", h.ports[pool])
	return stack.ReadMetrics(context.WithoutCancel(h.Context()), url)
}

// counted returns how many requests and decisions a pool's kvepp has counted when all requests have ended.
func (h *house) counted(pool string) (requests, decisions float64) {
	h.Helper()
	var m map[string]float64
	h.must(process.Until(h.Context(), func() (err error) {
		if m, err = h.metrics(pool); err == nil && m["kvepp_streams"] != 0 {
			err = fmt.Errorf("%v streams are open", m["kvepp_streams"])
		}
		return err
	}))
	for name, n := range m {
		switch {
		case strings.HasPrefix(name, "kvepp_requests_total{"):
			requests += n
		case strings.HasPrefix(name, "kvepp_decisions_total{"):
			decisions += n
		}
	}
	return requests, decisions
}

// counts checks that a pool's kvepp counts n requests for do.
func (h *house) counts(pool string, n int, do func()) {
	h.Helper()
	requests, decisions := h.counted(pool)
	do()
	if r, d := h.counted(pool); int(r-requests) != n || int(d-decisions) != n {
		h.Errorf("kvepp-%s counted %v requests and %v decisions for %d requests", pool, r-requests, d-decisions, n)
	}
}

// gateway starts Envoy AI Gateway with the files joined. inCluster: it treats HTTPRoutes as in a cluster.
func (h *house) gateway(inCluster bool, files ...string) *process.Process {
	var config []byte
	for _, file := range files {
		text, err := os.ReadFile(file)
		h.must(err)
		config = append(append(config, "\n---\n"...), text...)
	}
	home := h.TempDir()
	file := filepath.Join(home, "config.yaml")
	h.must(os.WriteFile(file, config, 0o600))
	bin := os.Getenv("KVEPP_AIGW")
	// The gateway runs this file as the Envoy that it would otherwise fetch.
	envoy := filepath.Join(home, "data/envoy-versions/1.38.1/bin/envoy")
	h.must(os.MkdirAll(filepath.Dir(envoy), 0o700))
	h.must(os.WriteFile(envoy, fmt.Appendf(nil, "#!/bin/sh\nexec %s/bin/envoy --base-id 5096 \"$@\"\n", bin), 0o700))
	p, err := process.Start(home, "aigw", []string{"HOME=" + home, "AIGW_CONFIG_HOME=" + home + "/config",
		"AIGW_DATA_HOME=" + home + "/data", "AIGW_STATE_HOME=" + home + "/state", "AIGW_RUNTIME_DIR=" + home + "/run",
		"AIGW_RUN_ID=test", fmt.Sprintf("AIGW_STANDALONE=%v", !inCluster)}, bin+"/aigw", "run", "--debug", file)
	h.must(err)
	h.Cleanup(func() {
		p.Stop() // which ends its Envoy
		h.end(p)
	})
	return p
}

// policy returns a file with the overlay's ClientTrafficPolicy: the first of its files, in a namespace, as kustomize
// patches it with the others.
func (h *house) policy(files ...string) string {
	policy := map[string]any{}
	for _, name := range files {
		text, err := os.ReadFile(overlay + name)
		h.must(err)
		var patch map[string]any
		h.must(yaml.Unmarshal(text, &patch))
		if policy["spec"] == nil {
			policy = patch
		} else {
			maps.Copy(policy["spec"].(map[string]any), patch["spec"].(map[string]any))
		}
	}
	policy["metadata"].(map[string]any)["namespace"] = "default"
	text, err := yaml.Marshal(policy)
	h.must(err)
	file := filepath.Join(h.TempDir(), "policy.yaml")
	h.must(os.WriteFile(file, text, 0o600))
	return file
}

// ready waits until the gateway answers a request for a host from an engine.
func (h *house) ready(p *process.Process, host string) {
	h.Helper()
	ctx, cancel := context.WithTimeout(h.Context(), 3*time.Minute)
	defer cancel()
	h.must(process.Up(ctx, "the gateway", func() error {
		r, err := post(ctx, host, chat("ready?"), nil)
		if err == nil && r.Status != http.StatusOK {
			err = fmt.Errorf("%d %s", r.Status, r.Body)
		}
		return err
	}, p))
}

func chat(text string) string {
	return fmt.Sprintf(`{"model":%q,"max_tokens":4,"messages":[{"role":"user","content":%q}]}`, stack.Model, text)
}

func post(ctx context.Context, host, body string, header http.Header) (*stack.Response, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, gatewayURL+"/v1/chat/completions",
		bytes.NewReader([]byte(body)))
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[k] = v
	}
	req.Host = host
	req.Header.Set("content-type", "application/json")
	return stack.Do(http.DefaultClient, req)
}

// served posts a chat and returns the response of the engine that kvepp named.
func (h *house) served(host, body string) *stack.Response {
	h.Helper()
	r, err := post(h.Context(), host, body, nil)
	h.must(err)
	if engine, _, _ := strings.Cut(r.Worker, "/"); r.Status != http.StatusOK || engine == "" ||
		r.Header.Get("x-engine") != engine {
		h.Fatalf("%d from %q, and kvepp named %q: %.200s", r.Status, r.Header.Get("x-engine"), r.Worker, r.Body)
	}
	return r
}

// streams checks that a response of two seconds arrives piece by piece.
func (h *house) streams(host string) {
	h.Helper()
	body := strings.Replace(chat("tell me"), `"max_tokens":4`, `"stream":true,"max_tokens":200`, 1)
	r := h.served(host, body)
	if !r.Finished || r.TTFT > r.LastToken/5 {
		h.Errorf("%s: the first token came after %v of %v", host, r.TTFT, r.LastToken)
	}
	h.Logf("%s: the first token came after %v of %v", host, r.TTFT, r.LastToken)
}

func (h *house) bodies(host string, status int) {
	h.Helper()
	for _, size := range []int{3_000_000, 12_000_000} {
		r, err := post(h.Context(), host, chat(strings.Repeat("word ", size/5)), nil)
		h.must(err)
		if r.Status != status {
			h.Errorf("%s: a body of %d bytes: %d %.200s", host, size, r.Status, r.Body)
		}
	}
}

// TestHTTPRoutes: as in the overlay, without its Kubernetes objects.
func TestHTTPRoutes(t *testing.T) {
	h := newHouse(t)
	gateway := h.gateway(true, "testdata/gateway.yaml", "testdata/routes.yaml", h.policy("traffic.yaml"))
	h.ready(gateway, "a.test")
	h.ready(gateway, "b.test")
	hosts := map[string]string{"a": "a.test", "b": "b.test"}
	for pool, host := range hosts {
		t.Run(host, func(t *testing.T) {
			h := &house{T: t, kvepp: h.kvepp, ports: h.ports}
			h.counts(pool, 100, func() {
				for i := range 100 {
					r := h.served(host, chat(fmt.Sprintf("conversation %d", i)))
					if r.Reason != "kv" || !strings.HasPrefix(r.Worker, pool) {
						t.Fatalf("%s of %s", r.Reason, r.Worker)
					}
				}
			})
			h.counts(pool, 20, func() {
				for i := range 5 {
					text := strings.Repeat(fmt.Sprintf("story %d ", i), 60)
					first := h.served(host, chat(text))
					for range 3 {
						text += strings.Repeat("and then ", 20)
						next := h.served(host, chat(text))
						if next.Worker != first.Worker {
							t.Errorf("a conversation moved from %s to %s", first.Worker, next.Worker)
						}
					}
				}
			})
			h.counts(pool, 1, func() { h.streams(host) })
			h.counts(pool, 2, func() { h.bodies(host, http.StatusOK) })
			h.counts(pool, 1, func() {
				r, err := post(t.Context(), host, chat("steal"),
					http.Header{"X-Gateway-Destination-Endpoint": {"127.0.0.1:1"}})
				if err != nil || r.Status != http.StatusOK {
					t.Errorf("a client that names an endpoint: %v, %+v", err, r)
				}
			})
		})
	}
	t.Run("again.test", func(t *testing.T) {
		h := &house{T: t, kvepp: h.kvepp, ports: h.ports}
		h.counts("b", 10, func() {
			for i := range 10 {
				h.served("again.test", chat(fmt.Sprint("once more ", i)))
			}
		})
	})
	log, err := os.ReadFile(h.kvepp["b"].Log)
	if h.must(err); !bytes.Contains(log, []byte("asks several times for one request")) {
		t.Error("kvepp-b was asked once: if envoyproxy/ai-gateway#2595 is in this version, say so in docs/gateways.md")
	}
	for pool, host := range hosts { // FailClose, FailOpen
		h.kvepp[pool].Kill()
		r, err := post(t.Context(), host, chat("anyone?"),
			http.Header{"X-Gateway-Destination-Endpoint": {"127.0.0.1:1"}})
		if err != nil || r.Status != http.StatusInternalServerError || r.Body != "" {
			t.Errorf("kvepp-%s is away: %v, %+v", pool, err, r)
		}
	}
	faults := map[string]string{"list": "HTTP 503", "served": "says nothing",
		"picker away": "fails closed: HTTP 500, 0 bytes"}
	h.protocol("a.test", faults)
	faults["picker"] = "asks 3 times"
	h.protocol("b.test", faults)
	delete(faults, "picker")
	maps.Copy(faults, map[string]string{"body modes": "response BUFFERED", "large body": "HTTP 413",
		"stream": "HTTP 200, 100 bytes"})
	h.protocol("a-buffered.test", faults)
}

// protocol has kvepp check ask the gateway, in place of the pool's kvepp and engines, and compares what it says with
// want, by what it is about. What is not in want must not be wrong.
func (h *house) protocol(host string, want map[string]string) {
	h.Helper()
	port, err := process.Ports(2)
	h.must(err)
	endpoints := filepath.Join(h.TempDir(), "endpoints.yaml")
	h.must(os.WriteFile(endpoints, fmt.Appendf(nil, "endpoints:\n- {name: x, address: \"127.0.0.1:%d\"}\n"+
		"- {name: y, address: \"127.0.0.1:%d\"}\n", port, port+1), 0o600))
	picker := fmt.Sprintf("127.0.0.1:%d", h.ports[host[:1]]-88)
	out, _ := exec.Command(root+"/bin/kvepp", "check", "--gateway", "http://"+host+":36080", "--protocol", "--json",
		"--endpoints", endpoints, "--ext-proc-address", picker).CombinedOutput() // 1: something is wrong
	h.Logf("kvepp check --gateway http://%s:36080 --protocol:\n%s", host, out)
	found := 0
	for line := range bytes.Lines(out) {
		var f struct{ About, State, Says string }
		if err := json.Unmarshal(line, &f); err != nil {
			h.Fatalf("%s: %v", line, err)
		}
		found++
		if text, known := want[f.About]; !strings.Contains(f.Says, text) || !known && f.State == "wrong" {
			h.Errorf("%s: %s, %s; want %q", f.About, f.State, f.Says, text)
		}
	}
	if found != 15 {
		h.Errorf("%d findings", found)
	}
}

// TestAIGatewayRoute: its own filter buffers requests; the overlay's buffer.yaml gives it room.
func TestAIGatewayRoute(t *testing.T) {
	h := newHouse(t)
	gateway := h.gateway(false, "testdata/gateway.yaml")
	h.ready(gateway, "ai.test")
	h.bodies("ai.test", http.StatusRequestEntityTooLarge)
	gateway.Stop()
	h.ready(h.gateway(false, "testdata/gateway.yaml", h.policy("traffic.yaml", "buffer.yaml")), "ai.test")
	h.counts("a", 100, func() {
		for i := range 100 {
			h.served("ai.test", chat(fmt.Sprintf("conversation %d", i)))
		}
	})
	h.counts("a", 1, func() { h.streams("ai.test") })
	h.counts("a", 2, func() { h.bodies("ai.test", http.StatusOK) })
}
