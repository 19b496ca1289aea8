// Package metricstest reads back, for tests, what a registry of metrics exports. It owns nothing and waits for nothing;
// any goroutine may call it.
package metricstest

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Series is one series as it was when it was read.
type Series struct {
	Name   string
	Labels []string // NAME=VALUE, by name
	Value  float64  // of a histogram the sum of what was observed
	Count  float64  // of a histogram how often something was; else Value
}

// String writes the series as a page of metrics names it: NAME{LABEL="VALUE",...}.
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

// All is some series, of one metric or of several.
type All []Series

// Read returns the series of a registry, by name and labels.
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

// Of returns those of a metric that have all of these labels, each NAME=VALUE.
func (a All) Of(name string, labels ...string) (some All) {
	for _, s := range a {
		if s.Name == name &&
			!slices.ContainsFunc(labels, func(l string) bool { return !slices.Contains(s.Labels, l) }) {
			some = append(some, s)
		}
	}
	return some
}

// Value adds the values up; 0 for none.
func (a All) Value() (sum float64) {
	for _, s := range a {
		sum += s.Value
	}
	return sum
}

// Count adds the counts up; 0 for none.
func (a All) Count() (sum float64) {
	for _, s := range a {
		sum += s.Count
	}
	return sum
}
