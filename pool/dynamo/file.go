package dynamo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"kvepp/pool"
)

// lease is how long a record lives without being touched. Source: dynamo-runtime 1.6.1, storage::kv::file: a worker
// touches its records every third of 10 s, and readers call one dead that is older. A worker that exits in order
// removes its own at once.
const lease = 10 * time.Second

// scanEvery is the interval between two readings of the store. It is two directory listings; watching them would be
// woken three times a second by the workers' touching alone, and would still need a clock for the dead.
const scanEvery = 250 * time.Millisecond

// FileStore reads Dynamo's file discovery store: DIR/v1/{instances,mdc,event_channels,event_sources}/KEY, the key
// percent-encoded into one file name.
type FileStore struct {
	dir string
	log *slog.Logger

	first   map[key]time.Time // when each live instance was first seen
	started bool
	bad     map[string]string // file -> the last complaint about it, so that each is logged once
	cards   map[string]cachedCard

	// file -> what it says: a publisher's record does not change while it lives
	publishers map[string]cachedChannel
	loads      map[string][]pool.EventChannel // of the latest scan, by path
}

type key struct {
	path string
	id   uint64
}

type cachedChannel struct {
	size    int64
	channel pool.EventChannel
	path    string
}

// cachedCard saves decoding a model card, a few kB, four times a second.
type cachedCard struct {
	size    int64
	touched time.Time
	key     key
	card    *Card
}

// NewFileStore opens the store of a folder, which need not exist yet: the first worker creates it.
func NewFileStore(dir string, log *slog.Logger) *FileStore {
	return &FileStore{
		dir:        dir,
		log:        log,
		first:      map[key]time.Time{},
		bad:        map[string]string{},
		cards:      map[string]cachedCard{},
		publishers: map[string]cachedChannel{},
	}
}

// Watch gives the live instances to apply now and whenever they change, until ctx ends. The first call of apply happens
// before Watch returns.
func (s *FileStore) Watch(ctx context.Context, apply func([]Instance)) {
	last := s.scan(time.Now())
	apply(last)
	go func() {
		tick := time.NewTicker(scanEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case now := <-tick.C:
				if instances := s.scan(now); !reflect.DeepEqual(instances, last) {
					last = instances
					apply(instances)
				}
			}
		}
	}()
}

// scan reads the store once. The instances are ordered by path and id. A record that cannot be read is logged once and
// left out; the others count.
func (s *FileStore) scan(now time.Time) []Instance {
	cards := map[key]*Card{}
	s.each("mdc", now, func(file string, info fs.FileInfo) error {
		if c, ok := s.cards[file]; ok && c.size == info.Size() && c.touched.Equal(info.ModTime()) {
			cards[c.key] = c.card
			return nil
		}
		record, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		path, id, card, err := parseCard(record)
		if err != nil {
			return err
		}
		if card == nil {
			return nil
		}
		k := key{path, id}
		cards[k] = card
		s.cards[file] = cachedCard{info.Size(), info.ModTime(), k, card}
		return nil
	})
	channels, loads := s.channels(now)
	alive := map[key]time.Time{}
	var instances []Instance
	s.each("instances", now, func(file string, info fs.FileInfo) error {
		record, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		in, err := parseInstance(record)
		if err != nil {
			return err
		}
		k := key{in.Path, in.InstanceID}
		seen, known := s.first[k]
		switch {
		case known:
		case s.started:
			seen = now
		default: // of two that were there before us, the one that still touches its record is the live one
			seen = info.ModTime()
		}
		alive[k] = seen
		in.Seen, in.Card, in.Channels, in.Loads = seen, cards[k], channels[k], loads[in.Path]
		instances = append(instances, in)
		return nil
	})
	s.first, s.started = alive, true
	sortInstances(instances)
	return instances
}

func sortInstances(instances []Instance) {
	slices.SortFunc(
		instances,
		func(a, b Instance) int { return byPathAndID(a.Path, a.InstanceID, b.Path, b.InstanceID) },
	)
}

func byPathAndID(path string, id uint64, otherPath string, otherID uint64) int {
	return cmp.Or(strings.Compare(path, otherPath), cmp.Compare(id, otherID))
}

// channels returns where the event plane carries the KV events of each worker, ordered by rank, and the loads of the
// workers at each path, ordered by publisher. Who sends events and where are two records: a publisher counts once both
// are there.
func (s *FileStore) channels(now time.Time) (map[key][]pool.EventChannel, map[string][]pool.EventChannel) {
	byPublisher := map[uint64]pool.EventChannel{}
	loads := map[string][]pool.EventChannel{}
	s.each("event_channels", now, func(file string, info fs.FileInfo) error {
		known, ok := s.publishers[file]
		if !ok || known.size != info.Size() {
			name, err := url.PathUnescape(filepath.Base(file))
			if err != nil ||
				!strings.Contains(name, "/topic/"+kvTopic+"/") && !strings.Contains(name, "/topic/"+loadTopic+"/") {
				return nil // of what is not looked for, which there is more of
			}
			record, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			known = cachedChannel{size: info.Size()}
			if known.channel, known.path, err = parseChannel(record); err != nil {
				return err
			}
			s.publishers[file] = known
		}
		switch {
		case known.path != "":
			loads[known.path] = append(loads[known.path], known.channel)
		case known.channel != (pool.EventChannel{}):
			byPublisher[known.channel.Publisher] = known.channel
		}
		return nil
	})
	for path, list := range loads {
		if loads[path] = distinct(list); slices.Equal(loads[path], s.loads[path]) {
			// all instances of a path share it, and comparing what is the same takes no time
			loads[path] = s.loads[path]
		}
	}
	s.loads = loads
	channels := map[key][]pool.EventChannel{}
	s.each("event_sources", now, func(file string, _ fs.FileInfo) error {
		record, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		publisher, worker, rank, err := parseSource(record)
		if c, ok := byPublisher[publisher]; err == nil && ok {
			c.Rank = rank
			channels[worker] = append(channels[worker], c)
		}
		return err
	})
	for _, list := range channels {
		sortChannels(list)
	}
	return channels, loads
}

// distinct returns the channels of a path's loads in their order, each once: a subject is named by all that publish to
// it. It reuses list.
func distinct(list []pool.EventChannel) []pool.EventChannel {
	sortChannels(list)
	return slices.Compact(list)
}

func sortChannels(list []pool.EventChannel) {
	slices.SortFunc(list, func(a, b pool.EventChannel) int {
		return cmp.Or(
			cmp.Compare(a.Rank, b.Rank),
			cmp.Compare(a.Publisher, b.Publisher),
			cmp.Compare(a.Subject, b.Subject),
		)
	})
}

// each calls f for every record of a bucket whose lease has not ended.
func (s *FileStore) each(bucket string, now time.Time, f func(file string, info fs.FileInfo) error) {
	dir := filepath.Join(s.dir, "v1", bucket)
	files, err := os.ReadDir(dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.complain(dir, err)
		}
		return
	}
	delete(s.bad, dir)
	live := map[string]bool{}
	for _, d := range files {
		file := filepath.Join(dir, d.Name())
		info, err := d.Info()
		if err != nil || info.IsDir() || now.Sub(info.ModTime()) > lease {
			continue // removed between the listing and now, or dead
		}
		if _, err := url.PathUnescape(d.Name()); err != nil || strings.HasPrefix(d.Name(), ".") {
			continue // not a record: another program's temporary file
		}
		live[file] = true
		if err := f(file, info); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.complain(file, err)
		} else {
			delete(s.bad, file)
		}
	}
	for file := range s.bad {
		if filepath.Dir(file) == dir && !live[file] {
			delete(s.bad, file)
		}
	}
	for file := range s.cards {
		if filepath.Dir(file) == dir && !live[file] {
			delete(s.cards, file)
		}
	}
	for file := range s.publishers {
		if filepath.Dir(file) == dir && !live[file] {
			delete(s.publishers, file)
		}
	}
}

// complain logs what is wrong with a file, once for each new complaint. A record that is being written looks truncated
// for a moment: it is read again at the next scan.
func (s *FileStore) complain(file string, err error) {
	if text := fmt.Sprint(err); s.bad[file] != text {
		s.bad[file] = text
		s.log.Warn("a record of Dynamo's discovery cannot be read; the others count", "file", file, "error", err)
	}
}
