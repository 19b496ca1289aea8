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

// Envoy's policy override_host finds an endpoint only by IP:port. kvepp therefore resolves host names in the endpoints
// file every few seconds, as Envoy's STRICT_DNS clusters do. If a lookup fails, the address stays. If a name does not
// exist any more, its address is removed.

const (
	// namesInterval is the time between lookups of a name. Source: Envoy 1.40, dns_refresh_rate of a cluster.
	namesInterval = 5 * time.Second
	// lookupTimeout bounds one round of lookups of all names.
	lookupTimeout = 5 * time.Second
	// maxLookups bounds the concurrent lookups.
	maxLookups = 32
)

// lookupFamilies maps values of Envoy's dns_lookup_family to the networks to look up, in order, until one has
// addresses. Source: Envoy 1.40, config.cluster.v3.Cluster.DnsLookupFamily.
var lookupFamilies = map[string][]string{
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

// resolved is the state of one name.
type resolved struct {
	address netip.Addr // the zero value: none
	failed  bool       // the latest lookup failed, and this is logged
	several bool       // the name has several addresses, and this is logged
}

// NewNames returns a resolver. family is a value of Envoy's dns_lookup_family in lower case: auto, v4_preferred,
// v4_only or v6_only. The error lists them.
func NewNames(family string, log *slog.Logger) (*Names, error) {
	networks, ok := lookupFamilies[family]
	if !ok {
		return nil, fmt.Errorf("%q is not a DNS lookup family: must be auto, v4_preferred, v4_only or v6_only", family)
	}
	return &Names{
		networks: networks,
		lookup:   net.DefaultResolver.LookupNetIP,
		log:      log,
		hosts:    map[string]*resolved{},
	}, nil
}

// hostName splits an address host:port. ok is false if the host is an IP address or the address is invalid.
func hostName(address string) (host, port string, ok bool) {
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" {
		return "", "", false
	}
	_, err = netip.ParseAddr(host)
	return host, port, err != nil
}

// Use replaces the set of names by those in entries, and looks up new names. It returns after the lookups, or after
// lookupTimeout.
func (n *Names) Use(ctx context.Context, entries []Entry) {
	used := map[string]*resolved{}
	var added []string
	n.mu.Lock()
	for i := range entries {
		host, _, ok := hostName(entries[i].Address)
		if !ok || used[host] != nil {
			continue
		}
		if used[host] = n.hosts[host]; used[host] == nil {
			used[host] = new(resolved)
			added = append(added, host)
		}
	}
	n.hosts = used
	n.mu.Unlock()
	n.update(ctx, added)
}

// Resolve returns the entries with IP addresses in place of host names. It leaves out entries whose name has no
// address. It does no lookups.
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

// Unresolved returns the number of names without an address.
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

// Follow looks up all names every namesInterval until ctx ends. It calls changed when the result of Resolve changes.
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

// addressText formats an address for logs.
func addressText(a netip.Addr) string {
	if !a.IsValid() {
		return "none"
	}
	return a.String()
}

// update looks up names, and reports whether an address changed.
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

// apply stores the result of a lookup, and reports whether the address of the name changed.
func (n *Names) apply(host string, addresses []netip.Addr, err error) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	r := n.hosts[host]
	if r == nil { // the name has left the file in the meantime
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
				"cannot resolve the host name of an endpoint; kvepp retries. Endpoints without an address are left "+
					"out: correct the name, or give an IP address",
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
				"the host name of an endpoint has several addresses, and kvepp uses one. Give each engine its own "+
					"endpoint with its own name or address",
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
