package client

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/serve/admin"
)

const decisionsHelp = `Show the latest decisions of a running kvepp serve and how their requests ended, the newest
last. The command asks its --admin-address.

Usage:       kvepp decisions [flags]
Example:     kvepp decisions --wrong             predictions that the engine did not confirm
             kvepp decisions --worker w0 --cold  requests that found nothing cached on w0
             kvepp decisions --slow 2s --follow  requests of two seconds or more, as they end
Exit status: 0 if shown, 1 if kvepp cannot be reached, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

CACHED is what the engine reports, with kvepp's prediction after the slash. TTFT is the time to the
first token of a streamed response. --json prints every candidate's cost.
`

type decisionsConfig struct {
	n                                                 int
	follow, cold, wrong                               bool
	worker, model, session, reason, status, requestID string
	slow                                              time.Duration
}

func (o *decisionsConfig) addFlags(f *pflag.FlagSet) {
	f.IntVar(&o.n, "number", 20, "how many decisions to show, `N`")
	f.BoolVar(&o.follow, "follow", false, "show each decision when its request has ended, until Ctrl-C")
	f.StringVar(&o.worker, "worker", "", "only those of this worker, `NAME` or NAME/RANK")
	f.StringVar(&o.model, "of-model", "", "only those of this `MODEL`")
	f.StringVar(&o.session, "session", "", "only those with this `STATE` of their session: new, kept or moved")
	f.StringVar(&o.reason, "reason", "", "only those with this `REASON`, as in kvepp_decisions_total")
	f.StringVar(&o.status, "status", "", "only those answered with this HTTP `STATUS`, such as 404 or 5xx")
	f.StringVar(&o.requestID, "request-id", "", "only those of this request, by the proxy's x-request-id, `ID`")
	f.BoolVar(&o.cold, "cold", false, "only those that found nothing cached on their worker")
	f.BoolVar(&o.wrong, "wrong", false, "only those where the engine reports another number of cached tokens than "+
		"kvepp predicted")
	f.DurationVar(&o.slow, "slow", 0, "only those whose first token took at least `DURATION`; 0: all")
}

func (o *decisionsConfig) validate() error {
	if o.n < 1 {
		return fmt.Errorf("--number %d: must be at least 1", o.n)
	}
	if o.slow < 0 {
		return fmt.Errorf("--slow %v: must not be negative", o.slow)
	}
	return nil
}

// path returns the path and query of /debug/decisions.
func (o *decisionsConfig) path() string {
	q := url.Values{}
	for name, value := range map[string]string{"worker": o.worker, "model": o.model, "session": o.session,
		"reason": o.reason, "status": o.status, "request_id": o.requestID} {
		if value != "" {
			q.Set(name, value)
		}
	}
	for name, on := range map[string]bool{"cold": o.cold, "wrong": o.wrong, "follow": o.follow} {
		if on {
			q.Set(name, "true")
		}
	}
	if o.slow > 0 {
		q.Set("slow", o.slow.String())
	}
	if !o.follow {
		q.Set("n", strconv.Itoa(o.n))
	}
	return "/debug/decisions?" + q.Encode()
}

// decisions writes a line for each decision.
func (s *server) decisions(ctx context.Context, o *decisionsConfig, asJSON bool, to, progress io.Writer) error {
	out := &decisionWriter{to: to, asJSON: asJSON}
	if o.follow {
		return s.followDecisions(ctx, o.path(), out, progress)
	}
	var all struct{ Decisions []json.RawMessage }
	if err := s.get(ctx, o.path(), &all); err != nil {
		return err
	}
	for _, raw := range slices.Backward(all.Decisions) {
		if err := out.write(raw); err != nil {
			return err
		}
	}
	return nil
}

// followDecisions writes decisions until ctx ends.
func (s *server) followDecisions(ctx context.Context, path string, out *decisionWriter, progress io.Writer) error {
	resp, err := s.open(ctx, http.MethodGet, path, nil, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines, missed := bufio.NewReader(resp.Body), false
	for {
		line, err := lines.ReadBytes('\n')
		line = bytes.TrimRight(line, "\n")
		switch data, isData := bytes.CutPrefix(line, []byte("data: ")); {
		case err != nil && ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("%w at %s: the stream of decisions ended (%w)", errUnreachable, s.address, err)
		case bytes.Equal(line, []byte("event: missed")):
			missed = true
		case isData && missed:
			missed = false
			fmt.Fprintf(progress, "%s decisions are left out: they came faster than they were read\n", data)
		case isData:
			if err := out.write(data); err != nil {
				return err
			}
		}
	}
}

// decisionWriter writes decisions as a table or as lines of JSON.
type decisionWriter struct {
	to     io.Writer
	asJSON bool
	begun  bool
}

const decisionFormat = "%-12s  %-20s  %-14s  %6s  %7s  %13s  %8s  %8s  %s\n"

// decisionTitles are those of the cells of a decision.
var decisionTitles = []any{"TIME", "WORKER", "REASON", "STATUS", "PROMPT", "CACHED", "TTFT", "DURATION"}

func (w *decisionWriter) write(raw []byte) error {
	if w.asJSON {
		_, err := fmt.Fprintf(w.to, "%s\n", raw)
		return err
	}
	var d admin.Decision
	if err := json.Unmarshal(raw, &d); err != nil {
		return errors.New("kvepp serve is of another version: give --json to see what it answers")
	}
	if !w.begun {
		w.begun = true
		if _, err := fmt.Fprintf(w.to, decisionFormat, append(decisionTitles, "REQUEST")...); err != nil {
			return err
		}
	}
	_, err := fmt.Fprintf(w.to, decisionFormat, append(cellsOf(&d, "15:04:05.000"),
		printable(strings.TrimSpace(d.RequestID+" "+d.Error)))...)
	return err
}

// cellsOf returns where a request went and what became of it, as text; "-": not known.
func cellsOf(d *admin.Decision, clock string) []any {
	at, status, cached, ttft, duration := "-", "running", "-", "-", "-"
	if d.Worker != nil {
		at = printable(worker(d.Worker.Name, d.Worker.Rank))
	}
	if d.Error != "" {
		status = "refused"
	}
	if o := d.Outcome; o != nil {
		status, duration = cmp.Or(o.Status, "none"), fmt.Sprintf("%.0fms", o.Duration)
		if o.TTFT > 0 {
			ttft = fmt.Sprintf("%.0fms", o.TTFT)
		}
		if o.CachedTokens != nil {
			cached = strconv.Itoa(*o.CachedTokens)
		}
	}
	return []any{d.Time.Local().Format(clock), at, d.Reason, status, strconv.Itoa(d.PromptTokens),
		cached + "/" + strconv.Itoa(d.PredictedCachedTokens), ttft, duration}
}
