package kube

import (
	"fmt"
	"net/http"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// role gives kvepp's account the required rights, without those for optional kinds.
const role = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: kvepp}
rules:
- {apiGroups: [""], resources: [pods], verbs: [list, watch]}
- {apiGroups: [inference.networking.k8s.io], resources: [inferencepools], resourceNames: [engines], verbs: [list, ` +
	`watch]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: kvepp}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kvepp}
subjects: [{kind: ServiceAccount, name: kvepp, namespace: rights}]
`

// TestForbidden starts kvepp as an account without rights, grants its role, and removes the role.
func TestForbidden(t *testing.T) {
	ctx, ns := t.Context(), "rights"
	port := freePorts(t, 1)
	must(t, cluster.Apply(ctx, ns, inferencePool("engines", "engine", port)))
	a := newEngine(t, ns, "engine", "a", port)
	account, err := cluster.AccountKubeconfig(ctx, ns, "kvepp")
	must(t, err)
	k := startKvepp(t, account, "--pool-name", "engines", "--kv-events-port", "0")
	k.awaitLog(t, "kvepp may not read objects of this kind")
	k.awaitLog(t, "kind=inferencepools")
	must(t, k.checkHealth(false))
	k.awaitMetric(t, `kvepp_kube_followed{kind="inferencepools"}`, 0)
	must(t, cluster.Apply(ctx, ns, role))
	k.awaitReady(t)
	url := envoy(t, k)
	awaitReached(t, url, a)

	// A running watch continues; the next one is refused. kvepp keeps its state.
	must(t, cluster.Delete(ctx, ns, role))
	cluster.Stop()
	must(t, cluster.Serve(ctx))
	k.awaitLog(t, "kind=pods error=")
	k.awaitMetric(t, `kvepp_kube_followed{kind="pods"}`, 0)
	must(t, k.checkHealth(true))
	awaitReached(t, url, a)
	must(t, cluster.Apply(ctx, ns, role))
	b := newEngine(t, ns, "engine", "b", port)
	awaitReached(t, url, a, b)
}

// reviewerRole allows kvepp's account to create TokenReviews and SubjectAccessReviews.
const reviewerRole = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kvepp-asks-who}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: "system:auth-delegator"}
subjects: [{kind: ServiceAccount, name: kvepp, namespace: metrics}]
`

// metricsReaderRole allows a Prometheus's account to read metrics.
const metricsReaderRole = `
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: reads-metrics}
rules: [{nonResourceURLs: [/metrics], verbs: [get]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: prometheus-reads-metrics}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: reads-metrics}
subjects: [{kind: ServiceAccount, name: prometheus, namespace: metrics}]
`

// TestMetricsReaders: only accounts to which the cluster gives the right can read metrics.
func TestMetricsReaders(t *testing.T) {
	t.Parallel()
	ctx, ns := t.Context(), "metrics"
	account, err := cluster.AccountKubeconfig(ctx, ns, "kvepp")
	must(t, err)
	reader, err := cluster.AccountKubeconfig(ctx, ns, "prometheus")
	must(t, err)
	of, err := clientcmd.BuildConfigFromFlags("", reader)
	must(t, err)
	k := startKvepp(t, account, "--pool-name", "engines", "--metrics-endpoint-auth=true")
	responded := func(token string, status int) {
		t.Helper()
		eventually(t, func() error {
			req, err := http.NewRequestWithContext(ctx, "GET", fmt.Sprintf("http://127.0.0.1:%d/metrics", k.prom), nil)
			must(t, err)
			if token != "" {
				req.Header.Set("Authorization", "Bearer "+token)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			resp.Body.Close()
			if resp.StatusCode != status {
				return fmt.Errorf("status %d, want %d", resp.StatusCode, status)
			}
			return nil
		})
	}
	responded("", http.StatusUnauthorized)
	responded(of.BearerToken, http.StatusServiceUnavailable) // kvepp may not create the reviews
	k.awaitLog(t, "kind=tokenreviews")
	must(t, cluster.Apply(ctx, ns, reviewerRole))
	responded(of.BearerToken, http.StatusForbidden)
	responded("not-"+of.BearerToken, http.StatusUnauthorized)
	must(t, cluster.Apply(ctx, ns, metricsReaderRole))
	responded(of.BearerToken, http.StatusOK)
}
