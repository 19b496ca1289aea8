// Package kube runs kvepp against a real Kubernetes API server: etcd and kube-apiserver, without a kubelet. Pods are
// servers of the test at loopback addresses. Envoy is real too. `make test-kube` installs the programs.
package kube

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/parts"
	"kvepp/test/harness/process"
)

// cluster is the API server that most tests share; each has its own namespace. Tests that stop it are not parallel, so
// they end before others that need it begin.
var cluster *apiserver.Server

func TestMain(m *testing.M) { os.Exit(parts.Run(withCluster{m}, "test-kube", "KVEPP_KUBE")) }

// withCluster runs the tests with cluster.
type withCluster struct{ *testing.M }

func (m withCluster) Run() int {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if cluster, err = startCluster(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer cluster.Close()
	return m.M.Run()
}

// startCluster starts an API server with the InferencePool CRD.
func startCluster(ctx context.Context) (*apiserver.Server, error) {
	crd, err := apiserver.InferencePoolCRD()
	if err != nil {
		return nil, err
	}
	s, err := apiserver.Start(ctx, apiserver.Config{Programs: os.Getenv("KVEPP_KUBE")})
	if err != nil {
		return nil, err
	}
	if err := s.ApplyCRD(ctx, crd); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// eventually waits until f returns nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	if err := process.Until(ctx, f); err != nil {
		t.Fatal(err)
	}
}

// must fails the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestServer checks the behaviour of the API server that the other tests need.
func TestServer(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s, err := startCluster(ctx)
	must(t, err)
	defer s.Close()

	t.Run("an InferencePool is validated", func(t *testing.T) {
		const pool = `
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: pool}
spec:
  selector: {matchLabels: {app: engine}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: kvepp, port: {number: 9002}}
`
		must(t, s.Apply(ctx, "pools", pool))
		if err := s.Apply(ctx, "pools", strings.Replace(pool, ", port: {number: 9002}", "", 1)); !apierrors.IsInvalid(
			err,
		) {
			t.Errorf("a picker without a port: error %v, want an invalid object", err)
		}
		if err := s.Apply(ctx, "pools", strings.Replace(pool, "targetPorts", "targetPort", 1)); err == nil {
			t.Error("the server accepted an unknown field")
		}
	})

	t.Run("a pod is ready, then terminating, then deleted", func(t *testing.T) {
		must(t, s.RunPod(ctx, apiserver.Pod{Name: "engine", IPs: []string{"127.0.0.5"}}))
		must(
			t,
			s.RunPod(
				ctx,
				apiserver.Pod{Name: "engine", IPs: []string{"127.0.0.5"}, Labels: map[string]string{"a": "b"}},
			),
		)
		pod, err := s.Client.CoreV1().Pods("default").Get(ctx, "engine", metav1.GetOptions{})
		must(t, err)
		if pod.Status.PodIP != "127.0.0.5" || pod.Labels["a"] != "b" || pod.Status.Conditions[0].Status != "True" {
			t.Errorf("%+v, labels %v", pod.Status, pod.Labels)
		}
		must(t, s.TerminatePod(ctx, "default", "engine"))
		pod, err = s.Client.CoreV1().Pods("default").Get(ctx, "engine", metav1.GetOptions{})
		must(t, err)
		if pod.DeletionTimestamp == nil {
			t.Error("the pod is not terminating")
		}
		must(t, s.RemovePod(ctx, "default", "engine"))
		if _, err = s.Client.CoreV1().Pods("default").Get(ctx, "engine", metav1.GetOptions{}); !apierrors.IsNotFound(
			err,
		) {
			t.Errorf("the pod still exists: %v", err)
		}
	})

	t.Run("an account has the rights of its roles, also after a restart", func(t *testing.T) {
		file, err := s.AccountKubeconfig(ctx, "pools", "kvepp")
		must(t, err)
		config, err := clientcmd.BuildConfigFromFlags("", file)
		must(t, err)
		account, err := kubernetes.NewForConfig(config)
		must(t, err)
		list := func() error {
			_, err := account.CoreV1().Pods("pools").List(ctx, metav1.ListOptions{})
			return err
		}
		if err := list(); !apierrors.IsForbidden(err) {
			t.Errorf("without a role: %v", err)
		}
		must(t, s.Apply(ctx, "pools", `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: reader}
rules: [{apiGroups: [""], resources: [pods], verbs: [list]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: reader}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: reader}
subjects: [{kind: ServiceAccount, name: kvepp, namespace: pools}]
`))
		eventually(t, list)
		s.Stop()
		if err := list(); err == nil {
			t.Error("a stopped server answers")
		}
		must(t, s.Serve(ctx))
		eventually(t, list)
	})
}
