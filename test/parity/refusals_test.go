package parity

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
)

// refusals are what kvepp refuses although an engine takes it: by subject, a template or a class of tokenizers, and by
// the engine's version. A committed file lists them, so that nothing exact becomes refused in silence. A test with
// -rewrite writes the lines of the versions that it compares again.
type refusals struct {
	path string
	mu   sync.Mutex
	// runs are the versions that were compared, and found what each refused, by subject.
	runs  []string
	found map[string]map[string]string
	// compared are the only subjects that were compared with a version; nil: all.
	compared map[string]map[string]bool
}

// listRefusals returns the list of a file. When t and its subtests have ended, it compares the file with what they
// added, or writes it.
func listRefusals(t *testing.T, path string) *refusals {
	t.Helper()
	r := &refusals{path: path, found: map[string]map[string]string{}, compared: map[string]map[string]bool{}}
	t.Cleanup(func() {
		listed := r.read(t)
		if !*rewrite {
			r.check(t, listed)
			return
		}
		for version, refused := range listed {
			if !slices.Contains(r.runs, version) {
				r.found[version] = refused
			}
		}
		if err := os.WriteFile(path, r.lines(), 0o644); err != nil {
			t.Error(err)
		}
	})
	return r
}

// add says what a version of an engine refuses of each subject. compared are the only subjects that were compared; nil:
// all.
func (r *refusals) add(version string, refused map[string]string, compared map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.runs = append(r.runs, version)
	r.found[version], r.compared[version] = refused, compared
}

// lines are the file's: a subject, what of it is refused, and the versions for which that holds.
func (r *refusals) lines() []byte {
	versions := map[[2]string][]string{}
	for _, version := range slices.Sorted(maps.Keys(r.found)) {
		for subject, what := range r.found[version] {
			key := [2]string{subject, what}
			versions[key] = append(versions[key], version)
		}
	}
	var lines []string
	for key, of := range versions {
		lines = append(lines, fmt.Sprintf("%s\t%s\t%s\n", key[0], key[1], strings.Join(of, ", ")))
	}
	slices.Sort(lines)
	return []byte(strings.Join(lines, ""))
}

// read returns what the file lists, by version and subject.
func (r *refusals) read(t *testing.T) map[string]map[string]string {
	raw, err := os.ReadFile(r.path)
	if err != nil {
		t.Error(err)
	}
	listed := map[string]map[string]string{}
	for line := range bytes.Lines(raw) {
		fields := strings.Split(strings.TrimSpace(string(line)), "\t")
		for _, version := range strings.Split(fields[2], ", ") {
			if listed[version] == nil {
				listed[version] = map[string]string{}
			}
			listed[version][fields[0]] = fields[1]
		}
	}
	return listed
}

func (r *refusals) check(t *testing.T, listed map[string]map[string]string) {
	for _, version := range r.runs {
		for _, subject := range slices.Sorted(maps.Keys(r.found[version])) {
			if what := r.found[version][subject]; listed[version][subject] != what {
				t.Errorf("%s refuses of %s: %s; %s lists: %q", version, subject, what, r.path, listed[version][subject])
			}
		}
		for subject := range listed[version] {
			if of := r.compared[version]; r.found[version][subject] == "" && (of == nil || of[subject]) {
				t.Errorf("%s no longer refuses any of %s: run this test with -rewrite", version, subject)
			}
		}
	}
}
