package replay

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
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
	// MooncakeDelta is Mooncake where a later turn of a session has only its new input. The prompts and answers before
	// it are put before that.
	MooncakeDelta Format = "mooncake-delta"
	// Dynamo is the request trace of Dynamo's frontend and of `kvepp serve --record`, dynamo.request.trace.v1. It has
	// requests in the order of their ends; see [Sorted].
	Dynamo Format = "dynamo"
	// Kvepp is another name of Dynamo.
	Kvepp Format = "kvepp"
)

// Formats returns the names of all formats.
func Formats() []string {
	return []string{string(Mooncake), string(MooncakeDelta), string(Dynamo), string(Kvepp)}
}

// Limits of a trace. They bound what one line can take.
const (
	maxLine   = 16 << 20 // bytes
	maxTokens = 16 << 20 // of a prompt, and of an answer
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
	// Chain has the sequence hashes of the full blocks of the prompt and, if the trace tells the answer, of the answer,
	// in the engine's block size. Locals has their local hashes.
	Chain  []kvblock.SequenceHash
	Locals []kvblock.LocalHash
	// Prompt and Output are tokens; Output is at least 1.
	Prompt, Output int
	// Priority and StrictPriority are as in package queue.
	Priority       float64
	StrictPriority uint32
	// Class is the policy class that the request asks for.
	Class string

	ended time.Duration // when a dynamo trace says that it ended, else At; like At
}

// Reader reads the requests of a trace in the order of the file. It holds one line, and with sessions what their later
// turns need.
type Reader struct {
	name    string
	format  Format
	lines   *bufio.Reader
	line    int
	options ReaderOptions

	numbers  map[uint64]kvblock.Token // of hash ids, by first appearance
	sessions map[string]*turns
	answers  uint32
	block    int // of a dynamo trace; 0: not known yet
	tokens   []kvblock.Token
}

// turns is what is known of a session's earlier turns.
type turns struct {
	count  int
	tokens []kvblock.Token // of MooncakeDelta: prompts and answers so far
}

// ReaderOptions say how a trace is read.
type ReaderOptions struct {
	// BlockSize is the engine's block size in tokens.
	BlockSize int
	// TraceBlockSize is how many tokens one hash id of a mooncake row stands for; 0: 512, as in Mooncake's own traces.
	TraceBlockSize int
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
	case o.BlockSize < 1 || o.BlockSize > kvblock.MaxBlockSize:
		return nil, fmt.Errorf("a block size of %d tokens: must be 1 to %d", o.BlockSize, kvblock.MaxBlockSize)
	case o.TraceBlockSize < 1 || o.TraceBlockSize > maxTokens:
		return nil, fmt.Errorf("a trace block size of %d tokens: must be 1 to %d", o.TraceBlockSize, maxTokens)
	case format != Mooncake && format != MooncakeDelta && format != Dynamo:
		return nil, fmt.Errorf("trace format %q: must be one of %q", format, Formats())
	}
	lines := bufio.NewReaderSize(from, 1<<16)
	if magic, _ := lines.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		z, err := gzip.NewReader(lines)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		lines = bufio.NewReaderSize(z, 1<<16)
	}
	return &Reader{
		name:     name,
		format:   format,
		lines:    lines,
		options:  o,
		numbers:  map[uint64]kvblock.Token{},
		sessions: map[string]*turns{},
	}, nil
}

// Next returns the next request. Errors: io.EOF at the end; others name the file, the line and the reason.
func (r *Reader) Next() (*Request, error) {
	for {
		text, err := r.readLine()
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		var q *Request
		if err == nil {
			if len(bytes.TrimSpace(text)) == 0 {
				continue
			}
			if r.format == Dynamo {
				q, err = r.dynamoRow(text)
			} else {
				q, err = r.mooncakeRow(text)
			}
		}
		if err != nil {
			return nil, fmt.Errorf("%s, line %d: %w", r.name, r.line, err)
		}
		if q != nil {
			return q, nil
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
	var session *turns
	if q.Session != "" {
		if session = r.sessions[q.Session]; session == nil {
			session = &turns{}
			r.sessions[q.Session] = session
		}
		if session.count > 0 && delay >= 0 {
			q.Delay = delay
		}
		session.count++
	}
	r.tokens = r.tokens[:0]
	if r.format == MooncakeDelta && session != nil {
		r.tokens = append(r.tokens, session.tokens...)
	}
	r.appendTokens(*row.HashIDs, input)
	if len(r.tokens) == 0 || len(r.tokens) > maxTokens {
		return nil, fmt.Errorf("a prompt of %d tokens: must be 1 to %d", len(r.tokens), maxTokens)
	}
	q.Prompt = len(r.tokens)
	r.hash(q, row.OutputTokenIDs, session)
	return q, nil
}

// appendTokens appends the tokens of hash ids: each id's number, repeated for its block.
func (r *Reader) appendTokens(ids []uint64, n int) {
	for _, id := range ids {
		number, ok := r.numbers[id]
		if !ok {
			number = kvblock.Token(len(r.numbers))
			r.numbers[id] = number
		}
		for range min(n, r.options.TraceBlockSize) {
			r.tokens = append(r.tokens, number)
		}
		if n -= r.options.TraceBlockSize; n <= 0 {
			return
		}
	}
}

// hash sets the hashes of a request whose prompt is r.tokens. An answer that the trace tells, or that a later turn of
// MooncakeDelta continues, is hashed too.
func (r *Reader) hash(q *Request, answer []uint32, session *turns) {
	if len(answer) > 0 {
		for _, t := range answer[:min(len(answer), q.Output)] {
			r.tokens = append(r.tokens, kvblock.Token(t))
		}
	} else if r.format == MooncakeDelta && session != nil {
		for range q.Output { // an answer that no other request has
			r.answers++
			r.tokens = append(r.tokens, kvblock.Token(math.MaxUint32-r.answers))
		}
	}
	q.Locals = kvblock.AppendLocalHashes(nil, r.tokens, kvblock.HashOptions{BlockSize: r.options.BlockSize})
	q.Chain = kvblock.AppendSequenceHashes(nil, q.Locals)
	if r.format == MooncakeDelta && session != nil {
		session.tokens = append(session.tokens[:0], r.tokens...)
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
			Replay   *struct {
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
	case in.Block != r.options.BlockSize:
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
