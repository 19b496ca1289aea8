package main

import (
	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/internal/flags"
	"kvepp/serve/listen"
	"kvepp/serve/logs"
	"kvepp/serve/secrets"
)

type (
	logging   = logs.Config
	transport = secrets.Config
)

// httpService are the flags that `kvepp indexer` and `kvepp select` share. Both serve only HTTP, and each stands in for
// one of Dynamo's programs.
type httpService struct {
	listen.Web
	bounds indexer.Config // of its memory
	logging
	settingsFile
}

func (o *httpService) addFlags(f *pflag.FlagSet) {
	o.bounds.AddFlags(f)
	o.logging.AddFlags(f, "")
	o.settingsFile.AddFlags(f)
	flags.Retire(f, "threads", false) // of Dynamo's programs; each worker has its own here
}

func (o *httpService) check() error {
	if err := o.Web.Validate(); err != nil {
		return err
	}
	if err := o.logging.Validate(); err != nil {
		return err
	}
	return o.bounds.Validate()
}
