package queue

import (
	"maps"
	"slices"
	"sort"
	"time"
)

// Class is one policy class: when its requests wait, in which order, and how many.
type Class struct {
	Name   string
	Policy Policy
	// Quantum is how many tokens of work the class may begin in each round, at least 1. While two classes have requests
	// waiting, they share work in proportion to their quanta.
	Quantum int

	// BusyTokens and BusyFrac say when a worker is busy: if more prompt tokens wait to be prefilled than BusyTokens, or
	// than BusyFrac times the tokens that the engine takes in one step. Both nil: requests of the class never wait.
	BusyTokens *int
	BusyFrac   *float64
	// Gate, in their place, says when all workers together are busy. nil: it does not.
	Gate *Gate

	// Deadline is that of the first token of requests that bring none, after their arrival; 0: none. Only EDF reads it.
	Deadline time.Duration

	// Limits on what waits in the class, for each worker: requests, tokens of their prompts, and cached tokens of
	// these. nil: no limit. 0: requests never wait and are refused instead.
	MaxRequests, MaxTokens, MaxCachedTokens *int
}

// Waits reports whether requests of the class wait, or are refused, above some load.
func (c *Class) Waits() bool { return c.BusyTokens != nil || c.BusyFrac != nil || c.Gate != nil }

// Rejects reports whether requests of the class are refused where others would wait.
func (c *Class) Rejects() bool {
	zero := func(limit *int) bool { return limit != nil && *limit == 0 }
	return zero(c.MaxRequests) || zero(c.MaxTokens) || zero(c.MaxCachedTokens)
}

// Busy reports whether a worker is busy that has prefillTokens waiting and whose engine takes maxTokens in one step.
func (c *Class) Busy(prefillTokens, maxTokens int) bool {
	return c.BusyTokens != nil && prefillTokens > *c.BusyTokens ||
		c.BusyFrac != nil && float64(prefillTokens) > float64(*c.BusyFrac*float64(maxTokens))
}

// Profile is the policy classes of a model, and the rule that assigns requests to them.
type Profile struct {
	Classes []Class // at least one
	Bands   *Bands  // of the only class; nil: none

	// The other fields are nil if there is one class for all requests.
	explicit      map[string]int // name -> class that requests ask for by that name
	families      map[string]int
	defaultFamily int
	buckets       []int // the lowest token count of each bucket, ascending from 0
	members       map[member]int
}

// member is the family and the bucket of a class.
type member struct{ family, bucket int }

// Single returns a profile of one class without limits, for --router-queue-threshold. frac is the class's BusyFrac.
func Single(policy Policy, frac *float64) *Profile {
	return &Profile{Classes: []Class{{Name: "default", Policy: policy, Quantum: 1, BusyFrac: frac}}}
}

// Waits reports whether requests of any class ever wait or are refused.
func (p *Profile) Waits() bool {
	for i := range p.Classes {
		if p.Classes[i].Waits() {
			return true
		}
	}
	return false
}

// Class returns the index of a request's class. name is the class or family that the request asks for; an unknown name
// means the default family. uncachedTokens is how many tokens of its prompt are not cached.
func (p *Profile) Class(name string, uncachedTokens int) int {
	if p.members == nil {
		return 0
	}
	if i, ok := p.explicit[name]; ok {
		return i
	}
	family, ok := p.families[name]
	if !ok {
		family = p.defaultFamily
	}
	bucket := sort.Search(len(p.buckets), func(i int) bool { return p.buckets[i] > uncachedTokens }) - 1
	return p.members[member{family, max(bucket, 0)}]
}

// Profiles are the profiles of all models.
type Profiles struct {
	byModel map[string]*Profile
	others  *Profile // for all other models
}

// Profiles returns the profiles of the file. fallback is for models without a profile in the file. A nil File has none.
func (f *File) Profiles(fallback *Profile) *Profiles {
	if f == nil {
		return &Profiles{others: fallback}
	}
	if f.root != nil {
		fallback = f.root
	}
	return &Profiles{byModel: f.models, others: fallback}
}

// Of returns the profile of a model, and whether the model has one of its own.
func (p *Profiles) Of(model string) (profile *Profile, own bool) {
	if profile, own = p.byModel[model]; own {
		return profile, true
	}
	return p.others, false
}

// Waits reports whether requests for any model ever wait or are refused.
func (p *Profiles) Waits() bool {
	for _, own := range p.byModel {
		if own.Waits() {
			return true
		}
	}
	return p.others.Waits()
}

// SameClasses reports whether others has the same classes for the same models, in the same order. Either may be nil.
func (p *Profiles) SameClasses(others *Profiles) bool {
	if p == nil || others == nil {
		return p == others
	}
	same := func(a, b *Profile) bool {
		return slices.EqualFunc(a.Classes, b.Classes, func(x, y Class) bool { return x.Name == y.Name })
	}
	return p.Waits() == others.Waits() && same(p.others, others.others) &&
		maps.EqualFunc(p.byModel, others.byModel, same)
}

// Classes returns the names of all classes, sorted.
func (p *Profiles) Classes() []string {
	names := map[string]bool{}
	add := func(profile *Profile) {
		for i := range profile.Classes {
			names[profile.Classes[i].Name] = true
		}
	}
	add(p.others)
	for _, own := range p.byModel {
		add(own)
	}
	return slices.Sorted(maps.Keys(names))
}
