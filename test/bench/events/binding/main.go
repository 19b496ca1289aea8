// Command binding measures the CPU time of receiving KV events with the unchanged Go binding of libzmq. It reads one
// line from standard input:
//
//	receive ENDPOINT COUNT
//
// and answers with {"message_ns": CPU time per message}. It is a program of its own, so that nothing else takes CPU
// time in its process.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"

	zmq "github.com/pebbe/zmq4"

	"kvepp/test/bench/cputime"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "test/bench/events/binding:", err)
		os.Exit(1)
	}
}

func run() error {
	var endpoint string
	var count int
	if _, err := fmt.Scanf("receive %s %d\n", &endpoint, &count); err != nil {
		return fmt.Errorf("standard input must be \"receive ENDPOINT COUNT\": %w", err)
	}
	start := cputime.Process()
	if err := receive(endpoint, count); err != nil {
		return err
	}
	took := map[string]float64{"message_ns": (cputime.Process() - start) / float64(count)}
	return json.NewEncoder(os.Stdout).Encode(took)
}

func receive(endpoint string, count int) error {
	socket, err := zmq.NewSocket(zmq.SUB)
	if err != nil {
		return err
	}
	defer socket.Close()
	if err := errors.Join(socket.SetRcvhwm(100_000), socket.SetSubscribe(""), socket.Connect(endpoint)); err != nil {
		return err
	}
	for range count {
		if _, err := socket.RecvMessageBytes(0); err != nil {
			return err
		}
	}
	return nil
}
