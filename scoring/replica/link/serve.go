package link

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"kvepp/scoring/replica"
)

// windowBytes is how much a stream may send before the other end has read it. Peers that read a log send only a hello
// and acks, within smallWindow.
const windowBytes, smallWindow = 1 << 20, 64 << 10

func (n *Node) newServer(options []grpc.ServerOption) *grpc.Server {
	n.sending.Lock()
	defer n.sending.Unlock()
	n.server = grpc.NewServer(append(options,
		grpc.Creds(n.config.Security.credentials()),
		grpc.ForceServerCodecV2(codec{}),
		grpc.MaxRecvMsgSize(4<<10), // a hello and acks
		grpc.MaxConcurrentStreams(4),
		grpc.InitialWindowSize(smallWindow), grpc.InitialConnWindowSize(smallWindow),
	)...)
	n.server.RegisterService(&grpc.ServiceDesc{ServiceName: service, HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{
			{StreamName: "Watch", ServerStreams: true, ClientStreams: true,
				Handler: func(_ any, s grpc.ServerStream) error { return n.serveLog(s) }},
			{StreamName: "Index", ServerStreams: true, ClientStreams: true,
				Handler: func(_ any, s grpc.ServerStream) error { return n.serveIndex(s) }},
		}}, n)
	return n.server
}

// originText writes an origin for people.
func originText(origin uint64) string { return strconv.FormatUint(origin, 16) }

// admit receives the first message of a stream, and refuses it or returns it with this process's proof.
func (n *Node) admit(s grpc.ServerStream) (hello replica.Hello, proof []byte, why replica.Reason, err error) {
	var first frame
	received := make(chan error, 1)
	go func() { received <- s.RecvMsg(&first) }()
	select {
	case err = <-received:
	case <-time.After(handshakeIn):
		err = errors.New("the peer said nothing")
	}
	if err != nil {
		return hello, nil, "", err
	}
	n.sending.Lock()
	hello, why = n.sender.Admit(first.data)
	n.sending.Unlock()
	security := &n.config.Security
	if why == "" || why == replica.OtherGroup || why == replica.SameOrigin {
		if !security.proves(s.Context(), receiverProof, hello.Proof) {
			why = replica.BadToken
		}
	}
	if why == "" {
		proof, err = security.proof(s.Context(), senderProof)
	}
	return hello, proof, why, err
}

// refuse tells a peer why it is refused.
func (n *Node) refuse(s grpc.ServerStream, why replica.Reason) error {
	host, _, _ := net.SplitHostPort(addressOf(s.Context()))
	n.sending.Lock()
	n.refused[why]++
	known := n.said[host+string(why)] || len(n.said) >= maxSaid
	if !known {
		n.said[host+string(why)] = true
	}
	n.sending.Unlock()
	if why != replica.Self && !known {
		n.warn("a peer that wants to read this replica's log is refused", "peer", addressOf(s.Context()), "reason", why,
			"fix", adviceOf(why))
	}
	if err := s.SendMsg(&frame{replica.Refusal(why)}); err != nil {
		return err
	}
	return status.Error(codes.PermissionDenied, string(why))
}

// maxSaid bounds the refused hosts that are remembered, so that each is logged once.
const maxSaid = 1024

// warn logs what peers can cause.
func (n *Node) warn(text string, about ...any) {
	if held, ok := n.lines.Allow(); ok {
		if held > 0 {
			about = append(about, "suppressed_lines", held)
		}
		n.config.Log.Warn(text, about...)
	}
}

func addressOf(ctx context.Context) string {
	if p, ok := peer.FromContext(ctx); ok {
		return p.Addr.String()
	}
	return ""
}

// serveLog sends this process's log to a peer.
func (n *Node) serveLog(s grpc.ServerStream) error {
	hello, proof, why, err := n.admit(s)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(s.Context())
	defer cancel(nil)
	r := &reader{wake: make(chan struct{}, 1), cancel: cancel}
	r.acked.Store(int64(n.Now()))
	var welcome []byte
	if why == "" {
		defer n.inUse(s.Context())()
		n.sending.Lock()
		n.replaceReader(hello.Self)
		if len(n.readers) >= maxReaders {
			why = replica.TooMany
		} else {
			r.cursor, welcome = n.sender.Open(&hello, proof, n.config.Snapshot)
			n.readers[r] = true
			if r.cursor.Reason != "" {
				n.served[r.cursor.Reason]++
			}
		}
		n.sending.Unlock()
	}
	if why != "" {
		return n.refuse(s, why)
	}
	defer func() {
		n.sending.Lock()
		if n.readers[r] {
			delete(n.readers, r)
			n.sent += r.cursor.Bytes
		}
		n.sending.Unlock()
	}()
	go n.sendLog(s, r, ctx, welcome)
	go n.receiveAcks(s, r)
	<-ctx.Done()
	cause := context.Cause(ctx)
	if errors.Is(cause, errStalled) || errors.Is(cause, errSilent) || errors.Is(cause, replica.ErrBehind) {
		n.sending.Lock()
		n.refused[replica.Stalled]++
		n.sending.Unlock()
		n.warn("a peer reads this replica's log too slowly; it is disconnected and takes a snapshot", "replica",
			originText(hello.Self.Origin), "peer", addressOf(s.Context()), "error", cause)
	}
	if errors.Is(cause, errGoodbye) {
		return nil
	}
	return status.Error(codes.Unavailable, fmt.Sprint(cause))
}

// inUse marks the connection of an admitted peer as in use, until end is called.
func (n *Node) inUse(ctx context.Context) (end func()) {
	if n.config.InUse == nil {
		return func() {}
	}
	return n.config.InUse(ctx)
}

// replaceReader makes room for one more stream of a peer: it must not keep others out. The caller holds n.sending.
func (n *Node) replaceReader(peer replica.Identity) {
	var oldest *reader
	own := 0
	for r := range n.readers {
		if r.cursor.Peer() != peer {
			continue
		}
		if own++; oldest == nil || r.acked.Load() < oldest.acked.Load() {
			oldest = r
		}
	}
	if own >= maxOfPeer {
		oldest.cancel(errAgain)
		delete(n.readers, oldest)
		n.sent += oldest.cursor.Bytes
	}
}

var errGoodbye = errors.New("goodbye")

// sendLog sends messages until the stream ends.
func (n *Node) sendLog(s grpc.ServerStream, r *reader, ctx context.Context, welcome []byte) {
	send := func(data []byte) bool {
		r.since.Store(int64(n.Now()))
		err := s.SendMsg(&frame{data})
		r.since.Store(0)
		if err != nil {
			r.cancel(err)
		}
		return err == nil
	}
	if !send(welcome) {
		return
	}
	heartbeat := time.NewTicker(replica.HeartbeatEvery)
	defer heartbeat.Stop()
	var data []byte
	for beat := true; ; {
		n.sending.Lock()
		closing := n.closing
		var err error
		data = data[:0]
		pending := r.cursor.Pending()
		if pending || beat {
			data, err = r.cursor.Next(n.Now(), data)
		}
		n.sending.Unlock()
		if err != nil {
			r.cancel(err)
			return
		}
		if len(data) > 0 && !send(data) {
			return
		}
		if beat = false; pending {
			continue
		}
		if closing {
			if send(replica.Goodbye()) {
				r.cancel(errGoodbye)
			}
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-r.wake:
		case <-heartbeat.C:
			beat = true
		}
	}
}

// receiveAcks receives a peer's later messages.
func (n *Node) receiveAcks(s grpc.ServerStream, r *reader) {
	var f frame
	for {
		err := s.RecvMsg(&f)
		if err == nil {
			n.sending.Lock()
			err = r.cursor.Received(n.Now(), f.data, n.flush)
			n.sending.Unlock()
		}
		if err != nil {
			r.cancel(err)
			return
		}
		r.acked.Store(int64(n.Now()))
	}
}

// serveIndex sends this process's index to a peer.
func (n *Node) serveIndex(s grpc.ServerStream) error {
	_, proof, why, err := n.admit(s)
	switch {
	case err != nil:
		return err
	case why != "":
		return n.refuse(s, why)
	case n.config.Dump == nil:
		return status.Error(codes.Unimplemented, "this replica keeps no index")
	}
	defer n.inUse(s.Context())()
	if err := s.SendMsg(&frame{proof}); err != nil {
		return err
	}
	// A peer that does not read must not keep the index from others: when this returns, sends fail.
	ctx, cancel := context.WithTimeout(s.Context(), dumpWithin)
	defer cancel()
	stalled := time.AfterFunc(ackWithin, cancel)
	defer stalled.Stop()
	w := &chunks{send: func(b []byte) error {
		defer stalled.Reset(ackWithin)
		return s.SendMsg(&frame{b})
	}}
	dumped := make(chan error, 1)
	go func() {
		err := n.config.Dump(ctx, w)
		if err == nil {
			err = w.flush()
		}
		dumped <- err
	}()
	select {
	case err = <-dumped:
	case <-ctx.Done():
		return status.Error(codes.Unavailable, "the peer reads the index too slowly")
	}
	if errors.Is(err, ErrBusy) {
		return status.Error(codes.ResourceExhausted, err.Error())
	}
	return err
}

// chunkBytes is the size of a message with a part of an index.
const chunkBytes = 64 << 10

// chunks is a writer that sends messages of chunkBytes.
type chunks struct {
	send func([]byte) error
	held []byte
}

func (c *chunks) Write(p []byte) (int, error) {
	c.held = append(c.held, p...)
	for len(c.held) >= chunkBytes {
		if err := c.send(c.held[:chunkBytes]); err != nil {
			return 0, err
		}
		c.held = c.held[:copy(c.held, c.held[chunkBytes:])]
	}
	return len(p), nil
}

func (c *chunks) flush() error {
	if len(c.held) == 0 {
		return nil
	}
	return c.send(c.held)
}
