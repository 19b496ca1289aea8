package main

import (
	"context"
	"fmt"
	"io"
	"os/signal"
	"syscall"

	"github.com/spf13/pflag"

	"kvepp/serve/client"
	"kvepp/serve/secrets"
)

func clientFlags(c *client.Config) *pflag.FlagSet {
	return declared(c.Command, "", c.AddFlags)
}

func parseClient(c *client.Config, args []string, getenv func(string) string) error {
	f := clientFlags(c)
	if err := parseOnce(f, args, getenv); err != nil {
		return err
	}
	return c.Validate(f.Args())
}

// runClient runs a command that talks to a running kvepp. It returns the exit status.
func runClient(
	command string, args []string, stdin io.Reader, stdout, stderr io.Writer, getenv func(string) string,
) int {
	c := client.Config{Command: command}
	if err := parseClient(&c, args, getenv); err != nil {
		return notRun(clientFlags(&client.Config{Command: command}), err, helpHint, stdout, stderr)
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
