package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"container/list"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"slices"
	"time"

	"kvepp/kvblock"
)

// Format is the format of a trace file.
type Format string

// The formats. All are JSON lines, optionally compressed by gzip.
const (
	// Mooncake has one request a line, with the ids of its prompt's blocks. A row without timestamp and with a delay
	// is a later turn of its session.
	Mooncake Format = "mooncake"
	// MooncakeDelta is Mooncake where a later turn of a session has only its new input. The prompts and responses
	// before it are put before that.
	MooncakeDelta Format = "mooncake-delta"
	// AgenticMooncake has the requests of agents in the blocks of Mooncake, after a header. A request arrives when
	// those that it depends on were sent or have ended.
	AgenticMooncake Format = "agentic_mooncake"
	// Dynamo is the request trace of Dynamo's frontend and of `kvepp serve --record`, dynamo.request.trace.v1. It has
	// requests in the order of their ends; see [Sorted].
	Dynamo Format = "dynamo"
	// Kvepp is another name of Dynamo.
	Kvepp Format = "kvepp"
)

// Formats returns the names of all formats.
func Formats() []string {
	return []string{string(Mooncake), string(MooncakeDelta), string(AgenticMooncake), string(Dynamo), string(Kvepp)}
}

// Limits of a trace. They bound what one line, and what a Reader keeps of earlier lines, can take.
const (
	maxLine     = 16 << 20 // bytes
	maxTokens   = 16 << 20 // of a prompt, and of a response
	maxSessions = 4 << 20
	// maxSessionBlocks is how many blocks of sessions a Reader of MooncakeDelta keeps: 256 MiB. Those of the least
	// recently used sessions make room.
	maxSessionBlocks = 16 << 20
	// maxSkipped is how many blank lines may follow one another.
	maxSkipped = 1 << 20
	// maxPriority bounds priorities, which package queue counts as seconds.
	maxPriority = 1 << 31
)

// Request is one request of a trace.
type Request struct {
	// At is when the request arrives, since the trace's own zero. For a later turn of a session with a Delay it is
	// ignored.
	At time.Duration
	// Delay is the time between the end of the session's turn before and the arrival. -1: the request arrives At.
	Delay time.Duration
	// Session is the conversation. Empty: the request has none.
	Session string
	// ID is the request's name in the trace; may be empty.
	ID string
	// Chain has the sequence hashes of the full blocks of the prompt and, if the trace tells the response, of the
	// response, in the engine's block size. Locals has their local hashes.
	Chain  []kvblock.SequenceHash
	Locals []kvblock.LocalHash
	// Prompt and Output are tokens; Output is at least 1.
	Prompt, Output int
	// Priority and StrictPriority are as in package queue.
	Priority       float64
	StrictPriority uint32
	// Class is the policy class that the request asks for.
	Class string

	// Served is what a dynamo trace says of how the request was served. nil: it names no worker.
	Served *Served

	ended     time.Duration // when a dynamo trace says that it ended, else At; like At
	continued bool          // by a later turn of its conversation, see Recording.Replayed

	// Of an agentic trace: those that wait for this request, and how many this one waits for. The simulation counts
	// waits down and raises ready, the earliest arrival.
	dependents []dependent
	waits      int
	ready      time.Duration
	read       bool // by the simulation

	late time.Duration // the simulation's Config.ArrivalJitter: how much later it arrives
}

// Served is how a recorded request was served.
type Served struct {
	// Worker generated the response. Prefilled: another one computed the prompt.
	Worker    WorkerID
	Prefilled bool
	// Cached is how many of the prompt's tokens the engine reported as cached. -1: it reported nothing.
	Cached int
	// TTFT is the time from the arrival to the first token, and Took that to the end. 0: not known.
	TTFT, Took time.Duration

	block int // tokens
}

// WorkerID is a worker as Dynamo names it.
type WorkerID struct {
	Instance uint64 `json:"instance_id"`
	Rank     uint32 `json:"dp_rank"`
}

func (w WorkerID) String() string { return fmt.Sprintf("%d/%d", w.Instance, w.Rank) }

// Reader reads the requests of a trace in the order of the file. It holds one line, and with sessions the hashes that
// their later turns need, both within the limits above.
type Reader struct {
	name    string
	format  Format
	lines   *bufio.Reader
	line    int
	options ReaderOptions

	sessions map[string]*turns
	recent   list.List // of *turns with a history, the least recently used first; only of MooncakeDelta
	blocks   int       // in the histories
	outputs  uint32
	block    int // of a dynamo trace; 0: not known yet
	tokens   []kvblock.Token
	graph    *graph // of AgenticMooncake; nil: not read yet
}

// turns is what is known of a session's earlier turns.
type turns struct {
	history
	count   int
	recent  *list.Element // of Reader.recent; nil: no history is kept
	dropped bool          // the history had to make room
}

// history is a sequence of tokens: the hashes of its full blocks, and the tokens that follow them. The slices are only
// appended to, so that requests can share them.
type history struct {
	chain  []kvblock.SequenceHash
	locals []kvblock.LocalHash
	rest   []kvblock.Token
	tokens int
}

// extend appends tokens.
func (h *history) extend(tokens []kvblock.Token, blockSize int) {
	h.tokens += len(tokens)
	if len(h.rest) > 0 {
		tokens = slices.Concat(h.rest, tokens)
	}
	from := len(h.locals)
	h.locals = kvblock.AppendLocalHashes(h.locals, tokens, kvblock.HashOptions{BlockSize: blockSize})
	for _, l := range h.locals[from:] {
		if n := len(h.chain); n == 0 {
			h.chain = append(h.chain, kvblock.FirstSequenceHash(l))
		} else {
			h.chain = append(h.chain, kvblock.NextSequenceHash(h.chain[n-1], l))
		}
	}
	h.rest = slices.Clone(tokens[(len(h.locals)-from)*blockSize:])
}

// ReaderOptions say how a trace is read.
type ReaderOptions struct {
	// BlockSize is the engine's block size in tokens. 0: that of the trace, which must be of the format Dynamo.
	BlockSize int
	// TraceBlockSize is how many tokens one hash id of a mooncake row stands for; 0: 512, as in Mooncake's own traces.
	TraceBlockSize int
	// Shadow counts what kvepp in shadow mode says of a dynamo trace. Without its maps that is not counted.
	Shadow Shadow
}

// Shadow is what kvepp in shadow mode says of the requests of a recording, also of those that it could not record.
type Shadow struct {
	// Unjudged counts, by reason, the requests for which it could not say what it would have chosen, and those without
	// a worker. Avoided counts those that went to a worker that kvepp would not have used then, by why: ejected.
	Unjudged map[string]int `json:"not_judged"`
	Avoided  map[string]int `json:"to_a_worker_that_kvepp_avoided"`
}

// maxReasons bounds the maps of Shadow.
const maxReasons = 100

var reasonForm = regexp.MustCompile(`^[a-z_]{1,40}$`)

// count counts a reason. Any program may have written it, so one that is not in the form of kvepp's is unreadable.
func count(in map[string]int, reason string) {
	if in == nil || reason == "" {
		return
	}
	if !reasonForm.MatchString(reason) || in[reason] == 0 && len(in) >= maxReasons {
		reason = "unreadable"
	}
	in[reason]++
}

// Open opens a trace file. The caller closes it.
func Open(path string, format Format, o ReaderOptions) (*Reader, io.Closer, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	r, err := NewReader(path, f, format, o)
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return r, f, nil
}

// NewReader reads a trace. name is for errors. A trace that begins as gzip does is decompressed.
func NewReader(name string, from io.Reader, format Format, o ReaderOptions) (*Reader, error) {
	if format == Kvepp {
		format = Dynamo
	}
	if o.TraceBlockSize == 0 {
		o.TraceBlockSize = 512
	}
	switch {
	case (o.BlockSize < 1 && format != Dynamo) || o.BlockSize > kvblock.MaxBlockSize:
		return nil, fmt.Errorf("a block size of %d tokens: must be 1 to %d", o.BlockSize, kvblock.MaxBlockSize)
	case o.TraceBlockSize < 1 || o.TraceBlockSize > maxTokens:
		return nil, fmt.Errorf("a trace block size of %d tokens: must be 1 to %d", o.TraceBlockSize, maxTokens)
	case !slices.Contains(Formats(), string(format)):
		return nil, fmt.Errorf("trace format %q: must be one of %q", format, Formats())
	}
	packed := &counter{from: from}
	lines := bufio.NewReaderSize(packed, 1<<16)
	if magic, _ := lines.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(lines)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		lines = bufio.NewReaderSize(&unpacker{packed: packed, gzip: z}, 1<<16)
	}
	return &Reader{
		name:     name,
		format:   format,
		lines:    lines,
		options:  o,
		sessions: map[string]*turns{},
	}, nil
}

// Next returns the next request. Errors: io.EOF at the end; others name the file, the line and the reason.
func (r *Reader) Next() (*Request, error) {
	if r.format == AgenticMooncake {
		return r.nextOfGraph()
	}
	for {
		text, err := r.nextLine()
		if err != nil {
			return nil, err
		}
		var q *Request
		if r.format == Dynamo {
			q, err = r.dynamoRow(text)
		} else {
			q, err = r.mooncakeRow(text)
		}
		if err != nil {
			return nil, r.at(r.line, err)
		}
		if q != nil {
			return q, nil
		}
	}
}

// at adds the file and a line to an error.
func (r *Reader) at(line int, err error) error {
	return fmt.Errorf("%s, line %d: %w", r.name, line, err)
}

// nextLine returns the next line that is not blank, until the next call. Errors as of Next.
func (r *Reader) nextLine() ([]byte, error) {
	for skipped := 0; ; skipped++ {
		text, err := r.readLine()
		switch {
		case errors.Is(err, io.EOF):
			return nil, io.EOF
		case err == nil && skipped == maxSkipped:
			err = fmt.Errorf("%d blank lines: is this a trace?", skipped)
		case errors.Is(err, io.ErrUnexpectedEOF):
			err = errors.New("the gzip data ends early: the file is cut off")
		}
		if err != nil {
			return nil, r.at(r.line, err)
		}
		if len(bytes.TrimSpace(text)) > 0 {
			return text, nil
		}
	}
}

// readLine returns the next line. It is valid until the next call.
func (r *Reader) readLine() ([]byte, error) {
	r.line++
	text, err := r.lines.ReadSlice('\n')
	if err == nil || (err == io.EOF && len(text) > 0) {
		return text, nil
	}
	if !errors.Is(err, bufio.ErrBufferFull) {
		return nil, err
	}
	long := bytes.Clone(text)
	for errors.Is(err, bufio.ErrBufferFull) {
		text, err = r.lines.ReadSlice('\n')
		if long = append(long, text...); len(long) > maxLine {
			return nil, fmt.Errorf("the line is longer than %d bytes", maxLine)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return long, err
}

// mooncakeRow is a line of Mooncake's formats. Source: dynamo 1.6.1, docs of offline replay; Mooncake's traces.
type mooncakeRow struct {
	HashIDs        *[]uint64 `json:"hash_ids"`
	InputLength    *int      `json:"input_length"`
	InputTokens    *int      `json:"input_tokens"`
	OutputLength   *int      `json:"output_length"`
	OutputTokens   *int      `json:"output_tokens"`
	Timestamp      *float64  `json:"timestamp"`
	CreatedTime    *float64  `json:"created_time"`
	Delay          *float64  `json:"delay"`
	DelayMS        *float64  `json:"delay_ms"`
	SessionID      string    `json:"session_id"`
	RequestID      string    `json:"request_id"`
	Priority       float64   `json:"priority"`
	StrictPriority uint32    `json:"strict_priority"`
	PolicyClass    string    `json:"policy_class"`
	OutputTokenIDs []uint32  `json:"output_token_ids"`
}

func (r *Reader) mooncakeRow(text []byte) (*Request, error) {
	var row mooncakeRow
	if err := json.Unmarshal(text, &row); err != nil {
		return nil, jsonError(err)
	}
	return r.mooncakeRequest(&row)
}

func (r *Reader) mooncakeRequest(row *mooncakeRow) (*Request, error) {
	if row.HashIDs == nil {
		return nil, errors.New("no hash_ids: is this a mooncake trace? --format names the others")
	}
	output, err := oneOf("output_length", row.OutputLength, row.OutputTokens, 0)
	if err != nil {
		return nil, err
	}
	most := len(*row.HashIDs) * r.options.TraceBlockSize
	input, err := oneOf("input_length", row.InputLength, row.InputTokens, most)
	if err != nil {
		return nil, err
	}
	if input > most {
		return nil, fmt.Errorf("input_length %d is more than its %d hash ids of %d tokens; set --trace-block-size",
			input, len(*row.HashIDs), r.options.TraceBlockSize)
	}
	at, err := milliseconds("timestamp", row.Timestamp, row.CreatedTime)
	if err != nil {
		return nil, err
	}
	delay, err := milliseconds("delay", row.Delay, row.DelayMS)
	if err != nil {
		return nil, err
	}
	if !(math.Abs(row.Priority) <= maxPriority) {
		return nil, fmt.Errorf("priority %v: must be -%d to %d", row.Priority, maxPriority, maxPriority)
	}
	q := &Request{
		At:             max(at, 0),
		Delay:          -1,
		Session:        row.SessionID,
		ID:             row.RequestID,
		Output:         max(output, 1),
		Priority:       row.Priority,
		StrictPriority: row.StrictPriority,
		Class:          row.PolicyClass,
	}
	session, err := r.turn(q, delay)
	if err != nil {
		return nil, err
	}
	r.tokens = r.appendTokens(r.tokens[:0], *row.HashIDs, input)
	return q, r.hash(q, row.OutputTokenIDs, session)
}

// turn counts a turn of a request's session; nil: it has none.
func (r *Reader) turn(q *Request, delay time.Duration) (*turns, error) {
	if q.Session == "" {
		return nil, nil
	}
	t := r.sessions[q.Session]
	switch {
	case t == nil && len(r.sessions) == maxSessions:
		return nil, fmt.Errorf("more than %d sessions: replay the file in parts", maxSessions)
	case t == nil:
		t = &turns{}
		r.sessions[q.Session] = t
	case t.dropped:
		return nil, fmt.Errorf("a turn of the session %.40q, whose prompts had to make room: kvepp keeps %d blocks of "+
			"sessions; put the turns of a session closer together, or set a greater --block-size", q.Session,
			maxSessionBlocks)
	}
	if t.count > 0 && delay >= 0 {
		q.Delay = delay
	}
	t.count++
	if r.format != MooncakeDelta {
		return nil, nil
	}
	return t, nil
}

// appendTokens appends the first n tokens of hash ids. An id below 2^31 is its block's token; the tokens of others
// alternate between its halves. Dynamo numbers ids by first appearance instead, which takes a table of all ids; equal
// blocks have equal tokens either way.
func (r *Reader) appendTokens(tokens []kvblock.Token, ids []uint64, n int) []kvblock.Token {
	for _, id := range ids {
		even, odd := kvblock.Token(id), kvblock.Token(id>>32)
		if id < 1<<31 {
			odd = even
		}
		for i := range min(n, r.options.TraceBlockSize) {
			if i%2 == 0 {
				tokens = append(tokens, even)
			} else {
				tokens = append(tokens, odd)
			}
		}
		if n -= r.options.TraceBlockSize; n <= 0 {
			break
		}
	}
	return tokens
}

// hash sets the hashes of a request whose prompt is r.tokens, after a session's history. A response that the trace
// tells, or that a later turn of the session continues, is hashed too.
func (r *Reader) hash(q *Request, output []uint32, session *turns) error {
	h := history{}
	if session != nil {
		h = session.history
	}
	if q.Prompt = h.tokens + len(r.tokens); q.Prompt < 1 || q.Prompt > maxTokens {
		return fmt.Errorf("a prompt of %d tokens: must be 1 to %d", q.Prompt, maxTokens)
	}
	if len(output) > 0 {
		for _, t := range output[:min(len(output), q.Output)] {
			r.tokens = append(r.tokens, kvblock.Token(t))
		}
	} else if session != nil {
		for range q.Output { // a response that no other request has
			r.outputs++
			r.tokens = append(r.tokens, kvblock.Token(math.MaxUint32-r.outputs%(1<<31)))
		}
	}
	h.extend(r.tokens, r.options.BlockSize)
	q.Chain, q.Locals = slices.Clip(h.chain), slices.Clip(h.locals)
	if session != nil {
		r.keep(session, h)
	}
	return nil
}

// keep keeps the history of a session for its later turns.
func (r *Reader) keep(t *turns, h history) {
	r.blocks += len(h.chain) - len(t.chain)
	t.history = h
	if t.recent == nil {
		t.recent = r.recent.PushBack(t)
	} else {
		r.recent.MoveToBack(t.recent)
	}
	for r.blocks > maxSessionBlocks {
		oldest := r.recent.Remove(r.recent.Front()).(*turns)
		r.blocks -= len(oldest.chain)
		*oldest = turns{dropped: true}
	}
}

// dynamoRow is a line of dynamo.request.trace.v1, without what it says of text.
type dynamoRow struct {
	Event struct {
		Schema       string  `json:"schema"`
		Type         string  `json:"event_type"`
		Ended        float64 `json:"event_time_unix_ms"`
		AgentContext struct {
			SessionID string `json:"session_id"`
		} `json:"agent_context"`
		Request *struct {
			ID       string   `json:"request_id"`
			Output   *int     `json:"output_tokens"`
			Received *float64 `json:"request_received_ms"`
			Cached   *int     `json:"cached_tokens"`
			TTFT     *float64 `json:"ttft_ms"`
			Took     *float64 `json:"total_time_ms"`
			Worker   *struct {
				Prefill     *uint64 `json:"prefill_worker_id"`
				PrefillRank uint32  `json:"prefill_dp_rank"`
				Decode      *uint64 `json:"decode_worker_id"`
				DecodeRank  uint32  `json:"decode_dp_rank"`
			} `json:"worker"`
			Shadow struct{ Unjudged, Avoided string } `json:"shadow"`
			Replay *struct {
				Block  int       `json:"trace_block_size"`
				Length int       `json:"input_length"`
				Hashes *[]uint64 `json:"input_sequence_hashes"`
			} `json:"replay"`
		} `json:"request"`
	} `json:"event"`
}

func (r *Reader) dynamoRow(text []byte) (*Request, error) {
	var row dynamoRow
	if err := json.Unmarshal(text, &row); err != nil {
		return nil, jsonError(err)
	}
	e := &row.Event
	if e.Schema != "dynamo.request.trace.v1" {
		return nil, fmt.Errorf("schema %q: must be dynamo.request.trace.v1", e.Schema)
	}
	if e.Request != nil {
		count(r.options.Shadow.Unjudged, e.Request.Shadow.Unjudged)
		count(r.options.Shadow.Avoided, e.Request.Shadow.Avoided)
	}
	if e.Type != "request_end" {
		return nil, nil
	}
	if e.Request == nil || e.Request.Replay == nil || e.Request.Replay.Hashes == nil || e.Request.Received == nil {
		return nil, errors.New("a request_end without request.replay or request_received_ms cannot be replayed")
	}
	in := e.Request.Replay
	switch {
	case in.Block < 1 || in.Block > kvblock.MaxBlockSize:
		return nil, fmt.Errorf("trace_block_size %d: must be 1 to %d", in.Block, kvblock.MaxBlockSize)
	case r.block != 0 && in.Block != r.block:
		return nil, fmt.Errorf("trace_block_size %d after %d: all rows of a trace must have one", in.Block, r.block)
	case r.options.BlockSize != 0 && in.Block != r.options.BlockSize:
		return nil, fmt.Errorf("the trace has blocks of %d tokens; set --block-size=%d", in.Block, in.Block)
	case in.Length < 1 || in.Length > maxTokens:
		return nil, fmt.Errorf("input_length %d: must be 1 to %d", in.Length, maxTokens)
	case len(*in.Hashes) < in.Length/in.Block || len(*in.Hashes) > in.Length/in.Block+1:
		return nil, fmt.Errorf("%d input_sequence_hashes for %d tokens in blocks of %d", len(*in.Hashes), in.Length,
			in.Block)
	}
	r.block = in.Block
	at, err := milliseconds("request_received_ms", e.Request.Received, nil)
	if err != nil {
		return nil, err
	}
	ended, err := milliseconds("event_time_unix_ms", &e.Ended, nil)
	if err != nil {
		return nil, err
	}
	q := &Request{
		At:      at,
		ended:   max(at, ended),
		Delay:   -1,
		Session: e.AgentContext.SessionID,
		ID:      e.Request.ID,
		Prompt:  in.Length,
		Output:  1,
	}
	if e.Request.Output != nil {
		q.Output = min(max(*e.Request.Output, 1), maxTokens)
	}
	// Events carry local hashes, from which an index computes sequence hashes. Here only sequence hashes are known, so
	// each serves as the local hash of its block: equal prefixes stay equal, and others stay different.
	for _, h := range (*in.Hashes)[:in.Length/in.Block] {
		q.Locals = append(q.Locals, kvblock.LocalHash(h))
	}
	q.Chain = kvblock.AppendSequenceHashes(nil, q.Locals)
	if w := e.Request.Worker; w != nil && w.Decode != nil {
		q.Served = &Served{Worker: WorkerID{*w.Decode, w.DecodeRank}, Cached: -1, block: in.Block}
		q.Served.Prefilled = w.Prefill != nil && WorkerID{*w.Prefill, w.PrefillRank} != q.Served.Worker
		if c := e.Request.Cached; c != nil {
			q.Served.Cached = min(max(*c, 0), q.Prompt)
		}
		ttft, err1 := milliseconds("ttft_ms", e.Request.TTFT, nil)
		took, err2 := milliseconds("total_time_ms", e.Request.Took, nil)
		if err := cmp.Or(err1, err2); err != nil {
			return nil, err
		}
		q.Served.TTFT, q.Served.Took = max(ttft, 0), max(took, 0)
	} else {
		count(r.options.Shadow.Unjudged, "no_worker")
	}
	return q, nil
}

// oneOf returns the value of a field with two names.
func oneOf(name string, a, b *int, fallback int) (int, error) {
	if a == nil {
		a = b
	}
	switch {
	case a != nil && (*a < 0 || *a > maxTokens):
		return 0, fmt.Errorf("%s %d: must be 0 to %d", name, *a, maxTokens)
	case a != nil:
		return *a, nil
	case fallback == 0:
		return 0, fmt.Errorf("no %s", name)
	}
	return fallback, nil
}

// maxMilliseconds keeps times within a time.Duration.
const maxMilliseconds = float64(math.MaxInt64/int64(time.Millisecond)) / 4

// milliseconds returns the time of a field with two names; -1: it is missing.
func milliseconds(name string, a, b *float64) (time.Duration, error) {
	if a == nil {
		a = b
	}
	if a == nil {
		return -1, nil
	}
	if !(*a >= 0 && *a <= maxMilliseconds) {
		return 0, fmt.Errorf("%s %v: must be milliseconds of at least 0", name, *a)
	}
	return time.Duration(*a * float64(time.Millisecond)), nil
}

func jsonError(err error) error {
	if errors.Is(err, io.ErrUnexpectedEOF) || err.Error() == "unexpected end of JSON input" {
		return errors.New("the line ends in the middle of its JSON: the file is cut off")
	}
	return err
}
