package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvepp/internal/apibody"
	"kvepp/internal/metrics"
	"kvepp/pool/dynamo"
	"kvepp/tokenizer"
	"kvepp/tokenizer/remote"
)

// loaded is what came of reading a tokenizer.
type loaded struct {
	model *tokenizer.Model
	err   error
}

// loadModels reads the tokenizers, by model. A model whose tokenizer cannot be loaded, or not in time, and whose engine
// is not asked in its place, has a nil one: requests for it can still be routed by load.
func loadModels(o *options, log *slog.Logger) (map[string]*tokenizer.Model, error) {
	folders, err := o.modelFolders()
	if err != nil {
		return nil, err
	}
	urls, err := o.tokenizerURLsByModel()
	if err != nil {
		return nil, err
	}
	if len(folders)+len(urls) == 0 {
		log.Warn("no --model is given: no prompt can be tokenized, every request is routed by load only")
	}
	served, err := o.tokenizerOptions()
	if err != nil {
		return nil, err
	}
	models := make(map[string]*tokenizer.Model, len(folders))
	start := time.Now()
	loads := make(map[string]chan loaded, len(folders))
	for name, dir := range folders {
		done := make(chan loaded, 1)
		loads[name] = done
		go func() {
			model, err := tokenizer.Load(dir, served)
			done <- loaded{model, err}
		}()
	}
	within, cancel := context.WithTimeout(context.Background(), o.modelLoadTimeout)
	defer cancel()
	for name, dir := range folders {
		var l loaded
		select {
		case l = <-loads[name]:
		case <-within.Done():
			select { // it may have come in time, while another was waited for
			case l = <-loads[name]:
			default:
				l.err = fmt.Errorf(
					"not loaded after --model-load-timeout, %s; is its file system there?",
					o.modelLoadTimeout,
				)
			}
		}
		switch {
		case l.err != nil && urls[name] != "":
			log.Warn(
				"the model's folder cannot be used: the engine is asked for the tokens of its requests",
				"model",
				name,
				"url",
				maskPasswords(urls[name]),
				"error",
				l.err,
			)
			continue
		case l.err != nil:
			models[name] = nil
			log.Error(
				"the model's tokenizer cannot be loaded: its requests are routed by load only. Start kvepp with a "+
					"folder that it can use",
				"model",
				name,
				"folder",
				dir,
				"error",
				l.err,
			)
			continue
		}
		models[name] = l.model
		if l.model.GeneralPattern() {
			log.Warn(
				"the model's pre-tokenizer pattern has no scanner of its own: it runs on the general engine, exactly "+
					"but slower",
				"model",
				name,
			)
		}
		tellUpperBound(log, name, dir, l.model)
		level, template := templateOf(l.model, urls[name])
		log.Log(
			context.Background(),
			level,
			"model loaded",
			"model",
			name,
			"folder",
			dir,
			"engine",
			served.Engine,
			"template",
			template,
			"took",
			time.Since(start).Round(time.Millisecond),
		)
	}
	for name, url := range urls {
		if models[name] == nil {
			log.Info(
				"model without a tokenizer of kvepp's: its engine tokenizes its requests",
				"model",
				name,
				"url",
				maskPasswords(url),
				"template",
				"the engine's",
			)
		}
	}
	return models, nil
}

// tellUpperBound logs that what is predicted for a model on SGLang is an upper bound, and why.
func tellUpperBound(log *slog.Logger, name, dir string, model *tokenizer.Model) {
	switch {
	case !model.OverlapIsUpperBound():
	case model.HasConfig():
		log.Info(
			"SGLang's events do not tell all that it evicts of this hybrid model: predicted cached tokens are an "+
				"upper bound",
			"model",
			name,
		)
	default:
		log.Warn(
			"the model's folder has no config.json, which says whether it is a hybrid model. SGLang's events do not "+
				"tell all that it evicts of those, "+
				"so predicted cached tokens count as an upper bound. Put the model's config.json into the folder",
			"model",
			name,
			"folder",
			dir,
		)
	}
}

// upperBound returns router.Config.UpperBound: with SGLang, what is predicted is exact only for a model that is known
// to be no hybrid.
func upperBound(engine tokenizer.Engine, models map[string]*tokenizer.Model) func(string) bool {
	if engine != tokenizer.SGLang {
		return nil
	}
	return func(name string) bool {
		model := models[name]
		return model == nil || model.OverlapIsUpperBound()
	}
}

// templateOf renders a short chat with a model, and returns what a log says of its chat template, and at which level.
// url is the model's --tokenizer-url; "" if there is none.
func templateOf(model *tokenizer.Model, url string) (slog.Level, string) {
	instead := "chats are routed by load"
	if url != "" {
		instead = "--tokenizer-url is asked for the tokens of chats"
	}
	chat, err := apibody.ParseRequest(
		"/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"Hello"}]}`),
	)
	if err == nil {
		_, err = model.Tokenize(context.Background(), chat)
	}
	switch {
	case err == nil:
		return slog.LevelInfo, "yes"
	case errors.Is(err, tokenizer.ErrNoChatTemplate):
		return slog.LevelWarn, "none (" + instead + ")"
	}
	return slog.LevelWarn, fmt.Sprintf("unusable (%s): %v", instead, err)
}

// modelFiles computes the checksums of the loaded models' files, for comparison with those of Dynamo's model cards.
func modelFiles(o *options, models map[string]*tokenizer.Model) (map[string]dynamo.ModelFiles, error) {
	files := map[string]dynamo.ModelFiles{}
	if engine, err := o.tokenizerOptions(); err != nil ||
		o.dynamoDiscovery == "" && !(o.wanted() && engine.Engine == tokenizer.Dynamo) {
		return files, err
	}
	folders, err := o.modelFolders()
	if err != nil {
		return nil, err
	}
	for name, model := range models {
		if model == nil {
			continue
		}
		if files[name], err = dynamo.ReadModelFiles(folders[name], o.chatTemplate); err != nil {
			return nil, fmt.Errorf("--model %s=%s: %w", name, folders[name], err)
		}
	}
	return files, nil
}

// complainOfFiles logs the files that workers have in another version than kvepp, once for each.
func complainOfFiles(log *slog.Logger, mismatches []dynamo.Mismatch, said map[dynamo.Mismatch]bool) {
	for _, d := range mismatches {
		if !said[d] {
			log.Error(
				"a worker's model file is another than kvepp's: the worker is routed to by load only. Give kvepp the "+
					"folder that the "+
					"worker serves (--model), and its template (--chat-template)",
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
	clear(said)
	for _, d := range mismatches {
		said[d] = true
	}
}

// remoteTokenizers makes the clients of --tokenizer-url, by model, which show key.
func remoteTokenizers(
	o *options,
	key *tokenFile,
	m *metrics.Metrics,
	log *slog.Logger,
) (map[string]*remote.Client, error) {
	urls, err := o.tokenizerURLsByModel()
	if err != nil {
		return nil, err
	}
	served, err := o.tokenizerOptions()
	if err != nil {
		return nil, err
	}
	clients := make(map[string]*remote.Client, len(urls))
	for name, url := range urls {
		client, err := remote.New(
			remote.Config{
				Model:   name,
				URL:     url,
				Engine:  served.Engine,
				APIKey:  key.token,
				Timeout: o.tokenizerURLTimeout,
			},
			m,
			log,
		)
		if err != nil {
			return nil, fmt.Errorf("--tokenizer-url %s=%s: %w", name, url, err)
		}
		clients[name] = client
		m.GaugeFunc(metrics.RemoteOpen, metrics.RemoteOpenHelp, prometheus.Labels{"model": name}, func() float64 {
			if client.IsOpen() {
				return 1
			}
			return 0
		})
	}
	return clients, nil
}

// startChecks compares the ids of models with those of their engines, as --tokenizer-check says, until ctx ends.
func startChecks(
	ctx context.Context,
	o *options,
	models map[string]*tokenizer.Model,
	engines map[string]*remote.Client,
	log *slog.Logger,
) map[string]*remote.Check {
	checks := map[string]*remote.Check{}
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
				"--tokenizer-check: no --tokenizer-url is given for this model, so that it is not checked",
				"model",
				name,
			)
			continue
		}
		checks[name] = remote.NewCheck(model.Tokenize, engine, o.tokenizerCheck)
		go checks[name].Run(ctx)
	}
	return checks
}

// tellSettings hands the settings of Dynamo's workers that change prompts to the tokenizers of their models.
func tellSettings(models map[string]*tokenizer.Model, instances []dynamo.Instance, wrong *complaints) {
	workers := map[string][]tokenizer.DynamoSettings{}
	for _, in := range instances {
		// of one that a frontend told of, nothing is known
		if in.Card == nil || len(in.Card.RuntimeConfig) == 0 || models[in.Card.Model] == nil {
			continue
		}
		settings, err := tokenizer.ParseDynamoSettings(in.Card.RuntimeConfig)
		if err != nil {
			wrong.warn(
				fmt.Sprintf(
					"the model card of a worker of %q is not understood, so that its prompts may be predicted "+
						"wrongly: %v",
					in.Card.Model,
					err,
				),
			)
			continue
		}
		if all := workers[in.Card.Model]; len(all) > 0 && all[0] != settings {
			wrong.warn(
				fmt.Sprintf(
					"workers of %q have cards that differ in settings that change prompts: its chats are routed by "+
						"load. "+
						"Give all workers of a model the same --dyn-reasoning-parser, --dyn-tool-call-parser and so on",
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
