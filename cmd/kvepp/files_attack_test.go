package main

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
)

// TestLargeFiles: each file of an operator has a bound, and kvepp does not read a larger one whole.
func TestLargeFiles(t *testing.T) {
	folder := t.TempDir()
	file := func(name string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Truncate(path, 1<<40); err != nil {
			t.Fatal(err)
		}
		return path
	}
	large, certificates := file("large"), folder
	file("tls.crt")
	file("tls.key")
	endpoints := filepath.Join(t.TempDir(), "endpoints.yaml")
	if err := os.WriteFile(endpoints, []byte(oneEndpoint), 0o600); err != nil {
		t.Fatal(err)
	}
	serve := func(more string) []string {
		ports := " --grpc-port=1 --grpc-health-port=2 --metrics-port=3 --bind-address=127.0.0.1 --log-level=error "
		return strings.Fields("serve --endpoints=" + endpoints + ports + more)
	}
	for _, args := range [][]string{
		strings.Fields("serve --endpoints=" + large),
		serve("--config=" + large),
		serve("--router-policy-config=" + large),
		serve("--cert-path=" + certificates),
		serve("--tls-client-ca=" + large),
		serve("--admin-address=127.0.0.1:4 --admin-token-file=" + large),
		serve("--metrics-token-file=" + large),
		serve("--replica-port=5 --replica-peers=a:1 --replica-token-file=" + large),
		strings.Fields("envoy --endpoints=" + large),
		strings.Fields("check --endpoints=" + large),
		strings.Fields("replay --endpoints=" + large + " /dev/null"),
		strings.Fields("fetch --hub=http://127.0.0.1:1 --to=" + folder + " --token-file=" + large + " .=a/b"),
	} {
		var before, after runtime.MemStats
		var out bytes.Buffer
		runtime.ReadMemStats(&before)
		status := start(args, strings.NewReader(""), &out, &out, nil)
		runtime.ReadMemStats(&after)
		took := after.TotalAlloc - before.TotalAlloc
		if status == 0 || !strings.Contains(out.String(), "larger than") || took > 512<<20 {
			t.Errorf("%q: status %d, %d bytes allocated: %s", args, status, took, &out)
		}
	}
}
