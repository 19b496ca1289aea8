// Package join joins the sources of endpoints (the endpoints file, Dynamo's discovery, Kubernetes) into one pool, and
// says of each endpoint which version its engine has and whether its model is kvepp's.
//
// It owns the list of endpoints before it is published. It routes nothing: package pool publishes the list, and package
// router reads it.
package join

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/flags"
	"kvepp/internal/suggest"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
)

// inKubernetes is the value of --dynamo-discovery for workers that write DynamoWorkerMetadata objects.
const inKubernetes = "kubernetes"

// Config says where endpoints come from and what they have in common.
type Config struct {
	File string // the endpoints file; empty: none
	// Parse reads the endpoints file. nil: it has kvepp's format. No flag sets it.
	Parse      func(text []byte) ([]pool.Entry, error)
	Discovery  string // of Dynamo: file:DIR, frontend:HOST:PORT,... or kubernetes; empty: none
	DNSFamily  string
	BlockSize  int // tokens of each worker's blocks; 0: each worker's own
	MinWorkers int // that must have been seen before kvepp is ready
	Kube       kube.Config
}

// AddFlags declares the flags.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.File, "endpoints", "",
		"YAML `FILE` that lists the endpoints. kvepp reads it again when it changes")
	fs.StringVar(&c.Discovery, "dynamo-discovery", "",
		"complete the endpoints from Dynamo's discovery, `SOURCE`: file:DIR, frontend:HOST:PORT or kubernetes. "+
			"file:DIR reads the workers' DYN_FILE_KV; frontend:HOST:PORT,HOST:PORT asks frontends, for any backend; "+
			"both are for endpoints with a \"dynamo:\" path. kubernetes needs --pool-name or --endpoint-selector")
	flags.Values(fs, "dynamo-discovery", "file:", "frontend:", inKubernetes)
	fs.StringVar(&c.DNSFamily, "dns-lookup-family", "auto",
		"which address kvepp uses of a host name in the endpoints file, and of a Pod with several, `FAMILY`: auto "+
			"(IPv6, else IPv4; a Pod's first), v4_preferred (IPv4, else IPv6), v4_only or v6_only. For host names "+
			"give the dns_lookup_family of Envoy's cluster, in lower case")
	flags.Values(fs, "dns-lookup-family", "auto", "v4_preferred", "v4_only", "v6_only")
	fs.IntVar(&c.BlockSize, "kv-cache-block-size", 0,
		"`TOKENS` per KV block of every worker. 0: each worker's own, from the endpoints file, its model card, or its "+
			"first stored block")
	fs.IntVar(&c.MinWorkers, "router-min-initial-workers", 0,
		"health checks say NOT_SERVING until kvepp has seen `N` endpoints that can take requests; prefill workers do "+
			"not count")
	flags.Inherit(fs, "kv-cache-block-size", "DYN_KV_CACHE_BLOCK_SIZE",
		"router-min-initial-workers", "DYN_ROUTER_MIN_INITIAL_WORKERS")
	flags.Section(fs, "Endpoints")
	c.Kube.AddFlags(fs)
	flags.Section(fs, "Kubernetes")
}

// Validate returns an error for the first setting that is invalid, alone or beside the others.
func (c *Config) Validate() error {
	if _, err := dynamo.Brokers(); err != nil {
		return err
	}
	switch {
	case c.File == "" && !c.Kube.Used():
		return errors.New(
			"no endpoints: give --endpoints FILE (docs/endpoints-file.md), or in Kubernetes --pool-name NAME")
	case c.BlockSize < 0 || c.BlockSize > kvblock.MaxBlockSize:
		return fmt.Errorf("--kv-cache-block-size %d: must be a number of tokens from 1 to %d, for example 16 (0: each "+
			"worker's own)", c.BlockSize, kvblock.MaxBlockSize)
	case c.MinWorkers < 0:
		return fmt.Errorf("--router-min-initial-workers %d: may not be negative; give a number such as 2, or 0",
			c.MinWorkers)
	}
	switch kind, at, _ := strings.Cut(c.Discovery, ":"); {
	case c.Discovery == "" || kind == "file" && at != "":
	case kind == "frontend":
		for _, address := range strings.Split(at, ",") {
			if err := pool.CheckHostPort(address); err != nil {
				return fmt.Errorf("--dynamo-discovery frontend: %w", err)
			}
		}
	case c.Discovery != inKubernetes:
		return fmt.Errorf("--dynamo-discovery %q: must look like file:DIR or frontend:HOST:PORT, or be kubernetes; "+
			"for Dynamo's other backends, give a frontend%s", c.Discovery,
			suggest.DidYouMean(kind, "", []string{"file", "frontend", inKubernetes}))
	case !c.Kube.Used():
		return errors.New("--dynamo-discovery kubernetes needs to know which Pods to follow: give --pool-name or " +
			"--endpoint-selector")
	}
	if _, err := pool.NewNames(c.DNSFamily, nil); err != nil {
		return fmt.Errorf("--dns-lookup-family: %w", err)
	}
	c.Kube.Family = c.DNSFamily
	return c.Kube.Validate()
}
