package client

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
	"strings"

	"github.com/spf13/pflag"

	"kvepp/serve/admin"
	"kvepp/serve/api"
)

const explainHelp = `Show which worker a running kvepp serve would choose for a request now, what each candidate costs,
and why the others lose. It is a dry run: kvepp books nothing, sends the request nowhere, and counts
it in no metric. The command asks its --admin-address.

Usage:       kvepp explain [flags] < body.json
Example:     kvepp explain --header "x-session-id: s1" < body.json
             kvepp explain --path /v1/messages < body.json
Exit status: 0 if a worker would be chosen, 1 if not or kvepp cannot be reached, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

The body is that of the client's request. A cost is in milliseconds, or with --router-policy dynamo
in blocks of the size that the first line gives. CACHED counts the prompt's blocks that a worker
holds, in its device's memory, its host's, and on disk.
`

type explainConfig struct {
	path    string
	headers []string
}

func (o *explainConfig) addFlags(f *pflag.FlagSet) {
	f.StringVar(&o.path, "path", "", "the `PATH` that the request would ask for; empty: /v1/chat/completions, or "+
		"/v1/completions for a body with \"prompt\", or /v1/responses for one with \"input\"")
	f.StringArrayVar(&o.headers, "header", nil, "a header of the request, as `\"NAME: VALUE\"`: kvepp reads those "+
		"with routing hints, such as x-session-id. Give the flag once for each")
}

func (o *explainConfig) validate() error {
	if o.path != "" && !strings.HasPrefix(o.path, "/") {
		return fmt.Errorf("--path %q: must begin with /", o.path)
	}
	for _, h := range o.headers {
		if name, _, found := strings.Cut(h, ":"); !found || strings.TrimSpace(name) == "" {
			return fmt.Errorf("--header %q: want \"NAME: VALUE\"", h)
		}
	}
	return nil
}

// explain sends a body for a dry run and writes the decision.
func (s *server) explain(ctx context.Context, o *explainConfig, asJSON bool, from io.Reader, to io.Writer) error {
	body, err := io.ReadAll(io.LimitReader(from, api.MaxBody+1))
	switch {
	case err != nil:
		return fmt.Errorf("the body cannot be read: %w", err)
	case len(body) == 0:
		return errors.New("no body: give the request's JSON on standard input, kvepp explain < body.json")
	case len(body) > api.MaxBody:
		return fmt.Errorf("the body is longer than %d bytes", api.MaxBody)
	}
	path := "/pick"
	if o.path != "" {
		path += "?path=" + url.QueryEscape(o.path)
	}
	header := http.Header{}
	for _, h := range o.headers {
		name, value, _ := strings.Cut(h, ":")
		header.Add(strings.TrimSpace(name), strings.TrimSpace(value))
	}
	header.Set("Content-Type", "application/json")
	var text json.RawMessage
	if err := s.ask(ctx, http.MethodPost, path, header, body, &text); err != nil {
		return err
	}
	var pick admin.Pick
	if err := json.Unmarshal(text, &pick); err != nil {
		return fmt.Errorf("%s does not answer as kvepp serve does (%w)", s.address, err)
	}
	if !asJSON {
		text = explained(&pick)
	}
	if _, err := to.Write(text); err != nil {
		return err
	}
	if pick.Error != "" {
		return fmt.Errorf("the request would get no worker: %s", pick.Error)
	}
	return nil
}

func place(d *admin.Destination) string {
	return worker(d.Name, d.Rank) + " at " + cmp.Or(d.Address, "-")
}

// explained describes a dry run in words and tables.
func explained(p *admin.Pick) []byte {
	var out bytes.Buffer
	fmt.Fprintf(&out, "model %s, %d prompt tokens, reason %s", cmp.Or(p.Model, "-"), p.PromptTokens, p.Reason)
	if p.UnitTokens > 0 {
		fmt.Fprintf(&out, ", blocks of %d tokens", p.UnitTokens)
	}
	if p.Session != "" {
		fmt.Fprintf(&out, ", session %s", p.Session)
	}
	if p.Trial {
		fmt.Fprint(&out, ", trial of an ejected endpoint")
	}
	fmt.Fprintln(&out)
	if p.WouldWait {
		fmt.Fprintln(&out, "Every worker is busy: the request would wait in the queue first.")
	}
	if p.Worker != nil {
		fmt.Fprintf(&out, "=> %s, %d tokens cached\n", place(p.Worker), p.PredictedCachedTokens)
	}
	writeCandidates(&out, p.Candidates)
	if x := p.Prefill; x != nil {
		fmt.Fprintf(&out, "prefill => %s\n", place(&x.Worker))
		writeCandidates(&out, x.Candidates)
	}
	if len(p.Ejected) > 0 {
		fmt.Fprintf(&out, "ejected: %s\n", strings.Join(p.Ejected, ", "))
	}
	if len(p.Cordoned) > 0 {
		fmt.Fprintf(&out, "cordoned: %s\n", strings.Join(p.Cordoned, ", "))
	}
	return out.Bytes()
}

// writeCandidates writes a leg's candidates, with the parts of each cost.
func writeCandidates(to *bytes.Buffer, all []admin.Candidate) {
	if len(all) == 0 {
		return
	}
	to.Write(table(func(t io.Writer) {
		fmt.Fprintln(t, "WORKER\tCOST\tCACHED\tPARTS\tWHY NOT")
		for i := range all {
			x := &all[i]
			cost, why := "-", x.Lost
			if x.Cost != nil {
				cost = fmt.Sprintf("%.2f", *x.Cost)
			}
			if x.Chosen {
				why = "chosen"
			}
			parts := make([]string, len(x.Parts))
			for k, p := range x.Parts {
				parts[k] = fmt.Sprintf("%s %.2f", p.Name, p.Value)
			}
			fmt.Fprintf(t, "%s\t%s\t%d+%d+%d\t%s\t%s\n", worker(x.Name, x.Rank), cost, x.DeviceBlocks, x.HostBlocks,
				x.DiskBlocks, cmp.Or(strings.Join(parts, ", "), "-"), why)
		}
	}))
}
