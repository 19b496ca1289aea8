// Package fetch downloads tokenizers from a model hub or its mirror: `kvepp fetch`.
//
// Concurrency: a Config is for one caller at a time. Several processes may fetch into one folder.
package fetch

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
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
	"regexp"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/useragent"
)

// Help is the beginning of the command's help.
const Help = `kvepp fetch downloads tokenizers from a model hub or its mirror: a few megabytes that kvepp reads,
never weights.

Usage:       kvepp fetch --hub URL --to DIR FOLDER=REPOSITORY[@REVISION]... [flags]
Example:     kvepp fetch --hub https://hub.example.com --to /models qwen3-8b=Qwen/Qwen3-8B@main
Precedence:  flag, variable KVEPP_FETCH_<FLAG>, default

FOLDER is below --to ("." is --to itself), REPOSITORY the hub's name of the model, REVISION its
version (default: main). All files come from one commit, which is printed. Give this commit as the
revision, here and to the engine, so that both use the same files.
`

// Limits on what a hub can send.
const (
	maxListingBytes = 16 << 20
	maxFetchedBytes = 256 << 20 // per file; the largest known tokenizer.json files have 35 MB
	maxFetchedModel = 512 << 20 // all files of a model
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
	"tokenizer.model",
	"tokenizer.model.v[0-9]*", // Mistral's
	"tekken.json",
	"vocab.json",
	"merges.txt",
}

// Config are the flags and arguments of `kvepp fetch`.
type Config struct {
	Hub       string // URL
	TokenFile string // of the hub's token; the caller reads it
	Token     string

	to       string
	timeout  time.Duration
	optional bool
	models   []modelSource
}

// modelSource is one model on a hub, and its target folder.
type modelSource struct{ folder, repository, revision string }

// AddFlags declares the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&c.Hub, "hub", "", "the hub's `URL`; also from HF_ENDPOINT, which engines read too")
	f.StringVar(&c.to, "to", "", "the `FOLDER` for all models")
	f.StringVar(&c.TokenFile, "token-file", "",
		"`FILE` with the hub's token, which some models need; HF_TOKEN can hold the token itself")
	f.DurationVar(&c.timeout, "timeout", 5*time.Minute,
		"time limit for all models together; temporary failures are retried within it")
	f.BoolVar(&c.optional, "optional", false,
		"exit with 0 even if a model could not be fetched: kvepp then routes its requests by load")
}

// Validate checks the flags and reads the arguments, which name the models.
func (c *Config) Validate(args []string) error {
	hub, err := url.Parse(c.Hub)
	switch {
	case c.Hub == "":
		return errors.New("--hub is missing: the address of the hub or mirror, https://hub.example.com for example")
	case err != nil || hub.Scheme != "http" && hub.Scheme != "https" || hub.Host == "":
		return errors.New("--hub: want http://HOST or https://HOST, with a path if the mirror has one")
	case hub.User != nil:
		return errors.New("--hub: put the token into --token-file, not into the address, which is logged")
	case c.to == "":
		return errors.New("--to is missing: the folder for the models")
	case len(args) == 0:
		return errors.New("name the models: FOLDER=REPOSITORY[@REVISION]")
	}
	if err := flags.Positive("timeout", c.timeout); err != nil {
		return err
	}
	c.Hub = strings.TrimSuffix(c.Hub, "/")
	for _, arg := range args {
		folder, source, _ := strings.Cut(arg, "=")
		repository, revision, given := strings.Cut(source, "@")
		if !given {
			revision = "main"
		}
		if !filepath.IsLocal(folder) || repository == "" || revision == "" || path.Clean(repository) != repository ||
			strings.HasPrefix(repository, "..") || strings.HasPrefix(repository, "/") {
			return fmt.Errorf("%q: want FOLDER=REPOSITORY[@REVISION], the folder one below --to", arg)
		}
		c.models = append(c.models, modelSource{folder, repository, revision})
	}
	return nil
}

// Run fetches the models, and prints a line for each. It reports whether the command succeeded. When ctx ends, no parts
// of files remain.
func (c *Config) Run(ctx context.Context, stdout, stderr io.Writer) bool {
	ctx, cancel := context.WithTimeoutCause(ctx, c.timeout, errors.New("--timeout is over"))
	defer cancel()
	h := hub{c.Hub, c.Token, time.Second, &http.Client{CheckRedirect: staySecure}, stderr, maxFetchedBytes,
		maxFetchedModel}
	failed := false
	for _, m := range c.models {
		commit, files, size, err := h.model(ctx, m, filepath.Join(c.to, m.folder))
		if err != nil {
			failed = true
			fmt.Fprintf(stderr, "kvepp fetch: %s of %s: %v\n", m.repository, c.Hub, err)
			continue
		}
		fmt.Fprintf(stdout, "%s: %s at %s, %d files, %.1f MB\n", m.folder, m.repository, commit, files,
			float64(size)/1e6)
	}
	return !failed || c.optional && !errors.Is(ctx.Err(), context.Canceled)
}

// staySecure refuses redirects from HTTPS to plain HTTP. Only the hub's own host and port get the token: net/http would
// also send it to the host's subdomains and other ports.
func staySecure(r *http.Request, via []*http.Request) error {
	if len(via) >= 10 {
		return errors.New("more than ten redirections")
	}
	if via[0].URL.Scheme == "https" && r.URL.Scheme != "https" {
		return errors.New("redirected from https to http")
	}
	if r.URL.Host != via[0].URL.Host {
		r.Header.Del("Authorization")
	}
	return nil
}

// hub is a client for two kinds of requests: the list of files of a model version, and one file.
type hub struct {
	url, token         string
	pause              time.Duration // before the first retry; doubled for each further one
	client             *http.Client
	log                io.Writer
	maxBytes, maxModel int64 // of one file, and of all files of a model
}

// hubFile is a file of a model version as hubs list it. Hubs need not give sizes and hashes.
// Source: the API of the Hugging Face Hub, /api/models/REPOSITORY/revision/REVISION?blobs=true.
type hubFile struct {
	Name string `json:"rfilename"`
	Size *int64 `json:"size"`
	Blob string `json:"blobId"` // of its object in Git
	LFS  *struct {
		SHA256 string `json:"sha256"`
	} `json:"lfs"`
}

// model downloads the tokenizer files of a model into a folder. It replaces files only when it has all of them, and
// changes no other file.
func (h *hub) model(ctx context.Context, m modelSource, folder string) (
	commit string, files int, size int64, err error,
) {
	commit, listed, err := h.list(ctx, m)
	if err != nil {
		return "", 0, 0, err
	}
	wanted, weights, err := h.choose(listed)
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
	part := "." + rand.Text() + ".part" // of this process: other replicas may fetch into the same folder
	defer func() {
		for _, file := range wanted {
			if left := root.Remove(file.Name + part); !errors.Is(left, os.ErrNotExist) {
				err = errors.Join(err, left)
			}
		}
	}()
	for _, file := range wanted {
		address := h.url + "/" + escaped(m.repository) + "/resolve/" + url.PathEscape(commit) + "/" + escaped(file.Name)
		n, err := h.file(ctx, address, file, root, file.Name+part, min(h.maxBytes, h.maxModel-size))
		if err != nil {
			return "", 0, 0, fmt.Errorf("%s: %w", file.Name, err)
		}
		size += n
	}
	for _, file := range wanted {
		if err := root.Rename(file.Name+part, file.Name); err != nil {
			return "", 0, 0, err
		}
	}
	return commit, len(wanted), size, markWeights(root, weights)
}

// list returns the commit of a model version, and its files.
func (h *hub) list(ctx context.Context, m modelSource) (commit string, files []hubFile, err error) {
	var listing struct {
		SHA      string    `json:"sha"`
		Siblings []hubFile `json:"siblings"`
	}
	address := h.url + "/api/models/" + escaped(m.repository) + "/revision/" + url.PathEscape(m.revision)
	err = h.get(ctx, address+"?blobs=true", func(response *http.Response) error {
		text, err := io.ReadAll(io.LimitReader(response.Body, maxListingBytes+1))
		if err != nil {
			return err
		}
		if len(text) > maxListingBytes {
			return final{fmt.Errorf("its list of files has more than %d MB", maxListingBytes>>20)}
		}
		if err := json.Unmarshal(text, &listing); err != nil || !plainName.MatchString(listing.SHA) {
			return final{fmt.Errorf("%s does not answer as a model hub does: no commit and list of files", address)}
		}
		return nil
	})
	return listing.SHA, listing.Siblings, err
}

// plainName matches names that are the same to every file system and terminal, and stay in their folder.
var plainName = regexp.MustCompile(`^(\w[\w.,+@=() -]{0,127}/)?\w[\w.,+@=() -]{0,127}$`)

// choose returns the files that a tokenizer may need, and the names of two of the weights: one of Mistral's own (true)
// and one of any others. It fails if kvepp could not read the tokenizer, or if the hub lists more than kvepp fetches.
func (h *hub) choose(listed []hubFile) (wanted []hubFile, weights map[bool]string, err error) {
	tokenizer, seen, weights := false, map[string]bool{}, map[bool]string{}
	for _, file := range listed {
		isWeight, _ := path.Match("*.safetensors", file.Name)
		switch lower := strings.ToLower(file.Name); {
		case !isWeight && !needsFile(file.Name) || !plainName.MatchString(file.Name):
		case isWeight:
			weights[strings.HasPrefix(file.Name, "consolidated")] = file.Name
		case seen[lower]:
			return nil, nil, fmt.Errorf("the hub lists %s twice, which may be one file here", file.Name)
		case file.Size != nil && *file.Size > h.maxBytes:
			return nil, nil, fmt.Errorf("%s: more than %d MB", file.Name, h.maxBytes>>20)
		case len(wanted) == maxFetchedFiles:
			return nil, nil, fmt.Errorf("more than %d files that a tokenizer might need", maxFetchedFiles)
		default:
			seen[lower], wanted = true, append(wanted, file)
			tokenizer = tokenizer || file.Name == "tokenizer.json" || strings.HasSuffix(file.Name, ".tiktoken") ||
				file.Name == "tiktoken.model" || file.Name == "tekken.json"
		}
	}
	if !tokenizer {
		return nil, nil, errors.New("it has no tokenizer.json, tiktoken.model or tekken.json, and kvepp reads no " +
			"other tokenizer")
	}
	return wanted, weights, nil
}

// markWeights creates empty files with the names of weights in a folder that has none. Engines use Mistral's own
// tokenizer for a folder that has Mistral's own weights; package tokenizer looks for the names of those files, too. In
// a folder with weights an engine would read an empty file as one of them.
func markWeights(root *os.Root, weights map[bool]string) error {
	for _, pattern := range []string{"*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf"} {
		if names, err := fs.Glob(root.FS(), pattern); err != nil || len(names) > 0 {
			return err
		}
	}
	for _, name := range weights {
		f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
		if err == nil {
			err = f.Close()
		}
		if err != nil && !errors.Is(err, os.ErrExist) { // another process may have been first
			return err
		}
	}
	return nil
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

// file downloads one file of at most most bytes into part, and checks what the hub says of it. It returns its size. The
// caller removes part.
func (h *hub) file(ctx context.Context, address string, file hubFile, root *os.Root, part string, most int64) (
	size int64, err error,
) {
	if err := root.MkdirAll(path.Dir(part), 0o755); err != nil {
		return 0, err
	}
	if parts, err := fs.Glob(root.FS(), file.Name+".*.part"); err == nil {
		for _, part := range parts {
			if info, err := root.Lstat(part); err == nil && time.Since(info.ModTime()) > staleParts {
				_ = root.Remove(part) // another process may have removed it
			}
		}
	}
	err = h.get(ctx, address, func(response *http.Response) error {
		f, err := root.Create(part)
		if err != nil {
			return final{err}
		}
		defer f.Close()
		if size = response.ContentLength; size <= most {
			size, err = io.Copy(f, io.LimitReader(response.Body, most+1))
		}
		if size > most {
			err = final{fmt.Errorf("more than %d MB, or than %d MB with the model's other files", h.maxBytes>>20,
				h.maxModel>>20)}
		}
		if err == nil {
			err = errors.Join(file.check(f, size, h.etag(response)), f.Sync(), f.Close())
		}
		if errors.As(err, new(*fs.PathError)) { // of the disk, which may be full
			err = final{err}
		}
		return err
	})
	return size, err
}

// etag returns the ETag that the hub gives a file; "" if it gives none. Those of other hosts, to which the hub
// redirects, need not be hashes of the content.
func (h *hub) etag(response *http.Response) string {
	for r := response; r != nil; r = r.Request.Response {
		if tag := cmp.Or(r.Header.Get("X-Linked-Etag"), r.Header.Get("Etag")); tag != "" && // the first is Git LFS's
			strings.HasPrefix(r.Request.URL.String(), h.url+"/") {
			return strings.Trim(strings.TrimPrefix(tag, "W/"), `"`)
		}
	}
	return ""
}

// anyHash matches SHA-1 and SHA-256.
var anyHash = regexp.MustCompile("^([0-9a-f]{40}|[0-9a-f]{64})$")

// check compares a downloaded file with what the hub says of it: its size, its SHA-256, and the SHA-1 of its object in
// Git. An ETag that looks like one of the hashes is one.
func (file hubFile) check(f io.ReaderAt, size int64, etag string) error {
	if file.Size != nil && *file.Size != size {
		return final{fmt.Errorf("the hub sent %d bytes and lists %d", size, *file.Size)}
	}
	sum, plain, git := sha256.New(), sha1.New(), sha1.New()
	fmt.Fprintf(git, "blob %d\x00", size)
	if _, err := io.Copy(io.MultiWriter(sum, plain, git), io.NewSectionReader(f, 0, size)); err != nil {
		return err
	}
	// The ETag of some mirrors is the plain SHA-1.
	is := fmt.Sprintf("%x %x %x", sum.Sum(nil), plain.Sum(nil), git.Sum(nil))
	told := []string{etag, file.Blob}
	if file.LFS != nil { // the object in Git is a pointer
		told[1] = file.LFS.SHA256
	}
	for _, hash := range told {
		if hash = strings.ToLower(hash); anyHash.MatchString(hash) && !strings.Contains(is, hash) {
			return final{fmt.Errorf("the hub sent another content than that of the hash %s, which it gives", hash)}
		}
	}
	return nil
}

// final is an error that a retry cannot remove.
type final struct{ error }

func (f final) Unwrap() error { return f.error }

// get requests an address and passes the response to read. It retries temporary failures until ctx ends.
func (h *hub) get(ctx context.Context, address string, read func(*http.Response) error) error {
	for pause := h.pause; ; pause = min(2*pause, time.Minute) {
		err := h.try(ctx, address, read)
		if err == nil || errors.As(err, new(final)) {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
		fmt.Fprintf(h.log, "kvepp fetch: %v; again in %s\n", err, pause)
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", context.Cause(ctx), err)
		}
	}
}

func (h *hub) try(ctx context.Context, address string, read func(*http.Response) error) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return final{err}
	}
	useragent.Add(request)
	if h.token != "" {
		request.Header.Set("Authorization", "Bearer "+h.token)
	}
	response, err := h.client.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	switch code := response.StatusCode; {
	case code == http.StatusOK:
		return read(response)
	case code == http.StatusUnauthorized || code == http.StatusForbidden:
		return final{fmt.Errorf("%s answers %s: the model wants a token (--token-file) of a user who may read it, or "+
			"there is no model of that name", address, response.Status)}
	case code == http.StatusNotFound:
		return final{fmt.Errorf("%s answers %s: no such model or revision, or the mirror lacks that address", address,
			response.Status)}
	case code == http.StatusTooManyRequests || code >= 500:
		return fmt.Errorf("%s answers %s", address, response.Status)
	default:
		return final{fmt.Errorf("%s answers %s", address, response.Status)}
	}
}
