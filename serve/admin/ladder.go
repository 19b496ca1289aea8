package admin

import (
	"cmp"
	"net/http"
	"slices"

	"kvepp/router/ladder"
	"kvepp/serve/api"
)

// Ladder is the hit-rate ladder as /debug/ladder describes it: where prompt tokens are lost on the way to a prefix
// cache, since kvepp started.
type Ladder struct {
	// Sampling is N if kvepp remembers one of N requested blocks. Above 1 the rung reusable is an estimate.
	Sampling int           `json:"sampling"`
	Total    LadderSum     `json:"total"`
	Models   []LadderModel `json:"models"`
}

// LadderModel is the ladder of one model.
type LadderModel struct {
	Model string `json:"model"`
	LadderSum
}

// LadderSum has the rungs from the top, each with the losses before it, the largest first.
type LadderSum struct {
	Requests uint64 `json:"requests"`
	Rungs    []Rung `json:"rungs"`
	// UnpredictedTokens were delivered, but not expected of the chosen worker.
	UnpredictedTokens uint64 `json:"unpredicted_tokens"`
	// Findings are sentences: what to look at, the most important first.
	Findings []string `json:"findings,omitempty"`
}

// Rung is one rung.
type Rung struct {
	Rung   string `json:"rung"`
	Tokens uint64 `json:"tokens"`
	Lost   []Loss `json:"lost"` // before this rung
}

// Loss is the tokens lost for one cause.
type Loss struct {
	Cause  string `json:"cause"`
	Tokens uint64 `json:"tokens"`
	Advice string `json:"advice,omitempty"` // what to do about it
}

// HandleLadder adds GET /debug/ladder. miscounts returns how many responses reported another number of prompt tokens
// than kvepp counts. byTime: --router-policy is time already.
func HandleLadder(mux *http.ServeMux, sums *ladder.Ladder, seen *ladder.Seen, miscounts func() uint64, byTime bool) {
	mux.HandleFunc("GET /debug/ladder", func(w http.ResponseWriter, _ *http.Request) {
		all := sums.Sums()
		total := ladder.Total(all)
		response := Ladder{Sampling: seen.Sampling(), Total: ladderSumOf(&total, byTime), Models: []LadderModel{}}
		response.Total.Findings = total.Findings(miscounts(), byTime)
		for i := range all {
			response.Models = append(response.Models, LadderModel{all[i].Model, ladderSumOf(&all[i], byTime)})
		}
		api.Reply(w, http.StatusOK, response, nil)
	})
}

func ladderSumOf(s *ladder.Sum, byTime bool) LadderSum {
	sum := LadderSum{Requests: s.Requests, UnpredictedTokens: s.Unpredicted}
	for r := range ladder.Rungs {
		rung := Rung{Rung: r.String(), Tokens: s.Tokens[r], Lost: []Loss{}}
		for c := range ladder.Causes {
			if r != ladder.Prompt && c.Below() == r && s.Lost[c] > 0 {
				rung.Lost = append(rung.Lost, Loss{c.String(), s.Lost[c], c.Advice(byTime)})
			}
		}
		slices.SortStableFunc(rung.Lost, func(a, b Loss) int { return cmp.Compare(b.Tokens, a.Tokens) })
		sum.Rungs = append(sum.Rungs, rung)
	}
	return sum
}
