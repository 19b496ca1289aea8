package report

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"kvepp/kvblock"
	"kvepp/replay"
)

// TestReplayEndpoints: the engines are those of an endpoints file, each rank one.
func TestReplayEndpoints(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	trace := write("a.jsonl", `{"hash_ids": [1], "input_length": 16, "output_length": 1}`)
	entry := func(name, more string) string { return "- {name: " + name + ", address: \"h:1\"" + more + "}\n" }
	parse := func(text string, args ...string) (*Config, error) {
		var c Config
		f := pflag.NewFlagSet("", pflag.ContinueOnError)
		c.AddFlags(f)
		if err := f.Parse(append(args, trace, "--endpoints", write("e.yaml", "endpoints:\n"+text))); err != nil {
			return nil, err
		}
		return &c, c.Validate(f.Args())
	}
	o, err := parse(entry("a", ", blockSize: 32, totalKvBlocks: 77, maxNumBatchedTokens: 99, model: m") +
		entry("b", ", dataParallelSize: 2, dataParallelStartRank: 4, taints: [x]") + entry("c", ", cordoned: true"))
	if err != nil {
		t.Fatal(err)
	}
	id := func(name string, rank uint32) replay.WorkerID {
		return replay.WorkerID{Instance: kvblock.InstanceID(name), Rank: rank}
	}
	want := []replay.Own{{Name: "a", ID: id("a", 0), Blocks: 77, MaxBatchedTokens: 99}, {Name: "b/4", ID: id("b", 4)},
		{Name: "b/5", ID: id("b", 5)}}
	if !slices.Equal(o.Base.Own, want) || o.Base.Workers != 3 || o.Base.Engine.BlockSize != 32 {
		t.Errorf("%+v, blocks of %d", o.Base.Own, o.Base.Engine.BlockSize)
	}
	for _, c := range []struct{ text, arg, want string }{
		{entry("a", ""), "--workers=3", "leave out --workers"},
		{entry("a", ", blockSize: 16") + entry("b", ", blockSize: 32"), "", "b has blocks of 32 tokens"},
		{entry("a", ", blockSize: 16"), "--block-size=64", "a has blocks of 16 tokens"},
		{entry("a", ", role: prefill"), "", "a has the role prefill"},
		{entry("a", ", model: m") + entry("b", ", model: n"), "", "b serves n, others serve m"},
		{entry("a", ", cordoned: true"), "", "no endpoint that gets requests"},
		{"- nonsense\n", "", "--endpoints "},
	} {
		if _, err := parse(c.text, append([]string{}, strings.Fields(c.arg)...)...); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("%s %s: %v, want %q", c.text, c.arg, err, c.want)
		}
	}
}
