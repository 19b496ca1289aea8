package stack

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/process"
)

// ManifestCertificates is the folder of Envoy's certificates in mtls.yaml.
const ManifestCertificates = "/etc/envoy/kvepp"

// Envoy is a running Envoy in front of kvepp.
type Envoy struct {
	URL string // where clients send requests

	stack         *Stack
	process       *process.Process
	listen, admin int // ports
}

// StartEnvoy starts an Envoy with a manifest of manifests/envoy and waits until it has found kvepp healthy. It changes
// the manifest's ports and addresses to this stack's, as a user would by hand. edit, if not nil, changes more.
func (s *Stack) StartEnvoy(ctx context.Context, manifest string, edit func(extProc map[string]any)) (*Envoy, error) {
	return s.StartEnvoyEdited(ctx, manifest, func(connections map[string]any) {
		if edit != nil {
			edit(At(connections, "http_filters", 0, "typed_config").(map[string]any))
		}
	})
}

// StartEnvoyEdited is StartEnvoy with an edit of the HTTP connection manager.
func (s *Stack) StartEnvoyEdited(
	ctx context.Context,
	manifest string,
	edit func(connections map[string]any),
) (*Envoy, error) {
	return s.StartEnvoyOf(ctx, manifest, func(config any) {
		edit(
			At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters",
				0, "typed_config").(map[string]any),
		)
	})
}

// StartEnvoyOf is StartEnvoy with an edit of the whole configuration, before Config.EditEnvoy.
func (s *Stack) StartEnvoyOf(ctx context.Context, manifest string, edit func(config any)) (*Envoy, error) {
	e, err := s.launchEnvoy(manifest, edit)
	if err != nil {
		return nil, err
	}
	return e, s.up(ctx, "Envoy", func() error {
		if s.cfg.Frontend == "" {
			if err := e.SeesKvepp(ctx, true); err != nil {
				return err
			}
		}
		return e.listens()
	}, e.process)
}

// StartEnvoyApart is StartEnvoyOf for an Envoy that may not find kvepp: it only waits until Envoy listens.
func (s *Stack) StartEnvoyApart(ctx context.Context, manifest string, edit func(config any)) (*Envoy, error) {
	e, err := s.launchEnvoy(manifest, edit)
	if err != nil {
		return nil, err
	}
	return e, s.up(ctx, "Envoy", e.listens, e.process)
}

// listens returns an error until Envoy listens, which is after the first health check of each cluster.
func (e *Envoy) listens() error {
	conn, err := net.Dial("tcp", strings.TrimPrefix(e.URL, "http://"))
	if err != nil {
		return err
	}
	return conn.Close()
}

func (s *Stack) launchEnvoy(manifest string, edit func(config any)) (*Envoy, error) {
	text, err := os.ReadFile(filepath.Join(s.cfg.Root, "manifests/envoy", manifest))
	if err != nil {
		return nil, err
	}
	text = bytes.ReplaceAll(text, []byte(ManifestCertificates), []byte(s.cfg.Certificates))
	e := &Envoy{stack: s}
	for _, port := range []*int{&e.listen, &e.admin} {
		if *port, err = process.Ports(1); err != nil {
			return nil, err
		}
	}
	e.URL = fmt.Sprintf("http://127.0.0.1:%d", e.listen)
	config, err := e.config(text, edit)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("envoy-%d", len(s.envoys))
	file := filepath.Join(s.dir, name+".json")
	if err := os.WriteFile(file, config, 0o644); err != nil {
		return nil, err
	}
	// The base id names shared memory, which other Envoys on the machine use too.
	e.process, err = s.spawn(name, nil, filepath.Join(cmp.Or(s.cfg.EnvoyTools, s.cfg.Tools), "bin/envoy"), "-c", file,
		"--use-dynamic-base-id", "--concurrency", "2", "--log-level", "warning", "--file-flush-interval-msec", "100")
	if err != nil {
		return nil, err
	}
	s.envoys = append(s.envoys, e)
	return e, nil
}

func (e *Envoy) config(manifest []byte, edit func(config any)) ([]byte, error) {
	var c any
	if err := yaml.Unmarshal(manifest, &c); err != nil {
		return nil, err
	}
	address := func(port int) any {
		return map[string]any{"socket_address": map[string]any{"address": "127.0.0.1", "port_value": port}}
	}
	of := func(addresses []string) (endpoints []any, err error) {
		for _, a := range addresses {
			host, port, err := net.SplitHostPort(a)
			if err != nil {
				return nil, err
			}
			n, err := strconv.Atoi(port)
			if err != nil {
				return nil, err
			}
			socket := map[string]any{"address": host, "port_value": n}
			endpoints = append(
				endpoints,
				map[string]any{"endpoint": map[string]any{"address": map[string]any{"socket_address": socket}}},
			)
		}
		return endpoints, nil
	}
	At(c, "admin").(map[string]any)["address"] = address(e.admin)
	listener := At(c, "static_resources", "listeners", 0).(map[string]any)
	listener["address"] = address(e.listen)
	for _, cluster := range At(c, "static_resources", "clusters").([]any) {
		var to []any
		switch At(cluster, "name") {
		case "kvepp":
			processors, err := of(e.stack.extProc())
			if err != nil {
				return nil, err
			}
			to = processors
		case "pool":
			if At(cluster, "type") == "ORIGINAL_DST" {
				continue
			}
			var addresses []string
			for _, w := range e.stack.Workers {
				if !slices.Contains(addresses, w.Address) {
					addresses = append(addresses, w.Address)
				}
			}
			var err error
			if to, err = of(append(addresses, e.stack.cfg.Servers...)); err != nil {
				return nil, err
			}
			for _, engine := range e.stack.cfg.Engines {
				more, err := of([]string{engine.Address})
				if err != nil {
					return nil, err
				}
				to = append(to, more...)
			}
		default: // the caller edits other manifests
			continue
		}
		At(cluster, "load_assignment", "endpoints", 0).(map[string]any)["lb_endpoints"] = to
	}
	edit(c)
	if e.stack.cfg.EditEnvoy != nil {
		e.stack.cfg.EditEnvoy(c)
	}
	return json.Marshal(c)
}

// At walks down a decoded document. For a missing path it returns nil, and the caller's type assertion fails.
func At(v any, path ...any) any {
	for _, step := range path {
		switch k := step.(type) {
		case string:
			m, _ := v.(map[string]any)
			v = m[k]
		case int:
			l, _ := v.([]any)
			if k >= len(l) {
				return nil
			}
			v = l[k]
		}
	}
	return v
}

// extProc returns the addresses of the external processors that Envoys call.
func (s *Stack) extProc() []string {
	if len(s.cfg.ExtProc) > 0 {
		return s.cfg.ExtProc
	}
	addresses := []string{s.ExtProc()}
	for _, r := range s.others() {
		addresses = append(addresses, fmt.Sprintf("127.0.0.1:%d", r.grpc))
	}
	return addresses
}

// AccessLog returns the lines of Envoy's access log about one request. Envoy writes a line when the request has ended.
func (e *Envoy) AccessLog(requestID string) (lines []map[string]any, err error) {
	log, err := os.ReadFile(e.process.Log)
	if err != nil {
		return nil, err
	}
	for text := range bytes.Lines(log) {
		var line map[string]any
		if !bytes.HasPrefix(text, []byte("{")) || !bytes.HasSuffix(text, []byte("}\n")) {
			continue // Envoy's own log
		}
		if err := json.Unmarshal(text, &line); err != nil {
			return nil, fmt.Errorf("the access log of Envoy has a line that is not JSON: %w: %s", err, text)
		}
		if line["request_id"] == requestID {
			lines = append(lines, line)
		}
	}
	return lines, nil
}

// SeesKvepp returns nil if Envoy's health check of kvepp has the given outcome, else an error. Of several kvepps, one
// healthy one is enough.
func (e *Envoy) SeesKvepp(ctx context.Context, healthy bool) error {
	var clusters struct {
		Statuses []struct {
			Name  string `json:"name"`
			Hosts []struct {
				Health map[string]any `json:"health_status"`
			} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	if err := getJSON(ctx, fmt.Sprintf("http://127.0.0.1:%d/clusters?format=json", e.admin), &clusters); err != nil {
		return err
	}
	for _, c := range clusters.Statuses {
		if c.Name != "kvepp" || len(c.Hosts) == 0 {
			continue
		}
		failed := true
		for _, h := range c.Hosts {
			failed = failed && h.Health["failed_active_health_check"] == true
		}
		if failed == healthy {
			return fmt.Errorf("the health check of kvepp by Envoy: failed is %v", failed)
		}
		return nil
	}
	return errors.New("kvepp is not among Envoy's clusters yet")
}

// Stats returns Envoy's statistics by name.
func (e *Envoy) Stats(ctx context.Context) (map[string]string, error) {
	m := map[string]string{}
	return m, get(ctx, fmt.Sprintf("http://127.0.0.1:%d/stats", e.admin), func(page io.Reader) error {
		for lines := bufio.NewScanner(page); lines.Scan(); {
			name, value, _ := strings.Cut(lines.Text(), ": ")
			m[name] = value
		}
		return nil
	})
}
