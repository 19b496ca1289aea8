package prompt

import (
	"math"
	"math/big"
	"strconv"
	"strings"
	"unicode/utf8"

	"kvepp/prompt/values"
)

// Harmony shows functions to the model as TypeScript. Comments hold what a JSON schema says beyond the types.
// Source: oss-harmony 0.0.11, encoding, json_schema_to_typescript and template_tools_section.

const (
	// maxSchemaDepth is the deepest nesting of a tool's parameters. vLLM passes the conversation on as JSON, and
	// serde_json reads at most 128 levels, including those of the conversation.
	maxSchemaDepth = 100
	// maxToolsText bounds the text of the tools, in bytes. Indentation makes the text longer than the schema.
	maxToolsText = 16 << 20
)

// schemaWriter writes types. written counts the bytes, so that a client cannot make it write more than maxToolsText.
type schemaWriter struct{ written int }

// harmonyTools returns the section of the developer's message that shows the tools. tools is a result of vllmTools.
func harmonyTools(tools *values.List) (string, error) {
	var w schemaWriter
	lines := []string{"## functions\n", "namespace functions {\n"}
	for _, item := range tools.Items {
		tool, _ := item.(*values.Dict)
		function, _ := get[*values.Dict](tool, "function")
		name, _ := get[string](function, "name")
		description, err := optionalString(function, "description")
		if err != nil {
			return "", err
		}
		for _, line := range rustLines(description) {
			lines = append(lines, "// "+line)
		}
		switch parameters, _ := function.Get("parameters"); parameters := parameters.(type) {
		case nil:
			lines = append(lines, "type "+name+" = () => any;\n")
		case *values.Dict:
			if nesting(parameters) > maxSchemaDepth {
				return "", errNotReproduced("deeply nested tool parameters")
			}
			text, err := w.typeOf(parameters, "")
			if err != nil {
				return "", err
			}
			lines = append(lines, "type "+name+" = (_: "+text+") => any;\n")
		default:
			return "", errRefused("a tool's parameters are not an object")
		}
	}
	lines = append(lines, "} // namespace functions")
	return "# Tools\n\n" + strings.Join(lines, "\n"), nil
}

// nesting returns the number of lists and objects around the innermost value.
func nesting(value any) int {
	deepest := 0
	switch v := value.(type) {
	case *values.List:
		for _, item := range v.Items {
			deepest = max(deepest, nesting(item))
		}
	case *values.Dict:
		for _, item := range v.All() {
			deepest = max(deepest, nesting(item))
		}
	default:
		return 0
	}
	return deepest + 1
}

// optionalString returns a field that is a string; "" if it is absent or null.
func optionalString(d *values.Dict, name string) (string, error) {
	v, _ := d.Get(name)
	text, ok := v.(string)
	if v != nil && !ok {
		return "", errRefused("a tool's %s is not a string", name)
	}
	return text, nil
}

// rustLines cuts text like Rust's str::lines: at \n or \r\n, without an empty last line.
func rustLines(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		if cut, ok := strings.CutSuffix(line, "\n"); ok {
			line = strings.TrimSuffix(cut, "\r")
		}
		lines = append(lines, line)
	}
	return lines
}

// typeOf returns the type that a schema describes: "any" if the schema is not an object.
func (w *schemaWriter) typeOf(schema any, indent string) (string, error) {
	text, err := w.describe(schema, indent)
	if err != nil {
		return "", err
	}
	if w.written += len(text); w.written > maxToolsText {
		return "", errNotReproduced("tools whose types are very long")
	}
	return text, nil
}

// describe is typeOf without the count of the bytes of the result.
func (w *schemaWriter) describe(value any, indent string) (string, error) {
	schema, _ := value.(*values.Dict)
	if variants, ok := get[*values.List](schema, "oneOf"); ok {
		var b strings.Builder
		for _, item := range variants.Items {
			text, err := w.nullable(item, indent+"   ")
			if err != nil {
				return "", err
			}
			b.WriteString("\n" + indent + " | " + text)
			variant, _ := item.(*values.Dict)
			var comments []string
			if description, ok := get[string](variant, "description"); ok {
				comments = append(comments, description)
			}
			if given, ok := variant.Get("default"); ok {
				if text, isString := given.(string); isString && !isEnum(variant) {
					comments = append(comments, `default: "`+text+`"`)
				} else {
					comments = append(comments, "default: "+serdeJSON(given))
				}
			}
			if len(comments) > 0 {
				b.WriteString(" // " + strings.Join(comments, " "))
			}
			if w.written+b.Len() > maxToolsText {
				return "", errNotReproduced("tools whose types are very long")
			}
		}
		return b.String(), nil
	}
	kind, _ := schema.Get("type")
	if kinds, ok := kind.(*values.List); ok {
		var names []string
		for _, item := range kinds.Items {
			if name, ok := item.(string); ok {
				if name == "integer" {
					name = "number"
				}
				names = append(names, name)
			}
		}
		if len(names) > 0 {
			return strings.Join(names, " | "), nil
		}
	}
	switch kind {
	case "object":
		return w.object(schema, indent)
	case "string":
		var texts []string
		if enum, ok := get[*values.List](schema, "enum"); ok {
			for _, item := range enum.Items {
				if text, ok := item.(string); ok {
					texts = append(texts, `"`+text+`"`)
				}
			}
		}
		if len(texts) > 0 {
			return strings.Join(texts, " | "), nil
		}
		return "string", nil
	case "number", "integer":
		return "number", nil
	case "boolean":
		return "boolean", nil
	case "array":
		items, ok := schema.Get("items")
		if !ok {
			return "Array<any>", nil
		}
		text, err := w.typeOf(items, indent)
		return text + "[]", err
	}
	return "any", nil
}

// nullable returns the type that a schema describes, with null if the schema is nullable.
func (w *schemaWriter) nullable(item any, indent string) (string, error) {
	text, err := w.typeOf(item, indent)
	if err != nil {
		return "", err
	}
	schema, _ := item.(*values.Dict)
	if yes, _ := schema.Get("nullable"); yes == true && !strings.Contains(text, "null") {
		text += " | null"
	}
	return text, nil
}

// object returns an object's type: a line for each property, with comments above it.
func (w *schemaWriter) object(schema *values.Dict, indent string) (string, error) {
	var b strings.Builder
	if description, ok := get[string](schema, "description"); ok {
		b.WriteString(indent + "// " + description + "\n")
	}
	b.WriteString("{\n")
	required := map[string]bool{}
	if list, ok := get[*values.List](schema, "required"); ok {
		for _, item := range list.Items {
			if name, ok := item.(string); ok {
				required[name] = true
			}
		}
	}
	properties, _ := get[*values.Dict](schema, "properties")
	for key, value := range properties.All() {
		name, _ := key.(string)
		mark := "?"
		if required[name] {
			mark = ""
		}
		if err := w.property(&b, name+mark, value, indent); err != nil {
			return "", err
		}
		if w.written+b.Len() > maxToolsText {
			return "", errNotReproduced("tools whose types are very long")
		}
	}
	b.WriteString(indent + "}")
	return b.String(), nil
}

// property writes one property. name ends with "?" if the property is optional.
func (w *schemaWriter) property(b *strings.Builder, name string, value any, indent string) error {
	schema, _ := value.(*values.Dict)
	oneOf, hasOneOf := schema.Get("oneOf")
	description, described := get[string](schema, "description")
	if title, ok := get[string](schema, "title"); ok {
		b.WriteString(indent + "// " + title + "\n" + indent + "//\n")
	}
	if described && !hasOneOf {
		b.WriteString(indent + "// " + description + "\n")
	}
	if examples, ok := get[*values.List](schema, "examples"); ok && len(examples.Items) > 0 {
		b.WriteString(indent + "// Examples:\n")
		for _, item := range examples.Items {
			if text, ok := item.(string); ok {
				b.WriteString(indent + `// - "` + text + "\"\n")
			}
		}
	}
	given, hasDefault := schema.Get("default")
	if variants, ok := oneOf.(*values.List); ok {
		return w.propertyVariants(b, name, schema, variants, indent)
	}
	b.WriteString(indent + name + ": ")
	text, err := w.nullable(value, indent+"    ")
	if err != nil {
		return err
	}
	b.WriteString(text + ",")
	if hasDefault && !hasOneOf {
		b.WriteString(" // default: " + shownDefault(given, schema))
	}
	b.WriteString("\n")
	return nil
}

// propertyVariants writes a property whose schema has oneOf.
func (w *schemaWriter) propertyVariants(
	b *strings.Builder, name string, schema *values.Dict, variants *values.List, indent string,
) error {
	description, described := get[string](schema, "description")
	above := described
	if described && len(variants.Items) > 0 {
		first, _ := variants.Items[0].(*values.Dict)
		if text, ok := get[string](first, "description"); ok && text == description {
			above = false
		}
	}
	if above {
		b.WriteString(indent + "// " + description + "\n")
	}
	if given, ok := schema.Get("default"); ok {
		b.WriteString(indent + "// default: " + shownDefault(given, schema) + "\n")
	}
	b.WriteString(indent + name + ":\n")
	for i, item := range variants.Items {
		text, err := w.nullable(item, indent+"   ")
		if err != nil {
			return err
		}
		b.WriteString(indent + " | " + text)
		variant, _ := item.(*values.Dict)
		var comments []string
		if text, ok := get[string](variant, "description"); ok && !(i == 0 && above) &&
			!(described && text == description) {
			comments = append(comments, text)
		}
		if given, ok := variant.Get("default"); ok {
			comments = append(comments, "default: "+shownDefault(given, variant))
		}
		if len(comments) > 0 {
			b.WriteString(" // " + strings.Join(comments, " "))
		}
		b.WriteString("\n")
	}
	b.WriteString(indent + ",\n")
	return nil
}

// isEnum reports whether a schema lists its values.
func isEnum(schema *values.Dict) bool {
	list, ok := get[*values.List](schema, "enum")
	return ok && len(list.Items) > 0
}

// shownDefault returns a default as a comment shows it: an enum's value unchanged, another string in quotes, any other
// value as JSON.
func shownDefault(given any, schema *values.Dict) string {
	text, ok := given.(string)
	switch {
	case !ok:
		return serdeJSON(given)
	case isEnum(schema):
		return text
	}
	return `"` + text + `"`
}

// serdeJSON returns a value as Rust's serde_json prints it, without spaces.
func serdeJSON(value any) string {
	var b strings.Builder
	writeSerdeJSON(&b, value)
	return b.String()
}

func writeSerdeJSON(b *strings.Builder, value any) {
	switch v := value.(type) {
	case nil:
		b.WriteString("null")
	case bool:
		b.WriteString(strconv.FormatBool(v))
	case int64:
		b.WriteString(strconv.FormatInt(v, 10))
	case *big.Int:
		if v.IsUint64() {
			b.WriteString(v.String())
			return
		}
		b.WriteString(serdeFloat(v.String())) // beyond 64 bits serde_json reads a float
	case float64:
		b.WriteString(serdeFloat(pythonFloat(v)))
	case string:
		writeSerdeString(b, v)
	case *values.List:
		b.WriteByte('[')
		for i, item := range v.Items {
			if i > 0 {
				b.WriteByte(',')
			}
			writeSerdeJSON(b, item)
		}
		b.WriteByte(']')
	case *values.Dict:
		b.WriteByte('{')
		comma := false
		for key, item := range v.All() {
			if comma {
				b.WriteByte(',')
			}
			comma = true
			name, _ := key.(string)
			writeSerdeString(b, name)
			b.WriteByte(':')
			writeSerdeJSON(b, item)
		}
		b.WriteByte('}')
	}
}

// pythonFloat returns a number as Python's json writes it: the shortest digits that read back.
func pythonFloat(f float64) string {
	if size := math.Abs(f); f != 0 && (size < 1e-4 || size >= 1e16) {
		return strconv.FormatFloat(f, 'e', -1, 64)
	}
	text := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

// serdeFloat returns the number that serde_json reads from text, as serde_json prints it: the shortest digits, as a
// decimal number between 1e-5 and 1e16. serde_json does not always read the nearest number: it reads the digits as an
// integer and then multiplies or divides by a power of ten, so it rounds twice.
func serdeFloat(text string) string {
	mantissa, exponent, _ := strings.Cut(text, "e")
	power, _ := strconv.Atoi(exponent)
	mantissa, negative := strings.CutPrefix(mantissa, "-")
	digits, fraction, _ := strings.Cut(mantissa, ".")
	var significand uint64
	for i, c := range []byte(digits + fraction) {
		if digit := uint64(c - '0'); significand <= (math.MaxUint64-digit)/10 {
			significand = significand*10 + digit
			if i >= len(digits) {
				power--
			}
		} else { // one digit too many: the rest counts by its length
			power += max(len(digits)-i, 0)
			break
		}
	}
	f := float64(significand)
	for ; power < -308 && f != 0; power += 308 {
		f /= 1e308
	}
	if power < 0 {
		f /= powerOfTen(-max(power, -308))
	} else {
		f *= powerOfTen(power)
	}
	sign := ""
	if negative {
		sign = "-"
	}
	text = strconv.FormatFloat(f, 'e', -1, 64)
	mantissa, exponent, _ = strings.Cut(text, "e")
	power, _ = strconv.Atoi(exponent)
	switch {
	case f == 0:
	case power < -5:
		return sign + mantissa + "e" + strconv.Itoa(power)
	case power >= 16:
		return sign + mantissa + "e+" + strconv.Itoa(power)
	}
	text = strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return sign + text
}

// powerOfTen returns the float nearest to 10^n, for n from 0 to 308. math.Pow10 does not always return that.
func powerOfTen(n int) float64 {
	f, _ := strconv.ParseFloat("1e"+strconv.Itoa(n), 64) // cannot fail
	return f
}

func writeSerdeString(b *strings.Builder, s string) {
	const hex = "0123456789abcdef"
	b.WriteByte('"')
	for i := 0; i < len(s); {
		r, n := utf8.DecodeRuneInString(s[i:])
		switch at := strings.IndexByte("\"\\\b\f\n\r\t", s[i]); {
		case at >= 0:
			b.WriteByte('\\')
			b.WriteByte(`"\bfnrt`[at])
		case r < 0x20:
			b.WriteString(`\u00`)
			b.WriteByte(hex[r>>4])
			b.WriteByte(hex[r&15])
		default:
			b.WriteString(s[i : i+n])
		}
		i += n
	}
	b.WriteByte('"')
}
