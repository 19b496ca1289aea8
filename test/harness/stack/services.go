package stack

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"sync"

	"kvepp/test/harness/process"
)

// Services are one of Dynamo's standalone services and the same service of kvepp, without workers.
type Services struct {
	Dynamo, Kvepp string // URLs

	kind      string // kvepp's subcommand
	env       []string
	stack     *Stack
	processes []*process.Process
}

// StartIndexers starts the two indexers and waits until they answer. After an error no process is left.
func StartIndexers(ctx context.Context, cfg Config) (*Services, error) {
	return startServices(ctx, cfg, &Services{kind: "indexer"})
}

// StartSelectors starts the two selection services, each with this environment and these arguments, and waits until
// they answer. After an error no process is left.
func StartSelectors(ctx context.Context, cfg Config, env []string, args ...string) (*Services, error) {
	return startServices(ctx, cfg, &Services{kind: "select", env: env}, args...)
}

func startServices(ctx context.Context, cfg Config, x *Services, args ...string) (_ *Services, err error) {
	if cfg.Tools == "" {
		return nil, errNotInstalled
	}
	x.stack = &Stack{cfg: cfg, temp: true}
	if x.stack.dir, err = os.MkdirTemp("", "kvepp-services-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			x.Close()
		}
	}()
	if x.Dynamo, err = x.StartDynamo(ctx, args...); err != nil {
		return nil, err
	}
	x.Kvepp, err = x.StartKvepp(ctx, args...)
	return x, err
}

// StartDynamo starts another service of Dynamo's, with further arguments, and returns its URL.
func (x *Services) StartDynamo(ctx context.Context, args ...string) (url string, err error) {
	module := map[string]string{"indexer": "dynamo.indexer", "select": "dynamo.select_service"}[x.kind]
	return x.start(ctx, "dynamo", append([]string{x.stack.python(), "-m", module}, args...)...)
}

// StartKvepp starts another service of kvepp's, with further arguments, and returns its URL.
func (x *Services) StartKvepp(ctx context.Context, args ...string) (url string, err error) {
	return x.start(
		ctx,
		"kvepp",
		append([]string{filepath.Join(x.stack.cfg.Root, "bin/kvepp"), x.kind, "--host", "127.0.0.1"}, args...)...)
}

func (x *Services) start(ctx context.Context, name string, argv ...string) (url string, err error) {
	port, err := process.Ports(1)
	if err != nil {
		return "", err
	}
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	p, err := x.stack.spawn(
		fmt.Sprintf("%s-%s-%d", name, x.kind, len(x.processes)),
		x.env,
		append(argv, "--port", strconv.Itoa(port))...)
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

// Close ends all services.
func (x *Services) Close() {
	var wait sync.WaitGroup
	for _, p := range x.processes {
		wait.Go(p.Kill)
	}
	wait.Wait()
	os.RemoveAll(x.stack.dir)
}
