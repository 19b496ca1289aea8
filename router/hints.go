package router

import (
	"kvepp/internal/apibody"
	"kvepp/internal/metrics"
)

// The causes for which a client's hint is not followed.
const (
	hintMalformed  = "malformed"
	hintDisabled   = "disabled"    // Config.IgnoreHints
	hintNotAllowed = "not_allowed" // a pin, without leave
)

// showIgnored makes the series of ignored hints visible, at zero.
func showIgnored(m *metrics.Metrics) {
	for _, hint := range apibody.HintNames {
		m.HintsIgnored(hint, hintMalformed, 0)
		m.HintsIgnored(hint, hintDisabled, 0)
	}
	m.HintsIgnored("pin", hintNotAllowed, 0)
}

// follow returns the hints of a request that are followed, and counts the others.
func (r *Router) follow(given apibody.Hints) apibody.Hints {
	if r.cfg.IgnoreHints {
		for _, hint := range given.Given() {
			r.metrics.HintsIgnored(hint, hintDisabled, 1)
		}
		return apibody.Hints{}
	}
	for _, hint := range given.Malformed {
		r.metrics.HintsIgnored(hint, hintMalformed, 1)
	}
	return given
}
