package process

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// The ports that are given lie below those that the system takes for outgoing connections. They are cut into blocks,
// and a test process keeps to one of its own: whoever listens at a block's first port has it, so that the block is free
// again when that process ends, however that happens.
const (
	firstPort, lastPort = 20000, 32000
	portBlock           = 400
)

var ports struct {
	sync.Mutex
	owned net.Listener // at the first port of this process's block; nil before the first call
	first int          // of the block
	next  int          // of the ports of the block, the one to try next
}

// Ports returns n consecutive TCP ports, fewer than 400, that are free on loopback now. They are given in turns, never
// again before the others: a program that has not bound its port yet, or is being restarted, finds it free.
func Ports(n int) (int, error) {
	if n < 1 || n >= portBlock {
		return 0, fmt.Errorf("%d ports of a block of %d", n, portBlock)
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

// ownBlock takes the first block that no other process has, beginning at a random one.
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

// firstBusy is how many ports from base are free before one that is not; -1 when all n are free.
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
