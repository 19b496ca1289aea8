package flags

import (
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"kvepp/internal/boundedfile"
	"kvepp/internal/suggest"
)

// MaxFileBytes bounds a file of settings.
const MaxFileBytes = 1 << 20

// fromFile sets the flags that have no value yet from a file of settings. Its errors name file and line.
func fromFile(fs *pflag.FlagSet, path string, elsewhere Elsewhere) error {
	fail := func(err error) error { return fmt.Errorf("--config %s: %w", path, err) }
	text, err := boundedfile.Read(path, MaxFileBytes)
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
		flag, err := settingNamed(fs, key.Value, elsewhere)
		if err == nil {
			err = setFromFile(flag, path, key, value, lines)
		}
		if err != nil {
			errs = append(errs, fail(fmt.Errorf("line %d: %w", key.Line, err)))
		}
	}
	return errors.Join(errs...)
}

// setFromFile sets a flag unless it has a value. lines has the line of each flag that was set by the file before.
func setFromFile(flag *pflag.Flag, path string, key, value *yaml.Node, lines map[*pflag.Flag]int) error {
	if line := lines[flag]; line > 0 {
		return fmt.Errorf("%s: line %d sets the same flag; remove one of the two", key.Value, line)
	}
	lines[flag] = key.Line
	values, err := scalars(flag, value)
	if err != nil {
		return fmt.Errorf("%s: %w", key.Value, err)
	}
	if flag.Changed {
		return nil // by the command line or the environment
	}
	if list, ok := flag.Value.(pflag.SliceValue); ok && value.Kind == yaml.SequenceNode {
		err = list.Replace(values)
	} else {
		err = flag.Value.Set(values[0])
	}
	if err != nil {
		all := strings.Join(values, ", ")
		return fmt.Errorf("%s %q: %s", key.Value, all, Takes(flag, all))
	}
	flag.Changed = true
	annotate(flag, setBy, fmt.Sprintf("%s, line %d", path, key.Line))
	return nil
}

// settingNamed returns the flag that a key of a file of settings names.
func settingNamed(fs *pflag.FlagSet, name string, elsewhere Elsewhere) (*pflag.Flag, error) {
	flag := fs.Lookup(name)
	switch positive, isNegation := strings.CutPrefix(name, "no-"); {
	case name == fileFlag || name == printFlag || name == HelpAll || name == "help":
		return nil, fmt.Errorf("%s belongs on the command line; remove it from the file", name)
	case flag != nil && isNegation && flag.Hidden:
		return nil, fmt.Errorf("unknown key %q: write %s: false", name, positive)
	case flag != nil:
		return flag, nil
	case strings.HasPrefix(name, "--") && fs.Lookup(strings.TrimPrefix(name, "--")) != nil:
		return nil, fmt.Errorf("unknown key %q: write it without dashes, %s", name, strings.TrimPrefix(name, "--"))
	}
	if why := elsewhere(name); why != nil {
		return nil, fmt.Errorf("unknown key %q: %w", name, why)
	}
	return nil, fmt.Errorf("unknown key %q%s", name, suggest.DidYouMean(name, "", names(fs, false)))
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
