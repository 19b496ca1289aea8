package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"kvepp/indexer"
	"kvepp/internal/flags"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/router/queue"
	"kvepp/scoring"
)

// parsed parses arguments and environment without the checks that need a whole configuration.
func parsed(t *testing.T, args []string, env map[string]string) *options {
	t.Helper()
	var o options
	err := parseServe(&o, args, func(name string) string { return env[name] })
	if err != nil && !strings.Contains(err.Error(), "--endpoints FILE") &&
		!strings.Contains(err.Error(), "belong together") &&
		!strings.Contains(err.Error(), "needs a server") {
		t.Fatalf("%v %v: %v", args, env, err)
	}
	return &o
}

// samples returns three values of a flag: neighbours differ, and the first one differs from the default.
func samples(f *pflag.Flag) [3]string {
	values := flags.ValuesOf(f)
	at := slices.Index(values, f.DefValue) + 1
	switch {
	case len(values) == 2 && at > 0:
		return [3]string{values[at%2], f.DefValue, values[at%2]}
	case len(values) > 0:
		return [3]string{values[at%len(values)], values[(at+1)%len(values)], values[at%len(values)]}
	case f.Value.Type() == "bool" && f.DefValue == "true":
		return [3]string{"false", "true", "false"}
	case f.Value.Type() == "bool":
		return [3]string{"true", "false", "true"}
	case f.Value.Type() == "duration":
		return [3]string{"7s", "8s", "9s"}
	}
	return [3]string{"7", "8", "9"}
}

// setTo returns the values of the flags of `kvepp serve` that arguments and environment set, by name.
func setTo(t *testing.T, args []string, env map[string]string) map[string]string {
	t.Helper()
	var o options
	f := serveFlags(&o)
	if err := parse(f, args, &o.Path, func(name string) string { return env[name] }); err != nil {
		t.Fatalf("%v %v: %v", args, env, err)
	}
	values := map[string]string{}
	f.VisitAll(func(flag *pflag.Flag) {
		if flag.Value.String() != flag.DefValue {
			values[flag.Name] = flag.Value.String()
		}
	})
	return values
}

// TestPrecedenceOfVariables: a flag sets its own value and no other; it precedes kvepp's variable, that precedes a
// file, and that precedes Dynamo's variable.
func TestPrecedenceOfVariables(t *testing.T) {
	serveFlags(new(options)).VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "config" {
			return
		}
		if f.Usage == "" || flags.SectionOf(f) == "" || flags.VariablesOf(f)[0] != flags.Variable(f.Name) {
			t.Errorf("--%s has no help, no section, or the variables %v", f.Name, flags.VariablesOf(f))
		}
		v := samples(f)
		byFlag := func(value string) map[string]string { return setTo(t, []string{"--" + f.Name + "=" + value}, nil) }
		if got := byFlag(v[0]); len(got) != 1 {
			t.Errorf("--%s=%s sets %v", f.Name, v[0], got)
		}
		if f.Name == "print-config" { // belongs on the command line
			return
		}
		file := settingsIn(t, fmt.Sprintf("%s: %q\n", f.Name, v[0]))
		env := map[string]string{"KVEPP_CONFIG": file}
		check := func(what string, got map[string]string, value string) {
			t.Helper()
			delete(got, "config")
			if want := byFlag(value); !maps.Equal(got, want) {
				t.Errorf("%s %s: %v, want %v", f.Name, what, got, want)
			}
		}
		if dynamos := flags.VariablesOf(f)[1:]; len(dynamos) > 0 {
			check("by Dynamo's variable", setTo(t, nil, map[string]string{dynamos[0]: v[2]}), v[2])
			env[dynamos[0]] = v[1]
		}
		check("by a file", setTo(t, nil, env), v[0])
		env[flags.VariablesOf(f)[0]] = v[1]
		check("by a variable", setTo(t, nil, env), v[1])
		check("by the flag", setTo(t, []string{"--" + f.Name + "=" + v[0]}, env), v[0])
	})
	list := map[string]string{"KVEPP_MODEL": "m=b,n=c"}
	if got := setTo(t, nil, list)["model"]; got != "[m=b,n=c]" {
		t.Errorf("KVEPP_MODEL=m=b,n=c: %s", got)
	}
}

func TestNegatedFlags(t *testing.T) {
	o := parsed(
		t,
		[]string{"--no-router-kv-events", "--no-router-track-active-blocks"},
		map[string]string{"DYN_ROUTER_USE_KV_EVENTS": "true"},
	)
	if o.kvEvents || o.scoring.TrackActiveBlocks || !o.scoring.TrackPrefillTokens {
		t.Errorf("--no-router-kv-events --no-router-track-active-blocks: %+v", o)
	}
}

func TestQueueFlags(t *testing.T) {
	base := []string{"--endpoints=x"}
	for _, c := range []struct {
		args   []string
		waits  bool
		unused int
	}{
		{nil, false, 0},
		{[]string{"--router-queue-threshold=None"}, false, 0},
		{[]string{"--router-queue-policy=wspt", "--router-queue-timeout=1s"}, false, 2},
		{[]string{"--router-admission=working-set", "--router-queue-policy=wspt", "--router-queue-timeout=1s"},
			false, 1},
		{[]string{"--router-queue-threshold=2.0", "--router-queue-policy=wspt"}, true, 0},
		{[]string{"--hold-when-empty=60s", "--router-queue-policy=wspt"}, true, 0},
		{[]string{"--router-queue-threshold=2.0", "--no-router-track-prefill-tokens"}, true, 1},
		{[]string{"--router-policy-config=testdata/policy.yaml"}, true, 0},
		{[]string{"--router-policy-config=testdata/policy.yaml", "--router-queue-threshold=2.0"}, true, 1},
		{[]string{"--router-policy-config=testdata/policy2.yaml"}, false, 0},
		{[]string{"--kv-events-port=5557", "--data-parallel-size=2", "--metrics-endpoint-auth", "--ha-lease-name=x",
			"--ha-handover-timeout=1s"}, false, 5},
		{[]string{"--pool-name=p", "--kv-events-port=5557", "--data-parallel-size=2", "--metrics-endpoint-auth",
			"--ha-lease-name=x"}, false, 1},
		{[]string{"--endpoint-selector=a=b", "--metrics-endpoint-auth", "--metrics-token-file=x",
			"--ha-enable-leader-election", "--ha-lease-name=x"}, false, 1},
		{[]string{"--endpoint-selector=a=b", "--metrics-endpoint-auth=false", "--metrics-token-file=x"}, false, 0},
	} {
		o := parsed(t, append(base, c.args...), nil)
		if q := o.queue.Room(); (q != nil) != c.waits || q != nil && (q.Bound != 65536 || q.Timeout != 30*time.Second) {
			t.Errorf("%v: %+v", c.args, q)
		}
		if unused := o.withoutEffect(); len(unused) != c.unused {
			t.Errorf("%v: without effect: %v", c.args, unused)
		}
	}
	// Precedence: the section router of the policy file, flags, the environment.
	o := parsed(
		t,
		append(
			base,
			"--router-policy-config=testdata/policy2.yaml",
			"--router-ttl-secs=9",
			"--router-track-active-blocks",
		),
		map[string]string{"DYN_ROUTER_USE_KV_EVENTS": "true"},
	)
	if o.ttl != 60500*time.Millisecond || o.scoring.TrackActiveBlocks || o.kvEvents || o.predictedTTL != 0 ||
		o.scoring.HostCacheHitWeight != 0.5 {
		t.Errorf("%+v", o.scoring)
	}
	// The section goes before presets too.
	if o = parsed(t, append(base, "--router-policy-config=testdata/policy3.yaml", "--load-aware"), nil); !o.kvEvents {
		t.Error("--load-aware goes before use_kv_events of the policy file")
	}
	classes := parsed(
		t,
		append(base, "--router-policy-config=testdata/policy.yaml"),
		nil,
	).queue.Room().Profiles.Classes()
	if strings.Join(classes, " ") != "cached uncached" {
		t.Errorf("classes %v", classes)
	}
}

// TestWorkerSelection: the parameters of the instance that is selected take precedence over flags and presets, and the
// others leave the flags as they are, as in Dynamo.
func TestWorkerSelection(t *testing.T) {
	base := []string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml", "--router-prefill-load-scale=3",
		"--router-decode-active-request-weight=2"}
	for _, c := range []struct {
		args                       []string
		env                        map[string]string
		credit, scale, temperature float64
		unused                     int
	}{
		{nil, nil, 0.5, 7, 0, 1},
		{[]string{"--router-temperature=0.2"}, nil, 0.5, 7, 0.2, 1},
		{[]string{"--router-worker-selection-policy=default"}, nil, 1, 3, 0, 0},
		{nil, map[string]string{"DYN_ROUTER_WORKER_SELECTION_POLICY": "hot"}, 1, 3, 0.9, 1},
	} {
		o := parsed(t, append(slices.Clone(base), c.args...), c.env)
		if w := o.scoring; w.OverlapScoreCredit != c.credit || w.PrefillLoadScale != c.scale ||
			w.Temperature != c.temperature || w.DecodeActiveRequestWeight != 2 {
			t.Errorf("%v %v: %+v", c.args, c.env, w)
		}
		if unused := o.withoutEffect(); len(unused) != c.unused {
			t.Errorf("%v %v: without effect: %q", c.args, c.env, unused)
		}
	}
	f := serveFlags(new(options))
	for _, key := range queue.ParameterKeys {
		if queue.FlagOf(f, key) == nil {
			t.Errorf("%s: no flag", key)
		}
	}
}

// TestPolicySettings: each of Dynamo's settings in the section router has a flag.
func TestPolicySettings(t *testing.T) {
	f := serveFlags(new(options))
	for _, key := range queue.SettingKeys {
		if queue.FlagOf(f, key) == nil && absentFlag(strings.ReplaceAll(key, "_", "-")) == nil {
			t.Errorf("%s: no flag", key)
		}
	}
	if n := len(queue.SettingKeys); n != 20 {
		t.Errorf("%d settings, Dynamo has 20", n)
	}
}

func TestBusyThresholdFlags(t *testing.T) {
	base := []string{"--endpoints=x"}
	if o := parsed(t, base, nil); !o.routing.Thresholds.None() ||
		o.proxy.OverloadStatus != 429 {
		t.Errorf("defaults: %+v", o.routing.Thresholds)
	}
	o := parsed(t, append(base, "--active-decode-blocks-threshold=0.5"), nil)
	if o.routing.Thresholds.ActiveDecodeBlocks == nil || *o.routing.Thresholds.ActiveDecodeBlocks != 0.5 {
		t.Errorf("0.5: %+v", o.routing.Thresholds)
	}
	if o := parsed(t, append(base, "--active-decode-blocks-threshold=None"),
		map[string]string{"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD": "0.5"}); !o.routing.Thresholds.None() {
		t.Errorf("None: %+v", o.routing.Thresholds)
	}
}

func TestLoadAware(t *testing.T) {
	o := parsed(t, []string{"--load-aware", "--no-router-track-active-blocks"}, nil)
	if c := o.scoring; o.kvEvents || c.OverlapScoreCredit != 0 || c.AssumeKVReuse || !c.TrackActiveBlocks ||
		!c.TrackPrefillTokens {
		t.Errorf("%+v, events %v", c, o.kvEvents)
	}
}

// TestDefaultPolicy: workers are priced by time, unless another setting is meant for Dynamo's cost.
func TestDefaultPolicy(t *testing.T) {
	const file = "--router-policy-config=testdata/"
	for _, c := range []struct {
		args []string
		env  map[string]string
		want scoring.Policy
		from string // what --print-config names
	}{
		{nil, nil, scoring.Time, "default"},
		{[]string{"--router-temperature=0", "--load-aware=false", "--router-host-cache-hit-weight=0.5"}, nil,
			scoring.Time, "default"},
		{[]string{file + "policy.yaml"}, nil, scoring.Time, "default"},
		{[]string{"--router-policy=dynamo"}, nil, scoring.Dynamo, "flag"},
		{[]string{"--router-policy=time", "--router-temperature=5"}, nil, scoring.Time, "flag"},
		{[]string{"--router-policy=time", "--load-aware"}, nil, scoring.Time, "flag"},
		{[]string{"--router-mode=least-loaded"}, nil, scoring.Dynamo, "follows from --router-mode"},
		{[]string{"--router-temperature=0.5"}, nil, scoring.Dynamo, "follows from --router-temperature"},
		{[]string{"--load-aware"}, nil, scoring.Dynamo, "follows from --load-aware"},
		{[]string{"--router-prefill-load-scale=1"}, nil, scoring.Dynamo, "follows from --router-prefill-load-scale"},
		{nil, map[string]string{"DYN_ROUTER_PREFILL_LOAD_SCALE": "1"}, scoring.Dynamo,
			"follows from --router-prefill-load-scale"},
		{[]string{file + "selection.yaml", "--router-worker-selection-policy=default"}, nil, scoring.Dynamo,
			"follows from worker_selection in --router-policy-config"},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), c.env)
		all := flags.Settings(o.flags)
		setting := all[slices.IndexFunc(all, func(s flags.Setting) bool { return s.Name == "router-policy" })]
		if o.scoring.Policy != c.want || setting.Source != c.from {
			t.Errorf("%v %v: %v, %s; want %v, %s", c.args, c.env, o.scoring.Policy, setting.Source, c.want, c.from)
		}
	}
}

// TestInheritedDirect: DYN_ROUTER_MODE=direct, from a frontend's environment, does not change kvepp's router mode.
func TestInheritedDirect(t *testing.T) {
	env := map[string]string{"DYN_ROUTER_MODE": "direct"}
	if o := parsed(t, []string{"--endpoints=x"}, env); o.scoring.Mode != scoring.KV ||
		!strings.Contains(strings.Join(o.withoutEffect(), "\n"), "DYN_ROUTER_MODE=direct") {
		t.Errorf("mode %v; %q", o.scoring.Mode, o.withoutEffect())
	}
	env["KVEPP_ROUTER_MODE"] = "random"
	if o := parsed(t, []string{"--endpoints=x"}, env); o.scoring.Mode != scoring.Random || o.withoutEffect() != nil {
		t.Errorf("mode %v; %q", o.scoring.Mode, o.withoutEffect())
	}
}

// TestEngineDefault: with Dynamo's discovery the frontend tokenizes, unless --engine says otherwise.
func TestEngineDefault(t *testing.T) {
	for _, c := range []struct {
		args []string
		want prompt.Engine
	}{
		{nil, prompt.VLLM},
		{[]string{"--dynamo-discovery=file:d"}, prompt.Dynamo},
		{[]string{"--dynamo-discovery=file:d", "--engine=sglang"}, prompt.SGLang},
		{[]string{"--engine=trtllm"}, prompt.TRTLLM},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), nil)
		if got := o.models.Engine(); got != c.want {
			t.Errorf("%v: engine %q, want %q", c.args, got, c.want)
		}
	}
}

func TestTokenizerURLs(t *testing.T) {
	for _, c := range []struct {
		args []string
		want map[string]string
	}{
		{nil, map[string]string{}},
		{[]string{"--tokenizer-url=m=http://a:1/b?c=d", "--tokenizer-url=n=https://c"},
			map[string]string{"m": "http://a:1/b?c=d", "n": "https://c"}},
		{[]string{"--model=m=dir", "--tokenizer-url=http://a?c=d"}, map[string]string{"m": "http://a?c=d"}},
	} {
		o := parsed(t, append([]string{"--endpoints=x"}, c.args...), nil)
		if got := o.models.URLs; !maps.Equal(got, c.want) {
			t.Errorf("%v: %v", c.args, got)
		}
	}
}

// TestRefusedFolderWithURL: kvepp starts if --tokenizer-url names the engine of a model whose folder cannot be used. It
// logs a warning.
func TestRefusedFolderWithURL(t *testing.T) {
	o := parsed(
		t,
		[]string{
			"--endpoints=x",
			"--model=gone=testdata/nomodel",
			"--model=here=../../test/models/tiny-bytelevel",
			"--tokenizer-url=gone=http://engine",
		},
		nil,
	)
	var logged bytes.Buffer
	models := o.models.Load(slog.New(slog.NewTextHandler(&logged, nil)))
	if len(models) != 1 || models["here"] == nil {
		t.Fatalf("%v", models)
	}
	if text := logged.String(); strings.Count(text, "level=WARN") != 1 ||
		!strings.Contains(text, "model=gone url=http://engine") ||
		!strings.Contains(text, "nomodel") {
		t.Errorf("log:\n%s", text)
	}
}

// TestUpperBoundOfSGLang: predictions are upper bounds for hybrid models on SGLang, and for models that may be hybrid.
// The log says so.
func TestUpperBoundOfSGLang(t *testing.T) {
	folder := func(config string) string {
		dir := t.TempDir()
		if err := os.CopyFS(dir, os.DirFS("../../test/models/tiny-bytelevel")); err != nil {
			t.Fatal(err)
		}
		file := filepath.Join(dir, "config.json")
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if config != "" {
			if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		return dir
	}
	for engine, bounded := range map[string]bool{"sglang": true, "vllm": false} {
		o := parsed(
			t,
			[]string{
				"--endpoints=x",
				"--engine=" + engine,
				"--model=plain=" + folder(`{"architectures":["LlamaForCausalLM"]}`),
				"--model=hybrid=" + folder(`{"architectures":["GptOssForCausalLM"]}`),
				"--model=bare=" + folder(""),
			},
			nil,
		)
		var logged bytes.Buffer
		models := o.models.Load(slog.New(slog.NewTextHandler(&logged, nil)))
		if len(models) != 3 {
			t.Fatalf("%v", models)
		}
		of := o.models.UpperBound(models)
		if !bounded {
			if of != nil || strings.Contains(logged.String(), "upper bound") {
				t.Errorf("%s: log:\n%s", engine, logged.String())
			}
			continue
		}
		if of("plain") || !of("hybrid") || !of("bare") || !of("a model without a tokenizer") {
			t.Errorf("upper bounds: plain %v, hybrid %v, bare %v", of("plain"), of("hybrid"), of("bare"))
		}
		if text := logged.String(); strings.Count(text, "upper bound") != 2 ||
			strings.Count(text, "no config.json") != 1 ||
			!strings.Contains(text, "upper bound\" model=hybrid") {
			t.Errorf("log:\n%s", text)
		}
	}
}

// TestRefusedFolderWithoutURL: kvepp starts although a model's folder cannot be used, and logs an error.
func TestRefusedFolderWithoutURL(t *testing.T) {
	o := parsed(
		t,
		[]string{
			"--endpoints=x",
			"--model=gone=testdata/nomodel",
			"--model=here=../../test/models/tiny-bytelevel",
			"--dynamo-discovery=file:x",
		},
		nil,
	)
	var logged bytes.Buffer
	models := o.models.Load(slog.New(slog.NewTextHandler(&logged, nil)))
	if gone, named := models["gone"]; !named || gone != nil || models["here"] == nil {
		t.Fatalf("%v", models)
	}
	if text := logged.String(); strings.Count(text, "level=ERROR") != 1 ||
		!strings.Contains(text, "model=gone folder=testdata/nomodel") {
		t.Errorf("log:\n%s", text)
	}
	files, err := o.models.Files(models)
	if _, named := files["gone"]; err != nil || named || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}

func TestWrongUsage(t *testing.T) {
	for _, c := range []struct {
		args []string
		env  map[string]string
		says string
	}{
		{nil, nil, "--endpoints FILE"},
		{[]string{"--endpoints=x", "--endpoint=y"}, nil, "unknown flag --endpoint; did you mean --endpoints?"},
		{[]string{"--endpoints=x", "y"}, nil, `"y"`},
		{[]string{"--endpoints=x", "--model=qwen"}, nil, "NAME=DIR"},
		{[]string{"--endpoints=x", "--model=a=b", "--model=a=c"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--model-path=a"}, nil, "write --model NAME=DIR"},
		{[]string{"--endpoints=x", "--lora=a"}, nil, "needs its model"},
		{[]string{"--endpoints=x", "--model-rewrite=a"}, nil, "NAME=TARGET"},
		{[]string{"--endpoints=x", "--model-rewrite=a="}, nil, "NAME=TARGET"},
		{[]string{"--endpoints=x", "--model=m=d", "--model=n=e", "--lora=a"}, nil, "needs its model"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a="}, nil, "NAME=MODEL"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--lora=a=m"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--engine=dynamo"}, nil, "direct mode"},
		{[]string{"--endpoints=x", "--model=m=d", "--lora=a", "--dynamo-discovery=file:y"}, nil, "direct mode"},
		{[]string{"--endpoints=x", "--router-session-affinity-ttl-secs=-1"}, nil, "from 1 to 31536000"},
		{[]string{"--endpoints=x", "--router-session-affinity-ttl-secs=31536001"}, nil, "from 1 to 31536000"},
		{[]string{"--endpoints=x", "--router-session-affinity-mode=firm"}, nil, "hard or soft"},
		{[]string{"--endpoints=x", "--kv-cache-block-size=-1"}, nil, "number of tokens"},
		{[]string{"--endpoints=x", "--router-temperature=-1"}, nil, "temperature"},
		{[]string{"--endpoints=x", "--router-temperature=nan"}, nil, "temperature"},
		{[]string{"--endpoints=x", "--router-mode=cheapest"}, nil, "least-loaded"},
		{[]string{"--endpoints=x", "--router-mode=direct"}, nil, "frontends"},
		{[]string{"--endpoints=x", "--router-track-output-blocks", "--no-router-track-active-blocks"}, nil,
			"one of the two"},
		{[]string{"--endpoints=x", "--router-prefill-load-model=linear", "--no-router-track-prefill-tokens"}, nil,
			"one of the two"},
		{[]string{"--endpoints=x", "--router-prefill-load-model=quadratic"}, nil, "must be none, linear, aic or ais"},
		{[]string{"--endpoints=x", "--router-policy=tine"}, nil, "must be dynamo or time"},
		{[]string{"--endpoints=x", "--router-policy=time", "--router-mode=random"}, nil, "in --router-mode kv only"},
		{[]string{"--endpoints=x", "--router-policy=time", "--router-prefill-load-scale=1"}, nil,
			"or DYN_ROUTER_PREFILL_LOAD_SCALE is a weight of Dynamo's cost"},
		{[]string{"--endpoints=x", "--router-policy=time"},
			map[string]string{"DYN_ROUTER_PREFILL_LOAD_SCALE": "2"}, "or DYN_ROUTER_PREFILL_LOAD_SCALE is a weight"},
		{[]string{"--endpoints=x", "--router-prefill-tokens-per-second=nan"}, nil, "tokens-per-second"},
		{[]string{"--endpoints=x", "--shared-cache-type=hicache"}, nil, "shared-cache-type"},
		{[]string{"--endpoints=x", "--kv-overlap-score-weight=-1"}, nil,
			"unknown flag --kv-overlap-score-weight: write --router-prefill-load-scale"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "1.5"},
			"write --router-prefill-load-scale"},
		{[]string{"--endpoints=x", "--dynamo-discovery=etcd:y"}, nil, "file:DIR"},
		{[]string{"--endpoints=x", "--dynamo-discovery=frontend:a:1,b"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--dynamo-discovery=kubernetes"}, nil, "which Pods to follow"},
		{[]string{"--pool-name=p", "--endpoint-selector=a=b"}, nil, "a selector of its own"},
		{[]string{"--pool-name=p", "--endpoint-target-ports=1"}, nil, "the pool says"},
		{[]string{"--endpoints=x", "--endpoint-target-ports=1"}, nil, "which Pods to follow"},
		{[]string{"--endpoint-selector=a=b", "--endpoint-target-ports=1,1"}, nil, "twice"},
		{[]string{"--endpoint-selector=a=b", "--endpoint-target-ports=1,2,3,4,5,6,7,8,9"}, nil, "at most 8"},
		{[]string{"--endpoint-selector=a=b=c"}, nil, "--endpoint-selector"},
		{[]string{"--pool-name=p", "--pool-group=llm-d.ai"}, nil, "inference.networking.x-k8s.io"},
		{[]string{"--pool-name=p", "--pod-ip-family=ipv4"}, nil, "write --dns-lookup-family v4_only"},
		{[]string{"--pool-name=p", "--data-parallel-size=0"}, nil, "from 1 to 1024"},
		{[]string{"--endpoints=x", "--ha-enable-leader-election"}, nil, "Kubernetes"},
		{[]string{"--pool-name=x", "--ha-handover-timeout=-1s"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--engine=llama"}, nil, "--engine"},
		{[]string{"--endpoints=x", "--engine-args=--chat-template-content-format=parts"}, nil,
			"auto, string or openai"},
		{[]string{"--endpoints=x"}, map[string]string{"KVEPP_ENGINE_ARGS": "--max-model-len 8"},
			"--engine-args: unknown flag --max-model-len: of the engine's arguments kvepp takes only"},
		{[]string{"--endpoints=x", "--tokenizer-url=http://engine"}, nil, "for which model"},
		{[]string{"--endpoints=x", "--model=a=b", "--model=c=d", "--tokenizer-url=http://engine"}, nil, "there are 2"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=engine:8000"}, nil, "NAME=http://HOST:PORT"},
		{[]string{"--endpoints=x", "--tokenizer-url==http://engine"}, nil, "NAME=http://HOST:PORT"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=http://b", "--tokenizer-url=a=http://c"}, nil, "given twice"},
		{[]string{"--endpoints=x", "--tokenizer-url=a=http://b", "--engine=dynamo"}, nil, "only vLLM's and SGLang's"},
		{[]string{"--endpoints=x", "--tokenizer-check=3"}, nil, "--tokenizer-url NAME=URL"},
		{[]string{"--endpoints=x", "--tokenizer-check=-1"}, nil, "negative"},
		{[]string{"--endpoints=x", "--index-max-bytes=1000"}, nil, "at least 1048576"},
		{[]string{"--endpoints=x", "--router-ttl-secs=0"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-ttl-secs=inf"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-predicted-ttl-secs=-1"}, nil, "positive number of seconds"},
		{[]string{"--endpoints=x", "--router-predicted-ttl-secs=nan"}, nil, "must be a number"},
		{[]string{"--endpoints=x", "--router-approximate-cache-policy=fifo"}, nil, "ttl or lru"},
		{[]string{"--endpoints=x", "--router-durable-kv-events"}, nil, "JetStream"},
		{[]string{"--endpoints=x", "--durable-kv-events"}, nil, "JetStream"},
		{[]string{"--endpoints=x", "--router-reset-states"}, nil, "JetStream"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_SNAPSHOT_THRESHOLD": "1000000"}, "JetStream"},
		{[]string{"--endpoints=x", "--use-remote-indexer"}, nil, "kvepp does not query another process's index"},
		{[]string{"--endpoints=x", "--active-decode-blocks-threshold=85"}, nil, "between 0.0 and 1.0"},
		{[]string{"--endpoints=x", "--active-decode-blocks-threshold=nan"}, nil, "between 0.0 and 1.0"},
		{[]string{"--endpoints=x", "--active-prefill-tokens-threshold=-1"}, nil, "or None"},
		{[]string{"--endpoints=x", "--active-prefill-tokens-threshold-frac=inf"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-queue-threshold=-1"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-admission=sessions"}, nil, "none or working-set"},
		{[]string{"--endpoints=x", "--router-admission=working-set", "--router-mode=random"}, nil, "kv only"},
		{[]string{"--endpoints=x", "--router-queue-threshold=nan"}, nil, "finite"},
		{[]string{"--endpoints=x", "--router-queue-policy=sjf"}, nil, "fcfs, wspt, edf or lcfs"},
		{[]string{"--endpoints=x", "--router-queue-timeout=-1s"}, nil, "negative"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/nopolicy.yaml"}, nil, "nopolicy.yaml"},
		{[]string{"--endpoints=x", "--fallback-endpoints=1", "--engine=dynamo"}, nil,
			"serves for the worker that a header names"},
		{[]string{"--endpoints=x", "--fallback-endpoints=9"}, nil, "--fallback-endpoints 9: must be from 0 to 8"},
		{[]string{"--endpoints=x", "--fallback-endpoints=1", "--gateway=agentgateway"}, nil,
			"--fallback-endpoints: --gateway agentgateway takes one endpoint for a request; leave one of the two out"},
		{[]string{"--endpoints=x", "--engine=dynamo", "--gateway=nginx"}, nil, "Dynamo's frontends need the worker's"},
		{[]string{"--endpoints=x", "--prefiller-header", "--gateway=nginx"}, nil, "no header but the endpoint's"},
		{[]string{"--endpoints=x", "--refresh-metrics-interval=0", "--gateway=nginx"}, nil, "engines' metrics alone"},
		{[]string{"--endpoints=x", "--gateway=envoy"}, nil, "must be own, istio, envoy-ai-gateway, agentgateway"},
		{[]string{"--endpoints=x", "--pick-timeout=0s"}, nil, "--pick-timeout 0s: must be above 0"},
		{[]string{"--endpoints=x", "--max-streams=-1"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused.yaml"}, nil,
			"testdata/refused.yaml: line 3: worker_selection: must have instances"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml",
			"--router-worker-selection-policy=other"}, nil,
			`instance "other" (line 6) has the type thunderagent, which kvepp does not have`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml"},
			map[string]string{"DYN_ROUTER_WORKER_SELECTION_POLICY": "wrong"},
			`line 8: "overlap_credit" is not a key of the parameters of dynamo-default-cost-fn, which has`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/selection.yaml",
			"--router-worker-selection-policy=negative"}, nil, "--router-temperature -1: must be a finite number"},
		{[]string{"--endpoints=x", "--router-worker-selection-policy=tuned"}, nil, "loads no other"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused2.yaml"}, nil,
			`refused2.yaml: line 3: router_tracking_hash "keyed": kvepp sends its bookings to no other process`},
		{[]string{"--endpoints=x", "--router-tracking-key-id=1"}, nil,
			"unknown flag --router-tracking-key-id: kvepp sends its bookings"},
		{[]string{"--endpoints=x", "--router-conditional-disagg"}, nil,
			"answer 500 to a request without a prefill worker"},
		{[]string{"--endpoints=x", "--router-conditional-disagg", "--prefiller-header", "--no-router-kv-events"}, nil,
			"which KV events say"},
		{[]string{"--endpoints=x", "--router-conditional-disagg-config={}"}, nil,
			"--router-conditional-disagg: give that flag too"},
		{[]string{"--endpoints=x", "--router-prefill-policy=mine"}, nil, "give --router-worker-selection-policy"},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused3.yaml"}, nil,
			`refused3.yaml: line 2: "router_temperature" is not a key of router, which has: disk_cache_hit_weight`},
		{[]string{"--endpoints=x", "--router-policy-config=testdata/refused4.yaml"}, nil,
			"refused4.yaml: line 2: router_ttl_secs \"soon\": must be a number, for example 120"},
		{[]string{"--endpoints=x", "--overload-status-code=200"}, nil, "429, 503 or 529"},
		{[]string{"--endpoints=x", "--refresh-metrics-interval=10ms"}, nil,
			"at least 50ms, for example 5s, or 0 for never"},
		{[]string{"--endpoints=x", "--model-server-metrics-scheme=ftp"}, nil, "must be http or https"},
		{[]string{"--endpoints=x", "--model-server-metrics-path=metrics"}, nil, "must begin with a slash"},
		{[]string{"--endpoints=x", "--engine-metrics=queued=a{b"}, nil,
			"--engine-metrics: \"a{b\" must look like NAME"},
		{[]string{"--endpoints=x", "--engine-metrics=usage="}, nil, "--engine-metrics: \"\" must look like NAME"},
		{[]string{"--endpoints=x", "--engine-metrics=a"}, nil,
			"must be queued=NAME, running=NAME, usage=NAME or lora=NAME"},
		{[]string{"--endpoints=x", "--engine-metrics=queued=a,queued=b"}, nil, "only one of each"},
		{[]string{"--endpoints=x", "--total-queued-requests-metric=a"}, nil, "write --engine-metrics queued=NAME"},
		{[]string{"--endpoints=x", "--router-kv-usage-weight=1"}, nil, "--router-policy time prices load"},
		{[]string{"--endpoints=x", "--inject-token-data"}, nil, "only Dynamo's frontends take token ids"},
		{[]string{"--endpoints=x", "--tenant-cache-salt", "--engine=dynamo"}, nil, "for stock vLLM"},
		{[]string{"--endpoints=x", "--tenant-cache-salt", "--ignore-client-hints"}, nil, "leave one of them out"},
		{[]string{"--endpoints=x", "--tls-min-version=1.1"}, nil, "must be 1.2 or 1.3"},
		{[]string{"--endpoints=x", "--secure-serving=false", "--cert-path=d"}, nil, "--cert-path belongs to TLS"},
		{[]string{"--endpoints=x", "--admin-address=9091"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--trace-url=http://jaeger/trace/"}, nil, "must have {trace_id}"},
		{[]string{"--endpoints=x", "--trace-url=javascript:alert(1)//{trace_id}"}, nil,
			"http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=/trace/{trace_id}"}, nil, "http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=https:///{trace_id}"}, nil, "http:// or https:// and a host"},
		{[]string{"--endpoints=x", "--trace-url=http://me:word@jaeger/{trace_id}"}, nil, "must not have a user"},
		{[]string{"--endpoints=x", "--trace-url=http://{trace_id}/trace"}, nil, "{trace_id} after the host"},
		{[]string{"--endpoints=x", "--trace-url=http://jaeger\n/{trace_id}"}, nil, "invalid control character"},
		{[]string{"--endpoints=x", "--admin-address=0.0.0.0:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--admin-address=:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--config-file=a"}, nil, "--config-file: kvepp serve has its own flags"},
		{[]string{"--endpoints=x", "--config-text=a"}, nil, "EndpointPickerConfig"},
		{[]string{"--endpoints=x", "--emit-endpoint-scores"}, nil, "--decision-headers"},
		{[]string{"--endpoints=x", "--metrics-cert-dir=a"}, nil, "--metrics-token-file"},
		{[]string{"--endpoints=x", "--metrics-client-ca-file=a"}, nil, "--metrics-token-file"},
		{[]string{"--endpoints=x", "--no-kv-events"}, nil, "unknown flag --no-kv-events: write --router-kv-events"},
		{[]string{"--endpoints=x", "--log-level=loud"}, nil, "debug, info, warn or error"},
		{[]string{"--endpoints=x", "--log-format=xml"}, nil, "text or json"},
		{[]string{"--endpoints=x", "--drain-delay=2s", "--drain-timeout=1s"}, nil, "a part of --drain-timeout"},
		{[]string{"--endpoints=x", "--drain-delay=-1s"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--admin-address=[::]:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--admin-address=myhost:9091"}, nil, "give --admin-token-file"},
		{[]string{"--endpoints=x", "--metrics-address=9090"}, nil, "HOST:PORT"},
		{[]string{"--endpoints=x", "--grpc-port=0"}, nil, "1 to 65535"},
		{[]string{"--endpoints=x", "--grpc-port=70000"}, nil, "70000"},
		{[]string{"--endpoints=x", "--max-parse-bytes=-1"}, nil, "may not be negative"},
		{[]string{"--endpoints=x", "--max-buffered-bytes=1000"}, nil,
			"--max-buffered-bytes 1000: must be at least 524288"},
		{[]string{"--endpoints=x", "--router-min-initial-workers=-1"}, nil, "negative"},
		{[]string{"--endpoints=x"}, map[string]string{"DYN_ROUTER_TEMPERATURE": "hot"}, "DYN_ROUTER_TEMPERATURE"},
		{[]string{"--endpoints=x"}, map[string]string{"KVEPP_GRPC_PORT": "x", "DYN_KV_CACHE_BLOCK_SIZE": "y"},
			"DYN_KV_CACHE_BLOCK_SIZE"},
	} {
		var stdout, stderr bytes.Buffer
		code := run(
			append([]string{"serve"}, c.args...),
			nil,
			&stdout,
			&stderr,
			func(name string) string { return c.env[name] },
		)
		if code != 2 || !strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v %v: status %d, %q; want 2 and %q", c.args, c.env, code, stderr.String(), c.says)
		}
	}
}

func TestErrorsAtStart(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--endpoints=testdata/none.yaml"}, "none.yaml"},
		{[]string{"--endpoints=testdata/none.yaml", "--tokenizer-url=m=http://a@b"}, "--tokenizer-url m=http://a@b"},
		{[]string{"--endpoints=testdata/none.yaml", "--tokenizer-url=m=http://a",
			"--tokenizer-url-api-key-file=testdata/none.key"}, "none.key"},
	} {
		var stdout, stderr bytes.Buffer
		if code := run(append([]string{"serve"}, c.args...), nil, &stdout, &stderr,
			func(string) string { return "" }); code != 1 ||
			!strings.Contains(stderr.String(), c.says) {
			t.Errorf("%v: status %d, %q; want 1 and %q", c.args, code, stderr.String(), c.says)
		}
	}
}

func TestHelpAndVersion(t *testing.T) {
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{nil, 2, "kvepp serve"},
		{[]string{"help"}, 0, "endpoints.yaml"},
		{[]string{"--help"}, 0, "endpoints.yaml"},
		{[]string{"serve", "--help-all"}, 0, "DYN_ROUTER_TEMPERATURE"},
		{[]string{"serve", "--help"}, 0, "--help-all"},
		{[]string{"check", "--help-all"}, 0, "--router-mode"},
		{[]string{"version"}, 0, "kvepp "},
		{[]string{"sevre"}, 2, `"sevre"`},
	} {
		var stdout, stderr bytes.Buffer
		code := run(c.args, nil, &stdout, &stderr, func(string) string { return "" })
		if code != c.code || !strings.Contains(stdout.String()+stderr.String(), c.says) {
			t.Errorf("%v: status %s, %q %q", c.args, strconv.Itoa(code), stdout.String(), stderr.String())
		}
	}
}

func TestIndexBytes(t *testing.T) {
	for _, c := range []struct{ flag, limit, want int64 }{
		{0, math.MaxInt64, 2 << 30},
		{0, 3 << 30, 3 << 29},
		{0, 1000, 1 << 20},
		{5 << 20, 3 << 30, 5 << 20},
	} {
		if got := (&indexer.Config{MaxBytes: c.flag}).Bytes(c.limit); got != c.want {
			t.Errorf("flag %d, GOMEMLIMIT %d: %d, want %d", c.flag, c.limit, got, c.want)
		}
	}
}

func TestFlagsWithoutEffectAreNamed(t *testing.T) {
	for _, c := range []struct {
		args []string
		want int
	}{
		{nil, 0},
		{[]string{"--router-predicted-ttl-secs=2"}, 0},
		{[]string{"--router-max-tree-size=2", "--router-approximate-cache-policy=lru"}, 2},
		{[]string{"--no-router-kv-events", "--router-ttl-secs=2", "--router-approximate-cache-policy=lru"}, 0},
		{[]string{"--no-router-kv-events", "--router-predicted-ttl-secs=2"}, 1},
		{[]string{"--router-kv-overlap-score-credit=0", "--index-max-bytes=2000000"}, 1},
		{[]string{"--no-router-kv-events", "--index-peers=http://10.0.0.9:9091", "--warmup-timeout=1s"}, 2},
		{[]string{"--router-mode=random", "--router-temperature=1", "--router-assume-kv-reuse=false"}, 1},
		{[]string{"--router-prefill-load-model=aic"}, 1},
		{[]string{"--gateway=istio", "--decision-headers", "--router-track-output-blocks"}, 0},
		{[]string{"--gateway=nginx", "--decision-headers", "--router-track-output-blocks"}, 2},
		{[]string{"--shadow", "--engine=vllm", "--tenant-cache-salt", "--hold-when-empty=1s", "--prefiller-header"}, 2},
		{[]string{"--router-replica-sync", "--serve-indexer", "--shared-cache-multiplier=0.5",
			"--enable-session-prefix-index", "--aic-tp-size=2", "--v", "4", "--vllm-hash-seeds", "0"}, 7},
		{[]string{"--model-server-metrics-port=9", "--model-server-metrics-path=/m"}, 0},
		{[]string{"--refresh-metrics-interval=0", "--model-server-metrics-port=9", "--model-server-metrics-path=/m"},
			2},
	} {
		o := parsed(t, c.args, nil)
		if got := o.withoutEffect(); len(got) != c.want {
			t.Errorf("%v: %v, want %d", c.args, got, c.want)
		}
	}
	if o := parsed(t, []string{"--endpoints=x", "--shadow", "--engine=vllm",
		"--tenant-cache-salt"}, nil); o.routing.TenantSalt {
		t.Error("in shadow kvepp expects blocks with a salt that it does not write")
	}
	if got := parsed(t, nil, map[string]string{"DYN_ROUTER_APPROXIMATE_CACHE_POLICY": "lru"}).withoutEffect(); len(
		got,
	) != 1 {
		t.Errorf("from the environment: %v, want 1", got)
	}
}

func TestPredict(t *testing.T) {
	for _, c := range []struct {
		args []string
		want router.Predict
		most int
	}{
		{nil, router.Predict{Silent: 2 * time.Minute}, 0},
		{[]string{"--router-predicted-ttl-secs=1.5", "--router-ttl-secs=9"},
			router.Predict{TTL: 1500 * time.Millisecond, Silent: 9 * time.Second}, 0},
		{[]string{"--no-router-kv-events"}, router.Predict{TTL: 2 * time.Minute, Alone: true}, 1 << 20},
		{[]string{"--no-router-kv-events", "--router-approximate-cache-policy=lru"},
			router.Predict{TTL: 2 * time.Minute, LRU: true, Alone: true}, 1 << 20},
		{[]string{"--no-router-kv-events", "--index-max-bytes=2560000"},
			router.Predict{TTL: 2 * time.Minute, Alone: true}, 10_000},
	} {
		o := parsed(t, c.args, nil)
		if got := o.predict(); got != c.want || o.index(math.MaxInt64).MaxPredicted != c.most {
			t.Errorf("%v: %+v, want %+v", c.args, got, c.want)
		}
	}
}

func TestAdaptersOfTheOnlyModel(t *testing.T) {
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"--model=m=d", "--lora=a", "--lora=b=n"}, "map[a:m b:n]"},
		{[]string{"--tokenizer-url=m=http://e", "--lora=a"}, "map[a:m]"},
		{[]string{"--engine=sglang", "--model=m=d", "--lora=m:a", "--lora=b", "--lora=n:c=n"}, "map[a:m b:m c:n]"},
		{[]string{"--engine=vllm", "--model=m=d", "--lora=m:a"}, "map[m:a:m]"},
		{[]string{"--model=m=d", "--tokenizer-url=http://e", "--lora=a"}, "map[a:m]"},
	} {
		if got := parsed(t, append(c.args, "--endpoints=x"), nil).models.Adapters; fmt.Sprint(got) != c.want {
			t.Errorf("%v: %v, want %s", c.args, got, c.want)
		}
	}
}
