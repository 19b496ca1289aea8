package main

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// modelHub starts a hub with one model, whose files belong to one commit, and returns its URL. before may answer a
// request instead of the hub.
func modelHub(
	t *testing.T,
	files map[string]string,
	before func(w http.ResponseWriter, r *http.Request) (answered bool),
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

// noEnvironment is an environment without variables.
func noEnvironment(string) string { return "" }

// tree lists the files of a folder with their contents.
func tree(t *testing.T, folder string) map[string]string {
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

func TestFetch(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	var failures atomic.Int64
	url := modelHub(t, map[string]string{
		"tokenizer.json": "{}", "tokenizer_config.json": "[]", "chat_template.jinja": "{{ x }}",
		"additional_chat_templates/rag.jinja": "{{ y }}",
		"encoding/encoding_dsv4.py":           "efforts", "encoding/README.md": "words",
		"model-00001-of-00002.safetensors": "weights", "model.safetensors.index.json": "weights",
		"pytorch_model.bin": "weights",
		"README.md":         "words", "../../escaped.json": "bad", "sub/tokenizer.json": "another",
	}, func(w http.ResponseWriter, r *http.Request) bool {
		if r.Header.Get("Authorization") != "Bearer s3cr3t" {
			http.Error(w, "who?", http.StatusUnauthorized)
			return true
		}
		if strings.HasSuffix(r.URL.Path, "tokenizer.json") && failures.Add(1) == 1 {
			http.Error(w, "busy", http.StatusServiceUnavailable)
			return true
		}
		return false
	})
	to, token := t.TempDir(), filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("s3cr3t\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	var out, stderr bytes.Buffer
	if status := fetch([]string{"--hub=" + url, "--to=" + to, "--token-file=" + token, "qwen=org/model"}, &out,
		&stderr, noEnvironment); status != 0 {
		t.Fatal(status, stderr.String())
	}
	if out.String() != "qwen: org/model at c0ffee, 5 files, 0.0 MB\n" {
		t.Errorf("printed %q", out.String())
	}
	want := map[string]string{
		"qwen/tokenizer.json":                      "{}",
		"qwen/tokenizer_config.json":               "[]",
		"qwen/chat_template.jinja":                 "{{ x }}",
		"qwen/additional_chat_templates/rag.jinja": "{{ y }}",
		"qwen/encoding/encoding_dsv4.py":           "efforts",
		"qwen/model-00001-of-00002.safetensors":    "",
	}
	if got := tree(t, to); !maps.Equal(got, want) {
		t.Errorf("fetched %v, want %v", got, want)
	}
	if !strings.Contains(stderr.String(), "503 Service Unavailable; again in 1s") ||
		strings.Contains(stderr.String(), "s3cr3t") {
		t.Errorf("stderr %q", stderr.String())
	}
}

// TestFetchTogether: two replicas fetch into the same claim. The first has half of a file when the second fetches it;
// both end with the whole file, and no parts remain but those that may be another process's.
func TestFetchTogether(t *testing.T) {
	text := strings.Repeat("x", 1<<20)
	half, rest := make(chan struct{}), make(chan struct{})
	var asked atomic.Int32
	hub := modelHub(t, map[string]string{"tokenizer.json": text}, func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.HasSuffix(r.URL.Path, "/tokenizer.json") || asked.Add(1) > 1 {
			return false
		}
		fmt.Fprint(w, text[:len(text)/2])
		w.(http.Flusher).Flush()
		close(half)
		<-rest
		fmt.Fprint(w, text[len(text)/2:])
		return true
	})
	folder := t.TempDir()
	for name, age := range map[string]time.Duration{"tokenizer.json.old.part": 2 * staleParts,
		"tokenizer.json.new.part": 0} {
		file := filepath.Join(folder, name)
		if err := os.WriteFile(file, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(file, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	run := func() int {
		var out bytes.Buffer
		code := fetch([]string{"--hub=" + hub, "--to=" + folder, ".=org/model"}, &out, &out, noEnvironment)
		if code != 0 {
			t.Error(out.String())
		}
		return code
	}
	first := make(chan int)
	go func() { first <- run() }()
	<-half
	run()
	if got := tree(t, folder)["tokenizer.json"]; got != text {
		t.Errorf("the second has %d bytes, want %d", len(got), len(text))
	}
	close(rest)
	<-first
	got := tree(t, folder)
	if got["tokenizer.json"] != text {
		t.Errorf("the first has %d bytes, want %d", len(got["tokenizer.json"]), len(text))
	}
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, []string{"tokenizer.json",
		"tokenizer.json.new.part"}) {
		t.Errorf("files %q", names)
	}
}

func TestFetchFails(t *testing.T) {
	plain := modelHub(t, map[string]string{"tokenizer.json": "{}"}, nil)
	none := modelHub(t, map[string]string{"tokenizer.model": "sentencepiece"}, nil)
	closed := modelHub(t, nil, func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "", http.StatusForbidden)
		return true
	})
	website := modelHub(
		t,
		nil,
		func(w http.ResponseWriter, r *http.Request) bool { fmt.Fprint(w, "<html>"); return true },
	)
	down := modelHub(t, nil, func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "", http.StatusBadGateway)
		return true
	})
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"--hub=" + plain, "--to=DIR", "m=org/other"}, 1, "no such model or revision"},
		{[]string{"--hub=" + plain, "--to=DIR", "m=org/model@v2"}, 1, "no such model or revision"},
		{[]string{"--hub=" + plain, "--to=DIR", "a=org/other", "m=org/model"}, 1, "org/other of"},
		{[]string{"--hub=" + plain, "--to=DIR", "--optional", "a=org/other"}, 0, "org/other of"},
		{[]string{"--hub=" + none, "--to=DIR", "m=org/model"}, 1, "no tokenizer.json, tiktoken.model or tekken.json"},
		{[]string{"--hub=" + closed, "--to=DIR", "m=org/model"}, 1, "wants a token (--token-file)"},
		{[]string{"--hub=" + website, "--to=DIR", "m=org/model"}, 1, "does not answer as a model hub does"},
		{[]string{"--hub=" + down, "--to=DIR", "--timeout=50ms", "m=org/model"}, 1, "--timeout is over"},
		{[]string{"--to=DIR", "m=org/model"}, 2, "--hub is missing"},
		{[]string{"--hub=hub.example.com", "--to=DIR", "m=org/model"}, 2, "--hub: want http"},
		{[]string{"--hub=https://me:s3cr3t@hub", "--to=DIR", "m=org/model"}, 2, "--token-file"},
		{[]string{"--hub=" + plain, "m=org/model"}, 2, "--to is missing"},
		{[]string{"--hub=" + plain, "--to=DIR"}, 2, "name the models"},
		{[]string{"--hub=" + plain, "--to=DIR", "org/model"}, 2, "FOLDER=REPOSITORY"},
		{[]string{"--hub=" + plain, "--to=DIR", "../m=org/model"}, 2, "the folder one below --to"},
		{[]string{"--hub=" + plain, "--to=DIR", "m=../x"}, 2, "FOLDER=REPOSITORY"},
		{[]string{"--hub=" + plain, "--to=DIR", "--token-file=" + empty, "m=org/model"}, 2, "the file is empty"},
		{[]string{"--hub=" + plain, "--to=DIR", "--timeout=0s", "m=org/model"}, 2, "--timeout 0s: must be above 0"},
	} {
		for i, arg := range x.args {
			if arg == "--to=DIR" {
				x.args[i] = "--to=" + t.TempDir()
			}
		}
		var out, stderr bytes.Buffer
		if status := fetch(x.args, &out, &stderr, noEnvironment); status != x.status ||
			!strings.Contains(stderr.String(), x.want) ||
			strings.Contains(stderr.String(), "s3cr3t") {
			t.Errorf("%v: status %d, %q; want %d and %q", x.args, status, stderr.String(), x.status, x.want)
		}
	}
}

// TestFetchRedirects checks that only the hub gets the token when files are on another host, and that redirects to
// plain HTTP are refused.
func TestFetchRedirects(t *testing.T) {
	var leaked atomic.Bool
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		leaked.Store(leaked.Load() || r.Header.Get("Authorization") != "")
		fmt.Fprint(w, "{}")
	}))
	defer store.Close()
	url := modelHub(t, map[string]string{"tokenizer.json": ""}, func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/resolve/") {
			// Another host name for the same address.
			http.Redirect(w, r, strings.Replace(store.URL, "127.0.0.1", "localhost", 1), http.StatusFound)
			return true
		}
		return false
	})
	to := t.TempDir()
	var out, stderr bytes.Buffer
	environment := func(name string) string {
		return map[string]string{"HF_ENDPOINT": url + "/", "HF_TOKEN": "s3cr3t"}[name]
	}
	if status := fetch([]string{"--to=" + to, ".=org/model"}, &out, &stderr, environment); status != 0 {
		t.Fatal(status, stderr.String())
	}
	if got := tree(t, to); !maps.Equal(got, map[string]string{"tokenizer.json": "{}"}) {
		t.Errorf("fetched %v", got)
	}
	if leaked.Load() {
		t.Error("another host got the hub's token")
	}
	from, _ := http.NewRequest(http.MethodGet, "https://hub/x", nil)
	on, _ := http.NewRequest(http.MethodGet, "http://hub/x", nil)
	if staySecure(on, []*http.Request{from}) == nil {
		t.Error("staySecure allows a redirect from https to http")
	}
}
