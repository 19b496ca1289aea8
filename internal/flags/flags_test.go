package flags

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
)

// example are the settings of a command.
type example struct {
	File
	port  uint16
	mode  string
	limit *float64
	wait  time.Duration
	on    bool
	names []string
}

func (c *example) AddFlags(fs *pflag.FlagSet) {
	c.File.AddFlags(fs)
	fs.Uint16Var(&c.port, "port", 9002, "`PORT` to listen at")
	Choice(fs, &c.mode, "mode", "fast", "how it works, `MODE`: fast or exact. The first errs", "fast", "exact")
	Float(fs, &c.limit, "limit", "the most of it. None: no limit")
	fs.DurationVar(&c.wait, "wait", 5*time.Minute, "how long it waits")
	fs.BoolVar(&c.on, "turbo", true, "whether it is on")
	Negatable(fs, "turbo")
	Retire(fs, "size", false)
	Retire(fs, "slow", true)
	fs.StringArrayVar(&c.names, "name", nil, "a `NAME`; may be repeated")
	Inherit(fs, "mode", "OTHER_MODE", "limit", "OTHER_LIMIT")
	Section(fs, "Example")
	NameVariables(fs, "")
}

// read reads arguments, a file's text and variables into an example.
func read(t *testing.T, args []string, file string, env map[string]string) (*example, *pflag.FlagSet, error) {
	t.Helper()
	c, fs := new(example), New("kvepp example")
	c.AddFlags(fs)
	if file != "" {
		path := filepath.Join(t.TempDir(), "settings.yaml")
		if err := os.WriteFile(path, []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
		args = append(args, "--config="+path)
	}
	return c, fs, Parse(fs, args, &c.Path, func(name string) string { return env[name] }, func(name string) error {
		if name == "gone" {
			return errors.New("it went away")
		}
		return nil
	})
}

func TestPrecedence(t *testing.T) {
	env := map[string]string{"OTHER_MODE": "exact", "OTHER_LIMIT": "1", "KVEPP_NAME": "a,b", "KVEPP_WAIT": ""}
	c, _, err := read(t, []string{"--no-turbo", "--wait=1s"}, "mode: fast\nwait: 2s\n", env)
	if err != nil || c.mode != "fast" || *c.limit != 1 || c.on || c.wait != time.Second || len(c.names) != 2 {
		t.Errorf("%+v, %v", c, err)
	}
	if c, _, err = read(t, []string{"--limit=none"}, "", env); err != nil || c.limit != nil || c.mode != "exact" {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct {
		args, file string
		says       string
	}{
		{"--prot=1", "", "unknown flag --prot; did you mean --port?"},
		{"-port=1", "", "flags begin with two dashes, --port"},
		{"--gone", "", "unknown flag --gone: it went away"},
		{"--port", "", "--port needs a value: --port PORT"},
		{"--port=x", "", `--port "x": must be a whole number from 0 to 65535, for example 9002`},
		{"--wait=1", "", `--wait "1": must be a duration with a unit (ms, s, m or h), for example 5m`},
		{"--mode=exakt", "", `--mode "exakt": must be fast or exact; did you mean exact?`},
		{"--limit=x", "", "must be a number, for example 0.5, or None"},
		{"--turbo false", "", "behind an equals sign, --FLAG=false"},
		{"x", "", `unexpected argument "x": every flag begins with --`},
		{"", "port: 1\nmodes: fast", "settings.yaml: line 2: unknown key \"modes\"; did you mean mode?"},
		{"", "mode: slow", "line 1: mode \"slow\": must be fast or exact"},
		{"", "wait: 1s\nwait: 2s", "line 2: wait: line 1 sets the same flag"},
		{"", "gone: 1", `unknown key "gone": it went away`},
	} {
		_, _, err := read(t, strings.Fields(c.args), c.file, nil)
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s %q: %v, want %q", c.args, c.file, err, c.says)
		}
	}
	if _, _, err := read(t, nil, "", map[string]string{"OTHER_MODE": "x"}); err == nil ||
		err.Error() != `environment variable OTHER_MODE "x": must be fast or exact` {
		t.Errorf("a wrong variable: %v", err)
	}
	if _, _, err := read(t, []string{"--help-all"}, "", nil); !errors.Is(err, ErrHelpAll) ||
		!errors.Is(err, pflag.ErrHelp) {
		t.Errorf("--help-all: %v", err)
	}
}

func TestUnknownVariables(t *testing.T) {
	fs := New("kvepp example")
	new(example).AddFlags(fs)
	err := UnknownVariables([]string{"KVEPP_PORT=1", "KVEPP_MAKE=1", "KVEPP_EMPTY=", "KVEPP_NO_TURBO=1", "KVEPP_GONE=1",
		"KVEPP_MODEL=fast", "KVEPP_A_SERVICE_HOST=h", "KVEPP_A_SERVICE_PORT=1", "KVEPP_A_PORT_1_TCP=tcp://h:1"},
		[]Prefixed{{fs, ""}}, []string{"KVEPP_MAKE"}, func(name string) error { return fmt.Errorf("no %s", name) })
	want := "unknown environment variable KVEPP_GONE: no gone\n" +
		"unknown environment variable KVEPP_MODEL: no model\n" +
		"unknown environment variable KVEPP_NO_TURBO: write KVEPP_TURBO=false"
	if err == nil || err.Error() != want {
		t.Errorf("%v, want %s", err, want)
	}
}

func TestSettings(t *testing.T) {
	c, fs, err := read(t, []string{"--port=1"}, "name: [a, 'x://u:p@h']\n", map[string]string{"OTHER_LIMIT": "2"})
	if err != nil {
		t.Fatal(err)
	}
	Imply(fs, "--port", func() { c.mode = "exact" })
	var out bytes.Buffer
	WriteSettings(&out, fs)
	flat := strings.Join(strings.Fields(out.String()), " ")
	for _, want := range []string{"# Example port: 1 # flag", `# mode: exact # follows from --port`,
		"limit: 2 # OTHER_LIMIT", "# wait: 5m # default", "name: [a, x://***@h] # "} {
		if !strings.Contains(flat, want) {
			t.Errorf("no %q in %s", want, &out)
		}
	}
	if err := WithSource(fs, errors.New("--name: wrong")); !strings.Contains(err.Error(), "line 1)") {
		t.Errorf("without the line of the file: %v", err)
	}
	if err := WithSource(fs, errors.New("--limit: wrong")); !strings.Contains(err.Error(), "is set by OTHER_LIMIT)") {
		t.Errorf("without the variable: %v", err)
	}
	if err := WithSource(fs, errors.New("--port: wrong")); err.Error() != "--port: wrong" {
		t.Errorf("a flag of the command line has a source: %v", err)
	}
}

func TestHelp(t *testing.T) {
	fs := New("kvepp example")
	new(example).AddFlags(fs)
	var full, brief bytes.Buffer
	for _, s := range Sections(fs) {
		s.WriteHelp(&full)
		s.WriteBrief(&brief)
	}
	const line = "  --mode MODE                 how it works, MODE: fast or exact"
	if !strings.Contains(brief.String(), line+" (default fast)\n") ||
		!strings.Contains(full.String(), line+". The first errs (default fast)") ||
		!strings.Contains(full.String(), "[OTHER_MODE]") || strings.Contains(full.String(), "--no-turbo") {
		t.Errorf("%s\n%s", &full, &brief)
	}
}

func TestChecks(t *testing.T) {
	for want, err := range map[string]error{
		"--n 5: must be from 1 to 4":                                     Between("n", 5, 1, 4),
		"--d -1s: may not be negative; give a duration such as 2s, or 0": NotNegative("d", -time.Second),
		"--d 0s: must be above 0, for example 2s":                        Positive("d", 0),
		`--x "fats": must be fast, slow or off; did you mean fast?`:      OneOf("x", "fats", "fast", "slow", "off"),
	} {
		if err == nil || err.Error() != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	if err := errors.Join(Between("n", 4, 1, 4), NotNegative("d", 0), Positive("d", 1),
		OneOf("x", "a", "a", "b")); err != nil {
		t.Error(err)
	}
}

// TestRetired: a retired flag is accepted everywhere and named nowhere.
func TestRetired(t *testing.T) {
	for _, c := range []struct {
		args []string
		file string
		env  map[string]string
	}{
		{args: []string{"--size", "7", "--slow"}},
		{file: "size: 7\nslow: true\n"},
		{env: map[string]string{"KVEPP_SIZE": "7", "KVEPP_SLOW": "true"}},
	} {
		_, fs, err := read(t, c.args, c.file, c.env)
		if err != nil || !fs.Changed("size") || !fs.Changed("slow") {
			t.Errorf("%+v: %v", c, err)
		}
		var help bytes.Buffer
		for _, s := range Sections(fs) {
			s.WriteHelp(&help)
		}
		if WriteSettings(&help, fs); strings.Contains(help.String(), "slow") {
			t.Errorf("help or settings name a retired flag:\n%s", help.String())
		}
	}
	if _, _, err := read(t, []string{"--siz=7"}, "", nil); err == nil || strings.Contains(err.Error(), "--size") {
		t.Errorf("a misspelt one: %v", err)
	}
	sets := []Prefixed{{FlagSet: New("kvepp example")}}
	new(example).AddFlags(sets[0].FlagSet)
	if err := UnknownVariables([]string{"KVEPP_SIZE=7"}, sets, nil, func(string) error { return nil }); err != nil {
		t.Error(err)
	}
}
