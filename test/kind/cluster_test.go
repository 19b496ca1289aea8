// Package kind runs kvepp as its users do: in a Kubernetes cluster, installed by its chart, in front of Pods. `make
// e2e-kind` creates the cluster, loads the images, and runs these tests where the cluster's addresses are reachable.
package kind

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// namespace is a test's namespace in the cluster, with the objects that the test created.
type namespace struct {
	t     *testing.T
	name  string
	model string // the model of the requests
	url   string // of Envoy, when it runs
	token string // of an account that may read kvepp's metrics, when the chart is installed
}

// inCluster prevents `go test ./...` from using the cluster of a user's KUBECONFIG.
var inCluster = flag.Bool("cluster", false, "the cluster that KUBECONFIG names is for these tests")

// rewrite: the report of the conformance tests is written again.
var rewrite = flag.Bool("rewrite", false, "write the report of the conformance tests to docs/conformance again")

// newNamespace creates a namespace that is deleted with the test. On failure it first logs its state.
func newNamespace(t *testing.T, name string) *namespace {
	t.Helper()
	if !*inCluster {
		t.Skip("this test changes the cluster that KUBECONFIG names: run it with `make e2e-kind`")
	}
	n := &namespace{t: t, name: name, model: stack.Model}
	n.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=120s")
	n.kubectl("create", "namespace", name)
	t.Cleanup(func() {
		if t.Failed() {
			n.logState()
		}
		n.kubectl("delete", "namespace", name, "--wait=false")
	})
	return n
}

// run runs a client program of the cluster and returns its output. The error contains its standard error. If the API
// server of a busy machine takes no connection in ten seconds, run tries again, eleven times.
func (n *namespace) run(stdin, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	for tries := 1; ; tries++ {
		cmd := exec.CommandContext(ctx, program, append([]string{"--namespace", n.name}, args...)...)
		var stderr bytes.Buffer
		cmd.Stdin, cmd.Stderr = strings.NewReader(stdin), &stderr
		out, err := cmd.Output()
		if err != nil && tries < 12 && strings.Contains(stderr.String(), "TLS handshake timeout") {
			continue
		}
		if err != nil {
			err = fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, &stderr)
		}
		return strings.TrimSpace(string(out)), err
	}
}

func (n *namespace) kubectl(args ...string) string {
	n.t.Helper()
	out, err := n.run("", "kubectl", args...)
	if err != nil {
		n.t.Fatal(err)
	}
	return out
}

// apply applies a manifest after replacements, as by strings.NewReplacer.
func (n *namespace) apply(objects string, names ...string) {
	n.t.Helper()
	objects = strings.NewReplacer(names...).Replace(objects)
	if _, err := n.run(objects, "kubectl", "apply", "-f", "-"); err != nil {
		n.t.Fatal(err)
	}
}

// logState logs the state of all objects.
func (n *namespace) logState() {
	for _, args := range [][]string{
		{"get", "pods,services,endpointslices,inferencepools,leases", "-o", "wide"},
		{"get", "events", "--sort-by=.lastTimestamp"},
		{"logs", "-l", kvepp, "--tail=60", "--prefix"},
		{"logs", "-l", "app in (envoy,inference-istio,conformance-primary-istio,conformance-secondary-istio)",
			"--tail=20", "--prefix"},
		{"logs", "-l", "app.kubernetes.io/name=envoy", "--tail=20", "--prefix"},
		{"logs", "-l", "app in (dynamo,engine,vllm,sglang)", "--tail=20", "--all-containers", "--prefix"},
	} {
		out, err := n.run("", "kubectl", args...)
		n.t.Logf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// pods returns the names of the Pods with a label that are not terminating, and those of the ready ones.
func (n *namespace) pods(selector string) (all, ready []string) {
	n.t.Helper()
	var list struct {
		Items []struct {
			Metadata struct {
				Name              string
				DeletionTimestamp string
			}
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
	}
	if err := json.Unmarshal([]byte(n.kubectl("get", "pods", "-l", selector, "-o", "json")), &list); err != nil {
		n.t.Fatal(err)
	}
	for _, pod := range list.Items {
		if pod.Metadata.DeletionTimestamp != "" {
			continue
		}
		all = append(all, pod.Metadata.Name)
		for _, c := range pod.Status.Conditions {
			if c.Type == "Ready" && c.Status == "True" {
				ready = append(ready, pod.Metadata.Name)
			}
		}
	}
	return all, ready
}

// install installs or changes kvepp by its chart, and waits until it is ready.
func (n *namespace) install(values ...string) {
	n.t.Helper()
	args := []string{
		"upgrade",
		"--install",
		"kvepp",
		"../../manifests/chart",
		"--wait",
		"--timeout=2m",
		"--values",
		"testdata/values.yaml",
	}
	for _, v := range values {
		args = append(args, "--set", v)
	}
	if _, err := n.run("", "helm", args...); err != nil {
		n.t.Fatal(err)
	}
	if n.token != "" {
		return
	}
	n.t.Cleanup(func() { n.run("", "helm", "uninstall", "kvepp") }) // what belongs to no namespace
	// A Prometheus's account, bound as the chart's notes say.
	binding := n.name + "-prometheus"
	n.kubectl("create", "serviceaccount", "prometheus")
	n.kubectl(
		"create",
		"clusterrolebinding",
		binding,
		"--clusterrole",
		"kvepp-"+n.name+"-metrics-reader",
		"--serviceaccount",
		n.name+":prometheus",
	)
	n.t.Cleanup(func() { n.run("", "kubectl", "delete", "clusterrolebinding", binding, "--ignore-not-found") })
	n.token = n.kubectl("create", "token", "prometheus", "--duration=2h")
}

// dns makes an Envoy cluster resolve all addresses of a name every second.
var dns = map[string]any{"name": "envoy.cluster.dns", "typed_config": map[string]any{
	"@type": "type.googleapis.com/envoy.extensions.clusters.dns.v3.DnsCluster", "dns_refresh_rate": "1s",
	"dns_lookup_family": "V4_ONLY"}}

// startEnvoy starts Envoy with a configuration of manifests/envoy, with host names in place of addresses.
func (n *namespace) startEnvoy(manifest string, addresses map[string]string) {
	n.t.Helper()
	text, err := os.ReadFile("../../manifests/envoy/" + manifest)
	if err != nil {
		n.t.Fatal(err)
	}
	var config struct {
		Admin  any
		Static struct {
			Listeners any
			Clusters  []map[string]any
		} `yaml:"static_resources"`
	}
	if err := yaml.Unmarshal(text, &config); err != nil {
		n.t.Fatal(err)
	}
	for _, cluster := range config.Static.Clusters {
		name := cluster["name"].(string)
		address, ok := addresses[name]
		if !ok {
			continue
		}
		host, port, _ := strings.Cut(address, ":")
		delete(cluster, "type")
		maps.Copy(cluster, map[string]any{"cluster_type": dns, "load_assignment": map[string]any{
			"cluster_name": name,
			"endpoints": []any{map[string]any{"lb_endpoints": []any{map[string]any{"endpoint": map[string]any{
				"address": map[string]any{
					"socket_address": map[string]any{"address": host, "port_value": json.Number(port)},
				}}}}}}}})
	}
	configured, err := json.Marshal(map[string]any{"admin": config.Admin, "static_resources": map[string]any{
		"listeners": config.Static.Listeners, "clusters": config.Static.Clusters}})
	if err != nil {
		n.t.Fatal(err)
	}
	object, err := json.Marshal(
		map[string]any{"apiVersion": "v1", "kind": "ConfigMap", "metadata": map[string]string{"name": "envoy"},
			"data": map[string]string{"envoy.yaml": string(configured)}},
	)
	if err != nil {
		n.t.Fatal(err)
	}
	n.apply(string(object))
	n.apply(read(n.t, "testdata/envoy.yaml"))
	n.kubectl("rollout", "status", "deployment/envoy", "--timeout=120s")
	n.findEnvoy("envoy")
}

// findEnvoy waits until Envoy answers at the address that a Service exposes outside the cluster.
func (n *namespace) findEnvoy(service string) { n.findEnvoyOf(n, service) }

// findEnvoyOf finds an Envoy whose Service is in another namespace.
func (n *namespace) findEnvoyOf(owner *namespace, service string) {
	n.t.Helper()
	node := n.kubectl("get", "nodes", "-o", `jsonpath={.items[0].status.addresses[?(@.type=="InternalIP")].address}`)
	n.url = fmt.Sprintf(
		"http://%s:%s",
		strings.Fields(node)[0],
		owner.kubectl("get", "service", service, "-o", "jsonpath={.spec.ports[0].nodePort}"),
	)
	n.eventually("Envoy answers from outside", func() error {
		_, err := n.newConversation().say("hello", 1)
		return err
	})
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// metrics returns the metrics of one of kvepp's Pods, by name and labels, as a Prometheus reads them.
func (n *namespace) metrics(pod string) (map[string]float64, error) {
	// The API server's proxy would not forward the token.
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	forward := exec.CommandContext(ctx, "kubectl", "--namespace", n.name, "port-forward", "pod/"+pod, ":9090")
	var stderr bytes.Buffer
	forward.Stderr = &stderr
	says, err := forward.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := forward.Start(); err != nil {
		return nil, err
	}
	defer func() {
		cancel()
		forward.Wait()
	}()
	line, _ := bufio.NewReader(says).ReadString('\n') // Forwarding from 127.0.0.1:PORT -> 9090
	_, address, _ := strings.Cut(line, "from ")
	address, _, ok := strings.Cut(address, " ->")
	if !ok {
		return nil, fmt.Errorf("kubectl port-forward %s: %q %s", pod, line, &stderr)
	}
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+address+"/metrics", nil)
	if err != nil {
		return nil, err
	}
	req.Close = true
	if n.token != "" {
		req.Header.Set("Authorization", "Bearer "+n.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("the metrics of %s: %s", pod, resp.Status)
	}
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		return nil, err
	}
	sums := map[string]float64{}
	for name, family := range families {
		for _, m := range family.Metric {
			sums[name] += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			for _, l := range m.Label {
				sums[fmt.Sprintf("%s{%s=%q}", name, l.GetName(), l.GetValue())] += m.GetCounter().GetValue() +
					m.GetGauge().GetValue()
			}
		}
	}
	return sums, nil
}

// kvepp selects its Pods.
const kvepp = "app.kubernetes.io/instance=kvepp,app.kubernetes.io/name=kvepp"

// awaitWorkers waits until all of kvepp's replicas have this many workers, and are subscribed to them.
func (n *namespace) awaitWorkers(workers int) {
	n.t.Helper()
	n.eventually(fmt.Sprintf("kvepp hears %d workers", workers), func() error {
		return n.eachReplica(func(pod string, m map[string]float64) error {
			if got, on := m["kvepp_workers"], m[`kvepp_subscriptions{state="connected"}`]; got != float64(workers) ||
				on != float64(workers) {
				return fmt.Errorf("%s: %v workers, %v subscriptions connected", pod, got, on)
			}
			return nil
		})
	})
}

// eachReplica calls f with the metrics of each of kvepp's Pods, until f returns an error. It returns an error if there
// is no Pod.
func (n *namespace) eachReplica(f func(pod string, m map[string]float64) error) error {
	n.t.Helper()
	pods, _ := n.pods(kvepp)
	if len(pods) == 0 {
		return errors.New("kvepp has no Pod")
	}
	for _, pod := range pods {
		m, err := n.metrics(pod)
		if err == nil {
			err = f(pod, m)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// check runs `kvepp check` in kvepp's Pod, as the pages tell users to. It returns the exit status and the table.
func (n *namespace) check(flags ...string) (status int, table string) {
	n.t.Helper()
	args := []string{
		"exec",
		"deployment/kvepp",
		"--",
		"/kvepp",
		"check",
		"--pool-name=kvepp",
		"--model=tiny=/models/tiny",
		"--probe",
		"--wait=5s",
	}
	table, err := n.run("", "kubectl", append(args, flags...)...)
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		status = exit.ExitCode()
	} else if err != nil {
		n.t.Fatal(err)
	}
	n.t.Logf("kvepp check: status %d, %v\n%s", status, err, table)
	return status, table
}

// wantCheck fails the test unless `kvepp check` reports no problem, and each of these texts for this many workers.
func (n *namespace) wantCheck(workers int, says []string, flags ...string) {
	n.t.Helper()
	status, table := n.check(flags...)
	if status != 0 {
		n.t.Errorf("kvepp check exits with %d", status)
	}
	// " 16 tokens" is a block, not a prompt of 816.
	for _, words := range append(says, " 16 tokens", " a text", " a chat", "the second time, as predicted") {
		if got := strings.Count(table, words); got != workers {
			n.t.Errorf("kvepp check reports %q for %d workers, want %d", words, got, workers)
		}
	}
}

// awaitIdle waits until kvepp has seen the end of every request. Until then the last request counts as load of its
// worker, and the next request may go to another worker.
func (n *namespace) awaitIdle() {
	n.t.Helper()
	n.eventually("kvepp is idle", func() error {
		return n.eachReplica(func(pod string, m map[string]float64) error {
			if m["kvepp_active_requests"] != 0 {
				return fmt.Errorf("%s has %v active requests", pod, m["kvepp_active_requests"])
			}
			return nil
		})
	})
}

func (n *namespace) eventually(what string, f func() error) {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(n.t.Context(), 3*time.Minute)
	defer cancel()
	if err := process.Until(ctx, f); err != nil {
		n.t.Fatalf("%s: %v", what, err)
	}
}
