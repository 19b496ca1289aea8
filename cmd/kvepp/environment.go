package main

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/suggest"
)

// A command is a part of kvepp with flags of its own.
type command struct {
	name   string
	prefix string // before the names of its flags in its environment variables
	flags  func() *pflag.FlagSet
}

// commands are those that have flags.
var commands = []command{
	{"serve", "", func() *pflag.FlagSet { return serveFlags(new(options)) }},
	{"check", "", func() *pflag.FlagSet {
		var o checkOptions
		f := serveFlags(&o.options)
		o.own(f)
		return f
	}},
	{"tokenize", "", func() *pflag.FlagSet { return tokenizeFlags(new(tokenizeOptions)) }},
	{"indexer", indexerPrefix, func() *pflag.FlagSet { return indexerFlags(new(indexerOptions)) }},
	{"select", selectPrefix, func() *pflag.FlagSet { return selectFlags(new(selectOptions)) }},
	{"fetch", fetchPrefix, func() *pflag.FlagSet { return fetchFlags(new(fetchOptions)) }},
	{"workers", "", func() *pflag.FlagSet { return adminFlags(new(adminOptions), "workers") }},
	{"cordon", "", func() *pflag.FlagSet { return adminFlags(new(adminOptions), "cordon") }},
	{"drain", "", func() *pflag.FlagSet { return adminFlags(new(adminOptions), "drain") }},
	{"uncordon", "", func() *pflag.FlagSet { return adminFlags(new(adminOptions), "uncordon") }},
}

// commandsWith returns the commands that have a flag.
func commandsWith(flag string) (names []string) {
	for _, c := range commands {
		if c.flags().Lookup(flag) != nil {
			names = append(names, c.name)
		}
	}
	return names
}

// toolVariables are the variables of the Makefile, of the scripts and of the tests, which a shell that builds and runs
// kvepp may have.
var toolVariables = []string{
	"KVEPP_CACHE", "KVEPP_CRDS", "KVEPP_ENGINES", "KVEPP_KIND", "KVEPP_KIND_CONFIG", "KVEPP_KIND_IMAGE", "KVEPP_KUBE",
	"KVEPP_MANIFEST_TOOLS",
	"KVEPP_MODELS", "KVEPP_ORACLES", "KVEPP_PORTS_OF_ANOTHER", "KVEPP_ROOTFS", "KVEPP_TOOLS", "KVEPP_VLLM",
	"KVEPP_VLLM_MEDIA",
}

// checkEnvironment returns an error that names each variable KVEPP_* of environ (NAME=VALUE each) that no flag of any
// command has, so that a misspelt setting is noticed. Variables without a value count as absent. Those that Kubernetes
// sets for Services are left alone.
func checkEnvironment(environ []string) error {
	values := map[string]string{}
	var ours []string
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if values[name] = value; value != "" && strings.HasPrefix(name, "KVEPP_") {
			ours = append(ours, name)
		}
	}
	getenv := func(name string) string { return values[name] }
	known, negations := slices.Clone(toolVariables), map[string]string{}
	for _, c := range commands {
		c.flags().VisitAll(func(flag *pflag.Flag) {
			name := kveppEnv(c.prefix + flag.Name)
			switch positive, isNegation := strings.CutPrefix(flag.Name, "no-"); {
			case !flag.Hidden:
				known = append(known, name)
			case isNegation:
				negations[name] = kveppEnv(c.prefix + positive)
			}
		})
	}
	slices.Sort(known)
	slices.Sort(ours)
	var errs []error
	for _, name := range slices.Compact(ours) {
		if _, found := slices.BinarySearch(known, name); found || isServiceVariable(name, getenv) {
			continue
		}
		if positive := negations[name]; positive != "" {
			errs = append(errs, fmt.Errorf("unknown environment variable %s: write %s=false", name, positive))
			continue
		}
		nearest := suggest.DidYouMean(strings.TrimPrefix(name, "KVEPP_"), "KVEPP_", withoutPrefix(known))
		if nearest == "" {
			nearest = ": no flag of kvepp has this name; correct or unset it"
		}
		errs = append(errs, fmt.Errorf("unknown environment variable %s%s", name, nearest))
	}
	return errors.Join(errs...)
}

// withoutPrefix returns the names without the KVEPP_ that all have: it would make all of them alike.
func withoutPrefix(names []string) []string {
	short := make([]string, len(names))
	for i, name := range names {
		short[i] = strings.TrimPrefix(name, "KVEPP_")
	}
	return short
}

// serviceSuffix is what Kubernetes puts after the name of a Service in the environment variables of containers.
// Source: kubernetes, pkg/kubelet/envvars.
var serviceSuffix = regexp.MustCompile(
	`^_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$`,
)

// serviceURL is the value of NAME_PORT, where the Service is.
var serviceURL = regexp.MustCompile(`^(tcp|udp|sctp)://.+:[0-9]+$`)

// isServiceVariable reports whether Kubernetes set a variable, because there is a Service whose name begins with kvepp:
// a Service kvepp sets KVEPP_SERVICE_HOST, KVEPP_SERVICE_PORT, KVEPP_PORT and KVEPP_PORT_9002_TCP, a Service kvepp-epp
// KVEPP_EPP_SERVICE_HOST. All variables of a Service come together, so that its SERVICE_HOST tells them from a misspelt
// setting.
func isServiceVariable(name string, getenv func(string) string) bool {
	for i := range name {
		if name[i] == '_' && serviceSuffix.MatchString(name[i:]) && getenv(name[:i]+"_SERVICE_HOST") != "" &&
			getenv(name[:i]+"_SERVICE_PORT") != "" {
			return true
		}
	}
	return false
}

// isServiceURL reports whether a variable that has the name of a flag's holds the address of a Service instead: a
// Service kvepp-metrics sets KVEPP_METRICS_PORT, which is also the variable of --metrics-port.
func isServiceURL(name, value string, getenv func(string) string) bool {
	return serviceURL.MatchString(value) && isServiceVariable(name, getenv)
}
