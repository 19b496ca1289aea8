package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"math"
	"sync"
	"time"

	zmq "github.com/pebbe/zmq4"

	"kvepp/kvblock"
	"kvepp/prompt"
)

// publisher is the two sockets of an engine's KV events: one that publishes, and one that replays.
type publisher struct {
	like prompt.Engine // the engine whose format the events have

	mu        sync.Mutex  // guards what follows; a socket takes one thread at a time
	announces *zmq.Socket // nil: events are off
	sent      [][]byte    // every batch; its number is its index
}

// publish opens the sockets at these ports of a host and starts to answer replay requests. Port 0 opens no socket.
func publish(like prompt.Engine, host string, announce, repeat int) (*publisher, error) {
	if announce == 0 {
		return &publisher{like: like}, nil
	}
	pub, err := zmq.NewSocket(zmq.PUB)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(pub.SetSndhwm(0), pub.Bind(fmt.Sprintf("tcp://%s:%d", host, announce))); err != nil {
		return nil, err
	}
	p := &publisher{like: like, announces: pub}
	if repeat == 0 {
		return p, nil
	}
	router, err := zmq.NewSocket(zmq.ROUTER)
	if err != nil {
		return nil, err
	}
	if err := router.Bind(fmt.Sprintf("tcp://%s:%d", host, repeat)); err != nil {
		return nil, err
	}
	go p.repeat(router)
	return p, nil
}

// stored publishes the store of consecutive blocks, with their tokens. parent 0: the first has no parent. A batch is
// [time, [event], rank], and an event a map. Sources: vLLM 0.33.0, distributed/kv_events.py; SGLang 0.5.21,
// disaggregation/kv_events.py, where hashes are signed and adapters have no name.
func (p *publisher) stored(names []uint64, parent uint64, tokens []kvblock.Token, blockSize int) error {
	event, number64 := byte(0x88), byte(0xcf) // a map of 8, and unsigned numbers
	if p.like == prompt.SGLang {
		event, number64 = 0x87, 0xd3
	}
	b := []byte{0x93, 0xcb}
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(float64(time.Now().UnixMicro())/1e6))
	b = append(b, 0x91, event)
	b = text(text(b, "type"), "BlockStored")
	b = array(text(b, "block_hashes"), len(names))
	for _, name := range names {
		b = binary.BigEndian.AppendUint64(append(b, number64), name)
	}
	b = text(b, "parent_block_hash")
	if parent == 0 {
		b = append(b, none)
	} else {
		b = binary.BigEndian.AppendUint64(append(b, number64), parent)
	}
	b = array(text(b, "token_ids"), len(tokens))
	for _, t := range tokens {
		b = integer(b, uint32(t))
	}
	b = integer(text(b, "block_size"), uint32(blockSize))
	b = append(text(b, "lora_id"), none)
	b = text(text(b, "medium"), "GPU")
	if p.like == prompt.VLLM {
		b = append(text(b, "lora_name"), none)
	}
	b = append(b, 0x00) // the rank
	p.mu.Lock()
	defer p.mu.Unlock()
	number := binary.BigEndian.AppendUint64(nil, uint64(len(p.sent)))
	p.sent = append(p.sent, b)
	if p.announces == nil {
		return nil
	}
	_, err := p.announces.SendMessage("", number, b)
	return err
}

const none = 0xc0

// text (of up to 31 bytes), array and integer append MessagePack.
func text(b []byte, s string) []byte { return append(append(b, 0xa0|byte(len(s))), s...) }

func array(b []byte, n int) []byte { return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n)) }

func integer(b []byte, v uint32) []byte { return binary.BigEndian.AppendUint32(append(b, 0xce), v) }

// repeat answers requests for all batches from a number on: each batch with its number, then an end message with the
// largest number.
func (p *publisher) repeat(router *zmq.Socket) {
	for {
		frames, err := router.RecvMessageBytes(0)
		if err != nil {
			log.Printf("engine: the replay socket ends: %v", err)
			return
		}
		if len(frames) != 3 || len(frames[2]) != 8 {
			continue
		}
		p.mu.Lock()
		sent := p.sent // batches never change
		p.mu.Unlock()
		for n := binary.BigEndian.Uint64(frames[2]); n < uint64(len(sent)); n++ {
			router.SendMessage(frames[0], "", "", binary.BigEndian.AppendUint64(nil, n), sent[n])
		}
		router.SendMessage(frames[0], "", "", binary.BigEndian.AppendUint64(nil, math.MaxUint64), "")
	}
}
