package manifests

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"go.yaml.in/yaml/v3"
)

// series are the metrics of a running kvepp: for each name in a query, the values of each label.
type series map[string]map[string][]string

// nowhere is the kubeconfig of an API server that does not answer.
const nowhere = `
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
users: [{name: u, user: {}}]
current-context: c
`

// exported returns the metrics of a kvepp with one endpoint and a cluster, which exports all its series at zero.
func exported(t *testing.T) series {
	t.Helper()
	dir := t.TempDir()
	endpoints := filepath.Join(dir, "endpoints.yaml")
	if err := os.WriteFile(endpoints, []byte(
		"endpoints:\n- {name: w, address: 127.0.0.1:1, kvEvents: tcp://127.0.0.1:2}\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	kubeconfig := filepath.Join(dir, "kubeconfig")
	if err := os.WriteFile(kubeconfig, []byte(nowhere), 0o644); err != nil {
		t.Fatal(err)
	}
	address := free(t)
	cmd := exec.CommandContext(
		t.Context(),
		"../../bin/kvepp",
		"serve",
		"--kubeconfig="+kubeconfig,
		"--pool-name=p",
		"--ha-enable-leader-election",
		"--metrics-endpoint-auth=false",
		"--endpoints="+endpoints,
		"--model=m="+dir,
		"--bind-address=127.0.0.1",
		"--grpc-port="+port(free(t)),
		"--grpc-health-port="+port(free(t)),
		"--metrics-address="+address,
		"--replica-peers=127.0.0.1:1",
		"--replica-port="+port(free(t)),
		"--warmup-timeout=1ms",
		"--router-admission=working-set",
	)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { cmd.Process.Kill(); <-ended }()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(scrape(t, address, ended, &out).Body)
	if err != nil {
		t.Fatal(err)
	}
	all := series{}
	for name, family := range families {
		names := []string{name}
		if family.GetType().String() == "HISTOGRAM" {
			names = []string{name + "_bucket", name + "_sum", name + "_count"}
		}
		for _, n := range names {
			if all[n] == nil {
				all[n] = map[string][]string{}
			}
			for _, m := range family.GetMetric() {
				for _, l := range m.GetLabel() {
					all[n][l.GetName()] = append(all[n][l.GetName()], l.GetValue())
				}
			}
			if strings.HasSuffix(n, "_bucket") {
				all[n]["le"] = nil
			}
		}
	}
	return all
}

// ofScrapes are the labels that Prometheus adds to the metrics of a pod.
var ofScrapes = []string{"namespace", "job", "pod", "instance"}

var (
	selectors  = regexp.MustCompile(`([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(\{[^}]*\})`)
	matchers   = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	grouping   = regexp.MustCompile(`\b(?:by|without|on|ignoring|group_left|group_right)\s*(?:\(([^)]*)\))?`)
	names      = regexp.MustCompile(`\b(?:kvepp|dynamo|inference|llm_d|go|process|up)_?[a-zA-Z0-9_:]*`)
	alertNames = regexp.MustCompile("`(Kvepp[A-Za-z]+)`")
	words      = regexp.MustCompile(`\b[a-zA-Z_][a-zA-Z0-9_]*\b`)
)

// check returns the faults of a query: metrics, labels or label values that kvepp does not export.
func (all series) check(query string) (faults []string) {
	bare := matchers.ReplaceAllString(query, "") // label names and values are not metrics
	bare = grouping.ReplaceAllString(bare, "")
	found := names.FindAllString(bare, -1)
	if len(found) == 0 {
		faults = append(faults, "no metric of kvepp")
	}
	known := slices.Clone(ofScrapes)
	for _, name := range found {
		labels, ok := all[name]
		if !ok {
			faults = append(faults, name+" is not exported")
		}
		for l := range labels {
			known = append(known, l)
		}
	}
	for _, m := range grouping.FindAllStringSubmatch(query, -1) {
		for _, l := range words.FindAllString(m[1], -1) {
			if !slices.Contains(known, l) {
				faults = append(faults, "no metric here has the label "+l)
			}
		}
	}
	for _, s := range selectors.FindAllStringSubmatch(query, -1) {
		for _, m := range matchers.FindAllStringSubmatch(s[2], -1) {
			label, op, value := m[1], m[2], m[3]
			if slices.Contains(ofScrapes, label) {
				continue
			}
			values, ok := all[s[1]][label]
			if !ok {
				faults = append(faults, s[1]+" has no label "+label)
				continue
			}
			for _, one := range strings.Split(value, "|") {
				re, err := regexp.Compile(
					"^(?:" + map[bool]string{true: one, false: regexp.QuoteMeta(one)}[strings.HasSuffix(op,
						"~")] + ")$",
				)
				if err != nil {
					faults = append(faults, err.Error())
				} else if !slices.ContainsFunc(values, re.MatchString) {
					faults = append(faults, s[1]+" never has "+label+"="+one)
				}
			}
		}
	}
	return faults
}

// TestQueries checks that alerts and dashboard use only exported metrics, and that docs/operations.md names each alert.
func TestQueries(t *testing.T) {
	all := exported(t)

	// First check this test's own check.
	for query, fault := range map[string]string{
		`kvepp_workers == 0`:                                  "",
		`rate(kvepp_requests_total{code="200"}[5m])`:          "",
		`kvepp_nonsense > 0`:                                  "kvepp_nonsense is not exported",
		`kvepp_phase_seconds > 0`:                             "kvepp_phase_seconds is not exported",
		`sum by (reason) (kvepp_workers)`:                     "no metric here has the label reason",
		`kvepp_requests_total{reason="x"}`:                    "kvepp_requests_total has no label reason",
		`kvepp_decisions_total{reason=~"kv|nonsense"}`:        "kvepp_decisions_total never has reason=nonsense",
		`histogram_quantile(0.5, kvepp_phase_seconds_bucket)`: "",
	} {
		if faults := strings.Join(all.check(query), "; "); faults != fault {
			t.Fatalf("%s: %q, want %q", query, faults, fault)
		}
	}

	var rules struct {
		Groups []struct {
			Name  string
			Rules []struct {
				Alert, Expr, For    string
				Labels, Annotations map[string]string
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(chart, "alerts/kvepp.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&rules); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, g := range rules.Groups {
		for _, r := range g.Rules {
			if seen[r.Alert] || !strings.HasPrefix(r.Alert, "Kvepp") {
				t.Errorf("the alert name %q is a duplicate, or does not begin with Kvepp", r.Alert)
			}
			seen[r.Alert] = true
			if s := r.Labels["severity"]; s != "critical" && s != "warning" && s != "info" ||
				r.Annotations["summary"] == "" ||
				r.Annotations["description"] == "" {
				t.Errorf("%s: severity %q, %v", r.Alert, s, r.Annotations)
			}
			for _, fault := range all.check(r.Expr) {
				t.Errorf("%s: %s", r.Alert, fault)
			}
		}
	}
	if len(seen) == 0 {
		t.Error("no alerts")
	}
	operations, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]bool{}
	for _, m := range alertNames.FindAllSubmatch(operations, -1) {
		told[string(m[1])] = true
	}
	for name := range told {
		if !seen[name] {
			t.Errorf("docs/operations.md names the alert %s, which does not exist", name)
		}
	}
	for name := range seen {
		if !told[name] {
			t.Errorf("docs/operations.md does not name the alert %s; add it with what to do", name)
		}
	}

	checkTriggers(t, all)

	var dashboard struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	text, err = os.ReadFile(filepath.Join(chart, "dashboards/kvepp.json"))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &dashboard); err != nil {
		t.Fatal(err)
	}
	for _, p := range dashboard.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("the panel %q has no query", p.Title)
		}
		for _, target := range p.Targets {
			for _, fault := range all.check(target.Expr) {
				t.Errorf("the panel %q: %s", p.Title, fault)
			}
		}
	}
	if len(dashboard.Panels) == 0 {
		t.Error("no panels")
	}
}

// checkTriggers checks the queries with which KEDA asks for kvepp's metrics.
func checkTriggers(t *testing.T, all series) {
	t.Helper()
	queries := 0
	for _, r := range everything(t) {
		for _, o := range r.all("ScaledObject") {
			for _, trigger := range o.list("spec", "triggers") {
				if trigger.text("type") != "prometheus" {
					continue
				}
				queries++
				for _, fault := range all.check(trigger.text("metadata", "query")) {
					t.Errorf("%s: %s: %s", r.name, o, fault)
				}
			}
		}
	}
	if queries < 4 {
		t.Errorf("KEDA asks only %d queries", queries)
	}
}
