package enginemetrics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
)

// formatRanks formats the values of a page.
func formatRanks(ranks []rankValues) string {
	var b strings.Builder
	for _, r := range ranks {
		fmt.Fprintf(
			&b,
			"%d: running %v, waiting %v, usage %.6v\n",
			r.rank,
			r.values[running],
			r.values[waiting],
			r.values[usage],
		)
	}
	return b.String()
}

// Pages of real engines, under load. HELP lines are cut behind the name.
var pages = []struct{ file, want string }{
	// python -m vllm.entrypoints.cli.main serve --max-num-seqs 3, eight requests.
	{"vllm.txt", "0: running 2, waiting 6, usage 0.761905\n"},
	// Written by sglang.srt.observability.metrics_collector, of two ranks with priority scheduling.
	{"sglang.txt", "0: running 5, waiting 0, usage 0.25\n1: running 6, waiting 2, usage 0.75\n"},
	// python -m dynamo.mocker --data-parallel-size 2, at DYN_SYSTEM_PORT.
	{"mocker.txt", "0: running 3, waiting 0, usage 0.0585938\n1: running 3, waiting 0, usage 0.0585938\n"},
	// python -m dynamo.frontend, which has no metrics of engines.
	{"frontend.txt", ""},
}

func TestPages(t *testing.T) {
	p := newPage(newNames([quantities]Metric{}))
	for _, c := range pages {
		text, err := os.ReadFile(filepath.Join("testdata", c.file))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []io.Reader{bytes.NewReader(text), iotest.HalfReader(bytes.NewReader(text)),
			iotest.DataErrReader(bytes.NewReader(text))} {
			ranks, err := p.read(r)
			if err != nil {
				t.Fatal(err)
			}
			if got := formatRanks(ranks); got != c.want {
				t.Errorf("%s has\n%swant\n%s", c.file, got, c.want)
			}
		}
		if n := testing.AllocsPerRun(20, func() {
			if _, err := p.read(bytes.NewReader(text)); err != nil {
				t.Fatal(err)
			}
		}); n > 25 { // the reader, and the parsed numbers
			t.Errorf("%s: %v allocations", c.file, n)
		}
	}
}

func TestLines(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"vllm:num_requests_running 4", "0: running 4, waiting NaN, usage NaN\n"},
		{"vllm:num_requests_running 4 1700000000000\n", "0: running 4, waiting NaN, usage NaN\n"},
		{"vllm:num_requests_running{} 4\r\n", "0: running 4, waiting NaN, usage NaN\n"},
		{"vllm:num_requests_running{ engine = \"1\" , model_name=\"a\", }\t4\n",
			"1: running 4, waiting NaN, usage NaN\n"},
		{`vllm:num_requests_running{model_name="} 9 \" \\ \n engine=\"7\"",engine="2"} 4`,
			"2: running 4, waiting NaN, usage NaN\n"},
		{"# vllm:num_requests_running 4\n#vllm:num_requests_running 4\n", ""},
		{"vllm:num_requests_running_total 4\nvllm:num_requests_runnin 3\n", ""},
		{"trtllm_num_requests_running 4\ntrtllm_num_requests_waiting 2\ntrtllm_kv_cache_utilization 0.5\n",
			"0: running 4, waiting 2, usage 0.5\n"},
		{`nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 2
nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 5
nv_trt_llm_request_metrics{model="m",request_type="max",version="1"} 512
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m",version="1"} 0.25
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="m",version="1"} 700
`, "0: running 5, waiting 2, usage 0.25\n"},
		{"vllm:kv_cache_usage_perc 1.5\n", "0: running NaN, waiting NaN, usage 1\n"},
		{"vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\nvllm:kv_cache_usage_perc +Inf\n", ""},
		{"vllm:num_requests_running\nvllm:num_requests_running{\nvllm:num_requests_running{a=\"\n" +
			"vllm:num_requests_running{} x\n", ""},
		{"vllm:num_requests_running{engine=\"x\"} 1\nvllm:num_requests_running{engine=\"-1\"} 2\n",
			"0: running 2, waiting NaN, usage NaN\n"},
		{"vllm:num_requests_running " + strings.Repeat("0", maxLineBytes) + "1\nvllm:num_requests_waiting 3\n",
			"0: running NaN, waiting 3, usage NaN\n"},
		{strings.Repeat("x", maxLineBytes) + "vllm:num_requests_running 7\nvllm:num_requests_waiting 3",
			"0: running NaN, waiting 3, usage NaN\n"},
	} {
		ranks, err := newPage(newNames([quantities]Metric{})).read(strings.NewReader(c.text))
		if err != nil || formatRanks(ranks) != c.want {
			t.Errorf("%.80q gives %q, want %q (%v)", c.text, formatRanks(ranks), c.want, err)
		}
	}
}

// TestMetricsFlag: --engine-metrics names the metrics of some quantities, with or without a label.
func TestMetricsFlag(t *testing.T) {
	c := Config{Path: "/metrics", metrics: `queued=a{b="c"}, usage=x:y`}
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	if c.Waiting != (Metric{Name: "a", Label: "b", Value: "c"}) || c.Usage != (Metric{Name: "x:y"}) ||
		c.Running != (Metric{}) {
		t.Errorf("%+v", c)
	}
}

// TestGivenMetrics: a metric that the operator names replaces the known ones of its quantity.
func TestGivenMetrics(t *testing.T) {
	m, err := ParseMetric(`queue{kind="inner"}`)
	if err != nil {
		t.Fatal(err)
	}
	p := newPage(newNames([quantities]Metric{waiting: m}))
	ranks, err := p.read(
		strings.NewReader(
			"queue{kind=\"outer\"} 9\nqueue{kind=\"inner\"} 3\nvllm:num_requests_waiting " +
				"5\nvllm:num_requests_running 2\n",
		),
	)
	if got, want := formatRanks(ranks), "0: running 2, waiting 3, usage NaN\n"; err != nil || got != want {
		t.Errorf("%q, want %q (%v)", got, want, err)
	}
	for s, want := range map[string]Metric{"a": {Name: "a"}, " a:b ": {Name: "a:b"},
		"a{b=c}":          {Name: "a", Label: "b", Value: "c"},
		`a { b = "c d" }`: {Name: "a", Label: "b", Value: "c d"}} {
		if got, err := ParseMetric(s); got != want || err != nil {
			t.Errorf("%q: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "{a=b}", "a{", "a{b}", "a{=c}", "a{b=c", "a{b=c,d=e}", "a b", "a}"} {
		if got, err := ParseMetric(s); err == nil {
			t.Errorf("%q: %v, want an error", s, got)
		}
	}
}

func TestPageBounds(t *testing.T) {
	p := newPage(newNames([quantities]Metric{}))
	if _, err := p.read(io.LimitReader(endless("# "+strings.Repeat("nothing ", 1000)+"\n"),
		maxPageBytes+1)); !errors.Is(
		err,
		errTooLarge,
	) {
		t.Error(err)
	}
	if _, err := p.read(io.LimitReader(endless("# "+strings.Repeat("nothing ", 1000)+"\n"), maxPageBytes)); err != nil {
		t.Error(err)
	}
	broken := errors.New("broken")
	if _, err := p.read(io.MultiReader(strings.NewReader("vllm:num_requests_running 4\n"),
		iotest.ErrReader(broken))); !errors.Is(
		err,
		broken,
	) {
		t.Error(err)
	}
	var many strings.Builder
	for rank := range 3000 {
		fmt.Fprintf(&many, "vllm:num_requests_running{engine=\"%d\"} 1\n", rank)
	}
	if ranks, err := p.read(strings.NewReader(many.String())); len(ranks) != 1024 || err != nil {
		t.Errorf("%d ranks, %v", len(ranks), err)
	}
}

// endless is a reader that repeats a text forever.
type endless string

func (e endless) Read(b []byte) (n int, err error) {
	for n < len(b) {
		n += copy(b[n:], e)
	}
	return n, nil
}

func TestTogether(t *testing.T) {
	none := math.NaN()
	for _, c := range []struct {
		ranks []rankValues
		want  values
	}{
		{nil, noValues},
		{[]rankValues{{3, values{1, 2, 0.5}}}, values{1, 2, 0.5}},
		{[]rankValues{{0, values{1, none, 0.5}}, {1, values{2, none, none}}, {2, values{4, none, 0.75, 64}}},
			values{7, none, 0.625, 64}},
	} {
		if got := mergeRanks(c.ranks); fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%v: %v, want %v", c.ranks, got, c.want)
		}
	}
}

// FuzzPage compares the values with those of a parser of the whole format, for pages that this parser accepts.
func FuzzPage(f *testing.F) {
	for _, c := range pages {
		text, err := os.ReadFile(filepath.Join("testdata", c.file))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("vllm:num_requests_running{engine=\"1\",a=\"\\\\\\\"\\n\"} 4 17\nsglang:token_usage 1e-1\n"))
	f.Add([]byte("{} 1\n")) // the other parser panics here
	f.Fuzz(func(t *testing.T, text []byte) {
		p := newPage(newNames([quantities]Metric{}))
		ranks, err := p.read(bytes.NewReader(text))
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range ranks {
			if i > 0 && ranks[i-1].rank >= r.rank {
				t.Fatalf("ranks %d and %d are out of order", ranks[i-1].rank, r.rank)
			}
			for q, v := range r.values {
				if v < 0 || math.IsInf(v, 0) || quantity(q) == usage && v > 1 {
					t.Fatalf("rank %d: %v", r.rank, r.values)
				}
			}
		}
		parser := expfmt.NewTextParser(prommodel.UTF8Validation)
		families, err := panicToError(parser.TextToMetricFamilies, bytes.NewReader(text))
		if err != nil || bytes.ContainsAny(text, "\r") || len(text) > maxLineBytes {
			return
		}
		family := families["vllm:num_requests_running"]
		for _, m := range family.GetMetric() {
			rank, value := "0", m.GetGauge().GetValue()+m.GetUntyped().GetValue()+m.GetCounter().GetValue()
			for _, l := range m.GetLabel() {
				if l.GetName() == "engine" && l.GetValue() == "1" {
					rank = "1"
				}
			}
			if len(family.GetMetric()) == 1 && len(m.GetLabel()) <= 1 && value > 0 && !math.IsInf(value, 0) &&
				m.GetHistogram() == nil &&
				m.GetSummary() == nil {
				for _, r := range ranks {
					if fmt.Sprint(r.rank) == rank && r.values[running] == value {
						return
					}
				}
				if len(m.GetLabel()) == 1 && m.GetLabel()[0].GetName() != "model_name" && rank == "0" {
					return // another rank, or a value that is not a number
				}
				t.Fatalf("%q gives %v, and not %v of rank %s", text, formatRanks(ranks), value, rank)
			}
		}
	})
}

// panicToError calls read, and returns a panic as an error.
func panicToError[T any](read func(io.Reader) (T, error), in io.Reader) (out T, err error) {
	defer func() {
		if e := recover(); e != nil {
			err = fmt.Errorf("panic: %v", e)
		}
	}()
	return read(in)
}

// BenchmarkPage parses the page of an engine under load with kvepp's parser and with one of the whole format.
func BenchmarkPage(b *testing.B) {
	text, err := os.ReadFile("testdata/vllm.txt")
	if err != nil {
		b.Fatal(err)
	}
	b.Run("kvepp", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		p := newPage(newNames([quantities]Metric{}))
		for b.Loop() {
			if _, err := p.read(bytes.NewReader(text)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("expfmt", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			parser := expfmt.NewTextParser(prommodel.UTF8Validation)
			if _, err := parser.TextToMetricFamilies(bytes.NewReader(text)); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// TestReadCache: a page says how many tokens a KV block has, and how many blocks the device.
func TestReadCache(t *testing.T) {
	vllm, err := os.ReadFile("testdata/vllm.txt")
	if err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string][2]int{
		`vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1.0`:         {16, 100},
		`sglang:cache_config_info{num_pages="50",page_size="64"} 1`:                           {64, 50},
		"trtllm_kv_cache_tokens_per_block 32\ntrtllm_kv_cache_max_blocks{model_name=\"m\"} 7": {32, 7},
		`nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max"} 9
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used"} 1000`: {64, 9},
		"sglang:num_pages 5\nsglang:page_size 64":                                                   {64, 5},
		`vllm:cache_config_info{block_size="16",kv_cache_size_tokens="790",num_gpu_blocks="100"} 1`: {16, 50},
		`vllm:cache_config_info{block_size="16",kv_cache_size_tokens="1e9",num_gpu_blocks="100"} 1`: {16, 100},
		string(vllm): {32, 64},
		// of rank 1 only
		`vllm:cache_config_info{block_size="16",num_gpu_blocks="100",engine="0"} 1
vllm:cache_config_info{block_size="16",num_gpu_blocks="200",engine="1"} 1`: {16, 200},
		`vllm:cache_config_info{block_size="16",num_gpu_blocks="None"} 1.0`:     {},
		`vllm:cache_config_info{block_size="1e308",num_gpu_blocks="1e308"} 1.0`: {},
		`vllm:cache_config_info{block_size="-16",num_gpu_blocks="100"} 1.0`:     {},
		`vllm:cache_config_info{block_size="16"} 1.0`:                           {},
	} {
		size, blocks, err := ReadCache(strings.NewReader(text+"\n"), 1)
		if err != nil || [2]int{size, blocks} != want {
			t.Errorf("%s: %d, %d, %v", text, size, blocks, err)
		}
	}
}
