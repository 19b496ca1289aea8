package router

import (
	"fmt"

	"kvepp/internal/metrics"
	"kvepp/internal/overrides"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/scoring"
)

// The causes for which a client's hint is ignored.
const (
	hintMalformed  = "malformed"
	hintDisabled   = "disabled"    // Config.IgnoreHints
	hintNotAllowed = "not_allowed" // a pin without Config.Pinning
	hintUnheard    = "unheard"     // a tenant, where the endpoints do not know tenants
)

// showIgnored creates the series of ignored hints, at zero.
func showIgnored(m *metrics.Metrics) {
	for _, hint := range body.HintNames {
		m.HintsIgnored(hint, hintMalformed, 0)
		m.HintsIgnored(hint, hintDisabled, 0)
	}
	m.HintsIgnored("pin", hintNotAllowed, 0)
	m.HintsIgnored("tenant", hintUnheard, 0)
}

// follow returns the hints that are followed, and counts the others.
func (r *Router) follow(given body.Hints) body.Hints {
	if r.cfg.IgnoreHints {
		for _, hint := range given.Given() {
			r.metrics.HintsIgnored(hint, hintDisabled, 1)
		}
		return body.Hints{Sender: given.Sender}
	}
	if given.Tenant != "" && !r.cfg.heedsTenants() {
		r.metrics.HintsIgnored("tenant", hintUnheard, 1)
	}
	for _, hint := range given.Malformed {
		r.metrics.HintsIgnored(hint, hintMalformed, 1)
	}
	return given
}

// followOverrides returns the configuration that prices a request with these overrides. nil: the router's. A request
// that sets a weight of Dynamo's cost is priced by the policy Dynamo, which is the only one that has it.
func (r *Router) followOverrides(o *overrides.Overrides) *scoring.Config {
	switch {
	case *o == (overrides.Overrides{}):
		return nil
	case r.cfg.IgnoreHints:
		r.metrics.HintsIgnored("override", hintDisabled, 1)
		return nil
	}
	c := r.currentPolicy().Weights.With(o)
	if o.SetsDynamosWeights() {
		c.Policy = scoring.Dynamo
	}
	return &c
}

// followPins returns the workers that a request asks for; none if it may not ask.
func (r *Router) followPins(p body.Pins) (body.Pins, error) {
	switch {
	case !p.Given():
	case r.cfg.IgnoreHints:
		r.metrics.HintsIgnored("pin", hintDisabled, 1)
	case !r.cfg.Pinning:
		r.metrics.HintsIgnored("pin", hintNotAllowed, 1)
	case p.Err != nil:
		return body.Pins{}, p.Err
	default:
		return p, nil
	}
	return body.Pins{}, nil
}

// followConstraints returns the request's constraints on its workers' taints.
func (r *Router) followConstraints(c *body.Constraints) scoring.Constraints {
	if c.Given() && r.cfg.IgnoreHints {
		r.metrics.HintsIgnored("routing_constraints", hintDisabled, 1)
		return scoring.Constraints{}
	}
	return scoring.Constraints(*c)
}

// pinAllows reports whether a pin names w, or no worker at all.
func pinAllows(p *body.Pin, w *pool.Worker) bool {
	return p.Key == "" || w.InstanceID == p.InstanceID && (!p.HasRank || w.Rank == p.Rank)
}

// unknownPin returns the error for a pin that names no worker that can take the request.
func unknownPin(p *body.Pin) error {
	what := fmt.Sprintf("%d", p.InstanceID)
	if p.HasRank {
		what += fmt.Sprintf(", rank %d,", p.Rank)
	}
	return &body.Error{
		Code:    body.CodeInvalidValue,
		Param:   p.Key,
		Message: fmt.Sprintf("'%s': %s is no worker that can serve this request.", p.Key, what),
	}
}
