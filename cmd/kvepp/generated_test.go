package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/serve/listen"
	"kvepp/serve/logs"
	"kvepp/test/harness/process"
)

var rewrite = flag.Bool("rewrite", false, "write docs/configuration.md and docs/metrics.md from the flags and metrics")

// checkPage compares a generated page with the file, or writes it.
func checkPage(t *testing.T, name, want string) {
	t.Helper()
	path := filepath.Join("../../docs", name)
	if *rewrite {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	got, wanted := strings.Split(string(text), "\n"), strings.Split(want, "\n")
	for i := range max(len(got), len(wanted)) {
		if i >= len(got) || i >= len(wanted) || got[i] != wanted[i] {
			t.Fatalf("docs/%s, line %d differs from what the code says; write the page with "+
				"go test ./cmd/kvepp -run 'ConfigurationPage|MetricsPage' -rewrite", name, i+1)
		}
	}
}

// cell returns a text as a cell of a Markdown table.
func cell(text string) string {
	return strings.NewReplacer("|", `\|`, "<", `\<`).Replace(strings.Join(strings.Fields(text), " "))
}

// meaningCell returns what a flag means, with its lines.
func meaningCell(flag *pflag.Flag) string {
	lines := strings.Split(flags.Meaning(flag), "\n")
	for i, line := range lines {
		lines[i] = cell(line)
	}
	return strings.Join(lines, "<br>")
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + strings.ReplaceAll(text, "|", `\|`) + "`"
}

const configurationHead = `# Configuration

This page lists every flag of kvepp, with its default and its environment variables. ` +
	"`kvepp serve --help`" + ` shows the
fifteen that matter first.

Each flag of ` + "`kvepp serve`" + ` can be given in four ways. If several give it, the first in this list wins:

1. a flag: ` + "`--grpc-port 9002`" + `
2. kvepp's environment variable: ` + "`KVEPP_GRPC_PORT=9002`" + `. An empty variable counts as not set.
3. the file that ` + "`--config FILE`" + ` names: ` + "`grpc-port: 9002`" + `
4. Dynamo's environment variable, if the flag has one. It comes last because a process often inherits Dynamo's ` +
	`variables,
   but the file is written for kvepp.

If none of them gives it, the default holds. One exception: settings in the sections ` + "`router`" + ` and ` +
	"`worker_selection`" + ` of
` + "`--router-policy-config`" + ` take precedence over all of these. That file is Dynamo's router policy; the file ` +
	`of ` +
	"`--config`" + ` has
kvepp's flags.

` + "```yaml" + `
# kvepp.yaml, for kvepp serve --config kvepp.yaml
endpoints: endpoints.yaml
model:                            # a flag that may be repeated takes a list
- qwen=/models/qwen
- llama=/models/llama
router-queue-threshold: 2.0
secure-serving: false             # there are no keys no-...
default-chat-template-kwargs: '{"enable_thinking": false}'
` + "```" + `

` + "```sh" + `
bin/kvepp serve --config kvepp.yaml --print-config
` + "```" + `

kvepp refuses unknown keys, with the line and the nearest name. It reads the file at start only: restart kvepp after a
change. (kvepp reads the endpoints file, the policy file, certificates and token files again when they change.)

` + "`--print-config`" + ` checks the settings, prints each effective value and where it came from, and
exits. Its output is a file for ` + "`--config`" +
	` that gives the same settings. It names files of secrets and does not
read them; it masks users and passwords in URLs. ` + "`kvepp check`, `kvepp indexer` and `kvepp select`" +
	` have both flags, too.

Values: durations have a unit (` + "`500ms`, `2s`, `5m`" + `). A flag that is true by default is turned off with
` + "`--FLAG=false`" + `. In an environment variable, a flag that may be repeated is a list separated by commas. ` +
	"`None`" + ` turns
off a threshold.
`

const configurationEnd = `
Next: [metrics](metrics.md) shows whether the settings have the effect that you want, and
[mistakes](mistakes.md) what kvepp says about wrong ones.
`

// TestConfigurationPage checks docs/configuration.md against the flags.
func TestConfigurationPage(t *testing.T) {
	var page strings.Builder
	page.WriteString("<!-- Written by go test ./cmd/kvepp -run ConfigurationPage -rewrite. Do not edit by hand. " +
		"-->\n\n")
	page.WriteString(configurationHead)
	for _, c := range commands {
		switch {
		case c.flags == nil || strings.HasPrefix(c.summary, "send an endpoint") || c.name == "workers":
			continue // drain has the flags of the other commands for endpoints
		case c.name == "drain":
			page.WriteString("\n## kvepp workers, cordon, drain and uncordon\n")
		default:
			fmt.Fprintf(&page, "\n## kvepp %s\n", c.name)
		}
		for _, s := range flags.Sections(c.flags()) {
			if c.name == "check" && s.Title != sectionCheck {
				continue
			}
			if !strings.HasPrefix(s.Title, "Flags of kvepp") {
				title := s.Title
				if c.name != "serve" {
					title += " (kvepp " + c.name + ")"
				}
				fmt.Fprintf(&page, "\n### %s\n", title)
			}
			writeFlagTable(&page, s)
		}
		if c.name == "check" {
			page.WriteString("\n`kvepp check` also has the flags of `kvepp serve`. Give it the same values.\n")
		}
	}
	page.WriteString(configurationEnd)
	checkPage(t, "configuration.md", page.String())
}

func writeFlagTable(page io.Writer, s flags.Group) {
	fmt.Fprint(page, "\n| flag | default | variables | meaning |\n|---|---|---|---|\n")
	for _, f := range s.Flags {
		var variables []string
		for _, v := range flags.VariablesOf(f) {
			variables = append(variables, code(v))
		}
		fmt.Fprintf(page, "| %s | %s | %s | %s |\n", code(flags.Spelled(f)), code(pageDefault(f)),
			strings.Join(variables, ", "), meaningCell(f))
	}
}

// pageDefault returns the default of a flag as the page shows it.
func pageDefault(f *pflag.Flag) string {
	if value := flags.Default(f); value != "0s" {
		return value
	}
	return "0"
}

const metricsHead = `# Metrics

This page lists every metric that kvepp exports, with its type, labels and meaning. ` + "`kvepp serve`" +
	` shows them at
` + "`/metrics`" + ` on ` + "`--metrics-port`" + ` (9090). No label takes a value that only a client chose.

## What to watch first

| question | metric | what to do |
|---|---|---|
| Does kvepp route by cache? | ` + "`kvepp_decisions_total{reason}`" + ` | ` + "`kv`" + `, ` +
	"`kv_rendered`" + ` and ` + "`media_prefix`" +
	` price cached blocks and load, ` + "`approximate`" + ` assumes what workers hold, ` + "`router_mode`" +
	` is another mode than kv, ` + "`cache_not_read`" + ` marks requests for which the engine reads no cache.` +
	` Every other reason says why kvepp priced load only: correct that |
| Do the token ids equal the engine's? | ` + "`kvepp_prompt_token_mismatches_total`" +
	` | a rise means that template, tokenizer or ` + "`--engine`" + ` differ from the engine's; run ` +
	"`kvepp check`" + ` |
| Does the index hold what the engines hold? | ` +
	"`kvepp_predicted_of_reported_cached_tokens_total`, `kvepp_reported_cached_tokens_total`" +
	` | the two grow alike. Engines always compute a prompt's last block, so reported is at most ` +
	`floor((prompt_tokens - 1) / block) * block |
| Do KV events arrive? | ` + "`kvepp_silent_workers`, `kvepp_subscriptions{state}`, `kvepp_events_total{outcome}`" +
	` | a silent worker served 10 requests and sent no event within a minute: its events are off, or their address ` +
	`is wrong |
| Do workers fail? | ` + "`kvepp_ejected_workers`, `kvepp_ejections_total{cause}`, " +
	"`kvepp_worker_failures_total{cause}`" +
	` | the cause says what failed; [failure modes](failure-modes.md) |
| Does the proxy do what kvepp chose? | ` + "`kvepp_served_total{outcome}`" +
	` | ` + "`moved`" + `: the proxy used another endpoint; ` + "`unknown`" + `: one that kvepp does not know |
| Is there too much load? | ` + "`kvepp_rejections_total{cause}`, `kvepp_queued_requests`, `kvepp_held_body_bytes`" +
	` | add workers, or change the limits ([configuration](configuration.md#overload-and-the-queue)) |
| Does load bypass kvepp? | ` + "`kvepp_unseen_load_workers`" +
	` | these engines have had more requests for a minute than kvepp sent them |
| How long does kvepp take? | ` + "`kvepp_phase_seconds{phase}`" +
	` | ` + "`pick`" + ` is the whole decision; the other phases are its parts |
| Is the index large enough? | ` + "`kvepp_index_at_bound`" + ` | 1: the index evicts blocks; raise ` +
	"`--index-max-bytes`" + ` |

Metrics of a part that is off (access log, traces, Kubernetes, ` + "`--tokenizer-url`" + `) do not exist.
`

const metricsEnd = `
## Go and the process

` + "`go_*`" + ` and ` + "`process_*`" + ` are those of Prometheus' client for Go.

Next: [operations](operations.md) says how to run kvepp, and [failure modes](failure-modes.md) what each failure looks
like in these metrics.
`

// metric is one row of docs/metrics.md.
type metric struct {
	name, kind, help string
	labels           []string
}

// wiredElsewhere are the metrics of parts that TestMetricsPage does not start: the process, Kubernetes and other
// commands.
var wiredElsewhere = []metric{
	{metrics.Connections.Name, "gauge", metrics.Connections.Help, []string{"listener"}},
	{metrics.ConnectionsClosed.Name, "counter", metrics.ConnectionsClosed.Help, []string{"listener", "outcome"}},
	{metrics.KubeErrors.Name, "counter", metrics.KubeErrors.Help, []string{"kind"}},
	{metrics.KubeFollowed.Name, "gauge", metrics.KubeFollowed.Help, []string{"kind"}},
	{metrics.KubeUpdates.Name, "counter", metrics.KubeUpdates.Help, []string{"of"}},
	{metrics.Leader.Name, "gauge", metrics.Leader.Help, nil},
	{metrics.HeldRequests.Name, "gauge", metrics.HeldRequests.Help, nil},
	{metrics.Conversations.Name, "gauge", metrics.Conversations.Help, []string{"state"}},
	{metrics.LogLines.Name, "counter", metrics.LogLines.Help, []string{"outcome"}},
	{metrics.RecordedRequests.Name, "counter", metrics.RecordedRequests.Help, []string{"outcome"}},
	{metrics.TraceSpans.Name, "counter", metrics.TraceSpans.Help, []string{"outcome"}},
	{metrics.MemoryLimit.Name, "gauge", metrics.MemoryLimit.Help, []string{"source"}},
	{metrics.IndexerListeners.Name, "gauge", metrics.IndexerListeners.Help, []string{"status"}},
	{metrics.SelectionReservations.Name, "gauge", metrics.SelectionReservations.Help, nil},
	{metrics.SelectionExpired.Name, "counter", metrics.SelectionExpired.Help, nil},
	{metrics.SelectionWaiting.Name, "gauge", metrics.SelectionWaiting.Help, nil},
}

// metricSections are the headings of the page. A metric is in the first section whose pattern matches.
var metricSections = []struct {
	title   string
	pattern *regexp.Regexp
	lead    string
}{
	{"Requests and decisions", regexp.MustCompile(`^kvepp_(active|chosen|conditional|conversation|decisions|` +
		`first|hints|held|only|phase|policy|` +
		`queue|rejections|requests|selections|served|session|shadow|streams|unpaired)`), ""},
	{"Workers and endpoints", regexp.MustCompile(`^kvepp_(worker|eject|cordon|unresolved|endpoints|ignored|refused|` +
		`engine|unseen|overloaded|lora)`), ""},
	{"KV events and the index", regexp.MustCompile(`^kvepp_(events|index|subscriptions|silent)`), ""},
	{"Replicas", regexp.MustCompile(`^kvepp_replica_`), `
These exist with ` + "`--replica-peers` or `--replica-service`" + `, see [replicas](replicas.md).
`},
	{"Tokens, tokenizers and models", regexp.MustCompile(`^kvepp_(tokenizer|general|model|predicted|reported|` +
		`prompt|upper|unread|untested|unusable|injected|ladder)`), ""},
	{"The process", regexp.MustCompile(`^kvepp_(build|memory|log|access|recorded|trace|cert|tls|conn|proxy|` +
		`kube|leader|token_)`),
		""},
	{"kvepp indexer", regexp.MustCompile(`^dynamo_kvindexer_`), ""},
	{"kvepp select", regexp.MustCompile(`^kvepp_selection_`), ""},
	{"Names of Dynamo's router and frontend", regexp.MustCompile(`^dynamo_`), `
Dashboards made for Dynamo's router find its series here, under the same names, labels and buckets. They exist from the
start, at zero; a worker's series exist while it is in the pool. ` +
		"`--dynamo-namespace`" + ` sets their label dynamo_namespace.
Times to first token and between tokens are those of streamed responses that
Envoy shows to kvepp. kvepp counts the time between tokens for all of these; Dynamo counts it only with
` + "`--router-track-output-blocks`" + `. Dynamo's series about its event plane, approximate index, shared books ` +
		`and
shared caches do not exist here, nor those that none of its dashboards, its planner or an autoscaler reads.
The counters of best eligible, selected and reused tokens are the rungs eligible, chosen and delivered of the
[hit-rate ladder](hit-rate.md), so that both views agree; kvepp counts the ladder when a request has ended, and the ` +
		`first
two counters when it chooses.
`},
	{"Names of the Gateway API Inference Extension's endpoint picker", regexp.MustCompile(`^inference_`), `
Dashboards made for that endpoint picker, or llm-d's, find its series here. Names, labels and buckets are those of its
version 1.5. The label ` + "`name`" + ` is the pool's (` + "`--pool-name`, otherwise `kvepp`" + `), and models that only
clients name are ` + "`unknown`" + `. Its series about plugins, flow control and predicted latencies do not exist here,
because kvepp has no such features; nor do llm-d's newer names.
`},
}

// metricsOf returns the metrics of a registry.
func metricsOf(t *testing.T, r *prometheus.Registry) map[string]metric {
	t.Helper()
	kinds := map[string]string{}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		kinds[f.GetName()] = strings.ToLower(f.GetType().String())
	}
	described := make(chan *prometheus.Desc)
	go func() {
		r.Describe(described)
		close(described)
	}()
	field := regexp.MustCompile(
		`^Desc\{fqName: "([^"]*)", help: ("(?:[^"\\]|\\.)*"), constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	all := map[string]metric{}
	for d := range described {
		parts := field.FindStringSubmatch(d.String())
		if parts == nil {
			t.Fatalf("%s", d)
		}
		m := metric{name: parts[1], kind: kinds[parts[1]]}
		if _, err := fmt.Sscanf(parts[2], "%q", &m.help); err != nil {
			t.Fatal(err)
		}
		for _, label := range strings.Split(parts[3], ",") {
			if name, _, ok := strings.Cut(label, "="); ok {
				m.labels = append(m.labels, name)
			}
		}
		m.labels = append(m.labels, strings.FieldsFunc(parts[4], func(r rune) bool { return r == ',' })...)
		switch {
		case m.kind != "":
		case strings.HasSuffix(m.name, "_total"):
			m.kind = "counter"
		case strings.HasSuffix(m.name, "_duration_seconds"):
			m.kind = "histogram"
		default:
			m.kind = "gauge"
		}
		all[m.name] = m
	}
	return all
}

// TestMetricsPage checks docs/metrics.md against the metrics that kvepp registers, and these against the names in the
// sources.
func TestMetricsPage(t *testing.T) {
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	folder := t.TempDir()
	endpoints := filepath.Join(folder, "endpoints.yaml")
	if err := os.WriteFile(endpoints, []byte("endpoints:\n- {name: w, address: 127.0.0.1:1}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	o := new(options)
	if err := parseServe(o, []string{"--endpoints=" + endpoints, "--model=m=" + folder, "--tokenizer-check=1",
		"--tokenizer-url=http://127.0.0.1:1", "--router-queue-threshold=2",
		"--access-log=" + filepath.Join(folder, "log"), "--bind-address=127.0.0.1", "--warmup-timeout=1ms",
		"--replica-peers=127.0.0.1:1", fmt.Sprint("--replica-port=", port)},
		func(string) string { return "" }); err != nil {
		t.Fatal(err)
	}
	o.LogTo(logs.Start(io.Discard))
	s := &server{options: o, m: metrics.New(), log: log, ready: listen.NewReadiness()}
	defer s.close()
	if err := s.open(ctx); err != nil {
		t.Fatal(err)
	}
	if err := s.discover(ctx); err != nil {
		t.Fatal(err)
	}
	s.decide(ctx)
	s.m.NewIndexerService()
	s.m.NewSelectionService()
	all := metricsOf(t, s.m.Registry)
	for _, m := range wiredElsewhere {
		all[m.name] = m
	}
	for _, name := range metricNames(t) {
		if _, known := all[name]; !known {
			t.Errorf("%s is in no registry that this test reads: add it to wiredElsewhere", name)
		}
	}

	var page strings.Builder
	page.WriteString("<!-- Written by go test ./cmd/kvepp -run MetricsPage -rewrite. Do not edit by hand. -->\n\n")
	page.WriteString(metricsHead)
	sections := map[string][]metric{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		title := "" // no section: metrics of Go and the process
		for _, section := range slices.Backward(metricSections) {
			if section.pattern.MatchString(name) {
				title = section.title
			}
		}
		sections[title] = append(sections[title], all[name])
	}
	for _, m := range sections[""] {
		if !strings.HasPrefix(m.name, "go_") && !strings.HasPrefix(m.name, "process_") {
			t.Errorf("%s is in no section: add it to metricSections", m.name)
		}
	}
	for _, section := range metricSections {
		title := section.title
		fmt.Fprintf(&page, "\n## %s\n%s\n| metric | type | labels | meaning |\n|---|---|---|---|\n", title,
			section.lead)
		for _, m := range sections[title] {
			var labels []string
			for _, label := range m.labels {
				labels = append(labels, code(label))
			}
			fmt.Fprintf(&page, "| %s | %s | %s | %s |\n", code(m.name), m.kind, strings.Join(labels, ", "),
				cell(m.help))
		}
	}
	page.WriteString(metricsEnd)
	checkPage(t, "metrics.md", page.String())
}

// metricNames returns the names of metrics in the sources of internal/metrics.
func metricNames(t *testing.T) []string {
	t.Helper()
	return slices.DeleteFunc(metricLiterals(t), func(name string) bool {
		return name == "dynamo_namespace" || name == "dynamo_component" // labels
	})
}

// metricLiterals returns the strings in the sources of internal/metrics that have the form of a metric's name.
func metricLiterals(t *testing.T) (names []string) {
	t.Helper()
	sources, err := filepath.Glob("../../internal/metrics/*.go")
	if err != nil || len(sources) == 0 {
		t.Fatalf("no sources of metrics (%v)", err)
	}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range regexp.MustCompile(
			`"((?:kvepp|inference|dynamo)_[a-z0-9_]*[a-z0-9])"`).FindAllStringSubmatch(string(text), -1) {
			if !strings.HasSuffix(source, "_test.go") {
				names = append(names, name[1])
			}
		}
	}
	return names
}
