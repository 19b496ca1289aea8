package chattemplate

import "errors"

// The engine lands in the next commits; signatures are final.

type statement func() error
type namespace struct{}
type loop struct{}
type function struct{ kind string }

// Compile parses a template's source.
func Compile(name, source string) (*Template, error) {
	return nil, errors.New("chattemplate: engine not in place yet")
}

// Render renders the template with vars.
func (t *Template) Render(vars *Dict, limits Limits) (string, error) {
	return "", errors.New("chattemplate: engine not in place yet")
}
