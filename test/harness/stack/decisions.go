package stack

import (
	"context"
	"fmt"
	"net/url"
)

// Decision is what kvepp's /debug/decisions says of a request, in part.
type Decision struct {
	Reason     string
	Candidates []Candidate
	Worker     struct{ Name, Address string }            // the chosen one
	Served     struct{ Address, Worker, Outcome string } // who served it; empty: the proxy did not say

	Ejected      []string // endpoints that are ejected, and would have been candidates
	EjectedServe bool     `json:"ejected_serve"` // and were, because all are
	Trial        bool     // the request decides whether an ejected endpoint takes requests again
	Cordoned     []string // endpoints that are cordoned, and would have been candidates
}

// Candidate is a worker that could have been chosen, with the terms of its cost. Blocks are the worker's.
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
}

// Decision returns why kvepp sent a request where it did.
func (s *Stack) Decision(ctx context.Context, requestID string) (*Decision, error) {
	var found struct{ Decisions []Decision }
	if err := getJSON(ctx, s.Admin()+"/debug/decisions?n=1&request_id="+url.QueryEscape(requestID),
		&found); err != nil {
		return nil, err
	}
	if len(found.Decisions) == 0 {
		return nil, fmt.Errorf("stack: kvepp knows no decision about request %q", requestID)
	}
	return &found.Decisions[0], nil
}
