package kind

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/process"
)

// suiteRun is a run of the conformance suite of the Gateway API Inference Extension behind a gateway, with kvepp as its
// endpoint pickers.
type suiteRun struct {
	part    string // of run.sh, which is in the report's name too
	class   string
	gateway string // its name in the report
	option  string // of the suite
	ends    string // the phase of the suite's Pod at its end: Failed if the gateway fails tests
	passes  []string
}

// suiteNamespaces creates the suite's namespaces. The suite would create them itself, but it waits until each has a
// Pod, and some gateways start none where their Gateway is.
func suiteNamespaces(t *testing.T) (infra, backend *namespace) {
	t.Helper()
	return newNamespace(t, "inference-conformance-infra"), newNamespace(t, "inference-conformance-app-backend")
}

// conformance runs the suite in a Pod in its own namespace for Gateways. It fails the test unless the named tests pass,
// and all results are those in docs/conformance.
func (n *namespace) conformance(run suiteRun) {
	n.t.Helper()
	commit, err := exec.Command("git", "describe", "--always", "--dirty=-modified", "--exclude=*").Output()
	if err != nil {
		commit = []byte("unknown")
	}
	n.t.Cleanup(func() { // it belongs to no namespace
		n.run("", "kubectl", "delete", "clusterrolebinding", "kvepp-e2e-suite", "--ignore-not-found")
	})
	n.apply(read(n.t, "testdata/suite.yaml"), "{namespace}", n.name, "{class}", run.class, "{gateway}", run.gateway,
		"{option}", run.option, "{version}", strings.TrimSpace(string(commit)))
	ctx, cancel := context.WithTimeout(n.t.Context(), 17*time.Minute)
	defer cancel()
	var phase string
	err = process.Until(ctx, func() (err error) {
		phase, err = n.run("", "kubectl", "get", "pod", "suite", "-o", "jsonpath={.status.phase}")
		if err == nil && phase != "Succeeded" && phase != "Failed" {
			err = fmt.Errorf("the suite's pod is %s", phase)
		}
		return err
	})
	log := n.kubectl("logs", "suite")
	for line := range strings.Lines(log) {
		if strings.HasPrefix(line, "    --- ") {
			n.t.Log(strings.TrimSpace(line))
		}
	}
	if err != nil || phase != run.ends {
		n.t.Errorf("%v, %s; its last output:\n%s", err, phase, n.kubectl("logs", "suite", "--tail=200"))
	}
	for _, name := range run.passes {
		if !strings.Contains(log, "--- PASS: TestConformance/"+name+" ") {
			n.t.Errorf("%s did not pass", name)
		}
	}
	n.checkReport(run.part, n.kubectl("get", "pod", "suite", "-o",
		"jsonpath={.status.containerStatuses[0].state.terminated.message}"))
}

// checkReport compares the results of the suite's report with those in docs/conformance. With -rewrite, and if there is
// none, it writes the report there.
func (n *namespace) checkReport(part, report string) {
	n.t.Helper()
	file, err := filepath.Abs("../../docs/conformance/gaie-v1.6.0-" + part + ".yaml")
	if err != nil {
		n.t.Fatal(err)
	}
	results := func(text string) any {
		n.t.Helper()
		var r struct{ Profiles any }
		if err := yaml.Unmarshal([]byte(text), &r); err != nil || r.Profiles == nil {
			n.t.Fatalf("not a report: %v\n%s", err, text)
		}
		return r.Profiles
	}
	got := results(report)
	if _, err := os.Stat(file); os.IsNotExist(err) || *rewrite {
		head := "# Written by the suite in make e2e-" + part + ", with kvepp as its pickers: docs/gateways.md.\n"
		err := os.MkdirAll(filepath.Dir(file), 0o755)
		if err == nil {
			err = os.WriteFile(file, []byte(head+report+"\n"), 0o644)
		}
		if err != nil {
			n.t.Fatal(err)
		}
		n.t.Logf("the suite's report is in %s: add it to the commit", file)
		return
	}
	if kept := results(read(n.t, file)); !reflect.DeepEqual(got, kept) {
		n.t.Errorf(
			"the suite's results differ from %s; test/kind/run.sh %s -rewrite keeps these:\n%s", file, part, report,
		)
	}
}
