package enginemetrics

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
)

// outcome is what became of one reading.
type outcome uint8

const (
	ok          outcome = iota
	without             // a page without any metric that kvepp knows
	refused             // an answer other than 200
	late                // none in time
	unreachable         // none at all, or one that broke off
	tooLarge
	malformed // a message of the event plane that is no load
	shared    // not read: it is not known of which worker it speaks
)

// outcomeNames are those of outcomes in metrics and logs.
var outcomeNames = [...]string{
	ok:          "ok",
	without:     "without",
	refused:     "refused",
	late:        "timeout",
	unreachable: "unreachable",
	tooLarge:    "too_large",
	malformed:   "malformed",
	shared:      "shared",
}

func (o outcome) String() string { return outcomeNames[o] }

// Readings returns how often pages were read, by what became of it: every outcome that there may be, in an order that
// stays.
func (g *Gauges) Readings() []Count {
	counts := make([]Count, shared)
	for o := range counts {
		counts[o] = Count{outcomeNames[o], g.outcomes[o].Load()}
	}
	return counts
}

// Count is how many readings had an outcome.
type Count struct {
	Outcome  string
	Readings uint64
}

// fetch asks for a page and reads it. The ranks are nil unless the outcome is ok.
func (g *Gauges) fetch(ctx context.Context, url string) ([]ofRank, outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, max(maxTimeout, g.cfg.SilentAfter))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, unreachable, err
	}
	req.Header.Set("Accept", "text/plain;version=0.0.4")
	req.Header.Set("User-Agent", "kvepp")
	resp, err := g.client.Do(req)
	if err != nil {
		return nil, brokenOff(ctx), err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		io.CopyN(io.Discard, resp.Body, maxLineBytes) // so that the connection can be kept
		return nil, refused, fmt.Errorf("it answers %s", resp.Status)
	}
	p := g.pages.Get().(*page)
	defer g.pages.Put(p)
	ranks, err := p.read(resp.Body)
	switch {
	case errors.Is(err, errTooLarge):
		return nil, tooLarge, err
	case err != nil:
		return nil, brokenOff(ctx), err
	case len(ranks) == 0:
		return nil, without, fmt.Errorf("none of the metrics %s is on it", strings.Join(p.names.metrics(), ", "))
	}
	return slices.Clone(ranks), ok, nil
}

// brokenOff is why no answer came whole.
func brokenOff(ctx context.Context) outcome {
	if ctx.Err() != nil {
		return late
	}
	return unreachable
}
