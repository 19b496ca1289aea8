package metrics

import "github.com/prometheus/client_golang/prometheus"

// Reading describes a metric that is read at each scrape.
type Reading struct{ Name, Help string }

type number interface{ int | int64 | uint64 | float64 }

// Gauge declares a gauge whose value read returns at each scrape. labels are names and values in turn.
func Gauge[N number](m *Metrics, of Reading, read func() N, labels ...string) {
	m.Registry.MustRegister(prometheus.NewGaugeFunc(
		prometheus.GaugeOpts{Name: of.Name, Help: of.Help, ConstLabels: pairs(labels)},
		func() float64 { return float64(read()) }))
}

// Flag declares a gauge that is 1 while read returns true, else 0.
func Flag(m *Metrics, of Reading, read func() bool, labels ...string) {
	Gauge(m, of, func() float64 { return oneIf(read()) }, labels...)
}

// Counter declares a counter whose value read returns at each scrape.
func Counter[N number](m *Metrics, of Reading, read func() N, labels ...string) {
	m.Registry.MustRegister(prometheus.NewCounterFunc(
		prometheus.CounterOpts{Name: of.Name, Help: of.Help, ConstLabels: pairs(labels)},
		func() float64 { return float64(read()) }))
}

func pairs(labels []string) prometheus.Labels {
	all := prometheus.Labels{}
	for i := 0; i < len(labels); i += 2 {
		all[labels[i]] = labels[i+1]
	}
	return all
}

// Gauges declares gauges that differ in the value of a label. read returns all by that value.
func Gauges[N number](m *Metrics, of Reading, label string, read func() map[string]N) {
	collect(m, of, label, prometheus.GaugeValue, read)
}

// Counters declares counters that differ in the value of a label. read returns all by that value.
func Counters[N number](m *Metrics, of Reading, label string, read func() map[string]N) {
	collect(m, of, label, prometheus.CounterValue, read)
}

func collect[N number](m *Metrics, of Reading, label string, kind prometheus.ValueType, read func() map[string]N) {
	m.Registry.MustRegister(&family[N]{prometheus.NewDesc(of.Name, of.Help, []string{label}, nil), kind, read})
}

type family[N number] struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	read func() map[string]N
}

func (f *family[N]) Describe(to chan<- *prometheus.Desc) { to <- f.desc }

func (f *family[N]) Collect(to chan<- prometheus.Metric) {
	for value, n := range f.read() {
		to <- prometheus.MustNewConstMetric(f.desc, f.kind, float64(n), value)
	}
}

// scraped collects series of several metrics that are read at each scrape.
type scraped struct {
	descs   []*prometheus.Desc
	collect func(send sender)
}

// sender sends the value of one series, with the values of its labels.
type sender func(of *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string)

// desc declares a metric.
func (s *scraped) desc(name, help string, labels ...string) *prometheus.Desc {
	d := prometheus.NewDesc(name, help, labels, nil)
	s.descs = append(s.descs, d)
	return d
}

func (s *scraped) Describe(to chan<- *prometheus.Desc) {
	for _, d := range s.descs {
		to <- d
	}
}

func (s *scraped) Collect(to chan<- prometheus.Metric) {
	s.collect(func(of *prometheus.Desc, kind prometheus.ValueType, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(of, kind, value, labels...)
	})
}

func oneIf(is bool) float64 {
	if is {
		return 1
	}
	return 0
}
