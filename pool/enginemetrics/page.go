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

	"kvepp/pool"
)

// quantity is a value that kvepp reads from an engine's page.
type quantity uint8

const (
	running quantity = iota // running requests
	waiting                 // waiting requests
	usage                   // fraction (0..1) of KV blocks in use
	cache                   // tokens that the KV cache has room for
	quantities
)

// values are those of one rank, indexed by quantity; NaN: unknown.
type values [quantities]float64

var noValues = values{math.NaN(), math.NaN(), math.NaN(), math.NaN()}

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
// 0.5.21, observability/metrics_collector; Dynamo's mocker 1.6.1, which shows vLLM's.
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
	usage: {{Name: "vllm:kv_cache_usage_perc"}, {Name: "vllm:gpu_cache_usage_perc"}, {Name: "sglang:token_usage"},
		{
			Name: "trtllm_kv_cache_utilization",
		}, {Name: "nv_trt_llm_kv_cache_block_metrics", Label: "kv_cache_block_type", Value: "fraction"}},
	cache: {{Name: "vllm:cache_config_info"}, {Name: "sglang:cache_config_info"}}, // the labels have the value
}

// rankLabels are the labels with the data-parallel rank, of vLLM and of SGLang. Labels of parts of a rank (tp_rank,
// pp_rank) and SGLang's priority are ignored: the parts report equal values, and the greatest value is the total.
var rankLabels = [...]string{"engine", "dp_rank"}

// cacheLabels are the labels with the number of KV blocks and the tokens of each, of vLLM and of SGLang.
var cacheLabels = [...]string{"num_gpu_blocks", "block_size", "num_pages", "page_size"}

// cacheSize is the size of a KV cache as labels say it: the product of two.
type cacheSize struct {
	tokens float64
	labels int
}

// add takes a label.
func (c *cacheSize) add(name, value []byte) {
	if slices.Contains(cacheLabels[:], string(name)) {
		if n, err := strconv.ParseFloat(string(value), 64); err == nil && n > 0 {
			c.tokens, c.labels = c.tokens*n, c.labels+1
		}
	}
}

// value returns the size in tokens; NaN if the labels do not say it.
func (c *cacheSize) value() float64 {
	if c.labels != 2 || math.IsInf(c.tokens, 0) {
		return math.NaN()
	}
	return c.tokens
}

// wanted is one quantity that a metric's name may have.
type wanted struct {
	quantity     quantity
	label, value string
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
		}
		for _, m := range metrics {
			n[m.Name] = append(n[m.Name], wanted{q, m.Label, m.Value})
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
	names names
	in    *bufio.Reader
	ranks []rankValues // ordered by rank; those of the latest read
	label []byte       // scratch: a label's value without escapes
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
	p.ranks = p.ranks[:0]
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
	rank, left, meaning := uint32(0), bytes.TrimLeft(line[end:], " \t"), uint(0)
	size := cacheSize{tokens: 1}
	for i, w := range meanings {
		if w.label == "" {
			meaning |= 1 << i
		}
	}
	if len(left) > 0 && left[0] == '{' {
		left = left[1:]
		for {
			name, value, rest, state := p.nextLabel(left)
			if state == labelsInvalid {
				return
			}
			if left = rest; state == labelsEnded {
				break
			}
			if slices.Contains(rankLabels[:], string(name)) {
				if n, err := strconv.ParseUint(string(value), 10, 32); err == nil {
					rank = uint32(n)
				}
			}
			size.add(name, value)
			for i, w := range meanings {
				if w.label != "" && string(name) == w.label && string(value) == w.value {
					meaning |= 1 << i
				}
			}
		}
	}
	left = bytes.TrimLeft(left, " \t")
	if stop := bytes.IndexAny(left, " \t\r\n"); stop >= 0 {
		left = left[:stop]
	}
	value, err := strconv.ParseFloat(string(left), 64)
	if err != nil || !(value >= 0) || math.IsInf(value, 0) { // excludes NaN, too
		return
	}
	for i, w := range meanings {
		if w.quantity == cache {
			value = size.value()
		}
		if meaning&(1<<i) != 0 && !math.IsNaN(value) {
			p.addValue(rank, w.quantity, value)
		}
	}
}

// labelState is the position in a line's list of labels.
type labelState uint8

const (
	labelFound    labelState = iota // the list has another label
	labelsEnded                     // the list has ended
	labelsInvalid                   // the list is invalid
)

// nextLabel parses the next label of a list, after its opening brace, and returns the rest of the line. name and value
// are valid until the next call.
func (p *page) nextLabel(b []byte) (name, value, rest []byte, _ labelState) {
	b = bytes.TrimLeft(b, " \t,")
	if len(b) > 0 && b[0] == '}' {
		return nil, nil, b[1:], labelsEnded
	}
	equals := bytes.IndexByte(b, '=')
	if equals < 0 {
		return nil, nil, nil, labelsInvalid
	}
	name = bytes.TrimRight(b[:equals], " \t")
	b = bytes.TrimLeft(b[equals+1:], " \t")
	if len(b) == 0 || b[0] != '"' {
		return nil, nil, nil, labelsInvalid
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
		return nil, nil, nil, labelsInvalid
	}
	return name, p.label, b[i+1:], labelFound
}

// addValue stores a value of a rank. Of several values, the greatest counts.
func (p *page) addValue(rank uint32, q quantity, value float64) {
	i, found := slices.BinarySearchFunc(
		p.ranks,
		rank,
		func(r rankValues, rank uint32) int { return int(int64(r.rank) - int64(rank)) },
	)
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

// mergeRanks returns the values of an engine whose ranks are one worker: the sums of the requests and the mean of the
// KV usage.
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
		case q == usage:
			all[q] = sum / float64(n)
		default:
			all[q] = sum
		}
	}
	return all
}
