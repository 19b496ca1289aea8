package check

import (
	"fmt"

	"kvepp/pool"
)

// nameFix is the fix for an address with a host name.
const nameFix = "run kvepp check --gateway URL: it shows whether the gateway resolves the name to the same address, " +
	"as a cluster of type STRICT_DNS with the same name and dns_lookup_family does; or write the IP address, " +
	"address: %s"

// checkAddress reports an address with a host name. Envoy finds the chosen endpoint in its cluster by IP:port. Only a
// request through the gateway shows whether both resolve the name to the same address.
func (q *workerCheck) checkAddress() {
	if name := q.Names[q.w.Name]; name != "" {
		q.wrong(AboutAddress, fmt.Sprintf(nameFix, q.w.Address),
			"%s is a host name, which kvepp resolves to %s: the gateway sends requests elsewhere unless it has the "+
				"same address", name, q.w.Address)
	}
}

// unresolved is the finding about an endpoint that kvepp leaves out because its name has no address.
func unresolved(e *pool.Endpoint) Finding {
	return Finding{
		Worker: e.Name,
		About:  AboutAddress,
		State:  Wrong,
		Says:   e.Address + " has no address: kvepp leaves the endpoint out",
		Fix:    "correct the name, or write an IP address, address: IP:PORT",
	}
}

// confirmAddress replaces the finding of checkAddress: the gateway has sent a request to the endpoint.
func (a *Result) confirmAddress() {
	for i := range a.Findings {
		if f := &a.Findings[i]; f.About == AboutAddress {
			f.State, f.Fix = OK, ""
			f.Says = fmt.Sprintf("a host name, which kvepp and the gateway resolve to %s", a.Worker.Address)
		}
	}
}
