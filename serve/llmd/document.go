package llmd

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
	"k8s.io/apimachinery/pkg/api/resource"

	"kvepp/internal/suggest"
)

// Bounds of a configuration: a ConfigMap has at most 1 MiB. maxValues bounds what aliases of aliases expand to.
const (
	maxConfigBytes = 1 << 20
	maxValues      = 100_000
	maxDepth       = 64
)

// shapeOf reads a shape, which says what a value must look like: {KEY: SHAPE, ...} is an object with these keys,
// [SHAPE] a list; texts is an object of texts, and any is anything. Else it is one of [kinds], or what a plugin must be
// that the value names. A key without a shape is a text, or names a producer if it ends with ProducerName.
func shapeOf(text string) *yaml.Node {
	var shape yaml.Node
	if err := yaml.Unmarshal([]byte(text), &shape); err != nil {
		panic(err) // the text is a constant
	}
	return shape.Content[0]
}

// value is a part of a document that has the shape asked for. A nil value is an absent one: its methods return the
// default.
type value yaml.Node

// at returns the value at a path of keys, with dots between them; nil if there is none.
func (v *value) at(path string) *value {
	for key := range strings.SplitSeq(path, ".") {
		v = v.keys()[key]
	}
	return v
}

// keys returns the values of an object, but those that are null.
func (v *value) keys() map[string]*value {
	all := map[string]*value{}
	for i := 0; v != nil && v.Kind == yaml.MappingNode && i < len(v.Content); i += 2 {
		if item := v.Content[i+1]; !isNull(item) {
			all[v.Content[i].Value] = (*value)(item)
		}
	}
	return all
}

func (v *value) list() (all []*value) {
	if v != nil {
		for _, item := range v.Content {
			all = append(all, (*value)(item))
		}
	}
	return all
}

func (v *value) texts() []string {
	all := []string{}
	for _, item := range v.list() {
		all = append(all, item.text())
	}
	return all
}

func (v *value) text() string {
	if v == nil {
		return ""
	}
	return v.Value
}

func (v *value) yes(byDefault bool) bool {
	return v == nil && byDefault || strings.EqualFold(v.text(), "true")
}

// parsed returns what parse makes of a value; the default if there is none, or one that is less than least.
func parsed[T cmp.Ordered](v *value, parse func(string) (T, error), least, byDefault T) T {
	if x, err := parse(v.text()); err == nil && x >= least {
		return x
	}
	return byDefault
}

func (v *value) number(byDefault int) int {
	return int(parsed(v, parseInt, math.MinInt64, int64(byDefault)))
}

// float returns a positive number.
func (v *value) float(byDefault float64) float64 {
	return parsed(v, parseFloat, math.SmallestNonzeroFloat64, byDefault)
}

// time returns a positive duration, and wait one that may be 0, for no limit.
func (v *value) time(byDefault time.Duration) time.Duration {
	return parsed(v, time.ParseDuration, 1, byDefault)
}

func (v *value) wait(byDefault time.Duration) time.Duration {
	return parsed(v, time.ParseDuration, 0, byDefault)
}

// quantity returns a number of Kubernetes' form, such as 4k; 0 without a positive one.
func (v *value) quantity() int {
	q, _ := resource.ParseQuantity(v.text())
	return int(min(max(q.Value(), 0), math.MaxInt64/2))
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.ShortTag() == "!!null" }

// wrong is a mistake at a line.
func wrong(line int, format string, args ...any) error {
	return fmt.Errorf("line %d: %w", line, fmt.Errorf(format, args...))
}

// reference is the name of a plugin in a document.
type reference struct {
	key, name, role string
	line            int
}

// reader reads one document.
type reader struct {
	left       int    // values
	folds      bool   // the case of keys does not matter, as in encoding/json
	about      string // begins the keys of references
	references []reference
}

// read checks that a node has a shape, and returns it; nil for null. In the node it puts values in the place of their
// aliases, and spells keys as the shape does. path is the node's, for errors.
func (r *reader) read(n, shape *yaml.Node, path string, depth int) (*value, error) {
	if r.left--; r.left < 0 || depth > maxDepth {
		return nil, fmt.Errorf("has more than %d values, or is deeper than %d levels", maxValues, maxDepth)
	}
	for i, part := range n.Content {
		if part.Kind == yaml.AliasNode {
			n.Content[i] = part.Alias
		}
	}
	isList := shape.Kind == yaml.SequenceNode
	switch {
	case isNull(n):
		return nil, nil
	case shape.Kind == yaml.MappingNode || shape.Value == "texts":
		return (*value)(n), r.object(n, shape, path, depth)
	case isList && n.Kind != yaml.SequenceNode:
		return nil, wrong(n.Line, "%s: must be a list", path)
	case isList || shape.Value == "any":
		for i, part := range n.Content {
			of, at := shape, path
			if isList {
				of, at = shape.Content[0], fmt.Sprintf("%s[%d]", path, i)
			}
			if _, err := r.read(part, of, at, depth+1); err != nil {
				return nil, err
			}
		}
		return (*value)(n), nil
	}
	return (*value)(n), r.scalar(n, shape.Value, path)
}

// object checks the keys of a mapping.
func (r *reader) object(n, shape *yaml.Node, path string, depth int) error {
	if n.Kind != yaml.MappingNode {
		return wrong(n.Line, "%s", strings.TrimPrefix(path+": must be an object", ": "))
	}
	var known []string
	for i := 0; i < len(shape.Content); i += 2 {
		known = append(known, shape.Content[i].Value)
	}
	seen := map[string]int{}
	for i := 0; i < len(n.Content); i += 2 {
		key, of := n.Content[i], &yaml.Node{Kind: yaml.ScalarNode, Value: "text"}
		at := slices.IndexFunc(known, func(k string) bool {
			return k == key.Value || r.folds && strings.EqualFold(k, key.Value) && !slices.Contains(known, key.Value)
		})
		if at >= 0 {
			key.Value = known[at]
			if own := shape.Content[2*at+1]; !isNull(own) {
				of = own
			} else if strings.HasSuffix(key.Value, "ProducerName") {
				of.Value = "producer"
			}
		}
		switch path := strings.TrimPrefix(path+"."+key.Value, "."); {
		case at < 0 && shape.Value != "texts":
			return wrong(key.Line, "unknown key %q%s", path, nearest(key.Value, known))
		case seen[key.Value] > 0:
			return wrong(key.Line, "%s: line %d has the same key", path, seen[key.Value])
		default:
			if _, err := r.read(n.Content[i+1], of, path, depth+1); err != nil {
				return err
			}
		}
		seen[key.Value] = key.Line
	}
	return nil
}

// nearest returns the end of an error about an unknown key.
func nearest(key string, known []string) string {
	if len(known) == 0 {
		return "; it takes no keys"
	}
	longer := func(k string) bool { return strings.HasPrefix(strings.ToLower(k), strings.ToLower(key)) }
	near := suggest.DidYouMean(key, "", known)
	if i := slices.IndexFunc(known, longer); near == "" && i >= 0 {
		near = "; did you mean " + known[i] + "?"
	}
	return cmp.Or(near, "; known: "+strings.Join(known, ", "))
}

// kind is a kind of scalars.
type kind struct {
	tags  string // of YAML
	must  string // what a value must be
	takes func(text string) bool
}

// kinds are those of shapes and of flags.
var kinds = map[string]kind{
	"text":     {"!!str !!timestamp", "a text; put it in quotes", isAny},
	"bool":     {"!!bool", "true or false", parses(strconv.ParseBool)},
	"int":      {"!!int", "a whole number", parses(parseInt)},
	"float":    {"!!int !!float", "a number", isAny},
	"duration": {"!!str", "a duration with a unit, such as 5s", parses(time.ParseDuration)},
	"quantity": {"!!str !!int !!float", "a quantity, such as 2Gi", parses(resource.ParseQuantity)},
	"size": {"", "a number of bytes, such as 10MiB",
		func(s string) bool { return s == "" || parses(resource.ParseQuantity)(strings.TrimSuffix(s, "B")) }},
}

func isAny(string) bool { return true }

func parseInt(s string) (int64, error) { return strconv.ParseInt(s, 0, 64) }

func parseFloat(s string) (float64, error) { return strconv.ParseFloat(s, 64) }

func parses[T any](parse func(string) (T, error)) func(string) bool {
	return func(s string) bool { _, err := parse(s); return err == nil }
}

// scalar checks that a node is a scalar of a kind.
func (r *reader) scalar(n *yaml.Node, name, path string) error {
	k, isKind := kinds[name]
	if !isKind {
		k = kinds["text"]
		if n.Value != "" {
			r.references = append(r.references, reference{r.about + path, n.Value, name, n.Line})
		}
	}
	if n.Kind != yaml.ScalarNode || !slices.Contains(strings.Fields(k.tags), n.ShortTag()) || !k.takes(n.Value) {
		if !strings.Contains(k.tags, "!!str") {
			k.must += ", without quotes"
		}
		return wrong(n.Line, "%s: %.100q: must be %s", path, n.Value, k.must)
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
	if isNull(root.Content[0]) {
		return nil, nil
	}
	return root.Content[0], nil
}
