// Package record writes the traffic of kvepp to a file, for `kvepp replay`: one line a request in the format
// dynamo.request.trace.v1, with token counts, times, the worker and the hashes of the prompt's blocks.
//
// It never writes text of a client: no prompt, response, request id, session or header. It never delays a request: one
// goroutine writes, and requests that do not fit into its queue are dropped and counted.
//
// Concurrency: a Recorder is safe for concurrent use.
package record

import (
	"bufio"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"kvepp/kvblock"
)

// Bounds of what waits to be written.
const (
	maxQueued       = 4096
	maxQueuedHashes = 4 << 20 // 32 MiB
)

// Schema is the format of a line. Source: dynamo 1.6.1, DYN_REQUEST_TRACE=1.
const Schema = "dynamo.request.trace.v1"

// Request is a request to record.
type Request struct {
	Model     string
	Received  time.Time
	First     time.Time // of the first token; zero: not known
	Ended     time.Time
	Prompt    int // tokens
	Output    int // tokens; 0: not known, and the request is skipped
	Cached    int // tokens that the engine reported; -1: none
	BlockSize int // tokens
	// Hashes are the sequence hashes of the full blocks of the prompt. They are not modified.
	Hashes []kvblock.SequenceHash
	// Prefill is the worker that computed the prompt, and Decode the one that generated the response.
	Prefill, Decode Worker
	// Of a request that another picker routed: why kvepp could not compare the choices, or why it would have avoided
	// the worker, ejected or overloaded; both empty: it could, and would not.
	Unjudged, Avoided string
}

// Worker is a worker as Dynamo names it.
type Worker struct {
	ID   uint64
	Rank uint32
}

// Counts are how many requests had an outcome.
type Counts struct {
	Written atomic.Int64
	Dropped atomic.Int64 // the queue was full
	Skipped atomic.Int64 // no prompt or exact hashes, no complete response, or another block size than the file's
	Failed  atomic.Int64 // the file could not be written, or recording had stopped because of that
}

// Recorder writes requests to a file.
type Recorder struct {
	Counts Counts

	config  Config
	log     *slog.Logger
	queue   chan *Request
	hashes  atomic.Int64 // in queue
	closing chan struct{}
	done    chan struct{}
	stopped atomic.Bool // by an error

	// Owned by the goroutine that writes.
	key       [32]byte
	file      *os.File
	out       *bufio.Writer
	rolls     bool  // the file is a regular one
	size      int64 // of the current file, with what is buffered
	flushed   int64 // of that, what is in the file
	buffered  int64 // lines
	blockSize int   // of all lines; 0: none yet
	lines     uint64
	line      []byte
}

func open(c Config, log *slog.Logger) (*Recorder, error) {
	r := &Recorder{
		config:  c,
		log:     log,
		queue:   make(chan *Request, maxQueued),
		closing: make(chan struct{}),
		done:    make(chan struct{}),
	}
	rand.Read(r.key[:]) // never fails, see crypto/rand
	if info, err := os.Stat(c.Path); err == nil && info.Mode().IsRegular() && info.Size() > 0 {
		if err := r.shift(); err != nil {
			return nil, err
		}
	}
	if err := r.open(); err != nil {
		return nil, err
	}
	go r.run()
	return r, nil
}

// open creates the current file. Others than its owner cannot read it.
func (r *Recorder) open() error {
	// Without O_NONBLOCK the open of a named pipe would wait for its reader.
	f, err := os.OpenFile(r.config.Path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil {
		if r.rolls = info.Mode().IsRegular(); r.rolls {
			err = f.Chmod(0o600) // an empty file that was there
		}
	}
	if err != nil {
		f.Close()
		return err
	}
	r.file, r.size, r.flushed = f, 0, 0
	if r.out == nil {
		r.out = bufio.NewWriterSize(current{r}, 1<<16)
	}
	return nil
}

// current writes to the Recorder's current file. If that was removed, perhaps with its folder, it creates both again.
type current struct{ r *Recorder }

func (c current) Write(b []byte) (int, error) {
	if info, err := c.r.file.Stat(); err == nil && Removed(info) {
		folder := func() error { return os.MkdirAll(filepath.Dir(c.r.config.Path), 0o700) }
		for _, step := range []func() error{folder, c.r.shift, c.r.file.Close, c.r.open} {
			if err := step(); err != nil {
				return 0, err
			}
		}
		c.r.size = int64(len(b))
	}
	return c.r.file.Write(b)
}

// Removed reports whether an open file has no name anymore: what is written to it is lost.
func Removed(info os.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && info.Mode().IsRegular() && stat.Nlink == 0
}

// shift gives each file the name of the next older one. The oldest is removed, with those that a greater number of
// files left behind.
func (r *Recorder) shift() error {
	older := func(n int) string {
		if n == 0 {
			return r.config.Path
		}
		return r.config.Path + "." + strconv.Itoa(n)
	}
	for n := r.config.Files - 1; ; n++ {
		if err := os.Remove(older(n)); os.IsNotExist(err) {
			if n >= r.config.Files {
				break
			}
		} else if err != nil {
			return err
		}
	}
	for n := r.config.Files - 2; n >= 0; n-- {
		if err := os.Rename(older(n), older(n+1)); err != nil && !os.IsNotExist(err) {
			return err
		}
	}
	return nil
}

// Add records a request, without waiting. q belongs to the Recorder from then on.
func (r *Recorder) Add(q *Request) {
	if q.Output < 1 || q.Prompt < 1 || q.BlockSize < 1 || len(q.Hashes) < q.Prompt/q.BlockSize {
		r.Skip()
		return
	}
	q.Hashes = q.Hashes[:q.Prompt/q.BlockSize]
	if r.stopped.Load() {
		r.Counts.Failed.Add(1)
		return
	}
	n := int64(len(q.Hashes))
	if r.hashes.Add(n) <= maxQueuedHashes {
		select {
		case r.queue <- q:
			return
		default:
		}
	}
	r.hashes.Add(-n)
	r.Counts.Dropped.Add(1)
}

// Unjudged records why kvepp in shadow mode could not judge a request that is not recorded otherwise. A nil Recorder
// does nothing.
func (r *Recorder) Unjudged(reason string) {
	if r == nil || r.stopped.Load() {
		return
	}
	select {
	case r.queue <- &Request{Ended: time.Now(), Unjudged: reason}:
	default:
		r.Counts.Dropped.Add(1)
	}
}

// Skip counts a request that cannot be recorded.
func (r *Recorder) Skip() { r.Counts.Skipped.Add(1) }

// Close writes what is queued, within a time. Call it once, after the last Add. A nil Recorder has nothing.
func (r *Recorder) Close(within time.Duration) {
	if r == nil {
		return
	}
	close(r.closing)
	select {
	case <-r.done:
	case <-time.After(within):
		r.log.Warn("--record: the last requests are not written: the file does not take them")
	}
}

// run writes queued requests until the Recorder is closed.
func (r *Recorder) run() {
	defer close(r.done)
	defer func() { r.file.Close() }()
	for {
		select {
		case q := <-r.queue:
			r.take(q)
			continue
		default:
		}
		r.check(r.flush()) // nothing waits
		select {
		case q := <-r.queue:
			r.take(q)
		case <-r.closing:
			for {
				select {
				case q := <-r.queue:
					r.take(q)
				default:
					r.check(r.flush())
					return
				}
			}
		}
	}
}

func (r *Recorder) take(q *Request) {
	r.hashes.Add(int64(-len(q.Hashes)))
	switch {
	case r.stopped.Load():
		r.Counts.Failed.Add(1)
	case q.BlockSize == 0: // Unjudged
		r.check(r.write(q))
	case r.blockSize != 0 && q.BlockSize != r.blockSize:
		r.Skip()
	default:
		r.blockSize = q.BlockSize
		r.check(r.write(q))
	}
}

// check stops recording after an error. The incomplete last line is cut off, so that the file can be replayed.
func (r *Recorder) check(err error) {
	if err == nil || r.stopped.Swap(true) {
		return
	}
	r.Counts.Failed.Add(r.buffered)
	r.buffered = 0
	if r.rolls {
		_ = r.file.Truncate(r.flushed) // the error that is logged explains an incomplete line, too
	}
	r.log.Error("--record: recording has stopped, until kvepp starts again; requests are routed as before",
		"error", err)
}

func (r *Recorder) flush() error {
	if r.out.Buffered() == 0 {
		return nil
	}
	if err := r.out.Flush(); err != nil {
		return err
	}
	r.Counts.Written.Add(r.buffered)
	r.buffered, r.flushed = 0, r.size
	return nil
}

func (r *Recorder) write(q *Request) error {
	r.lines++
	r.line = r.format(r.line[:0], q)
	share := r.config.MaxBytes / int64(r.config.Files)
	n := int64(len(r.line))
	if n > share {
		r.Skip()
		return nil
	}
	if r.rolls && r.size+n > share {
		if err := r.roll(); err != nil {
			r.Counts.Failed.Add(1)
			return err
		}
	}
	if r.out.Available() < len(r.line) { // flush while the buffer has whole lines only
		if err := r.flush(); err != nil {
			r.Counts.Failed.Add(1)
			return err
		}
	}
	if q.BlockSize > 0 {
		r.buffered++
	}
	r.size += n
	_, err := r.out.Write(r.line)
	return err
}

func (r *Recorder) roll() error {
	if err := r.flush(); err != nil {
		return err
	}
	if err := r.file.Close(); err != nil {
		return err
	}
	if err := r.shift(); err != nil {
		return err
	}
	return r.open()
}

// format appends the line of a request.
func (r *Recorder) format(b []byte, q *Request) []byte {
	ms := func(b []byte, name string, d time.Duration) []byte {
		b = append(b, name...)
		return strconv.AppendFloat(b, float64(d.Microseconds())/1e3, 'f', -1, 64)
	}
	if q.BlockSize == 0 {
		return fmt.Appendf(b, `{"event":{"schema":"%s","event_type":"kvepp_unjudged","event_time_unix_ms":%d,`+
			`"event_source":"kvepp","request":{"shadow":{"unjudged":"%s"}}}}`+"\n",
			Schema, q.Ended.UnixMilli(), q.Unjudged)
	}
	model, _ := json.Marshal(q.Model) // a string is always JSON
	b = fmt.Appendf(b, `{"event":{"schema":"%s","event_type":"request_end","event_time_unix_ms":%d,`+
		`"event_source":"kvepp","request":{"request_id":"kvepp-%d","model":%s,"input_tokens":%d,"output_tokens":%d,`,
		Schema, q.Ended.UnixMilli(), r.lines, model, q.Prompt, q.Output)
	if q.Cached >= 0 {
		b = fmt.Appendf(b, `"cached_tokens":%d,`, q.Cached)
	}
	b = fmt.Appendf(b, `"request_received_ms":%d,`, q.Received.UnixMilli())
	if !q.First.IsZero() {
		b = append(ms(b, `"ttft_ms":`, q.First.Sub(q.Received)), ',')
		if q.Output > 1 {
			b = append(ms(b, `"avg_itl_ms":`, q.Ended.Sub(q.First)/time.Duration(q.Output-1)), ',')
		}
	}
	b = ms(b, `"total_time_ms":`, q.Ended.Sub(q.Received))
	b = fmt.Appendf(b, `,"worker":{"prefill_worker_id":%d,"prefill_dp_rank":%d,"decode_worker_id":%d,`+
		`"decode_dp_rank":%d},`, q.Prefill.ID, q.Prefill.Rank, q.Decode.ID, q.Decode.Rank)
	if q.Unjudged != "" || q.Avoided != "" {
		b = fmt.Appendf(b, `"shadow":{"unjudged":"%s","avoided":"%s"},`, q.Unjudged, q.Avoided)
	}
	b = fmt.Appendf(b, `"replay":{"trace_block_size":%d,"input_length":%d,"input_sequence_hashes":[`,
		q.BlockSize, q.Prompt)
	for i, h := range q.Hashes {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendUint(b, r.hide(h), 10)
	}
	return append(b, "]}}}}\n"...)
}

// hide returns the keyed hash of a sequence hash: the first 8 bytes of SHA-256 over the key and the hash. Both have a
// fixed length, so that HMAC's second pass is not needed. The key is random, the same for all files of one Recorder,
// and in memory only, so that readers cannot test whether a prompt that they know was sent.
func (r *Recorder) hide(h kvblock.SequenceHash) uint64 {
	if r.config.plain {
		return uint64(h)
	}
	var text [40]byte
	copy(text[:], r.key[:])
	binary.LittleEndian.PutUint64(text[32:], uint64(h))
	sum := sha256.Sum256(text[:])
	return binary.LittleEndian.Uint64(sum[:])
}
