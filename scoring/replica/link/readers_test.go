package link

import (
	"context"
	"io"
	"testing"

	"google.golang.org/grpc"

	"kvepp/scoring/replica"
)

// open opens a stream at a node's port and says hello.
func open(t *testing.T, conn *grpc.ClientConn, method string, self replica.Identity) grpc.ClientStream {
	t.Helper()
	s, err := conn.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, method)
	if err != nil {
		t.Fatal(err)
	}
	hello := replica.Hello{Lowest: replica.MinVersion, Highest: replica.Version, Self: self, Group: "pool"}
	if err := s.SendMsg(&frame{hello.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	return s
}

// A peer that opens ever more streams ends its own earlier ones, and takes no place of others.
func TestFurtherStreamsOfAPeer(t *testing.T) {
	a, b := startNode(t, Security{}, nil), startNode(t, Security{}, nil)
	b.SetPeers([]string{a.address})
	eventually(t, "b reads", func() bool { return len(a.Stats().Readers) == 1 })
	for range 3 * maxReaders / maxOfPeer {
		conn, err := b.dial(a.address)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		for range maxOfPeer {
			s := open(t, conn, watchMethod, replica.Identity{Origin: 99, Epoch: 1})
			var f frame
			if err := s.RecvMsg(&f); err != nil || !replica.IsWelcome(f.data) {
				t.Fatalf("%x, %v", f.data, err)
			}
		}
	}
	eventually(t, "few streams are left", func() bool { return len(a.Stats().Readers) <= 1+maxOfPeer })
	if s := a.Stats(); s.Refused[replica.TooMany] != 0 {
		t.Errorf("%+v", s.Refused)
	}
	a.book(1)
	eventually(t, "b is up to date", func() bool { return b.holds(a) == 1 })
}

// A peer that asks for the index and does not read it gives way to the next one.
func TestSlowReaderOfTheIndex(t *testing.T) {
	if testing.Short() {
		t.Skip("a reader may be silent for 10 s")
	}
	t.Parallel()
	busy := make(chan bool, 1)
	a := startNode(t, Security{}, func(c *Config) {
		c.Dump = func(_ context.Context, w io.Writer) error {
			select {
			case busy <- true:
				defer func() { <-busy }()
			default:
				return ErrBusy
			}
			for part := make([]byte, 1<<20); ; {
				if _, err := w.Write(part); err != nil {
					return err
				}
			}
		}
	})
	b := startNode(t, Security{}, nil)
	conn, err := b.dial(a.address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	open(t, conn, indexMethod, replica.Identity{Origin: 99, Epoch: 1})
	eventually(t, "the index is read", func() bool { return len(busy) == 1 })
	eventually(t, "another peer gets the index", func() bool {
		r, err := b.OpenIndex(t.Context(), a.address)
		if err != nil {
			return false
		}
		defer r.Close()
		_, err = io.ReadFull(r, make([]byte, 1<<20))
		return err == nil
	})
}
