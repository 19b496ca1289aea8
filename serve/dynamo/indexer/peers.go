package indexer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"kvepp/indexer/feed"
	"kvepp/internal/useragent"
	"kvepp/kvblock"
)

// maxDumpBytes bounds how much of a peer's dump is read.
const maxDumpBytes = 4 << 30

// connectFirst is how long to wait for the workers' event sockets before a dump is requested. Events between the dump
// and the subscription would be lost, and with them the worker's part of the dump.
const connectFirst = 2 * time.Second

// WarmUp fills the index from the peers' dumps while the feed holds back the workers' events. It returns when that is
// done or ctx ends. If no peer has a dump, the index stays empty; that is not an error. token may be empty. There must
// be a feed. The workers must have joined after the feed's Hold; WarmUp calls its Release.
func (r *Reader) WarmUp(ctx context.Context, peers []string, token string) {
	r.WarmUpFrom(ctx, Sources(peers, token))
}

// Sources returns peers at URLs. token may be empty.
func Sources(peers []string, token string) []Source {
	sources := make([]Source, 0, len(peers))
	for _, peer := range peers {
		url := strings.TrimRight(peer, "/") + "/dump?classes=true"
		sources = append(sources, Source{peer, func(ctx context.Context) (io.ReadCloser, error) {
			return openDump(ctx, url, token)
		}})
	}
	return sources
}

// Source is a peer that gives its dump.
type Source struct {
	Name string
	// Open begins a dump. ErrBusy: the peer is asked again.
	Open func(context.Context) (io.ReadCloser, error)
}

// WarmUpFrom is WarmUp for peers of any kind.
func (r *Reader) WarmUpFrom(ctx context.Context, peers []Source) {
	defer r.feed.Release()
	if len(peers) == 0 {
		return
	}
	connected, cancel := context.WithTimeout(ctx, connectFirst)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for connected.Err() == nil {
		if _, missing := r.feed.Subscriptions(); missing == 0 {
			break
		}
		select {
		case <-tick.C:
		case <-connected.Done():
		}
	}
	l := r.newLoader()
	for len(peers) > 0 && ctx.Err() == nil {
		var busy []Source // peers that write a dump for another client
		for _, peer := range peers {
			if len(l.wanted) == 0 {
				return
			}
			begin, before := time.Now(), l.blocks
			err := l.load(ctx, peer)
			switch {
			case errors.Is(err, ErrBusy):
				busy = append(busy, peer)
			case err != nil:
				r.log.Warn("cannot copy a peer's index; kvepp asks the next peer, or begins with an empty index",
					"peer", peer.Name, "error", err)
			default:
				r.log.Info("a peer's index was taken over",
					"peer", peer.Name, "blocks", l.blocks-before, "took", time.Since(begin).Round(time.Millisecond))
			}
		}
		if peers = busy; len(peers) > 0 {
			select {
			case <-time.After(busyPause):
			case <-ctx.Done():
				r.log.Warn("peers that could have given their index were busy all the time; it begins empty",
					"peers", len(peers))
			}
		}
	}
}

// ErrBusy means that a peer is writing a dump for another client. A peer writes one dump at a time, and replicas that
// start together all request it.
var ErrBusy = errors.New("service: the peer writes another dump")

// busyPause is the time until a busy peer is asked again.
const busyPause = 250 * time.Millisecond

// peerClient sends requests to peers. Its timeouts keep a peer that is down or silent from using up the others' time.
var peerClient = &http.Client{
	Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
		TLSHandshakeTimeout: 2 * time.Second, ResponseHeaderTimeout: 3 * time.Second, DisableKeepAlives: true},
}

// loader loads dumps into the index.
type loader struct {
	*Reader
	wanted map[workerKey]*wantedWorker // those that no earlier peer has filled
	blocks int
}

type workerKey struct {
	instance uint64
	rank     uint32
}

type wantedWorker struct {
	number    kvblock.Worker
	part      string // the dump's part that has the worker; empty until one is found
	blockSize int
	at        feed.Position
	begun     bool
}

func (r *Reader) newLoader() *loader {
	l := &loader{Reader: r, wanted: map[workerKey]*wantedWorker{}}
	s := r.pool.Acquire()
	defer s.Release()
	for i := range s.Workers {
		w := &s.Workers[i]
		part := ""
		if r.modelsNamed {
			part = r.modelGroupOf(w).String()
		}
		l.wanted[workerKey{w.InstanceID, w.Rank}] = &wantedWorker{number: w.Worker, part: part, blockSize: w.BlockSize}
	}
	return l
}

// openDump begins a peer's dump over HTTP.
func openDump(ctx context.Context, url, token string) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	useragent.Add(req)
	resp, err := peerClient.Do(req)
	switch {
	case err != nil:
		return nil, err
	case resp.StatusCode == http.StatusOK:
		return resp.Body, nil
	}
	resp.Body.Close()
	if resp.StatusCode == http.StatusTooManyRequests {
		return nil, ErrBusy
	}
	return nil, fmt.Errorf("%s answered %s", url, resp.Status)
}

// load loads one peer's dump. Events before an error stay in the index: they are correct.
func (l *loader) load(ctx context.Context, peer Source) error {
	dump, err := peer.Open(ctx)
	if err != nil {
		return err
	}
	defer dump.Close()
	err = readDump(bufio.NewReaderSize(io.LimitReader(dump, maxDumpBytes), 1<<16), l.event)
	for key, w := range l.wanted {
		if w.begun {
			delete(l.wanted, key)
		}
	}
	return err
}

// event loads one event. It skips other workers and blocks that could not be matched. Instance ids may be small numbers
// that users choose, so that two models of a dump can have the same id.
func (l *loader) event(part string, blockSize int, d *dumpEvent) error {
	w := l.wanted[workerKey{d.WorkerID, d.Event.Rank}]
	s, ok := d.stored()
	if w == nil || !ok || w.part != "" && part != w.part || w.blockSize != 0 && blockSize != w.blockSize {
		return nil
	}
	if !w.begun {
		w.part = part
		if w.begun = true; d.Position != nil {
			w.at = feed.Position{Known: true, Next: d.Position.Next, Timestamp: d.Position.Timestamp}
		}
		if w.blockSize == 0 {
			l.pool.ReportBlockSize(w.number, blockSize)
		}
		if groups, complete := d.groups(); len(groups) > 0 && w.at.Known {
			// An error of it is one of every Seed too.
			_ = l.feed.SeedGroups(w.number, groups, blockSize, complete)
		}
	}
	if l.feed.Seed(w.number, w.at, s) == nil { // a lost store does not invalidate the others
		l.blocks += len(s.Blocks)
	}
	return nil
}
