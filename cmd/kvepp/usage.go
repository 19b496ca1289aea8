package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
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
		return fmt.Errorf("--%s needs a value: --%s %s", absent.GetSpecifiedName(), absent.GetSpecifiedName(), strings.ToUpper(name))
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
		return fmt.Errorf("unknown flag %s%s: it is a flag of kvepp %s", dashes, name, strings.Join(others, " and kvepp "))
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

// oneOf returns an error unless value is one of those that the flag takes.
func oneOf(flag, value string, known ...string) error {
	if slices.Contains(known, value) {
		return nil
	}
	last := len(known) - 1
	return fmt.Errorf("--%s %q: must be %s or %s%s", flag, value, strings.Join(known[:last], ", "), known[last], suggest.DidYouMean(value, "", known))
}
