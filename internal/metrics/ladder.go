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
	m.Registry.MustRegister(&ladderSums{
		read: read,
		tokens: prometheus.NewDesc(
			"kvepp_ladder_tokens_total",
			"Prompt tokens that reach a rung of the hit-rate ladder: prompt (all), reusable (requested before), "+
				"fleet (cached by a worker), eligible (by a candidate), chosen (by the chosen worker), delivered "+
				"(reported by the engine).",
			[]string{"model", "rung"}, nil,
		),
		lost: prometheus.NewDesc(
			"kvepp_ladder_lost_tokens_total",
			"Prompt tokens that were not read from a cache, by cause.",
			[]string{"model", "cause"}, nil,
		),
		unpredicted: prometheus.NewDesc(
			"kvepp_ladder_unpredicted_tokens_total",
			"Prompt tokens that engines read from a cache in which the index did not have them.",
			[]string{"model"}, nil,
		),
	})
	Gauge(m, Reading{"kvepp_ladder_sampling",
		"kvepp remembers one of so many requested blocks. Above 1 the rung reusable is an estimate."}, sampling)
}

type ladderSums struct {
	read                      func() []LadderSum
	tokens, lost, unpredicted *prometheus.Desc
}

func (l *ladderSums) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{l.tokens, l.lost, l.unpredicted} {
		to <- d
	}
}

func (l *ladderSums) Collect(to chan<- prometheus.Metric) {
	send := func(d *prometheus.Desc, count uint64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(count), labels...)
	}
	for _, sum := range l.read() {
		for _, n := range sum.Tokens {
			send(l.tokens, n.Count, sum.Model, n.Name)
		}
		for _, n := range sum.Lost {
			send(l.lost, n.Count, sum.Model, n.Name)
		}
		send(l.unpredicted, sum.Unpredicted, sum.Model)
	}
}
