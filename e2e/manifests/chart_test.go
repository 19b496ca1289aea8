package manifests

import (
	"cmp"
	"encoding/base64"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestPods checks the rights of the pods of kvepp and of the overlay's Envoy, and kvepp's health probes.
func TestPods(t *testing.T) {
	for _, r := range everything(t) {
		t.Run(r.name, func(t *testing.T) {
			for _, d := range r.all("Deployment") {
				pod := object(d.at("spec", "template", "spec").(map[string]any))
				if kvepp := d.text("metadata", "labels", "app.kubernetes.io/name") == "kvepp"; !kvepp &&
					!strings.HasSuffix(d.text("metadata", "name"), "envoy") {
					continue // an engine's pod
				} else if kvepp && pod.at("enableServiceLinks") != false {
					t.Errorf("%s: Services add environment variables", d)
				}
				if pod.at("securityContext", "runAsNonRoot") != true ||
					pod.text("securityContext", "seccompProfile", "type") != "RuntimeDefault" {
					t.Errorf("%s may run as root, or make any system call: %v", d, pod.at("securityContext"))
				}
				for _, c := range append(pod.list("initContainers"), pod.list("containers")...) {
					s := object(c.at("securityContext").(map[string]any))
					if s.at("readOnlyRootFilesystem") != true || s.at("allowPrivilegeEscalation") != false ||
						!reflect.DeepEqual(s.at("capabilities"), map[string]any{"drop": []any{"ALL"}}) {
						t.Errorf("%s, %s: %v", d, c.text("name"), s)
					}
					if c.at("resources", "limits", "memory") == nil || c.at("resources", "limits", "cpu") != nil {
						t.Errorf(
							"%s, %s: want a limit on memory and none on CPU, got %v",
							d,
							c.text("name"),
							c.at("resources"),
						)
					}
				}
			}
			c := object(r.kvepp(t).at("spec", "template", "spec", "containers", 0).(map[string]any))
			for probe, service := range map[string]string{"readinessProbe": "readiness", "livenessProbe": "liveness",
				"startupProbe": "liveness"} {
				if c.at(probe, "grpc", "port") != 9003 || c.text(probe, "grpc", "service") != service {
					t.Errorf("%s: %v", probe, c.at(probe))
				}
			}
			drain, stop, handOver := 0, 0, 0 // handOver: until another replica leads, and proxies know it
			for _, arg := range c.strings("args") {
				if s, ok := strings.CutPrefix(arg, "--drain-timeout="); ok {
					drain = seconds(t, s)
				}
				if s, ok := strings.CutPrefix(arg, "--ha-handover-timeout="); ok {
					handOver += seconds(t, s)
				}
				if s, ok := strings.CutPrefix(arg, "--drain-delay="); ok {
					handOver += seconds(t, s)
				}
			}
			stop, _ = c.at("lifecycle", "preStop", "sleep", "seconds").(int)
			if grace, _ := r.kvepp(t).at("spec", "template", "spec",
				"terminationGracePeriodSeconds").(int); drain == 0 ||
				grace <= drain+stop+handOver {
				t.Errorf("a pod is killed after %d s, and may need %d + %d + %d s", grace, stop, handOver, drain)
			}
		})
	}
}

// TestReplicas checks the settings for more than one replica.
func TestReplicas(t *testing.T) {
	for _, x := range []struct {
		values                string
		replicas              int
		elects, budget        bool
		trust                 string // token: of the chart's Secret; certificates; the name of a Secret; "": none
		unavailable, spreadBy int
	}{
		{"", 2, false, true, "token", 0, 2},
		{"replicas=1", 1, false, false, "", 0, 0},
		{"replicas=5", 5, false, true, "token", 0, 2},
		{"leaderElection.enabled=false", 2, false, true, "token", 0, 2},
		{"leaderElection.enabled=true", 2, true, false, "", 100, 2},
		{"leaderElection.enabled=true,replicas=1", 1, true, false, "", 100, 0},
		{"leaderElection.enabled=true,sharing.enabled=true", 2, true, false, "token", 100, 2},
		{"sharing.enabled=true", 2, false, true, "token", 0, 2},
		{"sharing.enabled=true,replicas=1", 1, false, false, "token", 0, 0},
		{"sharing.enabled=false", 1, false, false, "", 0, 0},
		{"sharing.enabled=false,replicas=3", 3, true, false, "", 100, 2},
		{"sharing.enabled=false,leaderElection.enabled=false", 1, false, false, "", 0, 0},
		{"sharing.enabled=false,leaderElection.enabled=false,replicas=2", 2, false, true, "", 0, 2},
		{"sharing.enabled=false,leaderElection.enabled=true", 2, true, false, "", 100, 2},
		{"sharing.tokenSecret.name=ours", 2, false, true, "ours", 0, 2},
		{"sharing.trust=certificates,tls.secretName=own,tls.clientCA.secretName=ca", 2, false, true, "certificates", 0,
			2},
		{"replicas=1,podDisruptionBudget.enabled=true", 1, false, true, "", 0, 0},
		{"replicas=3,podDisruptionBudget.enabled=false", 3, false, false, "token", 0, 2},
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm,"+x.values)
		if err != nil {
			t.Fatal(err)
		}
		d := r.kvepp(t)
		if got := d.at("spec", "replicas"); got != x.replicas {
			t.Errorf("%q: %v replicas, want %d", x.values, got, x.replicas)
		}
		if got := trust(r, d); got != x.trust {
			t.Errorf("%q: replicas recognise one another by %q, want %q", x.values, got, x.trust)
		}
		if elects := slices.Contains(d.strings("spec", "template", "spec", "containers", 0, "args"),
			"--ha-enable-leader-election"); elects != x.elects {
			t.Errorf("%q: elects a leader: %v", x.values, elects)
		}
		if waits := d.at("spec", "template", "spec", "containers", 0, "lifecycle",
			"preStop") != nil; waits == x.elects {
			t.Errorf("%q: a deleted pod does not get SIGTERM at once: %v", x.values, waits)
		}
		if budget := len(r.all("PodDisruptionBudget")) == 1; budget != x.budget {
			t.Errorf("%q: has a budget: %v", x.values, budget)
		}
		want := any(x.unavailable)
		if x.unavailable == 100 {
			want = "100%"
		}
		if got := d.at("spec", "strategy", "rollingUpdate", "maxUnavailable"); got != want {
			t.Errorf("%q: maxUnavailable %v, want %v", x.values, got, want)
		}
		if spread := d.list("spec", "template", "spec", "topologySpreadConstraints"); len(spread) != x.spreadBy {
			t.Errorf("%q: spread by %v", x.values, spread)
		} else if len(spread) > 0 && (spread[0].text("topologyKey") != "kubernetes.io/hostname" ||
			spread[0].text("whenUnsatisfiable") != "ScheduleAnyway") {
			t.Errorf("%q: spread by %v", x.values, spread)
		}
	}
}

// trust says how the replicas of a Deployment recognise one another: by the token of the chart's own Secret, by
// certificates, or by the token of a Secret, which it names. It returns "" if they do not share.
func trust(r *rendered, d object) string {
	args := strings.Join(d.strings("spec", "template", "spec", "containers", 0, "args"), " ")
	by := ""
	for _, v := range d.list("spec", "template", "spec", "volumes") {
		if v.text("name") == "replica-token" {
			by = v.text("secret", "secretName")
		}
	}
	peers := slices.ContainsFunc(r.all("Service"), func(s object) bool {
		return s.text("metadata", "name") == "kvepp-peers" && s.text("spec", "clusterIP") == "None" &&
			s.at("spec", "publishNotReadyAddresses") == true
	})
	made := slices.ContainsFunc(r.all("Secret"), func(s object) bool {
		return s.text("metadata", "name") == by && s.text("data", "token") != ""
	})
	switch {
	case !peers && by == "" && !made && !strings.Contains(args, "--replica-"):
		return ""
	case !peers || !strings.Contains(args, "--replica-service=kvepp-peers"):
		return "nothing, without a Service"
	case strings.Contains(args, "--replica-token-file=/var/run/secrets/replicas/token") != (by != ""):
		return "a token that is not there"
	case made:
		return "token"
	case by != "":
		return by
	case strings.Contains(args, "--cert-path=") && strings.Contains(args, "--tls-client-ca="):
		return "certificates"
	default:
		return "nothing"
	}
}

// TestAdmin checks that the admin address is at loopback and behind the token of a Secret, if there is one.
func TestAdmin(t *testing.T) {
	for _, x := range []struct {
		values, address, file, secret string
		made                          bool
	}{
		{"", "", "", "", false},
		{",admin.enabled=true", "127.0.0.1:9091", "token", "kvepp-admin", true},
		{",admin.enabled=true,admin.port=9999,admin.tokenSecret.key=own", "127.0.0.1:9999", "own", "kvepp-admin", true},
		{",admin.enabled=true,admin.tokenSecret.name=ours,replicas=1", "127.0.0.1:9091", "token", "ours", false},
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm"+x.values)
		if err != nil {
			t.Fatal(err)
		}
		d := r.kvepp(t)
		address, file, secret, mounted := "", "", "", ""
		for _, arg := range d.strings("spec", "template", "spec", "containers", 0, "args") {
			if v, ok := strings.CutPrefix(arg, "--admin-address="); ok {
				address = v
			}
			if v, ok := strings.CutPrefix(arg, "--admin-token-file="); ok {
				file = v
			}
		}
		for _, v := range d.list("spec", "template", "spec", "volumes") {
			if v.text("name") == "admin-token" {
				secret = v.text("secret", "secretName")
			}
		}
		for _, v := range d.list("spec", "template", "spec", "containers", 0, "volumeMounts") {
			if v.text("name") == "admin-token" {
				mounted = v.text("mountPath") + "/" + x.file
			}
		}
		if address != x.address || file != mounted || secret != x.secret || (mounted != "") != (x.secret != "") {
			t.Errorf("%q: admin address %q, token in %q of Secret %q at %q", x.values, address, file, secret, mounted)
		}
		made := slices.ContainsFunc(r.all("Secret"), func(s object) bool {
			token, err := base64.StdEncoding.DecodeString(s.text("data", cmp.Or(x.file, "token")))
			return s.text("metadata", "name") == "kvepp-admin" && err == nil && len(token) == 48
		})
		if made != x.made {
			t.Errorf("%q: the chart makes a Secret: %v", x.values, made)
		}
	}
}

// TestScaling checks which loads the chart's autoscalers follow, and with which replicas kvepp then starts.
func TestScaling(t *testing.T) {
	const keda = ",autoscaling.by=keda,metrics.prometheus.address=http://p:9090"
	const engines = ",engineAutoscaling.enabled=true,engineAutoscaling.target.name=vllm," +
		"metrics.prometheus.address=http://p:9090,engineAutoscaling.prefillTokens=9000"
	const samples = `{namespace="default",pod=~"kvepp-[a-z0-9]+(-[a-z0-9]+)?"}`
	for _, x := range []struct {
		values   string
		replicas any // of the Deployment; nil: the autoscaler's
		scales   []string
	}{
		{"", 2, nil},
		{",autoscaling.enabled=true", nil, []string{"HorizontalPodAutoscaler Deployment kvepp 2-6: cpu 70"}},
		{",autoscaling.enabled=true,autoscaling.cpuPercent=null,autoscaling.streams=3000000,autoscaling.minReplicas=1",
			nil, []string{"HorizontalPodAutoscaler Deployment kvepp 1-6: kvepp_streams 3000000"}},
		{",autoscaling.enabled=true,autoscaling.by=keda", nil, []string{"ScaledObject Deployment kvepp 2-6: cpu 70"}},
		{",autoscaling.enabled=true,autoscaling.streams=300,autoscaling.requestsPerSecond=1000" + keda, nil,
			[]string{"ScaledObject Deployment kvepp 2-6: cpu 70, sum(kvepp_streams" + samples + ") 300, " +
				"sum(rate(kvepp_requests_total" + samples + "[1m])) 1000"}},
		{engines, 2, []string{"ScaledObject Deployment vllm 1-8: sum(max by (worker_id, dp_rank, worker_type) (" +
			"dynamo_frontend_worker_active_prefill_tokens" + samples + ")) 9000"}},
		{",engineAutoscaling.enabled=true,engineAutoscaling.target.name=vllm,engineAutoscaling.by=hpa," +
			"engineAutoscaling.queuedRequests=2,extraArgs={--hold-when-empty=10m}", 2, []string{
			"HorizontalPodAutoscaler Deployment vllm 1-8: kvepp_queued_requests 2, kvepp_held_requests 2"}},
		{engines + ",engineAutoscaling.minReplicas=0,engineAutoscaling.prefillTokens=null," +
			"engineAutoscaling.queuedRequests=1,extraArgs={--hold-when-empty=10m}", 2, []string{
			"ScaledObject Deployment vllm 0-8: (sum(kvepp_queued_requests" + samples + ") or vector(0)) + " +
				"(sum(kvepp_held_requests" + samples + ") or vector(0)) 1"}},
		{engines + ",leaderElection.enabled=true,engineAutoscaling.target.kind=StatefulSet", 2, []string{
			"ScaledObject StatefulSet vllm 1-8: sum(dynamo_frontend_worker_active_prefill_tokens" + samples +
				") 9000"}},
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm"+x.values)
		if err != nil {
			t.Fatal(err)
		}
		d := r.kvepp(t)
		if got := d.at("spec", "replicas"); got != x.replicas {
			t.Errorf("%q: %v replicas, want %v", x.values, got, x.replicas)
		}
		elects := strings.Contains(x.values, "leaderElection")
		if by := trust(r, d); (by == "token") == elects || len(r.all("PodDisruptionBudget")) == 1 == elects {
			t.Errorf("%q: replicas recognise one another by %q, %d budgets", x.values, by,
				len(r.all("PodDisruptionBudget")))
		}
		if got := scales(r); !slices.Equal(got, x.scales) {
			t.Errorf("%q:\n%q, want\n%q", x.values, got, x.scales)
		}
	}
}

// scales returns what each autoscaler scales, between which numbers of replicas, and by which loads.
func scales(r *rendered) (all []string) {
	for _, o := range append(r.all("HorizontalPodAutoscaler"), r.all("ScaledObject")...) {
		from, to := o.at("spec", "minReplicas"), o.at("spec", "maxReplicas")
		var loads []string
		for _, m := range o.list("spec", "metrics") {
			name := m.text("resource", "name") + m.text("pods", "metric", "name") + m.text("external", "metric", "name")
			loads = append(loads, name+" "+fmt.Sprint(cmp.Or(m.at("resource", "target", "averageUtilization"),
				m.at("pods", "target", "averageValue"), m.at("external", "target", "averageValue"))))
		}
		if o.text("kind") == "ScaledObject" {
			from, to = o.at("spec", "minReplicaCount"), o.at("spec", "maxReplicaCount")
		}
		for _, trigger := range o.list("spec", "triggers") {
			of := trigger.text("metadata", "query")
			if of != "" && (trigger.text("metadata", "serverAddress") == "" ||
				trigger.text("metricType") != "AverageValue") {
				of += ", which is not asked for each pod at an address"
			}
			loads = append(loads, cmp.Or(of, trigger.text("type"))+" "+
				cmp.Or(trigger.text("metadata", "threshold"), trigger.text("metadata", "value")))
		}
		all = append(all, fmt.Sprintf("%s %s %s %v-%v: %s", o.text("kind"), o.text("spec", "scaleTargetRef", "kind"),
			o.text("spec", "scaleTargetRef", "name"), from, to, strings.Join(loads, ", ")))
	}
	return all
}

// TestReaders checks that each reader of metrics sends a token that kvepp accepts, and gets the rights for it.
func TestReaders(t *testing.T) {
	const create = "metrics.readerToken.create=true,"
	for _, x := range []struct {
		values, kind, credentials string
		creates                   bool
	}{
		{"metrics.serviceMonitor.enabled=true", "ServiceMonitor", "the reader's own token", false},
		{"metrics.serviceMonitor.enabled=true,metrics.auth=false", "ServiceMonitor", "", false},
		{create + "metrics.serviceMonitor.enabled=true", "ServiceMonitor", "kvepp-metrics-reader token", true},
		{create + "metrics.podMonitor.enabled=true", "PodMonitor", "kvepp-metrics-reader token", true},
		{"metrics.podMonitor.enabled=true,metrics.auth=false", "PodMonitor", "", false},
		{"metrics.podMonitor.enabled=true,metrics.readerToken.secretName=ours,metrics.readerToken.key=t", "PodMonitor",
			"ours t", false},
		{create + "metrics.podMonitoring.enabled=true", "PodMonitoring", "kvepp-metrics-reader token", true},
		{"metrics.podMonitoring.enabled=true,metrics.auth=false", "PodMonitoring", "", false},
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm,"+x.values)
		if err != nil {
			t.Fatal(err)
		}
		o := r.one(t, x.kind)
		endpoint := append(o.list("spec", "endpoints"), o.list("spec", "podMetricsEndpoints")...)[0]
		got := ""
		if endpoint.at("bearerTokenFile") != nil {
			got = "the reader's own token"
		}
		for _, at := range [][]any{{"authorization", "credentials"}, {"authorization", "credentials", "secret"}} {
			name, key := endpoint.text(append(at, "name")...), endpoint.text(append(at, "key")...)
			if name != "" && endpoint.text("authorization", "type") == "Bearer" {
				got += name + " " + key
			}
		}
		if got != x.credentials {
			t.Errorf("%s: sends %q, want %q", x.values, got, x.credentials)
		}
		const reader = "kvepp-metrics-reader"
		accounts := slices.DeleteFunc(r.all("ServiceAccount"), func(o object) bool {
			return o.text("metadata", "name") != reader || o.at("automountServiceAccountToken") != false
		})
		tokens := slices.DeleteFunc(r.all("Secret"), func(o object) bool {
			return o.text("metadata", "name") != reader || o.text("type") != "kubernetes.io/service-account-token" ||
				o.text("metadata", "annotations", "kubernetes.io/service-account.name") != reader
		})
		bindings := slices.DeleteFunc(r.all("ClusterRoleBinding"), func(o object) bool {
			return o.text("roleRef", "name") != "kvepp-default-metrics-reader" ||
				o.text("subjects", 0, "name") != reader || o.text("subjects", 0, "namespace") != "default"
		})
		want := map[bool]int{true: 1}[x.creates]
		if len(accounts) != want || len(tokens) != want || len(bindings) != want {
			t.Errorf("%s: accounts %v, tokens %v, rights %v, want %d of each", x.values, accounts, tokens, bindings,
				want)
		}
		collector := slices.DeleteFunc(r.all("RoleBinding"), func(o object) bool {
			return o.text("subjects", 0, "name") != "collector" || o.text("subjects", 0, "namespace") != "gmp-system"
		})
		roles := slices.DeleteFunc(r.all("Role"), func(o object) bool {
			return !slices.Equal(o.strings("rules", 0, "resourceNames"), []string{reader}) ||
				!slices.Equal(o.strings("rules", 0, "resources"), []string{"secrets"}) || len(o.list("rules")) != 1
		})
		reads := x.kind == "PodMonitoring" && x.creates
		if reads != (len(collector) == 1) || reads != (len(roles) == 1) {
			t.Errorf("%s: the collector's rights: %v %v", x.values, collector, roles)
		}
	}
}

// TestTokenizerVolumes checks where the pods find tokenizers, for each source.
func TestTokenizerVolumes(t *testing.T) {
	const models = "models[0].name=q,models[0].repository=q,"
	const fetch = models + "model.source=fetch,model.fetch.hub=https://hub"
	for values, want := range map[string]string{
		models + "model.source=pvc,model.pvc.claimName=c":       "persistentVolumeClaim map[claimName:c readOnly:true]",
		models + "model.source=image,model.image.reference=i:1": "image map[pullPolicy:IfNotPresent reference:i:1]",
		fetch:                               "emptyDir map[sizeLimit:512Mi]",
		fetch + ",model.fetch.claim.name=c": "persistentVolumeClaim map[claimName:c]",
		fetch + ",model.fetch.claim.name=c,model.fetch.claim.create=true": "persistentVolumeClaim map[claimName:c], " +
			"created [ReadWriteMany]",
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm,"+values)
		if err != nil {
			t.Fatal(err)
		}
		pod := object(r.kvepp(t).at("spec", "template", "spec").(map[string]any))
		got := ""
		for _, v := range pod.list("volumes") {
			if v.text("name") == "models" {
				for _, kind := range []string{"persistentVolumeClaim", "image", "emptyDir"} {
					if v.at(kind) != nil {
						got += fmt.Sprint(kind, " ", v.at(kind))
					}
				}
			}
		}
		for _, c := range r.all("PersistentVolumeClaim") {
			if c.text("metadata", "name") == "c" &&
				c.at("metadata", "annotations", "helm.sh/resource-policy") == "keep" {
				got += fmt.Sprint(", created ", c.at("spec", "accessModes"))
			}
		}
		if got != want {
			t.Errorf("%s: %s, want %s", values, got, want)
		}
		for _, c := range append(pod.list("initContainers"), pod.list("containers")...) {
			if !slices.ContainsFunc(c.list("volumeMounts"), func(m object) bool {
				return m.text("name") == "models" && m.text("mountPath") == "/models" &&
					(m.at("readOnly") == true) == (c.text("name") == "kvepp")
			}) {
				t.Errorf("%s: %s mounts %v", values, c.text("name"), c.list("volumeMounts"))
			}
		}
	}
}

// TestRights checks that kvepp has exactly the rights that it needs, for each setting.
func TestRights(t *testing.T) {
	rule := func(group, resource, verbs string, names ...string) string {
		return group + " " + resource + " [" + strings.Join(names, " ") + "] " + verbs
	}
	const read = "list watch"
	pods := rule("", "pods", read)
	optional := rule("llm-d.ai inference.networking.x-k8s.io", "inferenceobjectives inferencemodelrewrites", read)
	for file, want := range map[string][]string{
		"leader": {pods, rule("inference.networking.k8s.io", "inferencepools", read, "kvepp"), optional,
			rule("coordination.k8s.io", "leases", "create"), rule("coordination.k8s.io", "leases", "get update",
				"kvepp-kvepp")},
		"active": {pods, rule("inference.networking.k8s.io", "inferencepools", read, "vllm-agg-pool"), optional,
			rule("nvidia.com", "dynamoworkermetadatas", read)},
		"selector": {pods},
		"plain": {pods, rule("inference.networking.k8s.io", "inferencepools", read, "kvepp"), optional,
			rule("discovery.k8s.io", "endpointslices", read)},
		"sharing": {pods, rule("inference.networking.k8s.io", "inferencepools", read, "kvepp"), optional,
			rule("discovery.k8s.io", "endpointslices", read)},
	} {
		r, err := helm(t, "-f", filepath.Join("testdata", file+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, x := range r.one(t, "Role").list("rules") {
			got = append(
				got,
				rule(
					strings.Join(x.strings("apiGroups"), " "),
					strings.Join(x.strings("resources"), " "),
					strings.Join(x.strings("verbs"), " "),
					x.strings("resourceNames")...),
			)
		}
		if !slices.Equal(got, want) {
			t.Errorf("%s: rights\n%s\nwant\n%s", file, strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		// Only the right to ask the API server who may read metrics, and the role for readers of metrics.
		got = nil
		for _, role := range r.all("ClusterRole") {
			for _, x := range role.list("rules") {
				got = append(
					got,
					rule(
						strings.Join(x.strings("apiGroups"), " "),
						strings.Join(append(x.strings("resources"), x.strings("nonResourceURLs")...), " "),
						strings.Join(x.strings("verbs"), " "),
					),
				)
			}
		}
		inCluster := []string{
			rule("authentication.k8s.io", "tokenreviews", "create"),
			rule("authorization.k8s.io", "subjectaccessreviews", "create"),
			rule("", "/metrics", "get"),
		}
		if file == "active" {
			inCluster = nil // metrics.auth=false
		}
		if asks := slices.Contains(r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args"),
			"--metrics-endpoint-auth=true"); asks != (inCluster != nil) {
			t.Errorf("%s: kvepp may ask who reads metrics: %v", file, asks)
		}
		if !slices.Equal(got, inCluster) || len(r.all("ClusterRoleBinding")) != len(inCluster)/3 {
			t.Errorf(
				"%s: rights in the whole cluster\n%s\nwant\n%s",
				file,
				strings.Join(got, "\n"),
				strings.Join(inCluster, "\n"),
			)
		}
	}
}

// TestFallbackEndpoints checks the number of kvepp's fallback endpoints for each setting, and that a NetworkPolicy with
// gateways admits the chart's own Envoy.
func TestFallbackEndpoints(t *testing.T) {
	for _, x := range []struct{ values, want string }{
		{"pool.selector.app=vllm", ""},
		{"pool.selector.app=vllm,router.fallbackEndpoints=3", "--fallback-endpoints=3"},
		{"pool.selector.app=vllm,envoy.create=true", "--fallback-endpoints=2"},
		{"pool.selector.app=vllm,envoy.create=true,router.fallbackEndpoints=0", ""},
		{"pool.selector.app=vllm,engine=dynamo", ""},
	} {
		r, err := helm(t, "--set", x.values)
		if err != nil {
			t.Fatal(err)
		}
		var got string
		for _, arg := range r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args") {
			if strings.HasPrefix(arg, "--fallback-endpoints") {
				got = arg
			}
		}
		if got != x.want {
			t.Errorf("%s: kvepp is started with %q, want %q", x.values, got, x.want)
		}
	}
	r, err := helm(t, "-f", "testdata/envoy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range r.all("Deployment") {
		if d.text("metadata", "name") != "kvepp-envoy" {
			continue
		}
		labels := d.labels("spec", "template", "metadata", "labels")
		if !slices.ContainsFunc(r.one(t, "NetworkPolicy").list("spec", "ingress", 0, "from"), func(from object) bool {
			return selects(from.labels("podSelector", "matchLabels"), labels)
		}) {
			t.Errorf("the NetworkPolicy keeps Envoy from kvepp: %v", r.one(t, "NetworkPolicy").at("spec", "ingress", 0))
		}
		if selects(r.kvepp(t).labels("spec", "selector", "matchLabels"), labels) {
			t.Error("kvepp's Deployment selects Envoy's pods")
		}
		return
	}
	t.Error("the chart has no Envoy with envoy.create=true")
}

// TestEjectFlags checks the flags of kvepp that result from the values of router.eject. TestFlags checks that kvepp
// accepts them.
func TestEjectFlags(t *testing.T) {
	for _, x := range []struct {
		values string
		want   []string
	}{
		{"", nil},
		{",router.eject.enabled=false", []string{"--eject=false"}},
		{",router.eject.firstByte=1m30s", []string{"--eject-first-byte=1m30s"}},
	} {
		r, err := helm(t, "--set", "pool.selector.app=vllm"+x.values)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, arg := range r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args") {
			if strings.HasPrefix(arg, "--eject") {
				got = append(got, arg)
			}
		}
		if !slices.Equal(got, x.want) {
			t.Errorf("%s: kvepp is started with %q, want %q", x.values, got, x.want)
		}
	}
}

// TestRefused checks that invalid values are refused with an explanation.
func TestRefused(t *testing.T) {
	set := func(all ...string) (args []string) {
		for _, x := range append([]string{"pool.selector.app=vllm"}, all...) {
			args = append(args, "--set", x)
		}
		return args
	}
	for _, x := range []struct {
		args []string
		says string
	}{
		{nil, "pool.selector is missing: set the labels"},
		{[]string{"--set", "pool.inferencePool=false"}, "pool.selector is missing: without an InferencePool"},
		{set("pool.group=inference.networking.x-k8s.io"), "pool.group"},
		{set("pool.create=false"), "pool.name is missing"},
		{set("replica=2"), "additional properties 'replica' not allowed"},
		{set("replicas=-1"), "/replicas"},
		{set("replicas=two"), "/replicas"},
		{set("pool.targetPorts={0}"), "/pool/targetPorts/0"},
		{set("pool.targetPorts={1,2,3,4,5,6,7,8,9}"), "/pool/targetPorts"},
		{set("pool.targetPorts={8000,8000}"), "/pool/targetPorts"},
		{set("pool.failureMode=Open"), "/pool/failureMode"},
		{set("pool.group=example.com"), "/pool/group"},
		{set("engine=ollama"), "/engine"},
		{set("kvEvents.port=70000"), "/kvEvents/port"},
		{set("models[0].name=qwen"), "model.source is none, but models need tokenizers"},
		{set("models[0].path=qwen", "model.source=pvc", "model.pvc.claimName=x"), "missing property 'name'"},
		{set("models[0].name=q", "models[0].path=../etc", "model.source=pvc", "model.pvc.claimName=x"),
			"/models/0/path"},
		{set("model.source=s3"), "/model/source"},
		{set("model.source=pvc"), "model.pvc.claimName"},
		{set("model.source=image"), "model.image.reference"},
		{set("model.source=fetch"), "list the models to fetch"},
		{set("model.source=fetch", "models[0].name=q", "models[0].repository=q"), "model.fetch.hub"},
		{set("model.source=fetch", "model.fetch.hub=ftp://x"), "/model/fetch/hub"},
		{set("model.source=fetch", "model.fetch.hub=https://user:secret@hub"), "/model/fetch/hub"},
		{set("model.source=fetch", "model.fetch.hub=https://hub", "models[0].name=q"), "q needs a repository"},
		{set("tls.minVersion=1.1"), "/tls/minVersion"},
		{set("router.mode=fastest"), "/router/mode"},
		{set("extraArgs={serve}"), "/extraArgs/0"},
		{set("drainSeconds=5m"), "/drainSeconds"},
		{set("leaderElection.enabled=true", "podDisruptionBudget.enabled=true"), "under leader election"},
		{set("sharing.enabled=false", "sharing.tokenSecret.name=x"), "sharing.tokenSecret has no effect"},
		{set("replicas=1", "sharing.tokenSecret.name=x"), "sharing.tokenSecret has no effect"},
		{set("leaderElection.enabled=true", "sharing.trust=certificates"), "sharing.trust has no effect"},
		{set("sharing.trust=certificates"), "sharing.trust=certificates needs tls.secretName and tls.clientCA"},
		{set("sharing.trust=certificates", "tls.secretName=a", "tls.clientCA.secretName=b",
			"sharing.tokenSecret.name=x"), "sharing.tokenSecret has no effect with sharing.trust=certificates"},
		{set("admin.tokenSecret.name=x"), "admin.tokenSecret has no effect"},
		{set("admin.enabled=true", "admin.port=9090"), "admin.port: 9090 is another port of kvepp's"},
		{set("admin.enabled=true", "admin.port=80"), "/admin/port"},
		{set("admin.enabled=true", "extraArgs={--admin-address=:9091}"), "set the values admin.port"},
		{set("sharing.trust=none"), "/sharing/trust"},
		{set("sharing.enabled=yes"), "/sharing/enabled"},
		{set("extraArgs={--replica-peers=a:1}"), "--replica-peers must not be changed"},
		{set("gateway.create=true"), "gateway.className"},
		{set("pool.inferencePool=false", "httpRoute.create=true"), "httpRoute.create"},
		{set("image.digest=latest"), "/image/digest"},
		{set("metrics.port=9003"), "/metrics/port"},
		{set("pool.selector.app=a b"), "/pool/selector/app"},
		{set("podDisruptionBudget.maxUnavailable=some"), "/podDisruptionBudget/maxUnavailable"},
		{set("leaderElection.handoverSeconds=-1"), "/leaderElection/handoverSeconds"},
		{set("model.pvc.claimName=x"), "is used only with model.source=pvc, but model.source is none"},
		{set("model.image.reference=x", "models[0].name=q", "model.source=pvc", "model.pvc.claimName=x"),
			"model.image.reference is used only with model.source=image"},
		{set("model.fetch.hub=https://hub"), "model.fetch.hub is used only with"},
		{set("models[0].name=q", "models[1].name=q", "model.source=pvc", "model.pvc.claimName=x"),
			"the name q is given twice"},
		{set("models[0].name=a", "models[0].repository=A", "models[1].name=b", "models[1].repository=B",
			"model.source=fetch", "model.fetch.hub=https://hub"), "A@main and B@main are both fetched"},
		{set("kvEvents.enabled=false", "kvEvents.replayPort=5657"), "kvEvents.replayPort has no effect"},
		{set("kvEvents.replayPort=5557"), "needs a port of its own"},
		{set("tls.enabled=false", "tls.secretName=x"), "tls.secretName"},
		{set("tls.enabled=false", "tls.clientCA.secretName=x"), "kvepp would serve every peer"},
		{set("networkPolicy.enabled=false", "networkPolicy.egress.extra[0].ports[0].port=1"),
			"have no effect with networkPolicy.enabled=false"},
		{set("extraArgs={--drain-timeout=10m}"), "set the value drainSeconds"},
		{set("leaderElection.enabled=true", "extraArgs={--drain-delay=20s}"), "set the value preStopSeconds"},
		{set("extraArgs={--metrics-port=9091}"), "set the value metrics.port"},
		{set("extraArgs={--grpc-port=9100}"), "--grpc-port must not be changed"},
		{set("extraArgs={--fallback-endpoints=2}"), "set the value router.fallbackEndpoints"},
		{set("router.fallbackEndpoints=9"), "/router/fallbackEndpoints"},
		{set("router.eject.enabled=0"), "/router/eject/enabled"},
		{set("router.eject.firstByte=5"), "/router/eject/firstByte"},
		{set("router.eject.percent=50"), "additional properties 'percent' not allowed"},
		{set("router.eject.enabled=false", "router.eject.firstByte=5s"),
			"router.eject.firstByte has no effect"},
		{set("extraArgs={--eject-first-byte=5s}"), "set the value router.eject.firstByte"},
		{set("router.fallbackEndpoints=1", "engine=dynamo"), "router.fallbackEndpoints: a Dynamo frontend"},
		{set("envoy.create=true", "engine=dynamo"), "envoy.create works only with stock engines"},
		{set("envoy.create=true", "tls.enabled=false"), "envoy.create: this Envoy uses TLS"},
		{set("envoy.create=true", "tls.clientCA.secretName=x"), "envoy.create: this Envoy uses TLS"},
		{set("envoy.create=true", "pool.appProtocol=kubernetes.io/h2c"), "set pool.appProtocol=http"},
		{[]string{"--set", "envoy.create=true,pool.create=false,pool.name=x"}, "envoy.create needs pool.selector"},
		{set("autoscaling.enabled=true", "replicas=3"), "replicas has no effect with autoscaling.enabled=true"},
		{set("autoscaling.enabled=true", "autoscaling.minReplicas=9"),
			"autoscaling.minReplicas is 9, and autoscaling.maxReplicas only 6"},
		{set("autoscaling.enabled=true", "leaderElection.enabled=true"), "autoscaling.enabled: under leader election"},
		{set("autoscaling.enabled=true", "sharing.enabled=false"), "autoscaling.enabled: under leader election"},
		{set("autoscaling.enabled=true", "autoscaling.cpuPercent=null"), "autoscaling needs a load to follow"},
		{set("autoscaling.enabled=true", "resources.requests.cpu=null"), "resources.requests.cpu, which is missing"},
		{set("autoscaling.enabled=true", "autoscaling.requestsPerSecond=5"), "only with autoscaling.by=keda"},
		{set("autoscaling.enabled=true", "autoscaling.by=keda", "autoscaling.streams=5"),
			"metrics.prometheus.address is missing"},
		{set("autoscaling.enabled=true", "autoscaling.minReplicas=0"), "/autoscaling/minReplicas"},
		{set("autoscaling.by=vpa"), "/autoscaling/by"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.runningRequests=5"),
			"engineAutoscaling.target.name is missing"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.target.name=vllm"),
			"engineAutoscaling needs a load to follow"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.target.name=vllm",
			"engineAutoscaling.minReplicas=0", "engineAutoscaling.queuedRequests=5",
			"extraArgs={--router-queue-threshold=2}"),
			"engineAutoscaling.minReplicas=0: the first request must wait"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.target.name=vllm",
			"engineAutoscaling.queuedRequests=5"), "requests never wait in kvepp without --router-queue-threshold"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.target.name=vllm",
			"engineAutoscaling.runningRequests=5"), "metrics.prometheus.address is missing: engineAutoscaling"},
		{set("engineAutoscaling.enabled=true", "engineAutoscaling.target.name=vllm",
			"engineAutoscaling.minReplicas=9"), "engineAutoscaling.maxReplicas only 8"},
		{set("metrics.prometheus.address=http://p:9090"), "nothing here asks Prometheus"},
		{set("metrics.prometheus.authentication=p"), "no effect without metrics.prometheus.address"},
		{set("metrics.prometheus.address=p:9090"), "/metrics/prometheus/address"},
		{set("metrics.podMonitor.enabled=true"), "metrics.podMonitor: with metrics.auth=true a reader must send"},
		{set("metrics.podMonitoring.enabled=true"), "metrics.podMonitoring: with metrics.auth=true a reader must"},
		{set("metrics.podMonitor.enabled=true", "metrics.serviceMonitor.enabled=true"), "read each replica twice"},
		{set("metrics.readerToken.create=true"), "metrics.readerToken has no effect: no reader uses it"},
		{set("metrics.readerToken.create=true", "metrics.readerToken.secretName=x"),
			"metrics.readerToken.secretName has no effect"},
		{set("metrics.readerToken.create=true", "metrics.readerToken.key=x"), "metrics.readerToken.key: the Secret"},
		{set("metrics.readerToken.create=true", "metrics.auth=false", "metrics.podMonitor.enabled=true"),
			"metrics.readerToken.create has no effect with metrics.auth=false"},
		{set("model.fetch.claim.create=true"), "model.fetch.claim.name is missing"},
		{set("model.fetch.claim.name=x"), "model.fetch.claim.name is used only with model.source=fetch"},
		{set("model.fetch.claim.storageClassName=x"), "model.fetch.claim.storageClassName has no effect"},
		{set("shadow.enabled=true"), "would make kvepp the picker"},
		{set("shadow.enabled=true", "pool.inferencePool=false", "envoy.create=true"), "leave envoy.create out"},
		{set("shadow.enabled=true", "pool.inferencePool=false", "shadow.recordingClaim=x"), "set replicas=1"},
		{set("shadow.recordingClaim=x"), "has no effect with shadow.enabled=false"},
		{set("extraArgs={--shadow}"), "set the value shadow.enabled"},
		{set("envoy.retries=2"), "additional properties 'retries' not allowed"},
	} {
		_, err := helm(t, x.args...)
		if err == nil {
			t.Errorf("%v is taken", x.args)
		} else if !strings.Contains(err.Error(), x.says) {
			t.Errorf("%v: %v\nwant it to say %q", x.args, err, x.says)
		}
	}
}

// TestNames checks that the chart refuses a name that is invalid for a Service, so that the API server does not refuse
// it in the middle of an installation.
func TestNames(t *testing.T) {
	for name, taken := range map[string]bool{"llm": true, "llm-7b": true, "7b": false, "llm.7b": false,
		strings.Repeat("x", 51) + "-y": true} {
		text, err := run(
			t,
			program(t, "helm"),
			"template",
			name,
			chart,
			"--kube-version",
			kubernetes,
			"--set",
			"pool.selector.app=vllm",
		)
		if (err == nil) != taken || err != nil && !strings.Contains(err.Error(), "or set nameOverride") {
			t.Errorf("%q: %v", name, err)
		} else if want := "name: " + strings.TrimSuffix(name[:min(len(name), 52)], "-") + "\n"; taken &&
			!strings.Contains(string(text), want) {
			t.Errorf("%q: no %q", name, want)
		}
	}
	if _, err := helm(t, "--set", "pool.selector.app=vllm", "--set", "nameOverride=7b"); err == nil ||
		!strings.Contains(err.Error(), "/nameOverride") {
		t.Error("nameOverride=7b:", err)
	}
}

// TestOddValues checks the result of rarely used values.
func TestOddValues(t *testing.T) {
	r, err := helm(
		t,
		"--set",
		"pool.selector.app=vllm",
		"--set",
		"router.temperature=0.5",
		"--set-json",
		"drainSeconds=1000000.0",
		"--set",
		"networkPolicy.egress.enabled=true",
		"--set",
		"kvEvents.port=65530,kvEvents.replayPort=65535",
		"--set",
		"models[0].name=q,model.source=pvc,model.pvc.claimName=c",
		"--set-string",
		"model.pvc.subPath=1",
	)
	if err != nil {
		t.Fatal(err)
	}
	c := object(r.kvepp(t).at("spec", "template", "spec", "containers", 0).(map[string]any))
	for _, arg := range []string{"--router-temperature=0.5", "--drain-timeout=1000000s"} {
		if !slices.Contains(c.strings("args"), arg) {
			t.Errorf("no %s in %v", arg, c.strings("args"))
		}
	}
	if !slices.ContainsFunc(c.list("volumeMounts"), func(m object) bool {
		return m.text("name") == "models" && m.at("subPath") == "1"
	}) {
		t.Errorf("the folder in the claim is not mounted: %v", c.list("volumeMounts"))
	}
	var last []any // the last port of each range
	for _, rule := range r.one(t, "NetworkPolicy").list("spec", "egress") {
		for _, p := range rule.list("ports") {
			if end := p.at("endPort"); end != nil {
				last = append(last, end)
			}
		}
	}
	if !slices.Equal(last, []any{65535, 65535}) {
		t.Errorf("ports up to %v", last)
	}
}

// TestLint runs `helm lint`, and checks that the schema accepts every default.
func TestLint(t *testing.T) {
	for _, file := range valuesFiles(t) {
		if out, err := run(t, program(t, "helm"), "lint", "--strict", chart, "-f", file, "--kube-version",
			kubernetes); err != nil {
			t.Errorf("%s: %v\n%s", file, err, out)
		}
	}
}

func seconds(t *testing.T, text string) int {
	t.Helper()
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatal(err)
	}
	return int(d / time.Second)
}

// TestFlags checks that kvepp accepts the arguments of its containers.
func TestFlags(t *testing.T) {
	kvepp, err := filepath.Abs("../../bin/kvepp")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range everything(t) {
		pod := object(r.kvepp(t).at("spec", "template", "spec").(map[string]any))
		for _, c := range append(pod.list("initContainers"), pod.list("containers")...) {
			args := c.strings("args")
			for i := range args {
				args[i] = strings.ReplaceAll(args[i], "$(POD_NAMESPACE)", "default")
			}
			// kvepp prints its help only if it has parsed all arguments before --help.
			if _, err := run(t, append(append([]string{kvepp}, args...), "--help")...); err != nil {
				t.Errorf("%s: kvepp %s: %v", r.name, strings.Join(args, " "), err)
			}
		}
	}
}

// TestNetworkPolicy checks which peers kvepp may reach and which peers may reach kvepp, and that the notes of an
// installation say what is open.
func TestNetworkPolicy(t *testing.T) {
	ports := func(rule object) string {
		var all []string
		for _, p := range rule.list("ports") {
			text := fmt.Sprint(p.at("port"))
			if end := p.at("endPort"); end != nil {
				text += fmt.Sprint("-", end)
			}
			all = append(all, text)
		}
		return strings.Join(all, " ")
	}
	for _, x := range []struct {
		args    []string
		engines string // ports of the engines' pods; "": any
		named   string // ports of servers that are configured by URL
	}{
		{nil, "8000 5557-5564", ""},
		{[]string{"--set", "kvEvents.enabled=false,pool.targetPorts={8000,8001}"}, "8000 8001", ""},
		{[]string{"--set", "kvEvents.replayPort=5657,extraArgs={--model-server-metrics-port=9400}"},
			"8000 5557-5564 5657-5664 9400", ""},
		{[]string{"--set", "engine=dynamo"}, "", ""},
		{[]string{"--set", "pool.create=false,pool.name=p"}, "", ""},
		{[]string{"--set", "pool.inferencePool=false"}, "8000 5557-5564", ""},
		{[]string{"--set", "models[0].name=q,models[0].repository=q,model.source=fetch," +
			"model.fetch.hub=https://hub.internal/hf"}, "8000 5557-5564", "443"},
		{[]string{"--set", "models[0].name=q,models[0].repository=q,model.source=fetch," +
			"model.fetch.hub=http://hub.internal:8081"}, "8000 5557-5564", "8081"},
		{[]string{"--set-json", `extraArgs=["--tokenizer-url=q=http://tokenizer:8100",` +
			`"--nats-server=nats://user:word@nats","--index-peers=http://a:9092,http://b:9093"]`,
			"--set-json", `extraEnv=[{"name":"OTEL_EXPORTER_OTLP_ENDPOINT","value":"http://[fd00::1]:4317"},` +
				`{"name":"HTTPS_PROXY","value":"https://proxy.internal"},{"name":"A",` +
				`"valueFrom":{"fieldRef":{"fieldPath":"status.podIP"}}}]`},
			"8000 5557-5564", "8100 4222 9092 9093 4317 443"},
	} {
		r, err := helm(t, append([]string{"--set", "pool.selector.app=vllm"}, x.args...)...)
		if err != nil {
			t.Errorf("%v: %v", x.args, err)
			continue
		}
		policy := r.one(t, "NetworkPolicy")
		if types := policy.strings("spec", "policyTypes"); !slices.Equal(types, []string{"Ingress", "Egress"}) {
			t.Errorf("%v: policy types %v", x.args, types)
		}
		rules := policy.list("spec", "egress")
		own := r.kvepp(t).labels("spec", "selector", "matchLabels")
		if to := rules[0]; ports(to) != "9004" || len(to.list("to")) != 1 ||
			!maps.Equal(to.labels("to", 0, "podSelector", "matchLabels"), own) {
			t.Errorf("%v: replicas may reach %v", x.args, to)
		}
		rules = rules[1:]
		named := ""
		if len(rules) == 4 {
			named = ports(rules[3])
		}
		if len(rules) < 3 || ports(rules[0]) != "53 53" || ports(rules[1]) != "443 6443" ||
			len(rules[2].list("to")) != 1 ||
			ports(rules[2]) != x.engines ||
			named != x.named ||
			len(rules) > 4 {
			t.Errorf("%v: kvepp may reach %v, want ports %q and others %q", x.args, rules, x.engines, x.named)
		}
		callback := false
		for _, rule := range policy.list("spec", "ingress") {
			switch from := rule.labels("from", 0, "podSelector", "matchLabels"); {
			case ports(rule) == "replica":
				if !maps.Equal(from, own) {
					t.Errorf("%v: not only replicas may reach their port: %v", x.args, rule)
				}
			case ports(rule) == "callback":
				if callback = true; from["app"] != "vllm" || len(from) != 1 {
					t.Errorf("%v: not only the engines may reach the port for their responses: %v", x.args, rule)
				}
			case rule.at("from") != nil:
				t.Errorf("%v: only %v may reach kvepp", x.args, rule.at("from"))
			}
		}
		args := r.kvepp(t).strings("spec", "template", "spec", "containers", 0, "args")
		if dynamo := slices.Contains(x.args, "engine=dynamo"); callback != dynamo ||
			dynamo != slices.Contains(args, "--dynamo-callback-address=:9005") {
			t.Errorf("%v: port for responses of Dynamo's workers: %v", x.args, callback)
		}
	}
	// Helm shows the notes only with a cluster. A copy of the chart renders them into an object.
	noted := t.TempDir()
	if err := os.CopyFS(noted, os.DirFS(chart)); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(noted, "templates/NOTES.txt"))
	if err != nil {
		t.Fatal(err)
	}
	object := "{{- define \"notes\" }}" + string(
		text,
	) + "{{ end }}apiVersion: v1\nkind: ConfigMap\nmetadata: {name: notes}\ndata:\n  notes: |\n{{ include \"notes\" " +
		". | indent 4 }}\n"
	if err := os.WriteFile(filepath.Join(noted, "templates/notes.yaml"), []byte(object), 0o644); err != nil {
		t.Fatal(err)
	}
	notes := func(args ...string) string {
		text, err := run(
			t,
			append(
				[]string{
					program(t, "helm"),
					"template",
					"kvepp",
					noted,
					"--kube-version",
					kubernetes,
					"--set",
					"pool.selector.app=vllm",
					"--show-only",
					"templates/notes.yaml",
				},
				args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return parse(t, "notes", text).one(t, "ConfigMap").text("data", "notes")
	}
	const gateways, metrics, token = "Every pod in the cluster can reach ports 9002 and 9003",
		"Every pod in the cluster can reach port 9090", "--clusterrole kvepp-default-metrics-reader"
	for _, x := range []struct {
		args  []string
		wants [3]bool
	}{
		{nil, [3]bool{true, true, true}},
		{[]string{"--set-json", `networkPolicy.gatewayFrom=[{"podSelector":{}}]`, "--set", "metrics.auth=false"},
			[3]bool{false, true, false}},
		{[]string{"--set-json", `networkPolicy.gatewayFrom=[{"podSelector":{}}]`, "--set-json",
			`networkPolicy.metricsFrom=[{"podSelector":{}}]`}, [3]bool{false, false, true}},
	} {
		said := notes(x.args...)
		if got := [3]bool{strings.Contains(said, gateways), strings.Contains(said, metrics),
			strings.Contains(said, token)}; got != x.wants {
			t.Errorf("%v: the notes say %v, want %v:\n%s", x.args, got, x.wants, said)
		}
	}
}
