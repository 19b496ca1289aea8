package api

import (
	"errors"
	"io"
	"net/http"
	"runtime"
	"sync/atomic"
	"time"
)

// Bounds on the memory of all requests' bodies together. Bodies up to freeBodyBytes do not count, so that large bodies
// do not keep out small ones.
const (
	freeBodyBytes    = 64 << 10         // bytes
	maxHeldBodyBytes = 64 << 20         // bytes of all larger bodies that are received or wait to be decoded
	decodeWithin     = 10 * time.Second // to wait for a turn
	initialBodyBytes = 4 << 10          // bytes
)

var (
	heldBodyBytes atomic.Int64
	// decodeSlots holds a token for each larger body that is being decoded. Decoding may take 15 times the body's
	// bytes.
	decodeSlots = make(chan struct{}, max(2, runtime.GOMAXPROCS(0)/2))
)

var errBodies = Refuse(
	http.StatusServiceUnavailable,
	"the bodies of other requests take all the memory that there is for them; try again",
)

// WithBody calls use with the body of a request, at most MaxBody bytes, within the bounds above. Errors: use's; a
// *Refusal for a body that is too long, ends early, or finds no memory.
func WithBody(w http.ResponseWriter, req *http.Request, use func(body []byte) error) error {
	from := http.MaxBytesReader(w, req.Body, MaxBody)
	body := make([]byte, 0, initialBodyBytes)
	held := int64(0)
	defer func() { heldBodyBytes.Add(-held) }()
	for {
		if len(body) == cap(body) {
			more := cap(body) // twice as many
			if cap(body)+more > freeBodyBytes {
				held += int64(more)
				if heldBodyBytes.Add(int64(more)) > maxHeldBodyBytes {
					return errBodies
				}
			}
			body = append(make([]byte, 0, cap(body)+more), body...)
		}
		n, err := from.Read(body[len(body):cap(body)])
		body = body[:len(body)+n]
		if err == io.EOF {
			break
		}
		if tooLong := (*http.MaxBytesError)(nil); errors.As(err, &tooLong) {
			return Refuse(http.StatusRequestEntityTooLarge, "the body is longer than %d bytes", MaxBody)
		} else if err != nil {
			return Refuse(http.StatusBadRequest, "the body ends early: %v", err)
		}
	}
	if len(body) > freeBodyBytes {
		turn := time.NewTimer(decodeWithin)
		defer turn.Stop()
		select {
		case decodeSlots <- struct{}{}:
			defer func() { <-decodeSlots }()
		case <-turn.C:
			return errBodies
		case <-req.Context().Done():
			return errBodies
		}
	}
	return use(body)
}
