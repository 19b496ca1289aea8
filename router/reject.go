package router

import (
	"errors"

	"kvepp/router/queue"
)

// rejections are the causes of refusals because of load. They are a metric's labels.
var rejections = []string{"overloaded", "queue_full", "queue_limit", "queue_timeout", "shed", "no_room", "hold_timeout",
	"deadline", "shutting_down"}

// countRejection counts a refusal because of load, or for want of a prefill worker. It ignores other errors.
func (r *Router) countRejection(err error) {
	limit, late := (*queue.LimitError)(nil), (*LateError)(nil)
	switch {
	case errors.Is(err, queue.ErrAway):
		r.metrics.Rejection("hold_timeout")
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
	case errors.As(err, &late):
		r.metrics.Rejection("deadline")
	case errors.Is(err, ErrEnding):
		r.metrics.Rejection("shutting_down")
	case errors.Is(err, ErrNoPrefill):
		r.metrics.Unpaired.Inc()
	}
}
