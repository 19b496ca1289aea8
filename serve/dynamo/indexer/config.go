package indexer

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Help is the beginning of the help of `kvepp indexer`.
const Help = `kvepp indexer follows the KV events of workers, and answers over HTTP how much of a prompt each
worker has cached. It replaces "python -m dynamo.indexer": the same requests, the same responses.

Usage:       kvepp indexer [--workers WORKERS --block-size TOKENS] [flags]
Example:     kvepp indexer --port 8090 --block-size 16 --workers 1=tcp://10.0.0.7:5557
             curl localhost:8090/query -H 'Content-Type: application/json' \
               -d '{"model_name": "default", "token_ids": [1, 2, 3]}'
Precedence:  flag, variable KVEPP_INDEXER_<FLAG>, --config FILE, default
`

// Config are the workers and peers at the start of `kvepp indexer`.
type Config struct {
	blockSize     int
	workers       string
	model, group  string
	peers         string
	registrations []Registration // parsed from workers
}

// AddFlags declares the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.IntVar(&c.blockSize, "block-size", 0, "`TOKENS` per KV block of the workers that --workers names")
	f.StringVar(&c.workers, "workers", "",
		"`WORKERS` at the start: INSTANCE[:RANK]=tcp://HOST:PORT, separated by commas; more can be registered over "+
			"HTTP")
	f.StringVar(&c.model, "model-name", "default", "the `MODEL` that those workers serve")
	f.StringVar(&c.group, "routing-group", "default", "the routing `GROUP` of those workers")
	f.StringVar(&c.peers, "peers", "",
		"`URLS` of other indexers, separated by commas: at start kvepp copies the index of the workers in --workers "+
			"from the first peer that answers")
}

// Validate checks the flags.
func (c *Config) Validate() error {
	if err := CheckPeers("--peers", c.Peers()); err != nil {
		return err
	}
	switch {
	case c.workers == "" && c.blockSize != 0:
		return errors.New("--block-size is that of the workers that --workers names; those registered over HTTP " +
			"bring their own")
	case c.workers == "":
		return nil
	case c.blockSize == 0:
		return errors.New("--workers needs --block-size: the tokens per KV block of these workers")
	}
	for _, w := range strings.Split(c.workers, ",") {
		r, err := c.registration(w)
		if err != nil {
			return fmt.Errorf("--workers: %w", err)
		}
		c.registrations = append(c.registrations, r)
	}
	return nil
}

// Peers returns the URLs of the other indexers.
func (c *Config) Peers() []string {
	return strings.FieldsFunc(c.peers, func(r rune) bool { return r == ',' })
}

// CheckPeers returns an error unless each of the peers is a URL of an HTTP server.
func CheckPeers(flag string, peers []string) error {
	for _, peer := range peers {
		if u, err := url.Parse(peer); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
			u.User != nil {
			return fmt.Errorf("%s: each URL must look like http://HOST:PORT", flag)
		}
	}
	return nil
}

// registration parses one element of --workers.
func (c *Config) registration(worker string) (r Registration, err error) {
	name, address, ok := strings.Cut(worker, "=")
	instance, ranked, hasRank := strings.Cut(name, ":")
	id, err := strconv.ParseUint(instance, 10, 64)
	rank := uint64(0)
	if hasRank && err == nil {
		rank, err = strconv.ParseUint(ranked, 10, 32)
	}
	if !ok || err != nil {
		return r, fmt.Errorf("%q must look like INSTANCE[:RANK]=tcp://HOST:PORT, both numbers decimal", worker)
	}
	rank32 := uint32(rank)
	return Registration{InstanceID: &id, Rank: &rank32, Endpoint: &address, Model: &c.model, Group: &c.group,
		BlockSize: &c.blockSize}, nil
}

// warmUpTimeout bounds how long the start waits for peers.
const warmUpTimeout = 10 * time.Second

// Begin registers the workers and peers of the flags, and copies the index of the first peer that answers. The caller
// has the feed hold its events back if there are peers.
func (r *Registry) Begin(ctx context.Context, c *Config) error {
	for _, w := range c.registrations {
		if err := r.Register(w); err != nil {
			return fmt.Errorf("--workers: %w", err)
		}
	}
	peers := c.Peers()
	for _, peer := range peers {
		if err := r.AddPeer(peer); err != nil {
			return fmt.Errorf("--peers: %w", err)
		}
	}
	if len(peers) > 0 {
		warm, cancel := context.WithTimeout(ctx, warmUpTimeout)
		defer cancel()
		r.WarmUp(warm, peers, "")
	}
	return nil
}
