package chattemplate

import (
	"os"
	"testing"
)

// golden returns a field of a dict in a golden file.
func golden[T any](t *testing.T, d *Dict, key string) T {
	t.Helper()
	v, _ := d.Get(key)
	typed, ok := v.(T)
	if !ok {
		t.Fatalf("golden field %q is a %s", key, kindName(v))
	}
	return typed
}

// TestAgainstJinja2 renders the templates of testdata/jinja.json, whose outputs are Jinja2's own. What fails there must
// fail here, when compiled or when rendered.
func TestAgainstJinja2(t *testing.T) {
	raw, err := os.ReadFile("testdata/jinja.json")
	if err != nil {
		t.Fatal(err)
	}
	v, err := ParseJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	file := v.(*Dict)
	vars := golden[*Dict](t, file, "vars")
	cases := golden[*List](t, file, "cases")
	if len(cases.Items) < 400 {
		t.Fatalf("only %d cases", len(cases.Items))
	}
	for _, item := range cases.Items {
		c := item.(*Dict)
		source := golden[string](t, c, "template")
		_, fails := c.Get("error")
		got := ""
		tmpl, err := Compile("case", source)
		if err == nil {
			got, err = tmpl.Render(vars, Limits{})
		}
		switch {
		case fails && err == nil:
			t.Errorf("%s\nrenders %q, where Jinja2 fails with %v", source, got, golden[string](t, c, "error"))
		case !fails && err != nil:
			t.Errorf("%s\nfails with %v, where Jinja2 renders %q", source, err, golden[string](t, c, "output"))
		case !fails && got != golden[string](t, c, "output"):
			t.Errorf("%s\n got %q\nwant %q", source, got, golden[string](t, c, "output"))
		}
	}
}
