// Package process runs programs for tests, and ends them with the test, even if the test crashes.
//
// It owns their process groups, their output files, and the search for free ports. It knows no particular program. All
// functions and methods are safe for concurrent use.
package process

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// Process is a program that was started. Its output goes to a file.
type Process struct {
	Name string
	Log  string // the file

	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended
}

// Start starts a program in a new process group, so that its children end with it. The program is killed when this
// process ends in any way. Its output is appended to the file NAME.log of the folder. env, as NAME=VALUE, is added to
// this process's environment.
func Start(folder, name string, env []string, argv ...string) (*Process, error) {
	p := &Process{Name: name, Log: filepath.Join(folder, name+".log"), done: make(chan struct{})}
	out, err := os.OpenFile(p.Log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, err
	}
	p.cmd = exec.Command(argv[0], argv[1:]...)
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	started := make(chan error)
	go func() {
		// Pdeathsig fires when the thread that started the child ends, so that thread must live as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.cmd.Wait()
		}
		out.Close()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	return p, nil
}

// Pid returns the process id.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Signal sends a signal to the process's group.
func (p *Process) Signal(sig syscall.Signal) {
	if !p.Ended() {
		syscall.Kill(-p.cmd.Process.Pid, sig)
	}
}

// Stop ends the process with SIGTERM, and after three seconds with SIGKILL: an idle worker or frontend of Dynamo takes
// up to ten seconds to end. On nil it does nothing; neither does Kill.
func (p *Process) Stop() {
	if p == nil {
		return
	}
	p.Signal(syscall.SIGTERM)
	select {
	case <-p.done:
	case <-time.After(3 * time.Second):
		p.Kill()
	}
}

// Kill kills the process and waits until it is gone.
func (p *Process) Kill() {
	if p == nil {
		return
	}
	p.Signal(syscall.SIGKILL)
	<-p.done
}

// Exited returns a channel that is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.done }

// Ended reports whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Tail returns the last lines of the process's output.
func (p *Process) Tail(n int) string {
	f, err := os.Open(p.Log)
	if err != nil {
		return err.Error()
	}
	defer f.Close()
	var lines []string
	scan := bufio.NewScanner(f)
	scan.Buffer(nil, 1<<20)
	for scan.Scan() {
		if lines = append(lines, scan.Text()); len(lines) > n {
			lines = lines[1:]
		}
	}
	return strings.Join(lines, "\n")
}

// Until calls ready until it returns nil. If ctx ends first, it returns ready's last error.
func Until(ctx context.Context, ready func() error) error {
	for pause := 10 * time.Millisecond; ; pause = min(pause*3/2, 500*time.Millisecond) {
		err := ready()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w", ctx.Err(), err)
		case <-time.After(pause):
		}
	}
}

// Healthy returns a condition for Up: GET URL/health answers 200.
func Healthy(url string) func() error {
	return func() error {
		resp, err := http.Get(url + "/health")
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("/health answered %s", resp.Status)
		}
		return nil
	}
}

// Up waits until ready returns nil. It fails at once if one of the processes has ended.
func Up(ctx context.Context, what string, ready func() error, on ...*Process) error {
	// The timeout is long because the machine may be busy: then vLLM imports its modules for eight minutes. The wait
	// ends at once if a program ended.
	ctx, cancel := context.WithTimeout(ctx, 15*time.Minute)
	defer cancel()
	err := Until(ctx, func() error {
		for _, p := range on {
			if p.Ended() {
				cancel()
				return fmt.Errorf("%s has ended", p.Name)
			}
		}
		return ready()
	})
	if err == nil {
		return nil
	}
	var b strings.Builder
	for _, p := range on {
		fmt.Fprintf(&b, "\n--- last lines of %s:\n%s", p.Log, p.Tail(15))
	}
	return fmt.Errorf("waiting for %s: %w%s", what, err, b.String())
}
