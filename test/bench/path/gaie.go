package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"kvepp/test/harness/apiserver"
)

// startGAIE starts the endpoint picker of the Gateway API Inference Extension at the first of three ports, as its chart
// does, without TLS like every processor here. It takes endpoints only from Kubernetes, so it gets an API server with a
// pool and two pods that are the upstream.
func (p *programs) startGAIE(ctx context.Context, o *options, port, upstream int) (*program, error) {
	crds, err := filepath.Glob(filepath.Join(o.gaie, "crds", "*.yaml"))
	if err == nil && len(crds) == 0 {
		err = errors.New(o.gaie + " has no crds/*.yaml: run this through test/bench/path.sh")
	}
	if err != nil {
		return nil, err
	}
	if p.cluster, err = apiserver.Start(ctx, apiserver.Config{Programs: o.kube}); err != nil {
		return nil, err
	}
	for _, file := range crds {
		text, err := os.ReadFile(file)
		if err == nil {
			err = p.cluster.ApplyCRD(ctx, string(text))
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	const namespace, pool = "default", "pool"
	if err := p.cluster.Apply(ctx, namespace, fmt.Sprintf(`
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: %s}
spec:
  selector: {matchLabels: {app: engine}}
  targetPorts: [{number: %d}]
  endpointPickerRef: {name: picker, port: {number: %d}}
`, pool, upstream, port)); err != nil {
		return nil, err
	}
	for i, address := range upstreamAddresses {
		if err := p.cluster.RunPod(ctx, apiserver.Pod{Name: fmt.Sprintf("engine-%d", i),
			Labels: map[string]string{"app": "engine"}, IPs: []string{address}}); err != nil {
			return nil, err
		}
	}
	x, err := p.spawn(
		"gaie",
		[]string{"KUBECONFIG=" + p.cluster.Kubeconfig},
		filepath.Join(o.gaie, "epp"),
		"--pool-name",
		pool,
		"--pool-namespace",
		namespace,
		"--grpc-port",
		strconv.Itoa(port),
		"--grpc-health-port",
		strconv.Itoa(port+1),
		"--metrics-port",
		strconv.Itoa(port+2),
		"--secure-serving=false",
		"--metrics-endpoint-auth=false",
		"--tracing=false",
		"--zap-encoder",
		"json",
		"--v",
		"1",
	)
	if err != nil {
		return nil, err
	}
	x.port, x.metrics = port, port+2
	return x, nil
}
