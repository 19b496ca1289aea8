package extproc

import (
	"net/netip"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// subset is the proxy's restriction of the candidates. An entry with a port allows that endpoint, one without allows
// every port of the address. IP addresses are compared by value, not as text.
type subset struct {
	endpoints map[netip.AddrPort]bool
	addresses map[netip.Addr]bool
	names     map[string]bool // of hosts, with or without a port
}

// readSubset reads the proxy's hint; nil: there is none. Proposal 004 has a list; proxies also send a comma-separated
// string, and lists of such strings. An empty hint allows no endpoint.
func readSubset(m *corev3.Metadata) *subset {
	v, ok := m.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	if !ok {
		return nil
	}
	s := newSubset()
	s.add(v)
	return s
}

func newSubset() *subset {
	return &subset{endpoints: map[netip.AddrPort]bool{}, addresses: map[netip.Addr]bool{}, names: map[string]bool{}}
}

func (s *subset) add(v *structpb.Value) {
	switch k := v.GetKind().(type) {
	case *structpb.Value_ListValue:
		for _, item := range k.ListValue.GetValues() {
			s.add(item)
		}
	case *structpb.Value_StringValue:
		for entry := range strings.SplitSeq(k.StringValue, ",") {
			entry = strings.TrimSpace(entry)
			if endpoint, err := netip.ParseAddrPort(entry); err == nil {
				s.endpoints[endpoint] = true
			} else if address, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(entry, "["),
				"]")); err == nil {
				s.addresses[address] = true
			} else if entry != "" {
				s.names[entry] = true
			}
		}
	}
}

func (s *subset) allows(address string) bool {
	if endpoint, err := netip.ParseAddrPort(address); err == nil {
		return s.endpoints[endpoint] || s.addresses[endpoint.Addr()]
	}
	host, _, _ := strings.Cut(address, ":")
	return s.names[address] || s.names[host]
}
