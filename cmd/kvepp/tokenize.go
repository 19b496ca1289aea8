package main

import (
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/prompt"
	"kvepp/prompt/tokenize"
)

// tokenizeOptions are the flags of `kvepp tokenize`.
type tokenizeOptions struct {
	tokenize.Config
	prompts prompt.Config
}

func tokenizeFlags(o *tokenizeOptions) *pflag.FlagSet {
	return declared("tokenize", "", o.AddFlags, o.prompts.AddFlags)
}

// runTokenizer runs `kvepp tokenize`. It returns the exit status.
func runTokenizer(args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string) int {
	var o tokenizeOptions
	f := tokenizeFlags(&o)
	err := parseOnce(f, args, getenv)
	if err == nil {
		err = o.Validate(f.Args())
	}
	if err != nil {
		return notRun(f, err, helpHint, stdout, stderr)
	}
	o.prompts.Engine = o.Engine
	if err := flags.WithSource(f, o.prompts.Validate()); err != nil {
		fmt.Fprintf(stderr, "kvepp tokenize: %v\n", err)
		return 2
	}
	if !o.Run(o.prompts.Options, stdin, stdout, stderr) {
		return 1
	}
	return 0
}
