package llmd

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/router"
)

// Row is what a part of a configuration means here.
type Row struct {
	Name, Type string
	Verdict    Verdict
	Settings   []string // arguments of kvepp serve
	Says       string
}

// translation is a configuration on its way to a Seat.
type translation struct {
	*config
	rows     []*Row
	settings Settings
	prefix   prefixKind
	engines  bool // that publish KV events at their own sockets
	tokens   bool // exact token ids are wanted
	random   bool // endpoints are chosen at random
	limits   map[*plugin]Requirement
	split    *plugin // the handler of prefill and decode
}

// prefixKind says by what the configuration knows cached prefixes.
type prefixKind int

const (
	noPrefix prefixKind = iota
	assumed
	announced
)

// means translates a configuration. settings are those of the command line.
func (c *config) means(settings Settings) *translation {
	t := &translation{config: c, settings: settings, limits: map[*plugin]Requirement{}}
	if c.gates["flowControl"] {
		t.add("featureGates", "flowControl", Refused, "kvepp has no bands, fairness and eviction of llm-d's; its own "+
			"queue: docs/overload-and-queue.md. Remove the gate")
	}
	for _, p := range c.plugins {
		row := t.add(p.name, p.kind, p.Verdict, p.Says)
		switch {
		case !p.used && !p.may("producer") &&
			(p.may("filter") || p.may("scorer") || p.may("picker") || p.may("decider")):
			if row.Verdict = Ignored; !p.may("detector") {
				row.Says = "nothing refers to it"
			}
		case p.means != nil:
			p.means(t, p, row)
		}
		if p.weight != "" && row.Verdict != Refused {
			row.Says += "; weight " + p.weight + " has no counterpart"
		}
	}
	t.sections()
	t.stages()
	t.prefixes()
	return t
}

func (t *translation) add(name, kind string, verdict Verdict, says string) *Row {
	row := &Row{Name: name, Type: kind, Verdict: verdict, Says: says}
	t.rows = append(t.rows, row)
	return row
}

// set adds arguments of kvepp serve.
func (r *Row) set(arguments ...string) { r.Settings = append(r.Settings, arguments...) }

// approximate adds a difference to a row.
func (r *Row) approximate(format string, args ...any) {
	if r.Verdict == Maps {
		r.Verdict = Approximated
	}
	r.Says += "; " + fmt.Sprintf(format, args...)
}

func (r *Row) refuse(format string, args ...any) {
	r.Verdict, r.Says = Refused, fmt.Sprintf(format, args...)
}

// sections adds rows for the parts of the document beside plugins and profiles.
func (t *translation) sections() {
	d := t.document
	if d.at("flowControl") != nil && !t.gates["flowControl"] {
		t.add("flowControl", "", Ignored, sayGateOff)
	}
	if d.at("requestHandler.propagatePriority").is(false) {
		t.add("requestHandler", "propagatePriority", Refused, "kvepp writes no priority into bodies")
	}
	parsers := d.at("requestHandler.parsers").list()
	if len(parsers) > 0 && !slices.ContainsFunc(parsers, func(v *value) bool {
		p := t.named(v.at("pluginRef").text())
		return v.at("pluginRef").text() == "passthrough-parser" || p != nil && p.kind == "passthrough-parser"
	}) {
		t.add("requestHandler", "parsers", Approximated,
			"kvepp routes paths that no parser knows by load; llm-d answers 400")
	}
	for _, key := range []string{"dataLayer.crossReplica.syncerPluginRef", "dataLayer.crossReplicaSyncerPluginRef"} {
		if d.at(key).text() != "" {
			t.add("dataLayer", "crossReplica", Ignored, "kvepp's replicas share what runs by --replica-service")
		}
	}
}

// prefixes says how kvepp knows cached prefixes, and which token ids it needs for that.
func (t *translation) prefixes() {
	if t.random {
		return
	}
	row := t.add("prefixes", "", Maps, "")
	switch {
	case t.prefix == announced && t.engines:
		row.set("--router-kv-events=true")
		row.Says = "KV events of the engines"
	case t.prefix != noPrefix:
		row.set("--router-kv-events=false", "--router-approximate-cache-policy=lru",
			"--kv-cache-block-size="+strconv.Itoa(estimatedBlock))
		row.Says = "a worker holds what it was sent"
	default:
		row.set("--router-kv-events=false")
		row.Says = "no plugin looks at prefixes: by load alone"
		return
	}
	t.settings.EstimateTokens = true
	if t.settings.AskEngines = t.tokens; t.settings.TokenizerURL != "" {
		row.Says += "; token ids from " + t.settings.TokenizerURL
	} else if t.tokens {
		row.Says += "; token ids from the engines"
	}
	row.Says += "; else 4 bytes count as a token"
}

// estimatedBlock is llm-d's least block of approximate prefixes, in tokens.
const estimatedBlock = 64

func readsPrefix(t *translation, p *plugin, row *Row) {
	t.prefix = max(t.prefix, assumed)
	if p.kind == "approx-prefix-cache-producer" && t.prefix == announced {
		row.Says = "another producer knows prefixes better"
	}
}

// followEvents follows a producer that reads KV events.
func followEvents(t *translation, p *plugin, row *Row) {
	t.prefix, t.tokens = announced, true
	at := p.parameters.at
	events := func(key string) *value { return at("kvEventsConfig." + key) }
	if at("indexerConfig.kvBlockIndexConfig.redisConfig") != nil {
		row.refuse("redisConfig: kvepp keeps its index in memory, one in each replica")
		return
	}
	if t.engines = events("discoverPods").is(true); !t.engines {
		row.approximate("kvepp binds no socket for engines' events (%q): it assumes that a worker holds what it was "+
			"sent", events("zmqEndpoint").text())
		return
	}
	for key, flag := range map[string]string{"socketPort": "--kv-events-port", "replaySocketPort": "--kv-replay-port"} {
		if port := events("podDiscoveryConfig." + key); port != nil {
			row.set(flag + "=" + port.text())
		}
	}
	slices.Sort(row.Settings)
	if at("speculativeIndexing").is(false) {
		ttl, err := time.ParseDuration(at("speculativeTTL").text())
		if err != nil || ttl <= 0 {
			ttl = 2 * time.Second
		}
		row.set("--router-predicted-ttl-secs=" + strconv.FormatFloat(ttl.Seconds(), 'f', -1, 64))
	}
	if at("tokenProcessorConfig") != nil {
		row.Says += "; block size and hash seed come from the events"
	}
	if at("indexerConfig") != nil {
		row.approximate("--index-max-bytes bounds the index; blocks in host memory and on disk count for " +
			"--router-host-cache-hit-weight and --router-disk-cache-hit-weight")
	}
}

// askForTokens follows a producer of token ids.
func askForTokens(t *translation, p *plugin, row *Row) {
	at := p.parameters.at
	switch {
	case at("vllm.endpointDiscovery") != nil:
		t.tokens = true
		row.Says = "token ids from the pool's own engines"
	case at("vllm") != nil:
		t.tokens = true
		t.settings.TokenizerURL = cmp.Or(at("vllm.url").text(), "http://localhost:8000")
		t.settings.TokenizerTimeout = 5 * time.Second
		if d, err := time.ParseDuration(at("vllm.timeout").text()); err == nil && d > 0 {
			t.settings.TokenizerTimeout = d
		}
		t.settings.TokenizerModel = at("modelName").text()
		row.Says = "token ids from " + t.settings.TokenizerURL + " for every served model"
		if d := t.settings.TokenizerTimeout; d > router.DefaultPickTimeout {
			row.set("--pick-timeout=" + d.String())
		}
	case at("udsTokenizerConfig") != nil:
		row.Verdict, row.Says = Approximated, "kvepp asks no tokenizer over a Unix socket: 4 bytes count as a token"
	default:
		row.Verdict, row.Says = Approximated, "4 bytes count as a token"
	}
}

func pick(arguments ...string) func(*translation, *plugin, *Row) {
	return func(t *translation, p *plugin, row *Row) {
		row.set(arguments...)
		t.random = t.random || p.kind == "random-picker"
		if n := p.parameters.at("maxNumOfEndpoints").number(1); n > 1 {
			row.set("--fallback-endpoints=" + strconv.Itoa(min(n-1, router.MaxFallbacks)))
			if n-1 > router.MaxFallbacks {
				row.approximate("at most %d further endpoints", router.MaxFallbacks)
			}
		}
	}
}

// keepSessions follows a plugin of session affinity.
func keepSessions(mode string) func(*translation, *plugin, *Row) {
	return func(t *translation, p *plugin, row *Row) {
		at := p.parameters.at
		if at("strategy").text() != "session_id" {
			header := cmp.Or(at("encodedEndpointHeaderConfig.header").text(), at("headerName").text(),
				"x-session-token")
			t.settings.SessionTokenHeader = strings.ToLower(header)
			t.settings.SessionTokenSoft = mode == "soft"
			row.Says = "responses name their endpoint in " + header + ", and requests return there"
			return
		}
		ttl := at("sessionIdConfig.evictionTtlSeconds").number(300)
		row.set("--router-session-affinity-ttl-secs="+strconv.Itoa(ttl), "--router-session-affinity-mode="+mode)
		headers := []string{}
		for _, source := range at("sessionIdConfig.sources").list() {
			if header := source.at("header").text(); header != "" {
				headers = append(headers, strings.ToLower(header))
			}
		}
		if len(headers) == 0 {
			headers = []string{"x-session-id"}
		}
		t.settings.SessionHeaders = append(t.settings.SessionHeaders, headers...)
	}
}

func nameSessions(t *translation, p *plugin, row *Row) {
	if header := p.parameters.at("headerName").text(); header != "" {
		t.settings.SessionHeaders = append(t.settings.SessionHeaders, strings.ToLower(header))
		return
	}
	row.Verdict, row.Says = Approximated, "kvepp reads no cookies: their sessions have no affinity"
}

// scrape follows the source of engines' metrics.
func scrape(t *translation, p *plugin, row *Row) {
	for key, flag := range map[string]string{"scheme": "scheme", "path": "path", "port": "port",
		"insecureSkipVerify": "https-insecure-skip-verify"} {
		if v := p.parameters.at(key); v != nil {
			row.set("--model-server-metrics-" + flag + "=" + v.text())
		}
	}
	slices.Sort(row.Settings)
	if v := p.parameters.at("interval"); v != nil {
		row.set("--refresh-metrics-interval=" + v.text())
	}
	for _, key := range []string{"clientCertPath", "clientKeyPath"} {
		if p.parameters.at(key).text() != "" {
			row.refuse("%s: kvepp shows engines no certificate", key)
		}
	}
	if p.parameters.at("caCertPath").text() != "" && row.Verdict != Refused {
		row.approximate("caCertPath: kvepp trusts the system's authorities (SSL_CERT_FILE)")
	}
}

// nameMetrics follows the extractor of engines' metrics.
func nameMetrics(t *translation, p *plugin, row *Row) {
	engine := cmp.Or(p.parameters.at("defaultEngine").text(), "vllm")
	var named []string
	for _, v := range p.parameters.at("engineConfigs").list() {
		if v.at("name").text() != engine {
			continue
		}
		for _, metric := range [][2]string{{"queuedRequestsSpec", "queued"}, {"runningRequestsSpec", "running"},
			{"kvUsageSpec", "usage"}} {
			if spec := v.at(metric[0]).text(); spec != "" {
				named = append(named, metric[1]+"="+spec)
			}
		}
	}
	if len(named) > 0 {
		row.set("--engine-metrics=" + strings.Join(named, ","))
	}
}

// detect follows a saturation detector. Flow control is off if this is reached without a refusal.
func detect(t *translation, p *plugin, row *Row) {
	for _, f := range t.profiles {
		if !slices.Contains(f.plugins, p) {
			continue
		}
		if p.kind == "concurrency-detector" {
			row.refuse("as a filter: %s", sayHard)
			return
		}
		row.Verdict = Approximated
		row.Says = "as a filter: --active-decode-blocks-threshold and similar flags leave out busy endpoints"
		return
	}
	if t.document.at("flowControl.saturationDetector.pluginRef").text() == p.name ||
		t.document.at("saturationDetector.pluginRef").text() == p.name {
		row.Verdict = Approximated
		row.Says = "kvepp refuses requests of negative priority only while requests wait (--router-queue-threshold)"
	}
}

func discoverInFile(t *translation, p *plugin, row *Row) {
	path := p.parameters.at("path").text()
	if path == "" {
		row.refuse("path: must name a file")
		return
	}
	row.set("--endpoints=" + path)
	t.settings.EndpointsFile = path
	if !p.parameters.at("watchFile").is(false) {
		row.approximate("kvepp reads the file again when it changes, also without watchFile")
	}
}

func sendToPrimary(t *translation, p *plugin, _ *Row) {
	t.settings.PrimaryPort = p.parameters.at("primaryPort").number(8000)
}
