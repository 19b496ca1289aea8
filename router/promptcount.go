package router

import (
	"log/slog"
	"sync/atomic"

	"kvepp/prompt"
	"kvepp/prompt/body"
)

// differentCounts is how many responses in a row must report another number of prompt tokens than kvepp counts before a
// log line says so.
const differentCounts = 3

// promptCounts compares the number of prompt tokens that responses report with kvepp's own. If they differ, the engine
// has another tokenizer or chat template, and cached prefixes are not found. The map is immutable; it is safe for
// concurrent use.
type promptCounts map[promptKind]*promptCount

type promptKind struct {
	model string
	api   body.API
}

type promptCount struct {
	promptKind
	inRow  atomic.Int32 // responses in a row that differed
	logged atomic.Bool
}

// newPromptCounts returns counts for the models that kvepp tokenizes itself.
func newPromptCounts(models map[string]*prompt.Model) promptCounts {
	all := promptCounts{}
	for name, model := range models {
		for _, api := range []body.API{body.ChatCompletions, body.Completions} {
			if kind := (promptKind{name, api}); model != nil {
				all[kind] = &promptCount{promptKind: kind}
			}
		}
	}
	return all
}

// of returns the count for a request; nil unless kvepp knows the exact tokens of a single prompt, by any worker.
func (c promptCounts) of(p *prepared) *promptCount {
	if !p.reason.exact() || len(p.tokens) != 1 || p.version != nil {
		return nil
	}
	return c[promptKind{p.model, p.api}]
}

// reported compares the prompt tokens of a response with status 200 with kvepp's, and returns whether they differ.
func (c *promptCount) reported(route *Route, tokens int, log *slog.Logger) bool {
	if c == nil || tokens <= 0 {
		return false
	}
	if tokens == route.PromptTokens {
		c.inRow.Store(0)
		return false
	}
	if c.inRow.Add(1) >= differentCounts && !c.logged.Swap(true) {
		log.Warn(
			"the engine counts a different number of prompt tokens than kvepp, so cached prefixes are not found. Give "+
				"kvepp the engine's model folder (--model), chat template (--chat-template) and --engine; kvepp check "+
				"compares the token ids. Logged once for each model and API",
			"model",
			c.model,
			"api",
			c.api.String(),
			"worker",
			route.WorkerName(),
			"tokens_by_kvepp",
			route.PromptTokens,
			"tokens_by_engine",
			tokens,
		)
	}
	return true
}
