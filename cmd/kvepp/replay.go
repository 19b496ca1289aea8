package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/replay"
	"kvepp/replay/report"
	"kvepp/router"
	"kvepp/router/admission"
	"kvepp/router/queue"
	"kvepp/router/session"
	"kvepp/scoring"
)

// replayPrefix is part of the names of its environment variables: KVEPP_REPLAY_WORKERS.
const replayPrefix = "replay-"

// replayOptions are the flags of "kvepp replay".
type replayOptions struct {
	report.Config
	variant variantOptions
}

// variantOptions are the flags of "kvepp replay" that --compare can change.
type variantOptions struct {
	scoring    scoring.Config
	mode       string
	policy     string
	prefill    scoring.PrefillModel
	thresholds router.Thresholds
	queue      queue.Config
	admission  admission.Config
	disagg     scoring.Disaggregation
	affinity   session.Config
	lag        time.Duration
	delivery   time.Duration
	jitter     time.Duration
	replicas   int
	delay      string // of replicas; off: nothing is shared
}

func (v *variantOptions) add(f *pflag.FlagSet) {
	v.scoring.AddWeightFlags(f)
	f.StringVar(&v.mode, "router-mode", v.scoring.Mode.String(),
		"how a worker is chosen, `MODE`: kv, round-robin, random, power-of-two or least-loaded, as in kvepp serve")
	flags.Inherit(f, "router-mode", "DYN_ROUTER_MODE")
	f.StringVar(&v.policy, "router-policy", scoring.Dynamo.String(),
		"how the mode kv prices workers, `POLICY`: dynamo (the default here, to compare with) or time, as in kvepp "+
			"serve; or, for comparison, "+
			strings.Join(replay.PolicyNames(), ", "))
	v.prefill.AddFlags(f)
	v.affinity.AddFlags(f)
	f.Lookup("router-session-affinity-ttl-secs").Usage = "keep the requests of a session of the trace on one worker, " +
		"until `SECONDS` after its latest request has ended. 0: sessions are not bound"
	v.thresholds.AddFlags(f)
	v.queue.AddFlags(f)
	v.admission.AddFlags(f)
	v.disagg.AddFlags(f)
	f.IntVar(&v.replicas, "replicas", 1,
		"`N` replicas of kvepp; each request arrives at one of them, drawn at random")
	f.StringVar(&v.delay, "replica-delay", "5ms",
		"`TIME` until replicas know of each other's bookings and sessions; off: they share nothing")
	f.DurationVar(&v.jitter, "arrival-jitter", 0,
		"the most `TIME` by which a request arrives later than in the trace; each takes a random part of it. Without "+
			"it, replicas cannot know of requests that the trace has at the same microsecond")
	f.DurationVar(&v.delivery, "delivery-delay", 0,
		"the most `TIME` from the choice of an engine until it has the request; each takes a random part of it, so "+
			"that requests of one moment arrive one after the other")
	f.DurationVar(&v.lag, "event-lag", 0, "`TIME` from the end of an engine's step until the index knows its KV events")
}

// apply checks the flags of f and sets what they say in c.
func (v *variantOptions) apply(f *pflag.FlagSet, c *replay.Config) error {
	if err := v.queue.Read(f, absentFlag); err != nil {
		return err
	}
	if err := errors.Join(checkThresholds(&v.thresholds), v.queue.Validate(), v.affinity.Validate()); err != nil {
		return err
	}
	if err := v.admission.Validate(); err != nil {
		return err
	}
	mode, err := scoring.ParseMode(v.mode)
	if err != nil || mode == scoring.Direct || mode == scoring.DeviceAwareWeighted {
		return fmt.Errorf("--router-mode %q: must be kv, round-robin, random, power-of-two or least-loaded", v.mode)
	}
	v.scoring.Mode = mode
	c.Policy = ""
	if slices.Contains(replay.PolicyNames(), v.policy) {
		c.Policy = v.policy
	} else if v.scoring.Policy, err = scoring.ParsePolicy(v.policy); err != nil {
		return flags.OneOf("router-policy", v.policy, append(scoring.PolicyNames(), replay.PolicyNames()...)...)
	}
	if err := v.scoring.ValidateFlags(f); err != nil {
		return err
	}
	if v.lag < 0 {
		return fmt.Errorf("--event-lag %v: must be at least 0", v.lag)
	}
	if v.jitter < 0 {
		return fmt.Errorf("--arrival-jitter %v: must be at least 0", v.jitter)
	}
	if v.delivery < 0 {
		return fmt.Errorf("--delivery-delay %v: must be at least 0", v.delivery)
	}
	if err := v.prefill.Validate(&v.scoring); err != nil {
		return err
	}
	if c.Replicas = v.replicas; v.replicas < 1 {
		return fmt.Errorf("--replicas %d: must be at least 1", v.replicas)
	}
	c.ReplicaDelay, c.Unshared = 0, v.delay == "off"
	if !c.Unshared {
		if c.ReplicaDelay, err = time.ParseDuration(v.delay); err != nil || c.ReplicaDelay < 0 {
			return fmt.Errorf("--replica-delay %q: must be a time of at least 0 such as 5ms, or off", v.delay)
		}
	}
	if err := v.disagg.Read(&v.scoring, v.queue.Threshold); err != nil {
		return err
	}
	if c.Disaggregation = v.disagg; v.disagg.On && c.PrefillWorkers == 0 {
		return errors.New("--router-conditional-disagg needs --prefill-workers")
	}
	v.prefill.TransferSeconds = v.disagg.TransferMS / 1000
	c.Scoring, c.Prefill, c.EventLag = v.scoring, v.prefill, v.lag
	c.DeliveryDelay, c.ArrivalJitter = v.delivery, v.jitter
	c.Busy = replay.Thresholds(v.thresholds)
	c.SessionTTL, c.SessionSoft = v.affinity.TTL, v.affinity.Soft
	if q := v.queue.Room(); q != nil {
		c.Queue, _ = q.Profiles.Of("")
	}
	c.QueueBound, c.QueueTimeout = v.queue.Size, v.queue.Timeout
	if c.Admission = nil; v.admission.On {
		c.Admission = &v.admission
	}
	return nil
}

func replayFlags(o *replayOptions) *pflag.FlagSet {
	f := flags.New("kvepp replay")
	o.AddFlags(f)
	flags.Section(f, "Trace and engines")
	o.variant.add(f)
	flags.Section(f, "Router, as in kvepp serve (--compare can change these)")
	flags.NameVariables(f, replayPrefix)
	return f
}

// parseReplay reads the arguments and returns the settings; none with --generate.
func parseReplay(o *replayOptions, args []string, getenv func(string) string) ([]report.Setting, error) {
	f := replayFlags(o)
	if err := parseOnce(f, args, withoutDirect(getenv)); err != nil {
		return nil, err
	}
	if err := o.Validate(f.Args()); err != nil || o.Generates() {
		return nil, err
	}
	if o.Reports() && !f.Changed("router-policy") {
		_ = f.Set("router-policy", scoring.Time.String()) // a string takes any value
	}
	if err := o.variant.apply(f, &o.Base); err != nil {
		return nil, err
	}
	return o.variants(f)
}

// variants returns the setting as given by the flags of f, and those of --compare.
func (o *replayOptions) variants(f *pflag.FlagSet) ([]report.Setting, error) {
	variants := []report.Setting{{Name: "as given", Config: o.Base}}
	if o.Reports() {
		recorded := o.Base
		recorded.Policy = replay.Recorded
		variants = []report.Setting{{Name: replay.Recorded, Config: recorded}, {Name: "kvepp", Config: o.Base}}
	}
	for _, text := range compared(o.Compare) {
		name, arguments, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--compare %q: must be NAME=FLAGS, for example 'rr=--router-mode=round-robin'", text)
		}
		if slices.ContainsFunc(variants, func(v report.Setting) bool { return v.Name == name }) ||
			o.Reports() && name == report.Measured {
			return nil, fmt.Errorf("--compare %s: another line has this name", name)
		}
		v := report.Setting{Name: name, Config: o.Base}
		v.Config.Queue = nil
		var changed variantOptions
		g := flags.New("kvepp replay --compare " + name)
		changed.add(g)
		if err := parseArgs(g, append(changedArgs(f, g), strings.Fields(arguments)...)); err != nil {
			return nil, fmt.Errorf("--compare %s: %w", name, err)
		}
		if err := changed.apply(g, &v.Config); err != nil {
			return nil, fmt.Errorf("--compare %s: %w", name, err)
		}
		variants = append(variants, v)
	}
	for _, v := range variants {
		if err := v.Config.Validate(); err != nil {
			return nil, fmt.Errorf("%s: %w", v.Name, err)
		}
	}
	return variants, nil
}

// compared replaces "all" by a line for each policy and mode, and one with admission.
func compared(texts []string) (all []string) {
	for _, text := range texts {
		if text == replay.Recorded {
			text += "=--router-policy=" + replay.Recorded
		}
		if text != "all" {
			all = append(all, text)
			continue
		}
		for _, p := range slices.Concat(scoring.PolicyNames(), replay.PolicyNames()) {
			if p == replay.Recorded {
				continue
			}
			all = append(all, p+"=--router-policy="+p)
		}
		all = append(all, "time+admission=--router-policy=time --router-admission=working-set")
		for _, m := range []scoring.Mode{scoring.RoundRobin, scoring.Random, scoring.PowerOfTwo, scoring.LeastLoaded} {
			all = append(all, m.String()+"=--router-mode="+m.String())
		}
	}
	return all
}

// changedArgs returns the flags of from that were given, as arguments, as far as to has them.
func changedArgs(from, to *pflag.FlagSet) (args []string) {
	from.Visit(func(flag *pflag.Flag) {
		if to.Lookup(flag.Name) != nil {
			args = append(args, "--"+flag.Name+"="+flag.Value.String())
		}
	})
	return args
}

// replayTraces runs "kvepp replay".
func replayTraces(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var o replayOptions
	settings, err := parseReplay(&o, args, getenv)
	if err != nil {
		status := notRun(replayFlags(new(replayOptions)), err, helpHint, stdout, stderr)
		if status == 0 {
			report.WriteWorkloads(stdout)
		}
		return status
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal ends kvepp at once
	if o.Generates() {
		err = o.Generate(stdout)
	} else {
		err = o.Run(ctx, settings, stdout, stderr)
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp replay: %v\n", err)
		return 1
	}
	return 0
}
