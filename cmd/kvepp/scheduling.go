package main

import (
	"errors"
	"fmt"

	"github.com/spf13/pflag"

	"kvepp/scoring"
)

// scheduling is what says how a worker is chosen and what a running request counts for.
type scheduling struct {
	mode            string
	inheritedDirect bool // the environment said DYN_ROUTER_MODE=direct
}

// add declares the flags, over s and c, with the defaults in them.
func (s *scheduling) add(f *pflag.FlagSet, c *scoring.Config) {
	d := scoring.DefaultConfig()
	f.StringVar(&s.mode, "router-mode", d.Mode.String(), "how a worker is chosen: `MODE` kv (cached blocks and load), round-robin, random, power-of-two (of two at random the one with fewer requests), least-loaded (the fewest requests), or device-aware-weighted. All but kv read no prompts: nothing is tokenized, and no KV events are wanted. DYN_ROUTER_MODE=direct, which is meant for the frontends behind kvepp, changes nothing")
	f.IntVar(&c.CUDAToCPURatio, "encoder-cuda-to-cpu-ratio", d.CUDAToCPURatio, "with device-aware-weighted, how many times the requests of a worker on a CPU (deviceType: cpu) one with an accelerator is given")
}

// inherited is getenv without Dynamo's router mode direct: a pod's environment has it for the frontend, and says nothing of
// how the endpoint picker that the frontend relies on should choose.
func (s *scheduling) inherited(getenv func(string) string) func(string) string {
	return func(name string) string {
		value := getenv(name)
		if name == dynamoEnv["router-mode"] && value == scoring.Direct.String() {
			s.inheritedDirect = true
			return ""
		}
		return value
	}
}

// check sets in c what the flags say in words.
func (s *scheduling) check(c *scoring.Config) error {
	mode, err := scoring.ParseMode(s.mode)
	switch {
	case err != nil:
		return fmt.Errorf("--router-mode %w", err)
	case mode == scoring.Direct:
		return errors.New("--router-mode direct is how Dynamo's frontends run behind kvepp, which chooses their workers: give it to the frontends, and leave it out here (kv)")
	}
	c.Mode = mode
	return nil
}
