package main

import (
	"fmt"
	"strings"
)

// modelFolders returns model name -> folder.
func (o *options) modelFolders() (map[string]string, error) {
	folders := map[string]string{}
	for _, m := range o.models {
		name, dir, ok := strings.Cut(m, "=")
		if !ok || name == "" || dir == "" {
			return nil, fmt.Errorf("--model %q: must look like NAME=DIR", m)
		}
		if _, twice := folders[name]; twice {
			return nil, fmt.Errorf("--model: %q is given twice", name)
		}
		folders[name] = dir
	}
	if o.modelName != "" {
		if _, twice := folders[o.modelName]; twice {
			return nil, fmt.Errorf("--model-name %q is given by --model already", o.modelName)
		}
		folders[o.modelName] = o.modelPath
	}
	return folders, nil
}

// onlyModel returns the model if there is a single one, else "".
func (o *options) onlyModel() string {
	names := map[string]bool{}
	folders, _ := o.modelFolders() // what is wrong with them, check says
	urls, _ := o.tokenizerURLsByModel()
	for name := range folders {
		names[name] = true
	}
	for name := range urls {
		names[name] = true
	}
	if len(names) == 1 {
		for name := range names {
			return name
		}
	}
	return ""
}

// adapted returns adapter -> model.
func (o *options) adapted() (map[string]string, error) {
	adapted := map[string]string{}
	for _, a := range o.adapters {
		name, model, ok := strings.Cut(a, "=")
		if !ok {
			if model = o.onlyModel(); model == "" {
				return nil, fmt.Errorf("--lora %q: say of which model, as NAME=MODEL: there is not just one", a)
			}
		}
		if name == "" || model == "" {
			return nil, fmt.Errorf("--lora %q: must look like NAME=MODEL", a)
		}
		if _, twice := adapted[name]; twice {
			return nil, fmt.Errorf("--lora: %q is given twice", name)
		}
		adapted[name] = model
	}
	return adapted, nil
}

// tokenizerURLsByModel returns model name -> URL of the server that knows its tokens.
func (o *options) tokenizerURLsByModel() (map[string]string, error) {
	urls := map[string]string{}
	for _, given := range o.tokenizerURLs {
		isURL := func(s string) bool { return strings.HasPrefix(s, "http://") || strings.HasPrefix(s, "https://") }
		name, address, _ := strings.Cut(given, "=")
		if isURL(given) {
			folders, err := o.modelFolders()
			if err != nil {
				return nil, err
			}
			if len(folders) != 1 {
				return nil, fmt.Errorf(
					"--tokenizer-url %q: say for which model, as NAME=URL: there are %d",
					given,
					len(folders),
				)
			}
			for only := range folders {
				name, address = only, given
			}
		}
		if name == "" || !isURL(address) {
			return nil, fmt.Errorf("--tokenizer-url %q: must look like NAME=http://HOST:PORT", given)
		}
		if _, twice := urls[name]; twice {
			return nil, fmt.Errorf("--tokenizer-url: %q is given twice", name)
		}
		urls[name] = address
	}
	return urls, nil
}
