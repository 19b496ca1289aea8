package scoring

import (
	"math"
	"math/rand/v2"
	"time"
)

// Copies of other replicas' bookings come late. If several replicas see one worker as the cheapest, all choose it until
// they hear of each other's choices. The guard keeps them apart. Each replica has a share of the workers, which it
// prefers among those whose costs differ by less than the bookings that it does not know yet. If none of its share is
// among them, it draws. It gives no cached block away for that.
//
// That is for requests that do not depend on each other. Others come together, such as those of an agent's subagents:
// most of their choices are wrong if none knows of the others. So they settle. A replica that has often seen such books
// the cheapest worker and waits until it knows what the others booked meanwhile. If a replica that precedes it booked
// the same worker, it chooses again. The requests then go where they would go if they had come one after the other.

const (
	// staleAfter is how late copies may be to be priced, and freshBefore when they are priced again.
	staleAfter  = 250 * time.Millisecond
	freshBefore = 200 * time.Millisecond
	// leastUnseen is how many unknown bookings the guard heeds.
	leastUnseen = 0.001
	// shareLead times the root of the number of unknown bookings is by how many bookings a worker of the own share may
	// cost more than the cheapest; but at most one and twice the unknown ones of a worker. The root, because even few
	// unknown bookings lengthen the p99 of prompts that share nothing. Measured by bench/replicas-replay.
	shareLead = 2.5
	// fade is what is left of the counts in unknown after each choice: their mean is over about 200 choices.
	// leastChoices is how many it needs.
	fade         = 0.995
	leastChoices = 5
	// mostMissed is how many unknown bookings count for one choice.
	mostMissed = 16
	// A request settles if unknown bookings that come together would change one in 50 such choices and, where costs are
	// times, if they cost more than it usually waits. It does not if a choice does not know more than two: the replicas
	// would then choose again and again. Measured as shareLead.
	leastTogether = 0.02
	mostTogether  = 2.0
	// farther times what a booking costs is how much more the second cheapest worker costs if the choice is certain.
	farther = 3
	// Until there are enough choices, one in ten does not know a booking: as if there had been this many more.
	earlierMissed, earlierChoices = 0.5, 5
	// A request usually settles for twice the staleness: until the others have heard of it, and this replica has heard
	// that. Requests of one moment keep all replicas busy, so that news comes later: then it settles for longer, at
	// most for longSettle, or for the time by which others would delay it, if that is less. No request settles for more
	// than mostSettle, or at all if bookings are known later than latest.
	longSettle = 2 * time.Millisecond
	mostSettle = 3 * time.Millisecond
	latest     = 2 * time.Millisecond
	// mostAgain bounds how often a request settles, and is chosen for again.
	mostAgain = 3
)

// Peers is what is known of the other replicas.
type Peers struct {
	// Rate is how many bookings a second they make. 0: there are none.
	Rate float64
	// Staleness is how late this book knows of one.
	Staleness time.Duration
	// Share has true for the workers that this replica prefers, indexed by worker. The shares of the replicas do not
	// overlap, and are about equal in size. It must not change after the call. nil: none.
	Share []bool
	// First says that this replica precedes all others: no booking of it is ever overtaken, so none settles.
	First bool
}

// guard is what is known of other replicas' bookings.
type guard struct {
	Peers
	stale bool // copies are not priced
	// What a booking adds to its worker, own or copied, in tokens. Learned while Rate is above 0.
	prefill, active mean
	near            []option // scratch memory
	unknown         unknown
}

// unknown counts the bookings of others that own choices did not know. Rate times staleness is right for arrivals that
// do not depend on each other, but requests also come together, as those of an agent's subagents do.
type unknown struct {
	choices [16]choice // the latest own ones, a ring
	next    int        // of choices, without the turns of the ring
	// Faded counts: of own choices, and of their unknown bookings.
	made, missed float64
}

// choice is an own choice.
type choice struct {
	at     time.Duration
	missed float64 // bookings that it did not know
}

// chose notes an own choice.
func (u *unknown) chose(now time.Duration) {
	u.choices[u.next%len(u.choices)] = choice{at: now}
	u.next++
	u.made, u.missed = fade*u.made+1, fade*u.missed
}

// heard notes that another replica made a booking at a time, which is known only now: the choices since did not know
// it. Of two of the same time, either may have been the first. What a choice missed is bounded, so that one flood does
// not count for the next 200 choices.
func (u *unknown) heard(booked time.Duration) {
	for i := u.next - 1; i >= 0 && i >= u.next-len(u.choices); i-- {
		c := &u.choices[i%len(u.choices)]
		if c.at < booked {
			return
		}
		more := min(1, mostMissed-c.missed)
		if c.at == booked {
			more /= 2
		}
		c.missed += more
		u.missed += more
	}
}

// mean returns how many bookings a choice does not know, on average; 0: there were too few choices.
func (u *unknown) mean() float64 {
	if u.made < leastChoices {
		return 0
	}
	return u.missed / u.made
}

// option is a candidate that the guard may choose.
type option struct {
	cost  float64
	index int
}

// SetPeers says what is known of the other replicas. Call it a few times a second. If copies are later than 250 ms,
// their loads are in Load and not in costs.
func (a *ActiveSequences) SetPeers(p Peers) {
	a.lock()
	defer a.mu.Unlock()
	g := &a.guard
	limit := staleAfter
	if g.stale {
		limit = freshBefore
	}
	g.stale = p.Staleness > limit
	if !(p.Rate > 0 && p.Rate <= math.MaxFloat64 && p.Staleness > 0) {
		p.Rate = 0
	}
	g.Peers = p
}

// PeersStale reports whether copies are too late to be priced.
func (a *ActiveSequences) PeersStale() bool {
	a.lock()
	defer a.mu.Unlock()
	return a.guard.stale
}

// UnknownBookings returns how many bookings of other replicas a choice does not know, on average: 0 without peers.
func (a *ActiveSequences) UnknownBookings() float64 {
	a.lock()
	defer a.mu.Unlock()
	if a.guard.Rate == 0 {
		return 0
	}
	return a.guard.unseen()
}

// together returns how many bookings of others a choice does not know because they come together with it. It leaves out
// those that come independently, and half as many more, so that chance does not count.
func (g *guard) together() float64 {
	missed := (g.unknown.missed + earlierMissed) / (g.unknown.made + earlierChoices)
	return missed - 1.5*g.Rate*g.Staleness.Seconds()
}

// learn learns from a booking what it added to its worker.
func (g *guard) learn(prefillTokens, activeTokens int) {
	g.prefill.add(float64(prefillTokens))
	g.active.add(float64(activeTokens))
}

// unseen returns how many bookings of others are expected to be unknown now.
func (g *guard) unseen() float64 { return max(g.Rate*g.Staleness.Seconds(), g.unknown.mean()) }

// bookingCost returns the mean cost that a booking adds to its worker, in the unit of the costs.
func (a *ActiveSequences) bookingCost(cfg *Config, unit int) float64 {
	if cfg.Policy == Time {
		return 1000 * a.bookingSeconds(cfg)
	}
	prefill, active := a.guard.added(cfg)
	return (cfg.PrefillLoadScale*prefill+active)/float64(unit) + cfg.DecodeActiveRequestWeight
}

// bookingSeconds returns for how long a booking delays the next one on its worker, on average.
func (a *ActiveSequences) bookingSeconds(cfg *Config) float64 {
	prefill, active := a.guard.added(cfg)
	common, steps := a.fleet.common(), 0.0
	if cfg.TrackPrefillTokens { // the next prompt waits for the step and for its tokens
		steps = 1
	}
	return steps*common.stepSeconds + common.secondsPerToken*prefill +
		decodeInterference*a.fleet.answerTokens()*common.gapPerToken*active
}

// added returns the tokens that a booking adds to its worker, those that are priced.
func (g *guard) added(cfg *Config) (prefill, active float64) {
	if cfg.TrackPrefillTokens {
		prefill = g.prefill.value
	}
	if cfg.TrackActiveBlocks {
		active = g.active.value
	}
	return prefill, active
}

// settle returns for how long a request settles that takes candidate i, the cheapest. 0: it does not settle. The first
// replica need not wait where this is above 0.
func (a *ActiveSequences) settle(req Request, cfg *Config, unit, i int, costs []float64) time.Duration {
	g := &a.guard
	if !req.Settles || req.Again >= mostAgain || req.DryRun || len(costs) == 1 || g.stale || g.Staleness > latest {
		return 0
	}
	together := g.together()
	if req.Again == 0 && (together < leastTogether || together > mostTogether) {
		return 0
	}
	delay := a.bookingSeconds(cfg)
	usual := min(2*g.Staleness, mostSettle)
	limit := max(usual, min(longSettle, seconds(together*delay)))
	if req.Again > 0 {
		return limit
	}
	each := a.bookingCost(cfg, unit)
	if !(each > 0) {
		return 0
	}
	second := math.Inf(1)
	for j, cost := range costs {
		if j != i {
			second = min(second, cost)
		}
	}
	bookings := together * (1 - (second-costs[i])/(farther*each)) // by how many the choice may be wrong
	if bookings < leastTogether || cfg.Policy == Time && bookings*delay <= usual.Seconds() {
		return 0
	}
	return limit
}

// Overtaken reports whether another replica, which precedes this one, booked the same worker since. Then free the
// booking and choose again, with Request.Again.
func (b Booking) Overtaken() (overtaken bool) {
	b.do(func(a *ActiveSequences) {
		own := &a.bookings[b.index]
		overtaken = a.preceding[own.worker] != own.preceding
	})
	return overtaken
}

// spread returns the candidate that takes the place of i, the cheapest. Only candidates that have as much of the prompt
// take part.
//
// A worker of the own share is chosen if it costs little more than the cheapest. Otherwise the other replicas are
// expected to fill up the cheapest candidates with the unknown bookings like water, and each is drawn with the
// probability of its part: then all that are drawn cost the same on average.
func (a *ActiveSequences) spread(
	candidates []Candidate, cfg *Config, all *overview, i int, rng *rand.Rand, costs []float64,
) int {
	g := &a.guard
	unseen, each := g.unseen(), a.bookingCost(cfg, all.unit)
	if unseen < leastUnseen || g.stale || !(each > 0) || len(candidates) == 1 {
		return i
	}
	lead := min(shareLead*math.Sqrt(unseen), 1+2*unseen/float64(len(candidates))) * each
	water := unseen * each
	shared, limit := option{costs[i] + lead, -1}, costs[i]+water
	near := a.nearest(candidates, cfg, all, i, max(shared.cost, limit), costs)
	for _, o := range near {
		if o.cost <= shared.cost && g.has(&candidates[o.index]) && (o.cost < shared.cost || shared.index < 0) {
			shared = o
		}
	}
	if shared.index >= 0 {
		return shared.index
	}
	return pour(near[:below(near, limit)], i, water, rng)
}

// nearest returns the candidates that cost at most bound and have as much of the prompt as candidates[i], in order.
//
// Which candidates take part is as good as random, so that the processor would guess half of the branches wrong. So the
// usual cases have none: each candidate is written, and the next one overwrites it if it does not take part.
func (a *ActiveSequences) nearest(
	candidates []Candidate, cfg *Config, all *overview, i int, bound float64, costs []float64,
) []option {
	near, n := grown(&a.guard.near, len(candidates)), 0
	costs = costs[:len(candidates)]
	switch held := a.walker.held; {
	case all.alike && cfg.Policy == Dynamo:
		// As ownPart, without the factor that is the same for all, a power of two.
		distinct, scale, credit := a.variants[0].distinct, cfg.PrefillLoadScale, cfg.OverlapScoreCredit
		part := func(c *Candidate) float64 {
			return float64(distinct-int(held[c.Worker])) - float64(scale*float64(credit*float64(c.DeviceBlocks)))
		}
		own := part(&candidates[i])
		for j := range candidates {
			near[n] = option{costs[j], j}
			n += one(costs[j] <= bound) & one(part(&candidates[j]) <= own)
		}
	case all.alike:
		prices, credit := a.learned.prices, cfg.OverlapScoreCredit
		part := func(c *Candidate) float64 {
			has := float64(credit * float64(c.DeviceBlocks))
			if prices[c.Worker].prefilling > 0 {
				has = max(has, float64(held[c.Worker]))
			}
			return -has
		}
		own := part(&candidates[i])
		for j := range candidates {
			near[n] = option{costs[j], j}
			n += one(costs[j] <= bound) & one(part(&candidates[j]) <= own)
		}
	default:
		own := a.ownPart(candidates, cfg, all, i)
		for j := range candidates {
			if costs[j] <= bound && a.ownPart(candidates, cfg, all, j) <= own {
				near[n] = option{costs[j], j}
				n++
			}
		}
	}
	return near[:n]
}

// one is 1 for true, without a branch.
func one(b bool) (n int) {
	if b {
		n = 1
	}
	return n
}

// below moves the options that cost less than limit to the front, in order, and returns how many they are. What is
// behind them is undefined.
func below(near []option, limit float64) (n int) {
	for _, o := range near {
		near[n] = o
		n += one(o.cost < limit)
	}
	return n
}

// has reports whether a worker is of the own share.
func (g *guard) has(c *Candidate) bool { return int(c.Worker) < len(g.Share) && g.Share[c.Worker] }

// pour draws one of the candidates near, to which the unknown bookings are expected to be added like water. i is the
// cheapest candidate. It overwrites near.
func pour(near []option, i int, water float64, rng *rand.Rand) int {
	if len(near) < 2 {
		return i
	}
	// Candidates above the level get no water. Each pass drops some, which lowers the level for the others.
	level := 0.0
	for {
		sum := 0.0
		for _, o := range near {
			sum += o.cost
		}
		level = (water + sum) / float64(len(near))
		n := below(near, level)
		if n == len(near) {
			break
		}
		if near = near[:n]; n == 0 { // too little water to change a cost
			break
		}
	}
	rest := float(rng) * water
	for _, o := range near {
		if rest -= level - o.cost; rest < 0 {
			return o.index
		}
	}
	return i
}

// ownPart returns the part of a candidate's cost that depends on what it has of the prompt, less a constant, in tokens,
// for candidates that are not alike.
func (a *ActiveSequences) ownPart(candidates []Candidate, cfg *Config, all *overview, i int) float64 {
	c := &candidates[i]
	size := float64(c.blockSize(all.unit))
	credit := cfg.OverlapScoreCredit*float64(c.DeviceBlocks) + cfg.HostCacheHitWeight*float64(c.HostBlocks) +
		cfg.DiskCacheHitWeight*float64(c.DiskBlocks) + cfg.SharedCacheMultiplier*float64(c.SharedBlocks)
	held, added := 0, a.added[i]
	if v := a.variantOf(c.Prompt); v != nil {
		held = v.distinct - added
	}
	if cfg.Policy == Time {
		if a.learned.prices[c.Worker].prefilling > 0 {
			credit = max(credit, float64(held))
		}
		return -credit * size
	}
	return (float64(added) - cfg.PrefillLoadScale*credit) * size
}

// PeerTerms is the part of a candidate's terms that copies of other replicas' bookings brought.
type PeerTerms struct {
	Requests         int
	PrefillTokens    int
	DecodeBlocks     float64 // blocks that their requests were the first to hold
	DecodingRequests int     // of Requests, those whose first token has come
}

// peerTerms returns the part of the worker's load that copies brought. t has the candidate's terms.
func (a *ActiveSequences) peerTerms(t *Terms, c *Candidate) PeerTerms {
	part := &a.copied[c.Worker]
	return PeerTerms{
		Requests:         part.Requests,
		PrefillTokens:    min(part.PrefillTokens, t.PrefillTokens),
		DecodeBlocks:     min(float64(part.ActiveTokens)/float64(t.BlockSize), t.DecodeBlocks),
		DecodingRequests: part.Requests - part.prefilling,
	}
}

// WithoutPeers returns the terms as if no other replica had booked: Cost of them is what the cost would be.
func (t *Terms) WithoutPeers() Terms {
	own := *t
	own.Peers = PeerTerms{}
	own.PrefillTokens -= t.Peers.PrefillTokens
	own.DecodeBlocks -= t.Peers.DecodeBlocks
	own.ActiveRequests -= t.Peers.Requests
	own.Time.HeldBlocks = max(own.Time.HeldBlocks-t.Peers.DecodeBlocks, 0)
	own.Time.DecodingRequests = max(own.Time.DecodingRequests-t.Peers.DecodingRequests, 0)
	own.Time.QueuedPrefills = max(min(own.Time.QueuedPrefills, own.ActiveRequests-own.Time.DecodingRequests-1), 0)
	return own
}

// explainPeers sets the part of a candidate's terms that copies brought. If they are not priced, the terms lose it, so
// that Cost of them is the cost.
func (a *ActiveSequences) explainPeers(t *Terms, c *Candidate) {
	t.Peers = a.peerTerms(t, c)
	if a.guard.stale {
		*t = t.WithoutPeers()
	}
}
