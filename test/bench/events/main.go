// Command bench-events measures the CPU time of KV events and decisions in kvepp, and publishes the events for that. It
// is one of the engines that events.py beside it compares. It reports CPU times; events.py compares them with the
// goals.
//
//	bench-events publish KIND COUNT
//	bench-events engine
//
// publish writes its endpoint to standard output, sends to the first subscriber, and ends with standard input. An
// engine reads commands, one a line, and answers each with a line of JSON; events.py describes them.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "bench-events:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, stdout io.Writer) error {
	switch {
	case len(args) == 3 && args[0] == "publish":
		count, err := strconv.Atoi(args[2])
		if err != nil {
			return err
		}
		return publish(args[1], count, stdin, stdout)
	case len(args) == 1 && args[0] == "engine":
		return serve(stdin, stdout)
	}
	return errors.New("usage: bench-events publish KIND COUNT | engine")
}

// serve answers commands until the input ends.
func serve(stdin io.Reader, stdout io.Writer) error {
	out := json.NewEncoder(stdout)
	lines := bufio.NewScanner(stdin)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		response, err := responseTo(words)
		if err == nil {
			err = out.Encode(response)
		}
		if err != nil {
			return fmt.Errorf("command %q: %w", lines.Text(), err)
		}
	}
	return lines.Err()
}

func responseTo(words []string) (any, error) {
	switch {
	case len(words) == 2 && words[0] == "decode":
		m, err := newMessages(words[1], 4096)
		if err != nil {
			return nil, err
		}
		return decode(m)
	case len(words) == 5 && words[0] == "receive":
		count, err := strconv.Atoi(words[4])
		if err != nil {
			return nil, err
		}
		return receive(words[1], words[2], words[3], count)
	case len(words) == 2:
		n, err := strconv.Atoi(words[1])
		if err != nil {
			return nil, err
		}
		switch words[0] {
		case "hash":
			return hash(n)
		case "select":
			return choose(n)
		case "decide":
			return decide(n)
		}
	}
	return nil, errors.New("no such command")
}
