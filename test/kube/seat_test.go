package kube

import (
	"bytes"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"kvepp/serve/secrets/secretstest"
	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// config returns a configuration of testdata/seat, with values for its names.
func config(t *testing.T, name string, values map[string]string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata/seat", name))
	must(t, err)
	return os.Expand(string(text), func(name string) string { return values[name] })
}

// startSeat starts a kvepp as KServe starts llm-d's picker. It knows no model.
func startSeat(t *testing.T, ns, config string, flags ...string) *kvepp {
	t.Helper()
	program, err := filepath.Abs(filepath.Join(root, "bin/kvepp"))
	must(t, err)
	epp := filepath.Join(t.TempDir(), "epp")
	must(t, os.Symlink(program, epp))
	args := append([]string{"--pool-name", "engines", "--pool-namespace", ns, "--zap-encoder", "json", "", "", "", "",
		"--config-text", config, "--kubeconfig", cluster.Kubeconfig}, flags...)
	return startProgram(t, []string{epp}, args...)
}

// startProgram starts a kvepp by a command line in place of `kvepp serve`.
func startProgram(t *testing.T, argv []string, flags ...string) *kvepp {
	t.Helper()
	first, err := process.Ports(4)
	must(t, err)
	k := &kvepp{host: "127.0.0.1", grpc: first, health: first + 1, prom: first + 2, admin: first + 3, argv: argv}
	k.flags = append(flags, "--bind-address", k.host, "--grpc-port", strconv.Itoa(k.grpc), "--grpc-health-port",
		strconv.Itoa(k.health), "--metrics-port", strconv.Itoa(k.prom), "--admin-address",
		net.JoinHostPort(k.host, strconv.Itoa(k.admin)), "--decision-headers", "--metrics-endpoint-auth=false",
		"--drain-delay=0s")
	k.startUntilEnd(t)
	return k
}

// standIn starts a stand-in engine at a new address, and a ready Pod for it; without a namespace no Pod. It returns the
// address.
func standIn(t *testing.T, program, ns, name string, port int) string {
	t.Helper()
	host := newAddress()
	p, err := process.Start(t.TempDir(), name, nil, program, "-name", name, "-host", host, "-port", strconv.Itoa(port),
		"-kv-events-port", strconv.Itoa(port+1), "-kv-replay-port", strconv.Itoa(port+2), "-model",
		filepath.Join(root, "test/models/tiny-bytelevel"))
	must(t, err)
	t.Cleanup(p.Kill)
	address := net.JoinHostPort(host, strconv.Itoa(port))
	eventually(t, process.Healthy("http://"+address))
	if ns != "" {
		must(t, cluster.RunPod(t.Context(), apiserver.Pod{Namespace: ns, Name: name, IPs: []string{host},
			Labels: map[string]string{"app": "engine"}}))
	}
	return address
}

// say sends a completion of a text.
func say(t *testing.T, url, model, text string) *stack.Response {
	t.Helper()
	a, err := stack.Post(t.Context(), http.DefaultClient, url+"/v1/completions", http.Header{},
		map[string]any{"model": model, "prompt": text, "max_tokens": 2})
	must(t, err)
	if a.Status != http.StatusOK {
		t.Fatalf("status %d: %s", a.Status, a.Body)
	}
	return a
}

// words returns a text of n bytes that begins like no other.
func words(n int) string {
	number := prompts.Add(1)
	var text strings.Builder
	for i := 0; text.Len() < n; i++ {
		fmt.Fprintf(&text, "%d of %d, ", i, number)
	}
	return text.String()[:n]
}

// TestSeatHeldBlocks: kvepp routes by KV events with the token ids of a render server, also after a restart, and has
// the metrics that llm-d's dashboards, alerts and autoscalers read.
func TestSeatHeldBlocks(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-held"
	program, err := stack.BuildEngine(ctx, root, t.TempDir())
	must(t, err)
	port := freePorts(t, 3)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	standIn(t, program, ns, "a", port)
	standIn(t, program, ns, "b", port)
	var mu sync.Mutex
	asked := map[string]bool{}
	render := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http",
		Host: standIn(t, program, "", "render", port)})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, err := io.ReadAll(r.Body)
		var body struct{ Model string }
		if err != nil || json.Unmarshal(text, &body) != nil {
			t.Errorf("the render server is asked %q: %v", text, err)
		}
		mu.Lock()
		asked[body.Model] = true
		mu.Unlock()
		r.Body = io.NopCloser(bytes.NewReader(text))
		render.ServeHTTP(w, r)
	}))
	t.Cleanup(server.Close)
	k := startSeat(t, ns, config(t, "held-blocks.yaml", map[string]string{"RENDER": server.URL,
		"EVENTS": strconv.Itoa(port + 1), "REPLAY": strconv.Itoa(port + 2)}), "--metrics-compat=all")
	k.awaitReady(t)
	k.awaitMetric(t, `kvepp_subscriptions{state="connected"}`, 2)
	k.awaitLog(t, "block size and hash seed come from the events")
	k.awaitLog(t, "--router-predicted-ttl-secs=2")
	k.awaitLog(t, "weights have no counterpart")
	url := envoy(t, k)

	// exact waits until kvepp predicts what the worker of a prompt has cached, and checks what the engine reports.
	exact := func(model, text, worker string) string {
		t.Helper()
		eventually(t, func() error {
			a := say(t, url, model, text)
			if a.Reason != "kv_rendered" || a.KveppPrompt != a.PromptTokens || worker != "" && a.Worker != worker {
				return fmt.Errorf("%s by %s, of %d tokens; the engine has %d", a.Reason, a.Worker, a.KveppPrompt,
					a.PromptTokens)
			}
			blocks := a.PromptTokens / blockSize
			if a.KveppCached != blocks*blockSize || a.CachedTokens < (blocks-1)*blockSize {
				return fmt.Errorf("%d tokens of %d blocks are predicted; the engine has %d", a.KveppCached, blocks,
					a.CachedTokens)
			}
			worker = a.Worker
			return nil
		})
		return worker
	}
	first, second := words(2000), words(1500)
	ofFirst, ofSecond := exact("tiny", first, ""), exact("org/other-name", second, "")
	exact("tiny", first+words(1000), ofFirst)
	mu.Lock()
	if len(asked) != 1 || !asked["/srv/weights"] {
		t.Errorf("the render server was asked for %v", asked)
	}
	mu.Unlock()
	chat := []stack.Message{{Role: "user", Content: words(400)}}
	a, err := stack.Chat(ctx, http.DefaultClient, url, nil, chat, true, nil)
	if err != nil || a.Status != http.StatusOK || !a.Finished {
		t.Errorf("a stream: %+v, %v", a, err)
	}
	if a, err = stack.Post(ctx, http.DefaultClient, url+"/v1/completions", nil, []int{1}); err != nil ||
		a.Status != http.StatusBadRequest {
		t.Errorf("a body that is no object: %+v, %v", a, err)
	}
	checkDashboards(t, k)

	k.Kill()
	k.start(t)
	k.awaitReady(t)
	k.awaitMetric(t, `kvepp_subscriptions{state="connected"}`, 2)
	eventually(t, func() error { // by the replays
		if a := say(t, url, "tiny", first); a.Worker != ofFirst || a.KveppCached < len(first)/8 {
			return fmt.Errorf("%d tokens cached at %s", a.KveppCached, a.Worker)
		}
		return nil
	})
	exact("tiny", second, ofSecond)
	k.Kill()

	const precise = `{"plugins": [{"type": "precise-prefix-cache-producer", "parameters": {"kvEventsConfig": ` +
		`{"podDiscoveryConfig": {"socketPort": ${EVENTS}}}}}, {"type": "prefix-cache-scorer"}]}`
	events := strconv.Itoa(port + 1)
	for _, c := range []struct {
		reason, config string
		flags          []string
	}{
		{"kv_rendered", os.Expand(precise, func(string) string { return events }), nil}, // by the pool's engines
		{"kv_rendered", "", []string{"--router-kv-events", "--kv-events-port=" + events}},
		{"kv", "", []string{"--router-kv-events", "--kv-events-port=" + events,
			"--model=tiny=" + filepath.Join(root, "test/models/tiny-bytelevel")}},
	} {
		k := startSeat(t, ns, c.config, c.flags...)
		k.awaitReady(t)
		k.awaitMetric(t, `kvepp_subscriptions{state="connected"}`, 2)
		url := envoy(t, k)
		text, worker := words(900), ""
		eventually(t, func() error {
			a := say(t, url, "tiny", text)
			if worker == "" {
				worker = a.Worker
			}
			if a.Worker != worker || a.Reason != c.reason || a.KveppCached != a.PromptTokens/blockSize*blockSize {
				return fmt.Errorf("%q %v: %s at %s after %s, %d of %d tokens predicted", c.config, c.flags, a.Reason,
					a.Worker, worker, a.KveppCached, a.PromptTokens)
			}
			return nil
		})
		k.Kill()
	}

	k = startSeat(t, ns, "") // without KV events the pool's engines are asked, too
	k.awaitReady(t)
	k.awaitWorkers(t, 2)
	url = envoy(t, k)
	text := words(900)
	worker := say(t, url, "tiny", text).Worker
	if x := say(t, url, "tiny", text+words(300)); x.Reason != "approximate" || x.Worker != worker ||
		x.KveppPrompt != x.PromptTokens || x.KveppCached < 64 {
		t.Errorf("a later turn: %s at %s after %s, %d of %d tokens cached", x.Reason, x.Worker, worker, x.KveppCached,
			x.PromptTokens)
	}
}

// checkDashboards checks that each metric of testdata/seat/dashboards.txt has a value.
func checkDashboards(t *testing.T, k *kvepp) {
	t.Helper()
	text, err := os.ReadFile("testdata/seat/dashboards.txt")
	must(t, err)
	eventually(t, func() (err error) {
		m, err := k.metrics()
		if err != nil {
			return err
		}
		names := 0
		for line := range strings.Lines(string(text)) {
			name, above := strings.CutPrefix(strings.TrimSpace(line), "+")
			if strings.HasPrefix(name, "#") {
				continue
			}
			names++
			found, value := false, 0.0
			name, label, _ := strings.Cut(strings.TrimSuffix(name, "}"), "{")
			for series, v := range m {
				if of, labels, _ := strings.Cut(series, "{"); of == name && strings.Contains(labels, label) {
					found, value = true, value+v
				}
			}
			if !found || above && value == 0 {
				err = errors.Join(err, fmt.Errorf("%s{%s}: found %v, %v", name, label, found, value))
			}
		}
		if names < 30 {
			t.Fatalf("only %d names", names)
		}
		return err
	})
	resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", k.prom))
	must(t, err)
	defer resp.Body.Close()
	page, err := io.ReadAll(resp.Body)
	must(t, err)
	if !strings.Contains(string(page), `llm_d_epp_plugin_duration_seconds_bucket{extension_point="DataProducer",`+
		`plugin_name="token-producer",plugin_type="token-producer",le="0.1"} `) {
		t.Error("slow tokenization has no bucket of 0.1 s")
	}
}

// pages serves a metrics page over https at a port of each engine, for clients with a certificate as auth says.
func pages(t *testing.T, port int, auth tls.ClientAuthType, text string, engines ...*engine) {
	t.Helper()
	for _, e := range engines {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, text)
		}))
		l, err := net.Listen("tcp", net.JoinHostPort(e.host(), strconv.Itoa(port)))
		must(t, err)
		server.Listener.Close()
		server.Listener, server.TLS = l, &tls.Config{ClientAuth: auth}
		server.StartTLS()
		t.Cleanup(server.Close)
	}
}

// load is the part of an engine's metrics about its requests.
const load = "vllm:num_requests_waiting 3\nvllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.25\n"

// TestSeatAssumedBlocks: without KV events and token ids the turns of a conversation stay together, until the queue
// there costs more. The engines' metrics, over https, say how much a worker is assumed to hold.
func TestSeatAssumedBlocks(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-assumed"
	port := freePorts(t, 2)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	certs := t.TempDir()
	certificate, key := secretstest.NewAuthority(t).Sign(t, 1)
	must(t, os.WriteFile(filepath.Join(certs, "tls.crt"), certificate, 0o600))
	must(t, os.WriteFile(filepath.Join(certs, "tls.key"), key, 0o600))
	pages(t, port+1, tls.RequireAnyClientCert,
		load+`vllm:cache_config_info{block_size="16",num_gpu_blocks="80"} 1`+"\n", a, b)
	k := startSeat(t, ns, config(t, "assumed-blocks.yaml", map[string]string{"PAGES": strconv.Itoa(port + 1),
		"CERTS": certs}), "--refresh-metrics-interval=50ms")
	k.awaitReady(t)
	k.awaitMetric(t, "kvepp_workers_with_gauges", 2)
	k.awaitMetric(t, `llm_d_epp_average_queue_size{name="engines"}`, 3)
	url := envoy(t, k)
	text := words(1000)
	worker := say(t, url, "any", text).Worker
	for range 5 {
		text += words(600)
		if x := say(t, url, "any", text); x.Reason != "approximate" || x.Worker != worker || x.KveppCached < 192 {
			t.Errorf("a later turn: %s at %s after %s, %d tokens cached", x.Reason, x.Worker, worker, x.KveppCached)
		}
	}
	if m, err := k.metrics(); err != nil || m[`kvepp_subscriptions{state="connecting"}`] != 0 {
		t.Errorf("kvepp subscribes to KV events: %v", err)
	}
	// A worker has room for 1280 tokens: 20 blocks of 64.
	long := words(4 * 64 * 30)
	say(t, url, "any", long)
	if x := say(t, url, "any", long); x.KveppCached > 1280 {
		t.Errorf("%d tokens are assumed in a cache of 1280", x.KveppCached)
	}

	text = words(1600)
	holder := a
	if strings.HasPrefix(say(t, url, "any", text).Worker, "b-") {
		holder = b
	}
	release := holder.stall()
	var waiting sync.WaitGroup
	defer waiting.Wait()
	defer release()
	for i := range 200 {
		left := make(chan bool, 1)
		waiting.Go(func() {
			x, err := stack.Post(ctx, http.DefaultClient, url+"/v1/completions", http.Header{},
				map[string]any{"model": "any", "prompt": text + strings.Repeat("and so on, ", 400), "max_tokens": 1})
			left <- err == nil && x.Status == http.StatusOK && x.Header.Get("x-served-by") != holder.address()
		})
		eventually(t, func() error {
			if len(left) == 0 && holder.held.Load() <= int64(i) {
				return errors.New("the request has not arrived")
			}
			return nil
		})
		if len(left) > 0 {
			if !<-left || i == 0 {
				t.Errorf("request %d did not follow its prefix, or failed", i)
			}
			return
		}
	}
	t.Error("200 requests wait for the worker that holds their prefix, beside an idle one")
}

// TestSeatStages: labels that the configuration names give Pods their stages, and short or cached prompts have no
// prefill Pod.
func TestSeatStages(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-stages"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	var first []*engine
	tier := func(e *engine, value string) {
		e.pod.Labels["example.org/tier"] = value
		e.writePod(t)
	}
	for i, value := range []string{"first", "first", "then", "then", "another"} {
		e := newEngine(t, ns, "engine", fmt.Sprintf("%s-%d", value, i), port)
		e.pod.Labels["llm-d.ai/role"] = "decode" // no stage by this configuration
		if tier(e, value); value == "first" {
			first = append(first, e)
		}
	}
	k := startSeat(t, ns, config(t, "stages-by-label.yaml", nil))
	k.awaitReady(t)
	k.awaitWorkers(t, 4)
	k.awaitLog(t, "disagg-headers-handler")
	url := envoy(t, k)
	// ask checks that a request reaches a Pod of the second stage, and whether one of the first prefills it.
	ask := func(text string, prefills bool) {
		t.Helper()
		x := say(t, url, "any", text)
		at := x.Header.Get("x-prefilled-at")
		known := slices.ContainsFunc(first, func(e *engine) bool { return e.address() == at })
		if !strings.HasPrefix(x.Worker, "then-") || at != "" != prefills || prefills && !known {
			t.Errorf("%d bytes: at %s, prefilled at %q", len(text), x.Worker, at)
		}
	}
	for range 4 {
		ask(words(4*199), false)
		long := words(4 * 640)
		ask(long, true)
		ask(long, false)
		ask(long+words(4*90), false)
		ask(long+words(4*300), true)
	}
	for _, e := range first {
		tier(e, "another")
	}
	k.awaitWorkers(t, 2)
	ask(words(4*640), false)
}

// TestSeatHeaders: requests go to a Pod's first port with the address of a rank, a response's token leads back to its
// rank, and a header of the client replaces the model.
func TestSeatHeaders(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-headers"
	port := freePorts(t, 2)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port, port+1)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	configured := config(t, "headers.yaml", map[string]string{"PORT": strconv.Itoa(port)})
	k := startSeat(t, ns, configured, "--allow-experimental-plugins", "--emit-endpoint-scores")
	k.awaitReady(t)
	k.awaitWorkers(t, 4)
	url := envoy(t, k)
	ask := func(header http.Header) *stack.Response {
		t.Helper()
		x, err := stack.Post(ctx, http.DefaultClient, url+"/v1/completions", header,
			map[string]any{"model": "any", "prompt": words(100), "max_tokens": 1})
		must(t, err)
		host, _, _ := net.SplitHostPort(x.Header.Get("x-for-rank-at"))
		at := x.Header.Get("x-served-by")
		if x.Status != http.StatusOK || at != a.address() && at != b.address() ||
			at != net.JoinHostPort(host, strconv.Itoa(port)) {
			t.Fatalf("status %d by %s for %s: %s", x.Status, at, x.Header.Get("x-for-rank-at"), x.Body)
		}
		return x
	}
	seen := map[string]string{} // a token for each rank that was chosen
	eventually(t, func() error {
		x := ask(nil)
		if seen[x.Header.Get("x-for-rank-at")] = x.Header.Get("x-return-to"); len(seen) < 2 {
			return fmt.Errorf("only %v", seen)
		}
		return nil
	})
	for rank, token := range seen {
		for range 3 {
			if got := ask(http.Header{"X-Return-To": {token}}).Header.Get("x-for-rank-at"); got != rank {
				t.Errorf("a request with the token of %s went to %s", rank, got)
			}
		}
	}
	eventually(t, func() error { // once an engine has served a model, its name is a label
		if ask(http.Header{"X-Llm-D-Model-Name-Rewrite": {"another"}}).Header.Get("x-replaced-by") != "" {
			t.Error("the engine sees a header for the picker")
		}
		m, err := k.metrics()
		if err == nil && m[`llm_d_epp_request_total{fairness_id="default-flow",model_name="any",priority="0",`+
			`target_model_name="another"}`] == 0 {
			err = errors.New("no request for any became one for another")
		}
		return err
	})
	configuredWithout := startSeat(t, ns, configured)
	configuredWithout.awaitEnd(t)
	if log := configuredWithout.Tail(5); !strings.Contains(log, "give --allow-experimental-plugins") {
		t.Errorf("an experimental plugin: %s", log)
	}
}

// TestSeatQueues: flow control of llm-d's configuration becomes bands of kvepp's queue. While the pool is empty,
// requests wait, and KEDA sees that they do; the first Pod gets them.
func TestSeatQueues(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-queues"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	for _, name := range []string{"bands.yaml", "from-zero.yaml"} {
		k := startSeat(t, ns, config(t, name, nil))
		eventually(t, func() error {
			if log := k.Tail(40); !strings.Contains(log, "in bands of their priorities") ||
				!strings.Contains(log, `"for":"ext_proc"`) {
				return fmt.Errorf("%s: %s", name, log)
			}
			return nil
		})
		if name == "bands.yaml" {
			continue
		}
		k.awaitReady(t)
		url, responses := envoy(t, k), make(chan *stack.Response, 1)
		go func() {
			x, err := post(ctx, url, prompt(1))
			if err != nil {
				t.Error(err)
			}
			responses <- x
		}()
		eventually(t, func() error {
			m, err := k.metrics()
			size, full := 0.0, 0.0
			for series, v := range m {
				switch of, _, _ := strings.Cut(series, "{"); of {
				case "llm_d_epp_flow_control_queue_size":
					size += v
				case "llm_d_epp_flow_control_pool_saturation":
					full = max(full, v)
				}
			}
			if err == nil && (size != 1 || full != 1) {
				err = fmt.Errorf("%v requests wait, saturation %v", size, full)
			}
			return err
		})
		e := newEngine(t, ns, "engine", "first", port)
		if x := <-responses; x == nil || x.Status != http.StatusOK || x.Header.Get("x-served-by") != e.address() {
			t.Errorf("the request that waited: %+v", x)
		}
	}
}

// TestSeatListedHosts: outside Kubernetes, with flags without a command as in llm-d's chart, kvepp takes endpoints of a
// file in llm-d's format and chooses any of them.
func TestSeatListedHosts(t *testing.T) {
	t.Parallel()
	port := freePorts(t, 1)
	var engines []*engine
	for range 4 {
		e := &engine{port: port, pod: apiserver.Pod{IPs: []string{newAddress()}}}
		e.listen(t, port)
		engines = append(engines, e)
	}
	file := filepath.Join(t.TempDir(), "hosts.yaml")
	write := func(n int) {
		t.Helper()
		text := "endpoints:\n- {name: nowhere, address: nowhere, port: \"80\"}\n"
		for i, e := range engines[:n] {
			role := ""
			if i == 0 {
				role = ", labels: {llm-d.ai/role: prefill}"
			}
			text += fmt.Sprintf("- {name: host-%d, namespace: ns, address: %s, port: \"%d\"%s}\n", i, e.host(), port,
				role)
		}
		must(t, os.WriteFile(file+".next", []byte(text), 0o600))
		must(t, os.Rename(file+".next", file))
	}
	write(3)
	configured := filepath.Join(t.TempDir(), "config.yaml")
	must(t, os.WriteFile(configured, []byte(config(t, "listed-hosts.yaml", map[string]string{"HOSTS": file})), 0o600))
	k := startProgram(t, []string{filepath.Join(root, "bin/kvepp")}, "--pool-name", "none", "--pool-namespace", "none",
		"--zap-encoder", "json", "--config-file", configured, "--v=2", "--tracing=false")
	k.awaitReady(t)
	k.awaitWorkers(t, 3)
	k.awaitLog(t, "nowhere")
	var addresses []string
	for _, e := range engines {
		addresses = append(addresses, e.address())
	}
	url := startEnvoy(t, stack.Config{Servers: addresses, Manifest: "stock-engines.yaml"}, k) // it retries
	text := words(800)
	seen := map[string]int{}
	for range 40 { // the same prompt
		x := say(t, url, "any", text)
		seen[x.Header.Get("x-served-by")]++
		if all := strings.Split(x.Header.Get("x-destinations"), ","); len(all) != 2 || all[0] == all[1] {
			t.Errorf("destinations %q", all)
		}
	}
	if seen[addresses[0]] > 0 || seen[addresses[1]] < 5 || seen[addresses[2]] < 5 {
		t.Errorf("served: %v", seen)
	}
	x, err := stack.Post(t.Context(), http.DefaultClient, url+"/v9/poems", nil, map[string]any{"about": "routes"})
	if err != nil || x.Status != http.StatusOK {
		t.Errorf("another path: %+v, %v", x, err)
	}
	write(4)
	k.awaitWorkers(t, 4)
	awaitReached(t, url, engines[1:]...)
}

// TestSeatLeast: a small configuration, as YAML or JSON, means what none means, and metrics over https.
func TestSeatLeast(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "seat-least"
	port := freePorts(t, 2)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a, b := newEngine(t, ns, "engine", "a", port), newEngine(t, ns, "engine", "b", port)
	pages(t, port+1, tls.NoClientCert, load, a, b)
	least := config(t, "least.yaml", map[string]string{"PAGES": strconv.Itoa(port + 1)})
	file := filepath.Join(t.TempDir(), "least.yaml")
	must(t, os.WriteFile(file, []byte(least), 0o600))
	asJSON := fmt.Sprintf(`{"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig", "plugins": [`+
		`{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}, {"type": "prefix-cache-scorer"}, `+
		`{"type": "metrics-data-source", "parameters": {"scheme": "https", "port": %d}}]}`, port+1)
	for name, k := range map[string]*kvepp{
		"text":   startSeat(t, ns, least),
		"file":   startSeat(t, ns, "", "--config-file", file),
		"JSON":   startSeat(t, ns, asJSON),
		"none":   startSeat(t, ns, ""),
		"events": startSeat(t, ns, "", "--router-kv-events", "--kv-events-port=0", "--kv-cache-block-size=64"),
	} {
		k.awaitReady(t)
		k.awaitWorkers(t, 2)
		if name != "none" && name != "events" {
			k.awaitMetric(t, `inference_pool_average_queue_size{name="engines"}`, 3)
		}
		url := envoy(t, k)
		text := words(1200)
		worker := say(t, url, "any", text).Worker
		for range 4 {
			if x := say(t, url, "any", text); x.Worker != worker || x.KveppCached < 256 || x.Reason != "approximate" {
				t.Errorf("%s: %s at %s after %s, %d tokens cached", name, x.Reason, x.Worker, worker, x.KveppCached)
			}
		}
		k.Kill()
	}
	k := startSeat(t, ns, least, "--config-file", file)
	k.awaitEnd(t)
	if log := k.Tail(5); !strings.Contains(log, "give one of the two") {
		t.Errorf("two configurations: %s", log)
	}
}
