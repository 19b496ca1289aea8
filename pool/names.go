package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Envoy's policy override_host finds an endpoint by IP:port alone, so host names in the endpoints file are resolved as
// its STRICT_DNS clusters resolve theirs: again every few seconds, with the addresses of a failed lookup kept, and
// those of a name that is gone removed.

const (
	// namesInterval is how often names are looked up again. Source: Envoy 1.40, dns_refresh_rate of a cluster.
	namesInterval = 5 * time.Second
	// lookupTimeout bounds the lookups of all names together.
	lookupTimeout = 5 * time.Second
	// maxLookups is how many lookups run at once.
	maxLookups = 32
)

// lookups are the values of Envoy's dns_lookup_family that Names follows, and the networks that each asks for in turn
// until one has addresses. Source: Envoy 1.40, config.cluster.v3.Cluster.DnsLookupFamily.
var lookups = map[string][]string{
	"auto":         {"ip6", "ip4"},
	"v4_preferred": {"ip4", "ip6"},
	"v4_only":      {"ip4"},
	"v6_only":      {"ip6"},
}

// Names resolves the host names of endpoints' addresses. Create it with NewNames. It is safe for concurrent use.
type Names struct {
	networks []string
	lookup   func(ctx context.Context, network, host string) ([]netip.Addr, error)
	log      *slog.Logger

	mu    sync.Mutex
	hosts map[string]*resolved // by name; guarded by mu
}

// resolved is what is known of one name.
type resolved struct {
	address netip.Addr // the zero value: none
	failed  bool       // the latest lookup did, and that is logged
	several bool       // it has several addresses, and that is logged
}

// NewNames returns a resolver for one of Envoy's values of dns_lookup_family, in lower case: auto, v4_preferred,
// v4_only or v6_only. The error names these.
func NewNames(family string, log *slog.Logger) (*Names, error) {
	networks, ok := lookups[family]
	if !ok {
		return nil, fmt.Errorf("%q is no family: must be auto, v4_preferred, v4_only or v6_only", family)
	}
	return &Names{
		networks: networks,
		lookup:   net.DefaultResolver.LookupNetIP,
		log:      log,
		hosts:    map[string]*resolved{},
	}, nil
}

// hostName returns the host of an address host:port, if that is a name.
func hostName(address string) (host, port string, ok bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return "", "", false
	}
	_, err = netip.ParseAddr(host)
	return host, port, err != nil
}

// Use makes the names in entries the ones that are followed, and looks up those that are new. It returns when all are
// looked up, or lookupTimeout is over.
func (n *Names) Use(ctx context.Context, entries []Entry) {
	used := map[string]*resolved{}
	var fresh []string
	n.mu.Lock()
	for i := range entries {
		host, _, ok := hostName(entries[i].Address)
		if !ok || used[host] != nil {
			continue
		}
		if used[host] = n.hosts[host]; used[host] == nil {
			used[host] = new(resolved)
			fresh = append(fresh, host)
		}
	}
	n.hosts = used
	n.mu.Unlock()
	n.update(ctx, fresh)
}

// Resolve returns the entries with addresses in the place of host names. Entries whose names have none are left out. It
// looks nothing up.
func (n *Names) Resolve(entries []Entry) []Entry {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.hosts) == 0 {
		return entries
	}
	all := make([]Entry, 0, len(entries))
	for _, e := range entries {
		if host, port, ok := hostName(e.Address); ok {
			r := n.hosts[host]
			if r == nil || !r.address.IsValid() {
				continue
			}
			e.Address = net.JoinHostPort(r.address.String(), port)
		}
		all = append(all, e)
	}
	return all
}

// Unresolved returns how many names have no address.
func (n *Names) Unresolved() (count int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, r := range n.hosts {
		if !r.address.IsValid() {
			count++
		}
	}
	return count
}

// Follow looks all names up again and again until ctx ends, and calls changed when that changed what Resolve returns.
func (n *Names) Follow(ctx context.Context, changed func()) {
	tick := time.NewTicker(namesInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		n.mu.Lock()
		hosts := make([]string, 0, len(n.hosts))
		for host := range n.hosts {
			hosts = append(hosts, host)
		}
		n.mu.Unlock()
		if n.update(ctx, hosts) {
			changed()
		}
	}
}

// addressText is an address in logs.
func addressText(a netip.Addr) string {
	if !a.IsValid() {
		return "none"
	}
	return a.String()
}

// update looks names up, and reports whether the address of one changed.
func (n *Names) update(ctx context.Context, hosts []string) (changed bool) {
	if len(hosts) == 0 {
		return false
	}
	within, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	slots := make(chan struct{}, maxLookups)
	results := make(chan bool, len(hosts))
	for _, host := range hosts {
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			addresses, err := n.find(within, host)
			results <- ctx.Err() == nil && n.apply(host, addresses, err)
		}()
	}
	for range hosts {
		changed = <-results || changed
	}
	return changed
}

// find returns the addresses of a name, in order.
func (n *Names) find(ctx context.Context, host string) (addresses []netip.Addr, err error) {
	for _, network := range n.networks {
		if addresses, err = n.lookup(ctx, network, host); len(addresses) > 0 {
			break
		}
	}
	for i := range addresses {
		addresses[i] = addresses[i].Unmap()
	}
	slices.SortFunc(addresses, netip.Addr.Compare)
	return addresses, err
}

// apply takes over the result of a lookup, and reports whether the name has another address now.
func (n *Names) apply(host string, addresses []netip.Addr, err error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.hosts[host]
	if r == nil { // it left the file meanwhile
		return false
	}
	before := r.address
	if len(addresses) == 0 {
		var dns *net.DNSError
		gone := err == nil || errors.As(err, &dns) && dns.IsNotFound
		if gone {
			r.several, r.address = false, netip.Addr{}
		}
		if !r.failed || before != r.address {
			r.failed = true
			n.log.Warn(
				"cannot resolve the host name of an endpoint; kvepp goes on trying. Without an address its endpoints "+
					"are left out: correct the name, or write an IP address",
				"name",
				host,
				"address",
				addressText(r.address),
				"error",
				err,
			)
		}
		return r.address != before
	}
	r.failed = false
	if !slices.Contains(addresses, r.address) {
		r.address = addresses[0]
		n.log.Info("resolved the host name of an endpoint", "name", host, "address", r.address.String())
	}
	if several := len(addresses) > 1; several != r.several {
		if r.several = several; several {
			n.log.Warn(
				"the host name of an endpoint has several addresses, and kvepp uses one. Each engine needs an "+
					"endpoint with a name or an address of its own",
				"name",
				host,
				"addresses",
				len(addresses),
				"used",
				r.address.String(),
			)
		}
	}
	return r.address != before
}
