package main

import (
	"errors"
	"fmt"
	"io"
	"kvepp/internal/flags"

	"github.com/spf13/pflag"

	"kvepp/prompt"
	"kvepp/prompt/tokenize"
)

// tokenizeOptions are the flags of `kvepp tokenize`.
type tokenizeOptions struct {
	tokenize.Config
	prompts prompt.Config
}

func tokenizeFlags(o *tokenizeOptions) *pflag.FlagSet {
	f := flags.New("kvepp tokenize")
	o.AddFlags(f)
	o.prompts.AddFlags(f)
	flags.Section(f, "Flags of kvepp tokenize")
	documentEnvironment(f, "")
	return f
}

// runTokenizer runs `kvepp tokenize`. It returns the exit status.
func runTokenizer(args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	var o tokenizeOptions
	f := tokenizeFlags(&o)
	err := parseArgs(f, args)
	if errors.Is(err, pflag.ErrHelp) {
		showHelp(stdout, f, err)
		return 0
	}
	if err == nil {
		err = flags.FromEnvironment(f, getenv)
	}
	if err == nil {
		err = o.Validate(f.Args())
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n\"kvepp tokenize --help\" shows how to use it.\n", err)
		return 2
	}
	o.prompts.Engine = o.Engine
	if err := o.prompts.Validate(); err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n", err)
		return 2
	}
	if !o.Run(o.prompts.Options, stdin, stdout, stderr) {
		return 1
	}
	return 0
}
