package chattemplate

import (
	"errors"
	"time"
)

// ErrLimit is returned (wrapped, with the limit's name) when a render goes beyond one of its Limits.
var ErrLimit = errors.New("chattemplate: limit exceeded")

// Limits bound one render. A zero field means its default.
type Limits struct {
	// Steps bounds the work: one for each statement, expression part, call and item of a loop, and one for each
	// 64 bytes of an intermediate string. Default 5,000,000: some hundred times an 8k-token conversation.
	Steps int
	// Depth bounds macros that call macros, and how deep a value may nest where it is printed or compared.
	// Default 200, at most 1,000: a deeper stack is refused whatever is asked.
	Depth int
	// OutputBytes bounds the rendered text and every string made on the way. Default 16 MiB.
	OutputBytes int
	// Timeout bounds the time of the render. Default 2 s. It is checked every 1,024 steps.
	Timeout time.Duration
}

// RaiseError is the error of a template that called raise_exception: the request breaks a rule of the model's own.
type RaiseError struct {
	// Message is the template's.
	Message string
}

func (e *RaiseError) Error() string { return "chat template: " + e.Message }

// Template is a compiled chat template, immutable and safe for concurrent use.
type Template struct {
	name string
	body statement
	now  func() time.Time
}
