package fetch

import (
	"bytes"
	"context"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kvepp/prompt/fetch/fetchtest"
)

// fetchInto fetches the model of a hub into a folder, and returns the exit status and what kvepp printed.
func fetchInto(folder, hub string) (status int, printed string) {
	var out bytes.Buffer
	status = run([]string{"--hub=" + hub, "--to=" + folder, "--timeout=10m", ".=org/model"}, &out, &out, noEnvironment)
	return status, out.String()
}

// TestFetchKeepsWeights: kvepp fetches into folders that hold weights, of any format, whole or in part, as files or as
// links into a cache. All of them keep their content, and the folder gets no empty ones.
func TestFetchKeepsWeights(t *testing.T) {
	hub := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new", "config.json": "new",
		"consolidated.safetensors":         "x",
		"model-00001-of-00002.safetensors": "x", "model-00002-of-00002.safetensors": "x",
		"tokenizer.model.gguf": "x", "tokenizer.model.bin": "x"}, nil)
	for _, weights := range [][]string{
		{"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
		{"model-00001-of-00002.safetensors"}, // the engine still downloads the second
		{"consolidated.safetensors"},
		{"model.safetensors"},
		{"pytorch_model.bin", "tokenizer.model.bin"},
		{"consolidated.00.pth"},
		{"model-Q4.gguf", "tokenizer.model.gguf"},
	} {
		for _, linked := range []bool{false, true} {
			folder, want := t.TempDir(), map[string]string{"tokenizer.json": "new", "config.json": "new"}
			for _, name := range weights {
				want[name] = "weights"
				if !linked {
					fetchtest.Fill(t, folder, map[string]string{name: "weights"})
					continue
				}
				blob := filepath.Join(t.TempDir(), "blob")
				if err := os.WriteFile(blob, []byte("weights"), 0o644); err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(blob, filepath.Join(folder, name)); err != nil {
					t.Fatal(err)
				}
			}
			status, printed := fetchInto(folder, hub)
			if got := fetchtest.Tree(t, folder); status != 0 || !maps.Equal(got, want) {
				t.Errorf("%q, links %v: status %d, %q; the folder has %v, want %v", weights, linked, status, printed,
					got, want)
			}
		}
	}
}

// TestFetchMarksWeights: a hub that lists a hundred thousand weights adds at most one empty file of each kind.
func TestFetchMarksWeights(t *testing.T) {
	files := map[string]string{"tokenizer.json": "{}", "consolidated-1.safetensors": "",
		"consolidated-2.safetensors": ""}
	for i := range 100_000 {
		files[fmt.Sprintf("model-%05d.safetensors", i)] = ""
	}
	folder := t.TempDir()
	status, printed := fetchInto(folder, fetchtest.Hub(t, files, nil))
	names := slices.Sorted(maps.Keys(fetchtest.Tree(t, folder)))
	if status != 0 || len(names) != 3 || !strings.HasPrefix(names[0], "consolidated-") ||
		!strings.HasPrefix(names[1], "model-") {
		t.Errorf("status %d, %q; %d files, %.5q", status, printed, len(names), names)
	}
}

// TestFetchReplacesWhole: an existing file is replaced and never written to, so that another name or an open reader of
// it keeps the former content.
func TestFetchReplacesWhole(t *testing.T) {
	hub := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new"}, nil)
	for what, put := range map[string]func(file, other string) error{
		"a symbolic link":     func(file, other string) error { return os.Symlink(other, file) },
		"a second hard link":  func(file, other string) error { return os.Link(other, file) },
		"a read-only file":    func(file, other string) error { return os.WriteFile(file, []byte("old"), 0o400) },
		"a dangling link":     func(file, other string) error { return os.Symlink(other+".none", file) },
		"a named pipe":        func(file, other string) error { return syscall.Mkfifo(file, 0o600) },
		"a link to a device":  func(file, other string) error { return os.Symlink("/dev/full", file) },
		"a link to a weight":  func(file, other string) error { return os.Symlink("model.safetensors", file) },
		"a link out and back": func(file, other string) error { return os.Symlink("../x/"+filepath.Base(other), file) },
	} {
		folder := t.TempDir()
		other := filepath.Join(t.TempDir(), "other")
		fetchtest.Fill(t, filepath.Dir(other), map[string]string{"other": "old"})
		fetchtest.Fill(t, folder, map[string]string{"model.safetensors": "weights"})
		if err := put(filepath.Join(folder, "tokenizer.json"), other); err != nil {
			t.Fatal(what, err)
		}
		status, printed := fetchInto(folder, hub)
		info, err := os.Lstat(filepath.Join(folder, "tokenizer.json"))
		if status != 0 || err != nil || !info.Mode().IsRegular() {
			t.Fatalf("%s: status %d, %s; %v", what, status, printed, err)
		}
		want := map[string]string{"tokenizer.json": "new", "model.safetensors": "weights"}
		if got := fetchtest.Tree(t, folder); !maps.Equal(got, want) {
			t.Errorf("%s: the folder has %v, want %v", what, got, want)
		}
		if got := fetchtest.Tree(t, filepath.Dir(other)); !maps.Equal(got, map[string]string{"other": "old"}) {
			t.Errorf("%s: outside the folder is %v", what, got)
		}
	}
}

// listingHub starts a hub that answers with a listing and, for each file, with what file writes.
func listingHub(t *testing.T, listing string, file http.HandlerFunc) string {
	return fetchtest.Hub(t, nil, func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/api/") {
			fmt.Fprint(w, listing)
		} else {
			file(w, r)
		}
		return true
	})
}

// TestFetchRefusesNames: names that leave the folder, that hide in a terminal, or that are one file on a disk without
// capital letters, never get a file.
func TestFetchRefusesNames(t *testing.T) {
	for name, want := range map[string]string{ // want: part of what kvepp prints; "": it fetches the other files
		"../tokenizer.json":                               "",
		"/tmp/tokenizer.json":                             "",
		"encoding/../../tokenizer.json":                   "",
		"tokenizer_\u001b[2J.json":                        "",
		"tokenizer_\n.json":                               "",
		"tokenizer_\u202egpj.json":                        "",
		"tokenizer_\u0000.json":                           "",
		"tokenizer\\..\\x.json":                           "",
		"tokenizer_" + strings.Repeat("x", 300) + ".json": "",
		"additional_chat_templates/..jinja":               "",
		"additional_chat_templates/.hidden.jinja":         "",
		"..safetensors":                                   "",
		"model\u001b[2J.safetensors":                      "",
		"tokenizer.json":                                  "lists tokenizer.json twice",
		"tokenizer_CONFIG.json":                           "lists tokenizer_CONFIG.json twice",
	} {
		parent := t.TempDir()
		folder := filepath.Join(parent, "to")
		fetchtest.Fill(t, parent, map[string]string{"tokenizer.json": "mine", "to/tokenizer.json": "old"})
		quoted, _ := json.Marshal(name)
		hub := listingHub(t, fmt.Sprintf(`{"sha":"c0ffee","siblings":[{"rfilename":"tokenizer.json"},`+
			`{"rfilename":"tokenizer_config.json"},{"rfilename":%s}]}`, quoted),
			func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "new") })
		status, printed := fetchInto(folder, hub)
		expect := map[string]string{"tokenizer.json": "mine", "to/tokenizer.json": "old"}
		if want == "" {
			expect["to/tokenizer.json"], expect["to/tokenizer_config.json"] = "new", "new"
		}
		if got := fetchtest.Tree(t, parent); (status == 0) != (want == "") || !strings.Contains(printed, want) ||
			!maps.Equal(got, expect) || strings.Contains(printed, "\x1b") {
			t.Errorf("%q: status %d, %q; files %v, want %v", name, status, printed, got, expect)
		}
	}
}

// TestFetchCommitIsPlain: a hub cannot write to the terminal by the name of the commit.
func TestFetchCommitIsPlain(t *testing.T) {
	hub := listingHub(t, `{"sha":"\u001b[2Jc0ffee","siblings":[{"rfilename":"tokenizer.json"}]}`,
		func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, "new") })
	if status, printed := fetchInto(t.TempDir(), hub); status != 1 || strings.Contains(printed, "\x1b") {
		t.Errorf("status %d, %q", status, printed)
	}
}

// TestFetchStaysInFolder: a folder's own links lead kvepp nowhere else.
func TestFetchStaysInFolder(t *testing.T) {
	outside, folder := t.TempDir(), t.TempDir()
	if err := os.Symlink(outside, filepath.Join(folder, "encoding")); err != nil {
		t.Fatal(err)
	}
	hub := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new", "encoding/encoding_dsv4.py": "new"}, nil)
	status, printed := fetchInto(folder, hub)
	if got := fetchtest.Tree(t, outside); status != 1 || len(got) != 0 || !strings.Contains(printed, "escapes") {
		t.Errorf("status %d, %q, outside %v", status, printed, got)
	}
	if entries, err := os.ReadDir(folder); err != nil || len(entries) != 1 {
		t.Errorf("after the failure the folder has %v, %v", entries, err)
	}
}

// failingHubs are hubs that fail at the second of two files, after the first, tokenizer.json, is whole.
func failingHubs(t *testing.T) map[string]string {
	const names = `{"sha":"c0ffee","siblings":[{"rfilename":"tokenizer.json"},{"rfilename":"vocab.json"%s}]}`
	sized := func(more string, second http.HandlerFunc) string {
		return listingHub(t, fmt.Sprintf(names, more), func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/vocab.json") {
				second(w, r)
			} else {
				fmt.Fprint(w, "new")
			}
		})
	}
	send := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, text) }
	}
	tagged := func(name, value string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { w.Header().Set(name, value); fmt.Fprint(w, "{}") }
	}
	other := fmt.Sprintf("%x", sha256.Sum256([]byte("another")))
	return map[string]string{
		"no such model or revision": sized("", http.NotFound),
		"sent 2 bytes and lists 3":  sized(`,"size":3`, send("{}")),
		"sent 2 bytes and lists 1":  sized(`,"size":1`, send("{}")),
		"more than 256 MB":          sized(fmt.Sprintf(`,"size":%d`, int64(maxFetchedBytes)+1), send("{}")),
		"hash " + other:             sized(`,"lfs":{"sha256":"`+other+`","size":2}`, send("{}")),
		"hash " + other[:40]:        sized(`,"blobId":"`+other[:40]+`"`, send("{}")),
		"hash " + other + ",":       sized("", tagged("X-Linked-Etag", `"`+strings.ToUpper(other)+`"`)),
		"hash " + other[:40] + ",":  sized("", tagged("ETag", `W/"`+strings.ToUpper(other)[:40]+`"`)),
		"than 512 MB with the model's other files": sized("", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", fmt.Sprint(maxFetchedBytes+1))
		}),
	}
}

// TestFetchChangesAllOrNothing: if one file cannot be fetched, or is not what the hub says it is, then no file of the
// folder changes, and no part of one remains. A later fetch succeeds.
func TestFetchChangesAllOrNothing(t *testing.T) {
	for want, hub := range failingHubs(t) {
		folder, before := t.TempDir(), map[string]string{"tokenizer.json": "old", "vocab.json": "old"}
		fetchtest.Fill(t, folder, before)
		status, printed := fetchInto(folder, hub)
		if got := fetchtest.Tree(t, folder); status != 1 || !strings.Contains(printed, want) ||
			!maps.Equal(got, before) || strings.Contains(printed, "again in") {
			t.Errorf("status %d, %q, want %q; files %v", status, printed, want, got)
		}
		good := fetchtest.Hub(t, map[string]string{"tokenizer.json": "new", "vocab.json": "new"}, nil)
		status, printed = fetchInto(folder, good)
		if got := fetchtest.Tree(t, folder); status != 0 || got["tokenizer.json"] != "new" || len(got) != 2 {
			t.Errorf("a later fetch: status %d, %q; files %v", status, printed, got)
		}
	}
}

// TestFetchAcceptsHashes: hashes in the forms that hubs and mirrors have them, and ETags that are no hash.
func TestFetchAcceptsHashes(t *testing.T) {
	const text = `{"vocab":1}`
	sum, plain := sha256.Sum256([]byte(text)), sha1.Sum([]byte(text))
	git := sha1.Sum(fmt.Appendf(nil, "blob %d\x00%s", len(text), text))
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("ETag", `"`+strings.Repeat("ab", 32)+`"`) // a store's own, of the length of a SHA-256
		fmt.Fprint(w, text)
	}))
	defer store.Close()
	tagged := func(pairs ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			for i := 0; i < len(pairs); i += 2 {
				w.Header().Set(pairs[i], pairs[i+1])
			}
			if w.Header().Get("Location") != "" {
				w.WriteHeader(http.StatusFound)
			}
			fmt.Fprint(w, text)
		}
	}
	for what, x := range map[string]struct {
		listed   string
		response http.HandlerFunc
	}{
		"size and Git's object": {fmt.Sprintf(`,"size":%d,"blobId":"%x"`, len(text), git), tagged()},
		"LFS, a pointer in Git": {fmt.Sprintf(`,"blobId":"%040d","lfs":{"sha256":"%x"}`, 1, sum), tagged()},
		"ETag of Git":           {"", tagged("ETag", fmt.Sprintf(`"%x"`, git))},
		"weak ETag":             {"", tagged("ETag", fmt.Sprintf(`W/"%x"`, git))},
		"plain SHA-1":           {"", tagged("ETag", fmt.Sprintf(`"%x"`, plain))},
		"another kind of ETag":  {"", tagged("ETag", `"5f2c-61a"`)},
		"a multipart upload":    {"", tagged("ETag", `"0123456789abcdef0123456789abcdef-3"`)},
		"LFS on another host":   {"", tagged("X-Linked-Etag", fmt.Sprintf(`"%x"`, sum), "Location", store.URL)},
		"null":                  {`,"size":null,"blobId":null,"lfs":null`, tagged()},
		"LFS without details":   {`,"lfs":{}`, tagged()},
	} {
		folder := t.TempDir()
		hub := listingHub(t, `{"sha":"c0ffee","siblings":[{"rfilename":"tokenizer.json"`+x.listed+`}]}`, x.response)
		status, printed := fetchInto(folder, hub)
		if status != 0 || fetchtest.Tree(t, folder)["tokenizer.json"] != text {
			t.Errorf("%s: status %d, %q", what, status, printed)
		}
	}
}

// TestFetchBounds: a hub cannot make kvepp write more than the bounds, with or without announced sizes.
func TestFetchBounds(t *testing.T) {
	files := map[string]string{"tokenizer.json": "{}"}
	for i := range maxFetchedFiles {
		files[fmt.Sprintf("tokenizer_%03d.json", i)] = "{}"
	}
	folder := t.TempDir()
	if status, printed := fetchInto(folder, fetchtest.Hub(t, files, nil)); status != 1 ||
		!strings.Contains(printed, "more than 200 files") || len(fetchtest.Tree(t, folder)) > 0 {
		t.Errorf("201 files: status %d, %q; %d files", status, printed, len(fetchtest.Tree(t, folder)))
	}
	stream := func(n int) http.HandlerFunc { // without Content-Length
		return func(w http.ResponseWriter, r *http.Request) {
			for range n {
				fmt.Fprint(w, strings.Repeat("x", 1000))
				w.(http.Flusher).Flush()
			}
		}
	}
	const two = `{"sha":"c0ffee","siblings":[{"rfilename":"tokenizer.json"},{"rfilename":"vocab.json"}]}`
	for what, x := range map[string]struct {
		each int // kilobytes
		want bool
	}{"in bounds": {9, true}, "one file": {11, false}, "both files": {10, false}} {
		folder := t.TempDir()
		h := hub{url: listingHub(t, two, stream(x.each)), client: http.DefaultClient, log: t.Output(), maxBytes: 10_000,
			maxModel: 19_999}
		_, _, _, err := h.model(context.Background(), modelSource{".", "org/model", "main"}, folder)
		if (err == nil) != x.want || !x.want && len(fetchtest.Tree(t, folder)) > 0 {
			t.Errorf("%s: %v; files %d", what, err, len(fetchtest.Tree(t, folder)))
		}
	}
}

// TestFetchTokenStays: the hub's token goes to no other host, no subdomain and no other port.
func TestFetchTokenStays(t *testing.T) {
	for _, x := range []struct {
		from, to string
		keeps    bool
	}{
		{"https://hub.example.com/a", "https://hub.example.com/b", true},
		{"http://hub.example.com/a", "https://hub.example.com/b", true},
		{"https://hub.example.com/a", "https://cdn.hub.example.com/b", false},
		{"https://hub.example.com/a", "https://hub.example.com:8443/b", false},
		{"http://127.0.0.1:8000/a", "http://127.0.0.1:8001/b", false},
	} {
		from, _ := http.NewRequest(http.MethodGet, x.from, nil)
		to, _ := http.NewRequest(http.MethodGet, x.to, nil)
		to.Header.Set("Authorization", "Bearer s3cr3t")
		err := staySecure(to, []*http.Request{from})
		if err != nil || (to.Header.Get("Authorization") != "") != x.keeps {
			t.Errorf("%s to %s: %v, Authorization %q", x.from, x.to, err, to.Header.Get("Authorization"))
		}
	}
}
