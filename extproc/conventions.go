package extproc

import (
	"encoding/base64"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"kvepp/router"
)

// Conventions are headers and metadata that another endpoint picker reads and writes, beside those of the protocol. The
// zero value has none. No flag sets them.
//
// Source: llm-d-router v0.11, pkg/epp/metadata, pkg/common/routing.
type Conventions struct {
	// ModelHeaders replace a request's model; the first has precedence. They and PickerHeaders do not reach endpoints.
	// In lower case.
	ModelHeaders, PickerHeaders []string
	// SessionHeaders name a request's session, if the headers that kvepp knows do not. In lower case.
	SessionHeaders []string
	// TokenHeader names, in a response, its endpoint as base64 of TokenNamespace/NAME. A request with it goes there;
	// with TokenSoft elsewhere while the endpoint is overloaded. In lower case; empty: none.
	TokenHeader, TokenNamespace string
	TokenSoft                   bool
	// EndpointScores writes a score for each endpoint of a decision into the metadata: 1 / (1 + cost).
	EndpointScores bool
	// PrimaryPort is the port of a host to which its requests go; a header names the endpoint. 0: requests go there.
	PrimaryPort int
}

const (
	scoresKey          = "x-gateway-destination-endpoint-scores"
	dataParallelHeader = "x-data-parallel-host-port"
)

// named is what a request's headers say by Conventions.
type named struct {
	model    string // replaces the body's; empty: it stays
	endpoint string // to return to; empty: none
}

// readNamed reads the headers of Conventions.
func (s *stream) readNamed(m *corev3.HeaderMap) {
	c := &s.cfg.Conventions
	if len(c.ModelHeaders)+len(c.SessionHeaders) == 0 && c.TokenHeader == "" {
		return
	}
	preferred := len(c.ModelHeaders)
	for _, v := range m.GetHeaders() {
		name, value := strings.ToLower(v.GetKey()), strings.TrimSpace(headerValue(v))
		if i := slices.Index(c.ModelHeaders, name); i >= 0 && i < preferred && value != "" {
			s.head.named.model, preferred = value, i
		}
		if name == c.TokenHeader && name != "" {
			if token, err := base64.StdEncoding.DecodeString(value); err == nil {
				s.head.named.endpoint = string(token[strings.LastIndexByte(string(token), '/')+1:])
			}
		}
		if s.head.hints.Session == "" && slices.Contains(c.SessionHeaders, name) {
			s.head.hints.Session = value
		}
	}
}

// token returns the text that names an endpoint in TokenHeader.
func (c *Conventions) token(endpoint string) string {
	return base64.StdEncoding.EncodeToString([]byte(c.TokenNamespace + "/" + endpoint))
}

// sentTo returns where a request for an endpoint goes.
func (c *Conventions) sentTo(address string) string {
	host, _, err := net.SplitHostPort(address)
	if c.PrimaryPort == 0 || err != nil {
		return address
	}
	return net.JoinHostPort(host, strconv.Itoa(c.PrimaryPort))
}

// servedAt returns the endpoint behind the address that served a request: that of the decision, if it was sent there.
func (s *stream) servedAt(address string) string {
	if s.cfg.PrimaryPort > 0 && s.decision != nil && address == s.cfg.sentTo(s.decision.Address) {
		return s.decision.Address
	}
	return address
}

// scores returns the scores of a decision's endpoints, by address.
func scores(d *router.Decision) *structpb.Value {
	score := func(cost float64) *structpb.Value {
		if math.IsNaN(cost) || math.IsInf(cost, 0) {
			return structpb.NewNumberValue(0)
		}
		return structpb.NewNumberValue(1 / (1 + max(cost, 0)))
	}
	fields := map[string]*structpb.Value{d.Address: score(d.Cost)}
	for i, address := range d.Fallbacks {
		fields[address] = score(d.FallbackCosts[i])
	}
	return structpb.NewStructValue(&structpb.Struct{Fields: fields})
}
