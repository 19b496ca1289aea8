package e2e

import (
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// mistakes returns all of docs/mistakes.md, in its order. Resources that they share belong to t.
func mistakes(t *testing.T) []mistake {
	program, err := stack.BuildEngine(t.Context(), "..", t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	mistakesEngine = func() string { return program }
	// right is a correct set-up, for mistakes of clients.
	right := withEngines(t, like(2)...)
	right.behind(
		right.entries("  kvEvents:", "  model: tiny\n  kvEvents:"),
		"--max-parse-bytes=20000",
		"--max-body-bytes=50000",
	)
	return slices.Concat(
		startMistakes(),
		fileMistakes(),
		engineMistakes(),
		tokenizerMistakes(),
		envoyMistakes(),
		runTimeMistakes(right),
	)
}

// wrongVariable is in two parts, because a test of cmd/kvepp searches for names of variables that kvepp would refuse.
const wrongVariable = "KVEPP_" + "ROUTER_TEMPRATURE"

func startMistakes() []mistake {
	const group = "Starting kvepp"
	// told is a mistake that kvepp serve reports at its start.
	told := func(name, made, fix string, names []string, args func(s *setup) (env, args []string)) mistake {
		return mistake{
			group: group,
			name:  name,
			made:  made,
			sees:  notStarted,
			fix:   fix,
			names: names,
			make: func(t *testing.T) []quote {
				s := newSetup(t)
				env, args := args(s)
				return []quote{s.ends(env, args...)}
			},
		}
	}
	flags := func(args ...string) func(*setup) ([]string, []string) {
		return func(*setup) ([]string, []string) { return nil, args }
	}
	return []mistake{
		told("A flag's name is wrong", "kvepp serve --endpoint endpoints.yaml", "Write the flag as the error does.",
			[]string{"unknown flag --endpoint", "did you mean --endpoints?"}, flags("--endpoint", "endpoints.yaml")),
		told("A variable's name is wrong", wrongVariable+"=1 kvepp serve --endpoints endpoints.yaml",
			"Correct the variable, or unset it. kvepp refuses every `KVEPP_*` that belongs to no flag.",
			[]string{wrongVariable, "did you mean KVEPP_ROUTER_TEMPERATURE?"},
			func(*setup) ([]string, []string) {
				return []string{wrongVariable + "=1"}, []string{"--endpoints", "endpoints.yaml"}
			}),
		told(
			"A duration has no unit",
			"kvepp serve --endpoints endpoints.yaml --drain-delay 2",
			"Give it a unit: `2s`.",
			[]string{
				`--drain-delay "2"`,
				"must be a duration with a unit",
				"for example 5s",
			},
			flags("--endpoints", "endpoints.yaml", "--drain-delay", "2"),
		),
		told(
			"An invalid value",
			"kvepp serve --endpoints endpoints.yaml --engine vlllm",
			"Use one of the values that the error lists.",
			[]string{
				`--engine "vlllm"`,
				"did you mean vllm?",
			},
			flags("--endpoints", "endpoints.yaml", "--engine", "vlllm"),
		),
		told(
			"No endpoints are given",
			"kvepp serve --model tiny=/models/tiny",
			"Give `--endpoints FILE`, or `--pool-name` in Kubernetes.",
			[]string{"no endpoints", "give --endpoints FILE"},
			flags("--model", "tiny="+tinyModel),
		),
		told(
			"The endpoints file is missing",
			"kvepp serve --endpoints none.yaml",
			"Correct the path. kvepp needs the file when it starts. Later the file may be replaced at any time.",
			[]string{"none.yaml", "no such file"},
			flags("--endpoints", "none.yaml", "--model", "tiny="+tinyModel),
		),
		told(
			"A --model without a folder",
			"kvepp serve --endpoints endpoints.yaml --model tiny",
			"Write `--model NAME=DIR`: the model's name in requests, and the tokenizer's folder.",
			[]string{"--model", "NAME=DIR"},
			flags("--endpoints", "endpoints.yaml", "--model", "tiny"),
		),
		told(
			"A port is in use",
			"kvepp serve --endpoints endpoints.yaml --grpc-port 9002",
			"Give kvepp another port, or stop the process that listens there. Often it is another kvepp.",
			[]string{"--grpc-port: the address 10.0.0.9:9002 is in use", "give another port"},
			func(s *setup) ([]string, []string) {
				taken, err := net.Listen("tcp", "127.0.0.1:0")
				if err != nil {
					s.t.Fatal(err)
				}
				s.t.Cleanup(func() { taken.Close() })
				s.names[taken.Addr().String()] = "10.0.0.9:9002"
				_, port, err := net.SplitHostPort(taken.Addr().String())
				if err != nil {
					s.t.Fatal(err)
				}
				return nil, []string{
					"--endpoints",
					s.shown(write(s.t, "endpoints.yaml", "endpoints: []\n"), "endpoints.yaml"),
					"--bind-address",
					"127.0.0.1",
					"--grpc-port",
					port,
					"--grpc-health-port",
					freePort(s.t),
					"--metrics-port",
					"0",
				}
			},
		),
		told(
			"An admin address that others can reach, without a token",
			"kvepp serve --endpoints endpoints.yaml --admin-address :9091",
			"Listen at 127.0.0.1, or give `--admin-token-file`.",
			[]string{"nothing guards it", "--admin-token-file"},
			flags("--endpoints", "endpoints.yaml", "--admin-address", ":9091"),
		),
		told(
			"The folder of certificates is empty",
			"kvepp serve --endpoints endpoints.yaml --cert-path /certificates",
			"Put `tls.crt` and `tls.key` there, as in a mounted Kubernetes Secret; or leave `--cert-path` out.",
			[]string{"--cert-path", "tls.crt"},
			func(s *setup) ([]string, []string) {
				return nil, []string{
					"--endpoints",
					write(s.t, "endpoints.yaml", "endpoints: []\n"),
					"--cert-path",
					s.shown(s.t.TempDir(), "/certificates"),
				}
			},
		),
	}
}

func freePort(t *testing.T) string {
	t.Helper()
	port, err := process.Ports(1)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(port)
}

func fileMistakes() []mistake {
	const group = "The endpoints file"
	// told is a mistake for which kvepp refuses the file at its start.
	told := func(name, made, fix string, names ...string) mistake {
		return mistake{
			group: group,
			name:  name,
			made:  made,
			sees:  notStarted,
			fix:   fix,
			names: names,
			make: func(t *testing.T) []quote {
				s := newSetup(t)
				return []quote{
					s.ends(nil, "--endpoints", s.shown(write(t, "endpoints.yaml", made+"\n"), "endpoints.yaml")),
				}
			},
		}
	}
	return []mistake{
		told(
			"A key's name is wrong",
			"endpoints:\n- name: engine-a\n  adress: 10.0.0.1:8000",
			"Write the key as the error does.",
			"line 3",
			"adress",
			"did you mean address?",
		),
		told(
			"An address without a port",
			"endpoints:\n- {name: engine-a, address: 10.0.0.1}",
			"Write `IP:port`, or `host:port`.",
			"line 2: address",
			"must look like HOST:PORT",
		),
		told(
			"Two endpoints with one name",
			"endpoints:\n- {name: engine, address: \"10.0.0.1:8000\"}\n- {name: engine, address: \"10.0.0.2:8000\"}",
			"Give each endpoint a name of its own.",
			"engine",
			"line 3",
		),
		{
			group: group,
			name:  "A mistake in the file while kvepp runs",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", blocksize: 16}",
			sees:  notFollowed,
			fix:   "Correct the line. Until then kvepp keeps the earlier endpoints.",
			names: []string{"level=ERROR", "what it said before stays in force", "did you mean blockSize?"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries())
				if err := s.ReplaceEndpoints(fmt.Sprintf("endpoints:\n- {name: engine-a, address: %q, blocksize: 16}\n",
					s.engines[0].Address)); err != nil {
					t.Fatal(err)
				}
				return []quote{s.logs("the endpoints file is refused"), s.counts("kvepp_endpoints_file_refused_total")}
			},
		},
		{
			group: group,
			name:  "A host name that has no address",
			made:  "endpoints:\n- {name: engine-a, address: \"no-such-engine.invalid:8000\"}",
			sees:  notFollowed,
			fix: "Correct the name. kvepp resolves names every five seconds, and adds the endpoint as soon as its " +
				"name has an address.",
			names: []string{
				"cannot resolve the host name",
				"correct the name",
				"no-such-engine.invalid:8000 has no address",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(2)...)
				s.serve(s.entries(s.engines[0].Address, "no-such-engine.invalid:8000"))
				q := s.logs("cannot resolve the host name", "no-such-engine.invalid")
				q.text, _, _ = strings.Cut(q.text, " error=") // the error is the resolver's
				return []quote{q, s.checks()}
			},
		},
		otherAddress(
			group,
			"STATIC",
			"A host name, and another address in Envoy's STATIC cluster",
			"localhost:8000",
			"127.0.0.2:8000",
		),
		otherAddress(
			group,
			"STRICT_DNS",
			"A host name that Envoy's STRICT_DNS cluster resolves to another address",
			"localhost:8000",
			"a name that Envoy resolves to 127.0.0.2",
		),
		{
			group: group,
			name:  "A host name that was not compared with Envoy's",
			made:  "endpoints:\n- {name: engine-a, address: \"localhost:8000\"}",
			sees:  elsewhere,
			fix:   "Run `kvepp check --gateway`: it shows whether Envoy resolves the name to the same address.",
			names: []string{"is a host name, which kvepp resolves to 10.0.0.1:8000", "STRICT_DNS"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(
					s.entries("127.0.0.1:"+portOf(s.engines[0].Address), "localhost:"+portOf(s.engines[0].Address)),
					"--dns-lookup-family=v4_only",
				)
				return []quote{s.checks("--dns-lookup-family=v4_only")}
			},
		},
		{
			group: group,
			name:  "An address where no server listens",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8001\"}",
			sees:  lessEndpoints,
			fix:   "Correct the address, or start the engine.",
			names: []string{
				"endpoint ejected",
				"address=10.0.0.1:8001",
				"is the engine up, and is the endpoint's address right?",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(2)...)
				unused := "127.0.0.1:" + freePort(t)
				s.names[unused] = "10.0.0.1:8001"
				s.behind(s.entries(s.engines[0].Address, unused))
				return []quote{s.logs(ejectedLine, "endpoint=engine-a "), s.checks()}
			},
		},
		{
			group: group,
			name:  "Two endpoints with one metrics page",
			made: "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", metrics: " +
				"\"http://10.0.0.1:8000/metrics\"}\n- {name: engine-b, address: \"10.0.0.2:8000\", metrics: " +
				"\"http://10.0.0.1:8000/metrics\"}",
			sees: lessCertain,
			fix: "Set `metrics` to each engine's own page, or leave it out: the default is `/metrics` at the " +
				"endpoint's address.",
			names: []string{"several workers have the same metrics page", "set metrics for each engine"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(2)...)
				s.serve(s.entries("  kvEvents:", "  metrics: http://"+s.engines[0].Address+"/metrics\n  kvEvents:"))
				return []quote{s.logs("several workers have the same metrics page")}
			},
		},
		{
			group: group,
			name:  "A model that the engine does not serve",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", model: tinny}",
			sees:  clientErrors,
			fix:   "Write the name that the engine serves, or leave `model` out.",
			names: []string{"kvepp is configured with tinny", "correct the endpoint's model"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries("  kvEvents:", "  model: tinny\n  kvEvents:"))
				return []quote{
					s.respondsAs(
						s.Envoy,
						chatsPath,
						chatBody(stack.Model, "x"),
						"A client gets:",
						func(status int) bool { return status != 503 },
					),
					s.checks(),
				}
			},
		},
		{
			group: group,
			name:  "Another block size than the engine's",
			made: "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:5557\", " +
				"blockSize: 32}",
			sees:  byLoad,
			fix:   "Leave `blockSize` out: kvepp takes it from the events.",
			names: []string{"block size differs from the engine's", "set blockSize to 16, or leave it out"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries("  kvEvents:", "  blockSize: 32\n  kvEvents:"))
				s.send(s.Envoy, stack.Model, 1)
				return []quote{s.logs("block size differs from the engine's"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "Another data-parallel rank than the engine's",
			made: "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:5557\", " +
				"dataParallelStartRank: 1}",
			sees: byLoad,
			fix: "Correct `dataParallelStartRank` or `kvEvents`. `kvEvents` has the port of the first rank; the next " +
				"rank is at the next port.",
			names: []string{"name another data-parallel rank", "correct dataParallelStartRank or kvEvents"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries("  kvEvents:", "  dataParallelStartRank: 1\n  kvEvents:"))
				s.send(s.Envoy, stack.Model, 1)
				return []quote{s.logs("name another data-parallel rank"), s.checks("--probe")}
			},
		},
	}
}

// otherAddress is a host name that kvepp resolves to 127.0.0.1, while Envoy has the engine at 127.0.0.2.
func otherAddress(group, kind, name, address, envoys string) mistake {
	fix := "Envoy finds the chosen endpoint by its IP address and port. Write the same IP address into both, or the " +
		"same names into a cluster of type `STRICT_DNS`."
	if kind == "STRICT_DNS" {
		fix = "Write the same name into both. Set `--dns-lookup-family` to the cluster's `dns_lookup_family`, and " +
			"let both " +
			"use the same DNS servers."
	}
	return mistake{
		group: group,
		name:  name,
		made: fmt.Sprintf(
			"endpoints:\n- {name: engine-a, address: %q}\n# Envoy's cluster, of type %s: %s",
			address,
			kind,
			envoys,
		),
		sees: elsewhere,
		fix:  fix,
		names: []string{
			"chosen=10.0.0.1:8000",
			"served=127.0.0.2:8000",
			"likely_cause=",
			"add 10.0.0.1:8000 to the endpoints of the gateway's cluster",
		},
		make: func(t *testing.T) []quote {
			s := withEngines(t, like(1)...)
			s.behind(
				s.entries("127.0.0.1:"+portOf(s.engines[0].Address), "localhost:"+portOf(s.engines[0].Address)),
				"--dns-lookup-family=v4_only",
			)
			e := s.apart(func(config any) {
				pool := cluster(t, config, "pool")
				pool["type"] = kind
				stack.At(pool, "load_assignment", "endpoints", 0, "lb_endpoints", 0, "endpoint", "address",
					"socket_address").(map[string]any)["address"] = "127.0.0.2"
			})
			s.send(e, stack.Model, 1)
			return []quote{
				s.logs("an endpoint that kvepp did not choose answered", "127.0.0.2:"),
				s.checksGateway(e, "--dns-lookup-family=v4_only"),
			}
		},
	}
}

func portOf(address string) string { return address[strings.LastIndexByte(address, ':')+1:] }

func engineMistakes() []mistake {
	const group = "Engines and their events"
	return []mistake{
		{
			group: group,
			name:  "An event port without a publisher",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:5558\"}",
			sees:  byLoad,
			slow:  true,
			fix:   "Correct `kvEvents`; start the engine with its flag for KV events; or open the port.",
			names: []string{"cannot connect to a worker's KV events", "10.0.0.1:5558", "enable_kv_cache_events"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				unused := "127.0.0.1:" + freePort(t)
				s.names[unused] = "10.0.0.1:5558"
				s.serve(s.entries(s.engines[0].KVEvents, "tcp://"+unused))
				return []quote{s.logs("cannot connect to a worker's KV events"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "An event port that speaks HTTP",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:8000\"}",
			sees:  byLoad,
			slow:  true,
			fix:   "Set `kvEvents` to the port of the engine's KV events, not to that of its HTTP server.",
			names: []string{
				"cannot connect to a worker's KV events",
				"tcp://10.0.0.1:8000 accepts connections, but publishes no KV events",
				"write the port of the engine's KV events",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries(s.engines[0].KVEvents, "tcp://"+s.engines[0].Address))
				return []quote{s.logs("cannot connect to a worker's KV events"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "The replay port in place of the event port",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:5657\"}",
			sees:  byLoad,
			slow:  true,
			fix: "In the engine's `--kv-events-config`, the port of `endpoint` belongs into `kvEvents`, and that of " +
				"`replay_endpoint` into `kvReplay`.",
			names: []string{
				"tcp://10.0.0.1:5657 accepts connections, but publishes no KV events",
				"not that of its HTTP server or of its replay socket",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries(s.engines[0].KVEvents+"\n", s.engines[0].KVReplay+"\n"))
				return []quote{s.logs("cannot connect to a worker's KV events"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "The engine's events are off",
			made:  "vllm serve ...   # without --kv-events-config",
			sees:  byLoad,
			slow:  true,
			fix:   "Start the engine with its flag for KV events. Every engine has them off by default.",
			names: []string{"does the engine publish events?", "enable_kv_cache_events"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, []string{"-kv-events-port=0"})
				s.serve(s.entries())
				return []quote{s.logs("cannot connect to a worker's KV events"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "The endpoint has no address of events",
			made:  "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\"}",
			sees:  byLoad,
			fix: "Add `kvEvents`. Without events, give `--no-router-kv-events`: kvepp then predicts each cache from " +
				"the requests that it sent there.",
			names: []string{"has no kvEvents address", "kvEvents in the endpoints file"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(fmt.Sprintf("endpoints:\n- {name: engine-a, address: %q}\n", s.engines[0].Address))
				return []quote{s.logs("has no kvEvents address"), s.checks("--probe")}
			},
		},
		{
			group: group,
			name:  "Prefix caching is off",
			made:  "vllm serve ... --no-enable-prefix-caching",
			sees:  wrongCache,
			slow:  true,
			fix:   "Turn prefix caching on. Without it no worker has cached prefixes.",
			names: []string{
				"prefix caching  wrong  off: nothing is ever cached",
				"--enable-prefix-caching",
				"sent no KV event",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, []string{"-no-prefix-caching"})
				s.behind(s.entries("  kvEvents:", "  blockSize: 16\n  kvEvents:"))
				s.send(s.Envoy, stack.Model, 12)
				return []quote{s.checks("--probe"), s.logs("has served requests and sent no KV event")}
			},
		},
		{
			group: group,
			name:  "No replay socket",
			made: "endpoints:\n- {name: engine-a, address: \"10.0.0.1:8000\", kvEvents: \"tcp://10.0.0.1:5557\", " +
				"kvReplay: \"tcp://10.0.0.1:5657\"}   # vLLM has no replay_endpoint",
			sees: lessCertain,
			fix: "Give the engine a `replay_endpoint`. Without it kvepp does not know the caches after its own " +
				"restart.",
			names: []string{`replay  wrong`, `"replay_endpoint" in the engine's --kv-events-config`},
			make: func(t *testing.T) []quote {
				s := withEngines(t, []string{"-kv-replay-port=0"})
				s.serve(s.entries())
				return []quote{
					s.checks(),
					s.counts(`kvepp_events_total{kind="subscription",outcome="replay_unreachable"}`),
				}
			},
		},
		{
			group: group,
			name:  "The --engine flag names another engine",
			made:  "kvepp serve --engine sglang ...   # before vLLM",
			sees:  wrongCache,
			fix: "Set `--engine` to the engine that serves. Each engine turns requests into tokens in a different " +
				"way.",
			names: []string{"vLLM answers, but kvepp is configured for SGLang", "--engine vllm"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries(), "--engine=sglang")
				return []quote{s.checks("--engine=sglang")}
			},
		},
		{
			group: group,
			name:  "The engine does not report cached tokens",
			made:  "vllm serve ...   # without --enable-prompt-tokens-details",
			sees:  lessCertain,
			fix: "Start the engine with the flag. kvepp routes equally well without it, but cannot check its " +
				"predictions.",
			names: []string{"--enable-prompt-tokens-details"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, []string{"-no-cached-tokens"})
				s.serve(s.entries())
				return []quote{s.checks("--probe")}
			},
		},
	}
}

func tokenizerMistakes() []mistake {
	const group = "Tokenizer and chat template"
	return []mistake{
		{
			group: group,
			name:  "Another chat template than the engine's",
			made:  "kvepp serve --model tiny=/models/tiny --chat-template other.jinja ...",
			sees:  wrongCache,
			fix:   "Give kvepp the engine's template. `kvepp tokenize` shows the prompt that kvepp renders.",
			names: []string{
				"the engine counts a different number of prompt tokens than kvepp",
				"ids of a chat differ from the engine's",
				"give kvepp the engine's template: --chat-template FILE",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				template := "--chat-template=" + s.shown(write(t, "other.jinja", anotherTemplate), "other.jinja")
				s.behind(s.entries(), template)
				s.send(s.Envoy, stack.Model, 3)
				return []quote{s.logs("the engine counts a different number of prompt tokens"), s.checks(template)}
			},
		},
		{
			group: group,
			name:  "No chat template",
			made:  "kvepp serve --model tiny=/models/tiny ...   # the folder has no template",
			sees:  byLoad,
			fix:   "Give `--chat-template`, or put the template into the model's folder.",
			names: []string{
				"template=\"none (chats are routed by load)\"",
				"kvepp has no chat template for tiny",
				"--chat-template FILE",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				model := "--model=tiny=" + s.shown(bareModel(t), "/models/tiny")
				s.serve(s.entries(), model)
				return []quote{s.logs("model loaded", "template=", "none"), s.checks(model)}
			},
		},
		{
			group: group,
			name:  "The chat template's file is missing",
			made:  "kvepp serve --model tiny=/models/tiny --chat-template none.jinja ...",
			sees:  byLoad,
			fix:   "Correct the path.",
			names: []string{"the model's tokenizer cannot be loaded", "none.jinja: no such file"},
			make: func(t *testing.T) []quote {
				s := newSetup(t)
				s.serve(
					"endpoints: []\n",
					"--chat-template="+s.shown(filepath.Join(t.TempDir(), "none.jinja"), "none.jinja"),
				)
				return []quote{s.logs("the model's tokenizer cannot be loaded")}
			},
		},
		{
			group: group,
			name:  "A chat template with a syntax error",
			made:  "kvepp serve --model tiny=/models/tiny --chat-template broken.jinja ...",
			sees:  byLoad,
			fix:   "Correct the template.",
			names: []string{"the model's tokenizer cannot be loaded", "tag \\\"for\\\" is not closed"},
			make: func(t *testing.T) []quote {
				s := newSetup(t)
				s.serve(
					"endpoints: []\n",
					"--chat-template="+s.shown(
						write(t, "broken.jinja", "{% for m in messages %}{{ m.content }}"),
						"broken.jinja",
					),
				)
				return []quote{s.logs("the model's tokenizer cannot be loaded")}
			},
		},
		{
			group: group,
			name:  "A model folder that does not exist",
			made:  "kvepp serve --model tiny=/models/tinny ...",
			sees:  byLoad,
			fix:   "Correct the path: the folder must contain `tokenizer.json`.",
			names: []string{
				"the model's tokenizer cannot be loaded",
				"/models/tinny",
				"Start kvepp with a folder that it can use",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				model := "--model=tiny=" + s.shown(filepath.Join(t.TempDir(), "none"), "/models/tinny")
				s.serve(s.entries(), model)
				return []quote{s.logs("the model's tokenizer cannot be loaded"), s.checks(model)}
			},
		},
		{
			group: group,
			name:  "The folder of another model",
			made:  "kvepp serve --model tiny=/models/other ...",
			sees:  wrongCache,
			fix:   "Give `--model` the folder of the model that the engine serves, in the same version.",
			names: []string{
				"the engine counts a different number of prompt tokens than kvepp",
				"ids of a text differ from the engine's",
				"give --model the engine's own folder and version",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				model := "--model=tiny=" + s.shown("../test/models/tiny-sentencepiece", "/models/other")
				s.behind(s.entries(), model)
				s.send(s.Envoy, stack.Model, 3)
				return []quote{s.logs("the engine counts a different number of prompt tokens"), s.checks(model)}
			},
		},
		{
			group: group,
			name:  "A model name that requests do not use",
			made:  "kvepp serve --model tiny-model=/models/tiny ...   # requests say \"model\": \"tiny\"",
			sees:  byLoad,
			slow:  true,
			fix:   "Give `--model` the name that requests use: the engine's `--served-model-name`.",
			names: []string{
				"no request has named a model of kvepp's flags",
				`model=tiny-model`,
				"--model tiny=DIR, with the engine's name",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries(), "--model=tiny-model="+tinyModel)
				s.send(s.Envoy, stack.Model, 100)
				return []quote{
					s.logs("no request has named a model of kvepp's flags"),
					s.checks("--model=tiny-model=" + tinyModel),
				}
			},
		},
	}
}

func envoyMistakes() []mistake {
	const group = "Envoy and TLS"
	return []mistake{
		{
			group: group,
			name:  "kvepp is not running",
			made:  "envoy -c override-host.yaml   # and no kvepp",
			sees:  unavailable,
			fix: "Start kvepp. With `failure_mode_allow: true` (stock-engines.yaml) Envoy passes requests to " +
				"healthy engines meanwhile.",
			names: []string{"endpoint_picker_unavailable", "kvepp does not answer at 10.0.0.9:9002",
				"check that kvepp is up"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries())
				s.KillKvepp()
				return []quote{s.unavailable(s.Envoy), s.checksGateway(s.Envoy)}
			},
		},
		{
			group: group,
			name:  "Envoy calls another port than kvepp's",
			made:  "kvepp serve --grpc-port 9002 ...   # Envoy's cluster kvepp: port 9004",
			sees:  unavailable,
			slow:  true,
			fix:   "Correct the address in Envoy's cluster for kvepp.",
			names: []string{"no proxy has connected within 60 s", "in its cluster for kvepp"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries())
				e := s.apartOf("override-host.yaml", func(config any) {
					stack.At(cluster(t, config, "kvepp"), "load_assignment", "endpoints", 0, "lb_endpoints", 0,
						"endpoint", "address", "socket_address").(map[string]any)["port_value"] = 1
				})
				quotes := []quote{s.unavailable(e)}
				quotes = append(quotes, s.logs("no proxy has connected within 60 s")) // kvepp check connects too
				return append(quotes, s.checksGateway(e))
			},
		},
		{
			group: group,
			name:  "Envoy does not call kvepp",
			made:  "# Envoy's http_filters have no envoy.filters.http.ext_proc",
			sees:  elsewhere,
			fix: "Put the filter into `http_filters`, before the router, as the configurations in " +
				"`manifests/envoy` do.",
			names: []string{"without asking kvepp", "check that ext_proc is among the filters"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries())
				e := s.apart(func(config any) {
					connections := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters",
						0, "typed_config").(map[string]any)
					connections["http_filters"] = connections["http_filters"].([]any)[1:]
				})
				return []quote{s.checksGateway(e)}
			},
		},
		{
			group: group,
			name:  "kvepp serves TLS, and Envoy does not use it",
			made:  "# Envoy's cluster for kvepp has no transport_socket",
			sees:  unavailable,
			fix:   "Add a `transport_socket` to the cluster, or start kvepp with `--secure-serving=false`.",
			names: []string{
				"cause=plaintext",
				"kvepp serves TLS at 10.0.0.9:9002, but the gateway connects without TLS",
				"transport_socket",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries())
				e := s.apartOf(
					"override-host.yaml",
					func(config any) { delete(cluster(t, config, "kvepp"), "transport_socket") },
				)
				return []quote{s.unavailable(e), s.logs("a proxy cannot connect"), s.checksGateway(e)}
			},
		},
		{
			group: group,
			name:  "Envoy speaks TLS, and kvepp does not",
			made:  "kvepp serve --secure-serving=false ...   # Envoy's cluster for kvepp has a transport_socket",
			sees:  unavailable,
			fix:   "Remove the `transport_socket`, or remove `--secure-serving=false`.",
			names: []string{
				"cause=tls_is_off",
				"the gateway connects with TLS, but kvepp at 10.0.0.9:9002 serves without TLS",
				"remove the transport_socket",
			},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries(), "--secure-serving=false")
				e := s.apartOf("override-host.yaml", func(any) {})
				return []quote{s.unavailable(e), s.logs("a proxy cannot connect"), s.checksGateway(e)}
			},
		},
		{
			group: group,
			name:  "kvepp does not trust Envoy's certificate",
			made:  "kvepp serve --cert-path /certificates --tls-client-ca other-ca.crt ...",
			sees:  unavailable,
			fix:   "Set `--tls-client-ca` to the authority that signed Envoy's certificate.",
			names: []string{"cause=client_certificate", "--tls-client-ca"},
			make: func(t *testing.T) []quote {
				ours, others := newAuthority(t), newAuthority(t)
				certificates, stranger := t.TempDir(), t.TempDir()
				ours.issue(t, certificates, 1, "kvepp")
				others.issue(t, stranger, 1, "kvepp")
				s := withEngines(t, like(1)...)
				s.start(
					stack.Config{
						Endpoints:    s.entries(),
						Engines:      s.engines,
						WithoutEnvoy: true,
						Certificates: certificates,
						KveppFlags: []string{
							"--cert-path=" + certificates,
							"--tls-client-ca=" + filepath.Join(stranger, "ca.crt"),
							"--tls-min-version=1.3",
						},
					},
				)
				e := s.apartOf("mtls.yaml", func(any) {})
				return []quote{s.unavailable(e), s.logs("a proxy cannot connect"), s.checksGateway(e)}
			},
		},
		{
			group: group,
			name:  "Envoy does not trust kvepp's certificate",
			made:  "# trusted_ca in Envoy's cluster for kvepp is not the authority of kvepp's certificate",
			sees:  unavailable,
			fix:   "Make Envoy trust the authority of the certificate in `--cert-path`.",
			names: []string{"cause=certificate_refused"},
			make: func(t *testing.T) []quote {
				ours, others := newAuthority(t), newAuthority(t)
				certificates, stranger := t.TempDir(), t.TempDir()
				ours.issue(t, certificates, 1, "kvepp")
				others.issue(t, stranger, 1, "kvepp")
				s := withEngines(t, like(1)...)
				s.start(
					stack.Config{
						Endpoints:    s.entries(),
						Engines:      s.engines,
						WithoutEnvoy: true,
						Certificates: certificates,
						KveppFlags:   []string{"--cert-path=" + stranger, "--tls-min-version=1.3"},
					},
				)
				e := s.apartOf("mtls.yaml", func(any) {})
				return []quote{s.unavailable(e), s.logs("a proxy cannot connect"), s.checksGateway(e)}
			},
		},
		{
			group: group,
			name:  "An endpoint is missing in Envoy's cluster",
			made:  "# kvepp's endpoints: 10.0.0.1:8000 and 10.0.0.2:8000; Envoy's cluster: only 10.0.0.2:8000",
			sees:  elsewhere,
			fix:   "Add the endpoint to Envoy's cluster as `IP:port`, or remove it from kvepp's endpoints.",
			names: []string{"add 10.0.0.1:8000 to the endpoints of the gateway's cluster"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(2)...)
				s.behind(s.entries())
				e := s.apart(func(config any) {
					locality := stack.At(cluster(t, config, "pool"), "load_assignment", "endpoints", 0).(map[string]any)
					locality["lb_endpoints"] = locality["lb_endpoints"].([]any)[1:]
				})
				s.sendCached(e, s.engines[0], "an endpoint that kvepp did not choose answered")
				return []quote{s.logs("an endpoint that kvepp did not choose answered"), s.checksGateway(e)}
			},
		},
		bodyMode(group, "NONE"), bodyMode(group, "STREAMED"),
	}
}

// apartOf is apart with another manifest of manifests/envoy.
func (s *setup) apartOf(manifest string, edit func(config any)) *stack.Envoy {
	s.t.Helper()
	e, err := s.StartEnvoyApart(s.t.Context(), manifest, edit)
	if err != nil {
		s.t.Fatal(err)
	}
	s.names[strings.TrimPrefix(e.URL, "http://")] = "10.0.0.10:8080"
	return e
}

func bodyMode(group, mode string) mistake {
	return mistake{
		group: group,
		name:  "Envoy shows kvepp bodies in mode " + mode,
		made:  "processing_mode:\n  request_header_mode: SEND\n  request_body_mode: " + mode,
		sees:  byLoad,
		fix: "Set `request_body_mode: FULL_DUPLEX_STREAMED`, with `request_trailer_mode: SEND`, as in " +
			"`manifests/envoy`.",
		names: []string{"request_body_mode " + mode, "Set request_body_mode: FULL_DUPLEX_STREAMED"},
		make: func(t *testing.T) []quote {
			s := withEngines(t, like(1)...)
			s.serve(s.entries())
			e := s.apartOf("override-host.yaml", func(config any) {
				filter := stack.At(config, "static_resources", "listeners", 0, "filter_chains", 0, "filters",
					0, "typed_config", "http_filters", 0, "typed_config").(map[string]any)
				filter["processing_mode"] = map[string]any{
					"request_header_mode":  "SEND",
					"request_body_mode":    mode,
					"response_header_mode": "SEND",
				}
			})
			s.send(e, stack.Model, 1)
			return []quote{s.logs("request_body_mode"), s.counts(`kvepp_decisions_total{reason="body_mode"}`)}
		},
	}
}

func runTimeMistakes(right *setup) []mistake {
	const group = "At run time"
	// answered is a mistake of a client.
	responded := func(name, made, fix, path, body string, names ...string) mistake {
		return mistake{
			group: group,
			name:  name,
			made:  made,
			sees:  clientErrors,
			fix:   fix,
			names: names,
			make: func(t *testing.T) []quote {
				s := *right
				s.t = t
				return []quote{s.responds(s.Envoy, path, body)}
			},
		}
	}
	// failing is an engine that fails while kvepp routes to it.
	failing := func(name, made, fix string, requests bool, fail func(t *testing.T, e *stack.Engine),
		names ...string) mistake {
		return mistake{
			group: group,
			name:  name,
			made:  made,
			sees:  lessEndpoints,
			fix:   fix,
			names: names,
			slow:  true,
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(2)...)
				s.start(
					stack.Config{
						Endpoints:  s.entries(),
						Engines:    s.engines,
						Manifest:   "stock-engines.yaml",
						KveppFlags: []string{"--fallback-endpoints=1"},
					},
				)
				if err := s.Settled(t.Context(), 2); err != nil {
					t.Fatal(err)
				}
				eventually(t, func() error { // kvepp must have seen responses of the engines before
					m, err := s.Metrics(t.Context())
					if n := m[`kvepp_engine_readings_total{outcome="ok"}`]; err == nil && n < 4 {
						err = fmt.Errorf("%v metrics pages were read", n)
					}
					return err
				})
				fail(t, s.engines[0])
				return []quote{s.ejected(requests)}
			},
		}
	}
	fault := func(mode string) func(t *testing.T, e *stack.Engine) {
		return func(t *testing.T, e *stack.Engine) {
			if err := e.Fault(t.Context(), mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	return []mistake{
		responded(
			"A POST without a body",
			"curl -X POST http://10.0.0.10:8080/v1/chat/completions",
			"Send a JSON body.",
			chatsPath,
			"",
			"400",
			"body",
		),
		responded(
			"A body that is not JSON",
			"curl http://10.0.0.10:8080/v1/chat/completions -d '{\"model\":'",
			"Correct the body.",
			chatsPath,
			`{"model":`,
			"400",
			"invalid_json",
		),
		responded(
			"A model that no endpoint serves",
			"curl http://10.0.0.10:8080/v1/chat/completions -d '{\"model\": \"large\", ...}'",
			"Use a model that an endpoint serves. kvepp refuses a model that no `--model` names if every endpoint "+
				"names "+
				"its model, or with `--strict-model`.",
			chatsPath,
			chatBody("large", "x"),
			"404",
			"no endpoint serves this model",
			"large",
		),
		responded(
			"A body above --max-body-bytes",
			"kvepp serve --max-body-bytes 50000 ...",
			"Send a smaller body, or raise `--max-body-bytes`.",
			chatsPath,
			chatBody(stack.Model, strings.Repeat("x", 60000)),
			"413",
			"50000 bytes",
		),
		{
			group: group,
			name:  "A body above --max-parse-bytes",
			made:  "kvepp serve --max-parse-bytes 20000 ...",
			sees:  byLoad,
			fix:   "Raise `--max-parse-bytes`.",
			names: []string{"larger than --max-parse-bytes", "Raise --max-parse-bytes", "body_too_large"},
			make: func(t *testing.T) []quote {
				s := *right
				s.t = t
				s.responds(s.Envoy, chatsPath, chatBody(stack.Model, strings.Repeat("x", 30000)))
				return []quote{
					s.logs("larger than --max-parse-bytes"),
					s.counts(`kvepp_decisions_total{reason="body_too_large"}`),
				}
			},
		},
		{
			group: group,
			name:  "The admin address without its token",
			made:  "kvepp serve --admin-address :9091 --admin-token-file token ...\ncurl http://10.0.0.9:9091/query",
			sees:  clientErrors,
			fix:   "Send `Authorization: Bearer` with the token in the file.",
			names: []string{"401", "--admin-token-file"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.serve(s.entries(), "--admin-token-file="+write(t, "token", "secret\n"))
				return []quote{s.responds(&stack.Envoy{URL: s.Admin()}, "/query", "{}")}
			},
		},
		failing(
			"An engine is killed",
			"kill -9 ENGINE",
			"Start the engine again. kvepp sends it trial requests, and meanwhile sends all others to the other "+
				"engines.",
			false,
			func(_ *testing.T, e *stack.Engine) { e.Close() },
			"endpoint ejected",
			"is the engine up",
		),
		failing(
			"An engine hangs",
			"kill -STOP ENGINE",
			"Look at the engine's log, and restart it.",
			false,
			func(t *testing.T, e *stack.Engine) {
				e.Signal(syscall.SIGSTOP)
				t.Cleanup(func() { e.Signal(syscall.SIGCONT) })
			},
			"endpoint ejected",
			"see whether the engine hangs",
		),
		failing(
			"An engine answers 503",
			"# the engine answers every request with 503",
			"Look at the engine's log.",
			true,
			fault("503"),
			"endpoint ejected",
			"answered 503",
		),
		failing(
			"An engine breaks off responses",
			"# the engine resets connections after the headers of responses",
			"Look at the engine's log.",
			true,
			fault("reset"),
			"endpoint ejected",
			"broke connections off",
		),
		{
			group: group,
			name:  "All engines are down",
			made:  "kill -9 ENGINES",
			sees:  unavailable,
			fix:   "Start the engines.",
			names: []string{"upstream_unavailable", "is the engine up"},
			make: func(t *testing.T) []quote {
				s := withEngines(t, like(1)...)
				s.behind(s.entries())
				s.engines[0].Close()
				return []quote{s.ejected(false), s.unavailable(s.Envoy)}
			},
		},
		{
			group: group,
			name:  "There is no endpoint",
			made:  "endpoints: []",
			sees:  unavailable,
			fix:   "Add endpoints. In Kubernetes compare the pool's selector with the pods' labels.",
			names: []string{"no_endpoints", "look at the endpoints file"},
			make: func(t *testing.T) []quote {
				s := newSetup(t)
				s.behind("endpoints: []\n")
				return []quote{
					s.responds(s.Envoy, chatsPath, chatBody(stack.Model, "x")),
					s.logs("level=WARN", "request refused"),
					s.cannotCheck(),
				}
			},
		},
	}
}
