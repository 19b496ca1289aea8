package stack

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"

	"kvepp/test/harness/process"
)

// Engine is a process of examples/engine, a stand-in for a stock vLLM or SGLang.
type Engine struct {
	Name               string
	Address            string // host:port of its HTTP server
	KVEvents, KVReplay string // its sockets

	process *process.Process
}

// BuildEngine builds examples/engine into a folder and returns the program's path.
func BuildEngine(ctx context.Context, root, folder string) (program string, err error) {
	program = filepath.Join(folder, "engine")
	cmd := exec.CommandContext(ctx, "go", "build", "-o", program, "./examples/engine")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the stand-in engine: %w\n%s", err, out)
	}
	return program, nil
}

// StartEngine starts the program under a name and waits until it serves. model is the folder of its model; the log goes
// to dir.
func StartEngine(ctx context.Context, program, dir, name, model string, flags ...string) (*Engine, error) {
	port, err := process.Ports(3)
	if err != nil {
		return nil, err
	}
	e := &Engine{
		Name:     name,
		Address:  fmt.Sprintf("127.0.0.1:%d", port),
		KVEvents: fmt.Sprintf("tcp://127.0.0.1:%d", port+1),
		KVReplay: fmt.Sprintf("tcp://127.0.0.1:%d", port+2),
	}
	argv := append(
		[]string{
			program,
			"-name",
			name,
			"-served-model-name",
			Model,
			"-model",
			model,
			"-port",
			strconv.Itoa(port),
			"-kv-events-port",
			strconv.Itoa(port + 1),
			"-kv-replay-port",
			strconv.Itoa(port + 2),
		},
		flags...)
	if e.process, err = process.Start(dir, name, nil, argv...); err != nil {
		return nil, err
	}
	if err := process.Up(ctx, name, process.Healthy("http://"+e.Address), e.process); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// Close ends the engine.
func (e *Engine) Close() { e.process.Kill() }

// Signal sends a signal to the engine.
func (e *Engine) Signal(sig syscall.Signal) { e.process.Signal(sig) }

// Fault makes the engine fail in a mode of examples/engine/faults.go; "" ends the fault.
func (e *Engine) Fault(ctx context.Context, mode string) error {
	a, err := Post(ctx, http.DefaultClient, "http://"+e.Address+"/fault?mode="+mode, nil, nil)
	if err == nil && a.Status != http.StatusOK {
		err = fmt.Errorf("%s: /fault answers %d", e.Name, a.Status)
	}
	return err
}

// Entry returns the engine's entry for the endpoints file.
func (e *Engine) Entry() string {
	return fmt.Sprintf(
		"- name: %s\n  address: %s\n  kvEvents: %s\n  kvReplay: %s\n",
		e.Name,
		e.Address,
		e.KVEvents,
		e.KVReplay,
	)
}
