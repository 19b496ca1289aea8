package enginemetrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"

	"kvepp/internal/useragent"
)

// outcome is the result of one read.
type outcome uint8

const (
	ok          outcome = iota
	noMetrics           // a page without any metric that kvepp knows
	refused             // a status other than 200
	timedOut            // no response in time
	unreachable         // no response, or an incomplete one
	tooLarge
	malformed  // an invalid message on the event plane
	noModels   // the page was read, but /v1/models of its engine could not be
	sharedPage // not read: several workers have this page and rank
)

// outcomeNames are the names of outcomes in metrics and logs.
var outcomeNames = [...]string{
	ok:          "ok",
	noMetrics:   "without",
	refused:     "refused",
	timedOut:    "timeout",
	unreachable: "unreachable",
	tooLarge:    "too_large",
	malformed:   "malformed",
	noModels:    "models",
	sharedPage:  "shared",
}

func (o outcome) String() string { return outcomeNames[o] }

// readings returns the number of reads by outcome.
func (g *Gauges) readings() map[string]uint64 {
	counts := map[string]uint64{}
	for o := range sharedPage {
		counts[outcomeNames[o]] = g.outcomes[o].Load()
	}
	return counts
}

// fetch requests a page and parses it. The ranks are nil unless the outcome is ok.
func (g *Gauges) fetch(ctx context.Context, url string) (_ []rankValues, active activeAdapters, _ outcome, _ error) {
	ctx, cancel := context.WithTimeout(ctx, max(maxTimeout, g.cfg.SilentAfter))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, active, unreachable, err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	useragent.Add(req)
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, active, outcomeOfFailure(ctx), err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		io.CopyN(io.Discard, resp.Body, maxLineBytes) // lets the connection be reused
		return nil, active, refused, fmt.Errorf("the server answered %s", resp.Status)
	}
	p := g.pages.Get().(*page)
	defer g.pages.Put(p)
	ranks, err := p.read(resp.Body)
	switch {
	case errors.Is(err, errTooLarge):
		return nil, active, tooLarge, err
	case err != nil:
		return nil, active, outcomeOfFailure(ctx), err
	case len(ranks) == 0:
		return nil, active, noMetrics, fmt.Errorf("the page has none of the metrics %s",
			strings.Join(p.names.metrics(), ", "))
	}
	return slices.Clone(ranks), p.active, ok, nil
}

// outcomeOfFailure returns the outcome of a read without a complete response.
func outcomeOfFailure(ctx context.Context) outcome {
	if ctx.Err() != nil {
		return timedOut
	}
	return unreachable
}
