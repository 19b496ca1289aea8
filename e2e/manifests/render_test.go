package manifests

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/runtime"
	kjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	kinds "k8s.io/client-go/kubernetes/scheme"
	inference "sigs.k8s.io/gateway-api-inference-extension/api/v1"

	"kvepp/test/harness/parts"
)

var rewrite = flag.Bool(
	"rewrite",
	false,
	"rewrite derived files: kustomize's base from the chart, an overlay's Envoy from manifests/envoy",
)

const (
	chart      = "../../manifests/chart"
	overlays   = "../../manifests/kustomize/overlays"
	base       = "../../manifests/kustomize/base"
	kubernetes = "1.34.4" // the version for which Helm renders
)

// object is one Kubernetes object.
type object map[string]any

// at returns the value at a path of keys and list indexes, or nil.
func (o object) at(path ...any) any {
	var v any = map[string]any(o)
	for _, key := range path {
		switch key := key.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[key]
		case int:
			l, _ := v.([]any)
			if key >= len(l) {
				return nil
			}
			v = l[key]
		}
	}
	return v
}

func (o object) text(path ...any) string { s, _ := o.at(path...).(string); return s }

func (o object) list(path ...any) []object {
	l, _ := o.at(path...).([]any)
	var all []object
	for _, x := range l {
		m, _ := x.(map[string]any)
		all = append(all, m)
	}
	return all
}

func (o object) labels(path ...any) map[string]string {
	m, _ := o.at(path...).(map[string]any)
	labels := map[string]string{}
	for k, v := range m {
		labels[k] = fmt.Sprint(v)
	}
	return labels
}

func (o object) strings(path ...any) []string {
	l, _ := o.at(path...).([]any)
	var all []string
	for _, x := range l {
		all = append(all, fmt.Sprint(x))
	}
	return all
}

func (o object) String() string { return o.text("kind") + " " + o.text("metadata", "name") }

// rendered is the output of one chart or overlay.
type rendered struct {
	name    string
	text    []byte
	objects []object
}

// one returns the only object of a kind.
func (r *rendered) one(t *testing.T, kind string) object {
	t.Helper()
	all := r.all(kind)
	if len(all) != 1 {
		t.Fatalf("%s: %d of kind %s, want 1", r.name, len(all), kind)
	}
	return all[0]
}

func (r *rendered) all(kind string) []object {
	return slices.DeleteFunc(slices.Clone(r.objects), func(o object) bool { return o.text("kind") != kind })
}

// kvepp returns the Deployment of kvepp.
func (r *rendered) kvepp(t *testing.T) object {
	t.Helper()
	for _, o := range r.all("Deployment") {
		if o.text("metadata", "labels", "app.kubernetes.io/name") == "kvepp" {
			return o
		}
	}
	t.Fatalf("%s has no Deployment of kvepp", r.name)
	return nil
}

// program returns the path of Helm or kustomize.
func program(t *testing.T, name string) string {
	t.Helper()
	folder, err := parts.Folder("KVEPP_MANIFEST_TOOLS", "manifests")
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(folder, name)
}

// run returns a program's standard output, and an error with its standard error.
func run(t *testing.T, argv ...string) ([]byte, error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
	// Helm reads its own folders, on which a test must not depend.
	cmd.Env = append(
		os.Environ(),
		"HELM_CONFIG_HOME="+t.TempDir(),
		"HELM_DATA_HOME="+t.TempDir(),
		"HELM_CACHE_HOME="+t.TempDir(),
		"KUBECONFIG=/nonexistent",
	)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("%s: %w: %s", filepath.Base(argv[0]), err, complaint.String())
	}
	return out.Bytes(), nil
}

// helm renders the chart under the release name kvepp.
func helm(t *testing.T, args ...string) (*rendered, error) {
	t.Helper()
	text, err := run(
		t,
		append([]string{program(t, "helm"), "template", "kvepp", chart, "--kube-version", kubernetes}, args...)...)
	if err != nil {
		return nil, err
	}
	return parse(t, "chart "+strings.Join(args, " "), text), nil
}

func kustomize(t *testing.T, folder string) *rendered {
	t.Helper()
	text, err := run(t, program(t, "kustomize"), "build", folder)
	if err != nil {
		t.Fatal(err)
	}
	return parse(t, folder, text)
}

// parse splits a stream of YAML into its objects. It refuses duplicate keys.
func parse(t *testing.T, name string, text []byte) *rendered {
	t.Helper()
	r := &rendered{name: name, text: text}
	seen := map[string]bool{}
	for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var m map[string]any // with type object, yaml would make every nested map an object
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, text)
		}
		if m == nil {
			continue
		}
		o := object(m)
		if o.text("apiVersion") == "" || o.text("kind") == "" || o.text("metadata", "name") == "" {
			t.Errorf("%s: an object without apiVersion, kind or name: %v", name, o)
		}
		if key := o.text("apiVersion") + o.String() + o.text("metadata", "namespace"); seen[key] {
			t.Errorf("%s: two of %s", name, o)
		} else {
			seen[key] = true
		}
		r.objects = append(r.objects, o)
	}
	if len(r.objects) == 0 {
		t.Fatalf("%s: nothing was rendered", name)
	}
	return r
}

// valuesFiles returns the tested settings of the chart.
func valuesFiles(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no values in testdata", err)
	}
	return files
}

func overlayNames(t *testing.T) []string {
	t.Helper()
	folders, err := os.ReadDir(overlays)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range folders {
		names = append(names, f.Name())
	}
	return names
}

// everything renders the chart with each file of values, and each overlay.
func everything(t *testing.T) []*rendered {
	t.Helper()
	var all []*rendered
	for _, file := range valuesFiles(t) {
		r, err := helm(t, "-f", file)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	}
	for _, name := range overlayNames(t) {
		all = append(all, kustomize(t, filepath.Join(overlays, name)))
	}
	return all
}

// selects reports whether an object has these labels.
func selects(selector, labels map[string]string) bool {
	for k, v := range selector {
		if labels[k] != v {
			return false
		}
	}
	return len(selector) > 0
}

// TestTypes decodes rendered objects into Kubernetes' own types, where these are known, and refuses unknown keys.
// TestAPIServer checks what only an API server can.
func TestTypes(t *testing.T) {
	types := runtime.NewScheme()
	if err := errors.Join(kinds.AddToScheme(types), inference.Install(types)); err != nil {
		t.Fatal(err)
	}
	strict := kjson.NewSerializerWithOptions(
		kjson.DefaultMetaFactory,
		types,
		types,
		kjson.SerializerOptions{Yaml: true, Strict: true},
	)
	decoded := map[string]bool{}
	for _, r := range everything(t) {
		for _, o := range r.objects {
			text, err := yaml.Marshal(map[string]any(o))
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := strict.Decode(text, nil, nil); err == nil {
				decoded[o.text("kind")] = true
			} else if !runtime.IsNotRegisteredError(err) {
				t.Errorf("%s: %s: %v", r.name, o, err)
			}
		}
	}
	for _, kind := range []string{"Deployment", "HorizontalPodAutoscaler", "InferencePool", "NetworkPolicy",
		"PodDisruptionBudget", "Role", "RoleBinding", "Service"} {
		if !decoded[kind] {
			t.Errorf("no %s was decoded", kind)
		}
	}
}

// TestReferences follows every name and selector from one object to another.
func TestReferences(t *testing.T) {
	for _, r := range everything(t) {
		t.Run(r.name, func(t *testing.T) {
			pods := []map[string]string{}
			for _, d := range r.all("Deployment") {
				labels := d.labels("spec", "template", "metadata", "labels")
				pods = append(pods, labels)
				if !selects(d.labels("spec", "selector", "matchLabels"), labels) {
					t.Errorf("%s does not select its own pods", d)
				}
			}
			selected := func(selector map[string]string) bool {
				return slices.ContainsFunc(
					pods,
					func(labels map[string]string) bool { return selects(selector, labels) },
				)
			}
			if strings.HasPrefix(r.name, "chart ") { // the chart has no engines
				for _, p := range r.all("InferencePool") {
					pods = append(pods, p.labels("spec", "selector", "matchLabels"))
				}
			}
			services := map[string]object{}
			for _, s := range r.all("Service") {
				services[s.text("metadata", "name")] = s
				if !selected(s.labels("spec", "selector")) {
					t.Errorf("%s selects no pod", s)
				}
			}
			for _, kind := range []string{"PodDisruptionBudget", "ServiceMonitor", "PodMonitor", "PodMonitoring"} {
				for _, o := range r.all(kind) {
					if !selected(o.labels("spec", "selector", "matchLabels")) {
						t.Errorf("%s selects nothing", o)
					}
				}
			}
			for _, o := range r.all("NetworkPolicy") {
				if !selected(o.labels("spec", "podSelector", "matchLabels")) {
					t.Errorf("%s selects no pod", o)
				}
			}
			pools := map[string]bool{}
			for _, p := range r.all("InferencePool") {
				pools[p.text("metadata", "name")] = true
				picker := services[p.text("spec", "endpointPickerRef", "name")]
				if picker == nil || p.at("spec", "endpointPickerRef", "port", "number") != 9002 ||
					picker.at("spec", "ports", 0, "port") != 9002 {
					t.Errorf("%s names no port 9002 of a Service", p)
				}
				if kvepp := r.kvepp(t); !slices.Contains(
					kvepp.strings("spec", "template", "spec", "containers", 0, "args"),
					"--pool-name="+p.text("metadata", "name"),
				) {
					t.Errorf("kvepp's arguments do not name %s", p)
				}
				if strings.Contains(r.name, "overlays") && !selected(p.labels("spec", "selector", "matchLabels")) {
					t.Errorf("%s selects none of the overlay's engines", p)
				}
			}
			gateways := map[string]bool{}
			for _, g := range r.all("Gateway") {
				gateways[g.text("metadata", "name")] = true
			}
			for _, route := range r.all("HTTPRoute") {
				if name := route.text("spec", "rules", 0, "backendRefs", 0, "name"); !pools[name] {
					t.Errorf("%s refers to the InferencePool %q, which does not exist", route, name)
				}
				if name := route.text("spec", "parentRefs", 0, "name"); !gateways[name] {
					t.Errorf("%s refers to the gateway %q, which does not exist", route, name)
				}
			}
			for _, rule := range r.all("DestinationRule") {
				if host, _, _ := strings.Cut(rule.text("spec", "host"), "."); services[host] == nil {
					t.Errorf("%s is for %q, which is not a Service here", rule, host)
				}
				if mode := rule.text("spec", "trafficPolicy", "tls", "mode"); mode != "SIMPLE" {
					t.Errorf("%s: TLS mode %q, but kvepp serves TLS", rule, mode)
				}
			}
			for _, b := range append(r.all("RoleBinding"), r.all("ClusterRoleBinding")...) {
				subject := b.list("subjects")[0]
				if slices.ContainsFunc([]string{"-metrics-reader", "-collector"}, func(of string) bool {
					return strings.HasSuffix(b.text("roleRef", "name"), of)
				}) {
					continue // rights of readers of metrics; TestReaders
				}
				if subject.text("namespace") != r.kvepp(t).text("metadata", "namespace") ||
					subject.text("name") != r.kvepp(t).text("spec", "template", "spec", "serviceAccountName") {
					t.Errorf("%s binds %v, but kvepp runs as another account", b, subject)
				}
			}
		})
	}
}

// TestOverlaysMove checks that a namespace applies to a whole overlay, with the subjects of bindings.
func TestOverlaysMove(t *testing.T) {
	for _, name := range overlayNames(t) {
		folder := t.TempDir()
		target, err := filepath.Abs(filepath.Join(overlays, name))
		if err != nil {
			t.Fatal(err)
		}
		relative, err := filepath.Rel(folder, target)
		if err != nil {
			t.Fatal(err)
		}
		text := fmt.Sprintf(
			"apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nnamespace: elsewhere\nresources: [%q]\n",
			relative,
		)
		if err := os.WriteFile(filepath.Join(folder, "kustomization.yaml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if r := kustomize(t, folder); bytes.Contains(r.text, []byte("namespace: default")) {
			t.Errorf("%s: an object stays in the namespace default:\n%s", name, r.text)
		}
	}
}

// TestBase checks that kustomize's base equals the chart's output.
func TestBase(t *testing.T) {
	text, err := run(
		t,
		program(t, "helm"),
		"template",
		"kvepp",
		chart,
		"--kube-version",
		kubernetes,
		"-f",
		filepath.Join(base, "values.yaml"),
	)
	if err != nil {
		t.Fatal(err)
	}
	derived(
		t,
		filepath.Join(base, "kvepp.yaml"),
		"# Written by `go test ./e2e/manifests -run 'Base|Envoy' -rewrite` from the chart and values.yaml.\n"+
			withoutHelm(
				text,
			),
	)
}

// leave makes Envoy switch from a killed replica of kvepp to the others.
const leave = `    # Envoy stops using a killed replica at once, and not after two checks, because its streams ` +
	`break off or it refuses
    # connections. The next successful check brings it back.
    outlier_detection:
      split_external_local_origin_errors: true
      consecutive_local_origin_failure: 3
      enforcing_consecutive_5xx: 0
      max_ejection_percent: 100
      base_ejection_time: 5s
`

// TestEnvoyConfiguration checks that the overlay's Envoy equals manifests/envoy's, except for its listener and the
// addresses of kvepp's replicas, and that Envoy accepts it.
func TestEnvoyConfiguration(t *testing.T) {
	text, err := os.ReadFile("../../manifests/envoy/original-dst.yaml")
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(text), "\nadmin:")
	if !ok || !strings.HasPrefix(head, "#") {
		t.Fatal("original-dst.yaml does not begin with a comment before admin:")
	}
	pool, kvepp, ok := strings.Cut("admin:"+rest, "\n  - name: kvepp\n")
	if !ok {
		t.Fatal("original-dst.yaml has no cluster kvepp")
	}
	const at = "{socket_address: {address: 0.0.0.0, port_value: 10080}}"
	if strings.Count(pool, at) != 1 {
		t.Fatalf("original-dst.yaml does not listen at %s", at)
	}
	pool = strings.Replace(
		pool,
		at,
		`{socket_address: {address: "::", ipv4_compat: true, port_value: 10080}}   # IPv6 and IPv4; 0.0.0.0 for a `+
			`kernel without IPv6`,
		1,
	)
	const check = "      grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}\n"
	for _, change := range [][2]string{
		{"type: STATIC", "type: STRICT_DNS\n    dns_refresh_rate: 1s   # a new replica is known before it leads"},
		{"address: 127.0.0.1, port_value: 9002", "address: kvepp-replicas, port_value: 9002"},
		{check, check + leave},
	} {
		if strings.Count(kvepp, change[0]) != 1 {
			t.Fatalf(
				"original-dst.yaml: its cluster kvepp has %q %d times, want once",
				change[0],
				strings.Count(kvepp, change[0]),
			)
		}
		kvepp = strings.Replace(kvepp, change[0], change[1], 1)
	}
	file := "../../manifests/kustomize/components/envoy/envoy-config.yaml"
	derived(
		t,
		file,
		"# Written by `go test ./e2e/manifests -run 'Base|Envoy' -rewrite` from manifests/envoy/original-dst.yaml, "+
			"which has\n# the comments; Envoy finds kvepp's replicas by the name of their Service.\n"+
			pool+"\n  - name: kvepp\n"+kvepp,
	)
	validate(t, "components/envoy", file)
}

// TestStockEnginesConfiguration checks that the Envoy of the chart and of the component envoy-stock-engines has the
// configuration manifests/envoy/stock-engines.yaml, except for its addresses, and that Envoy accepts the rendered
// configuration.
func TestStockEnginesConfiguration(t *testing.T) {
	text, err := os.ReadFile("../../manifests/envoy/stock-engines.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(text), "\nadmin:")
	pool, kvepp, ok2 := strings.Cut("admin:"+rest, "\n  - name: kvepp\n")
	if !ok || !ok2 {
		t.Fatal("stock-engines.yaml has no admin, or no cluster kvepp")
	}
	change := func(part, from, to string) string {
		if n := strings.Count(part, from); n != 1 {
			t.Fatalf("stock-engines.yaml has %q %d times in one part, want once", from, n)
		}
		return strings.Replace(part, from, to, 1)
	}
	pool = change(
		pool,
		"{socket_address: {address: 0.0.0.0, port_value: 10080}}",
		`{socket_address: {address: "::", ipv4_compat: true, port_value: 10080}}   # IPv6 and IPv4; 0.0.0.0 for a `+
			`kernel without IPv6`,
	)
	pool = change(pool, "type: STATIC", "type: STRICT_DNS\n    dns_refresh_rate: 1s")
	pool = change(pool, "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8001}}}\n", "")
	pool = change(pool, "{address: 127.0.0.1, port_value: 8002}", "{address: kvepp-engines, port_value: 8000}")
	kvepp = change(kvepp, "type: STATIC", "type: STRICT_DNS\n    dns_refresh_rate: 1s")
	kvepp = change(kvepp, "{address: 127.0.0.1, port_value: 9002}", "{address: kvepp-replicas, port_value: 9002}")
	derived(
		t,
		chart+"/envoy/stock-engines.yaml",
		"# Written by `go test ./e2e/manifests -run 'Base|Envoy|Engines' -rewrite` from "+
			"manifests/envoy/stock-engines.yaml: Envoy finds the\n# engines and kvepp's replicas by the names of "+
			"their Services.\n"+
			pool+"\n  - name: kvepp\n"+kvepp,
	)

	rendered, err := run(
		t,
		program(t, "helm"),
		"template",
		"kvepp",
		chart,
		"--kube-version",
		kubernetes,
		"-f",
		filepath.Join(base, "values.yaml"),
		"--set",
		"envoy.create=true",
		"--show-only",
		"templates/envoy.yaml",
	)
	if err != nil {
		t.Fatal(err)
	}
	derived(
		t,
		"../../manifests/kustomize/components/envoy-stock-engines/envoy.yaml",
		"# Written by `go test ./e2e/manifests -run 'Base|Envoy|Engines' -rewrite` from the chart.\n"+withoutHelm(
			rendered,
		),
	)

	for _, r := range everything(t) {
		for _, c := range r.all("ConfigMap") {
			config := c.text("data", "envoy.yaml")
			if config == "" {
				continue
			}
			file := filepath.Join(t.TempDir(), "envoy.yaml")
			if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
				t.Fatal(err)
			}
			validate(t, r.name, file)
			var o map[string]any
			if err := yaml.Unmarshal([]byte(config), &o); err != nil {
				t.Fatal(err)
			}
			services := map[string]object{}
			for _, s := range r.all("Service") {
				services[s.text("metadata", "name")] = s
			}
			var ports []any
			for _, cluster := range object(o).list("static_resources", "clusters") {
				for _, e := range cluster.list("load_assignment", "endpoints", 0, "lb_endpoints") {
					to := object(e.at("endpoint", "address", "socket_address").(map[string]any))
					s := services[to.text("address")]
					if s == nil || s.at("spec", "clusterIP") != "None" ||
						!slices.ContainsFunc(
							s.list("spec", "ports"),
							func(p object) bool { return p.at("port") == to.at("port_value") },
						) {
						t.Errorf(
							"%s: cluster %s has %v, which is not a port of a headless Service",
							r.name,
							cluster.text("name"),
							to,
						)
					}
					if cluster.text("name") == "pool" {
						ports = append(ports, to.at("port_value"))
					}
				}
			}
			if want, ok := r.one(t, "InferencePool").at("spec", "targetPorts").([]any); !ok || len(ports) != len(want) {
				t.Errorf("%s: Envoy's endpoints have the ports %v, the InferencePool %v", r.name, ports, want)
			}
			if !slices.Contains(
				r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args"),
				"--fallback-endpoints=2",
			) {
				t.Errorf("%s: kvepp names no fallback endpoints", r.name)
			}
		}
	}
}

// withoutHelm drops lines that would be wrong with kustomize: the tool that created the object, and the chart's
// version.
func withoutHelm(text []byte) string {
	var b strings.Builder
	for line := range strings.Lines(string(text)) {
		if !strings.Contains(line, "app.kubernetes.io/managed-by:") && !strings.Contains(line, "helm.sh/chart:") &&
			!strings.HasPrefix(line, "# Source:") {
			b.WriteString(line)
		}
	}
	return b.String()
}

// validate makes both Envoys validate a configuration.
func validate(t *testing.T, name, file string) {
	t.Helper()
	if err := parts.EnvoysAccept(t.Context(), file); err != nil {
		t.Errorf("%s: %v", name, err)
	}
}

// derived compares a file with its derivation, or with -rewrite writes it.
func derived(t *testing.T, file, want string) {
	t.Helper()
	if *rewrite {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("%s differs from its source; run go test ./e2e/manifests -run 'Base|Envoy|Engines' -rewrite", file)
	}
}

// TestReadme checks that the page names every overlay, and says whether a test runs it.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("../../manifests/README.md")
	if err != nil {
		t.Fatal(err)
	}
	said := map[string]string{}
	for line := range strings.Lines(string(text)) {
		cells := strings.Split(line, "|")
		if len(cells) > 3 && strings.HasPrefix(strings.TrimSpace(cells[1]), "`overlays/") {
			said[strings.Trim(strings.TrimSpace(cells[1]), "`")] = strings.TrimSpace(cells[2])
		}
	}
	want := map[string]bool{}
	for _, name := range overlayNames(t) {
		want["overlays/"+name] = true
	}
	for name := range maps.Keys(want) {
		if status := said[name]; status != "only rendered" && !strings.HasPrefix(status, "run") {
			t.Errorf("manifests/README.md says of %s %q, want \"run\" or \"only rendered\"", name, status)
		}
	}
	for name := range said {
		if !want[name] {
			t.Errorf("manifests/README.md names %s, which does not exist", name)
		}
	}
}

// TestPagesInstall checks that the commands in the pages render, and that kvepp accepts the resulting arguments.
func TestPagesInstall(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	kvepp, err := filepath.Abs("../../bin/kvepp")
	if err != nil {
		t.Fatal(err)
	}
	commands := 0
	for _, page := range append(pages, "../../README.md", "../../manifests/README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range regexp.MustCompile(`(?m)^helm install kvepp manifests/chart ([^\n]*)$`).FindAllStringSubmatch(
			strings.ReplaceAll(string(text), "\\\n", " "), -1) {
			if strings.Contains(c[1], " ... ") {
				continue // commands with an ellipsis are incomplete
			}
			commands++
			// Values that readers fill in are in capitals, which are invalid in names of objects.
			said := regexp.MustCompile(`\b(NAME|REGISTRY|HUB|TAG)\b`).ReplaceAllStringFunc(c[1], strings.ToLower)
			r, err := helm(t, strings.Fields(strings.ReplaceAll(said, "'", ""))...)
			if err != nil {
				t.Errorf("%s: %s: %v", page, c[1], err)
				continue
			}
			pod := object(r.kvepp(t).at("spec", "template", "spec").(map[string]any))
			for _, c := range append(pod.list("initContainers"), pod.list("containers")...) {
				if _, err := run(t, append(append([]string{kvepp}, c.strings("args")...), "--help")...); err != nil {
					t.Errorf("%s: kvepp %s: %v", page, strings.Join(c.strings("args"), " "), err)
				}
			}
		}
	}
	if commands < 5 {
		t.Errorf("%d commands found", commands)
	}
}

// envoyConfigurations returns every shipped configuration of Envoy: the files, and those rendered into ConfigMaps.
func envoyConfigurations(t *testing.T) map[string]object {
	t.Helper()
	all := map[string]object{}
	add := func(name string, text []byte) {
		var o map[string]any
		if err := yaml.Unmarshal(text, &o); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all[name] = o
	}
	for _, pattern := range []string{"../../manifests/envoy/*.yaml", chart + "/envoy/*.yaml",
		"../../manifests/kustomize/components/*/envoy-config.yaml"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files (%v)", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			add(file, text)
		}
	}
	for _, r := range everything(t) {
		for _, c := range r.all("ConfigMap") {
			for key := range c.labels("data") {
				if strings.HasPrefix(key, "envoy") {
					add(r.name+" "+key, []byte(c.text("data", key)))
				}
			}
		}
	}
	return all
}

// TestEnvoyLimits: in every shipped configuration of Envoy, one client cannot reach the limits at which Envoy ends the
// connections to kvepp that clients share (e2e's TestOneClientCutsNoOthers), and the listeners have the limits that
// docs/security.md names.
func TestEnvoyLimits(t *testing.T) {
	want := map[string]any{
		"max_outbound_frames":         4000000,
		"max_outbound_control_frames": 1000000,
		"max_concurrent_streams":      250,
	}
	for name, o := range envoyConfigurations(t) {
		processors := 0
		for _, cluster := range o.list("static_resources", "clusters") {
			if !strings.HasPrefix(cluster.text("name"), "kvepp") {
				continue
			}
			processors++
			if got := cluster.text("connect_timeout"); got != "10s" {
				t.Errorf(
					"%s: cluster %s has the connect_timeout %q, want 10s: requests wait for the handshake of a "+
						"further connection",
					name,
					cluster.text("name"),
					got,
				)
			}
			got := cluster.at(
				"typed_extension_protocol_options",
				"envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
				"explicit_http_config",
				"http2_protocol_options",
			)
			if options, _ := got.(map[string]any); filepath.Base(name) == "shadow.yaml" &&
				options["initial_stream_window_size"] == 2147483647 {
				delete(options, "initial_stream_window_size") // TestShadowFails in e2e shows what it is for
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("%s: cluster %s has the HTTP/2 options %v, want %v", name, cluster.text("name"), got, want)
			}
		}
		if processors == 0 {
			t.Errorf("%s has no cluster for kvepp", name)
		}
		for _, l := range o.list("static_resources", "listeners") {
			manager := object(l.at("filter_chains", 0, "filters", 0, "typed_config").(map[string]any))
			if got, want := manager.at("http2_protocol_options"),
				(map[string]any{"initial_stream_window_size": 1048576,
					"max_outbound_frames": 200000}); !reflect.DeepEqual(
				got,
				want,
			) {
				t.Errorf("%s: the listener has the HTTP/2 options %v, want %v", name, got, want)
			}
			if l.at("per_connection_buffer_limit_bytes") != 1048576 ||
				manager.text("request_headers_timeout") != "30s" ||
				manager.text("request_timeout") != "300s" ||
				manager.text("stream_idle_timeout") != "3600s" {
				t.Errorf("%s: the listener lacks a buffer limit, or a timeout", name)
			}
		}
		if o.at(
			"overload_manager",
			"resource_monitors",
			0,
			"typed_config",
			"max_active_downstream_connections",
		) != 50000 {
			t.Errorf("%s: no limit of clients' connections", name)
		}
	}
	// Istio writes the cluster itself, and an EnvoyFilter sets its options.
	filters := 0
	for _, r := range everything(t) {
		for _, o := range r.all("EnvoyFilter") {
			filters++
			patch := object(o.list("spec", "configPatches")[0])
			if got := patch.at("patch", "value", "typed_extension_protocol_options",
				"envoy.extensions.upstreams.http.v3.HttpProtocolOptions", "explicit_http_config",
				"http2_protocol_options"); !reflect.DeepEqual(
				got,
				want,
			) {
				t.Errorf("%s: %s has the HTTP/2 options %v, want %v", r.name, o, got, want)
			}
			rule := r.one(t, "DestinationRule")
			host, _, _ := strings.Cut(rule.text("spec", "host"), ".")
			if got, want := patch.text("match", "cluster", "service"), host+"."+o.text("metadata", "namespace")+
				".svc.cluster.local"; got != want ||
				patch.at("match", "cluster", "portNumber") != 9002 {
				t.Errorf("%s: %s is for the cluster of %s, want %s", r.name, o, got, want)
			}
		}
		if len(r.all("EnvoyFilter")) != len(r.all("DestinationRule")) {
			t.Errorf(
				"%s: %d DestinationRules for Istio, and %d EnvoyFilters",
				r.name,
				len(r.all("DestinationRule")),
				len(r.all("EnvoyFilter")),
			)
		}
	}
	if filters < 2 {
		t.Errorf("%d EnvoyFilters", filters)
	}
	// A page that shows such a cluster must show its limits.
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range append(pages, "../../README.md", "../../manifests/README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("http2_protocol_options:")) &&
			!bytes.Contains(text, []byte("max_outbound_frames: 4000000")) {
			t.Errorf("%s shows HTTP/2 options of Envoy's without max_outbound_frames", page)
		}
	}
}

// TestShadowOfControllers: the examples for gateways whose controllers write Envoy's configuration have the filter and
// the cluster's bounds of shadow.yaml, which the end-to-end tests run.
func TestShadowOfControllers(t *testing.T) {
	read := func(file string) object {
		var o map[string]any
		text, err := os.ReadFile("../../manifests/" + file)
		if err == nil {
			err = yaml.Unmarshal(text, &o)
		}
		if err != nil {
			t.Fatal(err)
		}
		return o
	}
	tested := read("envoy/shadow.yaml")
	filter := object(tested.at("static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config",
		"http_filters", 0).(map[string]any))
	cluster := tested.list("static_resources", "clusters")[1]
	istio := read("shadow/istio.yaml").list("spec", "configPatches")
	host := istio[1].text("match", "cluster", "service")
	grpc := istio[0].at("patch", "value", "typed_config", "grpc_service", "envoy_grpc").(map[string]any)
	if grpc["cluster_name"] != "outbound|9002||"+host {
		t.Errorf("the filter asks the cluster %v, and the Service is %s", grpc["cluster_name"], host)
	}
	grpc["cluster_name"] = "kvepp"
	if got := istio[0].at("patch", "value"); !reflect.DeepEqual(got, map[string]any(filter)) {
		t.Errorf("Istio's filter is\n%v\nwant\n%v", got, filter)
	}
	bounds := istio[1].at("patch", "value").(map[string]any)
	for name, got := range bounds {
		if !reflect.DeepEqual(got, cluster.at(name)) {
			t.Errorf("Istio's cluster has %s %v, want %v", name, got, cluster.at(name))
		}
	}
	extension := object(read("shadow/envoy-gateway.yaml").list("spec", "extProc")[0])
	want := filter.at("typed_config", "response_attributes")
	got := extension.at("processingMode", "response", "attributes")
	if len(bounds) != 5 || extension.at("shadowMode") != true || !reflect.DeepEqual(got, want) {
		t.Errorf("%d bounds; Envoy Gateway sends %v, want %v", len(bounds), got, want)
	}
}
