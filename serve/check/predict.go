package check

import (
	"context"
	"time"

	"kvepp/indexer"
	"kvepp/kvblock"
	"kvepp/pool"
)

// Predictor computes how many tokens of a prompt kvepp expects in a worker's cache: from the worker's KV events, or, if
// it has none, from the prompts that were sent to it. It uses an index and a pool as `kvepp serve` does. It is safe
// from any goroutine.
type Predictor struct {
	Pool *pool.Pool
	// Index follows the KV events of the pool's workers.
	Index *indexer.Index
	// Events is true if Index follows the workers' KV events.
	Events bool
	// Listening is closed when all subscriptions are connected, or the wait for them has timed out. nil: there are no
	// subscriptions.
	Listening <-chan struct{}
}

// awaitListening waits until Listening is closed.
func (p *Predictor) awaitListening(ctx context.Context) {
	if p.Listening == nil {
		return
	}
	select {
	case <-p.Listening:
	case <-ctx.Done():
	}
}

// predictionLifetime is how long a block without an event counts as cached. It is longer than any check.
const predictionLifetime = 24 * time.Hour

// prediction is what kvepp expects of one prompt.
type prediction struct {
	tokens     int  // cached: whole blocks, and never the prompt's last token
	held       int  // cached by full attention; more than tokens if a hybrid model's other layers prevent their reuse
	blockSize  int  // in tokens; 0: not known, and so nothing is predicted
	upperBound bool // the worker may find fewer tokens
	byEvents   bool // otherwise by the prompts that were sent to the worker
	eagle      bool
}

// worker returns the current state of a worker. Its events may have given its block size after it joined.
func (p *Predictor) worker(w kvblock.Worker) (pool.Worker, bool) {
	s := p.Pool.Acquire()
	defer s.Release()
	if x := s.Worker(w); x != nil {
		return *x, true
	}
	return pool.Worker{}, false
}

// predict returns the prediction for a prompt that is sent to w next.
func (p *Predictor) predict(w kvblock.Worker, ids []kvblock.Token) prediction {
	known, found := p.worker(w)
	if !found || known.BlockSize == 0 || known.Announced != 0 || len(ids) == 0 {
		return prediction{}
	}
	x := prediction{
		blockSize:  known.BlockSize,
		upperBound: known.UpperBound,
		byEvents:   p.Events && known.Announces(),
		eagle:      known.EAGLE,
	}
	var scores indexer.OverlapScores
	p.Index.FindPrompt(&indexer.Prompt{
		Chain: sequenceHashes(&known, ids), Tokens: len(ids), IDs: ids, Options: hashOptions(&known),
	}, &scores)
	cut := scores.Cut(w)
	x.upperBound = x.upperBound || cut.UpperBound
	blocks := scores.Blocks(w) + scores.Extension(w).Total()
	most := reusableBlocks(len(ids), x.blockSize)
	x.tokens = min(blocks, most) * x.blockSize
	x.held = min(max(blocks, cut.Held), most) * x.blockSize
	return x
}

// reusableBlocks returns how many blocks of a prompt of n tokens an engine can reuse. It always computes the last
// token.
func reusableBlocks(n, blockSize int) int { return max(n-1, 0) / blockSize }

func hashOptions(w *pool.Worker) kvblock.HashOptions {
	return kvblock.HashOptions{BlockSize: w.BlockSize, EAGLE: w.EAGLE}
}

func sequenceHashes(w *pool.Worker, ids []kvblock.Token) []kvblock.SequenceHash {
	local := kvblock.AppendLocalHashes(nil, ids, hashOptions(w))
	return kvblock.AppendSequenceHashes(nil, local)
}

// recordPrompt records that w has served a prompt. If w announces its blocks, it waits until all blocks of the prompt
// are announced, and returns false if ctx ends first.
func (p *Predictor) recordPrompt(ctx context.Context, w kvblock.Worker, ids []kvblock.Token) bool {
	known, _ := p.worker(w)
	if !p.Events || !known.Announces() {
		if known.BlockSize > 0 {
			p.Index.Predict(w, sequenceHashes(&known, ids), indexer.Lifetime{TTL: predictionLifetime})
		}
		return true
	}
	return p.waitFor(ctx, w, ids, func(x *prediction) bool {
		return x.held == reusableBlocks(len(ids), x.blockSize)*x.blockSize
	})
}

// awaitOutputBlocks waits until w's events also announce the blocks that a response filled: those of the first n tokens
// of the conversation's next prompt. It returns false if ctx ends first, as it does if the response's text has other
// token ids than the generated ones.
func (p *Predictor) awaitOutputBlocks(ctx context.Context, w kvblock.Worker, next []kvblock.Token, n int) bool {
	known, _ := p.worker(w)
	if !p.Events || !known.Announces() {
		return true
	}
	return p.waitFor(ctx, w, next, func(x *prediction) bool {
		return x.held >= min(n, len(next)-1)/x.blockSize*x.blockSize
	})
}

// waitFor waits until wanted returns true for a prediction. It returns false if ctx ends first.
func (p *Predictor) waitFor(
	ctx context.Context, w kvblock.Worker, ids []kvblock.Token, wanted func(*prediction) bool,
) bool {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		if x := p.predict(w, ids); x.blockSize > 0 && wanted(&x) {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
}

// agreesWith reports whether a prediction agrees with an engine's report. answered is the number of tokens that the
// worker generated earlier for the same conversation, which it may have cached as well.
func (x *prediction) agreesWith(reported, outputTokens int) bool {
	switch {
	case reported == x.tokens:
		return true
	case reported < x.tokens:
		// An engine that drafts with EAGLE computes the last cached block again.
		return x.upperBound || x.eagle && reported == x.tokens-x.blockSize
	}
	// Without events, kvepp does not predict the generated blocks.
	return !x.byEvents && reported <= x.tokens+outputTokens+x.blockSize && outputTokens > 0
}
