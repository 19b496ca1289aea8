package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"testing"

	"kvepp/e2e/stack"
)

// TestAdminAddress asks kvepp which worker holds a prompt that one of them was given.
func TestAdminAddress(t *testing.T) {
	nothingLeft(t, main)
	var ids []int
	for i := range 100 {
		ids = append(ids, 500+(int(begun)+i*i)%50)
	}
	a, err := stack.Post(t.Context(), http.DefaultClient, main.Envoy.URL+"/v1/completions", nil, map[string]any{"model": stack.Model, "prompt": ids, "max_tokens": 1})
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
				return fmt.Errorf("%s (%s) holds %d tokens of the prompt that %s got, want %d", w.Name, strconv.Quote(id), got, a.Worker, want)
			}
		}
		return nil
	})
}
