package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"
	"text/tabwriter"

	"github.com/spf13/pflag"

	"kvepp/zmqsub"
)

const sizeHelp = `Print the CPU, memory, replicas and file descriptors that kvepp serve needs for a load, from
measured figures. Envoy and the engines need their own.

Usage:       kvepp size --rps N --tokens N --workers N [flags]
Example:     kvepp size --rps 200 --tokens 4000 --workers 16 --blocks 30000
             kvepp size --rps 200 --tokens 4000 --workers 16 -o yaml >size.yaml
             helm install kvepp kvepp-VERSION.tgz --values size.yaml ...
Exit status: 0 if printed, 2 for wrong usage
Precedence:  flag, variable KVEPP_SIZE_<FLAG>, default

--rps counts the requests of all replicas in the busiest minutes. --tokens is the mean length of a
prompt; kvepp reads all of it, cached or not. A worker is one KV cache: an engine, or one of its
data-parallel ranks. An engine logs its number of KV blocks at start.

The figures are those of one machine (AMD EPYC, Zen 5, 2 vCPUs). They hold for prompts of
unseen text, without TLS. CPU requests are twice the mean use, so that bursts do not wait. Compare
with container_cpu_usage_seconds_total and kvepp_memory_limit_bytes afterwards.
`

// sizePrefix is part of the names of its environment variables: KVEPP_SIZE_RPS.
const sizePrefix = "size-"

// sizeOptions are the flags of `kvepp size`.
type sizeOptions struct {
	rps                                            float64
	tokens, workers, blocks, blockSize             int
	outputTokens, tokenizers, replicas, vocabulary int
	output                                         string
}

// What `kvepp size` computes with. Each is measured on the machine of docs/benchmarks.md; the tables there and in
// docs/operations.md#sizing have the same figures, which TestSizeFigures compares, and the commands that measure them.
const (
	// pieceCPU is the time for a piece of a streamed answer, in seconds.
	pieceCPU = 17e-6
	// eventCPU is the time for a block that an engine stores and later removes, from the wire to the index, in seconds.
	eventCPU = (0.27 + 0.14) * 1e-6
	// workerCPU is the share of a core for an idle worker: its connection, and reading its metrics, which takes
	// metricsCPU for any number.
	workerCPU  = 0.002/100 + 0.03/1000
	metricsCPU = 0.009 - 100*0.03/1000
	// sharedCPU is the time for a request of another replica, in seconds: 0.069 of a core for 10,000 a second.
	sharedCPU = 0.069 / 10000

	// baseMemory is the resident memory of a kvepp without workers and models, in bytes.
	baseMemory = 76 << 20
	// workerMemory is that for a worker, of both Go and libzmq, in bytes; the second is libzmq's part.
	workerMemory = 0.22 * (1 << 20)
	libzmqMemory = 0.1 * (1 << 20)
	// vocabularyMemory is that for a token of a model's vocabulary, in bytes.
	vocabularyMemory = 14 << 20 / 150000
	// blockMemory is that for a block of a worker, in bytes: of engines that do not share their blocks' names. With one
	// PYTHONHASHSEED it is 30.
	blockMemory = 48

	bytesPerToken = 4 // of a prompt in English, as in the chats that were measured
)

// requestCPU is the CPU time of a request by its number of prompt tokens: with --router-mode kv, in seconds.
var requestCPU = []struct {
	tokens  int
	seconds float64
}{{1000, 114e-6}, {8000, 486e-6}, {64000, 3472e-6}, {256000, 14336e-6}}

// Choices, which are not measured.
const (
	utilization   = 0.5     // mean use of the CPU request
	mostCores     = 4       // of a replica's CPU request: the figures are of 2 busy cores
	heldFor       = 2       // seconds for which the bodies of all requests fit: the default of --pick-timeout
	heldShare     = 0.3 / 4 // of Go's memory, for bodies: three tenths of a quarter (--max-buffered-bytes)
	indexShare    = 0.5     // of Go's memory: the default of --index-max-bytes
	otherShare    = 0.75    // of Go's memory that is not for requests
	mostTokens    = 1 << 23
	mostBlocks    = 1 << 30
	mostRequests  = 1e6
	mostReplicas  = 1000
	defaultBlocks = 16384
)

// leastMemory is the least memory limit, in MiB: below it there is no room for collectorFloor, and the collector runs
// more often than in the measurements of CPU.
var leastMemory = roundUp(16*collectorFloor/(1<<20)*8.0/7, 64)

func sizeFlags(o *sizeOptions) *pflag.FlagSet {
	f := newFlags("kvepp size")
	f.Float64Var(&o.rps, "rps", 0, "requests a second, of all replicas together, at the busiest time")
	f.IntVar(&o.tokens, "tokens", 0, "mean prompt tokens of a request")
	f.IntVar(&o.workers, "workers", 0, "KV caches: engines times their data-parallel ranks")
	f.IntVar(&o.blocks, "blocks", defaultBlocks, "KV blocks of a worker, as its engine logs them")
	f.IntVar(&o.blockSize, "block-size", 16, "tokens of a KV block")
	f.IntVar(&o.outputTokens, "output-tokens", 200, "mean tokens of an answer: each is a piece of a stream; 0: "+
		"answers are not streamed, or Envoy does not show them to kvepp")
	f.IntVar(&o.tokenizers, "tokenizers", 1, "models with a tokenizer (--model)")
	f.IntVar(&o.vocabulary, "vocabulary", 150000, "tokens in the vocabulary of a model")
	f.IntVar(&o.replicas, "replicas", 0, "number of replicas, which all choose workers. 0: at least 2, and enough "+
		"that each requests at most 4 cores. If there are several, each is sized for the time while one is down")
	f.StringVarP(&o.output, "output", "o", "text", "`FORMAT`: text, or yaml for values of the Helm chart")
	values(f, "output", "text", "yaml")
	section(f, "Flags of kvepp size")
	documentEnvironment(f, sizePrefix)
	return f
}

func parseSize(o *sizeOptions, args []string, getenv func(string) string) error {
	f := sizeFlags(o)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := fromEnvironment(f, getenv); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	if !(o.rps > 0) || o.rps > mostRequests {
		return fmt.Errorf("--rps %v: give the requests a second, above 0 and at most %g", o.rps, float64(mostRequests))
	}
	for _, n := range []struct {
		flag               string
		value, least, most int
		what               string
	}{
		{"tokens", o.tokens, 1, mostTokens, "the mean prompt tokens of a request"},
		{"workers", o.workers, 1, zmqsub.MaxSubscriptions, "the number of KV caches"},
		{"blocks", o.blocks, 0, mostBlocks, "the KV blocks of a worker"},
		{"block-size", o.blockSize, 1, mostTokens, "the tokens of a KV block"},
		{"output-tokens", o.outputTokens, 0, mostTokens, "the mean tokens of an answer"},
		{"tokenizers", o.tokenizers, 0, 1000, "the number of models with a tokenizer"},
		{"vocabulary", o.vocabulary, 1, 1 << 24, "the tokens of a vocabulary"},
		{"replicas", o.replicas, 0, mostReplicas, "the number of replicas"},
	} {
		if n.value < n.least || n.value > n.most {
			return fmt.Errorf("--%s %d: give %s, from %d to %d", n.flag, n.value, n.what, n.least, n.most)
		}
	}
	return oneOf("output", o.output, "text", "yaml")
}

// sizing is what `kvepp size` prints: for each replica, but for replicas.
type sizing struct {
	replicas            int
	cores, cpu          float64 // mean use while one replica is away, in cores; request
	memory, limit       int     // request and limit, in MiB
	goLimit             int     // GOMEMLIMIT, in MiB; 0: seven eighths of the limit, kvepp's own default
	index               float64 // bytes
	descriptors         int
	requests, pieces    float64 // parts of cores
	events, idle, share float64
}

// compute returns the sizing for a load.
func (o *sizeOptions) compute() sizing {
	var s sizing
	s.replicas = max(o.replicas, 1)
	if o.replicas == 0 {
		s.replicas = 2
	}
	for {
		o.processor(&s)
		if o.replicas != 0 || s.cpu <= mostCores || s.replicas == mostReplicas {
			break
		}
		s.replicas++
	}
	o.space(&s)
	s.descriptors = max(1024, zmqsub.Descriptors(o.workers))
	return s
}

// serving is the number of replicas that serve while one is away.
func (s *sizing) serving() float64 { return float64(max(s.replicas-1, 1)) }

// processor computes the CPU of each of s.replicas.
func (o *sizeOptions) processor(s *sizing) {
	s.requests = o.rps * secondsOf(o.tokens) / s.serving()
	s.pieces = o.rps * float64(o.outputTokens) * pieceCPU / s.serving()
	// Each replica follows the events of all workers, and the requests of the other replicas.
	s.events = o.rps * float64(o.tokens+o.outputTokens) / float64(o.blockSize) * eventCPU
	s.idle = metricsCPU + float64(o.workers)*workerCPU
	s.share = 0
	if s.replicas > 1 {
		s.share = o.rps * sharedCPU
	}
	s.cores = s.requests + s.pieces + s.events + s.idle + s.share
	s.cpu = max(math.Ceil(s.cores/utilization*10)/10, 0.1)
}

// space computes the memory of a replica.
func (o *sizeOptions) space(s *sizing) {
	const mib = 1 << 20
	s.index = float64(o.workers) * float64(o.blocks) * blockMemory
	libzmq := float64(o.workers) * libzmqMemory
	kept := baseMemory + float64(o.tokenizers)*float64(o.vocabulary)*vocabularyMemory + s.index +
		float64(o.workers)*(workerMemory-libzmqMemory)
	held := o.rps * heldFor * float64(o.tokens) * bytesPerToken / s.serving()
	goes := max(kept/otherShare, s.index/indexShare, held/heldShare) // Go's part
	s.memory = roundUp((kept+libzmq)/mib, 64)
	s.limit = max(roundUp(goes/mib*8/7, 64), leastMemory)
	if libzmq > float64(s.limit)*mib/8 { // more than the eighth that is not Go's
		s.goLimit = roundUp(goes/mib, 64)
		s.limit = roundUp(float64(s.goLimit)+libzmq/mib, 64)
	}
	s.memory = min(max(s.memory, 128), s.limit)
}

// secondsOf returns the CPU time of a request: between the measured lengths in proportion, below the first as the
// first, and above the last as from the one before to the last.
func secondsOf(tokens int) float64 {
	last := len(requestCPU) - 1
	if tokens <= requestCPU[0].tokens {
		return requestCPU[0].seconds
	}
	i := 1
	for i < last && tokens > requestCPU[i].tokens {
		i++
	}
	a, b := requestCPU[i-1], requestCPU[i]
	return a.seconds + (b.seconds-a.seconds)*float64(tokens-a.tokens)/float64(b.tokens-a.tokens)
}

// roundUp rounds to a multiple of step.
func roundUp(x float64, step int) int { return int(math.Ceil(x/float64(step))) * step }

// printSize runs `kvepp size`. It returns the exit status.
func printSize(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var o sizeOptions
	switch err := parseSize(&o, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, sizeFlags(new(sizeOptions)), err)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp size: %v\n\"kvepp size --help\" shows how to use it.\n", err)
		return 2
	}
	s := o.compute()
	text := s.text(&o)
	if o.output == "yaml" {
		text = s.yaml(&o)
	}
	if _, err := io.WriteString(stdout, text); err != nil {
		fmt.Fprintf(stderr, "kvepp size: %v\n", err)
		return 1
	}
	return 0
}

// load says in words what the sizing is for.
func (o *sizeOptions) load() string {
	return fmt.Sprintf("%g requests a second of %d tokens, %d workers of %d blocks", o.rps, o.tokens, o.workers,
		o.blocks)
}

// text is the sizing as a table, with where each number comes from.
func (s *sizing) text(o *sizeOptions) string {
	var out bytes.Buffer
	fmt.Fprintf(&out, "For %s:\n\n", o.load())
	w := tabwriter.NewWriter(&out, 0, 0, 2, ' ', 0)
	row := func(name, value, why string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\t%s\n", name, value, fmt.Sprintf(why, args...))
	}
	why := "as --replicas says"
	if o.replicas == 0 {
		why = fmt.Sprintf("at least 2, and so many that each requests at most %d cores while one is away", mostCores)
	}
	row("replicas", fmt.Sprint(s.replicas), "%s", why)
	fmt.Fprint(w, "\nof each replica:\n")
	row("CPU request", fmt.Sprintf("%.1f", s.cpu), "cores: twice the mean use of %.2f", s.cores)
	for _, part := range []struct {
		name  string
		cores float64
	}{{"requests", s.requests}, {"pieces of answers", s.pieces}, {"KV events", s.events}, {"idle workers", s.idle},
		{"other replicas", s.share}} {
		row("  "+part.name, "", "%.2f", part.cores)
	}
	row("CPU limit", "none", "it would stop kvepp in the middle of requests")
	row("memory request", fmt.Sprintf("%d MiB", s.memory), "index %.0f MiB (%d bytes a block), program, "+
		"tokenizers, workers", s.index/(1<<20), blockMemory)
	row("memory limit", fmt.Sprintf("%d MiB", s.limit), "the index within half of Go's part; bodies of %d s fit",
		heldFor)
	if s.goLimit > 0 {
		row("GOMEMLIMIT", fmt.Sprintf("%dMiB", s.goLimit), "the rest is for libzmq, which needs more than an eighth")
	}
	row("file descriptors", fmt.Sprint(s.descriptors), "four for each worker, and those of listeners (ulimit -n)")
	w.Flush()
	fmt.Fprint(&out, "\nMeasured on an AMD EPYC (Zen 5), every prompt unseen, without TLS; docs/operations.md#sizing "+
		"has the figures.\n")
	return out.String()
}

// yaml is the sizing as values of the Helm chart.
func (s *sizing) yaml(o *sizeOptions) string {
	var out strings.Builder
	fmt.Fprintf(&out, "# kvepp size: %s. A node must allow %d file descriptors.\n", o.load(), s.descriptors)
	fmt.Fprintf(&out, "replicas: %d\nresources:\n  requests: {cpu: %dm, memory: %dMi}\n  limits: {memory: %dMi}\n",
		s.replicas, int(math.Round(s.cpu*1000)), s.memory, s.limit)
	if s.goLimit > 0 {
		fmt.Fprintf(&out, "extraEnv: [{name: GOMEMLIMIT, value: %dMiB}]\n", s.goLimit)
	}
	return out.String()
}
