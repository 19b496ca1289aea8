package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"

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
func (c *adminClient) ladder(ctx context.Context, asJSON bool, to io.Writer) error {
	var answer admin.Ladder
	if err := c.send(ctx, http.MethodGet, "/debug/ladder", &answer); err != nil {
		return err
	}
	var text bytes.Buffer
	if asJSON {
		out := json.NewEncoder(&text)
		out.SetIndent("", "  ")
		if err := out.Encode(answer); err != nil {
			return err
		}
	} else {
		for i := range answer.Models {
			fmt.Fprintf(&text, "model %s, ", answer.Models[i].Model)
			writeLadder(&text, &answer.Models[i].LadderSum)
		}
		if len(answer.Models) != 1 {
			fmt.Fprint(&text, "all models, ")
			writeLadder(&text, &answer.Total)
		}
		for _, finding := range answer.Total.Findings {
			fmt.Fprintf(&text, "=> %s\n", finding)
		}
		if answer.Sampling > 1 {
			fmt.Fprintf(&text, "kvepp remembers one of %d requested blocks: \"reusable\" is an estimate. "+
				"--ladder-max-bytes gives it more memory.\n", answer.Sampling)
		}
	}
	_, err := to.Write(text.Bytes())
	return err
}

// writeLadder writes a table: a line for each rung with a bar, and below it the losses before the next rung.
func writeLadder(to io.Writer, sum *admin.LadderSum) {
	fmt.Fprintf(to, "%d requests\n", sum.Requests)
	all := sum.Rungs[ladder.Prompt].Tokens
	share := func(n uint64) float64 { return 100 * float64(n) / float64(max(all, 1)) }
	t := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	for _, rung := range sum.Rungs {
		for _, loss := range rung.Lost {
			fmt.Fprintf(t, "  - %s\t%d\t%5.1f %%\t%s\n", loss.Cause, loss.Tokens, share(loss.Tokens), loss.Advice)
		}
		fmt.Fprintf(t, "%s\t%d\t%5.1f %%\t%s\n", rung.Rung, rung.Tokens, share(rung.Tokens),
			strings.Repeat("#", int(share(rung.Tokens)/2.5+0.5)))
	}
	if sum.UnpredictedTokens > 0 {
		fmt.Fprintf(t, "  + unpredicted\t%d\t%5.1f %%\tdelivered, though the index did not have them\n",
			sum.UnpredictedTokens, share(sum.UnpredictedTokens))
	}
	t.Flush() // to memory: cannot fail
	fmt.Fprintln(to)
}
