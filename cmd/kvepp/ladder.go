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

	"kvepp/internal/api/admin"
	"kvepp/internal/ladder"
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

// advice says for each cause what an operator can do. Causes that are as they should be have none.
var advice = [ladder.Causes]string{
	ladder.BlocksUnknown: "kvepp could not tokenize these prompts: kvepp_decisions_total{reason} says why",
	ladder.OtherSalt:     "tenants, salts or adapters keep equal prompts apart; engines share no blocks between them",
	ladder.NotMatched:    "--router-mode or a weight of 0 leaves cached blocks out of the choice",
	ladder.NoEvents:      "workers publish no KV events: kvepp check says how to turn them on",
	ladder.Evicted:       "the caches are too small for what is asked for again: add memory, workers or host offload",
	ladder.Unusable:      "layers of a hybrid model did not keep their blocks: docs/hybrid-models.md",
	ladder.Role:          "workers that other roles, pairs or the gateway's subset exclude have the blocks",
	ladder.Pinned:        "clients name the worker themselves",
	ladder.Taints:        "required taints exclude workers that have the blocks",
	ladder.Cordoned:      "cordoned workers have the blocks: kvepp workers",
	ladder.Ejected:       "ejected workers have the blocks: kvepp workers says why they failed",
	ladder.Busy:          "busy thresholds exclude workers that have the blocks",
	ladder.Session:       "sessions stay with workers that have fewer blocks",
	ladder.Load:          "workers with the blocks hold more requests: see docs/routing.md for --router-policy time",
	ladder.Waiting:       "prompts wait at workers with the blocks: see docs/routing.md for --router-policy time",
	ladder.Capacity:      "workers with the blocks have the fuller caches",
	ladder.Tier:          "blocks in host memory or on disk count less than the device's",
	ladder.Random:        "the temperature spreads requests",
	ladder.NotConfirmed:  "answers do not report cached tokens: vLLM needs --enable-prompt-tokens-details",
	ladder.IndexWrong:    "the engines reuse less than the index has: kvepp check compares tokenizer and template",
}

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
			fmt.Fprintf(t, "  - %s\t%d\t%5.1f %%\t%s\n", loss.Cause, loss.Tokens, share(loss.Tokens),
				adviceFor(loss.Cause))
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

func adviceFor(cause string) string {
	for c := range ladder.Causes {
		if c.String() == cause {
			return advice[c]
		}
	}
	return "" // a cause of another version
}
