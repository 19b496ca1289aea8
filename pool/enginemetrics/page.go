package enginemetrics

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"kvepp/kvblock"
	"kvepp/pool"
)

// quantity is a value that kvepp reads from an engine's page.
type quantity uint8

const (
	running     quantity = iota // running requests
	waiting                     // waiting requests
	usage                       // fraction (0..1) of KV blocks in use
	blocks                      // KV blocks of the device
	blockSize                   // tokens of each
	cacheTokens                 // tokens that the blocks have room for: in hybrid models fewer than their product
	adapters                    // LoRA adapters that running requests may have at once
	quantities
)

// values are those of one rank, indexed by quantity; NaN: unknown.
type values [quantities]float64

var noValues = values{math.NaN(), math.NaN(), math.NaN(), math.NaN(), math.NaN(), math.NaN(), math.NaN()}

// rankValues holds the values of one of an engine's ranks.
type rankValues struct {
	rank   uint32
	values values
}

// Metric selects series of an engine: all of a name, or those with one label value. Flags write it as `NAME` or
// `NAME{LABEL=VALUE}`.
type Metric struct {
	Name         string
	Label, Value string // Label "": all series
	info         string // the label that has the value; "": the series' own value
}

// ParseMetric parses a metric in the value of a flag.
func ParseMetric(s string) (Metric, error) {
	name, rest, labelled := strings.Cut(strings.TrimSpace(s), "{")
	m := Metric{Name: strings.TrimSpace(name)}
	if labelled {
		inner, closed := strings.CutSuffix(rest, "}")
		label, value, equals := strings.Cut(inner, "=")
		m.Label, m.Value = strings.TrimSpace(label), strings.Trim(strings.TrimSpace(value), `"`)
		if !closed || !equals || m.Label == "" || strings.ContainsAny(m.Value, `",{}`) {
			return Metric{}, fmt.Errorf("%q must look like NAME or NAME{LABEL=VALUE}", s)
		}
	}
	if m.Name == "" || strings.ContainsAny(m.Name, " \t\"}") {
		return Metric{}, fmt.Errorf("%q must look like NAME or NAME{LABEL=VALUE}", s)
	}
	return m, nil
}

// known holds the metrics of the engines that kvepp supports. A page has those of one engine. If it has several metrics
// for a quantity (an engine may keep an older name), the greatest value counts.
//
// Source: Gateway API Inference Extension, proposal 003 (model server protocol); vllm 0.33.0, v1/metrics; sglang
// 0.5.21, observability/metrics_collector; Dynamo's mocker 1.6.1, which shows vLLM's; llm-d's metrics of TensorRT-LLM.
var known = [quantities][]Metric{
	running: {
		{Name: "vllm:num_requests_running"},
		{Name: "sglang:num_running_reqs"},
		{Name: "trtllm_num_requests_running"},
		{Name: "nv_trt_llm_request_metrics", Label: "request_type", Value: "scheduled"},
	},
	waiting: {
		{Name: "vllm:num_requests_waiting"},
		{Name: "sglang:num_queue_reqs"},
		{Name: "trtllm_num_requests_waiting"},
		{Name: "nv_trt_llm_request_metrics", Label: "request_type", Value: "waiting"},
	},
	usage: {
		{Name: "vllm:kv_cache_usage_perc"},
		{Name: "vllm:gpu_cache_usage_perc"},
		{Name: "sglang:token_usage"},
		{Name: "trtllm_kv_cache_utilization"},
		{Name: "nv_trt_llm_kv_cache_block_metrics", Label: "kv_cache_block_type", Value: "fraction"},
	},
	blocks: {
		{Name: "vllm:cache_config_info", info: "num_gpu_blocks"},
		{Name: "sglang:cache_config_info", info: "num_pages"},
		{Name: "sglang:num_pages"},
		{Name: "trtllm_kv_cache_max_blocks"},
		{Name: "nv_trt_llm_kv_cache_block_metrics", Label: "kv_cache_block_type", Value: "max"},
	},
	blockSize: {
		{Name: "vllm:cache_config_info", info: "block_size"},
		{Name: "sglang:cache_config_info", info: "page_size"},
		{Name: "sglang:page_size"},
		{Name: "trtllm_kv_cache_tokens_per_block"},
		{Name: "nv_trt_llm_kv_cache_block_metrics", Label: "kv_cache_block_type", Value: "tokens_per"},
	},
	cacheTokens: {{Name: "vllm:cache_config_info", info: "kv_cache_size_tokens"}},
	adapters:    {{Name: "vllm:lora_requests_info", info: "max_lora"}, {Name: "sglang:lora_pool_slots_total"}},
}

// rankLabels are the labels with the data-parallel rank, of vLLM and of SGLang. Labels of parts of a rank (tp_rank,
// pp_rank) and SGLang's priority are ignored: the parts report equal values, and the greatest value is the total.
var rankLabels = [...]string{"engine", "dp_rank"}

// wanted is one quantity that a metric's name may have.
type wanted struct {
	quantity quantity
	Metric
}

// names maps a metric's name to the quantities that it may have.
type names map[string][]wanted

// newNames returns the known metrics. A given metric replaces all known ones of its quantity.
func newNames(given [quantities]Metric) names {
	n := names{}
	for q := range quantities {
		metrics := known[q]
		if given[q].Name != "" {
			metrics = []Metric{given[q]}
			metrics[0].info = known[q][0].info
		}
		for _, m := range metrics {
			n[m.Name] = append(n[m.Name], wanted{q, m})
		}
	}
	return n
}

const (
	maxPageBytes = 16 << 20 // of one page; an engine of 8 ranks has less than 1 MB
	maxLineBytes = 64 << 10 // longer lines are skipped; no wanted line is as long
)

// errTooLarge is the error for a page longer than maxPageBytes.
var errTooLarge = errors.New("the page is too large")

// page parses metrics pages. Only one goroutine may use it at a time. It reuses its memory for later pages.
type page struct {
	names  names
	in     *bufio.Reader
	ranks  []rankValues // ordered by rank; those of the latest read
	active activeAdapters
	label  []byte // scratch: a label's value without escapes
}

// metrics returns the sorted names of all wanted metrics.
func (n names) metrics() []string { return slices.Sorted(maps.Keys(n)) }

func newPage(n names) *page { return &page{names: n, in: bufio.NewReaderSize(nil, maxLineBytes)} }

// read returns the values of each rank, ordered by rank. Series without a rank label count for rank 0. The result is
// valid until the next call. Invalid lines and unknown metrics are skipped.
//
// It only parses lines with wanted names, which takes a fiftieth of the time of a complete parser of the text format.
//
// Errors: errTooLarge, and r's own.
func (p *page) read(r io.Reader) ([]rankValues, error) {
	limited := io.LimitedReader{R: r, N: maxPageBytes + 1}
	p.in.Reset(&limited)
	p.ranks, p.active = p.ranks[:0], activeAdapters{}
	whole := true // the last piece ended its line
	for {
		line, err := p.in.ReadSlice('\n')
		if begins := whole; !errors.Is(err, bufio.ErrBufferFull) && begins {
			p.line(line)
		}
		whole = !errors.Is(err, bufio.ErrBufferFull)
		switch {
		case limited.N == 0:
			return nil, errTooLarge
		case errors.Is(err, io.EOF):
			return p.ranks, nil
		case err != nil && !errors.Is(err, bufio.ErrBufferFull):
			return nil, err
		}
	}
}

// cache returns the tokens of a KV block, and how many of them the device has room for; NaN: not known.
func (v *values) cache() (size, count float64) {
	size, count = v[blockSize], v[blocks]
	if tokens := v[cacheTokens]; tokens > 0 {
		count = min(count, math.Ceil(tokens/size))
	}
	return size, count
}

// ReadCache returns the tokens of a KV block, and the device's blocks, of a rank by a metrics page; 0, 0 if it does not
// say both.
func ReadCache(r io.Reader, rank uint32) (size, count int, err error) {
	ranks, err := newPage(newNames([quantities]Metric{})).read(r)
	if i := slices.IndexFunc(ranks, func(v rankValues) bool { return v.rank == rank }); i >= 0 {
		ranks = ranks[i : i+1]
	}
	if len(ranks) == 0 {
		return 0, 0, err
	}
	all := mergeRanks(ranks)
	tokens, n := all.cache()
	if !(tokens <= kvblock.MaxBlockSize && n <= pool.MaxCacheBlocks) { // also NaN
		return 0, 0, err
	}
	return int(tokens), int(n), err
}

// line parses `NAME VALUE` or `NAME{LABEL="VALUE",...} VALUE`, with or without a timestamp after it.
func (p *page) line(line []byte) {
	if len(line) == 0 || line[0] == '#' {
		return
	}
	end := 0
	for end < len(line) && line[end] != '{' && line[end] != ' ' && line[end] != '\t' {
		end++
	}
	meanings := p.names[string(line[:end])]
	if meanings == nil {
		return
	}
	left, s := bytes.TrimLeft(line[end:], " \t"), series{info: noValues}
	for i, w := range meanings {
		if w.Label == "" {
			s.meaning |= 1 << i
		}
	}
	if len(left) > 0 && left[0] == '{' {
		left = left[1:]
		for {
			name, value, rest := p.nextLabel(left)
			if rest == nil {
				return
			}
			if left = rest; name == nil {
				break
			}
			s.label(meanings, name, value)
		}
	}
	left = bytes.TrimLeft(left, " \t")
	if stop := bytes.IndexAny(left, " \t\r\n"); stop >= 0 {
		left = left[:stop]
	}
	own := number(left)
	for i, w := range meanings {
		value := own
		if w.info != "" {
			value = s.info[w.quantity]
		}
		if s.meaning&(1<<i) != 0 && !math.IsNaN(value) {
			p.addValue(s.rank, w.quantity, value)
		}
		if w.quantity == adapters && own >= p.active.at { // not NaN
			p.active = activeAdapters{own, value, string(s.adapters)}
		}
	}
}

// series is what a line's labels say.
type series struct {
	rank     uint32
	meaning  uint   // bits: the series is of the quantity in names with that index
	info     values // of the quantities whose value is a label
	adapters []byte // names, each with a comma behind it
}

// label adds a label of a series with these meanings.
func (s *series) label(meanings []wanted, name, value []byte) {
	if slices.Contains(rankLabels[:], string(name)) {
		if n, err := strconv.ParseUint(string(value), 10, 32); err == nil {
			s.rank = uint32(n)
		}
	}
	for i, w := range meanings {
		switch {
		case w.Label != "" && string(name) == w.Label && string(value) == w.Value:
			s.meaning |= 1 << i
		case w.info != "" && string(name) == w.info:
			s.info[w.quantity] = number(value)
		case w.quantity == adapters &&
			(string(name) == "running_lora_adapters" || string(name) == "waiting_lora_adapters"):
			s.adapters = append(append(s.adapters, value...), ',')
		}
	}
}

// number reads a finite number of at least 0; NaN if it is none.
func number(text []byte) float64 {
	value, err := strconv.ParseFloat(string(text), 64)
	if err != nil || !(value >= 0) || math.IsInf(value, 0) {
		return math.NaN()
	}
	return value
}

// nextLabel parses the next label of a list, after its opening brace, and returns the rest of the line. name is nil if
// the list has ended, rest if it is invalid. name and value are valid until the next call.
func (p *page) nextLabel(b []byte) (name, value, rest []byte) {
	b = bytes.TrimLeft(b, " \t,")
	if len(b) > 0 && b[0] == '}' {
		return nil, nil, b[1:]
	}
	equals := bytes.IndexByte(b, '=')
	if equals < 0 {
		return nil, nil, nil
	}
	name = bytes.TrimRight(b[:equals], " \t")
	b = bytes.TrimLeft(b[equals+1:], " \t")
	if len(b) == 0 || b[0] != '"' {
		return nil, nil, nil
	}
	p.label = p.label[:0]
	i := 1
	for ; i < len(b) && b[i] != '"'; i++ {
		c := b[i]
		if c == '\\' && i+1 < len(b) {
			if i++; b[i] == 'n' {
				c = '\n'
			} else {
				c = b[i]
			}
		}
		p.label = append(p.label, c)
	}
	if i == len(b) {
		return nil, nil, nil
	}
	return name, p.label, b[i+1:]
}

// addValue stores a value of a rank. Of several values, the greatest counts.
func (p *page) addValue(rank uint32, q quantity, value float64) {
	i, found := slices.BinarySearchFunc(p.ranks, rank,
		func(r rankValues, rank uint32) int { return int(int64(r.rank) - int64(rank)) })
	if !found {
		if len(p.ranks) == pool.MaxRanks {
			return
		}
		p.ranks = slices.Insert(p.ranks, i, rankValues{rank, noValues})
	}
	if q == usage {
		value = min(value, 1)
	}
	if t := &p.ranks[i].values[q]; !(*t >= value) {
		*t = value
	}
}

// mergeRanks returns the values of an engine whose ranks are one worker: the sums of the requests and the blocks, and
// the means of the KV usage and the block size.
func mergeRanks(ranks []rankValues) values {
	if len(ranks) == 1 {
		return ranks[0].values
	}
	all := noValues
	for q := range quantities {
		sum, n := 0.0, 0
		for i := range ranks {
			if v := ranks[i].values[q]; !math.IsNaN(v) {
				sum += v
				n++
			}
		}
		switch {
		case n == 0:
		case q == usage, q == blockSize:
			all[q] = sum / float64(n)
		default:
			all[q] = sum
		}
	}
	return all
}
