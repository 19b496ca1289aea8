package stack

import (
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// StartBroker starts a broker that passes messages on from any publisher, at xsub, to any subscriber, at xpub, as those
// of Dynamo's event plane do, until stop is called.
func StartBroker() (xsub, xpub string, stop func(), err error) {
	var sockets [2]*zmq.Socket
	var addresses [2]string
	for i, kind := range []zmq.Type{zmq.XSUB, zmq.XPUB} {
		socket, err := zmq.NewSocket(kind)
		if err != nil {
			return "", "", nil, err
		}
		socket.SetLinger(0)
		if err := socket.Bind("tcp://127.0.0.1:*"); err != nil {
			return "", "", nil, err
		}
		if addresses[i], err = socket.GetLastEndpoint(); err != nil {
			return "", "", nil, err
		}
		sockets[i] = socket
	}
	ending, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		defer sockets[0].Close()
		defer sockets[1].Close()
		poller := zmq.NewPoller()
		poller.Add(sockets[0], zmq.POLLIN)
		poller.Add(sockets[1], zmq.POLLIN)
		for {
			select {
			case <-ending:
				return
			default:
			}
			ready, err := poller.Poll(50 * time.Millisecond)
			if err != nil {
				continue
			}
			for _, from := range ready {
				to := sockets[0]
				if from.Socket == to {
					to = sockets[1]
				}
				if frames, err := from.Socket.RecvMessageBytes(0); err == nil {
					to.SendMessage(frames)
				}
			}
		}
	}()
	return addresses[0], addresses[1], sync.OnceFunc(func() { close(ending); <-ended }), nil
}
