package main

import (
	"errors"
	"fmt"
	"strconv"

	"github.com/spf13/pflag"
)

// loadFlags declares the flags about workers that have enough to do.
func loadFlags(f *pflag.FlagSet, o *options) {
	f.Var(optional(&o.thresholds.ActiveDecodeBlocks, "float", parseFloat), "active-decode-blocks-threshold", "an endpoint is overloaded, and in every router mode no candidate, while active requests hold more than this `PART` (0 to 1) of its KV blocks; while all are, requests are refused at once. None: whatever they hold. /busy_threshold at --admin-address changes it for one model")
	f.Var(optional(&o.busyThreshold, "float", parseFloat), "busy-threshold", "`PART`; the same under its name of earlier Dynamo versions")
	f.Var(optional(&o.thresholds.ActivePrefillTokens, "uint", parseUint), "active-prefill-tokens-threshold", "the same while more than this many prompt `TOKENS` wait to be prefilled. None: however many")
	f.Var(optional(&o.thresholds.ActivePrefillTokensFrac, "float", parseFloat), "active-prefill-tokens-threshold-frac", "the same in `MULTIPLES` of the tokens that the engine takes in one step (maxNumBatchedTokens, or the model card's); without effect where that is not known")
	f.Uint16Var(&o.retryAfter, "shed-retry-after", 1, "`SECONDS` in the Retry-After header of requests that are refused because of load; 0: no header")
	f.IntVar(&o.overloadStatus, "overload-status-code", 429, "their HTTP `STATUS`: 429, 503, or 529, which is the default of Dynamo's frontend")
}

// checkLoad checks these flags.
func (o *options) checkLoad() error {
	if o.busyThreshold != nil {
		if o.thresholds.ActiveDecodeBlocks != nil && *o.thresholds.ActiveDecodeBlocks != *o.busyThreshold {
			return errors.New("--busy-threshold is an older name of --active-decode-blocks-threshold: give one of the two")
		}
		o.thresholds.ActiveDecodeBlocks = o.busyThreshold
	}
	if err := o.thresholds.Validate(); err != nil {
		return fmt.Errorf("a busy threshold flag: %w", err)
	}
	switch o.overloadStatus {
	case 429, 503, 529:
		return nil
	}
	return fmt.Errorf("--overload-status-code %d: must be 429, 503 or 529", o.overloadStatus)
}

// optionalValue is a flag that may be absent, or None, as Dynamo's documents write it.
type optionalValue[T any] struct {
	value **T
	kind  string // for help
	parse func(string) (T, error)
}

func optional[T any](value **T, kind string, parse func(string) (T, error)) optionalValue[T] {
	return optionalValue[T]{value, kind, parse}
}

func (o optionalValue[T]) Set(s string) error {
	if s == "None" || s == "none" {
		*o.value = nil
		return nil
	}
	v, err := o.parse(s)
	if err != nil {
		return errors.New("must be a number, or None")
	}
	*o.value = &v
	return nil
}

func (o optionalValue[T]) String() string {
	if o.value == nil || *o.value == nil {
		return ""
	}
	return fmt.Sprint(**o.value)
}

func (o optionalValue[T]) Type() string { return o.kind }

func parseFloat(s string) (float64, error) { return strconv.ParseFloat(s, 64) }
func parseUint(s string) (uint64, error)   { return strconv.ParseUint(s, 10, 64) }
