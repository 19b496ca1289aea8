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

	"kvepp/internal/boundedfile"
	"kvepp/pool"
)

// lease is how long a record is valid after its file was last touched. Source: dynamo-runtime 1.6.1, storage::kv::file:
// a worker touches its records every third of 10 s, and readers ignore older ones. A worker that exits normally removes
// its records at once.
const lease = 10 * time.Second

// scanInterval is the time between two scans of the store. A scan lists a few directories. File notifications would not
// be cheaper: each touch causes one, and expired leases need a timer anyway.
const scanInterval = 250 * time.Millisecond

// maxRecord bounds a record, in bytes. Model cards have some kilobytes.
const maxRecord = 4 << 20

// FileStore reads Dynamo's file discovery store: DIR/v1/{instances,mdc,event_channels,event_sources}/KEY. The file name
// is the percent-encoded key.
type FileStore struct {
	dir string
	log *slog.Logger

	firstSeen    map[key]time.Time // live instances
	started      bool              // a scan has ended
	loggedErrors map[string]string // last error by file, so that each error is logged once
	cards        map[string]cachedCard

	// publishers holds parsed records by file. A publisher's record does not change while it is alive.
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

// cachedCard is a decoded model card. Decoding a few kB four times a second would waste CPU.
type cachedCard struct {
	size    int64
	touched time.Time
	key     key
	card    *Card
}

// NewFileStore returns the store in a folder. The folder need not exist yet: the first worker creates it.
func NewFileStore(dir string, log *slog.Logger) *FileStore {
	return &FileStore{
		dir:          dir,
		log:          log,
		firstSeen:    map[key]time.Time{},
		loggedErrors: map[string]string{},
		cards:        map[string]cachedCard{},
		publishers:   map[string]cachedChannel{},
	}
}

// Watch calls apply with the live instances, now and after each change, until ctx ends. The first call ends before
// Watch returns.
func (s *FileStore) Watch(ctx context.Context, apply func([]Instance)) {
	last := s.scan(time.Now())
	apply(last)
	go func() {
		tick := time.NewTicker(scanInterval)
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

// scan reads the store once and returns the instances, ordered by path and id. It logs an invalid record once and skips
// it.
func (s *FileStore) scan(now time.Time) []Instance {
	cards := map[key]*Card{}
	s.each("mdc", now, func(file string, info fs.FileInfo) error {
		if c, ok := s.cards[file]; ok && c.size == info.Size() && c.touched.Equal(info.ModTime()) {
			cards[c.key] = c.card
			return nil
		}
		record, err := boundedfile.Read(file, maxRecord)
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
	plane := s.plane(now)
	alive := map[key]time.Time{}
	var instances []Instance
	s.each("instances", now, func(file string, info fs.FileInfo) error {
		record, err := boundedfile.Read(file, maxRecord)
		if err != nil {
			return err
		}
		in, err := parseInstance(record)
		if err != nil {
			return err
		}
		k := key{in.Path, in.InstanceID}
		seen, known := s.firstSeen[k]
		switch {
		case known:
		case s.started:
			seen = now
		default: // at the start: of two instances, the one that still touches its record is alive
			seen = info.ModTime()
		}
		alive[k] = seen
		in.Seen, in.Card, in.Channels, in.Loads = seen, cards[k], plane.heard[k], s.loads[in.Path]
		in.unheard = plane.unheard[k]
		instances = append(instances, in.OverBrokers(plane.brokers))
		return nil
	})
	s.firstSeen, s.started = alive, true
	sortInstances(instances)
	return instances
}

func sortInstances(instances []Instance) {
	slices.SortFunc(instances,
		func(a, b Instance) int { return byPathAndID(a.Path, a.InstanceID, b.Path, b.InstanceID) })
}

func byPathAndID(path string, id uint64, otherPath string, otherID uint64) int {
	return cmp.Or(strings.Compare(path, otherPath), cmp.Compare(id, otherID))
}

// plane is the event plane: the channels of each worker's KV events, ordered by rank, its sources without a channel,
// and the brokers.
type plane struct {
	heard, unheard map[key][]pool.EventChannel
	brokers        string
}

// plane reads the event plane, and sets the channels of loads for each path, ordered by publisher. A publisher of
// events has two records, its channel and its worker.
func (s *FileStore) plane(now time.Time) plane {
	byPublisher := map[uint64]pool.EventChannel{}
	loads := map[string][]pool.EventChannel{}
	var brokers []string
	s.each("event_channels", now, func(file string, info fs.FileInfo) error {
		known, ok := s.publishers[file]
		if !ok || known.size != info.Size() {
			name, err := url.PathUnescape(filepath.Base(file))
			if err != nil ||
				!strings.Contains(name, "/topic/"+kvTopic+"/") && !strings.Contains(name, "/topic/"+loadTopic+"/") &&
					!strings.Contains(name, "/topic/"+firstTopic+"/") && !strings.Contains(name, "/zmq_broker/") {
				return nil // another topic
			}
			record, err := boundedfile.Read(file, maxRecord)
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
		case known.channel.Brokers != "":
			brokers = append(brokers, known.channel.Brokers)
		case known.channel != (pool.EventChannel{}):
			byPublisher[known.channel.Publisher] = known.channel
		}
		return nil
	})
	for path, list := range loads {
		if loads[path] = sortedUnique(list); slices.Equal(loads[path], s.loads[path]) {
			// Share the list with the earlier scan: comparing equal slices is then fast.
			loads[path] = s.loads[path]
		}
	}
	s.loads = loads
	p := plane{map[key][]pool.EventChannel{}, map[key][]pool.EventChannel{}, JoinBrokers(brokers)}
	s.each("event_sources", now, func(file string, _ fs.FileInfo) error {
		record, err := boundedfile.Read(file, maxRecord)
		if err != nil {
			return err
		}
		from, err := parseSource(record)
		from.join(byPublisher, p.heard, p.unheard)
		return err
	})
	for _, list := range p.heard {
		sortChannels(list)
	}
	return p
}

// sortedUnique returns the channels of a path's loads, sorted and without duplicates: all publishers on one subject
// name it. It reuses list.
func sortedUnique(list []pool.EventChannel) []pool.EventChannel {
	sortChannels(list)
	return slices.Compact(list)
}

func sortChannels(list []pool.EventChannel) {
	slices.SortFunc(list, func(a, b pool.EventChannel) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank),
			cmp.Compare(a.Publisher, b.Publisher), cmp.Compare(a.Subject, b.Subject))
	})
}

// each calls f for each record of a bucket with a valid lease.
func (s *FileStore) each(bucket string, now time.Time, f func(file string, info fs.FileInfo) error) {
	dir := filepath.Join(s.dir, "v1", bucket)
	files, err := os.ReadDir(dir)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			s.logOnce(dir, err)
		}
		return
	}
	delete(s.loggedErrors, dir)
	live := map[string]bool{}
	for _, d := range files {
		file := filepath.Join(dir, d.Name())
		info, err := d.Info()
		if err != nil || info.IsDir() || now.Sub(info.ModTime()) > lease {
			continue // removed since the listing, or expired
		}
		if _, err := url.PathUnescape(d.Name()); err != nil || strings.HasPrefix(d.Name(), ".") {
			continue // not a record, such as a temporary file
		}
		live[file] = true
		if err := f(file, info); err != nil && !errors.Is(err, fs.ErrNotExist) {
			s.logOnce(file, err)
		} else {
			delete(s.loggedErrors, file)
		}
	}
	for file := range s.loggedErrors {
		if filepath.Dir(file) == dir && !live[file] {
			delete(s.loggedErrors, file)
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

// logOnce logs an error about a file, unless it was the last one logged about this file. A record that a
// worker is writing may look truncated; the next scan reads it again.
func (s *FileStore) logOnce(file string, err error) {
	if text := fmt.Sprint(err); s.loggedErrors[file] != text {
		s.loggedErrors[file] = text
		s.log.Warn("a record of Dynamo's discovery is invalid; kvepp skips it", "file", file, "error", err)
	}
}
