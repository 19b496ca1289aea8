package metrics

import "github.com/prometheus/client_golang/prometheus"

// LadderSum is the hit-rate ladder of one model.
type LadderSum struct {
	Model       string
	Tokens      []Named // by rung
	Lost        []Named // by cause
	Unpredicted uint64
}

// Named is a count with the value of its label.
type Named struct {
	Name  string
	Count uint64
}

// CollectLadder exports the hit-rate ladder that read returns at each scrape. sampling returns N if kvepp remembers one
// of N requested blocks.
func (m *Metrics) CollectLadder(read func() []LadderSum, sampling func() int) {
	s := &scraped{}
	tokens := s.desc("kvepp_ladder_tokens_total",
		"Prompt tokens that reach a rung of the hit-rate ladder: prompt (all), reusable (requested before), "+
			"fleet (cached by a worker), eligible (by a candidate), chosen (by the chosen worker), delivered "+
			"(reported by the engine).", "model", "rung")
	lost := s.desc("kvepp_ladder_lost_tokens_total",
		"Prompt tokens that were not read from a cache, by cause.", "model", "cause")
	unpredicted := s.desc("kvepp_ladder_unpredicted_tokens_total",
		"Prompt tokens that engines read from a cache in which the index did not have them.", "model")
	s.collect = func(send sender) {
		for _, sum := range read() {
			for _, n := range sum.Tokens {
				send(tokens, prometheus.CounterValue, float64(n.Count), sum.Model, n.Name)
			}
			for _, n := range sum.Lost {
				send(lost, prometheus.CounterValue, float64(n.Count), sum.Model, n.Name)
			}
			send(unpredicted, prometheus.CounterValue, float64(sum.Unpredicted), sum.Model)
		}
	}
	m.Registry.MustRegister(s)
	Gauge(m, Reading{"kvepp_ladder_sampling",
		"kvepp remembers one of so many requested blocks. Above 1 the rung reusable is an estimate."}, sampling)
}
