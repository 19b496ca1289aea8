package router

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"time"

	"kvepp/internal/apibody"
	"kvepp/internal/budget"
	"kvepp/tokenizer"
)

var (
	// errPickTimeout says that a prompt was not read and tokenized in time.
	errPickTimeout = errors.New("router: the prompt's token ids were not known within --pick-timeout")
	// errPanic says that a defect was met, which is logged.
	errPanic = errors.New("router: a defect, see the stack in the log")
)

// quickBytes is the size up to which a body is read at once: the slowest takes less than any deadline is worth.
const quickBytes = 16 << 10

// slots bound how many bodies above quickBytes are read at once, and so what those that nobody waits for any more can
// hold. Channels of as many places; who waits comes in turn.
type slots struct {
	// all has a few places for each processor, so that one body that lasts does not hold up the others.
	all chan struct{}
	// large has one place for every two processors, so that large bodies leave half of them to others. A large body
	// takes no place in all.
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

// reading is what one request holds while its body is read: a slot, and memory of the budget. Its methods are for the
// request's own goroutine, but for release.
type reading struct {
	router *Router
	size   int           // of the body, in bytes
	slot   chan struct{} // held; nil: none
	cost   int           // bytes held of the budget's share for such bodies; 0: none
	late   bool          // work that nobody waits for any more holds all of it, and releases it
}

// begin waits for memory to read a body of size bytes, and for a slot if it is not a quick one, until a time; zero:
// however long. The reading is to be ended, whatever the error.
//
// Errors: errPickTimeout; ctx's own.
func (r *Router) begin(ctx context.Context, until time.Time, size int) (reading, error) {
	g := reading{router: r, size: size}
	share, cost := r.cfg.Memory.ReadShare(size), apibody.ReadCost(size)
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

// outOfTime is the error of a request that waited in vain: its client has gone, or its time is over.
func outOfTime(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return errPickTimeout
}

// takeSlot waits for a slot. Errors as begin's.
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

// leaveSlot gives the slot to the next: what follows takes no processor.
func (g *reading) leaveSlot() {
	if !g.late && g.slot != nil {
		<-g.slot
		g.slot = nil
	}
}

// end gives back what is held, unless work goes on that still needs it.
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

// within does a part of the work on a body, unless that takes until a time; zero: however long. Work that is not done
// by then goes on by itself until it sees that the context it is given is over. It keeps its slot and its memory, the
// body's among it, for as long; its outcome is dropped.
//
// Errors: the work's; errPickTimeout; errPanic; ctx's own.
func within[T any](ctx context.Context, until time.Time, g *reading, work func(context.Context) (T, error)) (T, error) {
	type outcome struct {
		value T
		err   error
	}
	var done atomic.Bool           // by whoever comes first: the work is done, or nobody waits for it any more
	ended := make(chan outcome, 1) // so that nobody has to wait for it
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
		share.Add(g.size) // the body's, which its request gives back
		if done.CompareAndSwap(false, true) {
			g.late = true
			return o.value, outOfTime(ctx)
		}
		share.Give(g.size)
		o = <-ended
	}
	if o.err != nil && limited.Err() != nil {
		o.err = outOfTime(ctx) // it was told to end
	}
	return o.value, o.err
}

// parse reads a body's JSON. Errors: apibody's; within's.
func (g *reading) parse(
	ctx context.Context,
	until time.Time,
	parse func(string, []byte) (*apibody.Request, error),
	req *Request,
) (*apibody.Request, error) {
	if until.IsZero() || g.size <= quickBytes {
		return parse(req.Path, req.Body)
	}
	path, body := req.Path, req.Body
	return within(ctx, until, g, func(context.Context) (*apibody.Request, error) { return parse(path, body) })
}

// tokenize returns the prompts of a body. A template of the client's own may take long, whatever the body's size.
// Errors: the tokenizer's; within's.
func (g *reading) tokenize(
	ctx context.Context,
	until time.Time,
	model *tokenizer.Model,
	body *apibody.Request,
) ([]tokenizer.Prompt, error) {
	if until.IsZero() || g.size <= quickBytes && body.ChatTemplate == "" {
		return model.Tokenize(ctx, body)
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
		func(ctx context.Context) ([]tokenizer.Prompt, error) { return model.Tokenize(ctx, body) },
	)
}

// by returns ctx with a deadline, which is not the request's own end.
func by(ctx context.Context, until time.Time) (context.Context, context.CancelFunc) {
	if until.IsZero() {
		return ctx, func() {}
	}
	return context.WithDeadline(ctx, until)
}
