package extproc

import (
	"net"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"
)

// subset is the proxy's restriction of the candidates. An entry with a port allows that endpoint, one without allows
// every port of the address.
type subset struct {
	endpoints map[string]bool // host:port
	hosts     map[string]bool
}

// readSubset reads the hint, nil when there is none. Proposal 004 speaks of a list; proxies also send a comma-separated
// string, and lists of those. A hint that is there but names nothing allows nothing.
func readSubset(m *corev3.Metadata) *subset {
	v, ok := m.GetFilterMetadata()[subsetNamespace].GetFields()[subsetKey]
	if !ok {
		return nil
	}
	s := &subset{endpoints: map[string]bool{}, hosts: map[string]bool{}}
	s.add(v)
	return s
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
			if host, port, err := net.SplitHostPort(entry); err == nil {
				s.endpoints[net.JoinHostPort(host, port)] = true
			} else if entry != "" {
				s.hosts[strings.Trim(entry, "[]")] = true
			}
		}
	}
}

func (s *subset) allows(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return s.endpoints[address] || err == nil && s.hosts[host]
}
