package replica

import (
	"testing"
	"time"

	"kvepp/kvblock"
)

// join has a receiver read the log of a peer, which is at the address of its number.
func join(t *testing.T, r *Receiver, s *Sender, stream Stream) *Cursor {
	t.Helper()
	at := string(rune('a' + stream))
	hello, why := s.Admit(r.Step(Input{Kind: Opened, Stream: stream, Address: at})[0].Message)
	if why != "" {
		t.Fatal(why)
	}
	c, welcome := s.Open(&hello, nil, nil)
	r.Step(Input{Kind: Received, Stream: stream, Message: welcome})
	read(t, r, c, stream)
	return c
}

// read has a receiver read the rest of a log.
func read(t *testing.T, r *Receiver, c *Cursor, stream Stream) {
	t.Helper()
	for c.Pending() {
		message, err := c.Next(0, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range r.Step(Input{Kind: Received, Stream: stream, Message: message}) {
			if e.Kind == Close {
				t.Fatalf("closed: %s, %v", e.Reason, e.Err)
			}
		}
	}
}

// ones returns n chains of one hash.
func ones(n int) (chains [][]kvblock.SequenceHash) {
	for i := range n {
		chains = append(chains, sequences(100*i, 1))
	}
	return chains
}

// Chains of one hash count by the memory that they take, and what one peer books leaves the others their part.
func TestPeersAreBoundedInBytes(t *testing.T) {
	r := NewReceiver(ReceiverConfig{Self: Identity{1, 1}, Group: "pool", Known: all, MaxBytes: 1 << 20,
		MaxBookings: 100})
	greedy, other := NewSender(Identity{2, 1}, "pool", "greedy"), NewSender(Identity{3, 1}, "pool", "other")
	a, b := join(t, r, greedy, 1), join(t, r, other, 2)
	for n := range uint64(1000) {
		greedy.Append(0, &Entry{Kind: Booked, Number: n + 1, Worker: Worker{Name: "a"}, BlockSize: 16,
			Chains: ones(100)})
	}
	read(t, r, a, 1)
	bookings, blocks, _ := r.Held()
	if bookings != 50 || blocks < 1000 || 8*blocks > 1<<20/10 {
		t.Errorf("the greedy peer has %d bookings and %d blocks", bookings, blocks)
	}
	other.Append(0, &Entry{Kind: Booked, Number: 1, Worker: Worker{Name: "a"}, BlockSize: 16, Chains: ones(100)})
	read(t, r, b, 2)
	if n, more, _ := r.Held(); n != bookings+1 || more != blocks+100 {
		t.Errorf("the other peer has %d bookings and %d blocks, want 1 and 100", n-bookings, more-blocks)
	}
	r.Step(Input{Kind: Tick, Now: time.Minute})
	if n, more, parked := r.Held(); n+more+parked != 0 {
		t.Errorf("dead peers leave %d bookings, %d blocks, %d parked", n, more, parked)
	}
}

// What waits for a worker that is not known counts in the same bound, and leaves nothing once it has ended.
func TestParkedBookingsAreBoundedInBytes(t *testing.T) {
	known := false
	r := NewReceiver(ReceiverConfig{Self: Identity{1, 1}, Group: "pool", MaxBytes: 1 << 20,
		Known: func(Worker) bool { return known }})
	s := NewSender(Identity{2, 1}, "pool", "peer")
	c := join(t, r, s, 1)
	worker := Worker{Name: "a"}
	for n := range uint64(40) {
		s.Append(0, &Entry{Kind: Booked, Number: n + 1, Worker: worker, BlockSize: 16,
			Chains: [][]kvblock.SequenceHash{sequences(int(n), 10_000)}})
	}
	read(t, r, c, 1)
	if _, blocks, parked := r.Held(); parked != 40 || blocks < 100_000 || 8*blocks > 1<<20 {
		t.Errorf("%d parked with %d hashes", parked, blocks)
	}
	known = true
	r.Step(Input{Kind: WorkerJoined, Worker: worker})
	if bookings, blocks, parked := r.Held(); bookings != 40 || parked != 0 || 8*blocks > 1<<20 {
		t.Errorf("%d bookings with %d hashes, %d parked", bookings, blocks, parked)
	}
	known = false
	s.Append(0, &Entry{Kind: Booked, Number: 100, Worker: Worker{Name: "b"}, BlockSize: 16})
	for n := range uint64(10_000) {
		s.Append(0, &Entry{Kind: Booked, Number: 101 + n, Worker: Worker{Name: "b"}, BlockSize: 16, Chains: ones(1)})
		s.Append(0, &Entry{Kind: Freed, Number: 101 + n})
		read(t, r, c, 1)
	}
	if len(r.waiting) > 10 {
		t.Errorf("%d parked bookings are remembered, and all but one have ended", len(r.waiting))
	}
}
