// Package models loads the tokenizers of the served models, and asks engines for the token ids of models that kvepp
// has no tokenizer of.
//
// It owns the flags about models, adapters, rewrites and the engine, and what they say together ([Config]). It
// tokenizes no request itself: packages prompt and prompt/remote do. Its functions are for the start of a program.
package models

import (
	"crypto/tls"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/prompt"
	"kvepp/router/modelrewrite"
)

// Config says which models are served, and by which engine. Validate sets Folders, URLs, Adapters, Rewrites and
// Prompts.
type Config struct {
	Folders  map[string]string // model -> folder of its tokenizer
	URLs     map[string]string // model -> URL of the engine that tokenizes for it
	Adapters map[string]string // LoRA adapter -> model
	Rewrites []modelrewrite.Rule
	Prompts  prompt.Config

	Discovery   bool          // Dynamo's discovery is used: the default engine is Dynamo
	LoadTimeout time.Duration // for the tokenizers of all models
	URLTimeout  time.Duration // for the response to one request
	KeyFile     string        // with the API key for URLs
	Check       int           // how many requests of each model are compared with the engine's token ids
	// Others says who tokenizes the requests of models that have neither a folder nor a URL. No flag sets it.
	Others Others

	models, urls, adapters, rewrites []string
	engine                           string
}

// Others asks one server for the token ids of all models, or the pool's own engines. The zero value asks none.
type Others struct {
	URL     string // of the server; it knows the model as Model, empty: by its own name
	Model   string
	Timeout time.Duration // for the server's response
	Engines bool          // ask the pool's engines if there is no URL
	Scheme  string        // of the engines
	TLS     *tls.Config   // of https connections to the engines
}

// AddFlags declares the flags, and sets the timeouts.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.LoadTimeout, c.URLTimeout = 30*time.Second, 500*time.Millisecond
	fs.StringArrayVar(&c.models, "model", nil,
		"a served model and the folder of its tokenizer, `NAME=DIR`. May be repeated; in the environment a "+
			"comma-separated list")
	fs.StringArrayVar(&c.adapters, "lora", nil,
		"a LoRA adapter, as requests name it, and the model that it adapts, `NAME=MODEL`; with a single --model, the "+
			"name alone; may be repeated. KV events add the adapters that they name. Not with Dynamo's frontends")
	fs.StringArrayVar(&c.rewrites, "model-rewrite", nil,
		"send requests for the model NAME as requests for TARGET, `NAME=TARGET`, and write NAME into their responses "+
			"(if Envoy sends responses BUFFERED or FULL_DUPLEX_STREAMED). May be repeated: several targets of a name "+
			"share its requests evenly; *=TARGET is for all other names")
	flags.Choice(fs, &c.engine, "engine", "",
		"the `ENGINE` whose rules turn requests into token ids: vllm, sglang, trtllm or dynamo (default: dynamo with "+
			"--dynamo-discovery, else vllm)", prompt.EngineNames()...)
	c.Prompts.AddFlags(fs)
	flags.Section(fs, "Models and prompts")
	fs.StringArrayVar(&c.urls, "tokenizer-url", nil,
		"a vLLM or SGLang server that kvepp asks for the token ids of a model, `NAME=URL`, if it cannot compute them. "+
			"With a single --model, the URL alone; may be repeated. A model named here needs no folder")
	fs.StringVar(&c.KeyFile, "tokenizer-url-api-key-file", "",
		"`FILE` with the API key of the servers at --tokenizer-url; kvepp reads it again when it changes")
	fs.IntVar(&c.Check, "tokenizer-check", 0,
		"compare kvepp's token ids of the first `N` requests of each model with those of its --tokenizer-url, without "+
			"delay for the requests. If they differ, kvepp routes the model by load only from then on")
	flags.Section(fs, "Tokenizer servers")
}

// Engine is the engine whose rules are followed.
func (c *Config) Engine() prompt.Engine { return c.Prompts.Engine }

// Only returns the model if there is exactly one, else "".
func (c *Config) Only() (only string) {
	for _, of := range []map[string]string{c.Folders, c.URLs} {
		for name := range of {
			if only != "" && only != name {
				return ""
			}
			only = name
		}
	}
	return only
}

// Validate reads the flags that name models, and returns an error for the first that is invalid, alone or beside the
// others.
func (c *Config) Validate() (err error) {
	if c.Prompts.Engine, err = prompt.ParseEngine(c.engine); err != nil {
		return err
	}
	if c.engine == "" && c.Discovery {
		c.Prompts.Engine = prompt.Dynamo
	}
	for _, parse := range []func() error{c.parseModels, c.parseRewrites, c.parseURLs, c.parseAdapters} {
		if err := parse(); err != nil {
			return err
		}
	}
	switch engine := c.Engine(); {
	case c.Check < 0:
		return fmt.Errorf("--tokenizer-check %d: may not be negative; give a number such as 100, or 0", c.Check)
	case c.Check > 0 && len(c.URLs) == 0:
		return errors.New("--tokenizer-check needs a server to compare with: give --tokenizer-url NAME=URL")
	case len(c.Adapters) > 0 && engine == prompt.Dynamo:
		return errors.New(
			"--lora: Dynamo's frontends serve no adapters in direct mode (their DYN_LORA_ENABLED excludes it), so " +
				"there are none to route to; leave --lora out, or give --engine vllm, sglang or trtllm if that is " +
				"what the endpoints run")
	case len(c.URLs) > 0 && engine != prompt.VLLM && engine != prompt.SGLang:
		return fmt.Errorf("--tokenizer-url: with --engine %s there is no server to ask: only vLLM's and SGLang's have "+
			"an endpoint that tokenizes", engine)
	}
	return c.Prompts.Validate()
}

// put adds a pair that a flag gives, and returns an error if the flag has given its name already.
func put(to map[string]string, flag, name, value string) error {
	if _, twice := to[name]; twice {
		return fmt.Errorf("--%s: %q is given twice", flag, name)
	}
	to[name] = value
	return nil
}

func (c *Config) parseModels() error {
	c.Folders = map[string]string{}
	for _, m := range c.models {
		name, dir, ok := strings.Cut(m, "=")
		if !ok || name == "" || dir == "" {
			return fmt.Errorf("--model %q: must look like NAME=DIR", m)
		}
		if err := put(c.Folders, "model", name, dir); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) parseURLs() error {
	c.URLs = map[string]string{}
	isURL := func(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
	for _, given := range c.urls {
		name, address, _ := strings.Cut(given, "=")
		if isURL(given) {
			if len(c.Folders) != 1 {
				return fmt.Errorf("--tokenizer-url %q: say for which model, as NAME=URL: there are %d", given,
					len(c.Folders))
			}
			for only := range c.Folders {
				name, address = only, given
			}
		}
		if name == "" || !isURL(address) {
			return fmt.Errorf("--tokenizer-url %q: must look like NAME=http://HOST:PORT", given)
		}
		if err := put(c.URLs, "tokenizer-url", name, address); err != nil {
			return err
		}
	}
	return nil
}

func (c *Config) parseAdapters() error {
	c.Adapters = map[string]string{}
	for _, a := range c.adapters {
		name, model, ok := strings.Cut(a, "=")
		if !ok {
			if model = c.Only(); model == "" {
				return fmt.Errorf("--lora %q needs its model, because there is not exactly one: write NAME=MODEL", a)
			}
		}
		if name == "" || model == "" {
			return fmt.Errorf("--lora %q: must look like NAME=MODEL", a)
		}
		if c.Engine() == prompt.SGLang { // requests name it so, and events do not
			name = strings.TrimPrefix(name, model+":")
		}
		if err := put(c.Adapters, "lora", name, model); err != nil {
			return err
		}
	}
	return nil
}

// parseRewrites makes one rule for each name that requests give, in the order of the flags.
func (c *Config) parseRewrites() error {
	c.Rewrites = nil
	of := map[string]int{} // name -> index in Rewrites
	for _, given := range c.rewrites {
		name, target, ok := strings.Cut(given, "=")
		if !ok || name == "" || target == "" {
			return fmt.Errorf("--model-rewrite %q: must look like NAME=TARGET, or *=TARGET for all other names", given)
		}
		i, known := of[name]
		if !known {
			i = len(c.Rewrites)
			of[name] = i
			rule := modelrewrite.Rule{Name: "flag"}
			if name != "*" {
				rule.Models = []string{name}
			}
			c.Rewrites = append(c.Rewrites, rule)
		}
		c.Rewrites[i].Targets = append(c.Rewrites[i].Targets, modelrewrite.Target{Model: target})
	}
	return nil
}
