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
	if x.Dynamo, err = x.StartDynamo(ctx); err != nil {
		return nil, err
	}
	x.Kvepp, err = x.StartKvepp(ctx)
	return x, err
}

// StartDynamo starts one more of Dynamo's, with more arguments, and returns its URL.
func (x *Indexers) StartDynamo(ctx context.Context, args ...string) (url string, err error) {
	return x.start(ctx, "dynamo-indexer", append([]string{x.stack.python(), "-m", "dynamo.indexer"}, args...)...)
}

// StartKvepp starts one more of kvepp's, with more arguments, and returns its URL.
func (x *Indexers) StartKvepp(ctx context.Context, args ...string) (url string, err error) {
	return x.start(ctx, "kvepp-indexer", append([]string{filepath.Join(x.stack.cfg.Root, "bin/kvepp"), "indexer", "--host", "127.0.0.1"}, args...)...)
}

func (x *Indexers) start(ctx context.Context, name string, argv ...string) (url string, err error) {
	port, err := ports(1)
	if err != nil {
		return "", err
	}
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	p, err := x.stack.spawn(fmt.Sprintf("%s-%d", name, len(x.processes)), nil, append(argv, "--port", strconv.Itoa(port))...)
	if err != nil {
		return "", err
	}
	x.processes = append(x.processes, p)
	return url, x.stack.up(ctx, name, func() error {
		resp, err := http.Get(url + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err
	}, p)
}

// Close ends both.
func (x *Indexers) Close() {
	var wait sync.WaitGroup
	for _, p := range x.processes {
		wait.Go(p.kill)
	}
	wait.Wait()
	os.RemoveAll(x.stack.dir)
}
