package check

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"kvepp/internal/useragent"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
)

// engines maps owned_by in /v1/models to the engine.
var engines = map[string]prompt.Engine{
	"vllm":         prompt.VLLM,
	"sglang":       prompt.SGLang,
	"tensorrt_llm": prompt.TRTLLM,
	"nvidia":       prompt.Dynamo,
}

// engineNames are the engines' names in findings.
var engineNames = map[prompt.Engine]string{
	prompt.VLLM: "vLLM", prompt.SGLang: "SGLang", prompt.TRTLLM: "TensorRT-LLM",
	prompt.Dynamo: "a frontend of Dynamo's",
}

// maxResponse bounds the bytes that are read of a response.
const maxResponse = 16 << 20

// The settings that kvepp needs at each engine. Source: the engines' own help: vLLM 0.33, SGLang 0.5.21, TensorRT-LLM
// 1.3, Dynamo 1.6.1.
var (
	eventsFix = map[prompt.Engine]string{
		prompt.VLLM: `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq",` +
			`"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657"}'`,
		prompt.SGLang: `--kv-events-config '{"publisher":"zmq","endpoint":"tcp://*:5557",` +
			`"replay_endpoint":"tcp://*:5657"}'`,
		prompt.TRTLLM: `kv_cache_config: {enable_block_reuse: true, event_buffer_max_size: 1024} and a publisher ` +
			`of its events`,
		prompt.Dynamo: "the worker's own flag for KV events",
		"":            "its own flag for KV events", // the engine is unknown
	}
	usageFix = map[prompt.Engine]string{
		prompt.VLLM:   "--enable-prompt-tokens-details",
		prompt.SGLang: "--enable-cache-report",
		prompt.Dynamo: "Dynamo 1.6.1's workers report it without a flag: is this one of another version?",
	}
)

// get requests a page of an engine or of kvepp, with a bearer token if it is not empty, and passes the body to read.
func (cfg *Config) get(ctx context.Context, url, token string, read func(io.Reader) error) error {
	ctx, cancel := context.WithTimeout(ctx, cfg.Wait)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	useragent.Add(req)
	resp, err := cfg.HTTP.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", req.URL.Path, resp.Status)
	}
	return read(io.LimitReader(resp.Body, maxResponse))
}

func (q *workerCheck) getJSON(ctx context.Context, path string, into any) error {
	return q.get(ctx, "http://"+q.w.Address+path, "", func(body io.Reader) error {
		return json.NewDecoder(body).Decode(into)
	})
}

// askHTTP asks which engine answers and which models it serves.
func (q *workerCheck) askHTTP(ctx context.Context) {
	if q.w.Address == "" {
		q.unknown(AboutHTTP, "", "no address: only Dynamo can reach it")
		return
	}
	var models struct {
		Data []struct {
			ID      string `json:"id"`
			OwnedBy string `json:"owned_by"`
			Parent  string `json:"parent"`
		} `json:"data"`
	}
	if err := q.getJSON(ctx, "/v1/models", &models); err != nil {
		q.wrong(AboutHTTP, "check that the engine is up and that this is its address; Envoy must reach it too",
			"http://%s: %s", q.w.Address, briefError(err))
		return
	}
	q.responds = true
	var served []string
	for _, m := range models.Data {
		if q.engine = engines[m.OwnedBy]; m.Parent == "" { // otherwise an adapter
			served = append(served, m.ID)
		}
	}
	switch name := engineNames[q.engine]; {
	case name == "":
		q.ok(AboutHTTP, "an engine that kvepp does not know answers")
	case q.engine != q.Engine:
		q.wrong(AboutHTTP, "--engine "+string(q.engine),
			"%s answers, but kvepp is configured for %s", name, engineNames[q.Engine])
	default:
		q.ok(AboutHTTP, "%s answers", name)
	}
	q.askModels(served)
}

// askModels compares the served models with those that kvepp can tokenize.
func (q *workerCheck) askModels(served []string) {
	list := strings.Join(served, ", ")
	switch {
	case len(served) == 0:
		q.wrong(AboutModel, "wait until the engine has loaded its model", "the engine serves no model")
		return
	case q.w.Model != "" && !slices.Contains(served, q.w.Model):
		q.wrong(AboutModel, "correct the endpoint's model, or the engine's name for it",
			"serves %s, but kvepp is configured with %s", list, q.w.Model)
		return
	}
	q.model = served[0]
	if q.w.Model != "" {
		q.model = q.w.Model
	}
	if len(q.Models) == 0 {
		q.wrong(AboutModel, "--model "+q.model+"=DIR",
			"serves %s, but kvepp has no tokenizer: it routes all requests by load", list)
		return
	}
	for _, name := range served {
		model, named := q.Models[name]
		switch {
		case named && model == nil:
			q.wrong(AboutModel, "see kvepp's log for the cause",
				"kvepp could not load the tokenizer of %s, and routes its requests by load", name)
		case named && (q.w.Model == "" || name == q.w.Model):
			q.model = name
			q.ok(AboutModel, "serves %s", list)
			return
		}
	}
	if !q.hasFinding(AboutModel) {
		q.wrong(AboutModel, "--model "+q.model+"=DIR, with the engine's name",
			"serves %s, which no --model names: kvepp routes its requests by load", list)
	}
}

// settings are an engine's cache settings. Zero values are unknown.
type settings struct {
	blockSize int
	prefix    *bool
	usage     *bool // the engine reports cached tokens
}

// askSettings asks the engine about blocks and prefix caching, and Dynamo's frontend about the worker.
func (q *workerCheck) askSettings(ctx context.Context) {
	var s settings
	if q.responds {
		switch q.engine {
		case prompt.VLLM:
			s = q.vLLMSettings(ctx)
		case prompt.SGLang:
			s = q.sgLangSettings(ctx)
		case prompt.Dynamo:
			s = q.askFrontend(ctx)
		}
	}
	size, blocks := q.cacheOfPage(ctx)
	if q.w.Role != pool.Decode {
		q.compareBlockSizes(cmp.Or(s.blockSize, size))
	}
	if own := q.w.Endpoint.TotalKVBlocks; own > 0 && blocks > 0 {
		if held := blocks * size / cmp.Or(q.w.BlockSize, size); pool.Differ(held, own) {
			q.wrong(AboutBlocks, fmt.Sprintf("set totalKvBlocks to %d, or leave it out", held),
				"kvepp is configured with %d blocks, but the engine has room for %d", own, held)
		}
	}
	switch {
	case s.prefix == nil:
	case *s.prefix:
		q.ok(AboutPrefix, "on")
	case q.engine == prompt.VLLM:
		q.wrong(AboutPrefix, "--enable-prefix-caching", "off: nothing is ever cached")
	default:
		q.wrong(AboutPrefix, "start the engine without --disable-radix-cache", "off: nothing is ever cached")
	}
	if s.usage != nil && !*s.usage && q.prompt == nil { // otherwise the probe shows it
		q.wrong(AboutCachedUsed, usageFix[q.engine],
			"the engine does not report cached tokens, so kvepp cannot check its predictions")
	}
}

// cacheOfPage returns the tokens of a KV block, and the device's blocks, by the engine's metrics page; 0, 0 if it does
// not say both.
func (q *workerCheck) cacheOfPage(ctx context.Context) (blockSize, blocks int) {
	if q.responds {
		page := cmp.Or(q.w.Metrics, "http://"+q.w.Address+"/metrics")
		q.get(ctx, page, "", func(body io.Reader) (err error) { // an error leaves the sizes unknown
			blockSize, blocks, err = enginemetrics.ReadCache(body, q.w.Rank)
			return err
		})
	}
	return blockSize, blocks
}

func (q *workerCheck) vLLMSettings(ctx context.Context) (s settings) {
	// An error leaves the settings unknown.
	q.get(ctx, "http://"+q.w.Address+"/metrics", "", func(body io.Reader) error {
		lines := bufio.NewScanner(body)
		lines.Buffer(nil, 1<<20)
		for lines.Scan() {
			labels, ok := strings.CutPrefix(lines.Text(), "vllm:cache_config_info{")
			if !ok {
				continue
			}
			s.blockSize, _ = strconv.Atoi(label(labels, "block_size"))
			if on := label(labels, "enable_prefix_caching"); on != "" {
				is := on == "True"
				s.prefix = &is
			}
			return nil
		}
		return lines.Err()
	})
	return s
}

// label returns the value of one label; "" if it is missing.
func label(labels, name string) string {
	_, rest, ok := strings.Cut(","+labels, ","+name+`="`)
	if !ok {
		return ""
	}
	value, _, _ := strings.Cut(rest, `"`)
	return value
}

func (q *workerCheck) sgLangSettings(ctx context.Context) (s settings) {
	var info struct {
		PageSize     int   `json:"page_size"`
		DisableRadix *bool `json:"disable_radix_cache"`
		CacheReport  *bool `json:"enable_cache_report"`
		Version      string
	}
	// get_server_info is the older name.
	if q.getJSON(ctx, "/server_info", &info) != nil && q.getJSON(ctx, "/get_server_info", &info) != nil {
		return s
	}
	s.blockSize, s.usage, q.version = info.PageSize, info.CacheReport, info.Version
	if info.DisableRadix != nil {
		on := !*info.DisableRadix
		s.prefix = &on
	}
	return s
}

// askFrontend asks a Dynamo frontend whether it knows the worker by the id that kvepp would send.
func (q *workerCheck) askFrontend(ctx context.Context) (s settings) {
	ctx, cancel := q.withTimeout(ctx)
	defer cancel()
	view, err := dynamo.QueryFrontend(ctx, q.w.Address)
	if err != nil {
		q.unknown(AboutInstance, "", "the frontend does not list its workers: %s", briefError(err))
		return s
	}
	same := func(w dynamo.FrontendWorker) bool { return w.InstanceID == q.w.InstanceID }
	switch {
	case slices.ContainsFunc(view.Workers, same):
		q.ok(AboutInstance, "%d, known to the frontend", q.w.InstanceID)
	case len(view.Workers) == 0:
		q.wrong(AboutInstance, "wait for the worker, or give the frontend the worker's --namespace",
			"the frontend knows no worker")
	default:
		q.wrong(AboutInstance, "give the endpoint its instanceId or dynamo path (--dynamo-discovery)",
			"kvepp has %d, but the frontend knows %s: requests would fail", q.w.InstanceID, instanceIDs(view.Workers))
	}
	return settings{blockSize: view.Models[q.model].BlockSize}
}

func instanceIDs(workers []dynamo.FrontendWorker) string {
	var all []string
	for _, w := range workers {
		if all = append(all, strconv.FormatUint(w.InstanceID, 10)); len(all) == 4 && len(workers) > 5 {
			return fmt.Sprintf("%s and %d others", strings.Join(all, ", "), len(workers)-len(all))
		}
	}
	return strings.Join(all, ", ")
}

// compareBlockSizes compares the configured block size with those of the events and of the engine.
func (q *workerCheck) compareBlockSizes(engine int) {
	configured, announced := q.w.BlockSize, 0
	if q.prompt != nil {
		announced = q.prompt.events.blockSize()
	}
	switch known := max(configured, announced, engine); {
	case known == 0:
		q.unknown(AboutBlockSize, "use --probe, or set the endpoint's blockSize", "not known until the first event")
	case configured > 0 && announced > 0 && configured != announced:
		q.wrong(AboutBlockSize, fmt.Sprintf("set blockSize to %d, or leave it out", announced),
			"kvepp is configured with %d tokens, but the events have %d: no block would match", configured, announced)
	case configured > 0 && announced == 0 && engine > 0 && configured != engine:
		q.wrong(AboutBlockSize, fmt.Sprintf("set blockSize to %d, or leave it out", engine),
			"kvepp is configured with %d tokens, but the engine has %d: no block would match", configured, engine)
	case announced > 0:
		q.ok(AboutBlockSize, "%d tokens, as in the events", announced)
	default:
		q.ok(AboutBlockSize, "%d tokens", known)
	}
}
