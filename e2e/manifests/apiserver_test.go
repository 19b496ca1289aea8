package manifests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/parts"
	"kvepp/test/harness/process"
)

// auditPolicy makes the API server record which account requested what.
const auditPolicy = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: " +
	"Metadata}]\n"

// startServer starts an API server with the CRDs of all kinds that are rendered here, from their own projects. It
// appends its audit log to the file audit.
func startServer(t *testing.T) (s *apiserver.Server, audit string) {
	t.Helper()
	folder, err := parts.Folder("KVEPP_CRDS", "crds")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	policy := filepath.Join(dir, "policy.yaml")
	audit = filepath.Join(dir, "audit.log")
	if err := os.WriteFile(policy, []byte(auditPolicy), 0o644); err != nil {
		t.Fatal(err)
	}
	s, err = apiserver.Start(t.Context(), apiserver.Config{Programs: os.Getenv("KVEPP_KUBE"), Dir: t.TempDir(),
		Flags: []string{
			"--feature-gates=ImageVolume=true",
			"--audit-policy-file=" + policy,
			"--audit-log-path=" + audit,
		}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	pool, err := apiserver.InferencePoolCRD()
	if err != nil {
		t.Fatal(err)
	}
	kinds := []string{pool}
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil || len(files) == 0 {
		t.Fatal("no CustomResourceDefinitions in "+folder, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for dec := yaml.NewDecoder(bytes.NewReader(text)); ; {
			var m map[string]any
			if err := dec.Decode(&m); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			// Istio's are one file.
			if kind := object(m).text("spec", "names", "kind"); object(
				m,
			).text(
				"spec",
				"group",
			) == "networking.istio.io" &&
				kind != "DestinationRule" &&
				kind != "EnvoyFilter" ||
				m == nil {
				continue
			}
			one, err := yaml.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			kinds = append(kinds, string(one))
		}
	}
	for _, crd := range kinds {
		if err := s.ApplyCRD(t.Context(), crd); err != nil {
			t.Fatal(err)
		}
	}
	return s, audit
}

// TestAPIServer applies everything that is rendered to a real API server with strict field validation. Pods of kvepp
// and Envoy run in a namespace with the restricted pod security level.
func TestAPIServer(t *testing.T) {
	s, audit := startServer(t)
	ctx := t.Context()

	for _, name := range []string{"istio", "envoy-gateway"} { // the examples of docs/shadow.md
		text, err := os.ReadFile("../../manifests/shadow/" + name + ".yaml")
		if err == nil {
			err = s.Apply(ctx, "default", string(text))
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for i, r := range everything(t) {
		t.Run(r.name, func(t *testing.T) {
			namespace := fmt.Sprintf("restricted-%d", i)
			_, err := s.Client.CoreV1().Namespaces().Create(
				ctx,
				&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: namespace,
					Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"}}},
				metav1.CreateOptions{},
			)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.Apply(ctx, namespace, strings.ReplaceAll(string(r.text), "namespace: default",
				"namespace: "+namespace)); err != nil {
				t.Fatal(err)
			}
			for _, d := range r.all("Deployment") {
				if d.text("metadata", "labels", "app.kubernetes.io/name") != "kvepp" &&
					!strings.HasSuffix(d.text("metadata", "name"), "envoy") {
					continue
				}
				var pod corev1.Pod
				text, err := json.Marshal(d.at("spec", "template"))
				if err != nil {
					t.Fatal(err)
				}
				if err := json.Unmarshal(text, &pod); err != nil {
					t.Fatal(err)
				}
				pod.Name = d.text("metadata", "name")
				if name := pod.Spec.ServiceAccountName; name != "" && len(r.all("ServiceAccount")) == 0 {
					account := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Name: name}}
					if _, err := s.Client.CoreV1().ServiceAccounts(namespace).Create(ctx, account,
						metav1.CreateOptions{}); err != nil {
						t.Fatal(err)
					}
				} else if name == "" {
					pod.Spec.ServiceAccountName = "kvepp" // no controller creates "default" here
				}
				if _, err := s.Client.CoreV1().Pods(namespace).Create(ctx, &pod,
					metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err != nil {
					t.Errorf("%s: %v", d, err)
				}
			}
		})
	}

	t.Run("unknown keys are refused", func(t *testing.T) {
		r, err := helm(t, "-f", valuesFiles(t)[0])
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Apply(ctx, "wrong", strings.Replace(string(r.text), "readOnlyRootFilesystem",
			"readOnlyRootFileSystem", 1)); err == nil {
			t.Error("the server accepted an unknown key")
		}
	})

	t.Run("rights with shared requests", func(t *testing.T) { testRights(t, s, audit, true) })
	t.Run("rights with a leader", func(t *testing.T) { testRights(t, s, audit, false) })
}

// testRights runs two kvepps with the chart's rights and arguments. It checks that they request nothing else, and that
// they use all their rights. With sharing, both replicas decide, which is the chart's default; otherwise one leads.
func testRights(t *testing.T, s *apiserver.Server, audit string, sharing bool) {
	namespace, values := "rights-leader", "pool.selector.app=engine,replicas=2,engine=dynamo"
	if sharing {
		namespace = "rights-sharing"
	} else {
		values += ",sharing.enabled=false,leaderElection.enabled=true"
	}
	ctx := t.Context()
	r, err := helm(t, "-n", namespace, "--set", values)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Apply(ctx, namespace, string(r.text)); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if err := s.RunPod(ctx, apiserver.Pod{Namespace: namespace, Name: fmt.Sprintf("engine-%d", i),
			Labels: map[string]string{"app": "engine"}, IPs: []string{fmt.Sprintf("127.0.0.%d", 5+i)}}); err != nil {
			t.Fatal(err)
		}
	}
	kubeconfig, err := s.AccountKubeconfig(ctx, namespace, "kvepp")
	if err != nil {
		t.Fatal(err)
	}
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("the secret that both replicas have\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	files := strings.NewReplacer("$(POD_NAMESPACE)", namespace, "/var/run/secrets/replicas/token", token)
	start := func(name string) (metrics string, cmd *exec.Cmd, ended chan error) {
		var args []string
		for _, arg := range r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args") {
			args = append(args, files.Replace(arg))
		}
		metrics = free(t)
		args = append(
			args,
			"--kubeconfig="+kubeconfig,
			"--bind-address=127.0.0.1",
			"--grpc-port="+port(free(t)),
			"--grpc-health-port="+port(free(t)),
			"--metrics-address="+metrics,
		)
		if sharing {
			// An EndpointSlice cannot hold loopback addresses, so the replicas do not find one another here.
			args = append(args, "--replica-port="+port(free(t)))
		} else {
			args = append(args, "--drain-delay=1s", "--ha-handover-timeout=2s") // no gateway uses the second
		}
		cmd = exec.Command("../../bin/kvepp", args...)
		cmd.Env = append(os.Environ(), "POD_NAME="+name)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out := &bytes.Buffer{}
		ended = make(chan error, 1)
		cmd.Stdout, cmd.Stderr = out, out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			ended <- cmd.Wait()
			close(done)
		}()
		t.Cleanup(func() {
			_ = cmd.Process.Kill() // it has ended unless the test failed
			<-done
			if t.Failed() {
				t.Logf("%s:\n%s", name, out)
			}
		})
		return metrics, cmd, ended
	}
	leader := func() string {
		lease, err := s.Client.CoordinationV1().Leases(namespace).Get(ctx, "kvepp-kvepp", metav1.GetOptions{})
		if err != nil || lease.Spec.HolderIdentity == nil {
			return ""
		}
		return *lease.Spec.HolderIdentity
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := process.Until(ctx, func() error {
			if !f() {
				return errors.New(what)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	// Metrics are read as the chart's notes say: with the token of an account that is bound to the chart's role.
	if err := s.Apply(ctx, "", strings.ReplaceAll(`{apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRoleBinding,
  metadata: {name: kvepp-NAMESPACE-metrics},
  roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: kvepp-NAMESPACE-metrics-reader},
  subjects: [{kind: ServiceAccount, name: prometheus, namespace: NAMESPACE}]}`, "NAMESPACE", namespace)); err != nil {
		t.Fatal(err)
	}
	prometheus, err := s.AccountKubeconfig(ctx, namespace, "prometheus")
	if err != nil {
		t.Fatal(err)
	}
	account, err := clientcmd.BuildConfigFromFlags("", prometheus)
	if err != nil {
		t.Fatal(err)
	}
	metrics, first, firstEnded := start("kvepp-0")
	read := func(address, token string) (status int, text string) {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://"+address+"/metrics", nil)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			req.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return 0, "" // not there yet
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, ""
		}
		return resp.StatusCode, string(body)
	}
	asksForToken := func(address string) func() bool {
		return func() bool { status, _ := read(address, ""); return status == http.StatusUnauthorized }
	}
	eventually("metrics ask for a token", asksForToken(metrics))
	has := func(sample string) func() bool {
		return func() bool {
			status, text := read(metrics, account.BearerToken)
			return status == http.StatusOK && slices.Contains(strings.Split(text, "\n"), sample)
		}
	}
	eventually("two workers are known", has("kvepp_workers 2"))
	one := ""
	if !sharing {
		eventually("a leader holds the lease", func() bool { return leader() != "" })
		one = leader()
	}
	secondMetrics, second, secondEnded := start("kvepp-1")
	eventually("the second replica's metrics ask for a token", asksForToken(secondMetrics))
	if err := s.RemovePod(ctx, namespace, "engine-1"); err != nil {
		t.Fatal(err)
	}
	eventually("one worker is known", has("kvepp_workers 1"))
	if err := first.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-firstEnded; err != nil {
		t.Error(err)
	}
	if !sharing {
		eventually("the other leads", func() bool { return leader() != "" && leader() != one })
	}
	if err := second.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := <-secondEnded; err != nil {
		t.Error(err)
	}

	checkRights(t, r, audit, "system:serviceaccount:"+namespace+":kvepp")
}

// checkRights reads the API server's audit log. The user must have been refused nothing, and must have used each right
// of the chart's Role.
func checkRights(t *testing.T, r *rendered, audit, user string) {
	used := map[string]bool{}
	text, err := os.ReadFile(audit)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var event struct {
			Verb           string
			User           struct{ Username string }
			ObjectRef      struct{ APIGroup, Resource, Namespace, Name string }
			ResponseStatus struct{ Code int }
			RequestURI     string
		}
		if err := json.Unmarshal(line, &event); err != nil {
			t.Fatal(err)
		}
		if event.User.Username != user {
			continue
		}
		if event.ResponseStatus.Code == 403 {
			t.Errorf("forbidden: %s %s", event.Verb, event.RequestURI)
		}
		used[event.ObjectRef.APIGroup+"/"+event.ObjectRef.Resource+" "+event.Verb] = true
	}
	for _, right := range []string{"authentication.k8s.io/tokenreviews create",
		"authorization.k8s.io/subjectaccessreviews create"} {
		if !used[right] {
			t.Errorf("the right to %s is not used", right)
		}
	}
	for _, rule := range r.one(t, "Role").list("rules") {
		for _, group := range rule.strings("apiGroups") {
			for _, resource := range rule.strings("resources") {
				if slices.Contains([]string{"inferenceobjectives", "inferencemodelrewrites"}, resource) {
					continue // requested only in clusters with such kinds
				}
				for _, verb := range rule.strings("verbs") {
					// A watch from the beginning also lists; older API servers need both requests.
					if key := group + "/" + resource + " " + verb; !used[key] && verb != "list" {
						t.Errorf("the right to %s is not used", key)
					}
				}
			}
		}
	}
	if t.Failed() {
		t.Logf("rights used: %v", used)
	}
}
