package llmd

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvepp/router"
	"kvepp/serve/models"
)

// Row is what a part of a configuration means here.
type Row struct {
	Name, Type string
	Verdict    Verdict
	Settings   []string // arguments of kvepp serve
	Says       string

	of *plugin // nil: it is about another part
}

// at returns a parameter of the row's plugin.
func (r *Row) at(path string) *value { return r.of.parameters.at(path) }

// Table returns the rows as lines of text.
func Table(rows []Row) (out string) {
	for _, r := range rows {
		name := r.Name
		if r.Type != "" && r.Type != r.Name {
			name += " (" + r.Type + ")"
		}
		means := append([]string{string(r.Verdict)}, r.Settings...)
		out += name + ": " + strings.Join(means, " ") + ": " + r.Says + "\n"
	}
	return out
}

// translation is a configuration on its way to a Seat.
type translation struct {
	*config
	rows     []*Row
	settings Settings
	split    *Row // of the handler of prefill and decode
	prefixes bool // cached prefixes count
	engines  bool // and engines publish KV events at their own sockets
	random   bool // endpoints are chosen at random
}

// means translates a configuration. settings are those of the command line.
func (c *config) means(settings Settings) *translation {
	t := &translation{config: c, settings: settings}
	for _, p := range c.plugins {
		row := t.add(p.name, p.kind, p.Verdict, p.Says)
		switch row.of = p; {
		case !p.used && !p.may("producer") && (p.chooses() || p.may("decider")):
			if row.Verdict = Ignored; !p.may("detector") {
				row.Says = "nothing refers to it"
			}
		case p.means != nil:
			p.means(t, row)
		}
		if p.alpha && row.Verdict != Refused {
			row.Says += "; needs --allow-experimental-plugins"
		}
	}
	if c.gates["flowControl"] {
		t.flowControl()
	}
	t.sections()
	t.stages()
	t.tokens()
	return t
}

func (t *translation) add(name, kind string, verdict Verdict, says string) *Row {
	row := &Row{Name: name, Type: kind, Verdict: verdict, Says: says}
	t.rows = append(t.rows, row)
	return row
}

// set adds arguments of kvepp serve.
func (r *Row) set(arguments ...string) { r.Settings = append(r.Settings, arguments...) }

// copy sets a flag to a parameter, if that is given.
func (r *Row) copy(parameter, flag string) {
	if v := r.at(parameter); v != nil {
		r.set(flag + "=" + v.text())
	}
}

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
	if t.at("flowControl") != nil && !t.gates["flowControl"] {
		t.add("flowControl", "", Ignored, sayGateOff)
	}
	if on, given := t.gates["haPopulateNonLeaderDatastore"]; given && !on {
		t.add("featureGates", "haPopulateNonLeaderDatastore", Ignored, "each replica always knows the endpoints")
	}
	scrapes := func(p *plugin) bool { return p.kind == "metrics-data-source" }
	if !t.at("dataLayer.injectDefaults").yes(true) && !slices.ContainsFunc(t.plugins, scrapes) {
		t.add("dataLayer", "injectDefaults", Maps, "no metrics of engines").set("--refresh-metrics-interval=0s")
	}
	if t.at("requestHandler.propagatePriority").yes(false) {
		t.add("requestHandler", "propagatePriority", Refused, "kvepp writes no priority into bodies")
	}
	parsers := t.at("requestHandler.parsers").list()
	passes := func(v *value) bool { return t.kindOf(v, "pluginRef") == "passthrough-parser" }
	if len(parsers) > 0 && !slices.ContainsFunc(parsers, passes) {
		t.add("requestHandler", "parsers", Approximated,
			"kvepp routes paths that no parser knows by load; llm-d answers 400")
	}
	if cmp.Or(t.at("dataLayer.crossReplica.syncerPluginRef"), t.at("dataLayer.crossReplicaSyncerPluginRef")) != nil {
		t.add("dataLayer", "crossReplica", Ignored, "kvepp's replicas share what runs by --replica-service")
	}
}

// tokens says how kvepp knows cached prefixes, and who knows token ids.
func (t *translation) tokens() {
	if t.random {
		return
	}
	row := t.add("prefixes", "", Maps, "no plugin looks at prefixes: by load alone")
	t.settings.Events = t.settings.Events || t.engines
	row.set("--router-kv-events=" + strconv.FormatBool(t.settings.Events))
	if t.settings.EstimateTokens = t.settings.Events || t.prefixes; !t.settings.EstimateTokens {
		return
	}
	row.Says = "KV events of the engines"
	if !t.settings.Events {
		row.set("--router-approximate-cache-policy=lru", "--kv-cache-block-size=64") // llm-d's least block, in tokens
		row.Says = "a worker holds what it was sent; --router-kv-events follows the engines' KV events instead"
	}
	others := &t.settings.Others
	others.Engines = others.URL == ""
	row.Says += "; token ids from " + cmp.Or(others.URL, "the engines") + "; else 4 bytes count as a token"
}

func readsPrefix(t *translation, row *Row) {
	t.prefixes = true
	if row.Type == "approx-prefix-cache-producer" && t.engines {
		row.Says = "another producer knows prefixes better"
	}
}

// followEvents follows a producer that reads KV events.
func followEvents(t *translation, row *Row) {
	t.prefixes = true
	if row.at("indexerConfig.kvBlockIndexConfig.redisConfig") != nil {
		row.refuse("redisConfig: kvepp keeps its index in memory, one in each replica")
		return
	}
	events := row.at("kvEventsConfig").at
	if t.engines = events("discoverPods").yes(true); !t.engines {
		row.approximate("kvepp binds no socket for engines' events (%q): it assumes that a worker holds what it was "+
			"sent", events("zmqEndpoint").text())
		return
	}
	row.copy("kvEventsConfig.podDiscoveryConfig.socketPort", "--kv-events-port")
	row.copy("kvEventsConfig.podDiscoveryConfig.replaySocketPort", "--kv-replay-port")
	row.setEngine(events("engineType").text())
	if row.at("speculativeIndexing").yes(false) {
		ttl := row.at("speculativeTTL").time(2 * time.Second).Seconds()
		row.set("--router-predicted-ttl-secs=" + strconv.FormatFloat(ttl, 'f', -1, 64))
	}
	if row.at("tokenProcessorConfig") != nil {
		row.Says += "; block size and hash seed come from the events"
	}
	if row.at("indexerConfig") != nil {
		row.approximate("--index-max-bytes bounds the index; blocks in host memory and on disk count for " +
			"--router-host-cache-hit-weight and --router-disk-cache-hit-weight")
	}
}

// askForTokens follows a producer of token ids.
func askForTokens(t *translation, row *Row) {
	row.Says = "token ids from the pool's own engines"
	if row.at("vllm") != nil && row.at("vllm.endpointDiscovery") == nil {
		to := models.Others{URL: cmp.Or(row.at("vllm.url").text(), "http://localhost:8000"),
			Timeout: row.at("vllm.timeout").time(5 * time.Second), Model: row.at("modelName").text()}
		t.settings.Others = to
		row.Says = "token ids from " + to.URL + " for every served model"
		if to.Timeout > router.DefaultPickTimeout {
			row.set("--pick-timeout=" + to.Timeout.String())
		}
	}
	if row.at("udsTokenizerConfig") != nil {
		row.approximate("kvepp asks no tokenizer over a Unix socket")
	}
}

func pick(arguments ...string) func(*translation, *Row) {
	return func(t *translation, row *Row) {
		row.set(arguments...)
		t.random = t.random || row.Type == "random-picker"
		if n := row.at("maxNumOfEndpoints").number(1); n > 1 {
			row.set("--fallback-endpoints=" + strconv.Itoa(min(n-1, router.MaxFallbacks)))
			row.Says += "; further ones for a proxy that shows that it takes several"
			if n-1 > router.MaxFallbacks {
				row.approximate("at most %d further endpoints", router.MaxFallbacks)
			}
		}
	}
}

// keepSessions follows a plugin of session affinity.
func keepSessions(mode string) func(*translation, *Row) {
	return func(t *translation, row *Row) {
		to := &t.settings.Conventions
		if row.at("strategy").text() != "session_id" {
			header := cmp.Or(row.at("encodedEndpointHeaderConfig.header").text(), row.at("headerName").text(),
				"x-session-token")
			to.TokenHeader, to.TokenSoft = strings.ToLower(header), mode == "soft"
			row.Says = "responses name their endpoint in " + header + ", and requests return there"
			return
		}
		ttl := row.at("sessionIdConfig.evictionTtlSeconds").number(300)
		row.set("--router-session-affinity-ttl-secs="+strconv.Itoa(ttl), "--router-session-affinity-mode="+mode)
		known := len(to.SessionHeaders)
		for _, source := range row.at("sessionIdConfig.sources").list() {
			if header := source.at("header").text(); header != "" {
				to.SessionHeaders = append(to.SessionHeaders, strings.ToLower(header))
			}
		}
		if len(to.SessionHeaders) == known {
			to.SessionHeaders = append(to.SessionHeaders, "x-session-id")
		}
	}
}

func nameSessions(t *translation, row *Row) {
	header := strings.ToLower(row.at("headerName").text())
	if header == "" {
		row.Verdict, row.Says = Approximated, "kvepp reads no cookies: their sessions have no affinity"
		return
	}
	t.settings.Conventions.SessionHeaders = append(t.settings.Conventions.SessionHeaders, header)
}

// scrape follows the source of engines' metrics.
func scrape(t *translation, row *Row) {
	row.copy("insecureSkipVerify", "--model-server-metrics-https-insecure-skip-verify")
	for _, name := range []string{"path", "port", "scheme"} {
		row.copy(name, "--model-server-metrics-"+name)
	}
	row.copy("interval", "--refresh-metrics-interval")
	to := &t.settings
	to.EngineCA, to.EngineCertificate = row.at("caCertPath").text(), row.at("clientCertPath").text()
	to.EngineKey = row.at("clientKeyPath").text()
	if (to.EngineCertificate == "") != (to.EngineKey == "") {
		row.refuse("clientCertPath and clientKeyPath: give both or neither")
	}
}

// setEngine names the engine whose rules turn requests into token ids, unless kvepp takes it without that or has none.
func (r *Row) setEngine(llmd string) {
	if engine := map[string]string{"sglang": "sglang", "trtllm-serve": "trtllm"}[llmd]; engine != "" {
		r.set("--engine=" + engine)
	}
}

// nameMetrics follows the extractor of engines' metrics.
func nameMetrics(_ *translation, row *Row) {
	engine, named := cmp.Or(row.at("defaultEngine").text(), "vllm"), []string{}
	for _, v := range row.at("engineConfigs").list() {
		for _, metric := range [][2]string{{"queuedRequestsSpec", "queued"}, {"runningRequestsSpec", "running"},
			{"kvUsageSpec", "usage"}, {"loraSpec", "lora"}} {
			if spec := v.at(metric[0]).text(); v.at("name").text() == engine && spec != "" {
				named = append(named, metric[1]+"="+spec)
			}
		}
	}
	if len(named) > 0 {
		row.set("--engine-metrics=" + strings.Join(named, ","))
	}
	row.setEngine(engine)
}

// detect follows a saturation detector.
func detect(t *translation, row *Row) {
	isFilter := false
	for _, plugins := range t.profiles {
		isFilter = isFilter || slices.Contains(plugins, row.of)
	}
	switch name := row.Name; {
	case isFilter && row.Type == "concurrency-detector":
		row.refuse("as a filter: %s", sayHard)
	case isFilter:
		row.Verdict = Approximated
		row.Says = "as a filter: --active-decode-blocks-threshold and similar flags leave out busy endpoints"
	case t.gates["flowControl"]:
	case t.at("flowControl.saturationDetector.pluginRef").text() == name,
		t.at("saturationDetector.pluginRef").text() == name:
		row.Verdict = Approximated
		row.Says = "kvepp refuses requests of negative priority only while requests wait (--router-queue-threshold)"
	}
}

func discoverInFile(t *translation, row *Row) {
	t.settings.EndpointsFile = row.at("path").text()
	if row.copy("path", "--endpoints"); t.settings.EndpointsFile == "" {
		row.refuse("path: must name a file")
	} else if !row.at("watchFile").yes(false) {
		row.approximate("kvepp reads the file again when it changes, also without watchFile")
	}
}

func sendToPrimary(t *translation, row *Row) {
	t.settings.Conventions.PrimaryPort = row.at("primaryPort").number(8000)
}

func preferLength(_ *translation, row *Row) {
	if row.at("enableFiltering").yes(false) {
		row.refuse("enableFiltering: %s", sayHard)
	}
}

func bookOutput(_ *translation, row *Row) {
	if row.at("addEstimatedOutputTokens").yes(false) {
		row.set("--router-track-output-blocks=true")
	}
}
