package scoring

import "math"

// Terms are the numbers that one worker's cost for one request is computed from.
type Terms struct {
	BlockSize int // tokens in a block of this worker; at least 1
	ISLTokens int // input sequence length: the whole prompt, cached or not

	// The prompt's leading blocks, by the tier in which the worker has them. Lower tiers continue the device's prefix
	// and do not repeat it. For several prompts: the sums over the prompts.
	DeviceBlocks int
	HostBlocks   int
	DiskBlocks   int
	SharedBlocks int // in a cache shared by all workers, beyond DeviceBlocks

	LoadUnknown    bool    // the worker's load is unknown: price the request alone
	PrefillTokens  int     // tokens the worker has yet to prefill for requests it already has
	DecodeBlocks   float64 // blocks the worker would hold for active requests, this one included
	ActiveRequests int     // requests the worker already has
	KVBlocks       int     // blocks that the worker's device has room for; 0: unknown. Only the policy Time reads it.

	// LeastPrefillTokens is the smallest PrefillTokens among the candidates. Only OverlapScoreCreditDecay reads it.
	LeastPrefillTokens int

	Time TimeTerms // of the policy Time; else zero

	// Peers is what copies of other replicas' bookings have in the terms above. Cost does not read it.
	Peers PeerTerms

	// CostMultiplier scales the finished cost, as preferred taints do. 0 means 1.
	CostMultiplier float64

	// UnitTokens is the block size, in tokens, in which the cost is expressed, so that workers of different block size
	// compare. 0 means BlockSize.
	UnitTokens int
}

// Cost prices a request on one worker; lower is better. The policy Time prices in milliseconds, see timeCost. The
// policy Dynamo prices in blocks:
//
//	credit = OverlapScoreCredit*decay*device + HostCacheHitWeight*host + DiskCacheHitWeight*disk +
//	         SharedCacheMultiplier*shared
//	cost   = PrefillLoadScale*max(raw prefill blocks - credit, 0) + decode blocks +
//	         DecodeActiveRequestWeight*active requests
//
// The raw prefill blocks are the request's whole prompt and the worker's waiting prefill, so the overlap is credited
// once. A BlockSize below 1 gives a cost that is not finite, which is never chosen.
//
// The conversions of products prevent fused multiply-add, which rounds once where Dynamo rounds twice.
//
// Source: dynamo-kv-router 1.6.1, scheduling; the default policy's scorer.
func (c *Config) Cost(t *Terms) float64 {
	cost := c.cost(t, nil)
	if t.CostMultiplier != 0 {
		cost *= t.CostMultiplier
	}
	return cost
}

// cost is Cost without the multiplier. Unless parts is nil, it sets these to the terms.
func (c *Config) cost(t *Terms, parts *[]Part) float64 {
	if c.Policy == Time {
		return c.timeCost(t, parts)
	}
	blockSize, credit := float64(t.BlockSize), c.Credit(t)
	var decode, requests, prompt, waiting float64 // the latter two in tokens
	if !t.LoadUnknown {
		decode, requests = t.DecodeBlocks, float64(c.DecodeActiveRequestWeight*float64(t.ActiveRequests))
	}
	if c.TrackPrefillTokens {
		prompt = float64(t.ISLTokens)
		if !t.LoadUnknown {
			// Dynamo adds max(isl-cached, 0) + cached. That is more than isl only if the index has more blocks than the
			// prompt; rounding cannot lift cached above the whole number isl.
			if cached := c.cachedBlocks(t) * blockSize; cached > prompt {
				prompt = math.Round(cached)
			}
			waiting = float64(t.PrefillTokens)
		}
	}
	scale, raw := c.PrefillLoadScale, (prompt+waiting)/blockSize
	credit = min(credit, raw)
	blocks := float64(scale*(raw-credit)) + decode
	if c.DecodeRole && !c.TrackPrefillTokens && c.OverlapScoreCredit > 0 {
		scale, credit = 1, min(c.Credit(t), decode)
		blocks = decode - credit
	}
	unit := 1.0
	if t.UnitTokens != 0 && t.UnitTokens != t.BlockSize {
		unit = blockSize / float64(t.UnitTokens)
		blocks = float64(blocks * unit)
	}
	if parts != nil {
		scale *= unit
		*parts = []Part{{PartPrompt, scale * prompt / blockSize}, {PartCached, -scale * credit},
			{PartWaiting, scale * waiting / blockSize}, {PartHeld, unit * decode}, {PartRequests, requests}}
	}
	return blocks + requests
}

// Credit returns what Cost takes off the blocks to prefill for cached blocks, in blocks of the worker.
func (c *Config) Credit(t *Terms) float64 {
	if c.OverlapScoreCreditDecay == 0 && t.HostBlocks|t.DiskBlocks|t.SharedBlocks == 0 { // the usual
		return c.OverlapScoreCredit * float64(t.DeviceBlocks)
	}
	return c.creditOfTiers(t)
}

func (c *Config) creditOfTiers(t *Terms) float64 {
	device := float64(c.OverlapScoreCredit*c.creditDecay(t)) * float64(t.DeviceBlocks)
	return float64(device) + float64(c.HostCacheHitWeight*float64(t.HostBlocks)) +
		float64(c.DiskCacheHitWeight*float64(t.DiskBlocks)) + float64(c.SharedCacheMultiplier*float64(t.SharedBlocks))
}

// cachedBlocks returns the cached blocks weighted by tier.
func (c *Config) cachedBlocks(t *Terms) float64 {
	return float64(t.DeviceBlocks) + float64(c.HostCacheHitWeight*float64(t.HostBlocks)) +
		float64(c.DiskCacheHitWeight*float64(t.DiskBlocks))
}

// creditDecay returns the factor in (0, 1] that shrinks the device credit on a worker with more prefill waiting than
// the least busy candidate. The difference counts in multiples of this request.
func (c *Config) creditDecay(t *Terms) float64 {
	if !c.TrackPrefillTokens {
		return 1
	}
	blockSize := float64(t.BlockSize)
	waiting := float64(t.PrefillTokens-t.LeastPrefillTokens) / blockSize
	requestBlocks := math.Ceil(float64(t.ISLTokens) / blockSize)
	return 1 / (1 + c.OverlapScoreCreditDecay*waiting/max(requestBlocks, 1)) // a quotient is never fused
}

// CachedTokens estimates how many prompt tokens the worker need not prefill: cached blocks weighted by tier, rounded
// half away from zero, at most ISLTokens.
func (c *Config) CachedTokens(t *Terms) int {
	if tokens := math.Round(c.cachedBlocks(t) * float64(t.BlockSize)); tokens < float64(t.ISLTokens) {
		return max(int(tokens), 0)
	}
	return t.ISLTokens
}
