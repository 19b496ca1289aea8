package link

import (
	"context"
	"math/rand/v2"

	"google.golang.org/grpc"

	"kvepp/scoring/replica"
)

// Answer is what a process says to one that asks whether it would share.
type Answer struct {
	Name    string // for people
	Origin  uint64
	Version uint64 // of the protocol
	// Refused is why it shares nothing; empty: it would share.
	Refused replica.Reason
}

// Fix says what to change for a refusal; empty if nothing is known to help.
func (a *Answer) Fix() string { return adviceOf(a.Refused) }

// Probe asks the process at an address, HOST:PORT, whether it would share with a replica of a group that has this
// security. It reads no bookings. The error says why there is no answer: no connection, no TLS, another certificate.
func Probe(ctx context.Context, security *Security, group, at string) (Answer, error) {
	conn, err := dial(security, at)
	if err != nil {
		return Answer{}, err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, watchMethod)
	if err != nil {
		return Answer{}, err
	}
	proof, err := security.proof(s.Context(), receiverProof)
	if err != nil {
		return Answer{}, err
	}
	hello := replica.Hello{Lowest: replica.MinVersion, Highest: replica.Version,
		Self: replica.Identity{Origin: rand.Uint64() | 1, Epoch: 1}, Group: group, Proof: proof}
	if err := s.SendMsg(&frame{hello.Append(nil)}); err != nil {
		return Answer{}, err
	}
	var f frame
	if err := s.RecvMsg(&f); err != nil {
		return Answer{}, err
	}
	if !replica.IsWelcome(f.data) {
		why, err := replica.ParseRefusal(f.data)
		return Answer{Refused: why}, err
	}
	w, err := replica.ParseWelcome(f.data)
	a := Answer{Name: w.Name, Origin: w.Self.Origin, Version: w.Version}
	if err == nil && !security.proves(s.Context(), senderProof, w.Proof) {
		a.Refused = replica.BadToken
	}
	return a, err
}
