package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestAdminAddress asks kvepp which worker has the blocks of a prompt that one of them got.
func TestAdminAddress(t *testing.T) {
	nothingLeft(t, main)
	var ids []int
	for i := range 100 {
		ids = append(ids, 500+(int(begun)+i*i)%50)
	}
	a, err := stack.Post(
		t.Context(),
		http.DefaultClient,
		main.Envoy.URL+"/v1/completions",
		nil,
		map[string]any{"model": stack.Model, "prompt": ids, "max_tokens": 1},
	)
	if err != nil || a.Status != http.StatusOK {
		t.Fatalf("%v: %+v", err, a)
	}
	query, _ := json.Marshal(map[string]any{"model_name": stack.Model, "token_ids": ids})
	eventually(t, func() error {
		resp, err := http.Post(main.Admin()+"/query", "application/json", bytes.NewReader(query))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		var held struct{ Scores map[string]map[string]int }
		if err := json.NewDecoder(resp.Body).Decode(&held); err != nil {
			return err
		}
		for _, w := range main.Workers {
			id, err := w.InstanceID(t.Context())
			if err != nil {
				return err
			}
			want := 0
			if w.Name+"/0" == a.Worker {
				want = len(ids) / stack.BlockSize * stack.BlockSize
			}
			if got := held.Scores[id]["0"]; got != want {
				return fmt.Errorf(
					"%s (%s) has %d tokens of the prompt that %s got, want %d",
					w.Name,
					strconv.Quote(id),
					got,
					a.Worker,
					want,
				)
			}
		}
		return nil
	})
}

// TestDecisions reads kvepp's records of decisions: each cost is the sum of its parts, and in blocks, of a request that
// has a weight of Dynamo's cost, also what its terms make.
func TestDecisions(t *testing.T) {
	nothingLeft(t, main)
	secret := fmt.Sprintf("a secret of %d", begun)
	for _, extra := range []map[string]any{
		nil,
		{"nvext": map[string]any{"router_config_override": map[string]any{"prefill_load_scale": 1}}},
	} {
		messages := []stack.Message{{Role: "user", Content: strings.Repeat("Keep it: "+secret+". ", 20)}}
		a, err := stack.Chat(t.Context(), http.DefaultClient, main.Envoy.URL, nil, messages, true, extra)
		if err != nil || a.Status != http.StatusOK {
			t.Fatalf("%v: %+v", err, a)
		}
		d, err := main.Decision(t.Context(), a.Header.Get("x-kvepp-request-id"))
		if err != nil {
			t.Fatal(err)
		}
		var chosen []string
		for _, c := range d.Candidates {
			parts := 0.0
			for _, p := range c.Parts {
				parts += p.Value
			}
			if c.RequestTokens != a.PromptTokens || math.Abs(c.Cost-parts) > 1e-6 {
				t.Errorf("%+v: its parts make %v, and the prompt had %d tokens", c, parts, a.PromptTokens)
			}
			terms := max(float64(c.RequestTokens+c.WaitingTokens)/float64(c.BlockSize)-c.CreditBlocks, 0) +
				c.DecodeBlocks
			if inBlocks := extra != nil; inBlocks && math.Abs(c.Cost-terms) > 1e-9 {
				t.Errorf("%+v: its terms make %v", c, terms)
			}
			if c.Chosen {
				chosen = append(chosen, fmt.Sprintf("%s/%d", c.Name, c.Rank))
			}
		}
		if len(d.Candidates) != len(main.Workers) || len(chosen) != 1 || chosen[0] != a.Worker || d.Reason != a.Reason {
			t.Errorf(
				"the record has %v of %d candidates chosen for %q, the response has %s for %q",
				chosen,
				len(d.Candidates),
				d.Reason,
				a.Worker,
				a.Reason,
			)
		}
	}
	resp, err := http.Get(main.Admin() + "/debug/decisions?n=1000")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if all, err := io.ReadAll(resp.Body); err != nil || len(all) == 0 || bytes.Contains(all, []byte(secret)) {
		t.Errorf("%v: %d bytes; want a record without the prompt", err, len(all))
	}
}
