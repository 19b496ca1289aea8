package e2e

import (
	"fmt"
	"strings"
	"testing"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// stockEngines starts stand-ins for vLLM and returns them.
func stockEngines(t *testing.T, n int, flags ...string) []*stack.Engine {
	t.Helper()
	dir := t.TempDir()
	program, err := stack.BuildEngine(t.Context(), "..", dir)
	if err != nil {
		t.Fatal(err)
	}
	var engines []*stack.Engine
	for i := range n {
		e, err := stack.StartEngine(
			t.Context(),
			program,
			dir,
			fmt.Sprintf("engine-%d", i),
			"../test/models/tiny-bytelevel",
			append([]string{"-token-time", "1ms"}, flags...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		engines = append(engines, e)
	}
	return engines
}

// TestSubscriptionsAreLogged: kvepp logs that it connected to the KV events of a real mocker and of a stock engine.
// After 10 s it logs that it cannot connect to those of another engine, with the address and the flag of the configured
// engine.
func TestSubscriptionsAreLogged(t *testing.T) {
	text, err := main.Log()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range main.Workers {
		if want := fmt.Sprintf(`msg="connected to a worker's KV events" worker=%s/0 address=tcp://127.0.0.1:`,
			w.Name); !strings.Contains(
			text,
			want,
		) {
			t.Errorf("no line about the mocker %s", w.Name)
		}
	}
	engine := stockEngines(t, 1)[0]
	s := start(t, stack.Config{Workers: -1, Servers: []string{engine.Address}, KveppFlags: []string{"--engine=vllm"}})
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	unused := fmt.Sprintf("tcp://127.0.0.1:%d", port)
	if err := s.ReplaceEndpoints("endpoints:\n" + engine.Entry() +
		fmt.Sprintf("- {name: deaf, address: %q, kvEvents: %q}\n", engine.Address, unused)); err != nil {
		t.Fatal(err)
	}
	logLine(t, s, "connected to a worker's KV events", "level=INFO", "worker=engine-0/0", "address="+engine.KVEvents)
	line := logLine(
		t,
		s,
		"kvepp cannot connect to a worker's KV events",
		"level=WARN",
		"worker=deaf/0",
		"address="+unused,
		"enable_kv_cache_events",
	)
	if strings.Contains(line, "dynamo") {
		t.Errorf("the line names a flag of Dynamo's for a stock engine: %s", line)
	}
}

// TestOtherBlockSize: if an engine's KV events have another block size than the endpoints file, decisions for it have
// their own reason, and those for the other engine do not.
func TestOtherBlockSize(t *testing.T) {
	engines := stockEngines(t, 2)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    []string{engines[0].Address, engines[1].Address},
			KveppFlags: []string{"--engine=vllm"},
		},
	)
	if err := s.ReplaceEndpoints("endpoints:\n" + engines[0].Entry() + engines[1].Entry() +
		"  blockSize: 32\n"); err != nil {
		t.Fatal(err)
	}
	if err := s.Settled(t.Context(), 2); err != nil {
		t.Fatal(err)
	}
	seen := map[string]string{}
	eventually(t, func() error {
		a := chat(t, s.Envoy.URL, novel(), false, nil)
		seen[a.Worker] = a.Reason
		if seen["engine-0/0"] != "kv" || seen["engine-1/0"] != "block_size_mismatch" {
			return fmt.Errorf("reasons by worker: %v", seen)
		}
		return nil
	})
	logLine(
		t,
		s,
		"block size differs from the engine's",
		"level=ERROR",
		"worker=engine-1/0",
		"configured=32",
		"announced=16",
	)
	if n := metric(t, s, `kvepp_decisions_total{reason="block_size_mismatch"}`); n < 1 {
		t.Errorf("the metric counts %v decisions", n)
	}
}
