package e2e

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"testing"

	zmq "github.com/pebbe/zmq4"

	"kvepp/kvblock/kvblocktest"
	"kvepp/test/harness/stack"
)

const indexerBlock = 4 // tokens

// publisher is the event socket of one rank of an engine.
type publisher struct {
	t        *testing.T
	socket   *zmq.Socket
	address  string
	instance uint64
	rank     int
	seq      uint64
	held     map[uint64]*cachedBlock
}

// cachedBlock is a block that the engine has. Its hash is the same for every engine, as with a fixed seed.
type cachedBlock struct {
	name, parent uint64
	tokens       []int
	children     int
}

func newPublisher(t *testing.T, instance uint64, rank int) *publisher {
	t.Helper()
	socket, err := zmq.NewSocket(zmq.XPUB) // a PUB that also receives subscriptions
	if err != nil {
		t.Fatal(err)
	}
	socket.SetLinger(0)
	socket.SetSndhwm(0)
	socket.SetXpubVerbose(1) // receive the subscription of each subscriber, not only of the first
	if err := socket.Bind("tcp://127.0.0.1:*"); err != nil {
		t.Fatal(err)
	}
	p := &publisher{t: t, socket: socket, instance: instance, rank: rank, held: map[uint64]*cachedBlock{}}
	if p.address, err = socket.GetLastEndpoint(); err != nil {
		t.Fatal(err)
	}
	return p
}

// offload announces that some blocks also have a copy in host memory or on disk, which remains when the device's copy
// is removed.
func (p *publisher) offload(rng *rand.Rand, n int) {
	p.t.Helper()
	var held []*cachedBlock
	for _, b := range p.held {
		held = append(held, b)
	}
	slices.SortFunc(held, func(a, b *cachedBlock) int { return cmp.Compare(a.name, b.name) })
	for range min(n, len(held)) {
		b := held[rng.IntN(len(held))]
		event := []any{
			"BlockStored",
			[]uint64{b.name},
			nil,
			b.tokens,
			indexerBlock,
			nil,
			[]string{"CPU", "DISK"}[rng.IntN(2)],
			nil,
			nil,
		}
		if b.parent != 0 {
			event[2] = b.parent
		}
		p.publish(event)
	}
}

// subscribed waits for n subscriptions.
func (p *publisher) subscribed(n int) {
	p.t.Helper()
	p.socket.SetRcvtimeo(2 * 60e9)
	for n > 0 {
		frame, err := p.socket.RecvBytes(0)
		if err != nil || len(frame) == 0 {
			p.t.Fatalf("waiting for a subscriber: %x, %v", frame, err)
		}
		n -= int(frame[0]) // 0: one has ended
	}
}

// publish sends a batch of events in vLLM's encoding.
func (p *publisher) publish(events ...[]any) {
	p.t.Helper()
	if _, err := p.socket.SendMessage("", binary.BigEndian.AppendUint64(nil, p.seq),
		kvblocktest.Append(nil, []any{1.5, events, p.rank})); err != nil {
		p.t.Fatal(err)
	}
	p.seq++
}

// nameOf returns an engine's hash of a block: equal chains of tokens have equal hashes.
func nameOf(parent uint64, tokens []int) uint64 {
	h := parent*0x9e3779b97f4a7c15 + 1
	for _, t := range tokens {
		h = (h ^ uint64(t)) * 0xff51afd7ed558ccd
		h ^= h >> 32
	}
	return h | 1
}

// store announces the blocks of a prompt that the engine does not have yet.
func (p *publisher) store(tokens []int) {
	p.t.Helper()
	var names []uint64
	var stored []int
	var parent, before uint64
	for ; len(tokens) >= indexerBlock; tokens = tokens[indexerBlock:] {
		block := tokens[:indexerBlock]
		name := nameOf(parent, block)
		if p.held[name] == nil {
			if len(names) == 0 {
				before = parent
			}
			p.held[name] = &cachedBlock{name: name, parent: parent, tokens: block}
			if up := p.held[parent]; up != nil {
				up.children++
			}
			names, stored = append(names, name), append(stored, block...)
		}
		parent = name
	}
	if len(names) > 0 {
		event := []any{"BlockStored", names, nil, stored, indexerBlock, nil, "GPU", nil, nil}
		if before != 0 {
			event[2] = before
		}
		p.publish(event)
	}
}

// evict announces the removal of up to n blocks without a following block, as an engine frees them.
func (p *publisher) evict(rng *rand.Rand, n int) {
	p.t.Helper()
	var names []uint64
	for range n {
		var leaves []*cachedBlock
		for _, b := range p.held {
			if b.children == 0 {
				leaves = append(leaves, b)
			}
		}
		if len(leaves) == 0 {
			break
		}
		slices.SortFunc(leaves, func(a, b *cachedBlock) int { return cmp.Compare(a.name, b.name) })
		b := leaves[rng.IntN(len(leaves))]
		delete(p.held, b.name)
		if up := p.held[b.parent]; up != nil {
			up.children--
		}
		names = append(names, b.name)
	}
	if len(names) > 0 {
		p.publish([]any{"BlockRemoved", names, "GPU"})
	}
}

// indexers are both services and the publishers that both subscribe to.
type indexers struct {
	*stack.Services
	t          *testing.T
	publishers []*publisher
}

func startIndexers(t *testing.T) *indexers {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	services, err := stack.StartIndexers(t.Context(), stack.Config{Root: root, Tools: os.Getenv("KVEPP_TOOLS")})
	if err != nil {
		t.Fatal(err)
	}
	x := &indexers{Services: services, t: t}
	t.Cleanup(func() {
		services.Close()
		for _, p := range x.publishers {
			p.socket.Close() // after its subscribers; otherwise libzmq may abort (zeromq/libzmq#3442)
		}
	})
	return x
}

// publisher registers a new publisher with both services.
func (x *indexers) publisher(instance uint64, rank int) *publisher {
	x.t.Helper()
	p := newPublisher(x.t, instance, rank)
	x.publishers = append(x.publishers, p)
	x.same(
		http.StatusCreated,
		"/register",
		map[string]any{
			"instance_id": instance,
			"dp_rank":     rank,
			"endpoint":    p.address,
			"model_name":  "m",
			"block_size":  indexerBlock,
		},
	)
	p.subscribed(2)
	return p
}

// ask sends a request to one service. The response is decoded JSON, or nil if it is not JSON.
func (x *indexers) ask(url, path string, body any) (status int, v any) {
	x.t.Helper()
	var resp *http.Response
	var err error
	if body == nil {
		resp, err = http.Get(url + path)
	} else {
		text, _ := json.Marshal(body)
		resp, err = http.Post(url+path, "application/json", bytes.NewReader(text))
	}
	if err != nil {
		x.t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		x.t.Fatal(err)
	}
	if json.Unmarshal(text, &v) != nil {
		v = nil
	}
	return resp.StatusCode, v
}

// same checks that both services give the same response with this status, and returns it.
func (x *indexers) same(status int, path string, body any) any {
	x.t.Helper()
	theirStatus, theirs := x.ask(x.Dynamo, path, body)
	ourStatus, ours := x.ask(x.Kvepp, path, body)
	if theirStatus != status || ourStatus != status || !reflect.DeepEqual(theirs, ours) && theirs != nil {
		x.t.Fatalf(
			"%s %v: Dynamo %d %v, kvepp %d %v; want %d from both",
			path,
			body,
			theirStatus,
			theirs,
			ourStatus,
			ours,
			status,
		)
	}
	return ours
}

// settle waits until both services have applied all published events: it stores a new marker block at every publisher.
func (x *indexers) settle(moment int) {
	x.t.Helper()
	marker := []int{1 << 20, moment, 0, 0}
	for _, p := range x.publishers {
		p.store(marker)
	}
	for _, url := range []string{x.Dynamo, x.Kvepp} {
		eventually(x.t, func() error {
			_, v := x.ask(url, "/query", map[string]any{"model_name": "m", "token_ids": marker})
			response, _ := v.(map[string]any)
			ranks := 0
			scores, _ := response["scores"].(map[string]any)
			for _, byRank := range scores {
				ranks += len(byRank.(map[string]any))
			}
			if ranks != len(x.publishers) {
				return fmt.Errorf("%s knows of %d ranks with the marker, want %d: %v", url, ranks, len(x.publishers), v)
			}
			return nil
		})
	}
}

// TestIndexerRespondsAsDynamos gives the same publishers to python -m dynamo.indexer and to kvepp indexer, publishes
// events as engines do, and compares their responses.
func TestIndexerRespondsAsDynamos(t *testing.T) {
	x := startIndexers(t)
	x.same(http.StatusOK, "/workers", nil)
	x.same(http.StatusOK, "/peers", nil)
	for _, worker := range []struct {
		instance uint64
		rank     int
	}{{7, 0}, {7, 1}, {12510495253119935035, 0}, {8, 3}} {
		x.publisher(worker.instance, worker.rank)
	}
	seed := uint64(begun)
	rng := rand.New(rand.NewPCG(seed, 1))
	prompt := func() []int { // few different tokens, so that prompts share prefixes
		tokens := make([]int, rng.IntN(12)*indexerBlock+rng.IntN(indexerBlock))
		for i := range tokens {
			tokens[i] = rng.IntN(2) * (i / indexerBlock % 3)
		}
		return tokens
	}
	compared := 0
	for round := range 30 {
		for range 40 {
			p := x.publishers[rng.IntN(len(x.publishers))]
			switch n := rng.IntN(20); {
			case n < 13:
				p.store(prompt())
			case n < 17:
				p.evict(rng, 1+rng.IntN(4))
			case n < 19:
				p.offload(rng, 1+rng.IntN(4))
			default:
				clear(p.held)
				p.publish([]any{"AllBlocksCleared"})
			}
		}
		x.settle(round)
		for range 40 {
			x.same(http.StatusOK, "/query", map[string]any{"model_name": "m", "token_ids": prompt()})
			compared++
		}
	}
	x.same(
		http.StatusOK,
		"/query",
		map[string]any{"model_name": "m", "token_ids": prompt(), "lora_name": "a", "cache_salt": "b"},
	)
	x.same(http.StatusOK, "/query_by_hash", map[string]any{"model_name": "m", "block_hashes": []int64{-1, 2}})
	t.Logf("%d queries answered alike (seed %d)", compared, seed)

	peer := map[string]any{"url": "http://127.0.0.1:9"}
	x.same(http.StatusCreated, "/register_peer", peer)
	x.same(http.StatusOK, "/peers", nil)
	x.same(http.StatusOK, "/deregister_peer", peer)
	x.same(http.StatusNotFound, "/deregister_peer", peer)
	x.same(http.StatusNotFound, "/query", map[string]any{"model_name": "unknown", "token_ids": []int{1}})
	x.same(http.StatusOK, "/workers?model_name=unknown", nil)
	at := x.publishers[0].address
	x.same(
		http.StatusConflict,
		"/register",
		map[string]any{"instance_id": 7, "endpoint": at, "model_name": "m", "block_size": indexerBlock},
	)
	x.same(
		http.StatusConflict,
		"/register",
		map[string]any{"instance_id": 9, "endpoint": at, "model_name": "m", "block_size": 2 * indexerBlock},
	)
	x.same(http.StatusNotFound, "/unregister", map[string]any{"instance_id": 99, "model_name": "m"})
	for _, bad := range []map[string]any{{"instance_id": 1}, {"instance_id": -1, "endpoint": at, "model_name": "m",
		"block_size": 4},
		{"Instance_id": 5, "endpoint": at, "model_name": "m", "block_size": 4}} {
		theirs, _ := x.ask(x.Dynamo, "/register", bad)
		ours, _ := x.ask(x.Kvepp, "/register", bad)
		if theirs != http.StatusUnprocessableEntity || ours != theirs {
			t.Errorf("/register %v: Dynamo %d, kvepp %d", bad, theirs, ours)
		}
	}
	x.same(http.StatusOK, "/unregister", map[string]any{"instance_id": 7, "model_name": "m"})
	x.same(http.StatusNotFound, "/unregister", map[string]any{"instance_id": 7, "model_name": "m"})
}

// TestIndexersTakeOver starts indexers after the engines stored their blocks. They load the blocks from a peer: kvepp's
// from kvepp's and from Dynamo's, and Dynamo's from kvepp's. Then they follow further events.
func TestIndexersTakeOver(t *testing.T) {
	x := startIndexers(t)
	a, b := x.publisher(7, 0), x.publisher(7, 1)
	rng := rand.New(rand.NewPCG(uint64(begun), 2))
	prompts := make([][]int, 60)
	for i := range prompts {
		prompts[i] = make([]int, (1+rng.IntN(9))*indexerBlock)
		for k := range prompts[i] {
			prompts[i][k] = rng.IntN(2)
		}
	}
	churn := func() {
		for range 60 {
			p := x.publishers[rng.IntN(2)]
			if rng.IntN(3) > 0 {
				p.store(prompts[rng.IntN(len(prompts))])
			} else {
				p.evict(rng, 2)
			}
		}
	}
	churn()
	x.settle(1)
	workers := fmt.Sprintf("7=%s,7:1=%s", a.address, b.address)
	known := []string{"--workers", workers, "--model-name", "m", "--block-size", strconv.Itoa(indexerBlock)}
	late := map[string]string{}
	for _, s := range []struct {
		name, peer string
		start      func(context.Context, ...string) (string, error)
	}{
		{"kvepp from kvepp", x.Kvepp, x.StartKvepp},
		{"kvepp from Dynamo", x.Dynamo, x.StartKvepp},
		{"Dynamo from kvepp", x.Kvepp, x.StartDynamo},
	} {
		url, err := s.start(t.Context(), append(known, "--peers", s.peer)...)
		if err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		late[s.name] = url
	}
	compare := func(when string) {
		t.Helper()
		for name, url := range late {
			eventually(t, func() error {
				for _, prompt := range prompts {
					q := map[string]any{"model_name": "m", "token_ids": prompt}
					_, want := x.ask(x.Kvepp, "/query", q)
					if _, got := x.ask(url, "/query", q); !reflect.DeepEqual(got, want) {
						return fmt.Errorf("%s: %s answers %v, want %v", when, name, got, want)
					}
				}
				return nil
			})
		}
	}
	compare("taken over")
	churn()
	x.settle(2)
	compare("after more events")
}

// TestIndexerWhereDynamosErrs shows defects of Dynamo's index that kvepp's must not have, on the real one. It fails
// when Dynamo fixes them.
func TestIndexerWhereDynamosErrs(t *testing.T) {
	x := startIndexers(t)
	a, b := x.publisher(1, 0), x.publisher(2, 0)
	chain := []int{1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4}
	tokens := func(url string, instance string) int {
		_, v := x.ask(url, "/query", map[string]any{"model_name": "m", "token_ids": chain})
		byRank, _ := v.(map[string]any)["scores"].(map[string]any)[instance].(map[string]any)
		n, _ := byRank["0"].(float64)
		return int(n)
	}
	want := func(what, instance string, dynamo, kvepp int) {
		t.Helper()
		if theirs, ours := tokens(x.Dynamo, instance), tokens(x.Kvepp, instance); theirs != dynamo || ours != kvepp {
			t.Errorf("%s: Dynamo answers %d tokens and kvepp %d, want %d and %d", what, theirs, ours, dynamo, kvepp)
		}
	}
	stored := func(parent any, from, to int, names ...uint64) []any {
		return []any{"BlockStored", names, parent, chain[4*from : 4*to], indexerBlock, nil, "GPU", nil, nil}
	}
	moment := 0
	settle := func() { moment++; x.settle(moment) }

	// A block in the middle is removed and stored again: the engine has all four again.
	a.publish(stored(nil, 0, 4, 101, 102, 103, 104))
	settle()
	want("four blocks stored", "1", 16, 16)
	a.publish([]any{"BlockRemoved", []uint64{102}, "GPU"})
	settle()
	want("the second removed", "1", 4, 4)
	a.publish(stored(uint64(101), 1, 2, 102))
	settle()
	want("the second stored again", "1", 8, 16)

	// Another engine gives the same blocks other hashes.
	b.publish(stored(nil, 0, 2, 201, 202))
	b.publish(stored(uint64(202), 2, 3, 203))
	settle()
	want("three blocks with other hashes", "2", 8, 12)
	b.publish([]any{"BlockRemoved", []uint64{201, 202, 203}, "GPU"})
	settle()
	want("all of them removed", "2", 8, 0)

	// Lost messages: their content is unknown.
	b.publish(stored(nil, 0, 2, 201, 202))
	settle()
	b.seq += 3
	settle()
	want("after a gap", "2", 8, 0)
}
