package indexer

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/indexer/feed"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/serve/api"
)

// dumpPatience is how long a client may take to read one worker's part of a dump, and to read in all if others ask for
// one. Tests change it.
var dumpPatience = time.Minute

// Dump handles GET /dump: the blocks of every worker, as events: {"model:group": {"block_size": n, "events": […]}}. It
// writes worker by worker, so that it needs memory for one worker's part only. One dump runs at a time.
//
// The first event of each worker has the key "position" in addition to Dynamo's keys: the number of the worker's own
// messages that the dump includes. kvepp continues from there.
//
// With the parameter classes=true, the first event also has "groups", the worker's layer groups, and the dump has the
// blocks of hybrid models' other layers than full attention, in storage tiers that Dynamo does not have: those of the
// first class that "groups" names are in device_class_0. "complete": false says that the dump does not have them.
func (r *Reader) Dump(w http.ResponseWriter, req *http.Request) {
	if !r.dumping.TryLock() {
		refuseDump(w, req)
		return
	}
	defer r.dumping.Unlock()
	w.Header().Set("Content-Type", "application/json")
	control := http.NewResponseController(w)
	_ = r.dump(w, req.URL.Query().Get("classes") == "true", func() {
		// Some connections have no deadlines; a failed write reports the rest.
		_ = control.SetWriteDeadline(time.Now().Add(dumpPatience))
	})
}

func refuseDump(w http.ResponseWriter, _ *http.Request) {
	api.Reply(w, 0, nil, api.Refuse(http.StatusTooManyRequests, "another dump is being written; ask again later"))
}

// WriteDump writes what Dump answers, with classes. ErrBusy: another dump is being written.
func (r *Reader) WriteDump(w io.Writer) error {
	if !r.dumping.TryLock() {
		return ErrBusy
	}
	defer r.dumping.Unlock()
	return r.dump(w, true, func() {})
}

// dump writes a dump. It calls before ahead of each write. The caller holds r.dumping.
func (r *Reader) dump(w io.Writer, classes bool, before func()) error {
	snapshot := r.pool.Acquire() // until the end: worker numbers must not be reused meanwhile
	defer snapshot.Release()
	workers := snapshot.Workers
	groups := map[api.ModelGroup][]*pool.Worker{}
	var names []api.ModelGroup
	for i := range workers {
		s := r.modelGroupOf(&workers[i])
		if groups[s] == nil {
			names = append(names, s)
		}
		groups[s] = append(groups[s], &workers[i])
	}
	slices.SortFunc(names, func(a, b api.ModelGroup) int { return strings.Compare(a.String(), b.String()) })

	var part bytes.Buffer
	for i, name := range names {
		key, _ := json.Marshal(name.String())
		fmt.Fprintf(&part, `%c%s:{"block_size":%d,"events":[`, "{,"[min(i, 1)], key, groups[name][0].BlockSize)
		d := dumper{out: &part, classes: classes}
		for _, worker := range groups[name] {
			d.worker(r.feed, worker)
			before()
			if _, err := part.WriteTo(w); err != nil {
				return err // the client closed the connection
			}
		}
		part.WriteString("]}")
	}
	if len(names) == 0 {
		part.WriteByte('{')
	}
	part.WriteByte('}')
	_, err := part.WriteTo(w)
	return err
}

// dumper writes the events of one model.
type dumper struct {
	out     *bytes.Buffer
	classes bool // with groups and the blocks of classes
	events  int
	number  []byte
}

// worker writes the events of one worker.
func (d *dumper) worker(f *feed.Feed, w *pool.Worker) {
	first := true
	f.Dump(w.Worker, func(from *feed.Source, s kvblock.Stored) bool {
		if s.Tier > kvblock.TierExternal && !d.classes {
			return false
		}
		if d.events > 0 {
			d.out.WriteByte(',')
		}
		d.out.WriteString(`{"worker_id":`)
		d.unsigned(w.InstanceID)
		if at := &from.Position; first && at.Known {
			fmt.Fprintf(d.out, `,"position":{"next":%d,"timestamp":%s}`, at.Next,
				strconv.FormatFloat(at.Timestamp, 'g', -1, 64))
		}
		if first && d.classes && len(from.Groups) > 0 {
			groups, _ := json.Marshal(groupsOf(from.Groups)) // numbers and texts
			fmt.Fprintf(d.out, `,"groups":%s,"complete":%v`, groups, from.Complete)
		}
		first = false
		fmt.Fprintf(
			d.out,
			`,"storage_tier":"%s","residency_domain":"worker","event":{"event_id":%d,"data":{"stored":{"parent_hash":`,
			s.Tier,
			d.events,
		)
		if s.HasParent {
			d.unsigned(uint64(s.Parent))
		} else {
			d.out.WriteString("null")
		}
		d.out.WriteString(`,"start_position":null,"blocks":[`)
		for i, b := range s.Blocks {
			if i > 0 {
				d.out.WriteByte(',')
			}
			d.out.WriteString(`{"block_hash":`)
			d.unsigned(uint64(b.Engine))
			d.out.WriteString(`,"tokens_hash":`)
			d.unsigned(uint64(b.Local))
			d.out.WriteString(`,"mm_extra_info":null}`)
		}
		fmt.Fprintf(d.out, `]}},"dp_rank":%d}}`, w.Rank)
		d.events++
		return true
	})
}

func (d *dumper) unsigned(v uint64) {
	d.number = strconv.AppendUint(d.number[:0], v, 10)
	d.out.Write(d.number)
}

// dumpGroup is a layer group of a dump.
type dumpGroup struct {
	Number    uint32 `json:"group"`
	Kind      string `json:"kind"` // full_attention, or a kind of class: window, state, chunk
	Window    uint32 `json:"window,omitempty"`
	BlockSize uint32 `json:"block_size,omitempty"` // of a class
}

const fullAttention = "full_attention"

func groupsOf(groups []kvblock.Group) (out []dumpGroup) {
	for _, g := range groups {
		d := dumpGroup{g.Number, fullAttention, g.Class.Window, g.Class.BlockSize}
		if g.Class.Kind != 0 {
			d.Kind = g.Class.Kind.String()
		}
		out = append(out, d)
	}
	return out
}

// groups returns the layer groups of an event, and whether all are known.
func (d *dumpEvent) groups() (groups []kvblock.Group, complete bool) {
	complete = d.Complete
	for _, g := range d.Groups {
		c := kvblock.Class{Window: g.Window, BlockSize: g.BlockSize}
		for k := kvblock.ClassWindow; k <= kvblock.ClassChunk; k++ {
			if g.Kind == k.String() {
				c.Kind = k
			}
		}
		if c.Kind == 0 && g.Kind != fullAttention {
			complete = false // of another version
			continue
		}
		groups = append(groups, kvblock.Group{Number: g.Number, Class: c})
	}
	return groups, complete
}

// dumpEvent is one event of a dump.
type dumpEvent struct {
	WorkerID uint64 `json:"worker_id"`
	Tier     string `json:"storage_tier"`
	Domain   string `json:"residency_domain"`
	Position *struct {
		Next      uint64  `json:"next"`
		Timestamp float64 `json:"timestamp"`
	} `json:"position"`
	Groups   []dumpGroup `json:"groups"`
	Complete bool        `json:"complete"`
	Event    struct {
		Rank uint32 `json:"dp_rank"`
		Data struct {
			Stored *struct {
				Parent *uint64 `json:"parent_hash"`
				Blocks []struct {
					Engine uint64 `json:"block_hash"`
					Local  uint64 `json:"tokens_hash"`
				} `json:"blocks"`
			} `json:"stored"`
		} `json:"data"`
	} `json:"event"`
}

// stored returns the blocks that the event stores. It returns false for an event that is not about a worker's own
// blocks.
func (d *dumpEvent) stored() (s kvblock.Stored, ok bool) {
	if d.Event.Data.Stored == nil || len(d.Event.Data.Stored.Blocks) == 0 || d.Domain != "worker" {
		return s, false
	}
	if s.Tier, ok = kvblock.TierNamed(d.Tier); !ok {
		for i := range kvblock.MaxClasses {
			if d.Tier == kvblock.ClassTier(i).String() {
				s.Tier, ok = kvblock.ClassTier(i), true
			}
		}
		if !ok {
			return s, false
		}
	}
	if p := d.Event.Data.Stored.Parent; p != nil {
		s.HasParent, s.Parent = true, kvblock.EngineHash(*p)
	}
	for _, b := range d.Event.Data.Stored.Blocks {
		s.Blocks = append(s.Blocks,
			kvblock.StoredBlock{Engine: kvblock.EngineHash(b.Engine), Local: kvblock.LocalHash(b.Local)})
	}
	return s, true
}

// readDump reads a dump. It calls event with each event, and with the name and the block size of the event's part.
func readDump(in *bufio.Reader, event func(part string, blockSize int, d *dumpEvent) error) error {
	dec := json.NewDecoder(in)
	if err := expect(dec, json.Delim('{')); err != nil {
		return err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		part, _ := key.(string) // JSON keys are always strings
		if err := readPart(dec, func(blockSize int, d *dumpEvent) error {
			return event(part, blockSize,
				d)
		}); err != nil {
			return err
		}
	}
	return expect(dec, json.Delim('}'))
}

func readPart(dec *json.Decoder, event func(blockSize int, d *dumpEvent) error) error {
	if err := expect(dec, json.Delim('{')); err != nil {
		return err
	}
	blockSize := 0
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return err
		}
		switch key {
		case "block_size":
			err = dec.Decode(&blockSize)
		case "events":
			err = readEvents(dec, func(d *dumpEvent) error { return event(blockSize, d) })
		default:
			err = dec.Decode(new(json.RawMessage))
		}
		if err != nil {
			return err
		}
	}
	return expect(dec, json.Delim('}'))
}

func readEvents(dec *json.Decoder, event func(*dumpEvent) error) error {
	if err := expect(dec, json.Delim('[')); err != nil {
		return err
	}
	for dec.More() {
		var d dumpEvent
		if err := dec.Decode(&d); err != nil {
			return err
		}
		if err := event(&d); err != nil {
			return err
		}
	}
	return expect(dec, json.Delim(']'))
}

func expect(dec *json.Decoder, want json.Delim) error {
	got, err := dec.Token()
	if err != nil {
		return err
	}
	if got != want {
		return fmt.Errorf("%v where %v should be", got, want)
	}
	return nil
}
