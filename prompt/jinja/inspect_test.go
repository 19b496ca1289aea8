package jinja

import (
	"strings"
	"testing"
)

// TestLoopsOver finds loops over content through assignments, macros and other indirections. Package test/parity
// compares more cases with the engines themselves.
func TestLoopsOver(t *testing.T) {
	for source, want := range map[string]struct{ anywhere, ofM bool }{
		`{% for m in messages %}{{ m.content }}{% endfor %}`: {false,
			false},
		`{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}`:                         {true, true},
		`{% for m in messages[1:] | list %}{% for c in m['content'] | reverse %}{% endfor %}{% endfor %}`: {true, true},
		`{% for m in messages %}{% for c in m.get('content') %}{% endfor %}{% endfor %}`: {false,
			false},
		`{% for m in messages %}{% for a, c in m.content %}{% endfor %}{% endfor %}`: {false,
			true},
		`{% for x in messages %}{% for c in x.content.parts %}{% endfor %}{% endfor %}`: {false,
			false},
		`{% set r = messages %}{% set ns = namespace(r=r) %}{% for x in ns.r %}{% for c in x.content %}{% endfor ` +
			`%}{% endfor %}`: {true, false},
		`{% set ns.r = messages %}{% for x in ns.r %}{% if x %}{% for c in x.content[1:] %}{% endfor %}{% endif %}{% ` +
			`endfor %}`: {true, false},
		`{% macro f(p) %}{% for c in p %}{% endfor %}{% endmacro %}{% for x in messages %}{{ f(x.content) }}{% ` +
			`endfor %}`: {true, false},
		`{% macro f(p) %}{% for c in p %}{% endfor %}{% endmacro %}{% for x in messages %}{{ f(p=x.content) ~ 1 }}{% ` +
			`endfor %}`: {true, false},
		`{% macro f(p) %}{% for c in p %}{% endfor %}{% endmacro %}{% for x in messages %}{{ f(x.role) }}{% endfor ` +
			`%}`: {false, false},
		`{% macro f(content) %}{% for c in content %}{% endfor %}{% endmacro %}{{ messages }}`: {false, false},
		`{% for c in content %}{% endfor %}`:                                                   {true, false},
		`{% for i, m in messages %}{% endfor %}{% for x in messages %}{% for c in x.content %}{% endfor %}{% endfor ` +
			`%}`: {false, false},
		`{% for x in other %}{% for c in x.content %}{% endfor %}{% endfor %}`:               {false, false},
		`{% for m in other %}{% for c in m.content is string %}{% endfor %}{% endfor %}`:     {false, true},
		`{% for m in other %}{% for c in m.content is not string %}{% endfor %}{% endfor %}`: {false, false},
	} {
		compiled, err := Compile("test", source)
		if err != nil {
			t.Fatal(err)
		}
		if got := compiled.LoopsOverContent(true); got != want.anywhere {
			t.Errorf("%s: LoopsOverContent %v", source, got)
		}
		byName := want.anywhere && !strings.Contains(source, "ns.")
		if got := compiled.LoopsOverContent(false); got != byName {
			t.Errorf("%s: LoopsOverContent without namespaces %v", source, got)
		}
		if got := compiled.LoopsOver("m", "content"); got != want.ofM {
			t.Errorf("%s: LoopsOver(m, content) %v", source, got)
		}
	}
	// Without namespaces, messages in an attribute hide the loop that follows; other values there do not.
	for source, want := range map[string]bool{
		`{% set ns.r = messages %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}`:    false,
		`{% set ns.r = messages[0] %}{% for m in messages %}{% for c in m.content %}{% endfor %}{% endfor %}`: true,
		`{% set ns = namespace(r=messages) %}{% for m in messages %}{% for c in m.content %}{% endfor %}` +
			`{% endfor %}`: true,
	} {
		compiled, err := Compile("test", source)
		if err != nil {
			t.Fatal(err)
		}
		if got := compiled.LoopsOverContent(false); got != want {
			t.Errorf("%s: LoopsOverContent without namespaces %v", source, got)
		}
	}
}
