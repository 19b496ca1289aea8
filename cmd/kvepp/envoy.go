package main

import (
	"fmt"
	"io"

	"github.com/spf13/pflag"

	"kvepp/manifests/envoy"
)

func envoyFlags(c *envoy.Config) *pflag.FlagSet {
	return declared("envoy", "", c.AddFlags)
}

func parseEnvoy(c *envoy.Config, args []string, getenv func(string) string) error {
	f := envoyFlags(c)
	if err := parseOnce(f, args, getenv); err != nil {
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
	if err := parseEnvoy(&c, args, getenv); err != nil {
		return notRun(envoyFlags(new(envoy.Config)), err, helpHint, stdout, stderr)
	}
	if err := c.Run(stdout); err != nil {
		fmt.Fprintf(stderr, "kvepp envoy: %v\n", err)
		return 1
	}
	return 0
}
