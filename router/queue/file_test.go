package queue

import (
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const example = `
router:
  router_track_active_blocks: false
  router_ttl_secs: 60.5
  router_predicted_ttl_secs: ~
default_policy_family: standard
uncached_isl_buckets:
- {min_tokens: 0, bucket: cached}
- {min_tokens: 3072, bucket: uncached}
policy_classes:
- {name: cached, policy_family: standard, cache_bucket: cached, quantum: 2048, prefill_busy_threshold_frac: 16}
- {name: uncached, policy_family: standard, cache_bucket: uncached, queue_policy: wspt, quantum: 1024, ` +
	`prefill_busy_threshold: 100, request_queue_limit_per_worker: 8}
- {name: urgent_cached, policy_family: urgent, cache_bucket: cached, quantum: 1}
- {name: urgent_uncached, policy_family: urgent, cache_bucket: uncached, quantum: 1, ` +
	`raw_isl_token_queue_limit_per_worker: 0}
- {name: batch.all, queue_policy: edf, ttft_target_ms: 1500, quantum: 3, cached_token_queue_limit_per_worker: 7}
models:
  other/model:
    default_policy_family: one
    uncached_isl_buckets: [{min_tokens: 0, bucket: all}]
    policy_classes: [{name: only, policy_family: one, cache_bucket: all, quantum: 5}]
tenant_header: X-Api-Key
`

func TestParseFile(t *testing.T) {
	f, err := ParseFile([]byte(example))
	if err != nil {
		t.Fatal(err)
	}
	if f.TenantHeader != "x-api-key" {
		t.Errorf("tenants have the header %q", f.TenantHeader)
	}
	if want := []Setting{{"router_track_active_blocks", "false", 3}, {"router_ttl_secs", "60.5", 4},
		{"router_predicted_ttl_secs", "None", 5}}; !reflect.DeepEqual(
		f.Router,
		want,
	) {
		t.Errorf("router: %+v", f.Router)
	}
	fallback := Single(WSPT, nil)
	all := f.Profiles(fallback)
	p, own := all.Of("anything")
	if own || !f.HasRoot() {
		t.Error("a profile for anything")
	}
	want := []Class{
		{Name: "cached", Policy: FCFS, Quantum: 2048, BusyFrac: set(16.0)},
		{Name: "uncached", Policy: WSPT, Quantum: 1024, BusyTokens: set(100), MaxRequests: set(8)},
		{Name: "urgent_cached", Policy: FCFS, Quantum: 1},
		{Name: "urgent_uncached", Policy: FCFS, Quantum: 1, MaxTokens: set(0)},
		{Name: "batch.all", Policy: EDF, Deadline: 1500 * time.Millisecond, Quantum: 3, MaxCachedTokens: set(7)},
	}
	if !reflect.DeepEqual(p.Classes, want) {
		t.Errorf("classes: %+v", p.Classes)
	}
	for _, c := range []struct {
		name   string
		tokens int
		want   string
	}{
		{"", 0, "cached"}, {"", 3071, "cached"}, {"", 3072, "uncached"}, {"", 1 << 40, "uncached"},
		{"urgent", 0, "urgent_cached"}, {"urgent", 5000, "urgent_uncached"},
		{"unknown", 5000, "uncached"},
		{"urgent_cached", 5000, "uncached"}, // a class with a family cannot be requested by its name
		{"batch.all", 0, "batch.all"}, {"batch.all", 5000, "batch.all"},
	} {
		if got := p.Classes[p.Class(c.name, c.tokens)].Name; got != c.want {
			t.Errorf("%q with %d tokens: %s, want %s", c.name, c.tokens, got, c.want)
		}
	}
	if other, own := all.Of("other/model"); !own || other == p ||
		other.Classes[other.Class("urgent", 5000)].Name != "only" ||
		other.Waits() ||
		!p.Waits() ||
		!all.Waits() {
		t.Errorf("other/model: %+v", other)
	}
	if got := strings.Join(all.Classes(), " "); got != "batch.all cached only uncached urgent_cached urgent_uncached" {
		t.Errorf("classes %s", got)
	}
	for _, none := range []*File{nil, {}} {
		if p, own := none.Profiles(fallback).Of("m"); p != fallback || own || none.Profiles(fallback).Waits() {
			t.Errorf("%+v", p)
		}
	}
	if c := &p.Classes[3]; !c.Rejects() || c.Waits() || p.Classes[1].Rejects() || !p.Classes[1].Waits() {
		t.Errorf("%+v", c)
	}
}

// A worker is busy above the threshold, not at it.
func TestBusy(t *testing.T) {
	for _, c := range []struct {
		class       Class
		tokens, max int
		want        bool
	}{
		{Class{}, 1 << 40, 1, false},
		{Class{BusyTokens: set(10)}, 10, 1, false}, {Class{BusyTokens: set(10)}, 11, 1 << 40, true},
		{Class{BusyFrac: set(0.5)}, 5, 10, false}, {Class{BusyFrac: set(0.5)}, 6, 10, true},
		{Class{BusyFrac: set(0.0)}, 0, 10, false}, {Class{BusyFrac: set(0.0)}, 1, 10, true},
		{Class{BusyTokens: set(10), BusyFrac: set(0.5)}, 6, 10, true},
		{Class{BusyTokens: set(10), BusyFrac: set(9.0)}, 11, 10, true},
	} {
		if got := c.class.Busy(c.tokens, c.max); got != c.want {
			t.Errorf("%d of %d: %v, want %v", c.tokens, c.max, got, c.want)
		}
	}
	if p := Single(FCFS, nil); p.Waits() || p.Class("anything", 9) != 0 {
		t.Errorf("%+v", p)
	}
}

// The example of docs/overload-and-queue.md is a valid file.
func TestPageExample(t *testing.T) {
	page, err := os.ReadFile("../../docs/overload-and-queue.md")
	if err != nil {
		t.Fatal(err)
	}
	_, from, found := strings.Cut(string(page), "```yaml\ndefault_policy_family:")
	text, _, closed := strings.Cut(from, "```")
	if !found || !closed {
		t.Fatal("no policy file in docs/overload-and-queue.md")
	}
	f, err := ParseFile([]byte("default_policy_family:" + text))
	if err != nil {
		t.Fatal(err)
	}
	if p, _ := f.Profiles(nil).Of("m"); len(p.Classes) != 2 || !p.Waits() ||
		p.Classes[p.Class("", 5000)].Name != "long" {
		t.Errorf("%+v", p)
	}
}

func TestRefusedFiles(t *testing.T) {
	// Each edit makes the example invalid. The error names the line.
	for _, c := range []struct{ old, new, says string }{
		{example, "", "empty"},
		{example, "# nothing\n", "empty"},
		{example, "---\n", "line 2: the policy file: must be a mapping"},
		{example, "[1]", "line 1: the policy file: must be a mapping"},
		{example, "models: {}\n", "must define"},
		{example, "a: [\n", "line 1"},
		{example, example + "---\na: 1\n", "more than one YAML document"},
		{"router:\n", "worker_selection: {}\nrouter:\n", "line 2: worker_selection: must have instances"},
		{"router:\n", "worker_selection: {aggregated: null}\nrouter:\n",
			"line 2: worker_selection: must have instances"},
		{"router:\n", "worker_selection: {instances: []}\nrouter:\n", "line 2: worker_selection: must have instances"},
		{"router:\n", "worker_selection: 7\nrouter:\n", "line 2: worker_selection: must be a mapping"},
		{"router:\n", "worker_selection: {weights: 1}\nrouter:\n",
			`line 2: "weights" is not a key of worker_selection, which has: aggregated, prefill, decode, encode, ` +
				`instances`},
		{"router:\n", "worker_selection: {decode: x}\nrouter:\n",
			`line 2: decode: "x" is no instance of worker_selection in a policy file, which has: default`},
		{"router:\n", "worker_selection: {decode: [x]}\nrouter:\n", "line 2: decode: must be the name of an instance"},
		{"router:\n", "worker_selection: {instances: {x: 1}}\nrouter:\n", "line 2: instances: must be a list"},
		{"router:\n", "worker_selection: {instances: [{name: x}]}\nrouter:\n", "type is missing"},
		{"router:\n", "worker_selection: {instances: [{type: x}]}\nrouter:\n", "name is missing"},
		{"router:\n", "worker_selection: {instances: [{name: default, type: x}]}\nrouter:\n", "choose another name"},
		{"router:\n", "worker_selection: {instances: [{name: a, type: x}, {name: a, type: x}]}\nrouter:\n",
			`line 2: instance "a" is in line 2 already`},
		{"router:\n", "worker_selection: {instances: [{name: a, type: x, weight: 1}]}\nrouter:\n",
			`line 2: "weight" is not a key of an instance of worker_selection, which has: name, type, parameters`},
		{"router:\n", "worker_selection: {instances: [{name: a, type: x, parameters: 1}]}\nrouter:\n",
			"line 2: parameters: must be a mapping"},
		{"router:\n", "request_classifier: {type: x}\nrouter:\n", "line 2: request_classifier: kvepp runs no"},
		{"router:\n", "routers: {}\nrouter:\n",
			`line 2: "routers" is not a key of the policy file, which has: default_policy_family, ` +
				`uncached_isl_buckets, policy_classes, models, router, worker_selection, ` +
				`tenant_header; did you mean router?`},
		{"policy_classes:", "policy_class:",
			`line 10: "policy_class" is not a key of the policy file, which has: default_policy_family, ` +
				`uncached_isl_buckets, policy_classes, models, router, worker_selection, ` +
				`tenant_header; did you mean policy_classes?`},
		{"a", "a: b: c\n", "line 3: not valid YAML: mapping values are not allowed in this context"},
		{"router_ttl_secs: 60.5", "router_ttl_secs: [1]", "line 4: router_ttl_secs: must be one value"},
		{example, "router: 7\n", "line 1: router: must be a mapping"},
		{"default_policy_family: standard\n", "", "default_policy_family is missing"},
		{"default_policy_family: standard", "default_policy_family: missing",
			`line 6: default_policy_family "missing"`},
		{"default_policy_family: standard", "default_policy_family: a/b",
			`line 6: default_policy_family "a/b": must be text`},
		{"default_policy_family: standard", "default_policy_family: 7",
			`line 6: default_policy_family "7": must be text of letters, digits, '_', '.' and '-', for example ` +
				`default_policy_family: standard`},
		{"- {min_tokens: 0, bucket: cached}\n", "- {min_tokens: 1, bucket: cached}\n",
			"line 8: min_tokens 1: the first bucket must begin at 0"},
		{"min_tokens: 3072", "min_tokens: 0", "line 9: min_tokens 0: must be more"},
		{"min_tokens: 3072", "min_tokens: 3072.5",
			`line 9: min_tokens "3072.5": must be a whole number from 0 to 1099511627776, for example min_tokens: 0`},
		{"min_tokens: 3072", "min_tokens: [3072]",
			`line 9: min_tokens: must be a whole number from 0 to 1099511627776, for example min_tokens: 0`},
		{"min_tokens: 3072", "min_token: 3072",
			`line 9: "min_token" is not a key of an uncached_isl_bucket, which has: min_tokens, bucket`},
		{"bucket: uncached}\npolicy", "bucket: cached}\npolicy", `line 9: bucket "cached" is there twice`},
		{"ttft_target_ms: 1500", "ttft_target_ms: 0", `ttft_target_ms 0: must be 1 to 86400000`},
		{"ttft_target_ms: 1500", "ttft_target_ms: 86400001", `ttft_target_ms 86400001: must be 1 to 86400000`},
		{"ttft_target_ms: 1500", "ttft_target_ms: soon", `ttft_target_ms "soon": must be a whole number from 0`},
		{"queue_policy: edf, t", "t", `ttft_target_ms: only queue_policy edf heeds deadlines`},
		{"X-Api-Key", "'x key'", `line 21: tenant_header "x key": must be text of letters`},
		{"quantum: 2048", "quantum: 0", `line 11: quantum 0: must be at least 1 token`},
		{"quantum: 2048", "quantum: -1",
			`line 11: quantum "-1": must be a whole number from 0 to 1099511627776, for example quantum: 8192`},
		{"quantum: 2048, ", "", `line 11: policy class "cached": quantum is missing`},
		{"quantum: 2048", "quanta: 2048",
			`line 11: "quanta" is not a key of a policy class, which has: name, policy_family, cache_bucket, ` +
				`queue_policy, quantum, prefill_busy_threshold, prefill_busy_threshold_frac, ` +
				`request_queue_limit_per_worker, raw_isl_token_queue_limit_per_worker, ` +
				`cached_token_queue_limit_per_worker`},
		{"quantum: 2048", "quantum: 2048, worker_selection: 1", `"worker_selection" is not a key of a policy class`},
		{"quantum: 2048", "quantum: 1, quantum: 2048", "line 11"},
		{"queue_policy: wspt", "queue_policy: sjf", `line 12: queue_policy "sjf": must be fcfs, wspt, edf or lcfs`},
		{"queue_policy: wspt", "queue_policy: wpst",
			`line 12: queue_policy "wpst": must be fcfs, wspt, edf or lcfs; did you mean wspt?`},
		{"queue_policy: wspt", "queue_policy: {}", `line 12: queue_policy: must be fcfs, wspt, edf or lcfs`},
		{"prefill_busy_threshold_frac: 16", "prefill_busy_threshold_frac: .inf",
			`line 11: prefill_busy_threshold_frac ".inf": must be a finite number of at least 0, for example ` +
				`prefill_busy_threshold_frac: 2.0`},
		{"prefill_busy_threshold_frac: 16", "prefill_busy_threshold_frac: -0.5",
			"line 11: prefill_busy_threshold_frac"},
		{"request_queue_limit_per_worker: 8", `request_queue_limit_per_worker: "8"`,
			"line 12: request_queue_limit_per_worker"},
		{"policy_family: urgent, cache_bucket: cached", "policy_family: urgent", "line 13"},
		{"policy_family: urgent, cache_bucket: cached", "policy_family: urgent, cache_bucket: no",
			`line 13: cache_bucket "no" is none of the uncached_isl_buckets: cached, uncached`},
		{"policy_family: urgent, cache_bucket: cached", "policy_family: standard, cache_bucket: cached",
			"line 13: family \"standard\" has a class for bucket \"cached\" already"},
		{"- {name: urgent_cached, policy_family: urgent, cache_bucket: cached, quantum: 1}\n", "",
			`line 11: no policy class for family "urgent" and bucket "cached"`},
		{"name: uncached", "name: cached", `line 12: policy class "cached" is in line 11 already`},
		{"name: batch.all", "name: urgent", `line 15: policy class "urgent" has the name of a policy_family`},
		{"name: only, ", "", "line 20: a policy class: name is missing"},
		{"other/model:", `"":`, "line 17: a model's name may not be empty"},
		{"    default_policy_family: one\n", "    router: {}\n    default_policy_family: one\n",
			`line 18: "router" is not a key of the profile of model "other/model"`},
		{"  other/model:\n", "  <<: {}\n  other/model:\n", "line 17: models: keys must be names"},
	} {
		text := strings.Replace(example, c.old, c.new, 1)
		if text == example {
			t.Fatalf("%q is not in the example", c.old)
		}
		if f, err := ParseFile([]byte(text)); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%q for %q: %v, %v; want %s", c.new, c.old, f, err, c.says)
		}
	}
	if _, err := ParseFile(make([]byte, maxFile+1)); err == nil {
		t.Error("a file beyond the limit is read")
	}
}

// YAML aliases cannot multiply the size of a file without bound.
func TestAliases(t *testing.T) {
	text := "models:\n  m: &m\n    default_policy_family: f\n    uncached_isl_buckets: [{min_tokens: 0, bucket: " +
		"b}]\n    policy_classes:\n    - {name: k, policy_family: f, cache_bucket: b, quantum: 1}\n"
	f, err := ParseFile([]byte(text + "  n: *m\n"))
	if err != nil || f.models["n"].Classes[0].Name != "k" || f.HasRoot() {
		t.Fatalf("%+v, %v", f, err)
	}
	var many strings.Builder
	many.WriteString(text)
	for i := range maxClasses {
		many.WriteString(
			"  n" + strings.Repeat("x", i%100) + string(rune('a'+i/100%26)) + string(rune('a'+i/2600)) + ": *m\n",
		)
	}
	if _, err := ParseFile([]byte(many.String())); err == nil || !strings.Contains(err.Error(), "more than 4096") {
		t.Error(err)
	}
	if _, err := ParseFile([]byte("models: &a {m: *a}\n")); err == nil {
		t.Error("a mapping within itself is read")
	}
}

// FuzzParseFile: an accepted file is complete. An error names the line, or says that the file is empty.
func FuzzParseFile(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("models: &a {m: *a}\n"))
	f.Add([]byte("router: {x: 1}"))
	f.Add([]byte("worker_selection: {decode: a, instances: [{name: a, type: dynamo-default-cost-fn, " +
		"parameters: {x: 1}}]}"))
	f.Add([]byte("? [a]\n: b"))
	f.Fuzz(func(t *testing.T, text []byte) {
		file, err := ParseFile(text)
		if err != nil {
			if err.Error() == "" {
				t.Error("an error without words")
			}
			return
		}
		if _, err := file.Selection.Parameters("a"); err != nil && err.Error() == "" {
			t.Error("an error without words")
		}
		all := file.Profiles(Single(FCFS, nil))
		for _, model := range append(slices.Collect(maps.Keys(file.models)), "") {
			p, _ := all.Of(model)
			q := New[int](p, 10)
			for _, name := range []string{"", "x", p.Classes[len(p.Classes)-1].Name} {
				for _, tokens := range []int{0, 1, 1 << 40} {
					if c := p.Class(name, tokens); c < 0 || c >= len(p.Classes) || p.Classes[c].Quantum < 1 ||
						!p.Classes[c].Policy.Valid() {
						t.Fatalf("class %d of %+v", c, p.Classes)
					} else if _, err := q.Push(Request{Class: c, Lane: Any, Tokens: tokens}, 1, 0); err == nil &&
						q.Pop(always[int]) == nil {
						t.Fatal("what was pushed is not popped")
					}
				}
			}
		}
	})
}
