package link

import (
	"fmt"

	"google.golang.org/grpc/mem"
)

// frame is a message as bytes. Its memory is reused: it is valid until the next message is received into it.
type frame struct{ data []byte }

// codec passes bytes on. Package replica encodes them.
type codec struct{}

func (codec) Name() string { return "kvepp" }

func (codec) Marshal(v any) (mem.BufferSlice, error) {
	f, ok := v.(*frame)
	if !ok {
		return nil, fmt.Errorf("link: cannot send %T", v)
	}
	// A copy, because gRPC writes after SendMsg has returned.
	b := mem.DefaultBufferPool().Get(len(f.data))
	copy(*b, f.data)
	return mem.BufferSlice{mem.NewBuffer(b, mem.DefaultBufferPool())}, nil
}

func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	f, ok := v.(*frame)
	if !ok {
		return fmt.Errorf("link: cannot receive %T", v)
	}
	n := data.Len()
	if cap(f.data) < n || cap(f.data) > keptBytes && n < keptBytes {
		f.data = make([]byte, n)
	}
	f.data = f.data[:n]
	data.CopyTo(f.data)
	return nil
}

// keptBytes is the most memory that is kept for a next message which needs less.
const keptBytes = 512 << 10
