// Command bench-index makes the workloads for comparing indexes, and runs them on package indexer. It is one of the
// engines that test/bench/index.py compares. It reports CPU times; index.py compares them with the goals.
//
//	bench-index generate -kind tree|trace|micro ... -o FILE
//	bench-index engine
//
// An engine reads commands, one a line, and answers each with a line of JSON; index.py describes them.
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
	if err := run(os.Args[1:], os.Stdin, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench-index:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	switch {
	case len(args) > 0 && args[0] == "generate":
		return generate(args[1:], stderr)
	case len(args) == 1 && args[0] == "engine":
		return serve(stdin, stdout)
	}
	return errors.New("usage: bench-index generate ... | engine")
}

// serve answers commands until the input ends.
func serve(stdin io.Reader, stdout io.Writer) error {
	var open *readers
	out := json.NewEncoder(stdout)
	lines := bufio.NewScanner(stdin)
	for lines.Scan() {
		command, argument, _ := strings.Cut(lines.Text(), " ")
		var response any
		var err error
		switch {
		case command == "run":
			response, err = replay(argument)
		case command == "memory":
			response, err = memory(argument)
		case command == "open":
			open, err = openReaders(argument)
		case command == "readers" && open != nil:
			var threads int
			if threads, err = strconv.Atoi(argument); err == nil {
				response, err = open.read(threads)
			}
		case (command == "beside" || command == "write") && open != nil:
			var rate float64
			if rate, err = strconv.ParseFloat(argument, 64); err != nil {
				break
			}
			if command == "beside" {
				response, err = open.besideWriter(rate)
			} else {
				response, err = open.write(rate)
			}
		default:
			err = fmt.Errorf("command %q", lines.Text())
		}
		if err == nil {
			err = out.Encode(response)
		}
		if err != nil {
			return err
		}
	}
	return lines.Err()
}
