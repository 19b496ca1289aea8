package metrics

import (
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Twin is a metric that repeats another one under the name and labels of another program, so that its dashboards and
// alerts find it.
type Twin struct {
	Name string
	Of   string // the metric that it repeats
	Zero string // a gauge, each of whose series stands for one of value 0 while Of has none
	// Labels are NAME=LABEL, where LABEL is one of Of's, or NAME="TEXT". Series of Of that become equal are added up,
	// unless they are histograms: then the first counts.
	Labels []string
	// Only has the label and the values of the series of Of that count: LABEL=VALUE,VALUE. Empty: all do.
	Only string
	// Value computes the only series in place of Of, from a function that returns the sum of a gauge.
	Value func(of func(name string) float64) float64
}

// Twins exports metrics under further names. Twins of one name follow one another. Call it once, before Gatherer.
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
				last.Metric = append(last.Metric, twin.Metric...)
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
	help := "The same as " + t.Of + "."
	if t.Value != nil {
		help = "As llm-d's picker computes it, of the engines' own gauges."
	}
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
	family, factor := families[t.Of], 1.0
	if len(family.GetMetric()) == 0 {
		if family, factor = families[t.Zero], 0; family == nil {
			return twin
		}
	}
	twin.Type = family.Type
	label, values, _ := strings.Cut(t.Only, "=")
	known := map[string]*dto.Metric{}
	for _, series := range family.GetMetric() {
		if t.Only != "" && !slices.Contains(strings.Split(values, ","), labelOf(series, label)) {
			continue
		}
		labels := t.labels(series)
		key := labelsKey(labels)
		first := known[key]
		if first == nil {
			known[key] = copyOf(series, labels, factor)
			twin.Metric = append(twin.Metric, known[key])
			continue
		}
		if c := first.GetCounter(); c != nil {
			*c.Value += series.GetCounter().GetValue()
		}
		if g := first.GetGauge(); g != nil {
			*g.Value += series.GetGauge().GetValue() * factor
		}
	}
	return twin
}

// copyOf returns a series with other labels whose value may change; factor multiplies the value of a gauge.
func copyOf(series *dto.Metric, labels []*dto.LabelPair, factor float64) *dto.Metric {
	to := &dto.Metric{Label: labels, Histogram: series.Histogram}
	if from := series.GetCounter(); from != nil {
		value := from.GetValue()
		to.Counter = &dto.Counter{Value: &value}
	}
	if from := series.GetGauge(); from != nil {
		value := from.GetValue() * factor
		to.Gauge = &dto.Gauge{Value: &value}
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
