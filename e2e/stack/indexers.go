package stack

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"
)

// Indexers are Dynamo's standalone indexer and kvepp's, without workers.
type Indexers struct {
	Dynamo, Kvepp string // URLs

	stack     *Stack
	processes []*process
}

// StartIndexers starts both and waits until they answer. On an error nothing is left running.
func StartIndexers(ctx context.Context, cfg Config) (_ *Indexers, err error) {
	if cfg.Tools == "" {
		return nil, errors.New("stack: Dynamo is not installed: run this through make, or set KVEPP_TOOLS to what " +
			"e2e/tools/install.sh tools prints")
	}
	x := &Indexers{stack: &Stack{cfg: cfg, temp: true}}
	if x.stack.dir, err = os.MkdirTemp("", "kvepp-indexers-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	port, err := ports(2)
	if err != nil {
		return nil, err
	}
	for i, program := range []struct {
		name string
		url  *string
		argv []string
	}{
		{"dynamo-indexer", &x.Dynamo, []string{x.stack.python(), "-m", "dynamo.indexer"}},
		{"kvepp-indexer", &x.Kvepp, []string{filepath.Join(cfg.Root, "bin/kvepp"), "indexer", "--host", "127.0.0.1"}},
	} {
		*program.url = fmt.Sprintf("http://127.0.0.1:%d", port+i)
		p, err := x.stack.spawn(program.name, nil, append(program.argv, "--port", strconv.Itoa(port+i))...)
		if err != nil {
			return nil, err
		}
		x.processes = append(x.processes, p)
		if err := x.stack.up(ctx, program.name, func() error {
			resp, err := http.Get(*program.url + "/health")
			if err == nil {
				resp.Body.Close()
			}
			return err
		}, p); err != nil {
			return nil, err
		}
	}
	return x, nil
}

// Port returns n consecutive ports that are free on loopback, for a test's own sockets.
func Port(n int) (first int, err error) { return ports(n) }

// Close ends both.
func (x *Indexers) Close() {
	var wait sync.WaitGroup
	for _, p := range x.processes {
		wait.Go(p.kill)
	}
	wait.Wait()
	os.RemoveAll(x.stack.dir)
}
