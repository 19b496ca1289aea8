package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"kvepp/test/harness/apiserver"
	"kvepp/test/harness/process"
)

// program is a running program.
type program struct {
	*process.Process
	port    int // of its service
	metrics int // of its metrics about allocations
}

// programs are all programs of a run, and the columns through them.
type programs struct {
	folder                                     string
	port                                       int // the next free one
	upstream                                   int // port of the engines' stand-in
	admin                                      int // port of kv's page; 0: it has none
	started                                    []*program
	envoy                                      *program
	alone, echo, leastLoaded, kv, echoBodiless *column
	leastLoadedBodiless                        *column
	gaie                                       *column // nil: without it
	shadow                                     *column // nil: without it
	cluster                                    *apiserver.Server
	columns                                    []*column
	words                                      words
}

// spawn starts a program that ends when this one ends in any way. env, as NAME=VALUE, is added to this process's
// environment.
func (p *programs) spawn(name string, env []string, argv ...string) (*program, error) {
	x, err := process.Start(p.folder, name, env, argv...)
	if err != nil {
		return nil, err
	}
	p.started = append(p.started, &program{Process: x})
	return p.started[len(p.started)-1], nil
}

func (p *programs) close() {
	for _, x := range p.started {
		x.Kill()
	}
	if p.cluster != nil {
		p.cluster.Close()
	}
	os.RemoveAll(p.folder)
}

// start starts all programs and waits until they serve. After an error no program is left.
func start(ctx context.Context, o *options) (_ *programs, err error) {
	p := &programs{}
	if p.folder, err = os.MkdirTemp("", "kvepp-bench-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for _, v := range os.Environ() { // drop settings of Go's garbage collector
		if name, _, _ := strings.Cut(v, "="); name == "GOGC" || name == "GOMEMLIMIT" || name == "GODEBUG" ||
			strings.HasPrefix(name, "KVEPP_") {
			os.Unsetenv(name)
		}
	}
	if p.port, err = process.Ports(32); err != nil { // more than are needed
		return nil, err
	}
	if err = p.startProcessors(ctx, o); err != nil {
		return nil, err
	}
	if err = p.startEnvoy(o); err != nil {
		return nil, err
	}
	if p.words, err = readWords(o.root); err != nil {
		return nil, err
	}
	for _, c := range p.columns {
		if err = c.await(ctx, p.words.writer().chat(nil, 1000, false)); err != nil {
			for _, x := range p.started {
				fmt.Fprintf(os.Stderr, "--- last lines of %s's log:\n%s\n", x.Name, x.Tail(15))
			}
			return nil, fmt.Errorf("%s does not answer: %w", c.name, err)
		}
	}
	return p, nil
}

// ports returns the first of n consecutive ports that no other program of the run uses.
func (p *programs) ports(n int) (first int) {
	first, p.port = p.port, p.port+n
	return first
}

// startProcessors starts the upstream server and the external processors, and sets the columns.
func (p *programs) startProcessors(ctx context.Context, o *options) error {
	own, err := os.Executable()
	if err != nil {
		return err
	}
	p.upstream = p.ports(1)
	if _, err = p.spawn("upstream", nil, own, "upstream", strconv.Itoa(p.upstream)); err != nil {
		return err
	}
	echoes := p.ports(2)
	echo, err := p.spawn("echo", nil, own, "echo", strconv.Itoa(echoes))
	if err != nil {
		return err
	}
	echo.port, echo.metrics = echoes, echoes+1
	endpoints := filepath.Join(p.folder, "endpoints.yaml")
	text := "endpoints:\n"
	for i, address := range upstreamAddresses {
		text += fmt.Sprintf("- {name: engine-%d, address: '%s:%d', model: m, blockSize: 16}\n", i, address, p.upstream)
	}
	if err = os.WriteFile(endpoints, []byte(text), 0o644); err != nil {
		return err
	}
	least, err := p.startKvepp("least-loaded", o, endpoints, "--router-mode", "least-loaded")
	if err != nil {
		return err
	}
	// Without events, kvepp assumes the blocks of earlier requests: a grown chat finds those of its first turn.
	flags := []string{"--model", "m=" + o.model, "--no-router-kv-events"}
	if o.only == "page" {
		p.admin = p.ports(1)
		flags = append(flags, "--admin-address", "127.0.0.1:"+strconv.Itoa(p.admin))
	}
	kv, err := p.startKvepp("kv", o, endpoints, flags...)
	if err != nil {
		return err
	}
	p.alone = &column{name: "Envoy alone"}
	p.echo = &column{name: "echo", processor: echo}
	p.leastLoaded = &column{name: "least-loaded", processor: least}
	p.kv = &column{name: "kv", processor: kv}
	p.echoBodiless = &column{name: "echo, no response bodies", processor: echo, bodiless: true}
	p.leastLoadedBodiless = &column{name: "least-loaded, no response bodies", processor: least, bodiless: true}
	p.columns = []*column{p.alone, p.echo, p.leastLoaded, p.kv, p.echoBodiless, p.leastLoadedBodiless}
	if o.only == "shadow" {
		file := filepath.Join(p.folder, "shadow.yaml")
		text := fmt.Sprintf("endpoints: [{name: e, address: '127.0.0.1:%d', model: m, blockSize: 16}]\n", p.upstream)
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			return err
		}
		x, err := p.startKvepp("shadow", o, file, "--shadow", "--model", "m="+o.model, "--no-router-kv-events")
		if err != nil {
			return err
		}
		p.shadow = &column{name: "shadow", processor: x, shadow: true}
		p.columns = append(p.columns, p.shadow)
	}
	if o.gaie != "" {
		x, err := p.startGAIE(ctx, o, p.ports(3), p.upstream)
		if err != nil {
			return fmt.Errorf("the Gateway API's endpoint picker: %w", err)
		}
		p.gaie = &column{name: "GAIE", processor: x}
		p.columns = append(p.columns, p.gaie)
	}
	return nil
}

// startKvepp starts a kvepp for an endpoints file, with further flags.
func (p *programs) startKvepp(name string, o *options, endpoints string, flags ...string) (*program, error) {
	port := p.ports(3)
	x, err := p.spawn(name, nil, append([]string{o.kvepp, "serve", "--endpoints", endpoints,
		"--bind-address", "127.0.0.1", "--secure-serving=false", "--grpc-port", strconv.Itoa(port),
		"--grpc-health-port", strconv.Itoa(port + 1), "--metrics-port", strconv.Itoa(port + 2)}, flags...)...)
	if err != nil {
		return nil, err
	}
	x.port, x.metrics = port, port+2
	return x, nil
}

// startEnvoy starts the Envoy with a listener for each column.
func (p *programs) startEnvoy(o *options) error {
	for _, c := range p.columns {
		c.listen = p.ports(1)
	}
	config, err := envoyConfig(p.columns, p.upstream)
	if err != nil {
		return err
	}
	file := filepath.Join(p.folder, "envoy.json")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		return err
	}
	p.envoy, err = p.spawn("envoy", nil, o.envoy, "-c", file, "--use-dynamic-base-id", "--disable-hot-restart",
		"--concurrency", "2", "-l", "error")
	return err
}

// await waits until requests pass.
func (c *column) await(ctx context.Context, body []byte) error {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		conn, err := dial(c.listen)
		if err == nil {
			err = conn.ask(body)
			conn.Close()
		}
		if err == nil || ctx.Err() != nil || time.Now().After(deadline) {
			return errors.Join(err, ctx.Err())
		}
	}
}

// cpu returns the CPU time of a process's threads.
func (x *program) cpu() (time.Duration, error) {
	if x == nil {
		return 0, nil
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", x.Pid()))
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, name := range threads {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // a thread that ended
		}
		ran, _, _ := strings.Cut(string(text), " ")
		ns, err := strconv.ParseInt(ran, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(ns)
	}
	return sum, nil
}

// series returns the values of metrics with these names, labels included.
func (x *program) series(names ...string) (map[string]float64, error) {
	out := map[string]float64{}
	if x == nil {
		return out, nil
	}
	r, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/metrics", x.metrics))
	if err != nil {
		return nil, err
	}
	defer r.Body.Close()
	lines := bufio.NewScanner(r.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		for _, name := range names {
			if value, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
				n, err := strconv.ParseFloat(value, 64)
				if err != nil {
					return nil, err
				}
				out[name] = n
			}
		}
	}
	for _, name := range names {
		if _, ok := out[name]; !ok {
			return nil, fmt.Errorf("metrics without %s", name)
		}
	}
	return out, lines.Err()
}
