package client

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"

	"kvepp/router/ladder"
	"kvepp/serve/admin"
)

const ladderHelp = `Show the hit-rate ladder of a running kvepp serve: how many prompt tokens reach each rung on the
way to a prefix cache, and why the others do not. The command asks its --admin-address.

Usage:       kvepp ladder [--json]
Example:     kvepp ladder --admin-address 127.0.0.1:9091
Exit status: 0 if shown, 1 if kvepp cannot be reached or has no ladder, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

The rungs: prompt (all tokens), reusable (requested before), fleet (cached by a worker), eligible
(cached by a candidate), chosen (cached by the chosen worker), delivered (reported by the engine).
Counts are since the start of kvepp. Each kvepp process has its own.
`

// ladder writes the hit-rate ladder of each model.
func (s *server) ladder(ctx context.Context, asJSON bool, to io.Writer) error {
	var response admin.Ladder
	if err := s.get(ctx, "/debug/ladder", &response); err != nil {
		return err
	}
	if asJSON {
		return writeJSON(to, response)
	}
	var text bytes.Buffer
	for i := range response.Models {
		fmt.Fprintf(&text, "model %s, ", response.Models[i].Model)
		writeLadder(&text, &response.Models[i].LadderSum)
	}
	if len(response.Models) != 1 {
		fmt.Fprint(&text, "all models, ")
		writeLadder(&text, &response.Total)
	}
	for _, finding := range response.Total.Findings {
		fmt.Fprintf(&text, "=> %s\n", finding)
	}
	if response.Sampling > 1 {
		fmt.Fprintf(&text, "kvepp remembers one of %d requested blocks: \"reusable\" is an estimate. "+
			"its 16 MiB are full.\n", response.Sampling)
	}
	_, err := to.Write(text.Bytes())
	return err
}

// writeLadder writes a table: a line for each rung with a bar, and below it the losses before the next rung.
func writeLadder(to *bytes.Buffer, sum *admin.LadderSum) {
	all := sum.Rungs[ladder.Prompt].Tokens
	share := func(n uint64) float64 { return 100 * float64(n) / float64(max(all, 1)) }
	fmt.Fprintf(to, "%d requests\n%s\n", sum.Requests, table(func(t io.Writer) {
		line := func(name string, tokens uint64, says string) {
			fmt.Fprintf(t, "%s\t%d\t%5.1f %%\t%s\n", name, tokens, share(tokens), says)
		}
		for _, rung := range sum.Rungs {
			for _, loss := range rung.Lost {
				line("  - "+loss.Cause, loss.Tokens, loss.Advice)
			}
			line(rung.Rung, rung.Tokens, strings.Repeat("#", int(share(rung.Tokens)/2.5+0.5)))
		}
		if sum.UnpredictedTokens > 0 {
			line("  + unpredicted", sum.UnpredictedTokens, "delivered, though the index did not have them")
		}
	}))
}
