package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
	"kvepp/scoring"
)

// parseArgs reads the arguments into f. Its errors say what to write instead.
func parseArgs(f *pflag.FlagSet, args []string) error {
	err := f.Parse(args)
	var (
		unknown *pflag.NotExistError
		absent  *pflag.ValueRequiredError
		invalid *pflag.InvalidValueError
	)
	switch {
	case errors.As(err, &unknown):
		return unknownFlag(f, unknown)
	case errors.As(err, &absent):
		name, _ := pflag.UnquoteUsage(absent.GetFlag())
		return fmt.Errorf(
			"--%s needs a value: --%s %s",
			absent.GetSpecifiedName(),
			absent.GetSpecifiedName(),
			strings.ToUpper(name),
		)
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(), takes(invalid.GetFlag()))
	}
	return err
}

// unknownFlag says which flag was probably meant.
func unknownFlag(f *pflag.FlagSet, err *pflag.NotExistError) error {
	name, dashes := err.GetSpecifiedName(), "--"
	if short := err.GetSpecifiedShortnames(); short != "" {
		name, _, _ = strings.Cut(short, "=")
		dashes = "-"
	}
	if f.Lookup(name) != nil { // written with one dash
		return fmt.Errorf("unknown flag -%s: flags begin with two dashes, --%s", name, name)
	}
	if others := commandsWith(name); len(others) > 0 {
		return fmt.Errorf(
			"unknown flag %s%s: it is a flag of kvepp %s",
			dashes,
			name,
			strings.Join(others, " and kvepp "),
		)
	}
	var known []string
	f.VisitAll(func(flag *pflag.Flag) { known = append(known, flag.Name) })
	return fmt.Errorf("unknown flag %s%s%s", dashes, name, suggest.DidYouMean(name, "--", known))
}

// takes says what values a flag takes, and shows one.
func takes(flag *pflag.Flag) string {
	example := func(otherwise string) string {
		switch flag.DefValue {
		case "", "0", "0s", "[]":
			return otherwise
		}
		return flag.DefValue
	}
	switch flag.Value.Type() {
	case "bool":
		return "must be true or false"
	case "duration":
		good := example("2s")
		if strings.HasSuffix(good, "m0s") { // Go's way of writing 5m
			good = strings.TrimSuffix(good, "0s")
		}
		return "must be a duration with a unit (ms, s, m or h), for example " + good
	case "uint16":
		return "must be a whole number from 0 to 65535, for example " + example("9002")
	case "int", "int64":
		return "must be a whole number, for example " + example("16")
	case "uint32", "uint64":
		return "must be a whole number of at least 0, for example " + example("16")
	case "float64":
		return "must be a number, for example " + example("0.5")
	case "uint":
		return "must be a whole number of at least 0, for example 4096, or None"
	case "float":
		return "must be a number, for example 0.5, or None"
	case (negated{}).Type():
		return "must be true or false"
	case "intSlice":
		return "must be whole numbers separated by commas, for example 8000,8001"
	}
	return "must be a list separated by commas, for example a,b"
}

// durations returns an error for the first of the flags whose duration is below 0, or 0 where that is not allowed.
func durations(flags ...durationFlag) error {
	for _, f := range flags {
		switch {
		case f.value < 0 && f.zero:
			return fmt.Errorf("--%s %v: may not be negative; give a duration such as 2s, or 0", f.name, f.value)
		case f.value < 0 || f.value == 0 && !f.zero:
			return fmt.Errorf("--%s %v: must be above 0, for example 2s", f.name, f.value)
		}
	}
	return nil
}

// durationFlag is a flag with its value; zero says that 0 has a meaning.
type durationFlag struct {
	name  string
	value time.Duration
	zero  bool
}

// checkWeights returns an error for the first weight of the cost function that is negative, infinite or not a number.
// weight is that of the deprecated flag, NaN when not given.
func checkWeights(c *scoring.Config, weight float64) error {
	d := scoring.DefaultConfig()
	for _, w := range []struct {
		flag          string
		value, normal float64
	}{
		{"router-kv-overlap-score-weight", weight, 1},
		{"router-kv-overlap-score-credit", c.OverlapScoreCredit, d.OverlapScoreCredit},
		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay, d.OverlapScoreCreditDecay},
		{"router-prefill-load-scale", c.PrefillLoadScale, d.PrefillLoadScale},
		{"router-decode-active-request-weight", c.DecodeActiveRequestWeight, d.DecodeActiveRequestWeight},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight, d.HostCacheHitWeight},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight, d.DiskCacheHitWeight},
		{"router-temperature", c.Temperature, d.Temperature},
	} {
		absent := w.flag == "router-kv-overlap-score-weight" && math.IsNaN(weight)
		if !absent && (!(w.value >= 0) || math.IsInf(w.value, 0)) {
			return fmt.Errorf(
				"--%s %v: must be a finite number of at least 0, for example %v",
				w.flag,
				w.value,
				w.normal,
			)
		}
	}
	if err := c.Validate(); err != nil { // of what is left, the ratio alone can be wrong
		return fmt.Errorf("--encoder-cuda-to-cpu-ratio: %w", err)
	}
	return nil
}

// oneOf returns an error unless value is one of those that the flag takes.
func oneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	last := len(known) - 1
	return fmt.Errorf(
		"--%s %q: must be %s or %s%s",
		flag,
		value,
		strings.Join(known[:last], ", "),
		known[last],
		suggest.DidYouMean(value, "", known),
	)
}
