package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// withClientCertificate returns an edit that makes every Envoy present a client certificate to kvepp, as mtls.yaml
// does, so that one kvepp can serve all configurations.
func withClientCertificate(certificates string) func(config any) {
	return func(config any) {
		for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
			if stack.At(c, "name") == "kvepp" {
				stack.At(c, "transport_socket", "typed_config").(map[string]any)["common_tls_context"] = map[string]any{
					"alpn_protocols":     []any{"h2"},
					"validation_context": map[string]any{},
					"tls_certificates": []any{map[string]any{
						"certificate_chain": map[string]any{"filename": filepath.Join(certificates, "tls.crt")},
						"private_key":       map[string]any{"filename": filepath.Join(certificates, "tls.key")}}},
				}
			}
		}
	}
}

// apiError is an error in the shape of OpenAI's API.
type apiError struct {
	Error *struct {
		Message, Type, Code string
		Param               *string
	}
}

// readError returns the error in a response. It fails unless it is a complete one of the given type and code.
func readError(a *stack.Response, kind, code string) error {
	var e apiError
	decoder := json.NewDecoder(strings.NewReader(a.Body))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&e); err != nil || e.Error == nil || e.Error.Type != kind || e.Error.Code != code ||
		e.Error.Message == "" ||
		e.Error.Param != nil {
		return fmt.Errorf("want an error of type %s and code %s, got %s (%v)", kind, code, a.Body, err)
	}
	if got := a.Header.Get("content-type"); got != "application/json" {
		return fmt.Errorf("the error has content-type %q", got)
	}
	return nil
}

// closedPort returns an address at which no process listens.
func closedPort(t *testing.T) string {
	t.Helper()
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// TestOutages: each of Envoy's configurations answers in OpenAI's shape if an engine refuses connections and if kvepp
// is not there. It passes on the errors of engines and of kvepp unchanged, and logs one line for each request with the
// request id that kvepp has.
func TestOutages(t *testing.T) {
	endpoints := startScripted(t, 1)
	engine, closed := endpoints.addresses[0], closedPort(t)
	certificates := t.TempDir()
	newAuthority(t).issue(t, certificates, 1, "kvepp")
	s := start(
		t,
		stack.Config{
			Workers:      -1,
			Servers:      []string{engine, closed},
			Certificates: certificates,
			EditEnvoy:    withClientCertificate(certificates),
			KveppFlags: []string{
				"--router-kv-events=false",
				"--engine=vllm",
				"--cert-path=" + certificates,
				"--tls-client-ca=" + filepath.Join(certificates, "ca.crt"),
			},
		},
	)
	envoys := map[string]*stack.Envoy{}
	for _, file := range manifestFiles(t) {
		name := filepath.Base(file)
		envoy, err := s.StartEnvoy(t.Context(), name, nil)
		if err != nil {
			t.Fatal(name, err)
		}
		envoys[name] = envoy
	}
	only := func(address, name string) { // the only endpoint of kvepp
		if err := s.ReplaceEndpoints(fmt.Sprintf("endpoints:\n- {name: %s, address: %q}\n", name,
			address)); err != nil {
			t.Fatal(err)
		}
		eventually(t, func() error {
			a, err := stack.Post(
				t.Context(),
				http.DefaultClient,
				s.Envoy.URL+"/v1/completions",
				nil,
				map[string]any{"model": stack.Model, "prompt": "one"},
			)
			if err == nil && (metric(t, s, "kvepp_workers") != 1 || a.Worker != name+"/0") {
				err = fmt.Errorf("kvepp has not read the endpoints file yet: it chose %s", a.Worker)
			}
			return err
		})
	}
	send := func(envoy *stack.Envoy, id, first string, body string) *stack.Response {
		t.Helper()
		header := http.Header{"X-Request-Id": {id}, "X-Number": {id}, "Authorization": {"Bearer sk-7f3a91"}}
		if first != "" {
			header.Set("x-first", first)
		}
		a, err := stack.Post(
			t.Context(),
			http.DefaultClient,
			envoy.URL+"/v1/completions?key=k-55e1",
			header,
			json.RawMessage(body),
		)
		if err != nil {
			t.Fatal(id, err)
		}
		return a
	}
	logged := func(envoy *stack.Envoy, id string, want map[string]any) {
		t.Helper()
		var line map[string]any
		eventually(t, func() error {
			lines, err := envoy.AccessLog(id)
			if err != nil {
				t.Fatal(err)
			}
			if len(lines) != 1 {
				return fmt.Errorf("Envoy's access log has %d lines about %s", len(lines), id)
			}
			line = lines[0]
			return nil
		})
		for key, value := range want {
			if fmt.Sprint(line[key]) != fmt.Sprint(value) {
				t.Errorf("%s: the access log has %s %v, want %v: %v", id, key, line[key], value, line)
			}
		}
		for _, secret := range []string{"sk-7f3a91", "k-55e1"} {
			if strings.Contains(fmt.Sprint(line), secret) {
				t.Errorf("%s: the access log has a secret: %v", id, line)
			}
		}
	}
	const good = `{"model":"` + stack.Model + `","prompt":"one two three"}`
	only(engine, "engine")
	for name, envoy := range envoys {
		id := name + "-served"
		a := send(envoy, id, "", good)
		if a.Status != http.StatusOK || a.Header.Get("x-kvepp-request-id") != id {
			t.Errorf("%s: %+v", id, a)
		}
		if _, err := s.Decision(t.Context(), id); err != nil {
			t.Error(err)
		}
		logged(
			envoy,
			id,
			map[string]any{
				"status":         200,
				"path":           "/v1/completions",
				"method":         "POST",
				"code_details":   "via_upstream",
				"response_flags": "-",
				"upstream_host":  engine,
				"endpoints":      engine,
				"kvepp_reason":   a.Reason,
				"attempts":       1,
				"bytes_received": len(good),
				"bytes_sent":     len(a.Body),
			},
		)

		unnamed, err := stack.Post(
			t.Context(),
			http.DefaultClient,
			envoy.URL+"/v1/completions",
			nil,
			json.RawMessage(good),
		)
		if err != nil {
			t.Fatal(name, err)
		}
		made := unnamed.Header.Get("x-kvepp-request-id") // the id is Envoy's
		if _, err := s.Decision(t.Context(), made); err != nil || made == "" {
			t.Errorf("%s: request id %q: %v", name, made, err)
		}
		logged(envoy, made, map[string]any{"status": 200})

		id = name + "-refused-by-kvepp"
		a = send(envoy, id, "", `{"model":1}`)
		if want := `{"error":{"message":"'model' must be a string.","type":"invalid_request_error","param":"model",` +
			`"code":"invalid_type"}}`; a.Status != http.StatusBadRequest ||
			a.Body != want {
			t.Errorf("%s: %+v, want 400 %s", id, a, want)
		}
		logged(
			envoy,
			id,
			map[string]any{"status": 400, "code_details": "kvepp_invalid_type", "kvepp_reason": "invalid_type"},
		)

		id = name + "-refused-by-engine"
		a = send(envoy, id, "503", good)
		const want = `{"object":"error","message":"of the engine","code":503}`
		if a.Status != http.StatusServiceUnavailable || a.Body != want {
			t.Errorf("%s: %+v, want 503 %s", id, a, want)
		}
		logged(envoy, id, map[string]any{"status": 503, "code_details": "via_upstream"})

		id = name + "-reset"
		a = send(envoy, id, "reset", good)
		if err := readError(a, "upstream_error", "upstream_unavailable"); err != nil ||
			a.Status != http.StatusServiceUnavailable ||
			a.Header.Get("x-request-id") != id {
			t.Errorf("%s: %v %+v", id, err, a)
		}
		logged(envoy, id, map[string]any{"status": 503, "response_flags": "UC"})
	}
	only(closed, "closed")
	for name, envoy := range envoys {
		id := name + "-unreachable"
		a := send(envoy, id, "", good)
		if err := readError(a, "upstream_error", "upstream_unavailable"); err != nil ||
			a.Status != http.StatusServiceUnavailable ||
			a.Header.Get("x-request-id") != id {
			t.Errorf("%s: %v %+v", id, err, a)
		}
		logged(
			envoy,
			id,
			map[string]any{"status": 503, "response_flags": "UF", "upstream_host": closed, "endpoints": closed},
		)
	}
	s.KillKvepp()
	for name, envoy := range envoys {
		eventually(t, func() error { return envoy.SeesKvepp(t.Context(), false) })
		id := name + "-without-kvepp"
		a := send(envoy, id, "", good)
		if name == "fail-open.yaml" || name == "stock-engines.yaml" { // the healthy engine answers
			if a.Status != http.StatusOK {
				t.Errorf("%s: %+v", id, a)
			}
			continue
		}
		if err := readError(a, "service_unavailable", "endpoint_picker_unavailable"); err != nil ||
			a.Status != http.StatusServiceUnavailable ||
			a.Header.Get("x-request-id") != id {
			t.Errorf("%s: %v %+v", id, err, a)
		}
		logged(envoy, id, map[string]any{"status": 503, "upstream_host": nil, "endpoints": nil})
	}
}

// TestEnvoysOwnResponses: Envoy's own responses keep their status and have OpenAI's shape for any reason; for gRPC they
// have gRPC's.
func TestEnvoysOwnResponses(t *testing.T) {
	endpoints := startScripted(t, 1)
	s := start(
		t,
		stack.Config{
			Workers:    -1,
			Servers:    endpoints.addresses,
			KveppFlags: []string{"--router-kv-events=false", "--engine=vllm"},
		},
	)
	edited := func(edit func(config any)) *stack.Envoy {
		t.Helper()
		e, err := s.StartEnvoyOf(t.Context(), "override-host.yaml", edit)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	pool := func(config any) map[string]any {
		for _, c := range stack.At(config, "static_resources", "clusters").([]any) {
			if stack.At(c, "name") == "pool" {
				return c.(map[string]any)
			}
		}
		return nil
	}
	client := stormClients(t)
	for name, c := range map[string]struct {
		envoy  *stack.Envoy
		first  string
		status int
	}{
		"a circuit breaker": {edited(func(config any) {
			pool(config)["circuit_breakers"] = map[string]any{"thresholds": []any{map[string]any{"max_requests": 0,
				"max_pending_requests": 0, "max_connections": 0}}}
		}), "", http.StatusServiceUnavailable},
		"a timeout": {edited(func(config any) {
			stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters", 0, "typed_config",
				"route_config", "virtual_hosts", 0, "routes", 0, "route").(map[string]any)["timeout"] = "0.2s"
		}), "wait", http.StatusGatewayTimeout},
		"no endpoint": {edited(func(config any) {
			pool(config)["load_assignment"] = map[string]any{"cluster_name": "pool"}
		}), "", http.StatusServiceUnavailable},
	} {
		q := &scriptedRequest{path: "/v1/completions", body: completion(100), first: c.first, length: true}
		a, err := q.send(t.Context(), client[false], c.envoy.URL, name)
		if err != nil || a.Status != c.status {
			t.Errorf("%s: %v %+v, want %d", name, err, a, c.status)
		} else if err := readError(a, "upstream_error", "upstream_unavailable"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}

	// A request without a host.
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.Envoy.URL, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(conn, "GET /v1/models HTTP/1.1\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	a := &stack.Response{Status: resp.StatusCode, Header: resp.Header, Body: string(body)}
	if err := readError(a, "invalid_request_error", "missing_host_header"); err != nil ||
		a.Status != http.StatusBadRequest ||
		a.Header.Get("x-request-id") != "" {
		t.Errorf("no host: status %d, %v, %v", a.Status, err, a)
	}

	// kvepp is killed while an engine computes.
	responses := make(chan *stack.Response, 1)
	go func() {
		q := &scriptedRequest{path: "/v1/completions", body: completion(100), first: "wait", length: true}
		a, err := q.send(t.Context(), client[false], s.Envoy.URL, "computing")
		if err != nil {
			t.Error(err)
		}
		responses <- a
	}()
	eventually(t, func() error {
		if len(endpoints.of("computing")) == 0 {
			return fmt.Errorf("the request has not arrived yet")
		}
		return nil
	})
	s.KillKvepp()
	if a := <-responses; a == nil || a.Status != http.StatusServiceUnavailable {
		t.Errorf("kvepp was killed while the engine computed: %+v", a)
	} else if err := readError(a, "service_unavailable", "endpoint_picker_unavailable"); err != nil {
		t.Error("kvepp was killed while the engine computed:", err)
	}
	req, err := http.NewRequestWithContext(
		t.Context(),
		"POST",
		s.Envoy.URL+"/engine.Service/Call",
		bytes.NewReader(make([]byte, 5)),
	)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("content-type", "application/grpc")
	resp, err = client[true].Do(req)
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if status, message := resp.Header.Get("grpc-status"),
		resp.Header.Get("grpc-message"); resp.StatusCode != http.StatusOK ||
		status != "14" ||
		strings.Contains(message, "{") {
		t.Errorf("a gRPC call without kvepp: status %d, gRPC %s, %q", resp.StatusCode, status, message)
	}
}
