package flags

import (
	"cmp"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// Flags about files of settings.
const (
	fileFlag  = "config"
	printFlag = "print-config"
)

// File are the flags about files of settings.
type File struct {
	Path  string // of the file; "": none
	Print bool   // the command shall print its settings and end
}

// AddFlags declares the flags.
func (c *File) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Path, fileFlag, "",
		"YAML `FILE` of settings: the keys are the names of flags, such as grpc-port: 9002. Flags and KVEPP_<FLAG> "+
			"take precedence over it, and it over Dynamo's variables. Read at start only")
	fs.BoolVar(&c.Print, printFlag, false,
		"print the effective settings as a file for --config, each with where it came from, and exit. Files of "+
			"secrets are shown by name, passwords in URLs are masked")
}

// WithSource adds to an error about a flag (--NAME ...) the line of the file or the variable that set it.
func WithSource(fs *pflag.FlagSet, err error) error {
	if err == nil {
		return nil
	}
	name, isFlag := strings.CutPrefix(err.Error(), "--")
	if end := strings.IndexAny(name, " :"); isFlag && end > 0 {
		if flag := fs.Lookup(name[:end]); flag != nil {
			if by := annotation(flag, setBy); by != "" && by != "flag" && !strings.HasPrefix(by, follows) {
				return fmt.Errorf("%w\n(%s is set by %s)", err, flag.Name, by)
			}
		}
	}
	return err
}

// follows begins the source of a value that another setting implies.
const follows = "follows from "

// Imply runs set, and records for each flag whose value changes that it follows from source.
func Imply(fs *pflag.FlagSet, source string, set func()) {
	before := map[*pflag.Flag]string{}
	fs.VisitAll(func(flag *pflag.Flag) { before[flag] = flag.Value.String() })
	set()
	fs.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.String() != before[flag] {
			Implied(flag, source)
		}
	})
}

// Implied records that the value of a flag follows from source.
func Implied(flag *pflag.Flag, source string) { annotate(flag, setBy, follows+source) }

// Setting is an effective setting, without secrets.
type Setting struct {
	Section string `json:"section"`
	Name    string `json:"name"`
	Value   string `json:"value"`
	Source  string `json:"source"`
	Default bool   `json:"default"` // no user set it
}

// Settings returns the effective settings, in the order of help.
func Settings(fs *pflag.FlagSet) []Setting {
	all := []Setting{}
	for _, section := range Sections(fs) {
		for _, flag := range section.Flags {
			if setting, shown := settingOf(section.Title, flag); shown {
				all = append(all, setting)
			}
		}
	}
	return all
}

// settingOf returns the effective value of a flag and where it comes from; false for flags that are no settings.
func settingOf(section string, flag *pflag.Flag) (setting Setting, shown bool) {
	source := annotation(flag, setBy)
	switch {
	case flag.Name == fileFlag || flag.Name == printFlag:
		return setting, false
	case flag.Value.String() == "NaN": // not given
		return setting, false
	}
	setting = Setting{Section: section, Name: flag.Name, Value: yamlValue(flag), Source: cmp.Or(source, "default"),
		Default: !flag.Changed || source == "" || strings.HasPrefix(source, follows)}
	if strings.Contains(setting.Value, "://***@") {
		setting.Source += "; user and password are not shown"
	}
	return setting, true
}

// WriteSettings writes the effective settings as a file for --config. Defaults, and values that other settings imply,
// are comments: as settings they would count as given, which some flags distinguish.
func WriteSettings(out io.Writer, fs *pflag.FlagSet) {
	fmt.Fprintf(out, "# Effective settings of %s, as a file for --config. A line that begins with # is a default, or\n"+
		"# follows from another setting. Secrets are not shown: files by name, passwords in URLs as ***.\n", fs.Name())
	section := ""
	for _, s := range Settings(fs) {
		if s.Section != section {
			section = s.Section
			fmt.Fprintf(out, "\n# %s\n", section)
		}
		line := s.Name + ": " + s.Value
		if s.Default {
			line = "# " + line
		}
		fmt.Fprintf(out, "%-56s # %s\n", line, s.Source)
	}
}

// Changed returns the flags whose effective values differ from their defaults, as name and value in turn. It includes
// values from the environment, and those that another flag sets. Passwords in URLs are masked.
func Changed(fs *pflag.FlagSet) (settings []any) {
	fs.VisitAll(func(flag *pflag.Flag) {
		value := flag.Value.String()
		if !flag.Hidden && value != flag.DefValue && value != "NaN" { // NaN: not given
			settings = append(settings, flag.Name, MaskPasswords(value))
		}
	})
	return settings
}

// urlUser matches the user and the password in a URL.
var urlUser = regexp.MustCompile(`://[^/\s]*@`)

// MaskPasswords replaces users and passwords in the URLs of a setting.
func MaskPasswords(value string) string { return urlUser.ReplaceAllString(value, "://***@") }

// yamlValue returns the value of a flag in YAML, on one line. Users and passwords in URLs are masked.
func yamlValue(flag *pflag.Flag) string {
	if list, ok := flag.Value.(pflag.SliceValue); ok {
		values := slices.Clone(list.GetSlice())
		for i, v := range values {
			values[i] = yamlString(MaskPasswords(v))
		}
		return "[" + strings.Join(values, ", ") + "]"
	}
	value := flag.Value.String()
	switch flag.Value.Type() {
	case "string":
		return yamlString(MaskPasswords(value))
	case "duration":
		return shortDuration(value)
	case "uint", "float": // may be absent
		return cmp.Or(value, "None")
	}
	return value
}

// yamlString returns a string in YAML, on one line and also valid inside a list in brackets.
func yamlString(s string) string {
	node := yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
	if s == "" || strings.ContainsAny(s, "\n,[]{}#") {
		node.Style = yaml.DoubleQuotedStyle
	}
	text, err := yaml.Marshal(&node)
	if err != nil {
		return fmt.Sprintf("%q", s)
	}
	return strings.TrimSuffix(string(text), "\n")
}
