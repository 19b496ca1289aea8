package pool

import (
	"net"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"
)

// validEndpoint returns a valid endpoint.
func validEndpoint() Endpoint {
	return Endpoint{
		Name:     "a",
		Address:  "10.0.0.1:8000",
		KVEvents: "tcp://10.0.0.1:5557",
		Metrics:  "http://10.0.0.1:8000/metrics",
		Model:    "org/Model-1 beta",
		Taints:   []string{"zone=a"},
	}
}

func TestCheckNames(t *testing.T) {
	for name, ok := range map[string]bool{
		"worker-0": true, "ns/pod.0_x:8000": true, "dynamo:1f": true, "名": true, strings.Repeat("x", 253): true,
		"": false, " ": false, "a b": false, "a\tb": false, "a\nb": false, "a\r\nx-evil: 1": false, "a\x00": false,
		"a\x1b[31m": false, "a\x7f": false, "a\u0085": false,
		"a\u00a0b": false, "a\u2028": false, "a\u202eb": false, "\xff": false, strings.Repeat("x", 254): false,
	} {
		if err := CheckName(name); (err == nil) != ok {
			t.Errorf("%.50q: %v", name, err)
		} else if err != nil && (len(err.Error()) > 500 || strings.ContainsFunc(err.Error(), unicode.IsControl)) {
			t.Errorf("%.50q: the error is not a single short line: %q", name, err)
		}
	}
}

func TestCheckHosts(t *testing.T) {
	for address, ok := range map[string]bool{
		"10.0.0.1:8000": true, "[::1]:8000": true, "[fe80::1%eth0]:8000": true, "host:1": true,
		"my_host-1.example.com.:65535": true, "localhost:80": true,
		"xn--bcher-kva.example:80": true, strings.Repeat("a.", 126) + "a:80": true,
		"": false, ":80": false, "*:80": false, "host": false, "host:0": false, "host:65536": false, "host:x": false,
		"host:-1": false,
		"a b:80":  false, " host:80": false, "ho\nst:80": false, "ho\x00st:80": false, "host:8 0": false,
		"host:80 ": false, "a..b:80": false, ".a:80": false, "http://host:80": false, "user@host:80": false,
		"host/x:80": false, "bücher.example:80": false, "[fe80::1%e th]:80": false, "[fe80::1%\r\n]:80": false,
		strings.Repeat("a.", 130) + "a:80": false, strings.Repeat("a", 64) + ":80": false,
	} {
		if err := CheckHostPort(address); (err == nil) != ok {
			t.Errorf("%.80q: %v", address, err)
		}
		if err := CheckTCP("tcp://"+address, 1); (err == nil) != ok {
			t.Errorf("tcp://%.80q: %v", address, err)
		}
	}
}

func TestCheckEndpoints(t *testing.T) {
	e := validEndpoint()
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(*Endpoint){
		"name":         func(e *Endpoint) { e.Name = "a\nb" },
		"address":      func(e *Endpoint) { e.Address = "a b:80" },
		"no address":   func(e *Endpoint) { e.Address = "" },
		"events":       func(e *Endpoint) { e.KVEvents = "tcp://a b:80" },
		"replay":       func(e *Endpoint) { e.KVReplay = "ipc:///x" },
		"ranks":        func(e *Endpoint) { e.KVEvents, e.DataParallelSize = "tcp://a:65535", 2 },
		"metrics":      func(e *Endpoint) { e.Metrics = "http://a b/metrics" },
		"metrics file": func(e *Endpoint) { e.Metrics = "file:///etc/passwd" },
		"model":        func(e *Endpoint) { e.Model = "m\r\nx" },
		"long model":   func(e *Endpoint) { e.Model = strings.Repeat("m", 1025) },
		"namespace":    func(e *Endpoint) { e.Namespace = "\x00" },
		"device":       func(e *Endpoint) { e.DeviceType = "\x1b[2J" },
		"taint":        func(e *Endpoint) { e.Taints = []string{"a", "b\n"} },
		"channel":      func(e *Endpoint) { e.EventChannels = []EventChannel{{Subject: "a\n"}} },
		"loads":        func(e *Endpoint) { e.LoadChannels = []EventChannel{{ZMQ: "tcp://\n"}} },
	} {
		e := validEndpoint()
		if change(&e); e.Check() == nil {
			t.Errorf("%s: Check returned no error", what)
		}
	}
	e = validEndpoint()
	if e.Address, e.Role = "", Prefill; e.Check() != nil {
		t.Error("a prefill worker without an address was refused")
	}
}

// TestFileRefusesNames checks that errors have the line and the key.
func TestFileRefusesNames(t *testing.T) {
	for entry, want := range map[string]string{
		`{name: "a b", address: "10.0.0.1:80"}`:                            "line 2: name: ",
		`{name: "a\nb", address: "10.0.0.1:80"}`:                           "line 2: name: ",
		`{name: ` + strings.Repeat("x", 254) + `, address: "10.0.0.1:80"}`: "line 2: name: ",
		`{name: a, address: "10.0. 0.1:80"}`:                               "line 2: address: ",
		`{name: a, address: "h:80", kvEvents: "tcp://a b:80"}`:             "line 2: kvEvents: ",
		`{name: a, address: "h:80", metrics: "http://a\nb/metrics"}`:       "line 2: metrics: ",
		`{name: a, address: "h:80", model: "a\rb"}`:                        "line 2: model: ",
		`{name: a, address: "h:80", taints: ["a\0b"]}`:                     "line 2: taints: ",
	} {
		if _, err := ParseFile([]byte("endpoints:\n- " + entry + "\n")); err == nil ||
			!strings.HasPrefix(err.Error(), want) {
			t.Errorf("%.60s: %v", entry, err)
		}
	}
}

// FuzzCheck checks that accepted texts have no character that ends a line, a header or a word.
func FuzzCheck(f *testing.F) {
	f.Add("a", "10.0.0.1:8000", "m")
	f.Add("a b", "[fe80::1%eth0]:1", "m\n")
	f.Add("\u202e", "a..b:1", "\xff")
	f.Fuzz(func(t *testing.T, name, address, model string) {
		e := Endpoint{Name: name, Address: address, Model: model}
		if e.Check() != nil {
			return
		}
		for _, text := range []string{name, address, model} {
			if !utf8.ValidString(text) || len(text) > MaxText || strings.ContainsFunc(text, unicode.IsControl) {
				t.Errorf("%q", text)
			}
		}
		if strings.ContainsFunc(name+address, unicode.IsSpace) || len(name) > MaxName+maxNameSuffix {
			t.Errorf("%q, %q", name, address)
		}
		if host, port, err := net.SplitHostPort(address); err != nil || host == "" || port == "" {
			t.Errorf("%q", address)
		}
	})
}
