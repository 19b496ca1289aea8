// Package fetchtest has a model hub for tests, and folders of files.
package fetchtest

import (
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Hub starts a hub with one model, whose files belong to one commit, and returns its URL. before may answer a
// request instead of the hub.
func Hub(
	t *testing.T,
	files map[string]string,
	before func(w http.ResponseWriter, r *http.Request) (responded bool),
) string {
	names := slices.Sorted(maps.Keys(files))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if before != nil && before(w, r) {
			return
		}
		if r.URL.Path == "/hub/api/models/org/model/revision/main" {
			fmt.Fprint(w, `{"sha":"c0ffee","siblings":[`)
			for i, name := range names {
				fmt.Fprintf(w, `%s{"rfilename":%q}`, strings.Repeat(",", min(i, 1)), name)
			}
			fmt.Fprint(w, `]}`)
			return
		}
		name, ok := strings.CutPrefix(r.URL.Path, "/hub/org/model/resolve/c0ffee/")
		text, there := files[name]
		if !ok || !there {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	}))
	t.Cleanup(server.Close)
	return server.URL + "/hub"
}

// Tree lists the files of a folder with their contents.
func Tree(t *testing.T, folder string) map[string]string {
	t.Helper()
	files := map[string]string{}
	err := filepath.WalkDir(folder, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		text, err := os.ReadFile(path)
		name, _ := filepath.Rel(folder, path)
		files[name] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// Fill writes files into a folder.
func Fill(t *testing.T, folder string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		file := filepath.Join(folder, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
