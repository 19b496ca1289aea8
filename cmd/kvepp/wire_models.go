package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"kvepp/internal/metrics"
	"kvepp/pool/dynamo"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/prompt/remote"
)

// loadResult is the result of loading a tokenizer.
type loadResult struct {
	model *prompt.Model
	err   error
}

// loadModels loads the tokenizers, by model. A model whose tokenizer cannot be loaded, or not in time, and that has no
// --tokenizer-url, is nil: kvepp routes its requests by load.
func loadModels(o *options, log *slog.Logger) map[string]*prompt.Model {
	folders, urls := o.config.folders, o.config.urls
	if len(folders)+len(urls) == 0 {
		log.Warn("no --model is given: kvepp cannot tokenize prompts, and routes every request by load only")
	}
	models := make(map[string]*prompt.Model, len(folders))
	start := time.Now()
	loads := make(map[string]chan loadResult, len(folders))
	for name, dir := range folders {
		done := make(chan loadResult, 1)
		loads[name] = done
		go func() {
			model, err := prompt.Load(dir, o.config.engine)
			done <- loadResult{model, err}
		}()
	}
	within, cancel := context.WithTimeout(context.Background(), o.modelLoadTimeout)
	defer cancel()
	for name, dir := range folders {
		l := awaitLoad(within, loads[name], o.modelLoadTimeout)
		url := urls[name]
		switch {
		case l.err != nil && url != "":
			log.Warn(
				"the model's folder cannot be used: kvepp asks the engine for the token ids of its requests",
				"model", name, "url", maskPasswords(url), "error", l.err,
			)
		case l.err != nil:
			models[name] = nil
			log.Error(
				"the model's tokenizer cannot be loaded: its requests are routed by load only. Start kvepp with a "+
					"folder that it can use",
				"model", name, "folder", dir, "error", l.err,
			)
		default:
			models[name] = l.model
			logModel(log, name, dir, url, o.config.engine.Engine, l.model, time.Since(start))
		}
	}
	for name, url := range urls {
		if models[name] == nil {
			log.Info(
				"kvepp has no tokenizer of this model: its engine tokenizes its requests",
				"model", name, "url", maskPasswords(url), "template", "the engine's",
			)
		}
	}
	return models
}

// awaitLoad waits for one result until ctx ends.
func awaitLoad(ctx context.Context, result <-chan loadResult, timeout time.Duration) loadResult {
	select {
	case l := <-result:
		return l
	case <-ctx.Done():
	}
	select { // it may have come in time, while kvepp waited for another model
	case l := <-result:
		return l
	default:
		return loadResult{err: fmt.Errorf("not loaded within --model-load-timeout, %s; is its file system mounted?",
			timeout)}
	}
}

// logModel logs that a model is loaded, and what is special about it.
func logModel(
	log *slog.Logger,
	name, dir, url string,
	engine prompt.Engine,
	model *prompt.Model,
	took time.Duration,
) {
	if model.GeneralPattern() {
		log.Warn(
			"kvepp has no scanner for the model's pre-tokenizer pattern: it uses the general regular-expression "+
				"engine, which is exact but slower",
			"model",
			name,
		)
	}
	warnUpperBound(log, name, dir, model)
	level, template := templateOf(model, url)
	log.Log(context.Background(), level, "model loaded", "model", name, "folder", dir, "engine", engine,
		"template", template, "took", took.Round(time.Millisecond))
}

// warnUpperBound logs that predicted cached tokens of a model on SGLang are an upper bound, and why.
func warnUpperBound(log *slog.Logger, name, dir string, model *prompt.Model) {
	switch {
	case !model.OverlapIsUpperBound():
	case model.HasConfig():
		log.Info(
			"SGLang's KV events omit some evictions of this hybrid model: predicted cached tokens are an upper bound",
			"model",
			name,
		)
	default:
		log.Warn(
			"the model's folder has no config.json, so kvepp does not know whether the model is a hybrid one. "+
				"SGLang's "+
				"KV events omit some evictions of hybrid models, so kvepp treats predicted cached tokens as an upper "+
				"bound. Put the model's config.json into the folder",
			"model",
			name,
			"folder",
			dir,
		)
	}
}

// upperBound returns router.Config.UpperBound: with SGLang, predictions are exact only for models that are known not to
// be hybrid.
func upperBound(engine prompt.Engine, models map[string]*prompt.Model) func(string) bool {
	if engine != prompt.SGLang {
		return nil
	}
	return func(name string) bool {
		model := models[name]
		return model == nil || model.OverlapIsUpperBound()
	}
}

// templateOf renders a short chat with a model. It returns what the log says about its chat template, and the level.
// url is the model's --tokenizer-url; "" if there is none.
func templateOf(model *prompt.Model, url string) (slog.Level, string) {
	instead := "chats are routed by load"
	if url != "" {
		instead = "kvepp asks --tokenizer-url for the token ids of chats"
	}
	chat, err := body.ParseRequest(
		"/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"Hello"}]}`),
	)
	if err == nil {
		_, err = model.Tokenize(context.Background(), chat)
	}
	switch {
	case err == nil && model.ChatEncoder() != "":
		return slog.LevelInfo, "none needed: chats are encoded like " + model.ChatEncoder()
	case err == nil:
		return slog.LevelInfo, "yes"
	case errors.Is(err, prompt.ErrNoChatTemplate):
		return slog.LevelWarn, "none (" + instead + ")"
	}
	return slog.LevelWarn, fmt.Sprintf("unusable (%s): %v", instead, err)
}

// modelFiles computes the checksums of the loaded models' files, to compare them with those of Dynamo's model cards.
func modelFiles(o *options, models map[string]*prompt.Model) (map[string]dynamo.ModelFiles, error) {
	files := map[string]dynamo.ModelFiles{}
	if o.dynamoDiscovery == "" && !(o.kube.Used() && o.config.engine.Engine == prompt.Dynamo) {
		return files, nil
	}
	folders := o.config.folders
	for name, model := range models {
		if model == nil {
			continue
		}
		var err error
		if files[name], err = dynamo.ReadModelFiles(folders[name], o.chatTemplate); err != nil {
			return nil, fmt.Errorf("--model %s=%s: %w", name, folders[name], err)
		}
	}
	return files, nil
}

// logMismatches logs the files of workers that differ from kvepp's. logged are the mismatches of the last call, which
// are not logged again.
func logMismatches(log *slog.Logger, mismatches []dynamo.Mismatch, logged map[dynamo.Mismatch]bool) {
	for _, d := range mismatches {
		if !logged[d] {
			log.Error(
				"a worker's model file differs from kvepp's: kvepp routes to the worker by load only. Give kvepp the "+
					"folder that the worker serves (--model), and its template (--chat-template)",
				"worker",
				d.Endpoint,
				"file",
				d.File,
				"own",
				d.Own,
				"worker's",
				d.Worker,
			)
		}
	}
	clear(logged)
	for _, d := range mismatches {
		logged[d] = true
	}
}

// remoteTokenizers makes the clients of --tokenizer-url, by model. They send key.
func remoteTokenizers(
	o *options,
	key func() string,
	m *metrics.Metrics,
	log *slog.Logger,
) (map[string]*remote.Client, error) {
	urls := o.config.urls
	clients := make(map[string]*remote.Client, len(urls))
	for name, url := range urls {
		client, err := remote.New(
			remote.Config{
				Model:   name,
				URL:     url,
				Engine:  o.config.engine.Engine,
				APIKey:  key,
				Timeout: o.tokenizerURLTimeout,
			},
			m,
			log,
		)
		if err != nil {
			return nil, fmt.Errorf("--tokenizer-url %s=%s: %w", name, url, err)
		}
		clients[name] = client
		metrics.Flag(m, metrics.TokenizerURLOpen, client.IsOpen, "model", name)
	}
	return clients, nil
}

// startChecks compares the token ids of models with those of their engines (--tokenizer-check) until ctx ends.
func startChecks(
	ctx context.Context,
	o *options,
	models map[string]*prompt.Model,
	engines map[string]*remote.Client,
	log *slog.Logger,
) map[string]*remote.Check {
	checks := map[string]*remote.Check{}
	finder := newFinder(o, func() {})
	if finder != nil {
		finder.Want(slices.Collect(maps.Values(o.config.urls)))
		go finder.Run(ctx)
	}
	if o.tokenizerCheck == 0 {
		return checks
	}
	for name, model := range models {
		engine := engines[name]
		if model == nil {
			continue
		}
		if engine == nil {
			log.Warn(
				"--tokenizer-check: this model has no --tokenizer-url, so kvepp does not check it",
				"model",
				name,
			)
			continue
		}
		tokenize := model.Tokenize
		if url := o.config.urls[name]; finder != nil {
			tokenize = func(ctx context.Context, request *body.Request) ([]prompt.Prompt, error) {
				return versionAt(ctx, finder, url, model).Tokenize(ctx, request)
			}
		}
		checks[name] = remote.NewCheck(tokenize, engine, o.tokenizerCheck)
		go checks[name].Run(ctx)
	}
	return checks
}

// applySettings gives the settings of Dynamo's workers that change prompts to the tokenizers of their models.
func applySettings(models map[string]*prompt.Model, instances []dynamo.Instance, problems *dedupLog) {
	workers := map[string][]prompt.DynamoSettings{}
	for _, in := range instances {
		// instances that a frontend lists have no card
		if in.Card == nil || len(in.Card.RuntimeConfig) == 0 || models[in.Card.Model] == nil {
			continue
		}
		settings, err := prompt.ParseDynamoSettings(in.Card.RuntimeConfig)
		if err != nil {
			problems.warn(
				fmt.Sprintf(
					"kvepp cannot read the model card of a worker of %q, so it may predict its prompts wrongly: %v",
					in.Card.Model,
					err,
				),
			)
			continue
		}
		if all := workers[in.Card.Model]; len(all) > 0 && all[0] != settings {
			problems.warn(
				fmt.Sprintf(
					"the model cards of the workers of %q differ in settings that change prompts: kvepp routes its "+
						"chats "+
						"by load. Give all workers of a model the same --dyn-reasoning-parser, "+
						"--dyn-tool-call-parser and so on",
					in.Card.Model,
				),
			)
		}
		workers[in.Card.Model] = append(workers[in.Card.Model], settings)
	}
	for name, model := range models {
		if model != nil {
			model.SetDynamo(workers[name])
		}
	}
}

// exportModels exports the state of the models.
func exportModels(m *metrics.Metrics, models map[string]*prompt.Model) {
	without := 0
	for _, model := range models {
		if model == nil {
			without++
		}
	}
	metrics.Gauge(m, metrics.ModelsWithoutTokenizer, func() int { return without })
}
