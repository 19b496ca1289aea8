package kube

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"kvepp/router/modelrewrite"
)

// policyGroups are the API groups of InferenceObjective and InferenceModelRewrite. If the cluster has both groups, the
// first counts. Source: llm-d-router 0.10, apix/v1alpha2; GAIE 1.5, apix/v1alpha2.
var policyGroups = []string{"llm-d.ai", LegacyPoolGroup}

// maxPolicies bounds the objects of one kind, and the rules of one object.
const maxPolicies = 10_000

// Policy is what a pool's objects say about its requests.
type Policy struct {
	// Priorities are those of InferenceObjectives, by name.
	Priorities map[string]int32
	// Rewrites are the rules of InferenceModelRewrites, older objects first. Each has its object's name.
	Rewrites []modelrewrite.Rule
}

// Policies follows the InferenceObjectives and InferenceModelRewrites of one pool. Both kinds may be absent or
// forbidden. Create it with NewPolicies.
type Policies struct {
	client          *Client
	namespace, pool string
	log             *slog.Logger
	objectives      [2]policyKind // in the order of policyGroups
	rewrites        [2]policyKind
	changed         changes
	// problems holds the last logged error of each object. Only Run's goroutine uses it.
	problems map[string]string
}

// policyKind holds the objects of one kind and group.
type policyKind struct {
	*Kind
	resource schema.GroupVersionResource

	mu      *sync.Mutex
	objects map[string]*unstructured.Unstructured // guarded by mu; by name
	full    bool                                  // guarded by mu; it is logged that the limit is reached
}

// NewPolicies returns Policies that follow nothing until Run.
func NewPolicies(c *Client, namespace, pool string, log *slog.Logger) *Policies {
	p := &Policies{
		client:    c,
		namespace: namespace,
		pool:      pool,
		log:       log,
		changed:   newChanges(),
		problems:  map[string]string{},
	}
	for i, group := range policyGroups {
		for resource, kind := range map[string]*policyKind{"inferenceobjectives": &p.objectives[i],
			"inferencemodelrewrites": &p.rewrites[i]} {
			at := schema.GroupVersionResource{Group: group, Version: "v1alpha2", Resource: resource}
			*kind = policyKind{
				Kind:     newKind(at.GroupResource().String(), log),
				resource: at,
				mu:       new(sync.Mutex),
				objects:  map[string]*unstructured.Unstructured{},
			}
			kind.changed = p.wake
		}
	}
	return p
}

// Kinds returns the kinds of objects that are followed.
func (p *Policies) Kinds() (kinds []*Kind) {
	for _, k := range p.all() {
		kinds = append(kinds, k.Kind)
	}
	return kinds
}

func (p *Policies) all() []*policyKind {
	return []*policyKind{&p.objectives[0], &p.objectives[1], &p.rewrites[0], &p.rewrites[1]}
}

// Run follows the cluster until ctx ends, and calls apply with each new state, in order.
func (p *Policies) Run(ctx context.Context, apply func(Policy)) {
	var running sync.WaitGroup
	defer running.Wait()
	for _, k := range p.all() {
		running.Go(func() { p.follow(ctx, k) })
	}
	for p.changed.await(ctx) {
		apply(p.policy())
		if !pause(ctx, applyInterval-gatherDelay) {
			return
		}
	}
}

// wake makes Run call apply.
func (p *Policies) wake() { p.changed.note() }

func (p *Policies) follow(ctx context.Context, k *policyKind) {
	put := func(o any, there bool) {
		u, ok := o.(*unstructured.Unstructured)
		if !ok {
			return
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		_, known := k.objects[u.GetName()]
		switch {
		case !there:
			delete(k.objects, u.GetName())
			k.full = k.full && !known // the number is below the limit again
		case known || len(k.objects) < maxPolicies:
			k.objects[u.GetName()] = u
		default:
			if k.errors.Add(1); !k.full {
				k.full = true
				p.log.Error("too many objects of this kind; kvepp ignores the latest ones",
					"kind", k.Name, "name", u.GetName(), "most", maxPolicies)
			}
		}
	}
	k.Kind.follow(ctx, p.client.objects(k.resource, p.namespace, ""), &unstructured.Unstructured{}, follower{
		strip:  stripObject,
		put:    func(o any) { put(o, true); p.wake() },
		remove: func(o any) { put(o, false); p.wake() },
		replace: func(list []any) {
			k.mu.Lock()
			clear(k.objects)
			k.full = false
			k.mu.Unlock()
			for _, o := range list {
				put(o, true)
			}
			p.wake()
		},
	})
}

// policy parses all known objects. It logs and skips an object that is not valid.
func (p *Policies) policy() (policy Policy) {
	policy.Priorities = map[string]int32{}
	before := p.problems
	p.problems = map[string]string{} // so that those of deleted objects are dropped
	p.read(&p.objectives, before, func(u *unstructured.Unstructured) error {
		priority, err := parseObjective(u)
		if err == nil {
			policy.Priorities[u.GetName()] = priority
		}
		return err
	})
	p.read(&p.rewrites, before, func(u *unstructured.Unstructured) error {
		rules, err := parseRewrite(u)
		policy.Rewrites = append(policy.Rewrites, rules...)
		return err
	})
	return policy
}

// read returns this pool's objects to apply, the oldest first, from the first group that the cluster has. It logs an
// error of an object once.
func (p *Policies) read(kinds *[2]policyKind, before map[string]string, take func(*unstructured.Unstructured) error) {
	for i := range kinds {
		k := &kinds[i]
		if i+1 < len(kinds) && !k.inForce() {
			continue
		}
		k.mu.Lock()
		objects := slices.Collect(maps.Values(k.objects))
		k.mu.Unlock()
		slices.SortFunc(objects, func(a, b *unstructured.Unstructured) int {
			if c := a.GetCreationTimestamp().Compare(b.GetCreationTimestamp().Time); c != 0 {
				return c
			}
			return strings.Compare(a.GetName(), b.GetName())
		})
		for _, u := range objects {
			if !p.refersToPool(u) {
				continue
			}
			err := take(u)
			if err == nil {
				continue
			}
			name := k.Name + "/" + u.GetName()
			if p.problems[name] = err.Error(); p.problems[name] != before[name] {
				k.errors.Add(1)
				p.log.Error("an object is invalid; kvepp ignores it", "kind", k.Name, "name", u.GetName(), "error", err)
			}
		}
		return
	}
}

// inForce reports whether the cluster has the kind, by the last response of the API server. Known objects count while
// the kind seems to be absent: a starting API server does not serve all CRDs yet, which looks the same.
func (k *policyKind) inForce() bool {
	if k.exists() {
		return true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	return len(k.objects) > 0
}

// refersToPool reports whether an object refers to this pool.
func (p *Policies) refersToPool(u *unstructured.Unstructured) bool {
	text := func(key string) string {
		v, _, _ := unstructured.NestedString(u.Object, "spec", "poolRef", key)
		return v
	}
	kind := text("kind")
	return text("name") == p.pool && (kind == "" || kind == "InferencePool")
}

func parseObjective(u *unstructured.Unstructured) (priority int32, err error) {
	var o struct {
		Spec struct {
			Priority int32 `json:"priority"`
		} `json:"spec"`
	}
	err = runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o)
	return o.Spec.Priority, err
}

// parseRewrite parses the rules of an object. It returns all of them or an error.
func parseRewrite(u *unstructured.Unstructured) ([]modelrewrite.Rule, error) {
	var o struct {
		Spec struct {
			Rules []struct {
				Matches []struct {
					Model *struct {
						Type  string `json:"type"`
						Value string `json:"value"`
					} `json:"model"`
				} `json:"matches"`
				Targets []struct {
					ModelRewrite string `json:"modelRewrite"`
					Weight       *int32 `json:"weight"`
				} `json:"targets"`
			} `json:"rules"`
		} `json:"spec"`
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, &o); err != nil {
		return nil, err
	}
	if len(o.Spec.Rules) > maxPolicies {
		return nil, fmt.Errorf("%d rules: at most %d", len(o.Spec.Rules), maxPolicies)
	}
	var rules []modelrewrite.Rule
	for i, from := range o.Spec.Rules {
		rule, every := modelrewrite.Rule{Name: u.GetName()}, false
		for _, m := range from.Matches {
			switch {
			case m.Model == nil:
				every = true
			case m.Model.Type != "" && m.Model.Type != "Exact":
				return nil, fmt.Errorf("rule %d: the match type %q is not supported, only Exact", i, m.Model.Type)
			default:
				rule.Models = append(rule.Models, m.Model.Value)
			}
		}
		weighed := 0
		for _, t := range from.Targets {
			target := modelrewrite.Target{Model: t.ModelRewrite}
			if t.Weight != nil {
				weighed++
				target.Weight = int(*t.Weight)
			}
			rule.Targets = append(rule.Targets, target)
		}
		if err := rule.Check(); err != nil {
			return nil, fmt.Errorf("rule %d: %w", i, err)
		}
		if weighed != 0 && weighed != len(rule.Targets) {
			return nil, fmt.Errorf("rule %d: either all targets have a weight, or none", i)
		}
		if every {
			rule.Models = nil
		}
		rules = append(rules, rule)
	}
	return rules, nil
}
