package router

import (
	"errors"

	"kvepp/router/queue"
)

// rejections are the causes of refusals because of load. They are a metric's labels.
var rejections = []string{"overloaded", "queue_full", "queue_limit", "queue_timeout", "shed", "no_room"}

// countRejection counts a refusal because of load, or for want of a prefill worker. It ignores other errors.
func (r *Router) countRejection(err error) {
	limit := (*queue.LimitError)(nil)
	switch {
	case errors.Is(err, ErrNoRoom):
		r.metrics.Rejection("no_room")
	case errors.Is(err, ErrOverloaded):
		r.metrics.Rejection("overloaded")
	case errors.As(err, &limit):
		r.metrics.Rejection("queue_limit")
	case errors.Is(err, ErrQueueFull):
		r.metrics.Rejection("queue_full")
	case errors.Is(err, ErrQueueTimeout):
		r.metrics.Rejection("queue_timeout")
	case errors.Is(err, ErrShed):
		r.metrics.Rejection("shed")
	case errors.Is(err, ErrNoPrefill):
		r.metrics.Unpaired.Inc()
	}
}
