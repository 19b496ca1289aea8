package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"

	zmq "github.com/pebbe/zmq4"

	"kvepp/kvblock/kvblocktest"
)

// messages has the payloads of one worker's publisher in vLLM's encoding: arrays of a time, events and a rank. The same
// kind always gives the same messages.
type messages struct {
	payloads  [][]byte
	blockSize int
	blocks    int // number of blocks that they announce as stored and removed
	held      int // number of blocks that the worker has after them
}

// Kinds of messages. A prefill announces one prompt of 1,024 tokens in one event. A decode message is a step of 32
// running requests that all fill a block, one event each, and 8 removals of blocks of ended requests, one event each.
func newMessages(kind string, count int) (*messages, error) {
	m := &messages{}
	rng := rand.New(rand.NewPCG(7, 7))
	switch kind {
	case "prefill16":
		m.blockSize = 16
		m.prefill(rng, count, 64)
	case "prefill64":
		m.blockSize = 64
		m.prefill(rng, count, 16)
	case "decode16":
		m.blockSize = 16
		m.decode(rng, count)
	default:
		return nil, fmt.Errorf("no messages are called %q", kind)
	}
	return m, nil
}

func (m *messages) prefill(rng *rand.Rand, count, blocks int) {
	for range count {
		b := m.begin(1)
		hashes := make([]uint64, blocks)
		for i := range hashes {
			hashes[i] = rng.Uint64()
		}
		m.payloads = append(m.payloads, kvblocktest.AppendUint(m.stored(b, rng, hashes, 0), 0))
		m.blocks += blocks
		m.held += blocks
	}
}

func (m *messages) decode(rng *rand.Rand, count int) {
	const running, length, going = 32, 64, 8
	var requests [running][]uint64
	var ended []uint64
	for range count {
		gone := min(going, len(ended))
		b := m.begin(running + gone)
		for i := range requests {
			var parent uint64
			if n := len(requests[i]); n == length {
				ended = append(ended, requests[i]...)
				requests[i] = nil
			} else if n > 0 {
				parent = requests[i][n-1]
			}
			h := rng.Uint64()
			requests[i] = append(requests[i], h)
			b = m.stored(b, rng, []uint64{h}, parent)
		}
		for range gone {
			b = append(b, 0x93)
			b = appendText(b, "BlockRemoved")
			b = kvblocktest.AppendUint(append(b, 0x91), ended[len(ended)-1]) // the last block of a request first
			b = appendText(b, "GPU")
			ended = ended[:len(ended)-1]
		}
		m.payloads = append(m.payloads, kvblocktest.AppendUint(b, 0))
		m.blocks += running + gone
		m.held += running - gone
	}
}

// begin begins a batch.
func (m *messages) begin(events int) []byte {
	b := append([]byte(nil), 0x93, 0xcb)
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(1763712345.678))
	return appendArray(b, events)
}

// stored appends an event for blocks of random tokens; parent 0 means none.
func (m *messages) stored(b []byte, rng *rand.Rand, hashes []uint64, parent uint64) []byte {
	b = appendText(append(b, 0x97), "BlockStored")
	b = appendArray(b, len(hashes))
	for _, h := range hashes {
		b = kvblocktest.AppendUint(b, h)
	}
	if parent == 0 {
		b = append(b, 0xc0)
	} else {
		b = kvblocktest.AppendUint(b, parent)
	}
	b = appendArray(b, len(hashes)*m.blockSize)
	for range len(hashes) * m.blockSize {
		b = kvblocktest.AppendUint(b, rng.Uint64N(128_000))
	}
	b = kvblocktest.AppendUint(b, uint64(m.blockSize))
	return appendText(append(b, 0xc0), "GPU") // before it, no LoRA
}

// appendText and appendArray append msgpack in the shortest form, as engines do; texts of less than 32 bytes.
func appendText(b []byte, text string) []byte {
	return append(append(b, 0xa0|byte(len(text))), text...)
}

func appendArray(b []byte, n int) []byte {
	if n < 16 {
		return append(b, 0x90|byte(n))
	}
	return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
}

// maxMessages is the largest number of different messages. More would repeat them, so the index would be wrong.
const maxMessages = 8192

// publish sends count messages, numbered as engines number them.
func publish(kind string, count int, stdin io.Reader, stdout io.Writer) error {
	m, err := newMessages(kind, min(count, maxMessages))
	if err != nil {
		return err
	}
	socket, err := zmq.NewSocket(zmq.XPUB)
	if err != nil {
		return err
	}
	if err := errors.Join(socket.SetLinger(0), socket.SetSndhwm(0), socket.Bind("tcp://127.0.0.1:*")); err != nil {
		return err
	}
	endpoint, err := socket.GetLastEndpoint()
	if err != nil {
		return err
	}
	fmt.Fprintln(stdout, endpoint)
	if _, err := socket.RecvBytes(0); err != nil { // the subscription
		return err
	}
	for seq := range count {
		payload := m.payloads[seq%len(m.payloads)]
		if _, err := socket.SendMessage("kv-events", binary.BigEndian.AppendUint64(nil, uint64(seq)),
			payload); err != nil {
			return err
		}
	}
	_, err = io.Copy(io.Discard, stdin)
	return errors.Join(err, socket.Close())
}
