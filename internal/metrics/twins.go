package metrics

import (
	"cmp"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Twin is a metric that repeats another one under the name and labels of another program, so that its dashboards and
// alerts find it.
type Twin struct {
	Name string
	Help string // empty: that it is the same as Of
	Of   string // the metric that it repeats
	// Labels are NAME=LABEL, where LABEL is one of Of's, or NAME="TEXT". Series of Of that become equal are added up,
	// unless they are histograms: then the first counts.
	Labels []string
	// Only says which series of Of count: those with one of the values of each label, LABEL=VALUE,VALUE. Empty: all.
	Only []string
	// Count makes of Of, a histogram, the counter of its observations.
	Count bool
	// Scale multiplies the values of Of, unless it is a histogram. 0: 1.
	Scale float64
	// Zero makes all values 0.
	Zero bool
	// Value computes the only series in place of Of, from a function that returns the sum of a gauge.
	Value func(of func(name string) float64) float64
}

// Twins exports metrics under further names. Twins of one name follow one another, and have labels of the same names;
// of equal series the first counts. Call it once, before Gatherer.
func (m *Metrics) Twins(all []Twin) { m.twins = all }

// Gatherer returns what gathers all metrics.
func (m *Metrics) Gatherer() prometheus.Gatherer {
	if len(m.twins) == 0 {
		return m.Registry
	}
	return prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := m.Registry.Gather()
		of := make(map[string]*dto.MetricFamily, len(families))
		for _, f := range families {
			of[f.GetName()] = f
		}
		for i := range m.twins {
			twin := m.twins[i].from(of)
			last := families[len(families)-1]
			switch {
			case len(twin.GetMetric()) == 0:
			case last.GetName() == twin.GetName():
				last.Metric = append(last.Metric, slices.DeleteFunc(twin.Metric, func(next *dto.Metric) bool {
					return slices.ContainsFunc(last.Metric, func(m *dto.Metric) bool {
						return labelsKey(m.Label) == labelsKey(next.Label)
					})
				})...)
			default:
				families = append(families, twin)
			}
		}
		slices.SortFunc(families, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
		return families, err
	})
}

// from returns the twin's family; without series: it has none.
func (t *Twin) from(families map[string]*dto.MetricFamily) *dto.MetricFamily {
	help := cmp.Or(t.Help, "The same as "+t.Of+".")
	twin := &dto.MetricFamily{Name: &t.Name, Help: &help, Type: dto.MetricType_GAUGE.Enum()}
	if t.Value != nil {
		value := t.Value(func(name string) (sum float64) {
			for _, series := range families[name].GetMetric() {
				sum += series.GetGauge().GetValue()
			}
			return sum
		})
		twin.Metric = []*dto.Metric{{Label: t.labels(nil), Gauge: &dto.Gauge{Value: &value}}}
		return twin
	}
	family, factor := families[t.Of], cmp.Or(t.Scale, 1)
	if family == nil {
		return twin
	}
	if t.Zero {
		factor = 0
	}
	if twin.Type = family.Type; t.Count {
		twin.Type = dto.MetricType_COUNTER.Enum()
	}
	known := map[string]*dto.Metric{}
	for _, series := range family.GetMetric() {
		if !t.counts(series) {
			continue
		}
		next := t.copyOf(series, factor)
		key := labelsKey(next.Label)
		switch first := known[key]; {
		case first == nil:
			known[key] = next
			twin.Metric = append(twin.Metric, next)
		case first.Counter != nil:
			*first.Counter.Value += *next.Counter.Value
		case first.Gauge != nil:
			*first.Gauge.Value += *next.Gauge.Value
		}
	}
	return twin
}

// counts reports whether a series is one of those that Only names.
func (t *Twin) counts(series *dto.Metric) bool {
	for _, only := range t.Only {
		label, values, _ := strings.Cut(only, "=")
		if !slices.Contains(strings.Split(values, ","), labelOf(series, label)) {
			return false
		}
	}
	return true
}

// copyOf returns a series with the twin's labels; factor multiplies its value.
func (t *Twin) copyOf(series *dto.Metric, factor float64) *dto.Metric {
	to := &dto.Metric{Label: t.labels(series)}
	switch {
	case t.Count:
		value := float64(series.GetHistogram().GetSampleCount())
		to.Counter = &dto.Counter{Value: &value}
	case series.Counter != nil:
		value := series.GetCounter().GetValue() * factor
		to.Counter = &dto.Counter{Value: &value}
	case series.Gauge != nil:
		value := series.GetGauge().GetValue() * factor
		to.Gauge = &dto.Gauge{Value: &value}
	default:
		to.Histogram = series.Histogram
	}
	return to
}

func (t *Twin) labels(series *dto.Metric) (all []*dto.LabelPair) {
	for _, given := range t.Labels {
		name, value, _ := strings.Cut(given, "=")
		if text, constant := strings.CutPrefix(value, `"`); constant {
			value = strings.TrimSuffix(text, `"`)
		} else {
			value = labelOf(series, value)
		}
		all = append(all, &dto.LabelPair{Name: &name, Value: &value})
	}
	slices.SortFunc(all, func(a, b *dto.LabelPair) int { return strings.Compare(a.GetName(), b.GetName()) })
	return all
}

func labelOf(series *dto.Metric, name string) string {
	for _, pair := range series.GetLabel() {
		if pair.GetName() == name {
			return pair.GetValue()
		}
	}
	return ""
}

func labelsKey(labels []*dto.LabelPair) string {
	var key strings.Builder
	for _, pair := range labels {
		key.WriteString(pair.GetValue() + "\x00")
	}
	return key.String()
}
