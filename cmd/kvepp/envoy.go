package main

import (
	"errors"
	"fmt"
	"io"
	"kvepp/internal/flags"

	"github.com/spf13/pflag"

	"kvepp/manifests/envoy"
)

func envoyFlags(c *envoy.Config) *pflag.FlagSet {
	f := flags.New("kvepp envoy")
	c.AddFlags(f)
	flags.Section(f, "Flags of kvepp envoy")
	documentEnvironment(f, "")
	return f
}

func parseEnvoy(c *envoy.Config, args []string, getenv func(string) string) error {
	f := envoyFlags(c)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := flags.FromEnvironment(f, getenv); err != nil {
		return err
	}
	if f.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	}
	return c.Validate()
}

// printEnvoy runs `kvepp envoy`. It returns the exit status.
func printEnvoy(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var c envoy.Config
	switch err := parseEnvoy(&c, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, envoyFlags(new(envoy.Config)), err)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp envoy: %v\n\"kvepp envoy --help\" shows how to use it.\n", err)
		return 2
	}
	if err := c.Run(stdout); err != nil {
		fmt.Fprintf(stderr, "kvepp envoy: %v\n", err)
		return 1
	}
	return 0
}
