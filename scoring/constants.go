package scoring

// The constants of the policy Time. The first three are weights; docs/routing.md has what each term is worth. The
// others say how the book learns. Bounds of what callers may report are not among them.
const (
	// interference is the weight of the time that a response loses to this request's prefill. Its reader is slower than
	// the engine, so a late token costs less than a late first token.
	interference = 0.2
	// slowerOutput is the weight of the time that this request's response takes longer on a slower worker.
	slowerOutput = 0.1
	// decodeInterference is the weight of the time that responses lose to each other's KV blocks.
	decodeInterference = 0.02

	// What is assumed until it is learned: seconds to prefill a token, seconds by which each held token lengthens the
	// time between two tokens (no less is ever learned, so that load always has a price), and tokens of a response.
	safeSecondsPerToken = 1e-4
	safeGapPerToken     = 1e-8
	safeOutputTokens    = 100

	// pairShare is the share of a decode worker's cost for a whole prompt that a prefill and a decode worker may cost
	// at most. Their price lacks the step in which the decode worker takes up the response, and measured times err.
	pairShare = 0.8

	// enough is how many samples are needed before a learned number is used.
	enough = 5
	// keep is the weight that earlier samples keep with each further one.
	keep = 0.995
	// keepUnused is the weight that the samples of a worker keep with each sample of an average other worker, while it
	// has none: a worker that was slow for a while would otherwise get no requests that show that it is not any more.
	keepUnused = 0.95

	// A worker whose prefill takes up to alikeShare more or less than the average worker's, or alikeErrors standard
	// errors of its samples' mean, counts as equally fast. Measured times of equal workers differ by some per cent:
	// priced by these, an idle fleet would send every request to the worker that was lucky, and conversations would
	// leave their cached blocks.
	alikeShare  = 0.1
	alikeErrors = 3
	// likeness is the weight of each of two samples by which a worker is taken to resemble the average worker. One
	// sample of a prompt of the usual length outweighs them, and hundreds of short ones do not.
	likeness = 0.05
	// leastSlope is the least share of the time for a prompt of the usual length that its tokens take.
	leastSlope = 0.1
	// farOff is by what factor a worker's figure may differ from that of the fleet's median worker to count for the
	// others; its square for noise, because a few samples say little about it.
	farOff = 3
	// mostVoice is the most samples of one worker that count for what a fleet has in common.
	mostVoice = 20
)
