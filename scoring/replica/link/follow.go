package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"kvepp/internal/useragent"
	"kvepp/scoring/replica"
)

// dial returns a connection to an address, which is not connected yet.
func (n *Node) dial(at string) (*grpc.ClientConn, error) { return dial(&n.config.Security, at) }

func dial(security *Security, at string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+at,
		grpc.WithTransportCredentials(security.credentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec{}), grpc.MaxCallRecvMsgSize(replica.MaxMessage+64<<10)),
		grpc.WithInitialWindowSize(windowBytes), grpc.WithInitialConnWindowSize(windowBytes),
		grpc.WithDisableRetry(), grpc.WithNoProxy(), grpc.WithUserAgent(useragent.Text()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: handshakeIn, Backoff: backoff.Config{
			BaseDelay: firstRetry, Multiplier: 1.6, Jitter: 0.2, MaxDelay: lastRetry}}),
	)
}

// follow reads the log at an address until ctx ends or the address is no peer's any more.
func (n *Node) follow(ctx context.Context, at string, a *address) {
	conn, err := n.dial(at)
	if err != nil {
		n.config.Log.Error("the address of a peer is invalid", "address", at, "error", err)
		n.answer(at)
		return
	}
	defer conn.Close()
	for wait := firstRetry; ; {
		begin := time.Now()
		why, err := n.read(ctx, conn, at, a)
		if ctx.Err() != nil || a.gone.Load() {
			return
		}
		a.self.Store(why == replica.Self)
		switch {
		case why.Lasts():
			if a.why != why && why != replica.Self && why != replica.Duplicate {
				n.config.Log.Warn("this replica and a peer share nothing", "address", at, "reason", why, "fix",
					adviceOf(why))
			}
			a.why = why
			n.answer(at)
			wait = refusedRetry
		case time.Since(begin) > 2*lastRetry:
			wait = firstRetry
		default:
			if why == "" {
				n.failed.Add(1)
			}
			if why == "" && !a.failed && !a.gone.Load() {
				a.failed = true
				n.config.Log.Warn("a peer cannot be reached; this replica tries again every second", "address", at,
					"error", err)
			}
			wait = min(2*wait, lastRetry)
		}
		t := time.NewTimer(wait/2 + rand.N(wait/2))
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
	}
}

// answer notes that an address has sent its snapshot, or is no peer's.
func (n *Node) answer(at string) {
	n.receiving.Lock()
	n.answered[at] = true
	n.receiving.Unlock()
}

// read reads a log on one stream until it ends. It returns the reason if this process closed it or the peer refused it.
func (n *Node) read(ctx context.Context, conn *grpc.ClientConn, at string, a *address) (replica.Reason, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first, stopTimer := context.WithCancel(ctx)
	timer := time.AfterFunc(handshakeIn, stopTimer) // for the connection
	s, err := conn.NewStream(first, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, watchMethod,
		grpc.WaitForReady(false))
	timer.Stop()
	defer stopTimer()
	if err != nil {
		return "", err
	}
	security := &n.config.Security
	proof, err := security.proof(s.Context(), receiverProof)
	if err != nil {
		return "", err
	}
	var f frame
	reading := &reading{cancel: cancel, send: func(b []byte) error { return s.SendMsg(&frame{b}) }}
	n.receiving.Lock()
	n.next++
	id := n.next
	n.streams[id] = reading
	n.stepLocked(replica.Input{Kind: replica.Opened, Now: n.Now(), Stream: id, Address: at, Proof: proof})
	n.receiving.Unlock()
	defer func() {
		n.receiving.Lock()
		defer n.receiving.Unlock()
		n.stepLocked(replica.Input{Kind: replica.Closed, Now: n.Now(), Stream: id})
		delete(n.streams, id)
	}()
	welcomed, ready := false, false
	for {
		if err := s.RecvMsg(&f); err != nil {
			n.receiving.Lock()
			defer n.receiving.Unlock()
			return reading.why, err
		}
		if !welcomed && replica.IsWelcome(f.data) {
			if welcomed = true; !security.proves(s.Context(), senderProof, replica.WelcomeProof(f.data)) {
				n.receiving.Lock()
				n.closed[replica.BadToken]++
				n.receiving.Unlock()
				return replica.BadToken, nil
			}
		}
		n.receiving.Lock()
		n.stepLocked(replica.Input{Kind: replica.Received, Now: n.Now(), Stream: id, Message: f.data})
		why := reading.why
		if !ready && why == "" && welcomed {
			if peer, live := n.liveAt(at); live {
				ready = true
				n.answered[at] = true
				a.why, a.failed = "", false
				n.config.Log.Info("this replica has a peer's bookings", "address", at, "name", peer.Name, "replica",
					originText(peer.Origin), "bookings", peer.Bookings)
			}
		}
		n.receiving.Unlock()
		if why != "" {
			return why, nil
		}
	}
}

// liveAt returns the peer that is live at an address. The caller holds n.receiving.
func (n *Node) liveAt(at string) (replica.Peer, bool) {
	for _, p := range n.receiver.Peers() {
		if p.Address == at && p.State == replica.Live {
			return p, true
		}
	}
	return replica.Peer{}, false
}

// adviceOf says what to change for a reason.
func adviceOf(why replica.Reason) string {
	switch why {
	case replica.Malformed:
		return "is --replica-port of the peer at this address, and is it kvepp's?"
	case replica.OldVersion:
		return "the peer speaks another version of the protocol: run the same version of kvepp in all replicas"
	case replica.OtherGroup:
		return "the peer picks from another pool: give replicas of one pool alone as peers"
	case replica.SameOrigin:
		return "two processes have one identity: a peer was copied while it ran, or lies"
	case replica.BadToken:
		return "give all replicas the same --replica-token-file"
	case replica.TooMany:
		return "fewer replicas, or fewer addresses of each"
	}
	return ""
}

// OpenIndex asks the peer at an address for its index. ErrBusy: ask again later.
func (n *Node) OpenIndex(ctx context.Context, at string) (io.ReadCloser, error) {
	conn, err := n.dial(at)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	r := &indexReader{close: func() { cancel(); conn.Close() }}
	r.stream, err = conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true, ClientStreams: true}, indexMethod)
	if err != nil {
		r.close()
		return nil, err
	}
	security := &n.config.Security
	proof, err := security.proof(r.stream.Context(), receiverProof)
	if err == nil {
		hello := replica.Hello{Lowest: replica.MinVersion, Highest: replica.Version, Self: n.config.Self,
			Group: n.config.Group, Proof: proof}
		err = r.stream.SendMsg(&frame{hello.Append(nil)})
	}
	if err == nil {
		if err = r.receive(); err == nil && !security.proves(r.stream.Context(), senderProof, r.f.data) {
			err = fmt.Errorf("link: the peer refuses or has not the token: %s", adviceOf(replica.BadToken))
		}
	}
	if err == nil {
		if err = r.fill(); errors.Is(err, io.EOF) {
			err = nil
		}
	}
	if err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

// indexReader reads the messages with a peer's index.
type indexReader struct {
	stream grpc.ClientStream
	f      frame
	left   []byte
	err    error
	close  func()
}

// receive receives a message. A peer that sends none ends the reading, so that another one can be asked.
func (r *indexReader) receive() error {
	silent := time.AfterFunc(ackWithin, r.close)
	defer silent.Stop()
	return r.stream.RecvMsg(&r.f)
}

// fill receives the next message.
func (r *indexReader) fill() error {
	if r.err == nil {
		if r.err = r.receive(); status.Code(r.err) == codes.ResourceExhausted {
			r.err = ErrBusy
		}
		r.left = r.f.data
	}
	if r.err != nil {
		r.left = nil
	}
	return r.err
}

func (r *indexReader) Read(p []byte) (int, error) {
	for len(r.left) == 0 {
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	k := copy(p, r.left)
	r.left = r.left[k:]
	return k, nil
}

func (r *indexReader) Close() error {
	r.close()
	return nil
}
