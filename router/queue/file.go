package queue

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
)

const (
	maxFile    = 1 << 20 // bytes of a policy file
	maxClasses = 4096    // of all profiles, aliases followed
	// maxNumber is as good as no limit and keeps sums in range.
	maxNumber = 1 << 40
	maxTarget = 24 * 60 * 60 * 1000 // as of a request's own deadline
)

// File is a policy file.
type File struct {
	root   *Profile            // nil: none
	models map[string]*Profile // each replaces root for its model
	// Router is the file's section "router", in its order: settings that are also flags.
	Router []Setting
	// Selection is the file's section "worker_selection"; nil: none.
	Selection *Selection
	// TenantHeader is the header that says who sent a request, in lower case; empty: x-llm-d-inference-fairness-id.
	TenantHeader string
}

// Setting is a key with one value.
type Setting struct {
	Key, Value string
	Line       int
}

// HasRoot reports whether the file has a profile for models without a profile of their own.
func (f *File) HasRoot() bool { return f.root != nil }

// The keys of the file, as in Dynamo.
var (
	profileKeys = []string{"default_policy_family", "uncached_isl_buckets", "policy_classes"}
	fileKeys    = append(slices.Clone(profileKeys), "models", "router", "worker_selection", tenantKey)
	bucketKeys  = []string{"min_tokens", "bucket"}
	classKeys   = []string{
		"name",
		"policy_family",
		"cache_bucket",
		"queue_policy",
		"quantum",
		"prefill_busy_threshold",
		"prefill_busy_threshold_frac",
		"request_queue_limit_per_worker",
		"raw_isl_token_queue_limit_per_worker",
		"cached_token_queue_limit_per_worker",
		deadlineKey,
	}
)

// deadlineKey is kvepp's own: milliseconds from a request's arrival to its first token, at most a day.
const deadlineKey = "ttft_target_ms"

// tenantKey is kvepp's own, too: the header that says who sent a request.
const tenantKey = "tenant_header"

// examples are values of keys, for error texts.
var examples = map[string]string{
	"default_policy_family": "standard", "policy_family": "standard", "name": "interactive", "bucket": "short",
	"type": costFunction, deadlineKey: "2000", tenantKey: "x-api-key",
	"cache_bucket": "short",
	"min_tokens":   "0", "quantum": "8192", "prefill_busy_threshold": "16384", "prefill_busy_threshold_frac": "2.0",
	"request_queue_limit_per_worker": "64", "raw_isl_token_queue_limit_per_worker": "1000000",
	"cached_token_queue_limit_per_worker": "1000000",
}

// refused maps keys of Dynamo's that kvepp does not support to the reason.
var refused = map[string]string{
	"request_classifier": "kvepp runs no classifier; a request's class comes from the header " +
		"x-dynamo-meta-policy-class and its tokens; leave this key out",
}

// ParseFile reads a policy file (--router-policy-config). Errors name the line and the right form.
func ParseFile(text []byte) (*File, error) {
	if len(text) > maxFile {
		return nil, fmt.Errorf("the file has %d bytes, but at most %d are read", len(text), maxFile)
	}
	var doc yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(text))
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New("the file is empty: it must define policy_classes, models, router or worker_selection")
	} else if err != nil {
		// the line stays in front
		return nil, errors.New(strings.Replace(strings.TrimPrefix(err.Error(), "yaml: "), ": ", ": not valid YAML: ",
			1))
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document in the file")
	}
	if len(doc.Content) == 0 {
		return nil, errors.New("the file is empty: it must define policy_classes, models, router or worker_selection")
	}
	r := &reader{}
	top, err := r.mapping(doc.Content[0], "the policy file", fileKeys)
	if err != nil {
		return nil, err
	}
	f := &File{models: map[string]*Profile{}}
	if slices.ContainsFunc(profileKeys, func(key string) bool { return top.values[key] != nil }) {
		if f.root, err = r.profile(top); err != nil {
			return nil, err
		}
	}
	if n := top.values["models"]; n != nil {
		names, profiles, err := r.pairs(n, "models")
		if err != nil {
			return nil, err
		}
		for i, name := range names {
			if name.Value == "" {
				return nil, wrong(name, "a model's name may not be empty")
			}
			m, err := r.mapping(profiles[i], "the profile of model "+strconv.Quote(name.Value), profileKeys)
			if err != nil {
				return nil, err
			}
			if f.models[name.Value], err = r.profile(m); err != nil {
				return nil, err
			}
		}
	}
	if n := top.values["router"]; n != nil {
		if f.Router, err = r.settings(n, "router", "None"); err != nil {
			return nil, err
		}
	}
	if n := top.values["worker_selection"]; n != nil {
		if f.Selection, err = r.selection(n); err != nil {
			return nil, err
		}
	}
	if f.TenantHeader, err = top.identifier(tenantKey); err != nil {
		return nil, err
	}
	f.TenantHeader = strings.ToLower(f.TenantHeader)
	if f.root == nil && len(f.models) == 0 && f.Router == nil && f.Selection == nil && f.TenantHeader == "" {
		return nil, wrong(doc.Content[0], "the file must define policy_classes, models, router or worker_selection")
	}
	return f, nil
}

// reader counts classes, so that aliases cannot multiply them without bound.
type reader struct{ classes int }

// object is a mapping with known keys.
type object struct {
	node   *yaml.Node
	what   string
	values map[string]*yaml.Node // null values are left out
}

func wrong(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...))
}

// shown returns a value for an error text, behind its key; "" for a list or a mapping.
func shown(n *yaml.Node) string {
	if n.Kind != yaml.ScalarNode {
		return ""
	}
	return " " + strconv.Quote(n.Value)
}

// resolve follows an alias.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// pairs returns the keys and values of a mapping. It refuses duplicate keys.
func (r *reader) pairs(n *yaml.Node, what string) (keys, values []*yaml.Node, err error) {
	if n = resolve(n); n.Kind != yaml.MappingNode {
		return nil, nil, wrong(n, "%s: must be a mapping of keys to values", what)
	}
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		switch line, twice := lines[key.Value]; {
		case key.Kind != yaml.ScalarNode || key.Tag == "!!merge":
			return nil, nil, wrong(key, "%s: keys must be names", what)
		case twice:
			return nil, nil, wrong(key, "%s: %q is given in line %d already", what, key.Value, line)
		}
		lines[key.Value] = key.Line
		keys, values = append(keys, key), append(values, n.Content[i+1])
	}
	return keys, values, nil
}

// mapping returns the values of a mapping, and refuses keys that are not known.
func (r *reader) mapping(n *yaml.Node, what string, known []string) (object, error) {
	o := object{node: resolve(n), what: what, values: map[string]*yaml.Node{}}
	keys, values, err := r.pairs(n, what)
	for i, key := range keys {
		switch why, not := refused[key.Value]; {
		case slices.Contains(known, key.Value):
			if v := resolve(values[i]); v.Kind != yaml.ScalarNode || v.Tag != "!!null" {
				o.values[key.Value] = v
			}
		case not && slices.Contains(known, "router"):
			return o, wrong(key, "%s: %s", key.Value, why)
		default:
			return o, wrong(key, "%q is not a key of %s, which has: %s%s", key.Value, what, strings.Join(known, ", "),
				suggest.DidYouMean(key.Value, "", known))
		}
	}
	return o, err
}

func (o *object) absent(key string) error {
	return wrong(o.node, "%s: %s is missing", o.what, key)
}

// identifier returns a name; "" if it is absent.
func (o *object) identifier(key string) (string, error) {
	n := o.values[key]
	if n == nil {
		return "", nil
	}
	ok := n.Kind == yaml.ScalarNode && n.Tag == "!!str" && n.Value != ""
	for _, c := range []byte(n.Value) {
		ok = ok &&
			(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '.' || c == '-')
	}
	if !ok {
		return "", wrong(n, "%s%s: must be text of letters, digits, '_', '.' and '-', for example %s: %s", key,
			shown(n), key, examples[key])
	}
	return n.Value, nil
}

// number returns a whole number of at least 0; nil if it is absent.
func (o *object) number(key string) (*int, error) {
	n := o.values[key]
	if n == nil {
		return nil, nil
	}
	var v int64
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || n.Decode(&v) != nil || v < 0 || v > maxNumber {
		return nil, wrong(n, "%s%s: must be a whole number from 0 to %d, for example %s: %s", key, shown(n), maxNumber,
			key, examples[key])
	}
	i := int(v)
	return &i, nil
}

// fraction returns a finite number of at least 0; nil if it is absent.
func (o *object) fraction(key string) (*float64, error) {
	n := o.values[key]
	if n == nil {
		return nil, nil
	}
	var v float64
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" && n.Tag != "!!float" || n.Decode(&v) != nil ||
		!(v >= 0 && v <= math.MaxFloat64) {
		return nil, wrong(n,
			"%s%s: must be a finite number of at least 0, for example %s: %s", key, shown(n), key, examples[key])
	}
	return &v, nil
}

// list returns the elements of a list. It refuses an empty list.
func (o *object) list(key string) ([]*yaml.Node, error) {
	n := o.values[key]
	if n == nil {
		return nil, o.absent(key)
	}
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		return nil, wrong(n, "%s: must be a list of at least one", key)
	}
	return n.Content, nil
}

// profile reads the keys of a profile.
func (r *reader) profile(o object) (*Profile, error) {
	p := &Profile{explicit: map[string]int{}, families: map[string]int{}, members: map[member]int{}}
	fallback, err := o.identifier("default_policy_family")
	if err == nil && fallback == "" {
		err = o.absent("default_policy_family")
	}
	if err != nil {
		return nil, err
	}
	buckets, names, err := r.buckets(&o)
	if err != nil {
		return nil, err
	}
	p.buckets = buckets
	classes, err := o.list("policy_classes")
	if err != nil {
		return nil, err
	}
	if r.classes += len(classes); r.classes > maxClasses {
		return nil, wrong(o.values["policy_classes"], "more than %d policy classes in the file", maxClasses)
	}
	lines := map[string]*yaml.Node{}
	var families []string
	for i, n := range classes {
		c, family, bucket, err := r.class(n, names)
		if err != nil {
			return nil, err
		}
		if lines[c.Name] != nil {
			return nil, wrong(n, "policy class %q is in line %d already", c.Name, lines[c.Name].Line)
		}
		lines[c.Name] = n
		p.Classes = append(p.Classes, c)
		if family == "" {
			p.explicit[c.Name] = i
			continue
		}
		if _, known := p.families[family]; !known {
			p.families[family] = len(families)
			families = append(families, family)
		}
		m := member{p.families[family], bucket}
		if other, taken := p.members[m]; taken {
			return nil, wrong(n,
				"family %q has a class for bucket %q already: %q", family, names[bucket], p.Classes[other].Name)
		}
		p.members[m] = i
	}
	var known bool
	if p.defaultFamily, known = p.families[fallback]; !known {
		return nil, wrong(o.values["default_policy_family"],
			"default_policy_family %q: no policy class has this policy_family", fallback)
	}
	for name := range p.explicit {
		if _, too := p.families[name]; too {
			return nil, wrong(lines[name],
				"policy class %q has the name of a policy_family: a request that asks for it could mean either", name)
		}
	}
	// The loop ends at the first missing class, so it never takes longer than there are classes.
	for f, family := range families {
		for b, bucket := range names {
			if _, there := p.members[member{f, b}]; !there {
				return nil, wrong(o.values["policy_classes"],
					"no policy class for family %q and bucket %q: every family needs one for each bucket", family,
					bucket)
			}
		}
	}
	return p, nil
}

// buckets reads uncached_isl_buckets: the lowest token count of each bucket, and their names.
func (r *reader) buckets(o *object) (least []int, names []string, err error) {
	list, err := o.list("uncached_isl_buckets")
	if err != nil {
		return nil, nil, err
	}
	seen := map[string]bool{}
	for i, n := range list {
		b, err := r.mapping(n, "an uncached_isl_bucket", bucketKeys)
		if err != nil {
			return nil, nil, err
		}
		from, err := b.number("min_tokens")
		if err != nil {
			return nil, nil, err
		}
		name, err := b.identifier("bucket")
		switch {
		case err != nil:
			return nil, nil, err
		case from == nil:
			return nil, nil, b.absent("min_tokens")
		case name == "":
			return nil, nil, b.absent("bucket")
		case i == 0 && *from != 0:
			return nil, nil, wrong(b.node, "min_tokens %d: the first bucket must begin at 0", *from)
		case i > 0 && *from <= least[i-1]:
			return nil, nil, wrong(b.node,
				"min_tokens %d: must be more than the bucket before it has, %d", *from, least[i-1])
		case seen[name]:
			return nil, nil, wrong(b.node, "bucket %q is there twice", name)
		}
		seen[name] = true
		least, names = append(least, *from), append(names, name)
	}
	return least, names, nil
}

// class reads one policy class. family is empty for a class that requests ask for by name.
func (r *reader) class(n *yaml.Node, buckets []string) (c Class, family string, bucket int, err error) {
	o, err := r.mapping(n, "a policy class", classKeys)
	if err != nil {
		return c, "", 0, err
	}
	if c.Name, err = o.identifier("name"); err != nil {
		return c, "", 0, err
	}
	if c.Name == "" {
		return c, "", 0, o.absent("name")
	}
	o.what = "policy class " + strconv.Quote(c.Name)

	c.Policy = FCFS
	if v := o.values["queue_policy"]; v != nil {
		if c.Policy = Policy(v.Value); v.Kind != yaml.ScalarNode || !c.Policy.Valid() {
			return c, "", 0, wrong(v, "queue_policy%s: must be fcfs, wspt, edf or lcfs%s", shown(v),
				suggest.DidYouMean(v.Value, "", policies))
		}
	}
	quantum, err := o.number("quantum")
	switch {
	case err != nil:
		return c, "", 0, err
	case quantum == nil:
		return c, "", 0, o.absent("quantum")
	case *quantum == 0:
		return c, "", 0, wrong(o.values["quantum"], "quantum 0: must be at least 1 token")
	}
	c.Quantum = *quantum
	if c.BusyFrac, err = o.fraction("prefill_busy_threshold_frac"); err != nil {
		return c, "", 0, err
	}
	for _, n := range []struct {
		key string
		to  **int
	}{
		{"prefill_busy_threshold", &c.BusyTokens},
		{"request_queue_limit_per_worker", &c.MaxRequests},
		{"raw_isl_token_queue_limit_per_worker", &c.MaxTokens},
		{"cached_token_queue_limit_per_worker", &c.MaxCachedTokens},
	} {
		if *n.to, err = o.number(n.key); err != nil {
			return c, "", 0, err
		}
	}
	target, err := o.number(deadlineKey)
	switch {
	case err != nil:
		return c, "", 0, err
	case target != nil && (*target == 0 || *target > maxTarget):
		return c, "", 0, wrong(o.values[deadlineKey], "%s %d: must be 1 to %d", deadlineKey, *target, maxTarget)
	case target != nil && c.Policy != EDF:
		return c, "", 0, wrong(o.values[deadlineKey], "%s: only queue_policy edf heeds deadlines", deadlineKey)
	case target != nil:
		c.Deadline = time.Duration(*target) * time.Millisecond
	}
	family, err = o.identifier("policy_family")
	if err != nil {
		return c, "", 0, err
	}
	name, err := o.identifier("cache_bucket")
	switch {
	case err != nil:
		return c, "", 0, err
	case (family == "") != (name == ""):
		return c, "", 0, wrong(o.node,
			"%s: policy_family and cache_bucket belong together; a class without both is asked for by its name", o.what)
	case family == "":
		return c, "", 0, nil
	}
	if bucket = slices.Index(buckets, name); bucket < 0 {
		return c, "", 0, wrong(o.values["cache_bucket"], "cache_bucket %q is none of the uncached_isl_buckets: %s%s",
			name, strings.Join(buckets, ", "), suggest.DidYouMean(name, "", buckets))
	}
	return c, family, bucket, nil
}
