package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

const composeFolder = "../examples/compose"

// composeService is what this test reads of a service in compose.yaml.
type composeService struct {
	Image, Entrypoint string
	Build             *struct {
		Context, Target string
		Args            map[string]string
	}
	Command     []string
	Environment map[string]string
	Volumes     []string // HOST:CONTAINER:ro
	Ports       []string // ADDRESS:HOST:CONTAINER
	Profiles    []string
}

// composeServices reads compose.yaml, with its anchors and merges.
func composeServices(t *testing.T) map[string]*composeService {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(composeFolder, "compose.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct{ Services map[string]*composeService }
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"envoy", "kvepp", "engine-a", "engine-b", "prometheus", "grafana"} {
		if file.Services[name] == nil {
			t.Fatalf("compose.yaml has no service %s", name)
		}
	}
	return file.Services
}

// composed is the compose file's services as processes on this machine. It changes only what containers have of their
// own: a service's name is localhost, each port of a service is a free port, and a mounted path is the file it shows.
type composed struct {
	t        *testing.T
	dir      string
	services map[string]*composeService
	ports    map[string]int // by SERVICE:PORT
}

func (c *composed) port(service, port string) int {
	c.t.Helper()
	key := service + ":" + port
	if c.ports[key] == 0 {
		free, err := process.Ports(1)
		if err != nil {
			c.t.Fatal(err)
		}
		c.ports[key] = free
	}
	return c.ports[key]
}

var (
	composeAddress = regexp.MustCompile(`\b(engine-a|engine-b|kvepp):(\d{4})\b`)
	envoyAddressOf = regexp.MustCompile(`address: "(engine-a|engine-b|kvepp)", port_value: (\d+)`)
	ownPorts       = regexp.MustCompile(`(-port=|127\.0\.0\.1:|port_value: )(\d{4,5})\b`)
)

// mapped returns a text of a service with this machine's ports and names.
func (c *composed) mapped(service, text string) string {
	text = composeAddress.ReplaceAllStringFunc(text, func(s string) string {
		m := composeAddress.FindStringSubmatch(s)
		return fmt.Sprintf("localhost:%d", c.port(m[1], m[2]))
	})
	// A port of the service itself, before those of others get their numbers.
	text = ownPorts.ReplaceAllStringFunc(text, func(s string) string {
		m := ownPorts.FindStringSubmatch(s)
		return fmt.Sprintf("%s%d", m[1], c.port(service, m[2]))
	})
	return text
}

// envoysConfiguration is mapped for Envoy's configuration, where address and port of another service are apart.
func (c *composed) envoysConfiguration(text string) string {
	var kept []string
	text = envoyAddressOf.ReplaceAllStringFunc(text, func(s string) string {
		m := envoyAddressOf.FindStringSubmatch(s)
		kept = append(kept, fmt.Sprintf(`address: "localhost", port_value: %d`, c.port(m[1], m[2])))
		return fmt.Sprintf("<%d>", len(kept)-1)
	})
	text = c.mapped("envoy", text)
	for i, k := range kept {
		text = strings.Replace(text, fmt.Sprintf("<%d>", i), k, 1)
	}
	return text
}

// mounts returns the container's paths of a service with the paths that they show. A folder with configuration is a
// copy with this machine's ports.
func (c *composed) mounts(service string) (pairs []string) {
	c.t.Helper()
	for _, v := range c.services[service].Volumes {
		parts := strings.Split(v, ":")
		if len(parts) != 3 || parts[2] != "ro" {
			c.t.Errorf("%s: mount %q as HOST:CONTAINER:ro", service, v)
			continue
		}
		source := filepath.Join(composeFolder, parts[0])
		if info, err := os.Stat(source); err != nil || !info.IsDir() {
			c.t.Errorf("%s mounts %s, which is no folder of the tree: %v", service, parts[0], err)
			continue
		}
		shown := filepath.Join(c.dir, service, filepath.Base(source))
		if err := os.CopyFS(shown, os.DirFS(source)); err != nil {
			c.t.Fatal(err)
		}
		files, err := filepath.Glob(shown + "/*.yaml")
		if err != nil {
			c.t.Fatal(err)
		}
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				c.t.Fatal(err)
			}
			var edited string
			if service == "envoy" {
				edited = c.envoysConfiguration(string(text))
			} else {
				edited = c.mapped(service, string(text))
			}
			if err := os.WriteFile(f, []byte(edited), 0o600); err != nil {
				c.t.Fatal(err)
			}
		}
		pairs = append(pairs, parts[1], shown)
	}
	return pairs
}

// command returns a service's arguments and environment, with program in place of its image's.
func (c *composed) command(service, program string) (argv, env []string) {
	c.t.Helper()
	s := c.services[service]
	paths := strings.NewReplacer(c.mounts(service)...)
	argv = []string{program}
	for _, a := range s.Command {
		argv = append(argv, paths.Replace(c.mapped(service, a)))
	}
	for name, value := range s.Environment {
		env = append(env, name+"="+c.mapped(service, value))
	}
	if service == "kvepp" { // its ports that the file leaves at their defaults
		env = append(env, fmt.Sprintf("KVEPP_GRPC_PORT=%d", c.port(service, "9002")),
			fmt.Sprintf("KVEPP_GRPC_HEALTH_PORT=%d", c.port(service, "9003")),
			fmt.Sprintf("KVEPP_METRICS_PORT=%d", c.port(service, "9090")))
	}
	return argv, env
}

// TestComposeFile: what compose.yaml names exists: stages of the Dockerfile, versions of images, files that it mounts,
// and what Prometheus and Grafana read there.
func TestComposeFile(t *testing.T) {
	services := composeServices(t)
	dockerfile, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	chart, err := os.ReadFile("../manifests/chart/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	versioned := regexp.MustCompile(`:[a-z-]*v?\d+\.\d+\.\d+(@sha256:[0-9a-f]{64})?$`)
	for name, s := range services {
		switch {
		case s.Build == nil && !versioned.MatchString(s.Image):
			t.Errorf("%s: image %q has no version", name, s.Image)
		case s.Build == nil:
		case s.Build.Context != "../..":
			t.Errorf("%s is built from %q, not from the tree", name, s.Build.Context)
		case s.Build.Target != "" && !strings.Contains(string(dockerfile), "\nFROM scratch AS "+s.Build.Target+"\n"):
			t.Errorf("%s: the Dockerfile has no stage %q", name, s.Build.Target)
		default:
			for arg := range s.Build.Args {
				if !strings.Contains(string(dockerfile), "\nARG "+arg+"=") {
					t.Errorf("%s: the Dockerfile has no ARG %s", name, arg)
				}
			}
		}
		for _, p := range s.Ports {
			if !strings.HasPrefix(p, "127.0.0.1:") {
				t.Errorf("%s: port %s is open to other machines", name, p)
			}
		}
	}
	if image := services["envoy"].Image; !strings.Contains(string(chart), "image: "+image+"\n") {
		t.Errorf("Envoy's image is %s, and the chart has another", image)
	}
	for _, name := range []string{"prometheus", "grafana"} {
		if !slices.Equal(services[name].Profiles, []string{"monitoring"}) {
			t.Errorf("%s starts without the profile monitoring", name)
		}
	}
	composeMonitoring(t, services)
}

// composeMonitoring checks that the paths and addresses in the files of Prometheus and Grafana are in compose.yaml.
func composeMonitoring(t *testing.T, services map[string]*composeService) {
	t.Helper()
	// inside returns the path in the tree of a path in a container; "" if nothing is mounted there.
	inside := func(service, path string) string {
		for _, v := range services[service].Volumes {
			host, container, _ := strings.Cut(strings.TrimSuffix(v, ":ro"), ":")
			if rest, ok := strings.CutPrefix(path, container); ok {
				return filepath.Join(composeFolder, host, rest)
			}
		}
		return ""
	}
	read := func(file string, to any) {
		t.Helper()
		text, err := os.ReadFile(filepath.Join(composeFolder, file))
		if err != nil {
			t.Fatal(err)
		}
		if err := yaml.Unmarshal(text, to); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
	}
	var prometheus struct {
		Rules  []string `yaml:"rule_files"`
		Scrape []struct {
			Static []struct{ Targets []string } `yaml:"static_configs"`
		} `yaml:"scrape_configs"`
	}
	read("prometheus/prometheus.yml", &prometheus)
	for _, pattern := range prometheus.Rules {
		if files, err := filepath.Glob(inside("prometheus", pattern)); err != nil || len(files) == 0 {
			t.Errorf("prometheus.yml: no file is mounted at %s (%v)", pattern, err)
		}
	}
	if len(prometheus.Rules) == 0 || len(prometheus.Scrape) != 1 || len(prometheus.Scrape[0].Static) != 1 ||
		!slices.Equal(prometheus.Scrape[0].Static[0].Targets, []string{"kvepp:9090"}) {
		t.Errorf("prometheus.yml: %+v", prometheus)
	}
	config := strings.TrimPrefix(services["prometheus"].Command[0], "--config.file=")
	if inside("prometheus", config) != filepath.Join(composeFolder, "prometheus/prometheus.yml") {
		t.Errorf("Prometheus reads %s, where another file is mounted", config)
	}
	var sources struct{ Datasources []struct{ Type, URL string } }
	read("grafana/datasources/prometheus.yaml", &sources)
	if len(sources.Datasources) != 1 || sources.Datasources[0].URL != "http://prometheus:9090" {
		t.Errorf("data sources: %+v", sources)
	}
	var dashboards struct {
		Providers []struct{ Options struct{ Path string } }
	}
	read("grafana/dashboards/kvepp.yaml", &dashboards)
	home := services["grafana"].Environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
	for _, file := range []string{dashboards.Providers[0].Options.Path + "/kvepp.json", home} {
		if at := inside("grafana", file); at != "../manifests/chart/dashboards/kvepp.json" {
			t.Errorf("Grafana's %s is %q, not the chart's dashboard", file, at)
		}
	}
}

// TestCompose runs the parts of compose.yaml as processes, by the file's own commands and environment, and the commands
// of its README through them. Envoy has the minor version of the file's image. The sub-test "docker" starts the
// containers where a Docker daemon runs.
func TestCompose(t *testing.T) {
	c := &composed{t: t, dir: t.TempDir(), services: composeServices(t), ports: map[string]int{}}
	programs := map[string]string{"kvepp": "../bin/kvepp", "engine-a": buildEngine(t),
		"envoy": filepath.Join(imageEnvoy(t), "bin/envoy")}
	programs["engine-b"] = programs["engine-a"]
	var environment []string // kvepp's
	for _, name := range []string{"engine-a", "engine-b", "kvepp", "envoy"} {
		argv, env := c.command(name, programs[name])
		if name == "kvepp" {
			environment = env
			accepted := exec.CommandContext(t.Context(), argv[0], append(slices.Clone(argv[1:]), "--print-config")...)
			accepted.Env = append(os.Environ(), env...)
			if out, err := accepted.CombinedOutput(); err != nil {
				t.Fatalf("kvepp refuses the flags of compose.yaml: %v\n%s", err, out)
			}
		}
		p, err := process.Start(c.dir, name, env, argv...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Kill)
	}
	url := fmt.Sprintf("http://127.0.0.1:%d", c.port("envoy", "10080"))
	var request string
	for _, b := range blocksOf(t, "examples/compose/README.md") {
		for _, command := range commandsOf(t, b.text) {
			arguments, ours := strings.CutPrefix(command, "docker compose exec kvepp /kvepp ")
			switch {
			case strings.HasPrefix(command, "curl "):
				request = strings.Replace(command, "http://127.0.0.1:10080", url, 1)
				composeRoutes(t, url)
				composeRequests(t, c, request)
			case ours:
				cmd := exec.CommandContext(t.Context(), programs["kvepp"], strings.Fields(arguments)...)
				cmd.Env = append(os.Environ(), environment...)
				out, err := cmd.CombinedOutput()
				if err != nil || !bytes.Contains(out, []byte("engine-")) {
					t.Errorf("%s: %v\n%s", command, err, out)
				}
			case !strings.HasPrefix(command, "docker compose ") && command != "cd examples/compose":
				t.Errorf("no test runs this command of README.md: %s", command)
			}
		}
	}
	if request == "" {
		t.Fatal("README.md has no request")
	}
	t.Run("envoy.yaml", func(t *testing.T) { composeEnvoy(t) })
	t.Run("docker", func(t *testing.T) { composeDocker(t) })
}

// composeRoutes waits until kvepp chooses for Envoy. Until they are connected Envoy chooses, and an engine that it
// chooses must not cache the README's prompt.
func composeRoutes(t *testing.T, url string) {
	t.Helper()
	eventually(t, func() error {
		a, err := stack.Chat(t.Context(), http.DefaultClient, url, nil,
			[]stack.Message{{Role: "user", Content: "hello"}}, false, map[string]any{"model": "tiny", "max_tokens": 2})
		if err == nil && (a.Status != http.StatusOK || a.Worker == "") {
			err = fmt.Errorf("HTTP %d, worker %q: %s", a.Status, a.Worker, a.Body)
		}
		return err
	})
}

// composeRequests sends the README's request until Envoy knows an engine, and then until the engine has it cached.
func composeRequests(t *testing.T, c *composed, command string) {
	t.Helper()
	send := func() (engine string, cached int, err error) {
		out, err := exec.CommandContext(t.Context(), "bash", "-euc", strings.Replace(command, "curl ",
			"curl -sS --fail-with-body ", 1)).CombinedOutput()
		if err != nil {
			return "", 0, fmt.Errorf("%w: %s", err, out)
		}
		r, err := parseReply(string(out))
		if err != nil {
			return "", 0, err
		}
		engine = r["x-engine"]
		if engine != "engine-a" && engine != "engine-b" || r["x-kvepp-predicted-cached-tokens"] == "" {
			return "", 0, fmt.Errorf("not by kvepp and an engine: %s", out)
		}
		return engine, r.cached(), nil
	}
	var first string
	eventually(t, func() (err error) { first, _, err = send(); return err })
	eventually(t, func() error {
		metrics, err := stack.ReadMetrics(t.Context(),
			fmt.Sprintf("http://127.0.0.1:%d/metrics", c.port("kvepp", "9090")))
		if err == nil && metrics["kvepp_index_blocks"] < 10 {
			err = fmt.Errorf("the index has %v blocks", metrics["kvepp_index_blocks"])
		}
		return err
	})
	second, cached, err := send()
	if err != nil || second != first || cached < 100 {
		t.Errorf("first %s, then %s with %d cached tokens: %v", first, second, cached, err)
	}
}

// composeEnvoy: envoy.yaml is what the README's command prints.
func composeEnvoy(t *testing.T) {
	readme, err := os.ReadFile(filepath.Join(composeFolder, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^ *docker compose run .* kvepp envoy (.*) >envoy/envoy\.yaml$`).FindSubmatch(readme)
	if m == nil {
		t.Fatal("README.md does not say how to print envoy.yaml")
	}
	const mounted = "/etc/kvepp/endpoints.yaml"
	file, err := filepath.Abs(filepath.Join(composeFolder, "kvepp/endpoints.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), "../bin/kvepp", append([]string{"envoy"},
		strings.Fields(strings.Replace(string(m[1]), mounted, file, 1))...)...).Output()
	if err != nil {
		t.Fatal(err)
	}
	want := bytes.Replace(out, []byte(file), []byte(mounted), 1)
	got, err := os.ReadFile(filepath.Join(composeFolder, "envoy/envoy.yaml"))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("examples/compose/envoy/envoy.yaml differs from what kvepp envoy prints (%v): print it again", err)
	}
}

// composeDocker starts the containers and sends a request, if a Docker daemon and Compose are there.
func composeDocker(t *testing.T) {
	docker := func(args ...string) ([]byte, error) {
		cmd := exec.CommandContext(t.Context(), "docker", args...)
		cmd.Dir = composeFolder
		return cmd.CombinedOutput()
	}
	for _, needs := range [][]string{{"info"}, {"compose", "version"}} {
		if out, err := docker(needs...); err != nil {
			t.Skipf("docker %s: %v: %s\nWith Docker, this runs it whole: cd examples/compose && docker compose up",
				strings.Join(needs, " "), err, out)
		}
	}
	if out, err := docker("compose", "-p", "kvepp-test", "up", "--build", "--detach"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	defer docker("compose", "-p", "kvepp-test", "down", "--volumes")
	composeRoutes(t, "http://127.0.0.1:10080")
}
