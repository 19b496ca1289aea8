package join

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvepp/internal/flags"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/enginemetrics"
	"kvepp/prompt"
	"kvepp/serve/models"
)

// joinOf returns a Join with these flags.
func joinOf(args []string) (*Join, error) {
	j := &Join{Config: new(Config), Models: new(models.Config), Gauges: new(enginemetrics.Config)}
	fs := flags.New("test")
	j.Config.AddFlags(fs)
	j.Models.AddFlags(fs)
	j.Gauges.AddFlags(fs)
	if err := fs.Parse(append(args, "--endpoints=e.yaml")); err != nil {
		return nil, err
	}
	return j, errors.Join(j.Config.Validate(), j.Models.Validate(), j.Gauges.Validate())
}

// versionsOf runs setVersions for endpoints with these flags. It returns the log, too.
func versionsOf(t *testing.T, endpoints []pool.Endpoint, asked bool, args ...string) (*metrics.Metrics, string) {
	t.Helper()
	var log bytes.Buffer
	f, err := joinOf(append([]string{"--engine=sglang", "--model=m=/models/m"}, args...))
	if err != nil {
		t.Fatal(err)
	}
	f.Metrics, f.problems = metrics.New(), newProblems(slog.New(slog.NewTextHandler(&log, nil)))
	if f.finder = f.Finder(func() {}); asked != (f.finder != nil) {
		t.Fatalf("%v: engines are asked: %v", args, !asked)
	}
	f.setVersions(endpoints)
	if f.finder != nil { // once more, with responses
		changed := make(chan struct{}, 1)
		f.finder = f.Finder(func() { changed <- struct{}{} })
		f.setVersions(endpoints)
		go f.finder.Run(t.Context())
		<-changed
		f.setVersions(endpoints)
	}
	return f.Metrics, log.String()
}

// TestVersionsOfEndpoints: the endpoints file's version takes precedence over the engine's response, and that over
// --engine-version; a version that was not tested is logged and counted.
func TestVersionsOfEndpoints(t *testing.T) {
	engine := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/server_info" {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		io.WriteString(w, `{"version":"0.5.99","page_size":64}`)
	}))
	defer engine.Close()
	address := strings.TrimPrefix(engine.URL, "http://")
	both := func() []pool.Endpoint {
		return []pool.Endpoint{{Name: "a", Address: address}, {Name: "b", Address: address, EngineVersion: "0.5.21"},
			{Name: "prefill"}}
	}

	endpoints := both()
	_, log := versionsOf(t, endpoints, true)
	if endpoints[0].EngineVersion != "0.5.99" || endpoints[1].EngineVersion != "0.5.21" ||
		endpoints[2].EngineVersion != "" || endpoints[0].OtherTokenizer {
		t.Errorf("asked: %+v", endpoints)
	}
	if strings.Count(log, "kvepp was not tested with sglang") != 1 || !strings.Contains(log, "the rules of 0.5.23") {
		t.Errorf("the log says %s", log)
	}
	endpoints = both()
	_, log = versionsOf(t, endpoints, false, "--engine-version", "0.5.22")
	if endpoints[0].EngineVersion != "0.5.22" || endpoints[1].EngineVersion != "0.5.21" || log != "" {
		t.Errorf("with --engine-version: %+v; %s", endpoints, log)
	}
	versionsOf(t, both(), false, "--refresh-metrics-interval", "0")
	if j, err := joinOf([]string{"--engine=dynamo"}); err != nil || j.Finder(func() {}) == nil {
		t.Error("Dynamo's frontends are not asked")
	}
}

// TestVersionsOverTLS: engines are asked for their versions with the certificates that their metrics pages need.
func TestVersionsOverTLS(t *testing.T) {
	engine := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, `{"version":"0.33.0"}`)
	}))
	defer engine.Close()
	j, err := joinOf([]string{"--model-server-metrics-https-insecure-skip-verify=false"})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := j.Finder(func() {}).Ask(t.Context(), engine.URL); err == nil {
		t.Errorf("an unknown authority is trusted: %v", got)
	}
	authorities := x509.NewCertPool()
	authorities.AddCert(engine.Certificate())
	j.Gauges.TLS = &tls.Config{RootCAs: authorities}
	if got, err := j.Finder(func() {}).Ask(t.Context(), engine.URL); err != nil || got.Version != "0.33.0" {
		t.Errorf("%v, %v", got, err)
	}
}

// TestVersionsInTheFile: the endpoints file is refused if a version is none, or two stand behind one address.
func TestVersionsInTheFile(t *testing.T) {
	for text, want := range map[string]string{
		"- {name: a, address: 10.0.0.1:80, engineVersion: 0.5.21}\n- {name: b, address: 10.0.0.2:80}": "",
		"- {name: a, address: 10.0.0.1:80, engineVersion: new}":                                       "not a version",
		"- {name: a, address: 10.0.0.1:80, engineVersion: 0.5.21}\n" +
			"- {name: b, address: 10.0.0.1:80, engineVersion: 0.5.23}": "share the address",
		"- {name: a, address: 10.0.0.1:80, engineVersion: 0.5.21}\n" +
			"- {name: b, address: 10.0.0.1:80, engineVersion: 0.5.21}": "",
	} {
		entries, err := pool.ParseFile([]byte("endpoints:\n" + text))
		if err != nil {
			t.Fatal(err)
		}
		err = checkVersions(prompt.SGLang, entries)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestVersionFlags: a value that is no version is refused at start.
func TestVersionFlags(t *testing.T) {
	for _, args := range [][]string{{"--engine-version", "new"}, {"--engine-version", ""}} {
		if _, err := joinOf(args); err == nil {
			t.Errorf("%v is accepted", args)
		}
	}
}
