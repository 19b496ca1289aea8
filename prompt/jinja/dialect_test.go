package jinja

import (
	"errors"
	"flag"
	"os"
	"testing"

	"kvepp/prompt/values"
)

var furtherMini = flag.String("golden-mini", "", "a file in the form of minijinja.json, for TestAgainstMiniJinja")

var verbose = flag.Bool("unknown", false, "print what is not known of MiniJinja")

// TestAgainstMiniJinja renders the templates of testdata/minijinja.json and compares with the outputs of
// dynamo-renderer's environment. ErrUnsupported is allowed in a few cases; a different output is not.
func TestAgainstMiniJinja(t *testing.T) {
	path := "testdata/minijinja.json"
	if *furtherMini != "" {
		path = *furtherMini
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	v, err := values.ParseJSON(raw)
	if err != nil {
		t.Fatal(err)
	}
	file := v.(*values.Dict)
	vars := golden[*values.Dict](t, file, "vars")
	vars.Set("add_generation_prompt", true)
	for _, name := range []string{"tools", "bos_token", "eos_token", "unk_token"} {
		vars.Set(name, nil)
	}
	cases := golden[*values.List](t, file, "cases")
	rendered, unknown := 0, 0
	for _, item := range cases.Items {
		c := item.(*values.Dict)
		source := golden[string](t, c, "template")
		if _, fails := c.Get("error"); fails {
			continue // Dynamo answers 400, so that no worker sees such a request
		}
		want := golden[string](t, c, "output")
		got := ""
		tmpl, err := MiniJinja.Compile("case", source)
		if err == nil {
			got, err = tmpl.Render(t.Context(), vars, Limits{})
		}
		switch {
		case err != nil:
			unknown++
			if *verbose {
				t.Logf("%v %v: %s", errors.Is(err, ErrUnsupported), err, source)
			}
		case got != want:
			t.Errorf("%s\n got %q\nwant %q", source, got, want)
		default:
			rendered++
		}
	}
	if rendered < 700 || unknown > 85 {
		t.Errorf("%d rendered, %d unsupported", rendered, unknown)
	}
}
