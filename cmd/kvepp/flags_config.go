package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kvepp/internal/boundedfile"
	"kvepp/internal/suggest"
	"kvepp/serve/admin"
)

// settingsFile are the flags about files of settings. serve, check, indexer and select have them.
type settingsFile struct {
	file  string
	print bool

	flags *pflag.FlagSet // that were parsed
}

func (s *settingsFile) add(f *pflag.FlagSet) {
	f.StringVar(&s.file, "config", "",
		"YAML `FILE` of settings: the keys are the names of flags, such as grpc-port: 9002. Flags and KVEPP_<FLAG> "+
			"take "+
			"precedence over it, and it over Dynamo's variables. Read at start only")
	f.BoolVar(&s.print, "print-config", false,
		"print the effective settings as a file for --config, each with where it came from, and exit. Files of "+
			"secrets are shown by name, passwords in URLs are masked")
}

// maxSettingsBytes bounds a file of settings, policies, certificates or a token.
const maxSettingsBytes = 1 << 20

// fromFile sets the flags that have no value yet from a file of settings. Its errors name file and line.
func fromFile(f *pflag.FlagSet, path string) error {
	fail := func(err error) error { return fmt.Errorf("--config %s: %w", path, err) }
	text, err := boundedfile.Read(path, maxSettingsBytes)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	var document yaml.Node
	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	switch err := decoder.Decode(&document); {
	case errors.Is(err, io.EOF):
		return nil // empty
	case err != nil:
		return fail(err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return fail(errors.New("has more than one document; remove the lines --- between them"))
	}
	root := document.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil // only comments
	}
	if root.Kind != yaml.MappingNode {
		return fail(fmt.Errorf("line %d: must be lines of the form FLAG: VALUE, for example grpc-port: 9002",
			root.Line))
	}
	var errs []error
	lines := map[*pflag.Flag]int{}
	for i := 0; i+1 < len(root.Content); i += 2 {
		key, value := root.Content[i], root.Content[i+1]
		if err := setFromFile(f, path, key, value, lines); err != nil {
			errs = append(errs, fail(fmt.Errorf("line %d: %w", key.Line, err)))
		}
	}
	return errors.Join(errs...)
}

// setFromFile sets the flag that key names, unless it has a value. lines has the line of each flag that was set by the
// file before.
func setFromFile(f *pflag.FlagSet, path string, key, value *yaml.Node, lines map[*pflag.Flag]int) error {
	flag, err := settingNamed(f, key.Value)
	if err != nil {
		return err
	}
	target := aliased(flag)
	if line := lines[target]; line > 0 {
		return fmt.Errorf("%s: line %d sets the same flag; remove one of the two", key.Value, line)
	}
	lines[target] = key.Line
	values, err := scalars(flag, value)
	if err != nil {
		return fmt.Errorf("%s: %w", key.Value, err)
	}
	if target.Changed {
		return nil // by the command line or the environment
	}
	if list, ok := flag.Value.(pflag.SliceValue); ok && value.Kind == yaml.SequenceNode {
		err = list.Replace(values)
	} else {
		err = flag.Value.Set(values[0])
	}
	if err != nil {
		return fmt.Errorf("%s %q: %s", key.Value, strings.Join(values, ", "), takes(flag))
	}
	flag.Changed, target.Changed = true, true
	annotate(target, setBy, fmt.Sprintf("%s, line %d", path, key.Line))
	return nil
}

// settingNamed returns the flag that a key of a file of settings names.
func settingNamed(f *pflag.FlagSet, name string) (*pflag.Flag, error) {
	flag := f.Lookup(name)
	switch positive, isNegation := strings.CutPrefix(name, "no-"); {
	case name == "config" || name == "print-config" || name == helpAllFlag || name == "help":
		return nil, fmt.Errorf("%s belongs on the command line; remove it from the file", name)
	case flag != nil && isNegation && flag.Hidden:
		return nil, fmt.Errorf("unknown key %q: write %s: false", name, positive)
	case flag != nil:
		return flag, nil
	case strings.HasPrefix(name, "--") && f.Lookup(strings.TrimPrefix(name, "--")) != nil:
		return nil, fmt.Errorf("unknown key %q: write it without dashes, %s", name, strings.TrimPrefix(name, "--"))
	}
	if err := absentFlag(name); err != nil {
		return nil, err
	}
	if others := commandsWith(name); len(others) > 0 {
		return nil, fmt.Errorf("unknown key %q: it is a flag of kvepp %s", name, strings.Join(others, " and kvepp "))
	}
	var known []string
	f.VisitAll(func(flag *pflag.Flag) {
		if !flag.Hidden {
			known = append(known, flag.Name)
		}
	})
	return nil, fmt.Errorf("unknown key %q%s", name, suggest.DidYouMean(name, "", known))
}

// scalars returns the values that a node holds for a flag: one, or for flags that may be repeated any number.
func scalars(flag *pflag.Flag, node *yaml.Node) ([]string, error) {
	if node.Kind == yaml.AliasNode {
		node = node.Alias
	}
	nodes := []*yaml.Node{node}
	if node.Kind == yaml.SequenceNode {
		if _, list := flag.Value.(pflag.SliceValue); !list {
			return nil, errors.New("takes one value, not a list")
		}
		nodes = node.Content
	}
	values := make([]string, 0, len(nodes))
	for _, n := range nodes {
		switch {
		case n.Kind != yaml.ScalarNode:
			return nil, errors.New("takes one value, not a mapping; put JSON in single quotes")
		case n.Tag == "!!null":
			return nil, errors.New(`has no value; remove the line, or write "" for an empty value`)
		}
		values = append(values, n.Value)
	}
	return values, nil
}

// withSource adds to an error about a flag (--NAME ...) the line of the file that set it.
func withSource(f *pflag.FlagSet, err error) error {
	if err == nil {
		return nil
	}
	name, isFlag := strings.CutPrefix(err.Error(), "--")
	if end := strings.IndexAny(name, " :"); isFlag && end > 0 {
		flag := f.Lookup(name[:end])
		if flag != nil && strings.Contains(annotation(flag, setBy), ", line ") {
			return fmt.Errorf("%w\n(%s is set by %s)", err, flag.Name, annotation(flag, setBy))
		}
	}
	return err
}

// attribute runs set, and records source for each flag whose value changes.
func attribute(f *pflag.FlagSet, source string, set func() error) error {
	before := map[*pflag.Flag]string{}
	f.VisitAll(func(flag *pflag.Flag) { before[flag] = flag.Value.String() })
	err := set()
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.String() != before[flag] {
			annotate(flag, setBy, follows+source)
		}
	})
	return err
}

// follows begins the source of a value that another setting implies.
const follows = "follows from "

// printsConfig writes the effective settings to out if --print-config asks for it, and reports whether it did.
func (s *settingsFile) printsConfig(out io.Writer) bool {
	if s.print {
		writeConfig(out, s.flags)
	}
	return s.print
}

// writeConfig writes the effective settings as a file for --config. Defaults, and values that other settings imply, are
// comments: as settings they would count as given, which some flags distinguish.
func writeConfig(out io.Writer, f *pflag.FlagSet) {
	fmt.Fprintf(out, "# Effective settings of %s, as a file for --config. A line that begins with # is a default, or\n"+
		"# follows from another setting. Secrets are not shown: files by name, passwords in URLs as ***.\n", f.Name())
	for _, s := range sectionsOf(f) {
		lines := configLines(s)
		if len(lines) == 0 {
			continue
		}
		fmt.Fprintf(out, "\n# %s\n", s.title)
		for _, line := range lines {
			fmt.Fprintln(out, line)
		}
	}
}

// configLines returns the lines of a section.
func configLines(s flagSection) (lines []string) {
	for _, flag := range s.flags {
		setting, shown := settingOf(s.title, flag)
		if !shown {
			continue
		}
		line := setting.Name + ": " + setting.Value
		if setting.Default {
			line = "# " + line
		}
		lines = append(lines, fmt.Sprintf("%-56s # %s", line, setting.Source))
	}
	return lines
}

// settingOf returns the effective value of a flag and where it comes from; false for flags that are no settings.
func settingOf(section string, flag *pflag.Flag) (setting admin.Setting, shown bool) {
	_, older := flag.Value.(alias)
	source := annotation(flag, setBy)
	switch {
	case older || flag.Name == "config" || flag.Name == "print-config":
		return setting, false
	case source == "" && section == sectionCompat || flag.Value.String() == "NaN": // NaN: not given
		return setting, false
	}
	setting = admin.Setting{Section: section, Name: flag.Name, Value: yamlValue(flag),
		Source:  cmp.Or(source, "default"),
		Default: !flag.Changed || source == "" || strings.HasPrefix(source, follows)}
	if strings.Contains(setting.Value, "://***@") {
		setting.Source += "; user and password are not shown"
	}
	return setting, true
}

// effective returns the settings.
func (s *settingsFile) effective() []admin.Setting {
	all := []admin.Setting{}
	for _, section := range sectionsOf(s.flags) {
		for _, flag := range section.flags {
			if setting, shown := settingOf(section.title, flag); shown {
				all = append(all, setting)
			}
		}
	}
	return all
}

// yamlValue returns the value of a flag in YAML, on one line. Users and passwords in URLs are masked.
func yamlValue(flag *pflag.Flag) string {
	if list, ok := flag.Value.(pflag.SliceValue); ok {
		values := slices.Clone(list.GetSlice())
		for i, v := range values {
			values[i] = yamlString(maskPasswords(v))
		}
		return "[" + strings.Join(values, ", ") + "]"
	}
	value := flag.Value.String()
	switch flag.Value.Type() {
	case "string":
		return yamlString(maskPasswords(value))
	case "duration":
		return shortDuration(value)
	case "uint", "float": // may be absent
		if value == "" {
			return "None"
		}
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
