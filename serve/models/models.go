package models

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"time"

	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool/dynamo"
	"kvepp/pool/engineversion"
	"kvepp/prompt"
	"kvepp/prompt/body"
	"kvepp/prompt/remote"
)

// Models are the served models' tokenizers, by model. A model whose tokenizer cannot be loaded is nil: kvepp routes its
// requests by load.
type Models map[string]*prompt.Model

type loaded struct {
	model *prompt.Model
	err   error
}

// Load loads the tokenizers. A model whose tokenizer cannot be loaded, or not within LoadTimeout, and that has a URL is
// left out: its engine tokenizes.
func (c *Config) Load(log *slog.Logger) Models {
	if len(c.Folders)+len(c.URLs) == 0 && c.Others == (Others{}) {
		log.Warn("no --model is given: kvepp cannot tokenize prompts, and routes every request by load only")
	}
	models := make(Models, len(c.Folders))
	start := time.Now()
	loads := make(map[string]chan loaded, len(c.Folders))
	for name, dir := range c.Folders {
		done := make(chan loaded, 1)
		loads[name] = done
		go func() {
			model, err := prompt.Load(dir, c.Prompts.Options)
			done <- loaded{model, err}
		}()
	}
	within, cancel := context.WithTimeout(context.Background(), c.LoadTimeout)
	defer cancel()
	for name, dir := range c.Folders {
		l := c.await(within, loads[name])
		url := c.URLs[name]
		switch {
		case l.err != nil && url != "":
			log.Warn("the model's folder cannot be used: kvepp asks the engine for the token ids of its requests",
				"model", name, "url", flags.MaskPasswords(url), "error", l.err)
		case l.err != nil:
			models[name] = nil
			log.Error("the model's tokenizer cannot be loaded: its requests are routed by load only. Start kvepp with "+
				"a folder that it can use", "model", name, "folder", dir, "error", l.err)
		default:
			models[name] = l.model
			warnSpecial(log, name, dir, l.model)
			level, template := templateOf(l.model, url)
			log.Log(context.Background(), level, "model loaded", "model", name, "folder", dir, "engine", c.Engine(),
				"template", template, "took", time.Since(start).Round(time.Millisecond))
		}
	}
	for name, url := range c.URLs {
		if models[name] == nil {
			log.Info("kvepp has no tokenizer of this model: its engine tokenizes its requests",
				"model", name, "url", flags.MaskPasswords(url), "template", "the engine's")
		}
	}
	return models
}

// await waits for one result until ctx ends.
func (c *Config) await(ctx context.Context, result <-chan loaded) loaded {
	select {
	case l := <-result:
		return l
	case <-ctx.Done():
	}
	select { // it may have come in time, while kvepp waited for another model
	case l := <-result:
		return l
	default:
		return loaded{err: fmt.Errorf("not loaded within %s; is its file system mounted?", c.LoadTimeout)}
	}
}

// warnSpecial logs what makes a model slow, or its predictions inexact.
func warnSpecial(log *slog.Logger, name, dir string, model *prompt.Model) {
	if model.GeneralPattern() {
		log.Warn("kvepp has no scanner for the model's pre-tokenizer pattern: it uses the general regular-expression "+
			"engine, which is exact but slower", "model", name)
	}
	switch {
	case !model.OverlapIsUpperBound():
	case model.HasConfig():
		log.Info("SGLang's KV events omit some evictions of this hybrid model: predicted cached tokens are an upper "+
			"bound", "model", name)
	default:
		log.Warn("the model's folder has no config.json, so kvepp does not know whether the model is a hybrid one. "+
			"SGLang's KV events omit some evictions of hybrid models, so kvepp treats predicted cached tokens as an "+
			"upper bound. Put the model's config.json into the folder", "model", name, "folder", dir)
	}
}

// templateOf renders a short chat with a model. It returns what the log says about its chat template, and the level.
// url is the model's --tokenizer-url; "" if there is none.
func templateOf(model *prompt.Model, url string) (slog.Level, string) {
	instead := "chats are routed by load"
	if url != "" {
		instead = "kvepp asks --tokenizer-url for the token ids of chats"
	}
	chat, err := body.ParseRequest("/v1/chat/completions",
		[]byte(`{"model":"m","messages":[{"role":"user","content":"Hello"}]}`))
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

// Export exports the state of the models.
func (all Models) Export(m *metrics.Metrics) {
	without := 0
	for _, model := range all {
		if model == nil {
			without++
		}
	}
	metrics.Gauge(m, metrics.ModelsWithoutTokenizer, func() int { return without })
}

// UpperBound returns router.Config.UpperBound: with SGLang, predictions are exact only for models that are known not to
// be hybrid.
func (c *Config) UpperBound(all Models) func(string) bool {
	if c.Engine() != prompt.SGLang {
		return nil
	}
	return func(name string) bool {
		model := all[name]
		return model == nil || model.OverlapIsUpperBound()
	}
}

// Files computes the checksums of the loaded models' files, to compare them with those of Dynamo's model cards.
func (c *Config) Files(all Models) (map[string]dynamo.ModelFiles, error) {
	files := map[string]dynamo.ModelFiles{}
	for name, model := range all {
		if model == nil {
			continue
		}
		var err error
		if files[name], err = dynamo.ReadModelFiles(c.Folders[name], c.Prompts.ChatTemplate); err != nil {
			return nil, fmt.Errorf("--model %s=%s: %w", name, c.Folders[name], err)
		}
	}
	return files, nil
}

// Remote makes the clients of URLs, by model. They send key.
func (c *Config) Remote(key func() string, m *metrics.Metrics, log *slog.Logger) (map[string]*remote.Client, error) {
	clients := make(map[string]*remote.Client, len(c.URLs))
	for name, url := range c.URLs {
		client, err := remote.New(remote.Config{Model: name, URL: url, Engine: c.Engine(), APIKey: key,
			Timeout: c.URLTimeout}, m, log)
		if err != nil {
			return nil, fmt.Errorf("--tokenizer-url %s=%s: %w", name, url, err)
		}
		clients[name] = client
		metrics.Flag(m, metrics.TokenizerURLOpen, client.IsOpen, "model", name)
	}
	return clients, nil
}

// Finder returns what asks the engines for their versions, and calls changed after a response changed; nil if
// --engine-version says the version, or no engine says its own. https are the settings of https connections to them.
func (c *Config) Finder(https *tls.Config, changed func()) *engineversion.Finder {
	paths := engineversion.PathsOf(string(c.Engine()))
	if c.Prompts.Version != "" || paths == nil {
		return nil
	}
	client := &http.Client{
		Transport: &http.Transport{
			DisableKeepAlives: true, // asked once a minute
			TLSClientConfig:   https,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return engineversion.New(paths, client, changed)
}

// StartChecks compares the token ids of models with those of their engines (--tokenizer-check) until ctx ends. finder,
// which may be nil, says the engines' versions.
func (c *Config) StartChecks(
	ctx context.Context, all Models, engines map[string]*remote.Client, finder *engineversion.Finder, log *slog.Logger,
) map[string]*remote.Check {
	checks := map[string]*remote.Check{}
	if finder != nil {
		finder.Want(slices.Collect(maps.Values(c.URLs)))
		go finder.Run(ctx)
	}
	if c.Check == 0 {
		return checks
	}
	for name, model := range all {
		engine := engines[name]
		if model == nil {
			continue
		}
		if engine == nil {
			log.Warn("--tokenizer-check: this model has no --tokenizer-url, so kvepp does not check it", "model", name)
			continue
		}
		tokenize := model.Tokenize
		if finder != nil {
			tokenize = func(ctx context.Context, request *body.Request) ([]prompt.Prompt, error) {
				return versionAt(ctx, finder, c.URLs[name], model).Tokenize(ctx, request)
			}
		}
		checks[name] = remote.NewCheck(tokenize, engine, c.Check)
		go checks[name].Run(ctx)
	}
	return checks
}

// versionAt returns the model by the rules of the version that the engine at url has.
func versionAt(ctx context.Context, finder *engineversion.Finder, url string, model *prompt.Model) *prompt.Model {
	response, err := finder.Ask(ctx, url)
	if err != nil || response.Several {
		return model
	}
	if at, err := model.At(response.Version); err == nil {
		return at
	}
	return model
}
