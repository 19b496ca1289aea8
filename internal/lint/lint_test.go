package lint

import (
	"bytes"
	"encoding/json"
	"errors"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const root = "../.."

// may lists, for each package, which of ours it may import. ARCHITECTURE.md has the same table: change both in the
// commit that changes the code. "*" is every package.
var may = map[string]string{
	"kvblock":               "",
	"kvblock/kvblocktest":   "",
	"prompt/jinja":          "prompt/values",
	"prompt/values":         "",
	"zmqsub":                "",
	"internal/natssub":      "internal/loglimit internal/useragent",
	"internal/requestplane": "",
	"internal/metrics":      "",
	"internal/loglimit":     "",
	"internal/boundedfile":  "",
	"internal/connlimit":    "",
	"internal/flags":        "internal/boundedfile internal/suggest",
	"internal/hugepage":     "",
	"internal/prefetch":     "",
	"internal/suggest":      "",
	"internal/useragent":    "",
	"serve/join": "internal/boundedfile internal/flags internal/loglimit internal/metrics internal/suggest pool " +
		"pool/dynamo " +
		"pool/enginemetrics pool/engineversion pool/kube prompt kvblock serve/models",
	"serve/models": "indexer/feed internal/flags internal/metrics kvblock pool pool/dynamo pool/engineversion prompt " +
		"prompt/body prompt/remote router router/modelrewrite",
	"serve/check": "indexer kvblock pool pool/dynamo pool/enginemetrics prompt prompt/remote zmqsub prompt/body " +
		"internal/metrics internal/useragent internal/boundedfile internal/flags",
	"internal/tracing":     "internal/metrics internal/useragent",
	"extproc/extproctest":  "",
	"serve/check/protocol": "serve/check internal/useragent",
	"prompt/body":          "prompt/values internal/overrides",
	"router/budget":        "prompt/body",
	"prompt": "prompt/bpe prompt/encoders prompt/jinja prompt/values kvblock prompt/body " +
		"internal/boundedfile internal/flags internal/suggest",
	"prompt/encoders":        "prompt/jinja prompt/values",
	"prompt/fetch":           "internal/flags internal/useragent",
	"prompt/fetch/fetchtest": "",
	"prompt/tokenize":        "internal/flags kvblock prompt prompt/body",
	"prompt/bpe":             "kvblock prompt/values internal/prefetch",
	"prompt/remote": "prompt prompt/values kvblock prompt/body internal/metrics internal/loglimit " +
		"internal/useragent",
	"test/parity":        "prompt prompt/remote kvblock prompt/jinja prompt/values prompt/body internal/metrics",
	"internal/overrides": "",
	"scoring":            "kvblock internal/flags internal/metrics internal/overrides",
	"pool":               "kvblock internal/suggest",
	"indexer":            "kvblock internal/flags internal/hugepage internal/metrics internal/prefetch",
	"pool/dynamo":        "kvblock pool internal/boundedfile internal/useragent",
	"pool/kube": "kvblock pool pool/dynamo router/modelrewrite internal/flags internal/metrics " +
		"internal/useragent",
	"pool/enginemetrics": "kvblock internal/flags internal/metrics internal/natssub pool zmqsub internal/useragent",
	"pool/engineversion": "internal/useragent",
	"test/parity/events": "test/harness/stack indexer/feed indexer kvblock pool pool/dynamo prompt " +
		"prompt/body internal/metrics",
	"indexer/feed": "indexer kvblock internal/flags internal/natssub internal/requestplane pool zmqsub " +
		"internal/loglimit internal/metrics",
	"router/eject":        "internal/flags kvblock pool pool/enginemetrics internal/metrics",
	"router/queue":        "internal/boundedfile internal/flags internal/suggest",
	"scoring/replica":     "kvblock pool router/session scoring",
	"router/session":      "kvblock internal/flags internal/metrics",
	"router/admission":    "kvblock internal/flags",
	"router/record":       "internal/flags internal/metrics kvblock",
	"router/ladder":       "kvblock internal/prefetch",
	"manifests/envoy":     "internal/boundedfile internal/flags pool",
	"internal/chart":      "",
	"router/modelrewrite": "",
	"router": "router/admission router/budget router/eject router/ladder router/modelrewrite router/queue " +
		"router/record router/session scoring indexer pool prompt prompt/body prompt/remote kvblock " +
		"internal/flags internal/loglimit internal/metrics internal/overrides internal/tracing",
	"replay":            "router/admission indexer kvblock router/queue scoring router/session",
	"replay/report":     "internal/boundedfile internal/chart internal/flags pool replay",
	"serve/api":         "internal/metrics",
	"serve/api/apitest": "",
	"serve/dynamo/indexer": "indexer indexer/feed serve/api internal/connlimit internal/useragent kvblock pool " +
		"scoring",
	"serve/dynamo/selector": "indexer indexer/feed serve/api serve/dynamo/indexer internal/metrics " +
		"internal/overrides kvblock pool router/queue router scoring router/session internal/flags",
	"serve/replicas": "internal/metrics pool router router/session scoring scoring/replica serve/api serve/check " +
		"serve/dynamo/indexer serve/secrets",
	"serve/client": "internal/flags internal/useragent pool router/eject router/ladder serve/admin serve/api",
	"serve/web":    "",
	"serve/admin": "serve/api prompt/body router/ladder internal/flags internal/suggest router router/eject scoring " +
		"indexer indexer/feed internal/metrics pool pool/enginemetrics router/session",

	"serve/listen": "extproc internal/connlimit internal/metrics serve/logs serve/secrets",
	"serve/llmd": "extproc internal/boundedfile internal/flags internal/metrics internal/suggest pool " +
		"router router/queue scoring serve/models",
	"serve/logs":                "internal/flags internal/loglimit internal/metrics router/record",
	"serve/secrets":             "internal/boundedfile internal/flags internal/metrics",
	"serve/secrets/secretstest": "",

	"extproc": "router router/eject prompt/body router/budget internal/flags internal/metrics " +
		"internal/tracing internal/loglimit",
	"cmd/kvepp":          "*",
	"internal/lint":      "",
	"test/bench/charts":  "internal/chart",
	"test/bench/cputime": "",
	"test/bench/events": "test/bench/cputime indexer indexer/feed kvblock kvblock/kvblocktest pool scoring zmqsub " +
		"internal/metrics",
	"test/bench/events/binding": "test/bench/cputime",
	"test/bench/index":          "test/bench/cputime indexer kvblock",
	"test/bench/path":           "internal/chart test/harness/apiserver test/harness/process",
	"test/bench/quality": "internal/chart prompt prompt/body replay test/harness/apiserver test/harness/process " +
		"test/harness/stack",
	"test/bench/queue":           "router/queue test/harness/stack",
	"test/bench/replicas-replay": "replay scoring",
	"test/bench/tokenizers":      "prompt kvblock prompt/body",
	"e2e": "test/harness/process test/harness/stack prompt/body internal/bodytest " +
		"internal/tracing/tracingtest kvblock kvblock/kvblocktest router/queue prompt zmqsub",
	"test/harness/process": "",
	"test/harness/browser": "",
	"test/harness/parts":   "",
	"test/harness/stack":   "test/harness/process",
	"examples/demo":        "test/harness/browser test/harness/process test/harness/stack",
	"test/aigw":            "test/harness/parts test/harness/process test/harness/stack",
	"test/kube": "test/harness/apiserver test/harness/process test/harness/stack kvblock " +
		"kvblock/kvblocktest pool/kube serve/secrets/secretstest",
	"test/harness/apiserver": "test/harness/process",
	"test/kind":              "test/harness/process test/harness/stack",
	"examples/engine":        "prompt/body kvblock prompt",
	"e2e/manifests":          "test/harness/apiserver test/harness/process",
	"test/vllm":              "test/harness/process test/harness/stack prompt/body kvblock prompt",

	"internal/logtest":             "",
	"internal/bodytest":            "",
	"internal/metrics/metricstest": "",
	"internal/tracing/tracingtest": "",
}

// only lists what few packages may import from elsewhere.
var only = map[string][]string{
	"github.com/envoyproxy/": {"extproc", "extproc/extproctest", "serve/check/protocol", "serve/listen",
		"test/bench/path"},
	"google.golang.org/grpc": {
		"extproc",
		"extproc/extproctest",
		"serve/check/protocol",
		"serve/listen",
		"serve/logs",
		"test/bench/path",
		"internal/connlimit",
		"internal/tracing",
		"internal/tracing/tracingtest",
	},
	"github.com/pebbe/zmq4": {
		"zmqsub", "test/bench/events", "test/bench/events/binding", "test/bench/quality", "examples/engine",
		"test/harness/stack",
	},
	"github.com/nats-io/": {"internal/natssub"},
	"github.com/prometheus/client_golang/": {
		"internal/metrics", "internal/metrics/metricstest", "cmd/kvepp", "serve/listen", "serve/logs",
	},
	"go.opentelemetry.io/":       {"internal/tracing", "internal/tracing/tracingtest"},
	"k8s.io/":                    {"pool/kube", "serve/llmd", "test/harness/apiserver", "e2e/manifests"},
	"sigs.k8s.io/":               {"pool/kube", "test/harness/apiserver", "e2e/manifests"},
	"github.com/fsnotify/":       {"internal/boundedfile"},
	"github.com/zeebo/xxh3":      {"kvblock"},
	"lukechampine.com/blake3":    {"pool/dynamo"},
	"golang.org/x/text/":         {"prompt/jinja", "prompt/bpe"},
	"github.com/dlclark/regexp2": {"prompt/bpe"},
	"github.com/spf13/pflag": { // packages that declare their own flags
		"cmd/kvepp", "internal/flags", "extproc", "indexer", "indexer/feed", "manifests/envoy", "pool/enginemetrics",
		"pool/kube", "prompt", "prompt/fetch", "prompt/tokenize", "replay/report", "router", "router/admission",
		"router/eject", "router/queue", "router/record", "router/session", "scoring",
		"serve/check", "serve/client", "serve/dynamo/indexer", "serve/dynamo/selector",
		"serve/join", "serve/listen", "serve/llmd", "serve/logs", "serve/models", "serve/replicas", "serve/secrets",
	},
}

type pkg struct {
	ImportPath string
	Dir        string
	Imports    []string
	GoFiles    []string
	CgoFiles   []string
}

// packages returns the packages of the tree.
func packages(t *testing.T) []pkg {
	t.Helper()
	all, err := listPackages()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	return all
}

var listPackages = sync.OnceValues(func() (all []pkg, err error) {
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Imports,GoFiles,CgoFiles", "./...")
	cmd.Dir = root
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return all, nil
		case err != nil:
			return nil, err
		}
		all = append(all, p)
	}
})

func TestImports(t *testing.T) {
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, "kvepp/")
		allowed, listed := may[name]
		if !listed {
			t.Errorf("package %s is not in the import table: add it here and in ARCHITECTURE.md", name)
			continue
		}
		for _, i := range p.Imports {
			if ours, ok := strings.CutPrefix(i, "kvepp/"); ok && allowed != "*" &&
				!slices.Contains(strings.Fields(allowed), ours) {
				t.Errorf("%s imports %s, which the import table does not allow", name, ours)
			}
			for prefix, who := range only {
				if strings.HasPrefix(i, prefix) && !slices.Contains(who, name) {
					t.Errorf("%s imports %s, which is for %v alone", name, i, who)
				}
			}
		}
	}
}

// ofTests matches packages that no program for users has in it. ARCHITECTURE.md leaves them out.
var ofTests = regexp.MustCompile(`^(e2e|test|bench|examples|internal/lint)(/|$)|test$`)

// TestTableIsDrawn compares the table with that of ARCHITECTURE.md.
func TestTableIsDrawn(t *testing.T) {
	text := read(t, "ARCHITECTURE.md")
	drawn := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\| ([^|]*) \\|").FindAllStringSubmatch(text, -1) {
		drawn[row[1]] = strings.Join(strings.Fields(strings.NewReplacer("`", "", ",", "").Replace(row[2])), " ")
	}
	for name, allowed := range may {
		if _, err := os.Stat(filepath.Join(root, name)); errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the table has %s, which is gone", name)
		}
		if ofTests.MatchString(name) {
			continue
		}
		want := map[string]string{"": "nothing of ours", "*": "all that it wires"}[allowed]
		if want == "" {
			want = allowed
		}
		if drawn[name] != want {
			t.Errorf("ARCHITECTURE.md says %s imports %q, the table %q", name, drawn[name], want)
		}
	}
}

// TestTableHasLines compares the table's numbers of lines with the packages. A number may be off by a quarter, so that
// not every commit changes it.
func TestTableHasLines(t *testing.T) {
	stated := map[string]int{}
	row := regexp.MustCompile("(?m)^\\| `([^`]+)` \\| [^|]* \\| (\\d+) \\|")
	for _, row := range row.FindAllStringSubmatch(read(t, "ARCHITECTURE.md"), -1) {
		n, err := strconv.Atoi(row[2])
		if err != nil {
			t.Fatal(err)
		}
		stated[row[1]] = n
	}
	for _, p := range packages(t) {
		name := strings.TrimPrefix(p.ImportPath, "kvepp/")
		if ofTests.MatchString(name) {
			continue
		}
		lines := 0
		for _, f := range slices.Concat(p.GoFiles, p.CgoFiles) {
			lines += strings.Count(read(t, filepath.Join(name, f)), "\n")
		}
		if got := stated[name]; got < lines*4/5-50 || got > lines*5/4+50 {
			t.Errorf("ARCHITECTURE.md: %s has %d lines of Go, and the table says %d", name, lines, got)
		}
	}
}

// TestDependenciesHaveReasons wants each direct dependency explained.
func TestDependenciesHaveReasons(t *testing.T) {
	cmd := exec.Command("go", "list", "-m", "-f", "{{if not (or .Indirect .Main)}}{{.Path}}{{end}}", "all")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list -m: %v", err)
	}
	text := read(t, "ARCHITECTURE.md")
	for _, module := range strings.Fields(string(out)) {
		if !strings.Contains(text, "`"+module+"`") {
			t.Errorf("ARCHITECTURE.md does not say why %s is a dependency", module)
		}
	}
}

// TestPackageComments wants every package to say what it is, owns and never does, and how it may be called.
func TestPackageComments(t *testing.T) {
	for _, p := range packages(t) {
		if len(p.GoFiles) == 0 {
			continue // tests alone
		}
		found := false
		for _, f := range p.GoFiles {
			file, err := parser.ParseFile(
				token.NewFileSet(),
				filepath.Join(p.Dir, f),
				nil,
				parser.PackageClauseOnly|parser.ParseComments,
			)
			if err != nil {
				t.Fatal(err)
			}
			found = found || file.Doc != nil && len(file.Doc.Text()) > 40
		}
		if !found {
			t.Errorf("package %s has no comment", p.ImportPath)
		}
	}
}

// TestNames refuses names that say nothing, tests that wait for time, and what ties the tree to one machine.
func TestNames(t *testing.T) {
	bad := []struct {
		ending  string
		parts   []string // a match contains one of these; searching for them first is much faster
		pattern *regexp.Regexp
		why     string
	}{
		{
			"_test.go",
			[]string{"time.Sleep"},
			regexp.MustCompile(`\btime\.Sleep\(`),
			"tests wait for a condition, not for time",
		},
		{
			".go",
			[]string{"package "},
			regexp.MustCompile(`(?m)^package (utils?|common|types|helpers?|base|manager)$`),
			"a package is named for what it is",
		},
		{
			"",
			[]string{"/root/", "/home/", "/work/"},
			regexp.MustCompile(`(^|[\s"'=:(])/(root|home|work)/[a-z]`),
			"a path of one machine",
		},
		{
			"",
			[]string{"proxy.golang", "py" + "pi", "registry.npm", "index.crates"},
			regexp.MustCompile(`proxy\.golang` + `\.org|py` + `pi\.org|registry\.npm` + `js|index\.crates` + `\.io`),
			"the name of a registry's host",
		},
	}
	for _, name := range treeFiles(t) {
		if strings.HasSuffix(name, ".sum") {
			continue
		}
		text, err := os.ReadFile(filepath.Join(root, name))
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range bad {
			contains := func(part string) bool { return bytes.Contains(text, []byte(part)) }
			if !strings.HasSuffix(name, b.ending) || !slices.ContainsFunc(b.parts, contains) {
				continue
			}
			if at := b.pattern.FindIndex(text); at != nil {
				t.Errorf("%s, line %d: %s", name, 1+bytes.Count(text[:at[0]], []byte("\n")), b.why)
			}
		}
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// treeFiles returns the paths below the root of the files that git knows or would add.
func treeFiles(t *testing.T) (names []string) {
	t.Helper()
	cmd := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("git ls-files: %v (the rules need the checkout's own list of files)", err)
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(out), "\x00"), "\x00") {
		if _, err := os.Stat(filepath.Join(root, name)); err == nil { // else deleted, and not committed yet
			names = append(names, name)
		}
	}
	return names
}
