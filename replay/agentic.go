package replay

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// agenticHeader is the first line of agentic_mooncake, version 2. Source: dynamo 1.6.1, aisimulate-core 0.13.0.
type agenticHeader struct {
	Schema    string `json:"schema"`
	Version   int    `json:"version"`
	BlockSize int    `json:"block_size"`
	Scope     string `json:"hash_id_scope"`
}

// agenticRow is any other line. Source: as of agenticHeader.
type agenticRow struct {
	mooncakeRow
	PlayID       string   `json:"play_id"`
	NotBefore    *float64 `json:"not_before_ms"`
	Dependencies []struct {
		RequestID string   `json:"request_id"`
		Trigger   string   `json:"trigger"`
		Delay     *float64 `json:"delay_ms"`
	} `json:"dependencies"`
	WaitFor json.RawMessage `json:"wait_for"` // of version 1
}

// dependent is a request that waits for another.
type dependent struct {
	*Request
	dispatch bool          // it waits until the other is sent, not until that has ended
	delay    time.Duration // after that
}

// graph is an agentic trace. Its requests may stand in any order and wait for later ones, so it is read whole.
type graph struct {
	requests []*Request // those that were not returned yet, by At
	plays    []string   // of requests
	lines    []int
	byID     map[string]int
	blocks   int
}

// nextOfGraph is Next for AgenticMooncake.
func (r *Reader) nextOfGraph() (*Request, error) {
	if r.graph == nil {
		r.graph = &graph{byID: map[string]int{}}
		if err := r.readGraph(); err != nil {
			return nil, err
		}
	}
	if len(r.graph.requests) == 0 {
		return nil, io.EOF
	}
	q := r.graph.requests[0]
	r.graph.requests[0] = nil // what has ended can be freed
	r.graph.requests = r.graph.requests[1:]
	return q, nil
}

func (r *Reader) readGraph() error {
	text, err := r.nextLine()
	if errors.Is(err, io.EOF) {
		return r.at(r.line, errors.New("the file is empty: it must begin with the header of agentic_mooncake"))
	}
	if err != nil {
		return err
	}
	if err := r.agenticHeader(text); err != nil {
		return r.at(r.line, err)
	}
	var rows []agenticRow // their dependencies alone
	for {
		text, err := r.nextLine()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		row, err := r.agenticRow(text)
		if err != nil {
			return r.at(r.line, err)
		}
		rows = append(rows, row)
	}
	if err := r.link(rows); err != nil {
		return err
	}
	g := r.graph
	g.byID, g.plays, g.lines = nil, nil, nil
	slices.SortStableFunc(g.requests, func(a, b *Request) int { return cmp.Compare(a.At, b.At) })
	return nil
}

func (r *Reader) agenticHeader(text []byte) error {
	var h agenticHeader
	if err := json.Unmarshal(text, &h); err != nil {
		return jsonError(err)
	}
	switch {
	case h.Schema != "dynamo.agentic_mooncake" || h.Version != 2:
		return fmt.Errorf("schema %.40q, version %d: the first line must be the header of dynamo.agentic_mooncake, "+
			"version 2; convert an older trace again with Dynamo 1.6.1", h.Schema, h.Version)
	case h.Scope != "local":
		return fmt.Errorf("hash_id_scope %.40q: must be local", h.Scope)
	case h.BlockSize < 1 || h.BlockSize > maxTokens:
		return fmt.Errorf("block_size %d: must be 1 to %d", h.BlockSize, maxTokens)
	}
	r.options.TraceBlockSize = h.BlockSize
	return nil
}

// agenticRow adds a row to the graph, and returns its dependencies.
func (r *Reader) agenticRow(text []byte) (agenticRow, error) {
	var row agenticRow
	if err := json.Unmarshal(text, &row); err != nil {
		return row, jsonError(err)
	}
	g := r.graph
	at, err := milliseconds("not_before_ms", row.NotBefore, nil)
	switch {
	case err != nil:
		return row, err
	case row.WaitFor != nil:
		return row, errors.New("wait_for belongs to older traces; convert the trace again with Dynamo 1.6.1")
	case row.RequestID == "" || row.PlayID == "" || at < 0:
		return row, errors.New("a row must have request_id, play_id and not_before_ms")
	case len(g.requests) == maxOpen:
		return row, fmt.Errorf("more than %d requests: an agentic trace is read whole; replay it in parts", maxOpen)
	}
	if earlier, twice := g.byID[row.RequestID]; twice {
		return row, fmt.Errorf("request_id %.40q is taken by line %d", row.RequestID, g.lines[earlier])
	}
	q, err := r.mooncakeRequest(&row.mooncakeRow)
	if err != nil {
		return row, err
	}
	if g.blocks += len(q.Chain); g.blocks > maxOpenBlocks {
		return row, fmt.Errorf("more than %d blocks: an agentic trace is read whole; replay it in parts, or set a "+
			"greater --block-size", maxOpenBlocks)
	}
	if q.At = at; q.Session != "" {
		q.Session = row.PlayID + "\x00" + q.Session // sessions of different plays are different
	}
	g.byID[q.ID] = len(g.requests)
	g.requests, g.plays, g.lines = append(g.requests, q), append(g.plays, row.PlayID), append(g.lines, r.line)
	return agenticRow{Dependencies: row.Dependencies}, nil
}

// link makes dependents of the rows' dependencies, and refuses cycles.
func (r *Reader) link(rows []agenticRow) error {
	g := r.graph
	for i, row := range rows {
		for _, d := range row.Dependencies {
			of, known := g.byID[d.RequestID]
			delay, err := milliseconds("delay_ms", d.Delay, nil)
			switch {
			case err != nil:
			case !known:
				err = fmt.Errorf("a dependency on the request %.40q, which the trace does not have", d.RequestID)
			case g.plays[of] != g.plays[i]:
				err = fmt.Errorf("a dependency on the request %.40q of another play", d.RequestID)
			case d.Trigger != "dispatch" && d.Trigger != "completion":
				err = fmt.Errorf("trigger %.40q: must be dispatch or completion", d.Trigger)
			}
			if err != nil {
				return r.at(g.lines[i], err)
			}
			g.requests[i].waits++
			g.requests[of].dependents = append(g.requests[of].dependents,
				dependent{g.requests[i], d.Trigger == "dispatch", max(delay, 0)})
		}
	}
	return r.findCycle()
}

// findCycle refuses requests that wait for one another.
func (r *Reader) findCycle() error {
	g := r.graph
	waits, free := map[*Request]int{}, []*Request{}
	for _, q := range g.requests {
		if waits[q] = q.waits; q.waits == 0 {
			free = append(free, q)
		}
	}
	for len(free) > 0 {
		q := free[len(free)-1]
		free = free[:len(free)-1]
		delete(waits, q)
		for _, d := range q.dependents {
			if waits[d.Request]--; waits[d.Request] == 0 {
				free = append(free, d.Request)
			}
		}
	}
	if len(waits) == 0 {
		return nil
	}
	var stuck []string
	line := 0
	for i, q := range g.requests {
		if _, waiting := waits[q]; waiting && len(stuck) < 3 {
			if line == 0 {
				line = g.lines[i]
			}
			stuck = append(stuck, fmt.Sprintf("%.40q", q.ID))
		}
	}
	return r.at(line, fmt.Errorf("%d requests wait for one another, among them %s", len(waits),
		strings.Join(stuck, ", ")))
}
