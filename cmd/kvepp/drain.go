package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/useragent"
	"kvepp/pool"
	"kvepp/router/eject"
	"kvepp/serve/admin"
)

const drainHelp = `Take an endpoint out of routing for maintenance, and bring it back. These commands talk to a running
kvepp serve at its --admin-address.

Usage:       kvepp workers          list the endpoints, whether they get requests, and how many run
             kvepp cordon NAME      send NAME no new requests; sessions move to other endpoints
             kvepp drain NAME       cordon NAME, then wait until no request runs on it
             kvepp uncordon NAME    send NAME requests again
Example:     kvepp drain worker-0 --timeout 10m && systemctl restart vllm && kvepp uncordon worker-0
Exit status: 0 if done (drain: no request runs), 1 if not or after --timeout, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

NAME is an endpoint's name in the endpoints file; for a Pod it is POD-rank-0. kvepp keeps its index
of the endpoint's cache. The cordon ends with kvepp uncordon, or when kvepp restarts. Each kvepp
process has its own cordons: with several replicas, run the command for each of them, or annotate
the Pod with kvepp/cordon=true, which all replicas follow.
`

// adminOptions are the flags of the commands that talk to a running kvepp.
type adminOptions struct {
	address, tokenFile string
	timeout            time.Duration
	asJSON             bool
	decisions          decisionOptions
	explain            explainOptions
	top                topOptions

	name string // of the endpoint; empty for workers
}

func adminFlags(o *adminOptions, command string) *pflag.FlagSet {
	f := newFlags("kvepp " + command)
	f.StringVar(
		&o.address,
		"admin-address",
		"127.0.0.1:9091",
		"`HOST:PORT` of the running kvepp: the value of its own --admin-address",
	)
	f.StringVar(
		&o.tokenFile,
		"admin-token-file",
		"",
		"`FILE` with the token of the running kvepp: the value of its own --admin-token-file",
	)
	if command == "drain" {
		f.DurationVar(
			&o.timeout,
			"timeout",
			0,
			"how long to wait for running requests to end, for example 10m; the endpoint stays cordoned afterwards. "+
				"0: no limit",
		)
	}
	switch command {
	case "ladder":
		f.BoolVar(&o.asJSON, "json", false, "print the answer of /debug/ladder")
	case "decisions":
		f.BoolVar(&o.asJSON, "json", false, "print each decision as one line of JSON, as in /debug/decisions")
		o.decisions.add(f)
	case "explain":
		f.BoolVar(&o.asJSON, "json", false, "print the answer of POST /pick")
		o.explain.add(f)
	case "top":
		o.top.add(f)
	}
	section(f, "Flags of kvepp "+command)
	documentEnvironment(f, "")
	return f
}

func parseAdmin(o *adminOptions, command string, args []string, getenv func(string) string) error {
	f := adminFlags(o, command)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := fromEnvironment(f, getenv); err != nil {
		return err
	}
	if err := pool.CheckHostPort(dialable(o.address)); err != nil {
		return fmt.Errorf("--admin-address: %w", err)
	}
	if err := durations(durationFlag{"timeout", o.timeout, true}); err != nil {
		return err
	}
	switch {
	case command == "workers" && f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: kvepp workers lists all endpoints", f.Arg(0))
	case slices.Contains(viewCommands, command) && f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q: \"kvepp %s --help\" lists the flags", f.Arg(0), command)
	case command == "decisions":
		return o.decisions.check()
	case command == "explain":
		return o.explain.check()
	case command == "top":
		return o.top.check()
	case command == "workers", command == "ladder":
	case f.NArg() == 0 || f.Arg(0) == "":
		return fmt.Errorf("name the endpoint: kvepp %s NAME (\"kvepp workers\" lists the names)", command)
	case f.NArg() > 1:
		return fmt.Errorf("unexpected argument %q: one endpoint at a time", f.Arg(1))
	default:
		o.name = f.Arg(0)
	}
	return nil
}

// viewCommands show something and take no argument.
var viewCommands = []string{"ladder", "decisions", "explain", "top"}

// runAdmin runs a command that talks to a running kvepp. It returns the exit status. kvepp
// explain and top read stdin.
func runAdmin(
	command string,
	args []string,
	stdin io.Reader,
	stdout, stderr io.Writer,
	getenv func(string) string,
) int {
	var o adminOptions
	switch err := parseAdmin(&o, command, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, adminFlags(new(adminOptions), command), err)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp %s: %v\n\"kvepp %s --help\" shows how to use it.\n", command, err, command)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := func() error {
		token, err := newTokenFile("--admin-token-file", o.tokenFile)
		if err != nil {
			return err
		}
		c := &adminClient{
			address:  dialable(o.address),
			token:    token.token(),
			http:     &http.Client{Timeout: 10 * time.Second},
			poll:     time.Second,
			progress: stderr,
		}
		switch command {
		case "workers":
			return c.workers(ctx, stdout)
		case "ladder":
			return c.ladder(ctx, o.asJSON, stdout)
		case "decisions":
			return c.decisions(ctx, &o.decisions, o.asJSON, stdout)
		case "explain":
			return c.explain(ctx, &o.explain, o.asJSON, stdin, stdout)
		case "top":
			return c.top(ctx, &o.top, stdin, stdout)
		case "drain":
			return c.drain(ctx, o.name, o.timeout, stdout)
		}
		return c.change(ctx, o.name, command, stdout)
	}()
	if err != nil {
		fmt.Fprintf(stderr, "kvepp %s: %v\n", command, err)
		return 1
	}
	return 0
}

// adminClient sends requests to a running kvepp.
type adminClient struct {
	address, token string
	http           *http.Client
	poll           time.Duration // interval at which drain polls the endpoint
	progress       io.Writer
}

// send sends a request and decodes the response into v. Errors say what to do. An error that may be temporary wraps
// errUnreachable.
func (c *adminClient) send(ctx context.Context, method, path string, v any) error {
	resp, err := c.open(ctx, c.http, method, path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return c.refused(resp, method, path)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return fmt.Errorf("%w at %s: its response is incomplete (%w)", errUnreachable, c.address, err)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("%s does not answer as kvepp serve does (%w); is it the address of another program?",
			c.address, err)
	}
	return nil
}

// open sends a request and returns the answer of any status.
func (c *adminClient) open(ctx context.Context, client *http.Client, method, path string) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.address+path, nil)
	if err != nil {
		return nil, err
	}
	return c.do(client, req)
}

// do sends a request with the token.
func (c *adminClient) do(client *http.Client, req *http.Request) (*http.Response, error) {
	if c.token != "" {
		req.Header.Set("Authorization", "Bearer "+c.token)
	}
	useragent.Add(req)
	resp, err := client.Do(req)
	if err != nil {
		return nil, fmt.Errorf(
			"%w at %s (%w); a running kvepp serve listens there if its --admin-address says so. Give the address "+
				"that it has as --admin-address HOST:PORT",
			errUnreachable,
			c.address,
			errors.Unwrap(err),
		)
	}
	return resp, nil
}

// refused returns the error for an answer with another status than 200.
func (c *adminClient) refused(resp *http.Response, method, path string) error {
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("%w at %s: its response is incomplete (%w)", errUnreachable, c.address, err)
	}
	var refused struct {
		Error string `json:"error"`
	}
	switch {
	case resp.StatusCode == http.StatusUnauthorized:
		return fmt.Errorf(
			"%s wants another token: give --admin-token-file with the token of the running kvepp's --admin-token-file",
			c.address,
		)
	case json.Unmarshal(body, &refused) == nil && refused.Error != "":
		return errors.New(refused.Error)
	}
	return fmt.Errorf(
		"%s answers %s to %s %s; is it the --admin-address of a kvepp serve of this version?",
		c.address,
		resp.Status,
		method,
		path,
	)
}

var errUnreachable = errors.New("cannot reach kvepp")

func workerPath(name string) string { return "/workers/" + url.PathEscape(name) }

// workers writes a table of the endpoints.
func (c *adminClient) workers(ctx context.Context, to io.Writer) error {
	var all struct{ Endpoints []admin.Endpoint }
	if err := c.send(ctx, http.MethodGet, "/workers", &all); err != nil {
		return err
	}
	var table bytes.Buffer
	t := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tSTATE\tRUNNING\tSESSIONS\tROLE\tMODEL\tADDRESS")
	for i := range all.Endpoints {
		e := &all.Endpoints[i]
		fmt.Fprintf(
			t,
			"%s\t%s\t%d\t%d\t%s\t%s\t%s\n",
			e.Name,
			stateOf(e),
			e.RunningRequests,
			e.Sessions,
			cmp.Or(e.Role, "-"),
			cmp.Or(e.Model, "-"),
			cmp.Or(e.Address, "-"),
		)
	}
	t.Flush() // to memory: cannot fail
	_, err := to.Write(table.Bytes())
	return err
}

// stateOf describes whether an endpoint gets requests.
func stateOf(e *admin.Endpoint) string {
	var parts []string
	if !e.InPool {
		parts = append(parts, "not in the pool")
	}
	for _, c := range admin.ConditionsOf(e) {
		if e.Cordon != nil && c.State == e.Cordon.As {
			parts = append(parts, fmt.Sprintf("%s (%s)", c.State, strings.Join(e.Cordon.By, ", ")))
		} else {
			parts = append(parts, c.State+": "+c.Detail)
		}
	}
	if len(parts) == 0 {
		return "serving"
	}
	return strings.Join(parts, "; ")
}

// runningText returns the number of running requests as text.
func runningText(n int) string {
	switch n {
	case 0:
		return "no request runs"
	case 1:
		return "1 request runs"
	}
	return fmt.Sprintf("%d requests run", n)
}

// change cordons or uncordons an endpoint.
func (c *adminClient) change(ctx context.Context, name, change string, to io.Writer) error {
	var e admin.Endpoint
	if err := c.send(ctx, http.MethodPost, workerPath(name)+"/"+change, &e); err != nil {
		return err
	}
	if change == "uncordon" && e.Cordon != nil {
		return fmt.Errorf(
			"%s still gets no new requests: it is cordoned by the %s, where you can end that "+
				"(docs/operations.md)",
			name,
			strings.Join(e.Cordon.By, " and the "),
		)
	}
	fmt.Fprintf(to, "%s: %s, %s\n", name, stateOf(&e), runningText(e.RunningRequests))
	return nil
}

const (
	progressInterval = 10 * time.Second // longest time without a progress line
	failurePatience  = 15 * time.Second // how long requests to kvepp may fail before drain gives up
)

// drain drains an endpoint, and returns when no request runs on it. An error includes the number of running requests.
func (c *adminClient) drain(ctx context.Context, name string, timeout time.Duration, to io.Writer) error {
	start := time.Now()
	elapsed := func() time.Duration { return time.Since(start).Round(time.Second) }
	if timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, timeout)
		defer cancel()
	}
	var e admin.Endpoint
	if err := c.send(ctx, http.MethodPost, workerPath(name)+"/drain", &e); err != nil {
		return err
	}
	reported, reportedAt, reachedAt := -1, start, start
	for {
		switch {
		case !e.InPool:
			return fmt.Errorf(
				"%s has left the pool: kvepp cannot count its running requests any more. Look at the engine itself "+
					"before you stop it",
				name,
			)
		case e.Cordon == nil || !slices.Contains(e.Cordon.By, admin.Operator):
			return fmt.Errorf(
				"%s is not cordoned any more, and %s on it: kvepp has restarted, or an operator has uncordoned it. "+
					"Drain it again",
				name,
				runningText(e.RunningRequests),
			)
		case e.RunningRequests == 0:
			fmt.Fprintf(
				to,
				"%s: drained after %v, no request runs. \"kvepp uncordon %s\" brings it back.\n",
				name,
				elapsed(),
				name,
			)
			return nil
		}
		if e.RunningRequests != reported || time.Since(reportedAt) >= progressInterval {
			reported, reportedAt = e.RunningRequests, time.Now()
			fmt.Fprintf(c.progress, "%s: %s, %s after %v\n", name, eject.Draining, runningText(reported), elapsed())
		}
		select {
		case <-ctx.Done():
			why := "interrupted"
			if errors.Is(ctx.Err(), context.DeadlineExceeded) {
				why = "--timeout is over"
			}
			return fmt.Errorf(
				"%s after %v: %s on %s. It stays cordoned: drain it again to wait further, stop the engine to break "+
					"them off, or bring it back with \"kvepp uncordon %s\"",
				why,
				elapsed(),
				runningText(e.RunningRequests),
				name,
				name,
			)
		case <-time.After(c.poll):
		}
		var now admin.Endpoint
		switch err := c.send(ctx, http.MethodGet, workerPath(name), &now); {
		case err == nil:
			e, reachedAt = now, time.Now()
		case ctx.Err() != nil: // reported above
		case !errors.Is(err, errUnreachable), time.Since(reachedAt) > failurePatience:
			return fmt.Errorf("%w. When it was last reached, %s on %s", err, runningText(e.RunningRequests), name)
		}
	}
}
