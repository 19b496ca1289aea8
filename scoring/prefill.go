package scoring

import (
	"time"

	"kvepp/kvblock"
)

// PrefillModel configures how prompts count as load while they are prefilled. The zero value counts each in full until
// its prefill ends, and learns how fast workers prefill.
type PrefillModel struct {
	// Linear makes a worker's waiting prompts shrink over time at its speed. While the speed is unknown they count in
	// full. Dynamo calls this a prefill load model, and takes the times from a table of engines and GPUs.
	Linear bool

	// TokensPerSecond is every worker's speed. 0: learned for each worker from the times between a booking and its
	// first content, after enough of them: that of a prompt of the usual length.
	TokensPerSecond float64

	// TransferSeconds is how long a decode worker takes to fetch a token's blocks from a prefill worker, until that is
	// learned for the workers of a model.
	TransferSeconds float64
}

// prefills is the state of one worker's prompts to prefill, besides their sum.
//
// The model: the worker prefills them in order of arrival without pause, from the time when the oldest became the
// oldest. If one ends before its turn, the worker is taken to have worked on it in that time, which then does not count
// for the others.
//
// Source: dynamo-kv-router 1.6.1, sequences/prefill_tracker.
type prefills struct {
	waiting order         // bookings with tokens to prefill
	since   time.Duration // when the work on the oldest of them began
}

// PrefillSpeed returns the worker's assumed prefill speed in tokens per second; 0: not known.
func (a *ActiveSequences) PrefillSpeed(w kvblock.Worker) float64 {
	a.lock()
	defer a.mu.Unlock()
	if int(w) >= len(a.prefills) {
		return a.Prefill.TokensPerSecond
	}
	return a.speed(w)
}

// speed returns the worker's prefill speed in tokens per second; 0: not known.
func (a *ActiveSequences) speed(w kvblock.Worker) float64 {
	if a.Prefill.TokensPerSecond > 0 {
		return a.Prefill.TokensPerSecond
	}
	f := a.learned.fleets[w]
	if f.usual.prefill.slope == 0 {
		return 0
	}
	average := f.common()
	tokens, _ := f.usual.prefill.means()
	perToken, perStep, _ := a.learned.prices[w].or(&average)
	return tokens / (perStep + perToken*tokens)
}

// waiting returns the tokens that count as still to be prefilled by worker w.
func (a *ActiveSequences) waiting(w kvblock.Worker, now time.Duration) int {
	if !a.Prefill.Linear {
		return a.loads[w].PrefillTokens
	}
	return a.remaining(w, now)
}

// remaining returns the tokens that worker w still has to prefill, by its speed.
func (a *ActiveSequences) remaining(w kvblock.Worker, now time.Duration) int {
	all := a.loads[w].PrefillTokens
	if all == 0 {
		return 0
	}
	done := a.speed(w) * float64(now-a.prefills[w].since) / float64(time.Second)
	if done >= float64(all) {
		return 0
	}
	return all - int(done)
}

// beginPrefill adds the tokens of a new booking.
func (a *ActiveSequences) beginPrefill(index uint32, tokens int) {
	b := &a.bookings[index]
	p := &a.prefills[b.worker]
	if p.waiting.first == 0 {
		p.since = a.now
	}
	p.waiting.push(a.bookings, index, prefillingLinks)
	b.prefillTokens = tokens
	waits := &a.learned.prices[b.worker].prefilling
	b.atOnce = *waits == 0
	*waits++
	a.loads[b.worker].PrefillTokens += tokens
	if b.copied != nil {
		a.copied[b.worker].PrefillTokens += tokens
		a.copied[b.worker].prefilling++
	}
}

// endPrefill is completePrefill, by PrefillDone or PrefillReleased. It tells the observer.
func (a *ActiveSequences) endPrefill(index uint32, by ChangeKind) {
	if b := &a.bookings[index]; b.prefillTokens > 0 {
		a.tell(by, b, nil)
	}
	a.completePrefill(index, by == PrefillDone)
}

// completePrefill takes the booking's tokens off, if they are still booked. seen says that the prefill ended just now.
func (a *ActiveSequences) completePrefill(index uint32, seen bool) {
	b := &a.bookings[index]
	now := a.clock()
	if seen && b.first == 0 {
		b.first = max(now, 1)
	}
	if b.prefillTokens == 0 {
		return
	}
	p := &a.prefills[b.worker]
	a.learned.prices[b.worker].prefilling--
	if b.copied != nil {
		a.copied[b.worker].PrefillTokens -= b.prefillTokens
		a.copied[b.worker].prefilling--
	} else if seen && b.atOnce { // the owner of a copy tells the time
		a.learn(Change{Kind: PrefillTimed, Number: b.number, Worker: b.worker, Tokens: b.prefillTokens,
			Took: a.transferred(b, now-b.since)})
	}
	first := p.waiting.first == index
	p.waiting.remove(a.bookings, index, prefillingLinks)
	if first {
		p.since = now
	} else if speed := a.speed(b.worker); speed > 0 {
		p.since = min(p.since+seconds(float64(b.prefillTokens)/speed), now)
	}
	a.loads[b.worker].PrefillTokens -= b.prefillTokens
	b.prefillTokens = 0
}

// PrefillEstimate returns the time until the worker will have prefilled the request, by its speed and the tokens that
// wait there. false: the speed is not known, or nothing is left to prefill.
func (b Booking) PrefillEstimate() (d time.Duration, ok bool) {
	b.do(func(a *ActiveSequences) {
		booked := &a.bookings[b.index]
		if speed := a.speed(booked.worker); speed > 0 && booked.prefillTokens > 0 {
			d, ok = seconds(float64(a.remaining(booked.worker, a.clock()))/speed), true
		}
	})
	return d, ok
}

// seconds returns a duration of at most a century.
func seconds(s float64) time.Duration {
	const century = 100 * 365 * 24 * time.Hour
	if s >= century.Seconds() {
		return century
	}
	return time.Duration(s * float64(time.Second))
}

// order is a linked list of bookings in order of arrival. The links are in the bookings.
type order struct{ first, last uint32 }

type links struct{ before, after uint32 }

func prefillingLinks(b *booking) *links { return &b.prefilling }
func expiringLinks(b *booking) *links   { return &b.expiring }

func (o *order) push(bookings []booking, index uint32, of func(*booking) *links) {
	*of(&bookings[index]) = links{before: o.last}
	if o.last == 0 {
		o.first = index
	} else {
		of(&bookings[o.last]).after = index
	}
	o.last = index
}

func (o *order) remove(bookings []booking, index uint32, of func(*booking) *links) {
	l := of(&bookings[index])
	if l.before == 0 {
		o.first = l.after
	} else {
		of(&bookings[l.before]).after = l.after
	}
	if l.after == 0 {
		o.last = l.before
	} else {
		of(&bookings[l.after]).before = l.before
	}
	*l = links{}
}
