package scoring

import "kvepp/internal/overrides"

// Config holds the weights of the cost function, under Dynamo's names. The zero value is not useful: start from
// [DefaultConfig]. A Config is read-only while calls that were given it run.
//
// Source: dynamo-kv-router 1.6.1, scheduling.
type Config struct {
	// Mode is how a worker is chosen. Default KV. The other modes read only the fields that say how requests are
	// booked, and CUDAToCPURatio.
	Mode Mode

	// Policy is how the mode KV prices workers. Default Dynamo. Time reads of the weights below only those that say
	// what a cached block is worth, how requests are booked, and Temperature, which is in milliseconds then.
	Policy Policy

	// CUDAToCPURatio is the capacity of a worker with an accelerator relative to one on a CPU, at least 1. Only
	// DeviceAwareWeighted reads it. Default 8.
	CUDAToCPURatio int

	// OverlapScoreCredit is the worth of one block cached on the device, in blocks that need no prefill. 0 ignores
	// device caches. Default 1.
	OverlapScoreCredit float64

	// OverlapScoreCreditDecay shrinks the device credit of workers that have more prefill waiting than the least busy
	// candidate, so that a popular prefix spreads to other workers under load. 0, the default, is no decay.
	// It has no effect while TrackPrefillTokens is off.
	OverlapScoreCreditDecay float64

	// PrefillLoadScale weighs blocks still to be prefilled against blocks held for decoding: higher favours time to
	// first token, lower favours inter-token latency. Default 1.
	PrefillLoadScale float64

	// DecodeActiveRequestWeight is added to a worker's cost for each request active on it, in blocks. Default 0.
	DecodeActiveRequestWeight float64

	// HostCacheHitWeight is the worth of a block that continues the device's prefix in the worker's host memory.
	// Default 0.75.
	HostCacheHitWeight float64

	// DiskCacheHitWeight is the same for a block on disk or in external storage. Default 0.25.
	DiskCacheHitWeight float64

	// SharedCacheMultiplier is the worth of a block that only a cache shared by all workers holds. Default 0.
	SharedCacheMultiplier float64

	// Temperature 0, the default, chooses the cheapest worker. Above 0, workers are drawn from a softmax over costs
	// scaled to 0..1: the higher, the more even the draw.
	Temperature float64

	// TrackPrefillTokens counts the prompt tokens that workers have yet to prefill. Off, the cost has no prefill term
	// and nothing is booked for prefill. Default true.
	TrackPrefillTokens bool

	// TrackActiveBlocks counts the KV blocks that active requests hold. Off, a request books no blocks. Default true.
	TrackActiveBlocks bool

	// AssumeKVReuse counts a block that several requests on one worker share once. Off, every request pays for all of
	// its blocks, as on an engine without prefix caching. Default true.
	AssumeKVReuse bool

	// DecodeRole says that the candidates are the decode workers of a disaggregated deployment. Then, with
	// TrackPrefillTokens off, the overlap credit lowers the decode term instead of the prefill term. Default false.
	DecodeRole bool
}

// DefaultConfig returns Dynamo's defaults.
//
// Source: dynamo-kv-router 1.6.1, scheduling configuration.
func DefaultConfig() Config {
	return Config{
		CUDAToCPURatio:     8,
		OverlapScoreCredit: 1,
		PrefillLoadScale:   1,
		HostCacheHitWeight: 0.75,
		DiskCacheHitWeight: 0.25,
		TrackPrefillTokens: true,
		TrackActiveBlocks:  true,
		AssumeKVReuse:      true,
	}
}

// SetOverlapScoreWeight applies the deprecated single weight of earlier Dynamo versions. It scales the prefill term; a
// weight of 0 also removes the overlap credit.
func (c *Config) SetOverlapScoreWeight(weight float64) {
	c.PrefillLoadScale = weight
	if weight == 0 {
		c.OverlapScoreCredit = 0
	}
}

// maxCUDAToCPURatio keeps products with it far from overflow.
const maxCUDAToCPURatio = 1 << 20

// With returns c with a request's overrides, which their Check accepted. The deprecated weight takes precedence over
// the fields of the settings that it sets.
func (c Config) With(o *overrides.Overrides) Config {
	set(&c.OverlapScoreCredit, o.OverlapScoreCredit)
	set(&c.PrefillLoadScale, o.PrefillLoadScale)
	set(&c.Temperature, o.RouterTemperature)
	set(&c.SharedCacheMultiplier, o.SharedCacheMultiplier)
	set(&c.AssumeKVReuse, o.AssumeKVReuse)
	set(&c.TrackPrefillTokens, o.TrackPrefillTokens)
	if weight := o.OverlapScoreWeight; weight != nil {
		c.SetOverlapScoreWeight(*weight)
	}
	return c
}

// set sets a setting if it is overridden.
func set[T any](setting, override *T) {
	if override != nil {
		*setting = *override
	}
}
