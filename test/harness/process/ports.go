package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// The ports lie below the range that the system uses for outgoing connections. They are split into blocks, and a test
// process uses one block. A process owns a block by listening at its first port, so the block becomes free when the
// process ends in any way.
const (
	firstPort, lastPort = 20000, 32000
	portBlock           = 400
)

var ports struct {
	sync.Mutex
	owned net.Listener // listener at the first port of the block; nil before the first call
	first int          // of the block
	next  int          // index in the block of the port to try next
}

// Ports returns n consecutive TCP ports, fewer than 400, that are free on loopback now. It returns each port of the
// block once before it repeats one: a program that has not bound its port yet, or restarts, finds it free.
func Ports(n int) (int, error) {
	if n < 1 || n >= portBlock {
		return 0, fmt.Errorf("%d ports requested of a block of %d", n, portBlock)
	}
	ports.Lock()
	defer ports.Unlock()
	if ports.owned == nil {
		if err := ownBlock(); err != nil {
			return 0, err
		}
	}
	for range 2 * portBlock {
		if ports.next+n > portBlock {
			ports.next = 1
		}
		base := ports.first + ports.next
		busy := firstBusy(base, n)
		if busy < 0 {
			ports.next += n
			return base, nil
		}
		ports.next += busy + 1
	}
	return 0, fmt.Errorf("no %d consecutive free ports from %d to %d", n, ports.first, ports.first+portBlock-1)
}

// ownBlock takes the first block without an owner, beginning at a random one.
func ownBlock() error {
	const blocks = (lastPort - firstPort) / portBlock
	start := rand.IntN(blocks)
	for i := range blocks {
		first := firstPort + (start+i)%blocks*portBlock
		if l, err := listen(first); err == nil {
			ports.owned, ports.first, ports.next = l, first, 1
			return nil
		}
	}
	return errors.New("every block of ports belongs to another test process")
}

// firstBusy returns how many ports from base on are free before the first busy one; -1 if all n are free.
func firstBusy(base, n int) int {
	held := make([]net.Listener, 0, n)
	defer func() {
		for _, l := range held {
			l.Close()
		}
	}()
	for i := range n {
		l, err := listen(base + i)
		if err != nil {
			return i
		}
		held = append(held, l)
	}
	return -1
}

func listen(port int) (net.Listener, error) {
	return net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
}
