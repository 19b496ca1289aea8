package replay

import (
	"math"
	"slices"
	"time"

	"kvepp/router/session"
)

// Report is what came of a replay. Times are virtual.
type Report struct {
	// Requests is how many arrived, and Completed how many of them were answered. Of the others, QueueRefused found the
	// queue full or waited in it for too long, and BusyRefused found every worker above a threshold. TooLarge ones fit
	// into no engine and are not counted as arrived.
	Requests, Completed, QueueRefused, BusyRefused, TooLarge int
	// PromptTokens and OutputTokens are those of completed requests, and CachedTokens what their engines had cached.
	PromptTokens, OutputTokens, CachedTokens int
	// PredictedTokens is what the index counted as cached for the same requests.
	PredictedTokens int
	// RepeatedTokens is what one cache of infinite size would have had of the prompts that arrived, and ArrivedTokens
	// is what these had. DistinctFull: there were more than MaxDistinct different blocks, so that RepeatedTokens is a
	// lower bound.
	RepeatedTokens, ArrivedTokens int
	DistinctFull                  bool
	// Sessions is what became of the sessions' requests; zero unless sessions were bound.
	Sessions session.Stats
	// TTFT is the time from arrival to the first token, TPOT the mean time between later tokens of one response, E2E
	// the time from arrival to the last token, and Queued the time in kvepp's queue.
	TTFT, TPOT, E2E, Queued Distribution
	// Workers is what each worker did.
	Workers []WorkerReport
	// Duration is the time from the first arrival to the last response.
	Duration time.Duration

	begun   bool
	first   time.Duration
	samples []sample
	load    overTime
}

// MaxDistinct bounds the blocks that a replay remembers for Report.RepeatedTokens: about 0.5 GB.
const MaxDistinct = 1 << 25

// Refused returns how many requests were refused.
func (r *Report) Refused() int { return r.QueueRefused + r.BusyRefused }

// WorkerReport is what one worker did.
type WorkerReport struct {
	Requests       int
	ComputedTokens int           // prompt tokens that it computed
	Preemptions    int           // requests that had to give up their blocks and begin anew
	Busy           time.Duration // in steps
}

type sample struct {
	ttft, tpot, e2e, queued float32 // seconds; tpot NaN: a response of one token
}

// Distribution describes times in seconds, or in the unit of what is described.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
	Max  float64 `json:"max"`
	// Curve has the quantiles 0, 1/200, 2/200 and so on up to 1.
	Curve [201]float64 `json:"-"`
}

func newReport(workers int) *Report {
	return &Report{Workers: make([]WorkerReport, workers), load: newOverTime(workers)}
}

func (r *Report) arrived(s *Simulation, f *flight) {
	if !r.begun {
		r.begun, r.first = true, s.now
	}
	r.Requests++
	f.number = r.Requests
	r.ArrivedTokens += f.Prompt
	size := s.cfg.Engine.BlockSize
	most := min((f.Prompt-1)/size, len(f.Chain))
	hit := 0
	for hit < most {
		if _, ok := s.seen[f.Chain[hit]]; !ok {
			break
		}
		hit++
	}
	f.possible = hit * size
	r.RepeatedTokens += f.possible
	for _, h := range f.Chain[hit:] {
		if len(s.seen) == MaxDistinct {
			r.DistinctFull = true
			return
		}
		s.seen[h] = struct{}{}
	}
}

// busy tells of a step of an engine.
func (r *Report) busy(w int, at, took time.Duration) { r.load.add(w, at, took) }

func (r *Report) refused(s *Simulation, f *flight, why Outcome) {
	if why == RefusedBusy {
		r.BusyRefused++
	} else {
		r.QueueRefused++
	}
	s.decided(f, why)
}

func (r *Report) completed(s *Simulation, f *flight) {
	r.Completed++
	r.PromptTokens += f.Prompt
	r.OutputTokens += f.Output
	r.CachedTokens += f.cached
	r.PredictedTokens += min(f.overlap*s.cfg.Engine.BlockSize, f.Prompt)
	r.Duration = s.now - r.first
	r.Workers[f.worker].Requests++
	x := sample{
		ttft:   float32((f.firstToken - f.arrived).Seconds()),
		tpot:   float32(math.NaN()),
		e2e:    float32((s.now - f.arrived).Seconds()),
		queued: float32((f.sent - f.arrived).Seconds()),
	}
	if f.Output > 1 {
		x.tpot = float32((f.lastToken - f.firstToken).Seconds() / float64(f.Output-1))
	}
	r.samples = append(r.samples, x)
	s.decided(f, Completed)
}

func (r *Report) finish(s *Simulation) {
	for _, router := range s.replicas {
		if router.sessions != nil {
			r.Sessions.Add(router.sessions.Stats())
		}
	}
	for i, e := range s.engines {
		w := &r.Workers[i]
		w.ComputedTokens, w.Preemptions, w.Busy = e.computedPrompt, e.preemptions, e.busy
	}
	values := make([]float32, 0, len(r.samples))
	of := func(value func(*sample) float32) Distribution {
		values = values[:0]
		for i := range r.samples {
			if v := value(&r.samples[i]); v == v {
				values = append(values, v)
			}
		}
		return Describe(values)
	}
	r.TTFT = of(func(x *sample) float32 { return x.ttft })
	r.TPOT = of(func(x *sample) float32 { return x.tpot })
	r.E2E = of(func(x *sample) float32 { return x.e2e })
	r.Queued = of(func(x *sample) float32 { return x.queued })
}

// CachedShare is the share of prompt tokens that the engines had cached, 0..1.
func (r *Report) CachedShare() float64 { return share(r.CachedTokens, r.PromptTokens) }

// PossibleShare is the share that one cache of infinite size would have had, 0..1.
func (r *Report) PossibleShare() float64 { return share(r.RepeatedTokens, r.ArrivedTokens) }

// Imbalance is the busy time of the busiest worker by the mean.
func (r *Report) Imbalance() float64 {
	var sum, most time.Duration
	for _, w := range r.Workers {
		sum += w.Busy
		most = max(most, w.Busy)
	}
	if sum == 0 {
		return 1
	}
	return float64(most) * float64(len(r.Workers)) / float64(sum)
}

// AheadOverTime returns how much more of each period of the replay, 0..1, the busiest worker was busy than the mean of
// all. A step counts in the period in which it began.
func (r *Report) AheadOverTime() (period time.Duration, each []float64) {
	return r.load.length, r.load.ahead()
}

// Goodput is the share of arrived requests whose first token and mean gap between tokens were within two times, 0..1.
func (r *Report) Goodput(ttft, tpot time.Duration) float64 {
	good := 0
	for i := range r.samples {
		x := &r.samples[i]
		if float64(x.ttft) <= ttft.Seconds() && !(float64(x.tpot) > tpot.Seconds()) {
			good++
		}
	}
	return share(good, r.Requests)
}

func share(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// Describe describes times in seconds, and sorts them.
func Describe(values []float32) (d Distribution) {
	if len(values) == 0 {
		return d
	}
	slices.Sort(values)
	for _, v := range values {
		d.Mean += float64(v)
	}
	d.Mean /= float64(len(values))
	at := func(q float64) float64 { // linear between ranks
		x := q * float64(len(values)-1)
		i := int(x)
		if i+1 == len(values) {
			return float64(values[i])
		}
		return float64(values[i]) + (x-float64(i))*(float64(values[i+1])-float64(values[i]))
	}
	d.P50, d.P90, d.P99, d.Max = at(.5), at(.9), at(.99), float64(values[len(values)-1])
	for i := range d.Curve {
		d.Curve[i] = at(float64(i) / float64(len(d.Curve)-1))
	}
	return d
}
