// Package metricstest reads the values of metrics from a registry, for tests. It has no state; any goroutine may call
// it.
package metricstest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Series is one series at the time of reading.
type Series struct {
	Name   string
	Labels []string // NAME=VALUE, by name
	Value  float64  // of a histogram: the sum of observations
	Count  float64  // of a histogram: the number of observations; else Value
}

// String returns the series in the syntax of a metrics page: NAME{LABEL="VALUE",...}.
func (s Series) String() string {
	var labels []string
	for _, l := range s.Labels {
		name, value, _ := strings.Cut(l, "=")
		labels = append(labels, fmt.Sprintf("%s=%q", name, value))
	}
	if labels == nil {
		return s.Name
	}
	return s.Name + "{" + strings.Join(labels, ",") + "}"
}

// All is a list of series of one or more metrics.
type All []Series

// Read returns all series of a registry.
func Read(t testing.TB, from prometheus.Gatherer) (all All) {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			s := Series{Name: f.GetName(), Value: m.GetCounter().GetValue() + m.GetGauge().GetValue()}
			if s.Count = s.Value; m.GetHistogram() != nil {
				s.Value, s.Count = m.GetHistogram().GetSampleSum(), float64(m.GetHistogram().GetSampleCount())
			}
			for _, l := range m.GetLabel() {
				s.Labels = append(s.Labels, l.GetName()+"="+l.GetValue())
			}
			all = append(all, s)
		}
	}
	return all
}

// Of returns the series of a metric that have all of the labels, each NAME=VALUE.
func (a All) Of(name string, labels ...string) (some All) {
	for _, s := range a {
		if s.Name == name &&
			!slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(s.Labels, l) }) {
			some = append(some, s)
		}
	}
	return some
}

// Value returns the sum of the values.
func (a All) Value() (sum float64) {
	for _, s := range a {
		sum += s.Value
	}
	return sum
}

// Count returns the sum of the counts.
func (a All) Count() (sum float64) {
	for _, s := range a {
		sum += s.Count
	}
	return sum
}
