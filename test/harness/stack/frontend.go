package stack

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"

	"kvepp/test/harness/process"
)

// Frontend is a Dynamo frontend with all its APIs, in front of one mocker for each of several models. There is no Envoy
// and no kvepp.
type Frontend struct {
	URL    string
	Events []string // for each model, the address of its mocker's KV events
	Replay []string // for each model, the address of its mocker's replays

	stack     *Stack
	processes []*process.Process
}

// ServedName returns the name of model i at the frontend.
func ServedName(model int) string { return "model-" + strconv.Itoa(model) }

// StartFrontend starts a frontend and a mocker for each model folder, with blocks of blockSize tokens, and waits until
// all models are served. After an error no process is left.
func StartFrontend(ctx context.Context, cfg Config, models []string, blockSize int) (_ *Frontend, err error) {
	if cfg.Tools == "" {
		return nil, errNotInstalled
	}
	s := &Stack{cfg: cfg, dir: cfg.Dir}
	if s.dir == "" {
		if s.dir, err = os.MkdirTemp("", "kvepp-frontend-"); err != nil {
			return nil, err
		}
		s.temp = true
	}
	f := &Frontend{stack: s}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	first, err := process.Ports(2*len(models) + 1)
	if err != nil {
		return nil, err
	}
	f.URL = fmt.Sprintf("http://127.0.0.1:%d", first)
	spawn := func(name string, argv ...string) error {
		p, err := s.spawn(name, s.dynamoEnv(), append([]string{s.python()}, argv...)...)
		f.processes = append(f.processes, p)
		return err
	}
	for i, folder := range models {
		if folder, err = filepath.Abs(folder); err != nil {
			return nil, err
		}
		events, replay := first+1+2*i, first+2+2*i
		f.Events = append(f.Events, fmt.Sprintf("tcp://127.0.0.1:%d", events))
		f.Replay = append(f.Replay, fmt.Sprintf("tcp://127.0.0.1:%d", replay))
		mocker := []string{"-m", "dynamo.mocker"}
		if i < len(cfg.RuntimeConfigs) && cfg.RuntimeConfigs[i] != "" {
			script, err := filepath.Abs(filepath.Join(cfg.Root, "e2e/testdata/dynamo/mocker.py"))
			if err != nil {
				return nil, err
			}
			mocker = []string{script, cfg.RuntimeConfigs[i]}
		}
		if err := spawn(ServedName(i), append(mocker, "--model-path", folder, "--model-name", ServedName(i),
			"--endpoint", "dyn://"+ServedName(i)+".backend.generate", "--block-size", strconv.Itoa(blockSize),
			"--num-gpu-blocks-override", "65536", "--speedup-ratio", "100",
			"--zmq-kv-events-ports", strconv.Itoa(events), "--zmq-replay-ports", strconv.Itoa(replay))...); err != nil {
			return nil, err
		}
	}
	if err := spawn("frontend", "-m", "dynamo.frontend", "--router-mode", "round-robin", "--http-host", "127.0.0.1",
		"--http-port", strconv.Itoa(first), "--enable-anthropic-api"); err != nil {
		return nil, err
	}
	return f, s.up(ctx, "the frontend", func() error {
		var served struct{ Data []struct{ ID string } }
		if err := getJSON(ctx, f.URL+"/v1/models", &served); err != nil {
			return err
		}
		for i := range models {
			if !slices.ContainsFunc(served.Data, func(m struct{ ID string }) bool { return m.ID == ServedName(i) }) {
				return errors.New("the frontend does not serve " + ServedName(i) + " yet")
			}
		}
		return nil
	}, f.processes...)
}

// Close ends all processes. A folder that the caller named keeps its logs.
func (f *Frontend) Close() {
	var wait sync.WaitGroup
	for _, p := range f.processes {
		wait.Go(p.Stop)
	}
	wait.Wait()
	if f.stack.temp {
		os.RemoveAll(f.stack.dir)
	}
}
