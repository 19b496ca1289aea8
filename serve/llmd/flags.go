package llmd

import (
	"crypto/tls"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/internal/suggest"
)

// kind says which values a flag takes.
type kind int

const (
	text kind = iota
	boolean
	number
	duration
	size // bytes, such as 10MiB
)

func flagNamed(name string) *Flag {
	i := slices.IndexFunc(Flags, func(f Flag) bool { return f.Name == name })
	if i < 0 {
		return nil
	}
	return &Flags[i]
}

// follow does what an occurrence of the flag asks for.
func (f *Flag) follow(s *Seat, value string) error {
	if err := f.kind.check(value); err != nil {
		return err
	}
	switch {
	case f.Verdict == Ignored:
		s.note("--%s is ignored: %s", f.Name, f.Says)
	case f.apply != nil:
		return f.apply(s, value)
	}
	return nil
}

var sizes = regexp.MustCompile(`^[0-9]+(\.[0-9]+)? ?([kKMGT]i?)?B?$`)

// check returns an error unless a flag of the kind takes the value.
func (k kind) check(value string) (err error) {
	switch k {
	case boolean:
		if _, err = strconv.ParseBool(value); err != nil {
			return errors.New("must be true or false")
		}
	case number:
		if _, err = strconv.Atoi(value); err != nil {
			return errors.New("must be a whole number")
		}
	case duration:
		if _, err = time.ParseDuration(value); err != nil {
			return errors.New("must be a duration with a unit, such as 50ms")
		}
	case size:
		if value != "" && !sizes.MatchString(value) {
			return errors.New("must be a number of bytes, such as 10MiB")
		}
	}
	return nil
}

func isTrue(value string) bool { yes, _ := strconv.ParseBool(value); return yes }

// translate sets a flag of kvepp to the word that a value stands for. An empty value means the default.
func (s *Seat) translate(flag, value string, words map[string]string) error {
	switch word, known := words[value]; {
	case known:
		s.set(flag, word)
	case value != "":
		all := slices.Sorted(maps.Keys(words))
		return fmt.Errorf("must be one of %s%s", strings.Join(all, ", "), suggest.DidYouMean(value, "", all))
	}
	return nil
}

// debugVerbosity is llm-d's -v from which it logs single requests.
const debugVerbosity = 4

func (s *Seat) setVerbosity(value string) error {
	if n, err := strconv.Atoi(value); err == nil && n >= debugVerbosity {
		s.set("log-level", "debug")
	}
	return nil
}

func setZapLevel(s *Seat, value string) error {
	if _, err := strconv.Atoi(value); err == nil {
		return s.setVerbosity(value)
	}
	return s.translate("log-level", value, map[string]string{"debug": "debug", "info": "info", "error": "error",
		"panic": "error"})
}

func setTLSVersion(s *Seat, value string) error {
	return s.translate("tls-min-version", value, map[string]string{"VersionTLS10": "1.2", "VersionTLS11": "1.2",
		"VersionTLS12": "1.2", "VersionTLS13": "1.3", "1.2": "1.2", "1.3": "1.3"})
}

func setCipherSuites(s *Seat, value string) error {
	ids, names := map[string]uint16{}, []string{}
	for _, suite := range tls.CipherSuites() {
		ids[suite.Name] = suite.ID
		names = append(names, suite.Name)
	}
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if ids[name] == 0 && name != "" {
			return fmt.Errorf("%s is no safe cipher suite of Go%s", name, suggest.DidYouMean(name, "", names))
		}
		if name != "" {
			s.CipherSuites = append(s.CipherSuites, ids[name])
		}
	}
	return nil
}

// engineMetric returns what sets a quantity of --engine-metrics.
func engineMetric(quantity string) func(*Seat, string) error {
	return func(s *Seat, value string) error {
		if value != "" {
			s.metrics = append(s.metrics, quantity+"="+value)
		}
		return nil
	}
}

func noMetricsTLS(_ *Seat, value string) error {
	if value != "" {
		return errors.New("kvepp serves metrics without TLS; leave it out, and let --metrics-endpoint-auth or " +
			"--metrics-token-file guard metrics")
	}
	return nil
}

// Help returns the help of kvepp in the place of llm-d's picker.
func Help() string {
	var text strings.Builder
	text.WriteString(Command + `: /app/epp, or kvepp with flags and no command. It takes the flags of
llm-d's picker and those of kvepp serve ("kvepp serve --help-all"). These differ from kvepp serve's:

`)
	for i := range Flags {
		fmt.Fprintf(&text, "  --%-36s %s: %s\n", Flags[i].Name, Flags[i].Verdict, Flags[i].Says)
	}
	return text.String()
}
