package llmd

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// shown returns what a seat means beside its arguments, in the words of the files in testdata.
func shown(s *Seat) string {
	var words []string
	if s.Others.URL != "" {
		words = append(words, "url "+s.Others.URL+" "+s.Others.Timeout.String())
	}
	if s.EngineCA != "" {
		words = append(words, "engines", s.EngineCA, s.EngineCertificate, s.EngineKey)
	}
	if s.RoleOf != nil {
		words = append(words, "stages")
	}
	if d := s.Disaggregation; d.On {
		words = append(words, fmt.Sprintf("disaggregate %d %d", d.LeastPrompt, d.EffISL))
	}
	if s.Conventions.TokenHeader != "" {
		words = append(words, "token "+s.Conventions.TokenHeader)
	}
	if s.EndpointsFile != "" {
		words = append(words, "file")
	}
	if b := s.Bands; b != nil {
		words = append(words, fmt.Sprintf("bands %v %v %v, %d %d %v %v", b.ByPriority, b.Default, b.Negative,
			b.MaxRequests, b.MaxBytes, b.MaxWait, b.Gate))
	}
	return strings.Join(words, " ")
}

// TestConfigurations: the first line of each file says which arguments of kvepp serve follow from it, and what else.
func TestConfigurations(t *testing.T) {
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) < 23 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		line, _, _ := bytes.Cut(text, []byte("\n"))
		want := strings.TrimPrefix(string(line), "# ")
		s, err := Translate([]string{"--config-file", file, "--allow-experimental-plugins"}, serveFlags())
		if says, refused := strings.CutPrefix(want, "refused: "); refused {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%s: %v, want %q", file, err, says)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		args, others, _ := strings.Cut(want, " | ")
		wanted := strings.Fields(args)
		got := slices.Sorted(slices.Values(s.Args))
		slices.Sort(wanted)
		if !slices.Equal(got, wanted) || shown(s) != others {
			t.Errorf("%s:\n%q %q, want\n%q %q", file, got, shown(s), wanted, others)
		}
		fromText, err := Translate([]string{"--config-text", string(text), "--allow-experimental-plugins"},
			serveFlags())
		if err != nil || !slices.Equal(fromText.Args, s.Args) {
			t.Errorf("%s as a text: %q, %v", file, fromText.Args, err)
		}
		if _, err := Translate([]string{"--config-file", file, "--allow-experimental-plugins", "--config-strict"},
			serveFlags()); err == nil || !strings.Contains(err.Error(), "approximated") {
			t.Errorf("%s, strictly: %v", file, err)
		}
	}
}

// TestStages: which Pods prefill and decode.
func TestStages(t *testing.T) {
	kind := func(file string) func(key, value string) string {
		s, err := Translate([]string{"--config-file", "testdata/" + file}, serveFlags())
		if err != nil {
			t.Fatal(err)
		}
		return func(key, value string) string {
			labels := map[string]string{key: value}
			if key == "" {
				labels = nil
			}
			role, takes := s.RoleOf(labels)
			if !takes {
				return "none"
			}
			return string(role)
		}
	}
	for _, c := range []struct{ file, key, value, want string }{
		{"kaito-roles.yaml", "kaito.sh/inference-role", "prefill", "prefill"},
		{"kaito-roles.yaml", "kaito.sh/inference-role", "decode", "decode"},
		{"kaito-roles.yaml", "llm-d.ai/role", "prefill", "none"},
		{"guide-prefill-decode.yaml", "example.com/step", "2", "decode"},
		{"kserve-prefill-decode.yaml", "llm-d.ai/role", "both", "aggregated"},
		{"kserve-prefill-decode.yaml", "llm-d.ai/role", "encode-prefill", "prefill"},
		{"kserve-prefill-decode.yaml", "llm-d.ai/role", "encode", "none"},
		{"kserve-prefill-decode.yaml", "", "", "decode"},
		{"kserve-bound-socket.yaml", "llm-d.ai/role", "prefill", "none"},
	} {
		if got := kind(c.file)(c.key, c.value); got != c.want {
			t.Errorf("%s: %s=%s: %s, want %s", c.file, c.key, c.value, got, c.want)
		}
	}
	met := func(parameters string, labels map[string]string) bool {
		s, err := Translate([]string{"--config-text", "apiVersion: llm-d.ai/v1\nplugins: [{type: " + parameters + "}]"},
			serveFlags())
		if err != nil {
			t.Fatal(err)
		}
		_, takes := s.RoleOf(labels)
		return takes
	}
	a := map[string]string{"a": "1"}
	for _, c := range []struct {
		parameters string
		want       [2]bool // with a=1, and without
	}{
		{"label-selector-filter, parameters: {matchExpressions: [{key: a, operator: NotIn, values: ['1']}]}",
			[2]bool{false, true}},
		{"label-selector-filter, parameters: {matchExpressions: [{key: a, operator: Exists}]}",
			[2]bool{true, false}},
		{"label-selector-filter, parameters: {matchExpressions: [{key: a, operator: DoesNotExist}]}",
			[2]bool{false, true}},
		{"by-label, parameters: {label: a, validValues: ['2'], allowsNoLabel: true}",
			[2]bool{false, true}},
		{"by-label, parameters: {label: a, validValues: ['1']}",
			[2]bool{true, false}},
	} {
		if met(c.parameters, a) != c.want[0] || met(c.parameters, nil) != c.want[1] {
			t.Errorf("%s: %v %v", c.parameters, met(c.parameters, a), met(c.parameters, nil))
		}
	}
}

// TestBadConfigurations: what llm-d's picker refuses is refused, with the plugin, the key, the nearest known one and
// the line.
func TestBadConfigurations(t *testing.T) {
	bomb := "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
	for i := 'b'; i < 'i'; i++ {
		bomb += fmt.Sprintf("%c: &%c [*%c,*%c,*%c,*%c,*%c,*%c,*%c,*%c]\n", i, i, i-1, i-1, i-1, i-1, i-1, i-1, i-1, i-1)
	}
	const v1 = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
	for _, c := range []struct{ text, says string }{
		{"apiVersion: llm-d.ai/v2\n",
			`line 1: apiVersion "llm-d.ai/v2": must be one of llm-d.ai/v1, `},
		{v1 + "kin: x\n",
			`line 3: unknown key "kin"`},
		{v1 + "kind: x\n",
			"line 3: kind: line 2 has the same key"},
		{"kind: Pod\n",
			`kind "Pod": must be EndpointPickerConfig`},
		{"- a\n",
			"line 1: must be an object"},
		{"{",
			"is not YAML"},
		{v1 + "---\na: b\n",
			"more than one document"},
		{v1 + "featureGates: [flowControll]\n",
			`feature gate "flowControll": llm-d has no such gate; did you mean flowControl?`},
		{v1 + "featureGates: [flowControl=x]\n",
			"must be NAME, NAME=true or NAME=false"},
		{v1 + "saturationDetector: {}\n",
			`unknown key "saturationDetector"`},
		{v1 + "plugins: {}\n",
			"line 3: plugins: must be a list"},
		{v1 + "plugins:\n- name: x\n",
			`line 4: plugin "x" has no type`},
		{v1 + "plugins:\n- type: queue-scorrer\n",
			"llm-d has no plugin of this type; did you mean queue-scorer?"},
		{v1 + "plugins:\n- type: queue-scorer\n- type: queue-scorer\n",
			"line 5: plugin \"queue-scorer\" (queue-scorer): " +
				"line 4 has a plugin of the same name"},
		{v1 + "plugins:\n- type: topology-affinity-scorer\n",
			"is experimental: give --allow-experimental-plugins"},
		{v1 + "plugins:\n- name: p\n  type: approx-prefix-cache-producer\n  parameters:\n    blocksizetoken: 64\n",
			`plugin "p" ` +
				`(approx-prefix-cache-producer): parameters: line 7: unknown key "blocksizetoken"; did you mean ` +
				`blockSizeTokens?`},
		{v1 + "plugins:\n- type: queue-scorer\n  parameters: {a: 1}\n",
			`unknown key "a"; it takes no keys`},
		{v1 + "plugins:\n- type: load-aware-scorer\n  parameters: {threshold: \"9\"}\n",
			`line 5: threshold: "9": must be a ` +
				"whole number, without quotes"},
		{v1 + "plugins:\n- type: mm-embeddings-cache-producer\n  parameters: {cacheSizeInMB: 9}\n",
			`did you mean ` +
				`cacheSizeInMBPerServer?`},
		{v1 + "plugins:\n- type: predicted-latency-producer\n  parameters: {contextTTL: 10m}\n",
			"must be a whole number"},
		{v1 + "plugins:\n- type: prefix-cache-scorer\n  parameters: {prefixMatchInfoProducerName: x}\n",
			`"x": no plugin has ` +
				"this name"},
		{v1 + "plugins:\n- type: queue-scorer\n- type: prefix-cache-scorer\n" +
			"  parameters: {prefixMatchInfoProducerName: queue-scorer}\n",
			"is a plugin of type queue-scorer, which is no producer"},
		{v1 + "plugins:\n- {name: a, type: max-saturation-detector, parameters: {detectors: [b]}}\n" +
			"- {name: b, type: max-saturation-detector, parameters: {detectors: [a]}}\n",
			"refers to itself: a -> b -> a"},
		{v1 + "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: p, plugins: [{pluginRef: queue-score}]}]\n",
			`pluginRef ` +
				`"queue-score": no plugin has this name; did you mean queue-scorer?`},
		{v1 + "schedulingProfiles: [{name: p}, {name: p}]\n",
			"another one has the same name"},
		{v1 + "schedulingProfiles: [{name: p}, {name: q}]\n",
			"need a profile handler"},
		{v1 + "schedulingProfiles: [{plugins: []}]\n",
			"has no name"},
		{v1 + "schedulingProfiles: [{name: p, plugins: [{weight: x}]}]\n",
			"must be a number"},
		{v1 + "plugins: [{type: single-profile-handler}]\nschedulingProfiles: [{name: p}, {name: q}]\n",
			"there are 2 " +
				"scheduling profiles"},
		{v1 + "plugins: [{type: single-profile-handler}, {type: disagg-profile-handler}]\n",
			"is a profile handler too"},
		{v1 + "plugins: [{type: disagg-profile-handler, parameters: {deciders: {prefill: x}}}]\n",
			"no plugin has this name"},
		{v1 + "plugins: [{type: disagg-profile-handler, parameters: {deciders: {}, decodeProfile: x}}]\n",
			"give one of the two"},
		{v1 + "flowControl: {priorityBands: [{priority: 1}, {priority: 1}]}\n",
			"two bands have priority 1"},
		{v1 + "flowControl: {priorityBands: [{orderingPolicyRef: round-robin-fairness-policy}]}\n",
			"which is no ordering"},
		{v1 + "flowControl: {maxBytes: many}\n",
			"must be a quantity"},
		{v1 + "flowControl: {defaultRequestTTL: 9}\n",
			"must be a duration"},
		{v1 + "plugins: [{type: header-profile-handler}, {type: request-attribute-reporter}]\n",
			"experimental"},
		{v1 + "plugins: [{type: request-attribute-reporter, parameters: {attributes: [{}]}}]\n",
			"refused: gateways bill"},
		{v1 + "plugins: [{type: multicluster-new-scorer}]\n",
			"experimental"},
		{v1 + "requestHandler: {propagatePriority: true}\n",
			"writes no priority"},
		{v1 + "plugins: [{type: metrics-data-source, parameters: {clientCertPath: /c}}]\n",
			"give both or neither"},
		{bomb,
			"unknown key"},
		{v1 + "plugins:\n- type: endpoint-attribute-weight-scorer\n  parameters:\n    weights:\n" + indent(bomb),
			"more than 100000 values"},
		{strings.Repeat("[", 20_000),
			""},
		{strings.Repeat("# x\n", 3<<20),
			"larger than 1048576 bytes"},
	} {
		s, err := Translate([]string{"--config-text", c.text}, serveFlags())
		if err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%.200s:\n%v, want %q (%+v)", c.text, err, c.says, s)
		}
	}
	big := filepath.Join(t.TempDir(), "big.yaml")
	if err := os.WriteFile(big, bytes.Repeat([]byte("a: b\n"), 2<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{big, "testdata/none.yaml"} {
		if _, err := Translate([]string{"--config-file", file}, serveFlags()); err == nil {
			t.Errorf("%s is read", file)
		}
	}
}

// indent puts the text below a key.
func indent(text string) string { return "      " + strings.ReplaceAll(text, "\n", "\n      ") }

// TestSections: parts of a configuration beside its plugins have a row, too.
func TestSections(t *testing.T) {
	for _, c := range [][2]string{
		{"dataLayer: {injectDefaults: false}",
			"injectDefaults): maps to --refresh-metrics-interval=0s"},
		{"dataLayer: {crossReplica: {syncerPluginRef: x}}",
			"crossReplica): ignored"},
		{"featureGates: [haPopulateNonLeaderDatastore=false]",
			"haPopulateNonLeaderDatastore): ignored"},
		{"plugins: [{type: core-metrics-extractor, parameters: {defaultEngine: trtllm-serve}}]",
			"approximated --engine=trtllm"},
		{"plugins: [{type: precise-prefix-cache-producer, parameters: {kvEventsConfig: {engineType: sglang}}}]",
			"--engine=sglang"},
		{"flowControl: {maxBytes: 1Gi}",
			"flowControl: ignored"},
		{"requestHandler: {parsers: [{pluginRef: openai-parser}]}",
			"parsers): approximated"},
		{"plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: p}]",
			"nothing refers to it"},
		{"plugins: [{type: outlen-bucket, parameters: {a: {b: 1}}}]",
			"needs --allow-experimental-plugins"},
	} {
		read, err := read("apiVersion: llm-d.ai/v1\n"+c[0], nil, true)
		if err != nil {
			t.Errorf("%s: %v", c[0], err)
			continue
		}
		var rows []Row
		for _, row := range read.means(Settings{}).rows {
			rows = append(rows, *row)
		}
		if got := Table(rows); !strings.Contains(got, c[1]) {
			t.Errorf("%s: want %q in\n%s", c[0], c[1], got)
		}
	}
}

// TestTypes: each row has what its verdict needs, and what it means reads only parameters of its shape.
func TestTypes(t *testing.T) {
	seen := map[string]bool{}
	for i := range Plugins {
		p := &Plugins[i]
		if seen[p.Type] || p.Roles == "" || p.Says == "" || p.Verdict == "" {
			t.Errorf("%+v", p)
		}
		seen[p.Type] = true
		if p.Type == multicluster {
			continue
		}
		s, err := read("apiVersion: llm-d.ai/v1\nplugins: [{type: "+p.Type+"}]\n", nil, true)
		if err != nil {
			t.Errorf("%s: %v", p.Type, err)
			continue
		}
		if rows := s.means(Settings{}).rows; rows[0].Type != p.Type || rows[0].Says == "" {
			t.Errorf("%s: %+v", p.Type, rows[0])
		}
	}
	if len(seen) < 90 {
		t.Errorf("%d types", len(seen))
	}
}

func FuzzConfiguration(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.yaml")
	for _, file := range files {
		text, _ := os.ReadFile(file)
		f.Add(string(text))
	}
	f.Fuzz(func(_ *testing.T, text string) {
		if s, err := Translate([]string{"--config-text=" + text}, serveFlags()); err == nil && s.RoleOf != nil {
			s.RoleOf(map[string]string{"a": "b"})
		}
	})
}

func TestQuantities(t *testing.T) {
	for text, want := range map[string]int{"": 0, "20": 20, "4k": 4000, "2Gi": 2 << 30, "512Mi": 512 << 20, "1G": 1e9,
		"1.5k": 1500, "500m": 1, "1e3": 1000, "-1": 0} {
		v := (*value)(shapeOf(`"` + text + `"`))
		if got := v.quantity(); got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
}
