package check

import (
	"fmt"

	"kvepp/pool"
)

// nameFix says what makes an address by name safe.
const nameFix = "run kvepp check --gateway URL: it shows whether the gateway resolves the name to the same address, " +
	"as a cluster of type STRICT_DNS with the same name and dns_lookup_family does; or write the IP address, " +
	"address: %s"

// checkAddress tells of an address that is given by name. Envoy finds what kvepp chose among the hosts of its cluster
// by IP:port; that both resolve a name to the same address shows only when a request comes through.
func (q *workerCheck) checkAddress() {
	if name := q.Names[q.w.Name]; name != "" {
		q.found(
			AboutAddress,
			Wrong,
			fmt.Sprintf(nameFix, q.w.Address),
			"%s is a host name, which kvepp resolves to %s: the gateway sends requests elsewhere unless it has the "+
				"same address",
			name,
			q.w.Address,
		)
	}
}

// Unresolved is the finding about an endpoint that kvepp leaves out because its name has no address.
func Unresolved(e *pool.Endpoint) Finding {
	return Finding{
		Worker: e.Name,
		About:  AboutAddress,
		State:  Wrong,
		Says:   e.Address + " has no address: kvepp leaves the endpoint out",
		Fix:    "correct the name, or write an IP address, address: IP:PORT",
	}
}

// reached takes back what checkAddress said of an endpoint, once the gateway has sent a request there.
func (a *Result) reached() {
	for i := range a.Findings {
		if f := &a.Findings[i]; f.About == AboutAddress {
			f.State, f.Fix = OK, ""
			f.Says = fmt.Sprintf("a host name, which kvepp and the gateway resolve to %s", a.Worker.Address)
		}
	}
}
