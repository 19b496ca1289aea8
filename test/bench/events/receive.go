package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"runtime"
	"time"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/test/bench/cputime"
	"kvepp/zmqsub"
)

// took has the cost of receiving: CPU time in ns, per message and per block.
type took struct {
	Message float64 `json:"message_ns"`
	Block   float64 `json:"block_ns"`
}

// receive receives count messages from a publisher and returns the cost, including the connection:
//
//	zmqsub    package zmqsub, which also checks order and follows the connection
//	index     package feed, from the wire to the index
func receive(mode, endpoint, kind string, count int) (*took, error) {
	m, err := newMessages(kind, min(count, maxMessages))
	if err != nil {
		return nil, err
	}
	if mode == "index" && count > maxMessages {
		return nil, fmt.Errorf("%d messages, but the index takes each once, and there are %d", count, maxMessages)
	}
	runtime.GC()
	start := cputime.Process()
	switch mode {
	case "zmqsub":
		err = receiveZmqsub(endpoint, count)
	case "index":
		err = receiveIndex(endpoint, m)
	default:
		err = fmt.Errorf("unknown way to receive: %q", mode)
	}
	if err != nil {
		return nil, err
	}
	cpu := cputime.Process() - start
	each := cpu / float64(count)
	return &took{Message: each, Block: each * float64(len(m.payloads)) / float64(m.blocks)}, nil
}

func receiveZmqsub(endpoint string, count int) error {
	hub, err := zmqsub.NewHub()
	if err != nil {
		return err
	}
	c := &counter{until: count, done: make(chan error, 1)}
	if _, err := hub.Subscribe(zmqsub.Config{Endpoint: endpoint}, c); err != nil {
		return err
	}
	err = <-c.done
	return errors.Join(err, hub.Close())
}

// counter is a zmqsub.Handler that waits for a number of messages.
type counter struct {
	count, until int
	done         chan error
}

func (c *counter) Message(_ uint64, _, _ []byte) {
	if c.count++; c.count == c.until {
		c.done <- nil
	}
}

func (c *counter) Gap(expected, got uint64) {
	c.fail(fmt.Errorf("messages %d to %d were lost", expected, got-1))
}
func (c *counter) Restart()                    { c.fail(errors.New("the publisher restarted")) }
func (c *counter) Malformed(err error)         { c.fail(err) }
func (c *counter) Cut(err error)               { c.fail(err) }
func (c *counter) Replayed(zmqsub.Replay, int) {}
func (c *counter) Connected()                  {}
func (c *counter) Disconnected()               {}

func (c *counter) fail(err error) {
	select {
	case c.done <- err:
	default: // keep the first error
	}
}

// receiveIndex runs kvepp serve's handling of a worker's events.
func receiveIndex(endpoint string, m *messages) error {
	x, err := indexer.New(indexer.Config{})
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	p := pool.New(log)
	f, err := feed.New(feed.Config{}, p, x, metrics.New(), log)
	if err != nil {
		return err
	}
	p.Watch(f)
	p.Update([]pool.Endpoint{{Name: "worker", Address: "127.0.0.1:1", KVEvents: endpoint, BlockSize: m.blockSize}})
	for deadline := time.Now().Add(time.Minute); x.Stats().Entries != m.held; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("the index has %d entries, want %d", x.Stats().Entries, m.held)
		}
	}
	return f.Close()
}

// decodeTogether is the number of messages that a step times together. It is small, so that their batches stay in the
// cache, as the single batch of a subscription does.
const decodeTogether = 8

// decoded has the cost of each step of an event, in ns per block.
type decoded struct {
	Decode    float64 `json:"decode_ns"`    // DecodeBatch
	Normalize float64 `json:"normalize_ns"` // Normalize, which hashes
	Apply     float64 `json:"apply_ns"`     // to the index
}

// decode runs a worker's messages, a multiple of decodeTogether, through all steps without a socket.
func decode(m *messages) (*decoded, error) {
	x, err := indexer.New(indexer.Config{})
	if err != nil {
		return nil, err
	}
	batches := make([]kvblock.Batch, decodeTogether)
	operations := make([][]kvblock.Operation, len(batches))
	normalizer := kvblock.NewNormalizer(m.blockSize)
	var d decoded
	runtime.GC()
	for at := 0; at < len(m.payloads); at += len(batches) {
		start := cputime.Process()
		for i := range batches {
			if err := kvblock.DecodeBatch(m.payloads[at+i], &batches[i]); err != nil {
				return nil, err
			}
		}
		read := cputime.Process()
		for i := range batches {
			operations[i] = normalizer.Normalize(&batches[i], operations[i][:0])
		}
		hashed := cputime.Process()
		for i := range batches {
			for ops := operations[i]; len(ops) > 0; {
				n, applied := x.Apply(0, ops, false)
				if n == 0 {
					return nil, fmt.Errorf("an event was not used: %s", ops[0].Reason)
				}
				if len(applied.Failed) > 0 {
					return nil, applied.Failed[0]
				}
				ops = ops[n:]
			}
		}
		d.Decode += (read - start - cputime.Cost) / float64(m.blocks)
		d.Normalize += (hashed - read - cputime.Cost) / float64(m.blocks)
		d.Apply += (cputime.Process() - hashed - cputime.Cost) / float64(m.blocks)
	}
	if x.Stats().Entries != m.held {
		return nil, fmt.Errorf("the index has %d entries, want %d", x.Stats().Entries, m.held)
	}
	return &d, nil
}
