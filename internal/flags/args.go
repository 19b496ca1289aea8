package flags

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
)

// Elsewhere returns why a command does not have a flag: it belongs to another command, or the program refuses it. It
// returns nil if it does not know the name.
type Elsewhere func(name string) error

// Parse reads arguments, which must all be flags, and then sets the remaining flags from the program's variables, from
// the file at path (if path is not nil, and not empty then), and from inherited variables. A variable that is set but
// empty counts as not set. Flags have variables only after NameVariables.
func Parse(fs *pflag.FlagSet, args []string, path *string, getenv func(string) string, elsewhere Elsewhere) error {
	if err := ParseArgs(fs, args, elsewhere); err != nil {
		return err
	}
	switch {
	case fs.NArg() == 0:
	case fs.Arg(0) == "true" || fs.Arg(0) == "false":
		return fmt.Errorf(
			"unexpected argument %q: write the value of a flag that is true or false behind an equals sign, --FLAG=%s",
			fs.Arg(0), fs.Arg(0))
	default:
		return fmt.Errorf("unexpected argument %q: every flag begins with --", fs.Arg(0))
	}
	err := fromVariables(fs, ownVariable, getenv)
	if path != nil && *path != "" {
		err = errors.Join(err, fromFile(fs, *path, elsewhere))
	}
	return errors.Join(err, fromVariables(fs, inheritedVariable, getenv))
}

// ParseArgs reads the arguments alone. It returns ErrHelpAll for --help-all, and pflag.ErrHelp for --help.
func ParseArgs(fs *pflag.FlagSet, args []string, elsewhere Elsewhere) error {
	err := fs.Parse(args)
	var (
		unknown *pflag.NotExistError
		absent  *pflag.ValueRequiredError
		invalid *pflag.InvalidValueError
	)
	switch {
	case errors.As(err, &unknown):
		return unknownFlag(fs, unknown, elsewhere)
	case errors.As(err, &absent):
		name, _ := pflag.UnquoteUsage(absent.GetFlag())
		return fmt.Errorf("--%s needs a value: --%s %s", absent.GetSpecifiedName(), absent.GetSpecifiedName(),
			strings.ToUpper(name))
	case errors.As(err, &invalid):
		return fmt.Errorf("--%s %q: %s", invalid.GetFlag().Name, invalid.GetValue(),
			Takes(invalid.GetFlag(), invalid.GetValue()))
	case err != nil:
		return err
	case fs.Lookup(HelpAll).Changed:
		return ErrHelpAll
	}
	fs.VisitAll(func(flag *pflag.Flag) {
		if flag.Changed {
			annotate(flag, setBy, "flag")
		}
	})
	return nil
}

// unknownFlag returns an error that suggests the flag that was probably meant.
func unknownFlag(fs *pflag.FlagSet, err *pflag.NotExistError, elsewhere Elsewhere) error {
	name, dashes := err.GetSpecifiedName(), "--"
	if short := err.GetSpecifiedShortnames(); short != "" {
		name, _, _ = strings.Cut(short, "=")
		dashes = "-"
	}
	if fs.Lookup(name) != nil { // written with one dash
		return fmt.Errorf("unknown flag -%s: flags begin with two dashes, --%s", name, name)
	}
	if why := elsewhere(name); why != nil {
		return fmt.Errorf("unknown flag %s%s: %w", dashes, name, why)
	}
	return fmt.Errorf("unknown flag %s%s%s", dashes, name, suggest.DidYouMean(name, "--", names(fs, true)))
}

// names returns the names of the flags.
func names(fs *pflag.FlagSet, hidden bool) (all []string) {
	fs.VisitAll(func(flag *pflag.Flag) {
		if (hidden || !flag.Hidden) && !isRetired(flag) {
			all = append(all, flag.Name)
		}
	})
	return all
}

// Takes describes the values that a flag takes in place of the wrong one, with an example.
func Takes(flag *pflag.Flag, wrong string) string {
	example := func(otherwise string) string {
		if slices.Contains([]string{"", "0", "0s", "[]"}, flag.DefValue) {
			return otherwise
		}
		return shortDuration(flag.DefValue)
	}
	if known := ValuesOf(flag); len(known) > 1 {
		return mustBeOneOf(wrong, known)
	}
	switch flag.Value.Type() {
	case "bool", (negated{}).Type():
		return "must be true or false"
	case "duration":
		return "must be a duration with a unit (ms, s, m or h), for example " + example("2s")
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
	case "intSlice":
		return "must be whole numbers separated by commas, for example 8000,8001"
	}
	return "must be a list separated by commas, for example a,b"
}
