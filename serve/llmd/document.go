package llmd

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
)

// Bounds of a configuration: a ConfigMap has at most 1 MiB. maxValues bounds what aliases of aliases expand to.
const (
	maxConfigBytes = 1 << 20
	maxValues      = 100_000
	maxDepth       = 64
)

// shape says what a value must look like. kind is object, list, any, or that of a scalar: text, bool, int, float,
// duration ("5s"), nanoseconds (a number), quantity ("2Gi"), texts (an object of texts), or a reference to a plugin: @
// and what the plugin must be.
type shape struct {
	kind string
	keys []string
	of   map[string]*shape
	item *shape
}

// shapeOf reads a shape of an object: "a int, b {c text}, d []@producer".
func shapeOf(text string) *shape {
	words := strings.Fields(strings.NewReplacer("{", " { ", "}", " } ", "[]", " [] ", ",", " ").Replace(text))
	return objectShape(&words)
}

func objectShape(words *[]string) *shape {
	s := &shape{kind: "object", of: map[string]*shape{}}
	for len(*words) > 0 && (*words)[0] != "}" {
		name := (*words)[0]
		*words = (*words)[1:]
		s.keys, s.of[name] = append(s.keys, name), valueShape(words)
	}
	*words = (*words)[min(1, len(*words)):]
	return s
}

func valueShape(words *[]string) *shape {
	word := (*words)[0]
	*words = (*words)[1:]
	switch word {
	case "[]":
		return &shape{kind: "list", item: valueShape(words)}
	case "{":
		return objectShape(words)
	}
	return &shape{kind: word}
}

// value is a value that has the shape asked for. Methods of a nil value return the default: the key is absent.
type value struct {
	node  *yaml.Node
	keys  map[string]*value
	items []*value
}

// at returns the value at a path of keys, with dots between them; nil if there is none.
func (v *value) at(path string) *value {
	for key := range strings.SplitSeq(path, ".") {
		if v == nil {
			return nil
		}
		v = v.keys[key]
	}
	return v
}

func (v *value) list() []*value {
	if v == nil {
		return nil
	}
	return v.items
}

func (v *value) text() string {
	if v == nil {
		return ""
	}
	return v.node.Value
}

func (v *value) is(byDefault bool) bool {
	if v == nil {
		return byDefault
	}
	return strings.EqualFold(v.node.Value, "true")
}

func (v *value) number(byDefault int) int {
	if v == nil {
		return byDefault
	}
	n, _ := strconv.ParseInt(v.node.Value, 0, 64)
	return int(n)
}

func (v *value) line() int {
	if v == nil {
		return 0
	}
	return v.node.Line
}

// wrong is a mistake at a line.
func wrong(line int, format string, args ...any) error {
	return fmt.Errorf("line %d: %w", line, fmt.Errorf(format, args...))
}

// reference is the name of a plugin in a plugin's parameters.
type reference struct {
	key, name, role string
	line            int
}

// reader reads one document.
type reader struct {
	left       int  // values
	folds      bool // the case of keys does not matter, as in encoding/json
	references []reference
}

// read returns a node as a value of a shape; nil for null. path is the node's, for errors.
func (r *reader) read(n *yaml.Node, s *shape, path string, depth int) (*value, error) {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if r.left--; r.left < 0 || depth > maxDepth {
		return nil, fmt.Errorf("has more than %d values, or is deeper than %d levels", maxValues, maxDepth)
	}
	if n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" {
		return nil, nil
	}
	v := &value{node: n}
	switch s.kind {
	case "list":
		if n.Kind != yaml.SequenceNode {
			return nil, wrong(n.Line, "%s: must be a list", path)
		}
		for i, item := range n.Content {
			read, err := r.read(item, s.item, fmt.Sprintf("%s[%d]", path, i), depth+1)
			if err != nil {
				return nil, err
			}
			if read == nil {
				read = &value{node: item}
			}
			v.items = append(v.items, read)
		}
	case "any":
		for _, part := range n.Content {
			if _, err := r.read(part, s, path, depth+1); err != nil {
				return nil, err
			}
		}
	case "object", "texts":
		return v, r.object(v, s, path, depth)
	default:
		if err := r.scalar(n, s.kind, path); err != nil {
			return nil, err
		}
	}
	return v, nil
}

// object reads the keys of a mapping.
func (r *reader) object(v *value, s *shape, path string, depth int) error {
	n := v.node
	if n.Kind != yaml.MappingNode {
		return wrong(n.Line, "%s: must be an object", orDocument(path))
	}
	v.keys = make(map[string]*value, len(n.Content)/2)
	seen := map[string]int{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		name, of := key.Value, &shape{kind: "text"}
		if s.kind == "object" {
			if of = s.of[name]; of == nil && r.folds {
				for _, known := range s.keys {
					if strings.EqualFold(known, name) {
						name, of = known, s.of[known]
					}
				}
			}
		}
		if path := strings.TrimPrefix(path+"."+name, "."); of == nil {
			return wrong(key.Line, "unknown key %q%s", path, nearest(key.Value, s.keys))
		} else if line := seen[name]; line > 0 {
			return wrong(key.Line, "%s: line %d has the same key", path, line)
		} else if read, err := r.read(n.Content[i+1], of, path, depth+1); err != nil {
			return err
		} else if read != nil {
			v.keys[name] = read
		}
		seen[name] = key.Line
	}
	return nil
}

// nearest returns the end of an error about an unknown key.
func nearest(key string, known []string) string {
	if len(known) == 0 {
		return "; it takes no keys"
	}
	if near := suggest.DidYouMean(key, "", known); near != "" {
		return near
	}
	for _, k := range known {
		if strings.HasPrefix(strings.ToLower(k), strings.ToLower(key)) {
			return "; did you mean " + k + "?"
		}
	}
	return "; known: " + strings.Join(known, ", ")
}

func orDocument(path string) string {
	if path == "" {
		return "the document"
	}
	return path
}

var quantities = regexp.MustCompile(`^[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$`)

// scalar checks that a node is a scalar of a kind.
func (r *reader) scalar(n *yaml.Node, kind, path string) error {
	tag := n.ShortTag()
	if n.Kind != yaml.ScalarNode {
		tag = ""
	}
	isText := tag == "!!str" || tag == "!!timestamp"
	bad := func(must string) error { return wrong(n.Line, "%s: %.100q: must be %s", path, n.Value, must) }
	switch kind {
	case "bool":
		if tag != "!!bool" {
			return bad("true or false, without quotes")
		}
	case "int", "nanoseconds":
		if _, err := strconv.ParseInt(n.Value, 0, 64); tag != "!!int" || err != nil {
			return bad("a whole number, without quotes")
		}
	case "float":
		if tag != "!!int" && tag != "!!float" {
			return bad("a number, without quotes")
		}
	case "duration":
		if _, err := time.ParseDuration(n.Value); !isText || err != nil {
			return bad("a duration with a unit, such as 5s")
		}
	case "quantity":
		if tag == "" || !quantities.MatchString(n.Value) {
			return bad("a quantity, such as 2Gi")
		}
	default:
		if !isText {
			return bad("a text; put it in quotes")
		}
		if role, isReference := strings.CutPrefix(kind, "@"); isReference && n.Value != "" {
			r.references = append(r.references, reference{path, n.Value, role, n.Line})
		}
	}
	return nil
}

// parse returns the only document of a text; nil if it is empty.
func parse(document string) (*yaml.Node, error) {
	if len(document) > maxConfigBytes {
		return nil, fmt.Errorf("is larger than %d bytes", maxConfigBytes)
	}
	decoder := yaml.NewDecoder(strings.NewReader(document))
	var root yaml.Node
	switch err := decoder.Decode(&root); {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("is not YAML: %w", err)
	}
	if err := decoder.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("has more than one document")
	}
	if root.Content[0].ShortTag() == "!!null" {
		return nil, nil
	}
	return root.Content[0], nil
}
