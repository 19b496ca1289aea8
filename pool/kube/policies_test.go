package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
)

// policy returns an object with a spec, created age ago.
func policy(
	t *testing.T,
	group, kind, name string,
	age time.Duration,
	spec string,
) (schema.GroupVersionResource, *unstructured.Unstructured) {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{"apiVersion": group + "/v1alpha2", "kind": kind}}
	u.SetName(name)
	u.SetNamespace("ns")
	u.SetCreationTimestamp(metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(-age)))
	var parsed map[string]any
	if err := yaml.Unmarshal([]byte(spec), &parsed); err != nil {
		t.Fatal(err)
	}
	if parsed["poolRef"] == nil {
		parsed["poolRef"] = map[string]any{"name": "p"}
	}
	u.Object["spec"] = parsed
	return schema.GroupVersionResource{Group: group, Version: "v1alpha2", Resource: strings.ToLower(kind) + "s"}, u
}

const (
	objective = "InferenceObjective"
	rewriting = "InferenceModelRewrite"
)

// runningPolicies is Policies whose Run is active.
type runningPolicies struct {
	*Policies
	mu   sync.Mutex
	last Policy
}

func runPolicies(t *testing.T, c *cluster) *runningPolicies {
	o := &runningPolicies{Policies: NewPolicies(c.client, "ns", "p", quiet)}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		o.Run(ctx, func(now Policy) {
			o.mu.Lock()
			defer o.mu.Unlock()
			o.last = now
		})
	}()
	t.Cleanup(func() { stop(); <-done })
	return o
}

func (o *runningPolicies) text() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	var all []string
	for name, priority := range o.last.Priorities {
		all = append(all, fmt.Sprintf("%s=%d", name, priority))
	}
	slices.Sort(all)
	for _, r := range o.last.Rewrites {
		all = append(all, fmt.Sprintf("%s:%v%v", r.Name, r.Models, r.Targets))
	}
	return strings.Join(all, " ")
}

func (o *runningPolicies) want(t *testing.T, want string) {
	t.Helper()
	eventually(t, want, func() bool { return o.text() == want })
}

func TestPolicies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		for _, u := range []struct {
			group, kind, name string
			age               time.Duration
			spec              string
		}{
			{policyGroups[0], objective, "urgent", 0, "priority: 7"},
			{policyGroups[0], objective, "batch", 0, "priority: -2"},
			{policyGroups[0], objective, "plain", 0, "{}"},
			{policyGroups[0], objective, "others", 0, "{priority: 9, poolRef: {name: q}}"},
			{policyGroups[0], objective, "odd", 0, "priority: high"},
			{policyGroups[1], objective, "legacy", 0, "priority: 1"},
			{policyGroups[0], rewriting, "young", 0, "rules: [{targets: [{modelRewrite: z}]}]"},
			{policyGroups[0], rewriting, "old", time.Hour,
				`{poolRef: {name: p, kind: InferencePool, group: inference.networking.k8s.io},
				rules: [{matches: [{model: {type: Exact, value: a}}, {model: {value: b}}], targets: [{modelRewrite: ` +
					`x, weight: 9}, {modelRewrite: v, weight: 1}]}, {matches: [{}], targets: [{modelRewrite: w}]}]}`},
			{policyGroups[0], rewriting, "half weighed", 0,
				"rules: [{targets: [{modelRewrite: z, weight: 1}, {modelRewrite: v}]}]"},
			{policyGroups[0], rewriting, "no target", 0, "rules: [{matches: [{model: {value: a}}]}]"},
			{policyGroups[0], rewriting, "by pattern", 0,
				"rules: [{matches: [{model: {type: Regex, value: a}}], targets: [{modelRewrite: z}]}]"},
			{policyGroups[0], rewriting, "nameless", 0,
				"rules: [{matches: [{model: {}}], targets: [{modelRewrite: z}]}]"},
			{policyGroups[0], rewriting, "nowhere", 0, "rules: [{targets: [{weight: 1}]}]"},
			{policyGroups[0], rewriting, "heavy", 0, "rules: [{targets: [{modelRewrite: z, weight: 1000001}]}]"},
		} {
			c.object(policy(t, u.group, u.kind, u.name, u.age, u.spec))
		}
		o := runPolicies(t, c)
		o.want(t, "batch=-2 plain=0 urgent=7 old:[a b][{x 9} {v 1}] old:[][{w 0}] young:[][{z 0}]")
		for _, k := range o.Kinds() {
			want := map[string]uint64{"inferenceobjectives.llm-d.ai": 1, "inferencemodelrewrites.llm-d.ai": 6}[k.Name]
			if k.Errors() != want || k.Health() != Followed {
				t.Errorf("%s: %d objects are ignored, want %d; %s", k.Name, k.Errors(), want, k.Health())
			}
		}
		eventually(
			t,
			"all to be watched",
			func() bool { return c.watched("inferenceobjectives") == 2 && c.watched("inferencemodelrewrites") == 2 },
		)
		resource, _ := policy(t, policyGroups[0], rewriting, "", 0, "{}")
		c.must(c.dynamic.Resource(resource).Namespace("ns").Delete(t.Context(), "old", metav1.DeleteOptions{}))
		c.object(policy(t, policyGroups[0], objective, "urgent", 0, "priority: 8"))
		c.object(policy(t, policyGroups[0], objective, "odd", 0, "priority: 3"))
		o.want(t, "batch=-2 odd=3 plain=0 urgent=8 young:[][{z 0}]")
	})
}

// TestOlderGroupOfPolicies: the older group counts while the newer one is absent or forbidden.
func TestOlderGroupOfPolicies(t *testing.T) {
	for what, refusal := range map[string]error{"absent": apierrors.NewNotFound(schema.GroupResource{}, "x"),
		"forbidden": apierrors.NewForbidden(schema.GroupResource{}, "x", nil)} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c := newCluster(t)
				c.object(policy(t, policyGroups[1], objective, "legacy", 0, "priority: 1"))
				c.object(policy(t, policyGroups[0], objective, "new", 0, "priority: 2"))
				c.failWith("llm-d.ai", refusal)
				o := runPolicies(t, c)
				o.want(t, "legacy=1")
				c.failWith("llm-d.ai", nil)
				o.want(t, "new=2")
			})
		})
	}
}

// TestOlderGroupHoldsWhileTheServerIsAway: if the cluster lacks the newer group, the older one still counts while the
// API server does not answer.
func TestOlderGroupHoldsWhileTheServerIsAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.object(policy(t, policyGroups[1], objective, "legacy", 0, "priority: 1"))
		c.failWith("llm-d.ai", apierrors.NewNotFound(schema.GroupResource{}, "x"))
		o := runPolicies(t, c)
		o.want(t, "legacy=1")
		c.failWith("llm-d.ai", apierrors.NewServiceUnavailable("away"))
		newer := o.objectives[0].Kind
		eventually(t, "reads of the newer group to fail", func() bool { return newer.Health() == Failing })
		eventually(t, "the older to be watched", func() bool { return c.watched("inferenceobjectives") >= 2 })
		c.object(policy(t, policyGroups[1], objective, "later", 0, "priority: 2"))
		o.want(t, "later=2 legacy=1")
	})
}

// TestNewerGroupIsTakenAway: the newer group counts even without objects. When it is removed, the older one counts at
// once.
func TestNewerGroupIsTakenAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		c.object(policy(t, policyGroups[1], objective, "legacy", 0, "priority: 1"))
		o := runPolicies(t, c)
		eventually(t, "both to be watched", func() bool { return c.watched("inferenceobjectives") == 2 })
		o.want(t, "")
		c.failWith("llm-d.ai", apierrors.NewNotFound(schema.GroupResource{}, "x"))
		o.want(t, "legacy=1")
	})
}

// TestProblemsEnd: an error is logged once, and again if the object was deleted in between.
func TestProblemsEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t)
		resource, odd := policy(t, policyGroups[0], objective, "odd", 0, "priority: high")
		c.object(resource, odd)
		o := runPolicies(t, c)
		kind := o.objectives[0].Kind
		eventually(t, "the error to be counted", func() bool { return kind.Errors() == 1 })
		eventually(t, "the objects to be watched", func() bool { return c.watched("inferenceobjectives") == 2 })
		c.object(policy(t, policyGroups[0], objective, "good", 0, "priority: 1"))
		o.want(t, "good=1")
		if kind.Errors() != 1 {
			t.Errorf("%d errors are counted, want 1", kind.Errors())
		}
		c.must(c.dynamic.Resource(resource).Namespace("ns").Delete(t.Context(), "odd", metav1.DeleteOptions{}))
		c.object(policy(t, policyGroups[0], objective, "better", 0, "priority: 2"))
		o.want(t, "better=2 good=1")
		c.object(resource, odd)
		eventually(t, "the error to be counted again", func() bool { return kind.Errors() == 2 })
	})
}
