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
	"kvepp/kvblock"
)

// maxDumpBytes bounds what is read of a peer's dump.
const maxDumpBytes = 4 << 30

// connectFirst is how long to wait for the workers' event sockets before a dump is asked for: what happens between the
// dump and the subscription would be lost, and the worker's part of the dump with it.
const connectFirst = 2 * time.Second

// WarmUp fills the index from the peers' dumps, while the feed holds back the workers' events, and returns when that is
// done or ctx ends, whatever came of it: peers that do not answer, or know nothing because they start as well, only
// leave the index as empty as it was. token may be empty. There must be a feed, and the workers must have joined after
// its Hold; WarmUp calls its Release.
func (r *Reader) WarmUp(ctx context.Context, peers []string, token string) {
	defer r.feed.Release()
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
		var busy []string // with another's dump
		for _, peer := range peers {
			if len(l.wanted) == 0 {
				return
			}
			begin, before := time.Now(), l.blocks
			err := l.load(ctx, strings.TrimRight(peer, "/")+"/dump", token)
			switch {
			case errors.Is(err, errBusy):
				busy = append(busy, peer)
			case err != nil:
				r.log.Warn(
					"a peer's index could not be taken over; the next is asked, or the index begins empty",
					"peer",
					peer,
					"error",
					err,
				)
			default:
				r.log.Info(
					"a peer's index was taken over",
					"peer",
					peer,
					"blocks",
					l.blocks-before,
					"took",
					time.Since(begin).Round(time.Millisecond),
				)
			}
		}
		if peers = busy; len(peers) > 0 {
			select {
			case <-time.After(busyPause):
			case <-ctx.Done():
				r.log.Warn(
					"peers that could have given their index were busy all the time; it begins empty",
					"peers",
					peers,
				)
			}
		}
	}
}

// errBusy says that a peer writes a dump for another, as it does for one at a time: replicas that start together all
// ask for it.
var errBusy = errors.New("service: the peer writes another dump")

// busyPause is the time until such a peer is asked again.
const busyPause = 250 * time.Millisecond

// peerClient asks peers. One that is not there, or takes connections and says nothing, does not use up the time for the
// others.
var peerClient = &http.Client{
	Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: 2 * time.Second}).DialContext,
		TLSHandshakeTimeout: 2 * time.Second, ResponseHeaderTimeout: 3 * time.Second, DisableKeepAlives: true},
}

// loader takes dumps over.
type loader struct {
	*Reader
	wanted map[workerKey]*wantedWorker // not filled by an earlier peer
	blocks int
}

type workerKey struct {
	instance uint64
	rank     uint32
}

type wantedWorker struct {
	number    kvblock.Worker
	part      string // of a dump that is about the worker; empty: the one that it stands in first
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

// load reads one peer's dump. What was read before an error stays: it is a part of the truth.
func (l *loader) load(ctx context.Context, url, token string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := peerClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusTooManyRequests {
		return errBusy
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answered %s", url, resp.Status)
	}
	err = readDump(bufio.NewReaderSize(io.LimitReader(resp.Body, maxDumpBytes), 1<<16), l.event)
	for key, w := range l.wanted {
		if w.begun {
			delete(l.wanted, key)
		}
	}
	return err
}

// event takes one event over. Workers that are not ours, and blocks that could not be matched, are passed over.
// Instance ids may be small numbers that people chose, so that two models of a dump have a worker of the same.
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
	}
	if l.feed.Seed(w.number, w.at, s) == nil { // what one store lacks does not make the others wrong
		l.blocks += len(s.Blocks)
	}
	return nil
}
