package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/useragent"
)

const fetchHelp = `kvepp fetch downloads tokenizers from a model hub or its mirror: a few megabytes that kvepp reads,
never weights.

Usage:       kvepp fetch --hub URL --to DIR FOLDER=REPOSITORY[@REVISION]... [flags]
Example:     kvepp fetch --hub https://hub.example.com --to /models qwen3-8b=Qwen/Qwen3-8B@main
Precedence:  flag, variable KVEPP_FETCH_<FLAG>, default

FOLDER is below --to ("." is --to itself), REPOSITORY the hub's name of the model, REVISION its
version (default: main). All files come from one commit, which is printed. Give this commit as the
revision, here and to the engine, so that both use the same files.
`

// fetchPrefix is part of the names of its environment variables: KVEPP_FETCH_TO.
const fetchPrefix = "fetch-"

// Limits on what a hub can send.
const (
	maxListingBytes = 16 << 20
	maxFetchedBytes = 256 << 20 // per file; the largest known tokenizer.json files have 35 MB
	maxFetchedFiles = 200       // per model
)

// fetched are the files that package tokenizer reads, as patterns of path.Match: the tokenizer's own, and model
// configuration that tokenizers depend on. Source: package tokenizer.
var fetched = []string{
	"tokenizer*.json",
	"config.json",
	"chat_template.jinja",
	"chat_template.json",
	"additional_chat_templates/*.jinja",
	"encoding/encoding_dsv4.py",
	"special_tokens_map.json",
	"added_tokens.json",
	"generation_config.json",
	"preprocessor_config.json",
	"processor_config.json",
	"*.tiktoken",
	"tiktoken.model",
	"tokenizer.model*",
	"tekken.json",
	"vocab.json",
	"merges.txt",
}

// fetchOptions are the flags and arguments of `kvepp fetch`.
type fetchOptions struct {
	hub, to, tokenFile string
	timeout            time.Duration
	optional           bool
	models             []modelSource
	token              string
}

// modelSource is one model on a hub, and its target folder.
type modelSource struct{ folder, repository, revision string }

func fetchFlags(o *fetchOptions) *pflag.FlagSet {
	f := newFlags("kvepp fetch")
	f.StringVar(&o.hub, "hub", "", "the hub's `URL`; also from HF_ENDPOINT, which engines read too")
	f.StringVar(&o.to, "to", "", "the `FOLDER` for all models")
	f.StringVar(
		&o.tokenFile,
		"token-file",
		"",
		"`FILE` with the hub's token, which some models need; HF_TOKEN can hold the token itself",
	)
	f.DurationVar(
		&o.timeout,
		"timeout",
		5*time.Minute,
		"time limit for all models together; temporary failures are retried within it",
	)
	f.BoolVar(
		&o.optional,
		"optional",
		false,
		"exit with 0 even if a model could not be fetched: kvepp then routes its requests by load",
	)
	section(f, "Flags of kvepp fetch")
	documentEnvironment(f, fetchPrefix)
	return f
}

func parseFetch(o *fetchOptions, args []string, getenv func(string) string) error {
	f := fetchFlags(o)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := fromEnvironment(f, getenv); err != nil {
		return err
	}
	if o.hub == "" {
		o.hub = getenv("HF_ENDPOINT")
	}
	hub, err := url.Parse(o.hub)
	switch {
	case o.hub == "":
		return errors.New("--hub is missing: the address of the hub or mirror, https://hub.example.com for example")
	case err != nil || hub.Scheme != "http" && hub.Scheme != "https" || hub.Host == "":
		return errors.New("--hub: want http://HOST or https://HOST, with a path if the mirror has one")
	case hub.User != nil:
		return errors.New("--hub: put the token into --token-file, not into the address, which is logged")
	case o.to == "":
		return errors.New("--to is missing: the folder for the models")
	case o.timeout <= 0:
		return durations(durationFlag{"timeout", o.timeout, false})
	case f.NArg() == 0:
		return errors.New("name the models: FOLDER=REPOSITORY[@REVISION]")
	}
	o.hub = strings.TrimSuffix(o.hub, "/")
	for _, arg := range f.Args() {
		m := modelSource{revision: "main"}
		var ok bool
		if m.folder, m.repository, ok = strings.Cut(arg, "="); ok {
			if repository, revision, given := strings.Cut(m.repository, "@"); given {
				m.repository, m.revision = repository, revision
			}
		}
		if !filepath.IsLocal(m.folder) || m.repository == "" || m.revision == "" ||
			path.Clean(m.repository) != m.repository ||
			strings.HasPrefix(m.repository, "..") ||
			strings.HasPrefix(m.repository, "/") {
			return fmt.Errorf("%q: want FOLDER=REPOSITORY[@REVISION], the folder one below --to", arg)
		}
		o.models = append(o.models, m)
	}
	o.token = getenv("HF_TOKEN")
	if o.tokenFile != "" {
		file, err := newTokenFile("--token-file", o.tokenFile)
		if err != nil {
			return err
		}
		o.token = file.token()
	}
	return nil
}

// fetch runs `kvepp fetch`. It returns the exit status.
func fetch(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var o fetchOptions
	err := parseFetch(&o, args, getenv)
	if errors.Is(err, pflag.ErrHelp) {
		showHelp(stdout, fetchFlags(new(fetchOptions)), err)
		return 0
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp fetch: %v\n\"kvepp fetch --help\" shows how to use it.\n", err)
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	h := hub{o.hub, o.token, time.Second, &http.Client{CheckRedirect: staySecure}, stderr}
	failed := false
	for _, m := range o.models {
		commit, files, size, err := h.model(ctx, m, filepath.Join(o.to, m.folder))
		if err != nil {
			failed = true
			fmt.Fprintf(stderr, "kvepp fetch: %s of %s: %v\n", m.repository, o.hub, err)
			continue
		}
		fmt.Fprintf(
			stdout,
			"%s: %s at %s, %d files, %.1f MB\n",
			m.folder,
			m.repository,
			commit,
			files,
			float64(size)/1e6,
		)
	}
	if failed && !o.optional {
		return 1
	}
	return 0
}

// staySecure refuses redirects from HTTPS to plain HTTP. Only the hub's own host gets the token: net/http omits it for
// other hosts.
func staySecure(r *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return errors.New("more than ten redirections")
	}
	if via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
		return errors.New("redirected from https to http")
	}
	return nil
}

// hub is a client for two kinds of requests: the list of files of a model version, and one file.
type hub struct {
	url, token string
	pause      time.Duration // before the first retry; doubled for each further one
	client     *http.Client
	log        io.Writer
}

// model downloads the tokenizer files of a model into a folder.
func (h *hub) model(
	ctx context.Context,
	m modelSource,
	folder string,
) (commit string, files int, size int64, err error) {
	var listing struct {
		SHA      string `json:"sha"`
		Siblings []struct {
			Name string `json:"rfilename"`
		} `json:"siblings"`
	}
	address := h.url + "/api/models/" + escaped(m.repository) + "/revision/" + url.PathEscape(m.revision)
	err = h.get(ctx, address, func(body io.Reader) error {
		text, err := io.ReadAll(io.LimitReader(body, maxListingBytes+1))
		if err != nil {
			return err
		}
		if len(text) > maxListingBytes {
			return final{fmt.Errorf("its list of files has more than %d MB", maxListingBytes>>20)}
		}
		if err := json.Unmarshal(text, &listing); err != nil || listing.SHA == "" {
			return final{fmt.Errorf("%s does not answer as a model hub does: no commit and list of files", address)}
		}
		return nil
	})
	if err != nil {
		return "", 0, 0, err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", 0, 0, err
	}
	root, err := os.OpenRoot(folder) // the hub chooses the names: none may leave the folder
	if err != nil {
		return "", 0, 0, err
	}
	defer root.Close()
	tokenizer := false
	for _, sibling := range listing.Siblings {
		name := sibling.Name
		if ok, _ := path.Match("*.safetensors", name); ok {
			// Engines use Mistral's own tokenizer for a folder that has Mistral's own weights. Package tokenizer looks
			// for the names of those files too, so they are created empty.
			if f, err := root.Create(name); err != nil {
				return "", 0, 0, err
			} else if err := f.Close(); err != nil {
				return "", 0, 0, err
			}
			continue
		}
		if !needsFile(name) {
			continue
		}
		if files++; files > maxFetchedFiles {
			return "", 0, 0, fmt.Errorf("more than %d files that a tokenizer might need", maxFetchedFiles)
		}
		n, err := h.file(
			ctx,
			h.url+"/"+escaped(m.repository)+"/resolve/"+url.PathEscape(listing.SHA)+"/"+escaped(name),
			root,
			name,
		)
		if err != nil {
			return "", 0, 0, fmt.Errorf("%s: %w", name, err)
		}
		size += n
		tokenizer = tokenizer || name == "tokenizer.json" || strings.HasSuffix(name, ".tiktoken") ||
			name == "tiktoken.model" || name == "tekken.json"
	}
	if !tokenizer {
		return "", 0, 0, errors.New("it has no tokenizer.json, tiktoken.model or tekken.json, and kvepp reads no " +
			"other tokenizer")
	}
	return listing.SHA, files, size, nil
}

// needsFile reports whether a file of a model is fetched.
func needsFile(name string) bool {
	for _, pattern := range fetched {
		if ok, _ := path.Match(pattern, name); ok {
			return true
		}
	}
	return false
}

// escaped returns a path with each part escaped; parts may hold any character.
func escaped(p string) string {
	parts := strings.Split(p, "/")
	for i, part := range parts {
		parts[i] = url.PathEscape(part)
	}
	return strings.Join(parts, "/")
}

// staleParts is the age at which a part of a file is an ended process's. No fetch takes so long.
const staleParts = 24 * time.Hour

// file downloads one file. The file is written completely or not at all, also if other processes fetch into the same
// folder: the init containers of several replicas share a claim.
func (h *hub) file(ctx context.Context, address string, root *os.Root, name string) (size int64, err error) {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return 0, err
	}
	if parts, err := fs.Glob(root.FS(), name+".*.part"); err == nil {
		for _, part := range parts {
			if info, err := root.Stat(part); err == nil && time.Since(info.ModTime()) > staleParts {
				_ = root.Remove(part) // another process may have removed it
			}
		}
	}
	part := name + "." + rand.Text() + ".part"
	err = h.get(ctx, address, func(body io.Reader) error {
		f, err := root.Create(part)
		if err != nil {
			return final{err}
		}
		size, err = io.Copy(f, io.LimitReader(body, maxFetchedBytes+1))
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
		if size > maxFetchedBytes {
			return final{fmt.Errorf("more than %d MB", maxFetchedBytes>>20)}
		}
		return nil
	})
	if err != nil {
		return 0, errors.Join(err, ignoreAbsent(root.Remove(part)))
	}
	return size, root.Rename(part, name)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// final is an error that a retry cannot remove.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// get requests an address and passes the body to read. It retries temporary failures until ctx ends.
func (h *hub) get(ctx context.Context, address string, read func(io.Reader) error) error {
	for pause := h.pause; ; pause = min(2*pause, time.Minute) {
		err := h.try(ctx, address, read)
		if err == nil || errors.As(err, new(final)) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("--timeout is over: %w", err)
		}
		fmt.Fprintf(h.log, "kvepp fetch: %v; again in %s\n", err, pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("--timeout is over: %w", err)
		}
	}
}

func (h *hub) try(ctx context.Context, address string, read func(io.Reader) error) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return final{err}
	}
	useragent.Add(request)
	if h.token != "" {
		request.Header.Set("Authorization", "Bearer "+h.token)
	}
	answer, err := h.client.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	switch code := answer.StatusCode; {
	case code == http.StatusOK:
		return read(answer.Body)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return final{
			fmt.Errorf(
				"%s answers %s: the model wants a token (--token-file) of a user who may read it, or there is no "+
					"model of that name",
				address,
				answer.Status,
			),
		}
	case code == http.StatusNotFound:
		return final{
			fmt.Errorf(
				"%s answers %s: no such model or revision, or the mirror lacks that address",
				address,
				answer.Status,
			),
		}
	case code == http.StatusTooManyRequests || code >= 500:
		return fmt.Errorf("%s answers %s", address, answer.Status)
	default:
		return final{fmt.Errorf("%s answers %s", address, answer.Status)}
	}
}
