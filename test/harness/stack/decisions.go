package stack

import (
	"context"
	"fmt"
	"net/url"
)

// Decision is a part of a request's record from kvepp's /debug/decisions.
type Decision struct {
	Reason     string
	Candidates []Candidate
	Worker     struct{ Name, Address string } // the chosen one
	// the endpoint that answered; empty: the proxy did not report it
	Served struct{ Address, Worker, Outcome string }

	Ejected      []string // ejected endpoints that would otherwise be candidates
	EjectedServe bool     `json:"ejected_serve"` // they were candidates, because all were ejected
	Trial        bool     // the request decides whether an ejected endpoint takes requests again
	Cordoned     []string // cordoned endpoints that would otherwise be candidates
}

// Candidate is a worker that could have been chosen, with the terms of its cost. Blocks is the worker's number of
// cached blocks.
type Candidate struct {
	Name   string
	Rank   uint32 `json:"dp_rank"`
	Chosen bool
	Cost   float64

	BlockSize      int     `json:"block_size"`
	RequestTokens  int     `json:"request_tokens"`
	WaitingTokens  int     `json:"waiting_prefill_tokens"`
	CreditBlocks   float64 `json:"credit_blocks"`
	DecodeBlocks   float64 `json:"decode_blocks"`
	ActiveRequests int     `json:"active_requests"`

	Parts []struct { // of the cost
		Part  string
		Value float64
	}
}

// Decision returns kvepp's record of a request.
func (s *Stack) Decision(ctx context.Context, requestID string) (*Decision, error) {
	var found struct{ Decisions []Decision }
	if err := getJSON(ctx, s.Admin()+"/debug/decisions?n=1&request_id="+url.QueryEscape(requestID),
		&found); err != nil {
		return nil, err
	}
	if len(found.Decisions) == 0 {
		return nil, fmt.Errorf("stack: kvepp has no record of request %q", requestID)
	}
	return &found.Decisions[0], nil
}
