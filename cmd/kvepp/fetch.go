package main

import (
	"cmp"
	"context"
	"io"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"

	"kvepp/prompt/fetch"
	"kvepp/serve/secrets"
)

// fetchPrefix is part of the names of its environment variables: KVEPP_FETCH_TO.
const fetchPrefix = "fetch-"

func fetchFlags(c *fetch.Config) *pflag.FlagSet {
	return declared("fetch", fetchPrefix, c.AddFlags)
}

func parseFetch(c *fetch.Config, args []string, getenv func(string) string) error {
	f := fetchFlags(c)
	if err := parseOnce(f, args, getenv); err != nil {
		return err
	}
	c.Hub, c.Token = cmp.Or(c.Hub, getenv("HF_ENDPOINT")), getenv("HF_TOKEN")
	if err := c.Validate(f.Args()); err != nil || c.TokenFile == "" {
		return err
	}
	var err error
	c.Token, err = secrets.ReadToken("--token-file", c.TokenFile)
	return err
}

// runFetch runs `kvepp fetch`. It returns the exit status.
func runFetch(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var c fetch.Config
	if err := parseFetch(&c, args, getenv); err != nil {
		return notRun(fetchFlags(new(fetch.Config)), err, helpHint, stdout, stderr)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if !c.Run(ctx, stdout, stderr) {
		return 1
	}
	return 0
}
