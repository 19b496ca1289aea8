package fetch

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
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

	"github.com/spf13/pflag"

	"kvepp/prompt/fetch/fetchtest"
)

// run parses arguments and runs the command. It returns its exit status.
func run(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	c, f := new(Config), pflag.NewFlagSet("", pflag.ContinueOnError)
	c.AddFlags(f)
	err := f.Parse(args)
	c.Hub, c.Token = cmp.Or(c.Hub, getenv("HF_ENDPOINT")), getenv("HF_TOKEN")
	if err == nil {
		err = c.Validate(f.Args())
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 2
	}
	if !c.Run(context.Background(), stdout, stderr) {
		return 1
	}
	return 0
}

// noEnvironment is an environment without variables.
func noEnvironment(string) string { return "" }

// TestFetchTogether: two replicas fetch into the same claim. The first has half of a file when the second fetches it;
// both end with the whole file, and no parts remain but those that may be another process's.
func TestFetchTogether(t *testing.T) {
	text := strings.Repeat("x", 1<<20)
	half, rest := make(chan struct{}), make(chan struct{})
	var asked atomic.Int32
	files := map[string]string{"tokenizer.json": text}
	hub := fetchtest.Hub(t, files, func(w http.ResponseWriter, r *http.Request) bool {
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
		code := run([]string{"--hub=" + hub, "--to=" + folder, ".=org/model"}, &out, &out, noEnvironment)
		if code != 0 {
			t.Error(out.String())
		}
		return code
	}
	first := make(chan int)
	go func() { first <- run() }()
	<-half
	run()
	if got := fetchtest.Tree(t, folder)["tokenizer.json"]; got != text {
		t.Errorf("the second has %d bytes, want %d", len(got), len(text))
	}
	close(rest)
	<-first
	got := fetchtest.Tree(t, folder)
	if got["tokenizer.json"] != text {
		t.Errorf("the first has %d bytes, want %d", len(got["tokenizer.json"]), len(text))
	}
	if names := slices.Sorted(maps.Keys(got)); !slices.Equal(names, []string{"tokenizer.json",
		"tokenizer.json.new.part"}) {
		t.Errorf("files %q", names)
	}
}

func TestFetchFails(t *testing.T) {
	plain := fetchtest.Hub(t, map[string]string{"tokenizer.json": "{}"}, nil)
	none := fetchtest.Hub(t, map[string]string{"tokenizer.model": "sentencepiece"}, nil)
	closed := fetchtest.Hub(t, nil, func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "", http.StatusForbidden)
		return true
	})
	website := fetchtest.Hub(
		t,
		nil,
		func(w http.ResponseWriter, r *http.Request) bool { fmt.Fprint(w, "<html>"); return true },
	)
	down := fetchtest.Hub(t, nil, func(w http.ResponseWriter, r *http.Request) bool {
		http.Error(w, "", http.StatusBadGateway)
		return true
	})
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
		{[]string{"--hub=" + plain, "--to=DIR", "--timeout=0s", "m=org/model"}, 2, "--timeout 0s: must be above 0"},
	} {
		for i, arg := range x.args {
			if arg == "--to=DIR" {
				x.args[i] = "--to=" + t.TempDir()
			}
		}
		var out, stderr bytes.Buffer
		if status := run(x.args, &out, &stderr, noEnvironment); status != x.status ||
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
	url := fetchtest.Hub(t, map[string]string{"tokenizer.json": ""}, func(w http.ResponseWriter, r *http.Request) bool {
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
	if status := run([]string{"--to=" + to, ".=org/model"}, &out, &stderr, environment); status != 0 {
		t.Fatal(status, stderr.String())
	}
	if got := fetchtest.Tree(t, to); !maps.Equal(got, map[string]string{"tokenizer.json": "{}"}) {
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
