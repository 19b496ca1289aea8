package router

import "errors"

// rejections are the causes for which requests are turned away because of load, as a metric has them.
var rejections = []string{"overloaded"}

// countRejection counts an error of load; any other is none of its business.
func (r *Router) countRejection(err error) {
	if errors.Is(err, ErrOverloaded) {
		r.metrics.Rejection("overloaded")
	}
}
