package scoring

import "time"

// staleAfter is how late copies of other replicas' bookings may be to be priced.
const staleAfter = 250 * time.Millisecond

// SetPeersStaleness says how late this book knows of other replicas' bookings. Call it a few times a second. If copies
// are later than 250 ms, their loads are in Load and not in costs.
func (a *ActiveSequences) SetPeersStaleness(staleness time.Duration) {
	a.lock()
	defer a.mu.Unlock()
	a.stale = staleness > staleAfter
}

// PeersStale reports whether copies are too late to be priced.
func (a *ActiveSequences) PeersStale() bool {
	a.lock()
	defer a.mu.Unlock()
	return a.stale
}

// PeerTerms is the part of a candidate's terms that copies of other replicas' bookings brought.
type PeerTerms struct {
	Requests         int
	PrefillTokens    int
	DecodeBlocks     float64 // blocks that their requests were the first to hold
	DecodingRequests int     // of Requests, those whose first token has come
}

// peerTerms returns the part of the worker's load that copies brought. t has the candidate's terms.
func (a *ActiveSequences) peerTerms(t *Terms, c *Candidate) PeerTerms {
	part := &a.copied[c.Worker]
	return PeerTerms{
		Requests:         part.Requests,
		PrefillTokens:    min(part.PrefillTokens, t.PrefillTokens),
		DecodeBlocks:     min(float64(part.ActiveTokens)/float64(t.BlockSize), t.DecodeBlocks),
		DecodingRequests: part.Requests - part.prefilling,
	}
}

// WithoutPeers returns the terms as if no other replica had booked: Cost of them is what the cost would be.
func (t *Terms) WithoutPeers() Terms {
	own := *t
	own.Peers = PeerTerms{}
	own.PrefillTokens -= t.Peers.PrefillTokens
	own.DecodeBlocks -= t.Peers.DecodeBlocks
	own.ActiveRequests -= t.Peers.Requests
	own.Time.HeldBlocks = max(own.Time.HeldBlocks-t.Peers.DecodeBlocks, 0)
	own.Time.DecodingRequests = max(own.Time.DecodingRequests-t.Peers.DecodingRequests, 0)
	return own
}
