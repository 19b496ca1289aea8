package stack

import (
	"context"
	"fmt"
	"slices"
	"strconv"
)

// startRouter starts the frontend that routes to all workers, and waits until it knows n of them.
func (s *Stack) startRouter(ctx context.Context, n int) (err error) {
	w := s.Workers[0]
	args := append(
		[]string{s.python(), "-m", "dynamo.frontend", "--router-mode", s.cfg.Frontend, "--http-host", "127.0.0.1",
			"--http-port", strconv.Itoa(w.port)},
		s.cfg.FrontendFlags...)
	if s.shared, err = s.spawn("frontend", s.dynamoEnv(), args...); err != nil {
		return err
	}
	for _, w := range s.Workers {
		w.frontend = s.shared
	}
	if err := w.Ready(ctx); err != nil {
		return err
	}
	return s.up(ctx, "the frontend to see all workers", func() error {
		known, err := s.known(ctx)
		if err == nil && known != n {
			err = fmt.Errorf("the frontend knows %d of %d workers", known, n)
		}
		return err
	}, s.shared)
}

// startGateway starts an Envoy in front of the frontend that routes.
func (s *Stack) startGateway(ctx context.Context) (err error) {
	s.Envoy, err = s.StartEnvoyOf(ctx, "override-host.yaml", func(config any) {
		resources := At(config, "static_resources").(map[string]any)
		resources["clusters"] = slices.DeleteFunc(
			resources["clusters"].([]any),
			func(c any) bool { return At(c, "name") == "kvepp" },
		)
		connections := At(resources, "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config").(map[string]any)
		connections["http_filters"] = slices.DeleteFunc(connections["http_filters"].([]any), func(f any) bool {
			return At(f, "name") == "envoy.filters.http.ext_proc"
		})
	})
	return err
}

// known returns the number of workers that a router sends requests to now.
func (s *Stack) known(ctx context.Context) (int, error) {
	if s.cfg.Frontend == "" {
		m, err := s.Metrics(ctx)
		return int(m["kvepp_workers"]), err
	}
	var health struct{ Instances []struct{ Endpoint string } }
	if err := getJSON(ctx, s.URL()+"/health", &health); err != nil {
		return 0, err
	}
	n := 0
	for _, in := range health.Instances {
		if in.Endpoint == "generate" {
			n++
		}
	}
	return n, nil
}

// URL returns the URL for clients' requests.
func (s *Stack) URL() string {
	if s.Envoy == nil {
		return "http://" + s.Workers[0].Address
	}
	return s.Envoy.URL
}

// RouterMetrics returns the URL of the metrics of the program that routes: kvepp or Dynamo's frontend.
func (s *Stack) RouterMetrics() string {
	if s.cfg.Frontend != "" {
		return s.URL() + "/metrics"
	}
	return s.MetricsURL()
}
