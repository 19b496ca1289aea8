package pool

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
)

// explain returns an error with the line of the first mistake in the endpoints file and an example of what is valid.
// refusal is the error of package yaml, whose texts about wrong values and keys name Go types.
func explain(text []byte, refusal error) error {
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return invalidYAML(err)
	}
	x := explainer{fields: map[string]reflect.StructField{}, seen: map[*yaml.Node]bool{}}
	for _, f := range reflect.VisibleFields(reflect.TypeFor[fileEntry]()) {
		key := f.Tag.Get("yaml")
		x.fields[key] = f
		x.keys = append(x.keys, key)
	}
	if err := x.checkFile(doc.Content[0]); err != nil {
		return err
	}
	if wrongTypes := (*yaml.TypeError)(nil); errors.As(refusal, &wrongTypes) {
		return errors.New("the file is not a list of endpoints as docs/endpoints-file.md describes it")
	}
	return invalidYAML(refusal)
}

// invalidYAML rewords an error of package yaml about the text itself.
func invalidYAML(err error) error {
	line, what, found := strings.Cut(strings.TrimPrefix(err.Error(), "yaml: "), ": ")
	if !found || !strings.HasPrefix(line, "line ") {
		return fmt.Errorf("not valid YAML: %s", strings.TrimPrefix(err.Error(), "yaml: "))
	}
	if strings.Contains(what, "cannot start any token") {
		what += " (YAML is indented with spaces, not with tabs)"
	}
	return fmt.Errorf("%s: not valid YAML: %s", line, what)
}

// explainer finds the first mistake in the endpoints file.
type explainer struct {
	fields map[string]reflect.StructField // of fileEntry, by key
	keys   []string                       // in the order of fileEntry
	// seen holds the visited mappings, because aliases can repeat a mapping, or contain themselves.
	seen map[*yaml.Node]bool
}

func (x *explainer) checkFile(top *yaml.Node) error {
	if top = resolve(top); top.Kind != yaml.MappingNode {
		return fmt.Errorf("line %d: the file must have the key \"endpoints:\" with a list below it", top.Line)
	}
	for i := 0; i+1 < len(top.Content); i += 2 {
		key, list := top.Content[i], resolve(top.Content[i+1])
		switch {
		case key.Value != "endpoints":
			return fmt.Errorf("line %d: %q is not a key of the endpoints file: the only key is \"endpoints\"%s",
				key.Line, key.Value, suggest.DidYouMean(key.Value, "", []string{"endpoints"}))
		case list.Kind != yaml.SequenceNode && list.Tag != "!!null":
			return fmt.Errorf(
				"line %d: endpoints: must be a list, for example [{name: worker-0, address: \"10.0.0.7:8000\"}]",
				list.Line)
		}
		for _, entry := range list.Content {
			if entry = resolve(entry); entry.Kind != yaml.MappingNode {
				return fmt.Errorf("line %d: an endpoint must be a mapping, for example {name: worker-0, address: "+
					"\"10.0.0.7:8000\"}", entry.Line)
			}
			if err := x.checkEntry(entry); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *explainer) checkEntry(n *yaml.Node) error {
	if x.seen[n] {
		return nil
	}
	x.seen[n] = true
	lines := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], resolve(n.Content[i+1])
		if key.Tag == "!!merge" {
			for _, merged := range append([]*yaml.Node{value}, value.Content...) {
				if merged = resolve(merged); merged.Kind == yaml.MappingNode {
					if err := x.checkEntry(merged); err != nil {
						return err
					}
				}
			}
			continue
		}
		field, known := x.fields[key.Value]
		switch line, twice := lines[key.Value]; {
		case !known:
			return fmt.Errorf("line %d: %q is not a key of an endpoint%s",
				key.Line, key.Value, suggest.DidYouMean(key.Value, "", x.keys))
		case twice:
			return fmt.Errorf("line %d: %s: already given in line %d", key.Line, key.Value, line)
		case value.Decode(reflect.New(field.Type).Interface()) != nil:
			return fmt.Errorf("line %d: %s: must be %s, for example %s: %s",
				value.Line, key.Value, kindOf(field.Type), key.Value, field.Tag.Get("example"))
		}
		lines[key.Value] = key.Line
	}
	return nil
}

// kindOf describes the values of a field of fileEntry.
func kindOf(t reflect.Type) string {
	switch {
	case t == reflect.TypeFor[*id]():
		return "a decimal number of at most 64 bits"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.Slice:
		return "a list of text"
	case t.Kind() == reflect.String:
		return "text"
	case t.Kind() == reflect.Uint32:
		return "a whole number of at least 0"
	}
	return "a whole number"
}

// resolve follows an alias.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}
