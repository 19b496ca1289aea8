// Package client asks the admin address of a running kvepp serve, and prints what it says: the commands workers,
// cordon, drain, uncordon, decisions, explain, ladder and top.
//
// Concurrency: a Config is for one caller at a time.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/useragent"
	"kvepp/pool"
	"kvepp/serve/api"
)

// Config are a command's flags.
type Config struct {
	Command   string // such as workers
	Address   string // HOST:PORT of the running kvepp's admin address
	TokenFile string
	Token     string // that the file holds
	Endpoint  string // which cordon, drain and uncordon change

	timeout   time.Duration // of drain; 0: none
	json      bool
	decisions decisionsConfig
	explain   explainConfig
}

// Help has the beginning of each command's help.
var Help = map[string]string{
	"workers": workersHelp, "cordon": workersHelp, "drain": workersHelp, "uncordon": workersHelp,
	"decisions": decisionsHelp, "explain": explainHelp, "ladder": ladderHelp,
}

// AddFlags declares the flags of c.Command.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&c.Address, "admin-address", "127.0.0.1:9091",
		"`HOST:PORT` of the running kvepp: the value of its own --admin-address")
	f.StringVar(&c.TokenFile, "admin-token-file", "",
		"`FILE` with the token of the running kvepp: the value of its own --admin-token-file")
	switch c.Command {
	case "drain":
		f.DurationVar(&c.timeout, "timeout", 0, "how long to wait for running requests to end, for example 10m; the "+
			"endpoint stays cordoned afterwards. 0: no limit")
	case "ladder":
		f.BoolVar(&c.json, "json", false, "print the response of /debug/ladder")
	case "decisions":
		f.BoolVar(&c.json, "json", false, "print each decision as one line of JSON, as in /debug/decisions")
		c.decisions.addFlags(f)
	case "explain":
		f.BoolVar(&c.json, "json", false, "print the response of POST /pick")
		c.explain.addFlags(f)
	}
}

// Validate checks the flags, and takes the command's arguments.
func (c *Config) Validate(args []string) error {
	if c.Address = api.Dialable(c.Address); pool.CheckHostPort(c.Address) != nil {
		return fmt.Errorf("--admin-address: %w", pool.CheckHostPort(c.Address))
	}
	if err := flags.NotNegative("timeout", c.timeout); err != nil {
		return err
	}
	changes := slices.Contains([]string{"cordon", "drain", "uncordon"}, c.Command)
	switch {
	case changes && (len(args) == 0 || args[0] == ""):
		return fmt.Errorf("name the endpoint: kvepp %s NAME (\"kvepp workers\" lists the names)", c.Command)
	case changes && len(args) > 1:
		return fmt.Errorf("unexpected argument %q: one endpoint at a time", args[1])
	case changes:
		c.Endpoint = args[0]
	case len(args) > 0 && c.Command == "workers":
		return fmt.Errorf("unexpected argument %q: kvepp workers lists all endpoints", args[0])
	case len(args) > 0:
		return fmt.Errorf("unexpected argument %q: \"kvepp %s --help\" lists the flags", args[0], c.Command)
	case c.Command == "decisions":
		return c.decisions.validate()
	case c.Command == "explain":
		return c.explain.validate()
	}
	return nil
}

// Run runs the command. Its error says what to do.
func (c *Config) Run(ctx context.Context, stdin io.Reader, stdout, stderr io.Writer) error {
	at := &server{c.Address, c.Token}
	switch c.Command {
	case "workers":
		return at.workers(ctx, stdout)
	case "decisions":
		return at.decisions(ctx, &c.decisions, c.json, stdout, stderr)
	case "explain":
		return at.explain(ctx, &c.explain, c.json, stdin, stdout)
	case "ladder":
		return at.ladder(ctx, c.json, stdout)
	case "drain":
		return at.drain(ctx, c.Endpoint, c.timeout, time.Second, stdout, stderr)
	}
	return at.change(ctx, c.Endpoint, c.Command, stdout)
}

// server is a running kvepp.
type server struct{ address, token string }

const (
	patience    = 10 * time.Second // for a response
	maxResponse = 64 << 20         // bytes
)

var errUnreachable = errors.New("cannot reach kvepp")

// ask sends a request, and decodes the JSON of the response into v. Errors say what to do. An error that may be
// temporary wraps errUnreachable.
func (s *server) ask(ctx context.Context, method, path string, header http.Header, body []byte, v any) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	resp, err := s.open(ctx, method, path, header, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err != nil {
		return fmt.Errorf("%w at %s: its response is incomplete (%w)", errUnreachable, s.address, err)
	}
	if err := json.Unmarshal(text, v); err != nil {
		return fmt.Errorf("%s does not answer as kvepp serve does (%w); is it the address of another program?",
			s.address, err)
	}
	return nil
}

func (s *server) get(ctx context.Context, path string, v any) error {
	return s.ask(ctx, http.MethodGet, path, nil, nil, v)
}

// open sends a request, and returns the response if its status is 200.
func (s *server) open(ctx context.Context, method, path string, header http.Header, body []byte) (
	*http.Response, error,
) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+s.address+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if header != nil {
		req.Header = header
	}
	if s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	useragent.Add(req)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, fmt.Errorf("%w at %s (%w); a running kvepp serve listens there if its --admin-address says so. "+
			"Give the address that it has as --admin-address HOST:PORT", errUnreachable, s.address, errors.Unwrap(err))
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	var refused struct{ Error string }
	switch {
	case err != nil:
		return nil, fmt.Errorf("%w at %s: its response is incomplete (%w)", errUnreachable, s.address, err)
	case resp.StatusCode == http.StatusUnauthorized:
		return nil, fmt.Errorf("%s wants another token: give --admin-token-file with the token of the running kvepp's "+
			"--admin-token-file", s.address)
	case json.Unmarshal(text, &refused) == nil && refused.Error != "":
		return nil, errors.New(refused.Error)
	}
	return nil, fmt.Errorf("%s answers %s to %s %s; is it the --admin-address of a kvepp serve of this version?",
		s.address, resp.Status, method, path)
}

// table returns the table that write makes of cells with tabs between them.
func table(write func(io.Writer)) []byte {
	var text bytes.Buffer
	t := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	write(t)
	t.Flush() // to memory: cannot fail
	return text.Bytes()
}

// writeJSON writes a value for people and programs.
func writeJSON(to io.Writer, v any) error {
	e := json.NewEncoder(to)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// worker names a worker by its endpoint and rank.
func worker(name string, rank uint32) string { return fmt.Sprintf("%s/%d", name, rank) }

// printable replaces control characters, which a client may have put into a name.
func printable(text string) string {
	return strings.Map(func(c rune) rune {
		if unicode.IsPrint(c) {
			return c
		}
		return '?'
	}, text)
}
