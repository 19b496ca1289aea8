package queue

import (
	"maps"
	"slices"
	"sort"
)

// Class is one policy class: who waits when, in which order, and how many.
type Class struct {
	Name   string
	Policy Policy
	// Quantum is how many tokens of work the class may begin in each round; at least 1. Twice the quantum of another is
	// twice its share while both have requests waiting.
	Quantum int

	// BusyTokens and BusyFrac say when a worker is busy: with more prompt tokens waiting to be prefilled than the
	// first, or than the second times what the engine takes in one step. Both nil: requests of the class never wait.
	BusyTokens *int
	BusyFrac   *float64

	// What may wait in the class for each worker: requests, tokens of their prompts, those of them that are cached.
	// nil: as much as there is; 0: no request ever waits, it is turned away instead.
	MaxRequests, MaxTokens, MaxCachedTokens *int
}

// Waits reports whether there is a load on workers above which requests of the class wait, or are turned away.
func (c *Class) Waits() bool { return c.BusyTokens != nil || c.BusyFrac != nil }

// Rejects reports whether requests of the class are turned away where others would wait.
func (c *Class) Rejects() bool {
	zero := func(limit *int) bool { return limit != nil && *limit == 0 }
	return zero(c.MaxRequests) || zero(c.MaxTokens) || zero(c.MaxCachedTokens)
}

// Busy reports whether a worker is: one that has prefillTokens waiting, and whose engine takes maxTokens in one step.
func (c *Class) Busy(prefillTokens, maxTokens int) bool {
	return c.BusyTokens != nil && prefillTokens > *c.BusyTokens ||
		c.BusyFrac != nil && float64(prefillTokens) > float64(*c.BusyFrac*float64(maxTokens))
}

// Profile is the policy classes of a model, and which request belongs to which.
type Profile struct {
	Classes []Class // at least one

	// All other fields are nil where there is one class for all.
	explicit      map[string]int // classes that requests name, by name
	families      map[string]int
	defaultFamily int
	buckets       []int // the least tokens of each, ascending from 0
	members       map[member]int
}

// member is a class's place among families and buckets.
type member struct{ family, bucket int }

// Single is a profile of one class without limits, as --router-queue-threshold has it. frac is the class's BusyFrac.
func Single(policy Policy, frac *float64) *Profile {
	return &Profile{Classes: []Class{{Name: "default", Policy: policy, Quantum: 1, BusyFrac: frac}}}
}

// Waits reports whether requests of any class ever wait or are turned away.
func (p *Profile) Waits() bool {
	for i := range p.Classes {
		if p.Classes[i].Waits() {
			return true
		}
	}
	return false
}

// Class returns the index of the class of a request that asks for the class or family of that name, and of whose prompt
// so many tokens are not cached. A name that is neither counts as the default family.
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
	others  *Profile // of every other model
}

// Profiles returns the profiles of the file; fallback is that of models for which it has none. A nil File has none at
// all.
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

// Waits reports whether requests to any model ever wait or are turned away.
func (p *Profiles) Waits() bool {
	for _, own := range p.byModel {
		if own.Waits() {
			return true
		}
	}
	return p.others.Waits()
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
