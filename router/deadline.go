package router

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/router/budget"
)

var (
	// errPickTimeout says that a prompt was not read and tokenized within --pick-timeout.
	errPickTimeout = errors.New("router: the prompt's token ids were not known within --pick-timeout")
	// errPanic says that reading a request panicked. The log has the stack.
	errPanic = errors.New("router: a defect, see the stack in the log")
)

// quickBytes is the body size up to which a body is read without a slot or a deadline: reading it takes less time than
// any deadline.
const quickBytes = 16 << 10

// slots bound how many bodies above quickBytes are read concurrently, and so what abandoned reads can hold. Each is a
// channel with one place for each body. Waiting requests get places in order of arrival.
type slots struct {
	// all has four places for each processor, so that one slow body does not delay the others.
	all chan struct{}
	// large has one place for every two processors, so that large bodies leave half of the processors to others. A
	// large body takes no place in all.
	large chan struct{}
}

func newSlots() slots {
	n := runtime.GOMAXPROCS(0)
	return slots{all: make(chan struct{}, 4*n), large: make(chan struct{}, max(n/2, 1))}
}

// of returns the slots for bodies of a size.
func (s *slots) of(size int) chan struct{} {
	if size > budget.LargeBody {
		return s.large
	}
	return s.all
}

// reading is what one request holds while its body is read: a slot, and memory of the budget. Only the request's own
// goroutine calls its methods, except release.
type reading struct {
	router *Router
	size   int           // of the body, in bytes
	slot   chan struct{} // held; nil: none
	cost   int           // bytes held in the budget's share for such bodies; 0: none
	late   bool          // abandoned work still holds all of it, and releases it
}

// begin waits until a time for memory to read a body of size bytes, and for a slot unless it is a quick one. A zero
// time: no deadline. Call end on the result also after an error.
//
// Errors: errPickTimeout; ctx's own.
func (r *Router) begin(ctx context.Context, until time.Time, size int) (reading, error) {
	g := reading{router: r, size: size}
	share, cost := r.cfg.Memory.ReadShare(size), body.ReadCost(size)
	if size <= quickBytes {
		if share.TryTake(cost) {
			g.cost = cost
			return g, nil
		}
	} else if err := g.takeSlot(ctx, until); err != nil {
		return g, err
	}
	within, cancel := by(ctx, until)
	defer cancel()
	if err := share.Take(within, cost); err != nil {
		return g, outOfTime(ctx)
	}
	g.cost = cost
	return g, nil
}

// outOfTime returns the error of a wait that failed: the client has gone, or the deadline has passed.
func outOfTime(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return errPickTimeout
}

// takeSlot waits for a slot. Errors: as begin.
func (g *reading) takeSlot(ctx context.Context, until time.Time) error {
	slot := g.router.slots.of(g.size)
	select {
	case slot <- struct{}{}:
		g.slot = slot
		return nil
	default:
	}
	within, cancel := by(ctx, until)
	defer cancel()
	select {
	case slot <- struct{}{}:
		g.slot = slot
		return nil
	case <-within.Done():
		return outOfTime(ctx)
	}
}

// leaveSlot releases the slot before work that needs no processor.
func (g *reading) leaveSlot() {
	if !g.late && g.slot != nil {
		<-g.slot
		g.slot = nil
	}
}

// end releases what is held, unless abandoned work still needs it.
func (g *reading) end() {
	if !g.late {
		g.release()
	}
}

func (g *reading) release() {
	if g.slot != nil {
		<-g.slot
		g.slot = nil
	}
	if g.cost > 0 {
		g.router.cfg.Memory.ReadShare(g.size).Give(g.cost)
		g.cost = 0
	}
}

// within does a part of the work on a body in a goroutine of its own, and waits for it until a time; zero: no deadline.
// Work that is late goes on until it sees that its context has ended. Until then it keeps its slot and its memory, the
// body's included. Its outcome is dropped.
//
// Errors: the work's; errPickTimeout; errPanic; ctx's own.
func within[T any](ctx context.Context, until time.Time, g *reading, work func(context.Context) (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	var done atomic.Bool           // set by the first of two: the work is done, or it was abandoned
	ended := make(chan outcome, 1) // buffered: the work does not wait for a reader
	limited, cancel := by(ctx, until)
	defer cancel()
	held := *g
	go func() {
		var o outcome
		defer func() {
			if c := recover(); c != nil {
				held.router.panics.Log(
					held.router.log,
					slog.LevelError,
					"panic while reading a request; it is routed by load",
					"panic",
					c,
					"stack",
					string(debug.Stack()),
				)
				o = outcome{err: errPanic}
			}
			if done.CompareAndSwap(false, true) {
				ended <- o
				return
			}
			held.cost += held.size
			held.release()
		}()
		o.value, o.err = work(limited)
	}()
	var o outcome
	select {
	case o = <-ended:
	case <-limited.Done():
		share := g.router.cfg.Memory.ReadShare(g.size)
		share.Add(g.size) // the body's, because its request releases it
		if done.CompareAndSwap(false, true) {
			g.late = true
			return o.value, outOfTime(ctx)
		}
		share.Give(g.size)
		o = <-ended
	}
	if o.err != nil && limited.Err() != nil {
		o.err = outOfTime(ctx) // its context made it end
	}
	return o.value, o.err
}

// parse reads a body's JSON. Errors: body's, within's.
func (g *reading) parse(
	ctx context.Context,
	until time.Time,
	how body.Parser,
	req *Request,
) (*body.Request, error) {
	if until.IsZero() || g.size <= quickBytes {
		return how.Parse(req.Path, req.Body)
	}
	path, payload := req.Path, req.Body
	return within(ctx, until, g, func(context.Context) (*body.Request, error) { return how.Parse(path, payload) })
}

// tokenize returns the prompts of a body. A client's own template may take long even for a small body. Errors: the
// tokenizer's, within's.
func (g *reading) tokenize(
	ctx context.Context,
	until time.Time,
	model *prompt.Model,
	payload *body.Request,
) ([]prompt.Prompt, error) {
	if until.IsZero() || g.size <= quickBytes && payload.ChatTemplate == "" {
		return model.Tokenize(ctx, payload)
	}
	if g.slot == nil {
		if err := g.takeSlot(ctx, until); err != nil {
			return nil, err
		}
	}
	return within(
		ctx,
		until,
		g,
		func(ctx context.Context) ([]prompt.Prompt, error) { return model.Tokenize(ctx, payload) },
	)
}

// by returns ctx with a deadline; zero: ctx itself.
func by(ctx context.Context, until time.Time) (context.Context, context.CancelFunc) {
	if until.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, until)
}
