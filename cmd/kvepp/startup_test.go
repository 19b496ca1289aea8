package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
)

// TestStartupErrors checks the exact error text of each kind of mistake on the command line and in the environment.
func TestStartupErrors(t *testing.T) {
	const lists = "\n\"kvepp serve --help-all\" lists the flags.\n"
	const variables = "\n\"kvepp serve --help-all\" lists the flags with their environment variables.\n"
	for _, c := range []struct {
		args string
		env  string // entries NAME=VALUE
		want string
	}{
		{"sevre", "", "kvepp: unknown command \"sevre\"; did you mean serve?\n\"kvepp help\" lists the commands.\n"},
		{"install", "", "kvepp: unknown command \"install\"\n\"kvepp help\" lists the commands.\n"},

		{"serve", "", "kvepp serve: no endpoints: give --endpoints FILE (docs/endpoints-file.md), or in " +
			"Kubernetes --pool-name NAME" + lists},
		{"serve --endpoint=x", "", "kvepp serve: unknown flag --endpoint; did you mean --endpoints?" + lists},
		{"serve --router-temprature=1", "",
			"kvepp serve: unknown flag --router-temprature; did you mean --router-temperature?" + lists},
		{"serve --no-router-kv-event", "",
			"kvepp serve: unknown flag --no-router-kv-event; did you mean --no-router-kv-events?" + lists},
		{"serve --replicas=2", "",
			"kvepp serve: unknown flag --replicas: it is a flag of kvepp replay" + lists},
		{"serve --probe", "", "kvepp serve: unknown flag --probe: it is a flag of kvepp check" + lists},
		{"serve -grpc-port=9002", "", "kvepp serve: unknown flag -grpc-port: flags begin with two dashes, --grpc-port" +
			lists},
		{"serve -grcp-port=9002", "", "kvepp serve: unknown flag -grcp-port; did you mean --grpc-port?" + lists},
		{"serve -e x", "", "kvepp serve: unknown flag -e" + lists},
		{"serve --endpoints", "", "kvepp serve: --endpoints needs a value: --endpoints FILE" + lists},
		{"serve x.yaml", "", "kvepp serve: unexpected argument \"x.yaml\": every flag begins with --" + lists},
		{"serve --secure-serving false", "",
			"kvepp serve: unexpected argument \"false\": write the value of a flag that is true or false behind an " +
				"equals sign, --FLAG=false" + lists},

		{"serve --endpoints=x --drain-delay=2", "",
			"kvepp serve: --drain-delay \"2\": must be a duration with a unit (ms, s, m or h), for example 5s" + lists},
		{"serve --endpoints=x --refresh-metrics-interval=five", "",
			"kvepp serve: --refresh-metrics-interval \"five\": must be a duration with a unit (ms, s, m or h), for " +
				"example 5s" + lists},
		{"serve --endpoints=x --ha-handover-timeout=60", "",
			"kvepp serve: --ha-handover-timeout \"60\": must be a duration with a unit (ms, s, m or h), for example " +
				"1m" + lists},
		{"serve --endpoints=x --grpc-port=70000", "",
			"kvepp serve: --grpc-port \"70000\": must be a whole number from 0 to 65535, for example 9002" + lists},
		{"serve --endpoints=x --max-streams=many", "",
			"kvepp serve: --max-streams \"many\": must be a whole number, for example 20000" + lists},
		{"serve --endpoints=x --kv-cache-block-size=16k", "",
			"kvepp serve: --kv-cache-block-size \"16k\": must be a whole number, for example 16" + lists},
		{"serve --endpoints=x --router-temperature=hot", "",
			"kvepp serve: --router-temperature \"hot\": must be a number, for example 0.5" + lists},
		{"serve --endpoints=x --router-queue-threshold=no", "",
			"kvepp serve: --router-queue-threshold \"no\": must be a number, for example 0.5, or None" + lists},
		{"serve --endpoints=x --active-prefill-tokens-threshold=1.5", "",
			"kvepp serve: --active-prefill-tokens-threshold \"1.5\": must be a whole number of at least 0, for " +
				"example 4096, or None" + lists},
		{"serve --endpoints=x --secure-serving=maybe", "",
			"kvepp serve: --secure-serving \"maybe\": must be true or false" + lists},
		{"serve --endpoints=x --no-router-kv-events=maybe", "",
			"kvepp serve: --no-router-kv-events \"maybe\": must be true or false" + lists},
		{"serve --endpoint-selector=a=b --endpoint-target-ports=http", "",
			"kvepp serve: --endpoint-target-ports \"http\": must be whole numbers separated by commas, for example " +
				"8000,8001" + lists},
		{"serve --endpoints=x --index-peers=\"", "",
			"kvepp serve: --index-peers \"\\\"\": must be a list separated by commas, for example a,b" + lists},
		{"serve --endpoints=x", "KVEPP_DRAIN_DELAY=2",
			"kvepp serve: environment variable KVEPP_DRAIN_DELAY \"2\": must be a duration with a unit (ms, s, m or " +
				"h), for example 5s" + lists},
		{"serve --endpoints=x", "DYN_ROUTER_TEMPERATURE=hot",
			"kvepp serve: environment variable DYN_ROUTER_TEMPERATURE \"hot\": must be a number, for example 0.5" +
				lists},
		{"serve --endpoints=x", "KVEPP_ROUTER_KV_EVENTS=on",
			"kvepp serve: environment variable KVEPP_ROUTER_KV_EVENTS \"on\": must be true or false" + lists},

		{"serve --endpoints=x --drain-delay=-2s", "",
			"kvepp serve: --drain-delay -2s: may not be negative; give a duration such as 2s, or 0" + lists},
		{"serve --endpoints=x --pick-timeout=0", "", "kvepp serve: --pick-timeout 0s: must be above 0, for example 2s" +
			lists},
		{"serve --endpoints=x --router-queue-timeout=-1m", "",
			"kvepp serve: --router-queue-timeout -1m0s: may not be negative; give a duration such as 2s, or 0" + lists},
		{"serve --endpoints=x --max-streams=-5", "",
			"kvepp serve: --max-streams -5: may not be negative; give a number such as 20000, or 0 for no limit" +
				lists},
		{"serve --endpoints=x --router-temperature=-1", "",
			"kvepp serve: --router-temperature -1: must be a finite number of at least 0, for example 0" + lists},
		{"serve --endpoints=x --router-kv-overlap-score-credit=nan", "",
			"kvepp serve: --router-kv-overlap-score-credit NaN: must be a finite number of at least 0, for example 1" +
				lists},
		{"serve --endpoints=x --active-decode-blocks-threshold=85", "",
			"kvepp serve: --active-decode-blocks-threshold must be between 0.0 and 1.0, got 85" + lists},
		{"serve --endpoints=x --router-ttl-secs=0", "",
			"kvepp serve: --router-ttl-secs 0: must be a positive number of seconds, at most a year, for example 120" +
				lists},
		{"serve --endpoints=x --dynamo-discovery=kubernets", "",
			"kvepp serve: --dynamo-discovery \"kubernets\": must look like file:DIR or frontend:HOST:PORT, or be " +
				"kubernetes; for Dynamo's other backends, give a frontend; did you mean kubernetes?" + lists},
		{"select --router-temperature=-1", "",
			"kvepp select: --router-temperature -1: must be a finite number of at least 0, for example 0\n\"kvepp " +
				"select --help-all\" lists the flags.\n"},
		{"fetch --hub=https://hub.example.com --to=d --timeout=0 a=b", "",
			"kvepp fetch: --timeout 0s: must be above 0, for example 2s\n\"kvepp fetch --help\" shows how to use " +
				"it.\n"},

		{"serve --endpoints=x --engine=vlllm", "",
			"kvepp serve: --engine \"vlllm\": must be vllm, sglang, trtllm or dynamo; did you mean vllm?" + lists},
		{"serve --endpoints=x --router-mode=round_robin", "",
			"kvepp serve: --router-mode \"round_robin\": must be kv, round-robin, random, power-of-two, " +
				"least-loaded, direct or device-aware-weighted; did you mean round-robin?" + lists},
		{"serve --endpoints=x --router-queue-policy=fsfc", "",
			"kvepp serve: --router-queue-policy \"fsfc\": must be fcfs, wspt, edf or lcfs; did you mean fcfs?" + lists},
		{"serve --endpoints=x --dynamo-callback-address=9005", "",
			"kvepp serve: --dynamo-callback-address: address 9005: missing port in address" + lists},
		{"serve --endpoints=x --router-approximate-cache-policy=lfu", "",
			"kvepp serve: --router-approximate-cache-policy \"lfu\": must be ttl or lru; did you mean lru?" + lists},
		{"serve --endpoints=x --router-session-affinity-mode=sofd", "",
			"kvepp serve: --router-session-affinity-mode \"sofd\": must be hard or soft; did you mean soft?" + lists},
		{"serve --endpoints=x --router-prefill-load-model=liner", "",
			"kvepp serve: --router-prefill-load-model \"liner\": must be none, linear, aic or ais; did you mean " +
				"linear?" + lists},
		{"serve --endpoints=x --engine-args=--chat-template-content-format=opneai", "",
			"kvepp serve: --engine-args: --chat-template-content-format \"opneai\": must be auto, string or openai; " +
				"did you mean openai?" + lists},
		{"serve --endpoints=x --model-server-metrics-scheme=htps", "",
			"kvepp serve: --model-server-metrics-scheme \"htps\": must be http or https; did you mean https?" + lists},
		{"serve --endpoints=x --tls-min-version=1.1", "",
			"kvepp serve: --tls-min-version \"1.1\": must be 1.2 or 1.3; did you mean 1.2?" + lists},
		{"serve --endpoints=x --log-level=trace", "",
			"kvepp serve: --log-level \"trace\": must be debug, info, warn or error" + lists},
		{"serve --endpoints=x --log-level=warning", "",
			"kvepp serve: --log-level \"warning\": must be debug, info, warn or error; did you mean warn?" + lists},
		{"serve --endpoints=x --log-format=xml", "", "kvepp serve: --log-format \"xml\": must be text or json" + lists},
		{"serve --endpoints=x --log-format=jsno", "",
			"kvepp serve: --log-format \"jsno\": must be text or json; did you mean json?" + lists},

		{"serve --endpoints=x --grpc-port=9003", "",
			"kvepp serve: --grpc-port and --grpc-health-port are both 9003; give each a port of its own" + lists},
		{"serve --endpoints=x --metrics-port=9002", "",
			"kvepp serve: --metrics-port and --grpc-port are both 9002; give each a port of its own" + lists},
		{"serve --endpoints=x --metrics-port=9003", "",
			"kvepp serve: --metrics-port and --grpc-health-port are both 9003; give each a port of its own" + lists},

		{"serve --endpoints=x", "KVEPP_ROUTER_TEMPRATURE=1",
			"kvepp serve: unknown environment variable KVEPP_ROUTER_TEMPRATURE; did you mean " +
				"KVEPP_ROUTER_TEMPERATURE?" + variables},
		{"serve --endpoints=x", "KVEPP_REPLICAS=1",
			"kvepp serve: unknown environment variable KVEPP_REPLICAS: no flag of kvepp has this name; correct or " +
				"unset it" + variables},
		{"serve --endpoints=x", "KVEPP_NO_ROUTER_KV_EVENTS=true",
			"kvepp serve: unknown environment variable KVEPP_NO_ROUTER_KV_EVENTS: write KVEPP_ROUTER_KV_EVENTS=false" +
				variables},
		{"serve --endpoints=x", "KVEPP_METRICS_CERT_DIR=d KVEPP_SELECT_REPLICA_SYNC_PORT=1",
			"kvepp serve: unknown environment variable KVEPP_METRICS_CERT_DIR: " + metricsTLS +
				"\nunknown environment variable KVEPP_SELECT_REPLICA_SYNC_PORT: " +
				replicaSync + variables},
		{"serve --endpoints=x", "KVEPP_SELECT_PROT=1 KVEPP_ADRESS=1",
			"kvepp serve: unknown environment variable KVEPP_ADRESS: no flag of kvepp has this name; correct or " +
				"unset it\n" +
				"unknown environment variable KVEPP_SELECT_PROT; did you mean KVEPP_SELECT_PORT?" + variables},

		{"check --endpoints=x --prob", "",
			"kvepp check: unknown flag --prob; did you mean --probe?\n\"kvepp check --help-all\" lists the " +
				"flags.\n"},
		{"tokenize --modelpath=x", "", "kvepp tokenize: unknown flag --modelpath; did you mean " +
			"--model-path?\n\"kvepp tokenize --help\" shows how to use it.\n"},
		{"tokenize --model-path=x --api=chats", "",
			"kvepp tokenize: --api \"chats\": must be chat, completions, responses or messages; did you mean " +
				"chat?\n\"kvepp tokenize --help\" shows how to use it.\n"},
		{"tokenize --model-path=x --engine=sgalng", "",
			"kvepp tokenize: --engine \"sgalng\": must be vllm, sglang, trtllm or dynamo; did you mean " +
				"sglang?\n\"kvepp tokenize --help\" shows how to use it.\n"},
		{"fetch --hup=x", "", "kvepp fetch: unknown flag --hup; did you mean --hub?\n\"kvepp fetch --help\" shows " +
			"how to use it.\n"},
		{"fetch --timeout=5", "", "kvepp fetch: --timeout \"5\": must be a duration with a unit (ms, s, m or h), for " +
			"example 5m\n\"kvepp fetch --help\" shows how to use it.\n"},
		{"indexer --prot=1", "", "kvepp indexer: unknown flag --prot; did you mean --port?\n\"kvepp indexer " +
			"--help-all\" lists the flags.\n"},
		{"indexer --grpc-port=1", "", "kvepp indexer: unknown flag --grpc-port: it is a flag of kvepp serve and " +
			"kvepp check\n\"kvepp indexer --help-all\" lists the flags.\n"},
		{"indexer --log-format=yaml", "",
			"kvepp indexer: --log-format \"yaml\": must be text or json\n\"kvepp indexer --help-all\" lists the " +
				"flags.\n"},
		{"select --port=http", "", "kvepp select: --port \"http\": must be a whole number from 0 to 65535, for " +
			"example 8092\n\"kvepp select --help-all\" lists the flags.\n"},
		{"select", "KVEPP_SELECT_PORT=http",
			"kvepp select: environment variable KVEPP_SELECT_PORT \"http\": must be a whole number from 0 to 65535, " +
				"for example 8092\n\"kvepp select --help-all\" lists the flags.\n"},
	} {
		var stdout, stderr bytes.Buffer
		if code := start(strings.Fields(c.args), nil, &stdout, &stderr, strings.Fields(c.env)); code != 2 ||
			stderr.String() != c.want ||
			stdout.Len() > 0 {
			t.Errorf("kvepp %s, with %q: status %d\n%s\nwant 2\n%s", c.args, c.env, code, stderr.String(), c.want)
		}
	}
}

// TestVariablesThatAreAccepted: kvepp accepts variables of other commands, of the Makefile, of Kubernetes, and empty
// ones.
func TestVariablesThatAreAccepted(t *testing.T) {
	service := func(prefix, port string) []string { // as the kubelet sets them for a Service with one named port
		at := "10.96.0.7:" + port
		return []string{
			prefix + "_SERVICE_HOST=10.96.0.7",
			prefix + "_SERVICE_PORT=" + port,
			prefix + "_SERVICE_PORT_GRPC_EXT_PROC=" + port,
			prefix + "_PORT=tcp://" + at,
			prefix + "_PORT_" + port + "_TCP=tcp://" + at,
			prefix + "_PORT_" + port + "_TCP_PROTO=tcp",
			prefix + "_PORT_" + port + "_TCP_PORT=" + port,
			prefix + "_PORT_" + port + "_TCP_ADDR=10.96.0.7",
		}
	}
	for name, environ := range map[string][]string{
		"other commands": {"KVEPP_SELECT_PORT=1", "KVEPP_INDEXER_WORKERS=x", "KVEPP_FETCH_TO=d",
			"KVEPP_PROBE=true", "KVEPP_LORA=a", "KVEPP_CACHE_SALT=s"},
		"tools":                 {"KVEPP_TOOLS=d", "KVEPP_VLLM_MEDIA=d"},
		"no value":              {"KVEPP_NO_SUCH_FLAG="},
		"other programs":        {"KVEPPX=1", "XKVEPP_A=1", "DYN_NO_SUCH_FLAG=1", "PATH=p"},
		"Service kvepp":         service("KVEPP", "9002"),
		"Service kvepp-epp":     service("KVEPP_EPP", "9002"),
		"Service kvepp-qwen-3":  service("KVEPP_QWEN_3", "9002"),
		"Service kvepp-metrics": service("KVEPP_METRICS", "9090"),
		"Service kvepp-grpc":    service("KVEPP_GRPC", "9002"),
		"Service kvepp-service": service("KVEPP_SERVICE", "9002"),
		"Service with UDP": {"KVEPP_DNS_SERVICE_HOST=fd00::7", "KVEPP_DNS_SERVICE_PORT=53",
			"KVEPP_DNS_PORT=udp://[fd00::7]:53", "KVEPP_DNS_PORT_53_UDP=udp://[fd00::7]:53",
			"KVEPP_DNS_PORT_53_UDP_PROTO=udp", "KVEPP_DNS_PORT_53_UDP_PORT=53", "KVEPP_DNS_PORT_53_UDP_ADDR=fd00::7"},
	} {
		if err := checkEnvironment(environ); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, environ := range [][]string{
		{"KVEPP_GRCP_PORT=9002"}, // not of a Service
		{"KVEPP_PORT=tcp://10.96.0.7:9002"},
		append(service("KVEPP", "9002"), "KVEPP_SERVICE_ADDRESS=x"),
		append(service("KVEPP_EPP", "9002"), "KVEPP_EPP_PORTS=1"),
		append(service("KVEPP", "9002"), "KVEPP_PORT_HTTP=1"),
		append(service("KVEPP_EPP", "9002"), "KVEPP_QWEN_PORT=1"),
	} {
		if err := checkEnvironment(environ); err == nil {
			t.Errorf("checkEnvironment accepts %v", environ)
		}
	}
}

// TestServiceVariablesAreNoSettings: a Service kvepp-metrics sets KVEPP_METRICS_PORT to a URL, which is no value of
// --metrics-port.
func TestServiceVariablesAreNoSettings(t *testing.T) {
	env := map[string]string{
		"KVEPP_METRICS_SERVICE_HOST": "10.96.0.7", "KVEPP_METRICS_SERVICE_PORT": "9090",
		"KVEPP_METRICS_PORT": "tcp://10.96.0.7:9090",
		// KVEPP_GRPC_PORT is set by the Pod's own environment
		"KVEPP_GRPC_SERVICE_HOST": "10.96.0.8", "KVEPP_GRPC_SERVICE_PORT": "9002", "KVEPP_GRPC_PORT": "9005",
	}
	if o := parsed(t, []string{"--endpoints=x"}, env); o.ports.MetricsPort != 9090 || o.ports.GRPCPort != 9005 ||
		o.given("metrics-port") {
		t.Errorf(
			"metrics port %d (given %v), gRPC port %d; want the default 9090 and 9005",
			o.ports.MetricsPort,
			o.given("metrics-port"),
			o.ports.GRPCPort,
		)
	}
	var o indexerOptions
	of := map[string]string{
		"KVEPP_INDEXER_SERVICE_HOST": "10.96.0.7",
		"KVEPP_INDEXER_SERVICE_PORT": "80",
		"KVEPP_INDEXER_PORT":         "tcp://10.96.0.7:80",
	}
	if err := parseIndexer(&o, nil, func(name string) string { return of[name] }); err != nil || o.Port != 8090 {
		t.Errorf("port %d, %v; want the default 8090", o.Port, err)
	}
	delete(of, "KVEPP_INDEXER_SERVICE_HOST")
	if err := parseIndexer(new(indexerOptions), nil, func(name string) string { return of[name] }); err == nil {
		t.Error("a URL was accepted as a port although no Service has that name")
	}
}

// TestToolVariables compares the list of variables with those in the Makefile, scripts and tests.
func TestToolVariables(t *testing.T) {
	settings := []string{"KVEPP_NAME", "KVEPP_FETCH"} // a placeholder in texts, and a prefix
	for _, c := range commands {
		if c.flags == nil {
			continue
		}
		c.flags().VisitAll(func(f *pflag.Flag) { settings = append(settings, flags.Variable(c.prefix+f.Name)) })
	}
	variable, used := regexp.MustCompile(`KVEPP_[A-Z0-9_]*[A-Z0-9]`), map[string]string{}
	read := func(path string) {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range variable.FindAllString(string(text), -1) {
			used[name] = path
		}
	}
	read("../../Makefile")
	for _, folder := range []string{"e2e", "test", "examples", "manifests", "prompt", "indexer"} {
		err := filepath.WalkDir("../../"+folder, func(path string, entry fs.DirEntry, err error) error {
			if err == nil && entry.Type().IsRegular() &&
				slices.Contains([]string{".go", ".sh", ".py"}, filepath.Ext(path)) {
				read(path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, path := range used {
		if !slices.Contains(toolVariables, name) && !slices.Contains(settings, name) {
			t.Errorf("%s uses %s, which kvepp would refuse: add it to toolVariables", path, name)
		}
	}
	for _, name := range toolVariables {
		if used[name] == "" || slices.Contains(settings, name) {
			t.Errorf("toolVariables has %s, but no tool uses it or a flag has it", name)
		}
	}
}

// TestCommandNames checks that the commands with flags are the commands that can be run.
func TestCommandNames(t *testing.T) {
	for _, c := range commands {
		if !slices.Contains(commandNames(), c.name) {
			t.Errorf("commandNames lacks %s", c.name)
		}
	}
	for _, name := range commandNames() {
		var stdout, stderr bytes.Buffer
		if code := start([]string{name, "--help"}, nil, &stdout, &stderr,
			[]string{"KVEPP_NO_SUCH_FLAG=1"}); code != 0 ||
			stderr.Len() > 0 {
			t.Errorf("kvepp %s --help: status %d, %s", name, code, stderr.String())
		}
	}
}

// TestPortInUse: if kvepp cannot listen at an address, the error names its flag.
func TestPortInUse(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	at := taken.Addr().String()
	_, port, err := net.SplitHostPort(at)
	if err != nil {
		t.Fatal(err)
	}
	endpoints := filepath.Join(t.TempDir(), "endpoints.yaml")
	if err := os.WriteFile(endpoints, []byte("endpoints: []\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	inUse := "the address " + at + " is in use; stop the process that listens there (ss -ltnp shows it), or give " +
		"another port\n"
	k := reserve(t)
	serve := fmt.Sprintf(
		"serve --endpoints=%s --secure-serving=false --log-level=error --bind-address=127.0.0.1 --grpc-port=%d "+
			"--grpc-health-port=%d --metrics-port=0",
		endpoints,
		k.grpc,
		k.health,
	)
	for _, c := range []struct{ args, want string }{
		{serve + " --grpc-port=" + port, "kvepp serve: --grpc-port: " + inUse},
		{serve + " --grpc-health-port=" + port, "kvepp serve: --grpc-health-port: " + inUse},
		{serve + " --metrics-port=" + port, "kvepp serve: --metrics-port: " + inUse},
		{serve + " --metrics-address=" + at, "kvepp serve: --metrics-address: " + inUse},
		{serve + " --admin-address=" + at, "kvepp serve: --admin-address: " + inUse},
		{"indexer --log-level=error --host=127.0.0.1 --port=" + port, "kvepp indexer: --port: " + inUse},
		{"select --log-level=error --host=127.0.0.1 --port=" + port, "kvepp select: --port: " + inUse},
		{serve + " --bind-address=192.0.2.1",
			fmt.Sprintf("kvepp serve: --grpc-port: this machine has no network interface with the address of "+
				"192.0.2.1:%d; give one that \"ip address\" shows\n", k.grpc)},
	} {
		var stderr bytes.Buffer
		if code := start(strings.Fields(c.args), nil, io.Discard, &stderr, nil); code != 1 ||
			stderr.String() != c.want {
			t.Errorf("kvepp %s: status %d\n%s\nwant 1\n%s", c.args, code, stderr.String(), c.want)
		}
	}
}
