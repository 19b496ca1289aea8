package envoy

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"kvepp/internal/boundedfile"
	"kvepp/internal/flags"
	"kvepp/pool"
)

// Help is the beginning of the help of `kvepp envoy`.
const Help = `Print an Envoy configuration for the endpoints of a file, so that you write their addresses once.

Usage:       kvepp envoy --endpoints FILE [flags]
Example:     kvepp envoy --endpoints endpoints.yaml --engine vllm >envoy.yaml && envoy -c envoy.yaml
Exit status: 0 if printed, 1 if the endpoints file cannot be used, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

Give --engine and --endpoints the values that kvepp serve has. For stock engines, start kvepp serve
with --fallback-endpoints 2. Print the file again when the endpoints change, and restart Envoy.
`

// dynamo is the engine whose frontends need no retries by Envoy.
const dynamo = "dynamo"

var (
	engines  = []string{"vllm", "sglang", "trtllm", dynamo}
	families = []string{"V4_ONLY", "V6_ONLY", "V4_PREFERRED", "ALL", "AUTO"}
)

// Config are the flags of `kvepp envoy`.
type Config struct {
	endpoints, engine, kvepp, family, engineCA string
	port, adminPort                            uint16
	secure, engineTLS, shadow                  bool
}

// AddFlags declares the flags.
func (c *Config) AddFlags(f *pflag.FlagSet) {
	f.StringVar(&c.endpoints, "endpoints", "", "the endpoints `FILE` of kvepp serve")
	f.StringVar(&c.engine, "engine", "",
		"the `ENGINE` behind the endpoints: vllm, sglang, trtllm or dynamo (default: dynamo if an endpoint has the "+
			"key dynamo, else vllm). For all but dynamo Envoy retries failed requests on the next endpoints, and "+
			"serves without kvepp while kvepp is unavailable")
	flags.Values(f, "engine", engines...)
	f.BoolVar(&c.shadow, "shadow", false,
		"Envoy sends requests round robin and shows them to kvepp serve --shadow (docs/shadow.md)")
	f.Uint16Var(&c.port, "listen-port", 10080, "`PORT` for clients, on all addresses")
	f.Uint16Var(&c.adminPort, "envoy-admin-port", 19900,
		"`PORT` of Envoy's own admin interface, on 127.0.0.1; 0: none")
	f.StringVar(&c.kvepp, "kvepp-address", "127.0.0.1:9002", "`HOST:PORT` of kvepp serve: its --grpc-port")
	f.BoolVar(&c.secure, "secure-serving", true, "kvepp serve uses TLS: the value of its own --secure-serving")
	flags.Inherit(f, "secure-serving", "DYN_SECURE_SERVING")
	f.StringVar(&c.family, "dns-lookup-family", "V4_ONLY",
		"with host names: `FAMILY` of the addresses that Envoy resolves: V4_ONLY, V6_ONLY, V4_PREFERRED, ALL or AUTO. "+
			"Give kvepp serve the same")
	f.BoolVar(&c.engineTLS, "engine-tls", false, "the endpoints use TLS")
	f.StringVar(&c.engineCA, "engine-ca", "",
		"with --engine-tls: `FILE` with the authority of the endpoints' certificates, at the path where Envoy finds "+
			"it. Empty: Envoy does not verify them")
}

// Validate checks the flags.
func (c *Config) Validate() error {
	switch {
	case c.endpoints == "":
		return errors.New("give the endpoints file: --endpoints FILE")
	case c.engine != "" && !slices.Contains(engines, c.engine):
		return fmt.Errorf("--engine %s: give one of %s", c.engine, strings.Join(engines, ", "))
	case !slices.Contains(families, c.family):
		return fmt.Errorf("--dns-lookup-family %s: give one of %s", c.family, strings.Join(families, ", "))
	case c.port == 0:
		return errors.New("--listen-port: must be at least 1")
	case c.engineCA != "" && !c.engineTLS:
		return errors.New("--engine-ca: give --engine-tls too")
	}
	if err := pool.CheckHostPort(c.kvepp); err != nil {
		return fmt.Errorf("--kvepp-address: %w", err)
	}
	return nil
}

// Run prints the configuration for the endpoints of the file.
func (c *Config) Run(to io.Writer) error {
	text, err := boundedfile.Read(c.endpoints, pool.MaxFile)
	if err != nil {
		return fmt.Errorf("--endpoints %s: %w", c.endpoints, err)
	}
	entries, err := pool.ParseFile(text)
	if err == nil {
		var config string
		if config, err = c.configuration(entries); err == nil {
			_, err = io.WriteString(to, config)
			return err
		}
	}
	return fmt.Errorf("--endpoints %s: %w", c.endpoints, err)
}

// Lines of the configurations that `kvepp envoy` replaces. A test checks that each occurs once.
const (
	adminLines    = "admin:\n  address: {socket_address: {address: 127.0.0.1, port_value: 19900}}\n"
	listenerPort  = "port_value: 10080}}"
	poolHead      = "  - name: pool\n    type: STATIC\n"
	poolAddresses = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8001}}}\n" +
		"        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8002}}}\n"
	pickerHead    = "  - name: kvepp\n    type: STATIC\n"
	pickerAddress = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9002}}}\n"
	tlsLines      = "    transport_socket:\n      name: envoy.transport_sockets.tls\n      typed_config:\n" +
		"        \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext\n" +
		"        common_tls_context: {alpn_protocols: [h2], validation_context: {}}\n"
	tlsReason = "    # kvepp's certificate is self-signed, so Envoy cannot verify it with an authority." +
		tlsAdvice
	tlsAdvice = " Remove this for `kvepp serve\n    # --secure-serving=false`.\n"
)

// configuration returns Envoy's configuration for the endpoints.
func (c *Config) configuration(entries []pool.Entry) (string, error) {
	addresses, named := addressesOf(entries)
	if len(addresses) == 0 {
		return "", errors.New("no endpoint has an address")
	}
	base, comment := OverrideHost, ""
	dynamos := c.engine == dynamo ||
		c.engine == "" && slices.ContainsFunc(entries, func(e pool.Entry) bool { return e.Dynamo != "" })
	if c.shadow {
		base, comment = Shadow, " Start kvepp serve with --shadow."
	} else if !dynamos {
		base, comment = StockEngines, " Start kvepp serve with --fallback-endpoints 2."
	}
	if at := strings.Index(base, "admin:\n"); at >= 0 { // the comment before it is for people who adapt the file
		base = base[at:]
	}
	var list strings.Builder
	for _, a := range addresses {
		fmt.Fprintf(&list, "        - endpoint: %s\n", socketAddress(a))
	}
	admin, picker := "", c.secureKvepp()
	if c.adminPort != 0 {
		admin = strings.Replace(adminLines, "19900", strconv.Itoa(int(c.adminPort)), 1)
	}
	pairs := []string{
		adminLines, admin,
		listenerPort, fmt.Sprintf("port_value: %d}}", c.port),
		poolHead, clusterHead("pool", named, c.family) + c.engineSocket(),
		poolAddresses, list.String(),
		pickerHead, clusterHead("kvepp", isName(c.kvepp), c.family),
		pickerAddress, fmt.Sprintf("        - endpoint: %s\n", socketAddress(c.kvepp)),
		tlsReason + tlsLines, picker,
	}
	return fmt.Sprintf("# Written by kvepp envoy for %d endpoints of %s.%s\n", len(addresses), c.endpoints, comment) +
		strings.NewReplacer(pairs...).Replace(base), nil
}

// addressesOf returns the addresses of endpoints, each once, and whether one is a host name.
func addressesOf(entries []pool.Entry) (addresses []string, named bool) {
	for i := range entries {
		a := entries[i].Address
		if a == "" || slices.Contains(addresses, a) {
			continue
		}
		addresses = append(addresses, a)
		named = named || isName(a)
	}
	return addresses, named
}

// isName reports whether an address has a host name.
func isName(address string) bool {
	_, err := netip.ParseAddrPort(address)
	return err != nil
}

// socketAddress returns an address in Envoy's form. Its text was checked by pool.CheckHostPort.
func socketAddress(address string) string {
	host, port, _ := net.SplitHostPort(address)
	return fmt.Sprintf("{address: {socket_address: {address: %s, port_value: %s}}}", strconv.Quote(host), port)
}

func clusterHead(name string, named bool, family string) string {
	if named {
		return fmt.Sprintf("  - name: %s\n    type: STRICT_DNS\n    dns_lookup_family: %s\n", name, family)
	}
	return fmt.Sprintf("  - name: %s\n    type: STATIC\n", name)
}

// secureKvepp returns the part about TLS to kvepp.
func (c *Config) secureKvepp() string {
	if !c.secure {
		return ""
	}
	return strings.TrimSuffix(tlsReason, tlsAdvice) + "\n" + tlsLines
}

// engineSocket returns the part about TLS to the endpoints.
func (c *Config) engineSocket() string {
	if !c.engineTLS {
		return ""
	}
	validation := "validation_context: {}"
	if c.engineCA != "" {
		validation = fmt.Sprintf("validation_context: {trusted_ca: {filename: %s}}", strconv.Quote(c.engineCA))
	}
	return strings.Replace(tlsLines, "alpn_protocols: [h2], validation_context: {}", validation, 1)
}
