package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/manifests/envoy"
	"kvepp/prompt/fetch"
	"kvepp/serve/client"
	"kvepp/serve/llmd"
)

// othersFlags are the flags of other programs that the pages name, by program. Flags that kvepp has too are not listed.
var othersFlags = map[string]string{
	"tool-call-parser": "SGLang", "tool-server": "SGLang",
	"kv-events-config": "vLLM and SGLang", "reasoning-parser": "vLLM and SGLang",
	"served-model-name": "vLLM and SGLang", "api-key": "vLLM and SGLang",
	"enable-prompt-tokens-details": "vLLM", "enable-prefix-caching": "vLLM", "enable-scale-out": "vLLM",
	"lora-modules": "vLLM", "shutdown-timeout": "vLLM", "disable-hybrid-kv-cache-manager": "vLLM",
	"page-size": "SGLang", "enable-cache-report": "SGLang", "enable-metrics": "SGLang", "disable-radix-cache": "SGLang",
	"disable-hybrid-swa-memory": "SGLang",
	"http-port":                 "Dynamo's frontend", "namespace": "Dynamo's frontend", "endpoint": "Dynamo's workers",
	"publish-kv-events":   "Dynamo's worker of TensorRT-LLM",
	"disable-hot-restart": "Envoy", "retry": "curl", "retry-connrefused": "curl",
	"profile": "docker compose", "detach": "docker compose", "rm": "docker compose", "no-deps": "docker compose",
	"set": "helm", "type": "kubectl", "for": "kubectl", "all": "kubectl and skopeo",
	"ignore-missing": "sha256sum", "now": "systemctl",
}

// othersMetrics are the metrics of other endpoint pickers that the pages name.
var othersMetrics = []string{
	"dynamo_epp_requests_total", "dynamo_epp_request_duration_seconds", "dynamo_epp_streams_inflight",
	"dynamo_epp_phase_duration_seconds",
	"dynamo_epp_first_response_body_seconds", "dynamo_epp_cached_tokens", "dynamo_epp_observed_reuse_tokens_total",
	"dynamo_epp_predicted_cache_hit_rate", "dynamo_epp_lifecycle_callbacks_total",
	"dynamo_kvrouter_kv_cache_events_applied",
	"dynamo_kvrouter_kv_cache_event_warnings",
	"dynamo_component_router_kv_event_source_mismatch_workers", "dynamo_component_router_overlap_blocks_lost",
	"dynamo_kvindexer_models", "dynamo_router_overhead_*_ms",
}

// pages returns the Markdown files of the tree, by path.
func pages(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "manifests/*.md", "test/bench/*.md",
		"examples/*/*.md"} {
		files, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil || len(files) == 0 && pattern != "docs/*/*.md" {
			t.Fatalf("%s: no pages (%v)", pattern, err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all[strings.TrimPrefix(filepath.ToSlash(f), "../../")] = string(text)
		}
	}
	return all
}

// line returns a position in a text as a line number.
func line(text string, at int) int { return 1 + strings.Count(text[:at], "\n") }

// TestPagesNameFlags checks that the flags in pages exist.
func TestPagesNameFlags(t *testing.T) {
	ofCommands := []*pflag.FlagSet{
		checkFlags(new(checkOptions)),
		indexerFlags(new(indexerOptions)),
		selectFlags(new(selectOptions)),
		tokenizeFlags(new(tokenizeOptions)),
		fetchFlags(new(fetch.Config)),
		replayFlags(new(replayOptions)),
		envoyFlags(new(envoy.Config)),
		clientFlags(&client.Config{Command: "drain"}),
		clientFlags(&client.Config{Command: "ladder"}),
		clientFlags(&client.Config{Command: "decisions"}),
		clientFlags(&client.Config{Command: "explain"}),
	}
	known := func(name string) bool {
		return name == "help" || absentFlags[name] != "" ||
			slices.ContainsFunc(llmd.Flags, func(f llmd.Flag) bool { return f.Name == name }) ||
			slices.ContainsFunc(ofCommands, func(f *pflag.FlagSet) bool { return f.Lookup(name) != nil })
	}
	if known("no-such-flag") || !known("probe") || !known("no-router-kv-events") {
		t.Fatal("the flag sets differ from those of the commands")
	}
	flag := regexp.MustCompile(`(?:^|[^-\w])--([a-z][a-z0-9-]*[a-z0-9]|v)(\b)(-?\*)?`)
	unused := maps.Clone(othersFlags)
	for name, text := range pages(t) {
		if strings.HasPrefix(name, "test/bench/") {
			continue // its flags belong to the benchmark programs
		}
		// its quoted output names flags that do not exist; TestMistakes in e2e writes it
		if name == "docs/mistakes.md" {
			text = fences.ReplaceAllString(text, "")
		}
		for _, at := range flag.FindAllStringSubmatchIndex(text, -1) {
			f := text[at[2]:at[3]]
			delete(unused, f)
			switch {
			case at[6] >= 0: // a group of flags such as --aic-*
			case known(f) && othersFlags[f] != "":
				t.Errorf("kvepp has --%s too: remove it from othersFlags", f)
			case !known(f) && othersFlags[f] == "":
				t.Errorf(
					"%s, line %d: kvepp has no flag --%s, and othersFlags does not list it",
					name,
					line(text, at[2]),
					f,
				)
			}
		}
	}
	for f, of := range unused {
		t.Errorf("no page names --%s of %s: remove it from othersFlags", f, of)
	}
}

// addSourceMetrics adds the metrics that the sources name, without labels, to those that are there.
func addSourceMetrics(t *testing.T, labels map[string]map[string]bool) {
	t.Helper()
	for _, name := range metricLiterals(t) {
		if labels[name] == nil {
			labels[name] = map[string]bool{}
		}
	}
}

// TestMetricsHaveReaders: a page other than the list of all metrics, an alert or a dashboard names each metric.
// docs/operations.md and docs/hit-rate.md name those that dashboards of other projects read, without the beginning that
// they share.
func TestMetricsHaveReaders(t *testing.T) {
	readers := pages(t)
	all := regexp.MustCompile("(?m)^\\| `([a-z0-9_]+)`").FindAllStringSubmatch(readers["docs/metrics.md"], -1)
	if len(all) < 100 {
		t.Fatalf("docs/metrics.md lists %d metrics", len(all))
	}
	delete(readers, "docs/metrics.md")
	delete(readers, "CHANGELOG.md")
	for _, pattern := range []string{"alerts/*", "dashboards/*"} {
		files, err := filepath.Glob("../../manifests/chart/" + pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no %s (%v)", pattern, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			readers[file] = string(text)
		}
	}
	named := map[string]bool{}
	for _, text := range readers {
		for _, word := range regexp.MustCompile(`\b[a-z]+_[a-z0-9_]+\b`).FindAllString(text, -1) {
			named[word] = true
		}
	}
	for _, ends := range regexp.MustCompile("`([a-z_]+\\*?)`").FindAllStringSubmatch(
		readers["docs/operations.md"]+readers["docs/hit-rate.md"], -1) {
		for _, beginning := range []string{"dynamo_component_router_", "dynamo_frontend_", "dynamo_frontend_router_",
			"inference_objective_", "inference_pool_", "inference_extension_"} {
			named[beginning+ends[1]] = true
		}
	}
	for _, m := range all {
		if name := m[1]; !slices.ContainsFunc(slices.Collect(maps.Keys(named)), func(n string) bool {
			base, group := strings.CutSuffix(n, "*")
			return n == name || group && strings.HasPrefix(name, base) || slices.ContainsFunc(
				[]string{"_bucket", "_sum", "_count"}, func(part string) bool { return n == name+part })
		}) {
			t.Errorf("no page, alert or dashboard names %s: name it where an operator needs it, or remove it", name)
		}
	}
}

// TestPagesNameMetrics checks that the metrics and labels in pages exist.
func TestPagesNameMetrics(t *testing.T) {
	kvepp := reserve(t)
	kvepp.writeEndpoints("endpoints:\n- {name: w, address: 127.0.0.1:1, kvEvents: tcp://127.0.0.1:2}\n")
	kvepp.start("--router-queue-threshold=2", "--model=m="+t.TempDir())
	kvepp.awaitReady()
	shown, err := kvepp.metrics()
	if err != nil {
		t.Fatal(err)
	}
	// Labels of the metrics that a kvepp with one endpoint exports; and, without labels, the names of metrics that it
	// exports elsewhere (in Kubernetes, or as `kvepp select`).
	labels := map[string]map[string]bool{}
	for _, family := range regexp.MustCompile(`(?m)^# TYPE (\S+)`).FindAllStringSubmatch(shown, -1) {
		labels[family[1]] = map[string]bool{}
	}
	for _, sample := range regexp.MustCompile(`(?m)^([a-z_0-9]+)\{([^}]*)\}`).FindAllStringSubmatch(shown, -1) {
		for _, label := range regexp.MustCompile(`([a-z_]+)=`).FindAllStringSubmatch(sample[2], -1) {
			if labels[sample[1]] != nil {
				labels[sample[1]][label[1]] = true
			}
		}
	}
	addSourceMetrics(t, labels)
	labels["inference_pool_per_pod_queue_size"] = map[string]bool{} // has series only for engines whose load is known
	names := slices.Collect(maps.Keys(labels))
	exists := func(name string) bool {
		return slices.ContainsFunc(names, func(n string) bool {
			for _, part := range []string{"", "_bucket", "_sum", "_count"} {
				if ok, err := path.Match(name, n+part); ok && err == nil {
					return true
				}
			}
			return false
		})
	}
	if exists("kvepp_nonsense") || !exists("kvepp_workers") || !exists("kvepp_leader") ||
		!exists("kvepp_phase_seconds_bucket") ||
		!exists("inference_pool_*") ||
		exists("kvepp_w") {
		t.Fatal("the list of metrics is wrong")
	}

	metric := regexp.MustCompile(`\b((?:kvepp|inference|dynamo)_[a-z0-9_*]*[a-z0-9*])(\{[^}\n]*\})?`)
	unused := slices.Clone(othersMetrics)
	for name, text := range pages(t) {
		if name == "CHANGELOG.md" {
			continue // it also names those that were removed
		}
		for _, at := range metric.FindAllStringSubmatchIndex(text, -1) {
			m := text[at[2]:at[3]]
			if i := slices.Index(othersMetrics, m); i >= 0 {
				unused = slices.DeleteFunc(unused, func(u string) bool { return u == m })
				if exists(m) {
					t.Errorf("kvepp has %s: remove it from othersMetrics", m)
				}
				continue
			}
			if !exists(m) {
				t.Errorf(
					"%s, line %d: kvepp has no metric %s, and othersMetrics does not list it",
					name,
					line(text, at[0]),
					m,
				)
				continue
			}
			if at[4] < 0 || len(labels[m]) == 0 {
				continue
			}
			for _, pair := range strings.Split(strings.Trim(text[at[4]:at[5]], "{}"), ",") {
				label, _, _ := strings.Cut(pair, "=")
				if label = strings.TrimRight(strings.TrimSpace(label), "!"); !labels[m][label] && label != "" {
					t.Errorf("%s, line %d: %s has no label %s", name, line(text, at[0]), m, label)
				}
			}
		}
	}
	for _, m := range unused {
		t.Errorf("no page names %s: remove it from othersMetrics", m)
	}
}

// anchors returns the link targets of a page: its headings, in the form that forges use.
func anchors(text string) map[string]bool {
	all := map[string]bool{}
	drop := regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(fences.ReplaceAllString(text, ""),
		-1) {
		all[strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(heading[1]), ""), " ", "-")] = true
	}
	return all
}

var fences = regexp.MustCompile("(?ms)^```.*?^```$")

// TestPagesLink checks that links between pages, and to files of the tree, have a target.
func TestPagesLink(t *testing.T) {
	if a := anchors("# A `b`: c, d-e\n```\n# no heading\n```\n"); !a["a-b-c-d-e"] || len(a) != 1 {
		t.Fatalf("anchors: %v", a)
	}
	all, links := pages(t), 0
	for name, text := range all {
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(fences.ReplaceAllString(text,
			""), -1) {
			if strings.Contains(link[1], "://") {
				continue
			}
			links++
			file, heading, _ := strings.Cut(link[1], "#")
			to := name
			if file != "" {
				to = path.Join(path.Dir(name), file)
			}
			if _, err := os.Stat(filepath.Join("../..", to)); errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s: %s does not exist", name, link[1])
			} else if heading != "" && !anchors(all[to])[heading] {
				t.Errorf("%s: %s has no heading %s", name, to, heading)
			}
		}
	}
	if links == 0 {
		t.Error("the pages have no links")
	}
}

// TestPagesRun checks that kvepp accepts the commands in the pages.
func TestPagesRun(t *testing.T) {
	command := regexp.MustCompile(`(?m)(?:bin|-- )/kvepp ([a-z]+)([^\n<>]*)`)
	commands := map[string]int{}
	sample, _ := configSample(t)
	for name, text := range pages(t) {
		for _, block := range fences.FindAllString(text, -1) {
			for _, c := range command.FindAllStringSubmatch(strings.ReplaceAll(block, "\\\n", " "), -1) {
				if strings.Contains(c[2], "...") {
					continue // the reader fills in the rest
				}
				args := strings.Fields(strings.TrimSuffix(c[2], " &"))
				if i := slices.Index(args, "kvepp.yaml"); i >= 0 {
					args[i] = sample
				}
				var err error
				switch none := func(string) string { return "" }; c[1] {
				case "serve":
					err = parseServe(new(options), args, none)
				case "check":
					var o checkOptions
					err = parseWith(&o.options, checkFlags(&o), args, none)
				case "indexer":
					err = parseIndexer(new(indexerOptions), args, none)
				case "select":
					err = parseSelect(new(selectOptions), args, none)
				case "fetch":
					err = parseFetch(new(fetch.Config), args, none)
				case "tokenize":
					err = tokenizeFlags(new(tokenizeOptions)).Parse(args)
				case "envoy":
					err = parseEnvoy(new(envoy.Config), args, none)
				case "workers", "cordon", "drain", "uncordon", "ladder", "decisions", "explain":
					err = parseClient(&client.Config{Command: c[1]}, args, none)
				default:
					t.Errorf("%s: this test does not know the command kvepp %s", name, c[1])
				}
				if commands[c[1]]++; err != nil {
					t.Errorf("%s: kvepp %s %s: %v", name, c[1], strings.Join(args, " "), err)
				}
			}
		}
	}
	for _, c := range []string{"serve", "check", "indexer", "select", "tokenize", "fetch", "workers", "drain"} {
		if commands[c] == 0 {
			t.Errorf("no page runs kvepp %s", c)
		}
	}
}

// TestPartsAreShown wants each part of a cost explained: words in decisions, a colour and a name on the web page.
func TestPartsAreShown(t *testing.T) {
	text := map[string]string{}
	for _, name := range []string{"scoring/parts.go", "serve/admin/decisions.go",
		"serve/web/assets/kvepp.css", "docs/web-page.md"} {
		b, err := os.ReadFile(filepath.Join("../..", name))
		if err != nil {
			t.Fatal(err)
		}
		text[name] = string(b)
	}
	parts := regexp.MustCompile(`(?m)^\t(Part[A-Z]\w*) += "(\w+)"`).FindAllStringSubmatch(text["scoring/parts.go"], -1)
	if len(parts) < 9 {
		t.Fatalf("found %d parts in scoring/parts.go, want at least 9", len(parts))
	}
	for _, part := range parts {
		for name, want := range map[string]string{
			"serve/admin/decisions.go":   "scoring." + part[1] + ":",
			"serve/web/assets/kvepp.css": ".p-" + part[2],
			"docs/web-page.md":           "`" + part[2] + "`",
		} {
			if !strings.Contains(text[name], want) {
				t.Errorf("%s lacks %s for scoring.%s", name, want, part[1])
			}
		}
	}
}

// TestSecurityNumbers checks the numbers in docs/security.md against the defaults of flags and the constants that its
// tables name.
func TestSecurityNumbers(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	flags, compared := serveFlags(new(options)), 0
	for _, cells := range regexp.MustCompile("(?m)^\\| ([^|]*) \\| ([^|]*) \\| `([^`|]*)` \\|").FindAllStringSubmatch(
		pages(t)["docs/security.md"], -1) {
		what, stated, name := cells[1], cells[2], cells[3]
		number := regexp.MustCompile(`^([\d,]+)(?: (KiB|MiB|GiB|s))?`).FindStringSubmatch(stated)
		if number == nil {
			continue // no limit, or one that follows from the memory limit
		}
		n, err := strconv.ParseInt(strings.ReplaceAll(number[1], ",", ""), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		want := n * map[string]int64{"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30,
			"s": int64(time.Second)}[number[2]]
		var got int64
		if flag, ok := strings.CutPrefix(name, "--"); ok {
			f := flags.Lookup(flag)
			if f == nil {
				t.Errorf("%s: no flag %s", what, name)
				continue
			}
			if f.DefValue == "0" {
				continue // 0: the limit follows from the memory limit
			}
			if d, err := time.ParseDuration(f.DefValue); err == nil {
				got = int64(d)
			} else if got, err = strconv.ParseInt(f.DefValue, 10, 64); err != nil {
				t.Errorf("%s: the default of %s is %s", what, name, f.DefValue)
				continue
			}
		} else if folder, constant, ok := strings.Cut(name, "."); ok && !strings.Contains(name, "/") {
			if got, err = constantOf(folder, constant); err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
		} else {
			continue
		}
		if compared++; got != want {
			t.Errorf("%s: the page says %s, and %s is %d", what, stated, name, got)
		}
	}
	if compared < 20 {
		t.Errorf("%d numbers were compared, want at least 20", compared)
	}
}

// constantOf returns the value of a constant of the package whose folder has the given last part.
func constantOf(folder, name string) (int64, error) {
	var files []string
	if folder == "main" {
		folder = "kvepp"
	}
	for _, at := range []string{"../../", "../../*/", "../../*/*/"} {
		found, err := filepath.Glob(at + folder + "/*.go")
		if err != nil {
			return 0, err
		}
		files = append(files, found...)
	}
	for _, file := range files {
		tree, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			return 0, err
		}
		for _, d := range tree.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok || g.Tok != token.CONST {
				continue
			}
			for _, s := range g.Specs {
				if v := s.(*ast.ValueSpec); len(v.Values) == 1 && v.Names[0].Name == name {
					text := strings.ReplaceAll(types.ExprString(v.Values[0]), "time.Second", "1000000000")
					value, err := types.Eval(token.NewFileSet(), nil, token.NoPos, text)
					if err != nil {
						return 0, fmt.Errorf("%s.%s = %s: %w", folder, name, text, err)
					}
					n, exact := constant.Int64Val(value.Value)
					if !exact {
						return 0, fmt.Errorf("%s.%s = %s is not an integer", folder, name, text)
					}
					return n, nil
				}
			}
		}
	}
	return 0, fmt.Errorf("no constant %s.%s", folder, name)
}
