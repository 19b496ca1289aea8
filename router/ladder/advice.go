package ladder

import (
	"fmt"
	"strings"
)

// advice says for each cause what an operator can do. Causes that are as they should be have none.
var advice = [Causes]string{
	BlocksUnknown: "kvepp could not tokenize these prompts: kvepp_decisions_total{reason} says why",
	OtherSalt:     "tenants, salts or adapters keep equal prompts apart; engines share no blocks between them",
	NotMatched:    "--router-mode or a weight of 0 leaves cached blocks out of the choice",
	NoEvents:      "workers publish no KV events: kvepp check says how to turn them on",
	Evicted:       "the caches are too small for what is asked for again: add memory, workers or host offload",
	Unusable:      "layers of a hybrid model did not keep their blocks: docs/hybrid-models.md",
	Role:          "workers that other roles, pairs or the gateway's subset exclude have the blocks",
	Pinned:        "clients name the worker themselves",
	Taints:        "required taints exclude workers that have the blocks",
	Cordoned:      "cordoned workers have the blocks: kvepp workers",
	Ejected:       "ejected workers have the blocks: kvepp workers says why they failed",
	Busy:          "busy thresholds exclude workers that have the blocks",
	Session:       "sessions stay with workers that have fewer blocks",
	NoAffinity:    "requests name sessions, but sessions are not kept: --router-session-affinity-ttl-secs",
	Load:          "workers with the blocks hold more requests: add workers" + policyAdvice,
	Waiting:       "prompts wait at workers with the blocks: add workers" + policyAdvice,
	Tier:          "blocks in host memory or on disk count less than the device's",
	OtherPicker:   "the picker in service sends requests past the workers that have their blocks",
	Random:        "the temperature spreads requests",
	NotConfirmed:  "responses do not report cached tokens: vLLM needs --enable-prompt-tokens-details",
	IndexWrong:    "the engines reuse less than the index has: kvepp check compares tokenizer and template",
}

// policyAdvice is the part of advice for those that use another policy.
const policyAdvice = ", or use --router-policy time"

// Advice returns what an operator can do about a cause; "" if it is as it should be. byTime: --router-policy is time.
func (c Cause) Advice(byTime bool) string {
	if byTime {
		return strings.TrimSuffix(advice[c], policyAdvice)
	}
	return advice[c]
}

// Shares above which a sum has findings, of its prompt tokens or requests.
const (
	notable    = 0.05 // of a loss
	unexpected = 0.1  // of delivered tokens that were not predicted
	miscounted = 0.05 // of responses
)

// Findings says in sentences what an operator should look at, the most important first: what makes kvepp's own numbers
// doubtful, and then the largest loss that can be changed. miscounts is the number of responses that report another
// number of prompt tokens than kvepp counts. byTime is Advice's.
func (s *Sum) Findings(miscounts uint64, byTime bool) (all []string) {
	prompt := float64(s.Tokens[Prompt])
	if s.Requests == 0 || prompt == 0 {
		return nil
	}
	if share := float64(miscounts) / float64(s.Requests); share >= miscounted {
		all = append(all, fmt.Sprintf("wrong template: the engines count other prompt tokens than kvepp in "+
			"%.0f %% of the responses. Tokenizer or chat template differ: kvepp check compares them",
			100*min(share, 1)))
	} else if share := float64(s.Unpredicted) / prompt; share >= unexpected {
		all = append(all, fmt.Sprintf("the engines reuse %.0f %% of the prompt tokens that kvepp did not find. "+
			"Tokenizer or chat template differ, or KV events are missing: kvepp check compares them", 100*share))
	}
	largest, most := Causes, uint64(0)
	for c, n := range s.Lost {
		if n > most && Cause(c).Advice(byTime) != "" {
			largest, most = Cause(c), n
		}
	}
	if share := float64(most) / prompt; largest < Causes && share >= notable {
		all = append(all, fmt.Sprintf("%s loses the most that can be changed, %.0f %% of the prompt tokens: %s",
			largest, 100*share, largest.Advice(byTime)))
	}
	return all
}
