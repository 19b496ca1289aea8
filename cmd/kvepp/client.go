package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"kvepp/internal/flags"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"

	"kvepp/serve/client"
	"kvepp/serve/secrets"
)

func clientFlags(c *client.Config) *pflag.FlagSet {
	f := flags.New("kvepp " + c.Command)
	c.AddFlags(f)
	flags.Section(f, "Flags of kvepp "+c.Command)
	documentEnvironment(f, "")
	return f
}

func parseClient(c *client.Config, args []string, getenv func(string) string) error {
	f := clientFlags(c)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := flags.FromEnvironment(f, getenv); err != nil {
		return err
	}
	return c.Validate(f.Args())
}

// runClient runs a command that talks to a running kvepp. It returns the exit status.
func runClient(
	command string, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string,
) int {
	c := client.Config{Command: command}
	switch err := parseClient(&c, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, clientFlags(&client.Config{Command: command}), err)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp %s: %v\n\"kvepp %s --help\" shows how to use it.\n", command, err, command)
		return 2
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var err error
	if c.Token, err = secrets.ReadToken("--admin-token-file", c.TokenFile); err == nil {
		err = c.Run(ctx, stdin, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp %s: %v\n", command, err)
		return 1
	}
	return 0
}
