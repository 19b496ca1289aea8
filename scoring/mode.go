package scoring

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
)

// Mode is how a worker is chosen among the candidates. In every mode the request is booked in the same step.
//
// Source: dynamo-runtime 1.6.1, routing_policy; names as in Dynamo's --router-mode.
type Mode uint8

// The modes. All but KV ignore the prompt.
const (
	KV          Mode = iota // the lowest cost, see Config.Cost
	RoundRobin              // in turn
	Random                  // uniformly at random
	PowerOfTwo              // of two drawn at random, the one with fewer requests
	LeastLoaded             // the one with the fewest requests, ties at random
	// the one that the request names: the caller offers no other. Among its ranks as LeastLoaded
	Direct
	// as LeastLoaded, with a smaller share for workers without an accelerator, see Config.CUDAToCPURatio
	DeviceAwareWeighted
)

var modeNames = [...]string{
	"kv",
	"round-robin",
	"random",
	"power-of-two",
	"least-loaded",
	"direct",
	"device-aware-weighted",
}

// ModeNames returns the names of all modes.
func ModeNames() []string { return slices.Clone(modeNames[:]) }

// ParseMode returns the mode with a name.
func ParseMode(name string) (Mode, error) { return parse[Mode](modeNames[:], name) }

// parse returns the place of a name among others.
func parse[T ~uint8](names []string, name string) (T, error) {
	if i := slices.Index(names, name); i >= 0 {
		return T(i), nil
	}
	return 0, fmt.Errorf("%q: must be one of %s", name, strings.Join(names, ", "))
}

// String returns the mode's name.
func (m Mode) String() string {
	if int(m) >= len(modeNames) {
		return fmt.Sprintf("mode(%d)", uint8(m))
	}
	return modeNames[m]
}

// chooseByMode returns the index of the candidate that a mode other than KV chooses. There must be one. The book is
// locked.
func (a *ActiveSequences) chooseByMode(candidates []Candidate, cfg *Config, rng *rand.Rand) int {
	switch cfg.Mode {
	case RoundRobin:
		return a.longestAgo(candidates)
	case Random:
		return intN(rng, len(candidates))
	case PowerOfTwo:
		return a.lessLoadedOfTwo(candidates, rng)
	case DeviceAwareWeighted:
		return a.leastLoadedOfDevice(candidates, cfg.CUDAToCPURatio, rng)
	}
	return a.leastLoaded(candidates, anyDevice, rng)
}

// longestAgo chooses the candidate whose last turn is longest ago, or the first without a turn. For unchanging
// candidates that is round robin. It stays fair if candidates differ from request to request (by model, by subset), as
// a position in a list would not.
func (a *ActiveSequences) longestAgo(candidates []Candidate) int {
	if n := len(a.loads); n > len(a.turns) {
		a.turns = append(a.turns, make([]uint64, n-len(a.turns))...)
	}
	chosen := 0
	for i := range candidates {
		if a.turns[candidates[i].Worker] < a.turns[candidates[chosen].Worker] {
			chosen = i
		}
	}
	return chosen
}

// requests returns how many requests count as active on a worker.
func (a *ActiveSequences) requests(c *Candidate) int {
	if a.stale {
		return a.loads[c.Worker].Requests - a.copied[c.Worker].Requests
	}
	return a.loads[c.Worker].Requests
}

func (a *ActiveSequences) lessLoadedOfTwo(candidates []Candidate, rng *rand.Rand) int {
	n := len(candidates)
	first := intN(rng, n)
	if n == 1 {
		return first
	}
	second := (first + 1 + intN(rng, n-1)) % n
	if a.requests(&candidates[first]) <= a.requests(&candidates[second]) {
		return first
	}
	return second
}

// device is the kind of hardware that a candidate runs on.
type device int

const (
	anyDevice device = iota
	accelerator
	cpu
)

func (d device) has(c *Candidate) bool { return d == anyDevice || c.CPU == (d == cpu) }

// leastLoaded chooses one with the fewest requests among the candidates on a device. There must be one.
func (a *ActiveSequences) leastLoaded(candidates []Candidate, on device, rng *rand.Rand) int {
	least, ties := math.MaxInt, 0
	for i := range candidates {
		if c := &candidates[i]; on.has(c) {
			if n := a.requests(c); n < least {
				least, ties = n, 1
			} else if n == least {
				ties++
			}
		}
	}
	nth := intN(rng, max(ties, 1))
	for i := range candidates {
		if c := &candidates[i]; on.has(c) && a.requests(c) == least {
			if nth == 0 {
				return i
			}
			nth--
		}
	}
	return 0
}

// leastLoadedOfDevice gives requests to workers on CPUs until each has 1/ratio of what an accelerator has on average,
// rounded down over all of them. The other requests go to the accelerators.
//
// Source: dynamo-runtime 1.6.1, routing_policy/picker.
func (a *ActiveSequences) leastLoadedOfDevice(candidates []Candidate, ratio int, rng *rand.Rand) int {
	var workers, requests [cpu + 1]int
	for i := range candidates {
		on := accelerator
		if candidates[i].CPU {
			on = cpu
		}
		workers[on]++
		requests[on] += a.requests(&candidates[i])
	}
	on := accelerator
	if workers[accelerator] == 0 ||
		workers[cpu] > 0 && requests[cpu] < requests[accelerator]*workers[cpu]/(ratio*workers[accelerator]) {
		on = cpu
	}
	return a.leastLoaded(candidates, on, rng)
}
