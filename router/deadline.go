package router

import (
	"context"
	"errors"
	"runtime"
	"runtime/debug"
	"time"

	"kvepp/internal/apibody"
	"kvepp/tokenizer"
)

var (
	// errPickTimeout says that a prompt was not tokenized in time.
	errPickTimeout = errors.New("router: the prompt's token ids were not known within --pick-timeout")
	// errPanic says that a defect was met, which is logged.
	errPanic = errors.New("router: a defect, see the stack in the log")
)

// quickBytes is the size up to which a body is tokenized at once: the slowest takes less than any deadline is worth.
const quickBytes = 16 << 10

// newSlots bounds how many longer prompts are tokenized at once, and so what those that nobody waits for any more can hold. A
// few for each processor, so that one that lasts does not hold up the others.
func newSlots() chan struct{} { return make(chan struct{}, 4*runtime.GOMAXPROCS(0)) }

// tokenizeBy tokenizes a request of so many bytes, unless that takes until a time; zero: however long. Work that cannot be
// interrupted goes on by itself then, and its outcome is dropped.
//
// Errors: the tokenizer's; errPickTimeout; errPanic; ctx's own.
func (r *Router) tokenizeBy(ctx context.Context, until time.Time, model *tokenizer.Model, body *apibody.Request, size int) ([]tokenizer.Prompt, error) {
	if until.IsZero() || size <= quickBytes && body.ChatTemplate == "" {
		return model.Tokenize(ctx, body)
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case r.slots <- struct{}{}:
	case <-timer.C:
		return nil, errPickTimeout
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	type outcome struct {
		prompts []tokenizer.Prompt
		err     error
	}
	ended := make(chan outcome, 1) // so that nobody has to wait for it
	go func() {
		var o outcome
		defer func() {
			if c := recover(); c != nil {
				r.log.Error("panic while tokenizing a request; it is routed by load", "panic", c, "stack", string(debug.Stack()))
				o = outcome{err: errPanic}
			}
			<-r.slots
			ended <- o
		}()
		o.prompts, o.err = model.Tokenize(ctx, body)
	}()
	select {
	case o := <-ended:
		return o.prompts, o.err
	case <-timer.C:
		return nil, errPickTimeout
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// by returns ctx with a deadline, which is not the request's own end.
func by(ctx context.Context, until time.Time) (context.Context, context.CancelFunc) {
	if until.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, until)
}
