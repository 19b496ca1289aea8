package check

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// checkAddress wants an IP address. Envoy compares what kvepp names with the IP:port of its cluster's hosts, whether these were
// configured as addresses or resolved from names. That both resolve a name alike cannot be seen from here.
func (q *inquiry) checkAddress(ctx context.Context) {
	address := q.w.Address
	if _, err := netip.ParseAddrPort(address); err == nil || address == "" {
		return
	}
	fix := "write the IP address that Envoy has for it, address: IP:PORT"
	if host, port, err := net.SplitHostPort(address); err == nil {
		ctx, cancel := q.bounded(ctx)
		defer cancel()
		if found, err := net.DefaultResolver.LookupHost(ctx, host); err == nil && len(found) > 0 {
			var all []string
			for _, ip := range found[:min(len(found), 4)] {
				all = append(all, net.JoinHostPort(ip, port))
			}
			fix = fmt.Sprintf("write the IP address, address: %s (what %s resolves to now)", strings.Join(all, " or "), host)
		}
	}
	q.found(AboutAddress, Wrong, fix, "%s has a host name: Envoy matches kvepp's choice with IP:port alone. `kvepp serve` resolves the name, but Envoy sends the requests to other endpoints unless its cluster is STRICT_DNS and resolves it to the same address", address)
}
