package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kvepp/test/harness/stack"
)

// row is a request of a trace, in the format agentic_mooncake. A conversation and its subagents are one play.
type row struct {
	RequestID    string       `json:"request_id"`
	PlayID       string       `json:"play_id"`
	NotBefore    float64      `json:"not_before_ms"`
	Dependencies []dependency `json:"dependencies"`
	InputLength  int          `json:"input_length"`
	OutputLength int          `json:"output_length"`
	HashIDs      []int        `json:"hash_ids"`
}

type dependency struct {
	RequestID string  `json:"request_id"`
	Trigger   string  `json:"trigger"`
	Delay     float64 `json:"delay_ms"`
}

// recorder makes a trace of the requests that were sent. A prompt's blocks are those of the prompt before it, or of its
// system prompt, and new ones: the same tokens that sample.Possible counts.
type recorder struct {
	rows    []row
	next    int              // hash id
	systems map[string][]int // hash ids of system prompts
}

// turnOf names a request: those of one conversation are numbered, and subagents' have the number of theirs before.
func turnOf(session string, turn int) string { return fmt.Sprintf("%s.%d", session, turn) }

// ids returns n hash ids, the first of them those of a prefix.
func (r *recorder) ids(prefix []int, n int) []int {
	all := slices.Clone(prefix[:min(len(prefix), n)])
	for len(all) < n {
		r.next++
		all = append(all, r.next)
	}
	return all
}

// system returns the hash ids of a system prompt that has this many tokens.
func (r *recorder) system(text string, tokens int) []int {
	if text == "" {
		return nil
	}
	if r.systems == nil {
		r.systems = map[string][]int{}
	}
	known, ok := r.systems[text]
	if !ok {
		known = r.ids(nil, tokens/stack.BlockSize)
		r.systems[text] = known
	}
	return known[:min(len(known), tokens/stack.BlockSize)]
}

// add adds a request with a prompt that begins with these blocks, and returns the full blocks of the whole prompt.
func (r *recorder) add(id string, at time.Duration, after []dependency, prefix []int, prompt, output int) []int {
	if after == nil {
		after = []dependency{}
	}
	play, _, _ := strings.Cut(id, ".")
	ids := r.ids(prefix, (prompt+stack.BlockSize-1)/stack.BlockSize)
	r.rows = append(r.rows, row{RequestID: id, PlayID: play, NotBefore: ms(at), Dependencies: after,
		InputLength: prompt, OutputLength: output, HashIDs: ids})
	return ids[:prompt/stack.BlockSize]
}

// traceFile is the name of a run's trace in the folder.
func (r *run) traceFile() string {
	name := fmt.Sprintf("trace-%s-%s-%d.jsonl", r.Scenario, r.Router, r.Seed)
	return strings.ReplaceAll(strings.ReplaceAll(name, ",", ""), " ", "-")
}

// write writes the trace to the folder. Requests whose predecessor failed are not in it, because they were not sent.
func (r *recorder) write(folder, name string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(folder, name))
	if err != nil {
		return err
	}
	to := bufio.NewWriter(f)
	lines := json.NewEncoder(to)
	err = lines.Encode(map[string]any{"schema": "dynamo.agentic_mooncake", "version": 2,
		"block_size": stack.BlockSize, "hash_id_scope": "local"})
	for i := range r.rows {
		err = cmp.Or(err, lines.Encode(&r.rows[i]))
	}
	return cmp.Or(err, to.Flush(), f.Close())
}
