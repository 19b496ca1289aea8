package flags

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
)

// start begins the names of the program's own variables.
const start = "KVEPP_"

// Variable is the program's own name for a flag's environment variable.
func Variable(flag string) string { return start + strings.ToUpper(strings.ReplaceAll(flag, "-", "_")) }

// Indexes into the annotation inVariables.
const (
	ownVariable       = 0
	inheritedVariable = 1
)

// NameVariables gives each flag that is retired or not hidden the names of its environment variables; prefix precedes
// the flag's name in the first.
func NameVariables(fs *pflag.FlagSet, prefix string) {
	fs.VisitAll(func(flag *pflag.Flag) {
		if !flag.Hidden || isRetired(flag) {
			own := []string{Variable(prefix + flag.Name)}
			annotate(flag, inVariables, slices.Concat(own, flag.Annotations[inherits])...)
		}
	})
}

// VariablesOf returns a flag's variables: the program's own, and the inherited one if there is one.
func VariablesOf(flag *pflag.Flag) []string { return flag.Annotations[inVariables] }

// FromEnvironment sets the flags that were not given on the command line.
func FromEnvironment(fs *pflag.FlagSet, getenv func(string) string) error {
	return errors.Join(fromVariables(fs, ownVariable, getenv), fromVariables(fs, inheritedVariable, getenv))
}

// fromVariables sets the flags that have no value yet from one of their variables.
func fromVariables(fs *pflag.FlagSet, which int, getenv func(string) string) error {
	var errs []error
	fs.VisitAll(func(flag *pflag.Flag) {
		variables := VariablesOf(flag)
		if len(variables) <= which || flag.Changed {
			return
		}
		name := variables[which]
		value := getenv(name)
		if value == "" || isServiceURL(name, value, getenv) {
			return
		}
		values := []string{value}
		if flag.Value.Type() == "stringArray" {
			values = strings.Split(value, ",")
		}
		for _, v := range values {
			if err := flag.Value.Set(v); err != nil {
				errs = append(errs, fmt.Errorf("environment variable %s %q: %s", name, value, Takes(flag, v)))
			}
		}
		flag.Changed = true
		annotate(flag, setBy, name)
	})
	return errors.Join(errs...)
}

// UnknownVariables returns an error that names each of the program's variables in environ (NAME=VALUE each) that
// belongs to no flag of sets and is not among known, to report misspelt settings. It ignores empty variables, and those
// that Kubernetes sets for Services.
func UnknownVariables(environ []string, sets []Prefixed, known []string, elsewhere Elsewhere) error {
	values := map[string]string{}
	var ours []string
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if values[name] = value; value != "" && strings.HasPrefix(name, start) {
			ours = append(ours, name)
		}
	}
	known, negations := slices.Clone(known), map[string]string{}
	for _, set := range sets {
		set.VisitAll(func(flag *pflag.Flag) {
			name := Variable(set.Prefix + flag.Name)
			if !flag.Hidden || isRetired(flag) {
				known = append(known, name)
			} else if n, ok := flag.Value.(negated); ok {
				negations[name] = Variable(set.Prefix + n.flag.Name)
			}
		})
	}
	slices.Sort(ours)
	var errs []error
	for _, name := range slices.Compact(ours) {
		if slices.Contains(known, name) ||
			isServiceVariable(name, func(name string) string { return values[name] }) {
			continue
		}
		if positive := negations[name]; positive != "" {
			errs = append(errs, fmt.Errorf("unknown environment variable %s: write %s=false", name, positive))
			continue
		}
		short := strings.TrimPrefix(name, start)
		if why := elsewhere(strings.ToLower(strings.ReplaceAll(short, "_", "-"))); why != nil {
			errs = append(errs, fmt.Errorf("unknown environment variable %s: %w", name, why))
			continue
		}
		var names []string // without the common beginning, which would make all look similar
		for _, k := range known {
			names = append(names, strings.TrimPrefix(k, start))
		}
		nearest := suggest.DidYouMean(short, start, names)
		if nearest == "" {
			nearest = ": no flag of kvepp has this name; correct or unset it"
		}
		errs = append(errs, fmt.Errorf("unknown environment variable %s%s", name, nearest))
	}
	return errors.Join(errs...)
}

// Unread returns the program's variables that are set and belong to flags of sets, but to none of fs.
func Unread(fs *pflag.FlagSet, sets []Prefixed, getenv func(string) string) (names []string) {
	read := map[string]bool{}
	fs.VisitAll(func(flag *pflag.Flag) {
		for _, name := range VariablesOf(flag) {
			read[name] = true
		}
	})
	for _, set := range sets {
		set.VisitAll(func(flag *pflag.Flag) {
			name := Variable(set.Prefix + flag.Name)
			if !flag.Hidden && !read[name] && getenv(name) != "" && !isServiceVariable(name, getenv) {
				read[name], names = true, append(names, name)
			}
		})
	}
	return names
}

// Prefixed are the flags of a command, and what precedes their names in its variables.
type Prefixed struct {
	*pflag.FlagSet
	Prefix string
}

// serviceSuffix is what Kubernetes appends to the name of a Service in environment variables of containers. Source:
// kubernetes, pkg/kubelet/envvars.
var serviceSuffix = regexp.MustCompile(
	`^_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`,
)

// serviceURL matches the value of NAME_PORT: the address of the Service.
var serviceURL = regexp.MustCompile(`^(tcp|udp|sctp)://.+:[0-9]+$`)

// isServiceVariable reports whether Kubernetes set a variable for a Service whose name begins with kvepp. A Service
// kvepp sets KVEPP_SERVICE_HOST, KVEPP_SERVICE_PORT, KVEPP_PORT and KVEPP_PORT_9002_TCP; a Service kvepp-epp sets
// KVEPP_EPP_SERVICE_HOST. Kubernetes sets all variables of a Service together, so SERVICE_HOST distinguishes them from
// a misspelt setting.
func isServiceVariable(name string, getenv func(string) string) bool {
	for i := range name {
		if name[i] == '_' && serviceSuffix.MatchString(name[i:]) && getenv(name[:i]+"_SERVICE_HOST") != "" &&
			getenv(name[:i]+"_SERVICE_PORT") != "" {
			return true
		}
	}
	return false
}

// isServiceURL reports whether a flag's variable holds the address of a Service instead of a setting: a Service
// kvepp-metrics sets KVEPP_METRICS_PORT, which is also the variable of --metrics-port.
func isServiceURL(name, value string, getenv func(string) string) bool {
	return serviceURL.MatchString(value) && isServiceVariable(name, getenv)
}
