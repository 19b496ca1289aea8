package main

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
	"kvepp/manifests/envoy"
	"kvepp/pool"
	"kvepp/prompt"
)

const envoyHelp = `Print an Envoy configuration for the endpoints of a file, so that you write their addresses once.

Usage:       kvepp envoy --endpoints FILE [flags]
Example:     kvepp envoy --endpoints endpoints.yaml --engine vllm >envoy.yaml && envoy -c envoy.yaml
Exit status: 0 if printed, 1 if the endpoints file cannot be used, 2 for wrong usage
Precedence:  flag, variable KVEPP_<FLAG>, default

Give --engine and --endpoints the values that kvepp serve has. For stock engines, start kvepp serve
with --fallback-endpoints 2. Print the file again when the endpoints change, and restart Envoy.
`

// envoyOptions are the flags of `kvepp envoy`.
type envoyOptions struct {
	endpoints, engine, kvepp, family, engineCA string
	port, adminPort                            uint16
	secure, engineTLS                          bool
}

func envoyFlags(o *envoyOptions) *pflag.FlagSet {
	f := newFlags("kvepp envoy")
	f.StringVar(&o.endpoints, "endpoints", "", "the endpoints `FILE` of kvepp serve")
	f.StringVar(&o.engine, "engine", "",
		"the `ENGINE` behind the endpoints: vllm, sglang, trtllm or dynamo (default: dynamo if an endpoint has the "+
			"key dynamo, else vllm). For all but dynamo Envoy retries failed requests on the next endpoints, and "+
			"serves without kvepp while kvepp is unavailable")
	values(f, "engine", engineNames()...)
	f.Uint16Var(&o.port, "listen-port", 10080, "`PORT` for clients, on all addresses")
	f.Uint16Var(&o.adminPort, "envoy-admin-port", 19900,
		"`PORT` of Envoy's own admin interface, on 127.0.0.1; 0: none")
	f.StringVar(&o.kvepp, "kvepp-address", "127.0.0.1:9002", "`HOST:PORT` of kvepp serve: its --grpc-port")
	f.BoolVar(&o.secure, "secure-serving", true, "kvepp serve uses TLS: the value of its own --secure-serving")
	f.StringVar(&o.family, "dns-lookup-family", "V4_ONLY",
		"with host names: `FAMILY` of the addresses that Envoy resolves: V4_ONLY, V6_ONLY, V4_PREFERRED, ALL or AUTO. "+
			"Give kvepp serve the same")
	f.BoolVar(&o.engineTLS, "engine-tls", false, "the endpoints use TLS")
	f.StringVar(&o.engineCA, "engine-ca", "",
		"with --engine-tls: `FILE` with the authority of the endpoints' certificates, at the path where Envoy finds "+
			"it. Empty: Envoy does not verify them")
	section(f, "Flags of kvepp envoy")
	documentEnvironment(f, "")
	return f
}

func parseEnvoy(o *envoyOptions, args []string, getenv func(string) string) error {
	f := envoyFlags(o)
	if err := parseArgs(f, args); err != nil {
		return err
	}
	if err := fromEnvironment(f, getenv); err != nil {
		return err
	}
	families := []string{"V4_ONLY", "V6_ONLY", "V4_PREFERRED", "ALL", "AUTO"}
	switch {
	case f.NArg() > 0:
		return fmt.Errorf("unexpected argument %q", f.Arg(0))
	case o.endpoints == "":
		return errors.New("give the endpoints file: --endpoints FILE")
	case o.engine != "" && !slices.Contains(engineNames(), o.engine):
		return fmt.Errorf("--engine %s: give one of %s", o.engine, strings.Join(engineNames(), ", "))
	case !slices.Contains(families, o.family):
		return fmt.Errorf("--dns-lookup-family %s: give one of %s", o.family, strings.Join(families, ", "))
	case o.port == 0:
		return errors.New("--listen-port: must be at least 1")
	case o.engineCA != "" && !o.engineTLS:
		return errors.New("--engine-ca: give --engine-tls too")
	}
	if err := pool.CheckHostPort(o.kvepp); err != nil {
		return fmt.Errorf("--kvepp-address: %w", err)
	}
	return nil
}

// printEnvoy runs `kvepp envoy`. It returns the exit status.
func printEnvoy(args []string, stdout, stderr io.Writer, getenv func(string) string) int {
	var o envoyOptions
	switch err := parseEnvoy(&o, args, getenv); {
	case errors.Is(err, pflag.ErrHelp):
		showHelp(stdout, envoyFlags(new(envoyOptions)), err)
		return 0
	case err != nil:
		fmt.Fprintf(stderr, "kvepp envoy: %v\n\"kvepp envoy --help\" shows how to use it.\n", err)
		return 2
	}
	text, err := boundedfile.Read(o.endpoints, pool.MaxFile)
	if err == nil {
		var entries []pool.Entry
		if entries, err = pool.ParseFile(text); err == nil {
			var config string
			if config, err = o.configuration(entries); err == nil {
				_, err = io.WriteString(stdout, config)
			}
		}
	}
	if err != nil {
		fmt.Fprintf(stderr, "kvepp envoy: --endpoints %s: %v\n", o.endpoints, err)
		return 1
	}
	return 0
}

// Lines of the configurations in manifests/envoy that `kvepp envoy` replaces. A test checks that each occurs once.
const (
	envoyAdmin    = "admin:\n  address: {socket_address: {address: 127.0.0.1, port_value: 19900}}\n"
	envoyListener = "port_value: 10080}}"
	envoyPool     = "  - name: pool\n    type: STATIC\n"
	envoyPools    = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8001}}}\n" +
		"        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8002}}}\n"
	envoyPicker   = "  - name: kvepp\n    type: STATIC\n"
	envoyPickerAt = "        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 9002}}}\n"
	envoyTLS      = "    transport_socket:\n      name: envoy.transport_sockets.tls\n      typed_config:\n" +
		"        \"@type\": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext\n" +
		"        common_tls_context: {alpn_protocols: [h2], validation_context: {}}\n"
	envoyTLSReason = "    # kvepp's certificate is self-signed, so Envoy cannot verify it with an authority." +
		envoyTLSAdvice
	envoyTLSAdvice = " Remove this for `kvepp serve\n    # --secure-serving=false`.\n"
)

// configuration returns Envoy's configuration for the endpoints.
func (o *envoyOptions) configuration(entries []pool.Entry) (string, error) {
	addresses, named := addressesOf(entries)
	if len(addresses) == 0 {
		return "", errors.New("no endpoint has an address")
	}
	base, comment := envoy.OverrideHost, ""
	dynamos := o.engine == string(prompt.Dynamo) ||
		o.engine == "" && slices.ContainsFunc(entries, func(e pool.Entry) bool { return e.Dynamo != "" })
	if !dynamos {
		base, comment = envoy.StockEngines, " Start kvepp serve with --fallback-endpoints 2."
	}
	if at := strings.Index(base, "admin:\n"); at >= 0 { // the comment before it is for people who adapt the file
		base = base[at:]
	}
	var list strings.Builder
	for _, a := range addresses {
		fmt.Fprintf(&list, "        - endpoint: %s\n", envoyAddress(a))
	}
	admin, picker := "", o.secureKvepp()
	if o.adminPort != 0 {
		admin = strings.Replace(envoyAdmin, "19900", strconv.Itoa(int(o.adminPort)), 1)
	}
	pairs := []string{
		envoyAdmin, admin,
		envoyListener, fmt.Sprintf("port_value: %d}}", o.port),
		envoyPool, clusterHead("pool", named, o.family) + o.engineSocket(),
		envoyPools, list.String(),
		envoyPicker, clusterHead("kvepp", isName(o.kvepp), o.family),
		envoyPickerAt, fmt.Sprintf("        - endpoint: %s\n", envoyAddress(o.kvepp)),
		envoyTLSReason + envoyTLS, picker,
	}
	return fmt.Sprintf("# Written by kvepp envoy for %d endpoints of %s.%s\n", len(addresses), o.endpoints, comment) +
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

// envoyAddress returns an address in Envoy's form. Its text was checked by pool.CheckHostPort.
func envoyAddress(address string) string {
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
func (o *envoyOptions) secureKvepp() string {
	if !o.secure {
		return ""
	}
	return strings.TrimSuffix(envoyTLSReason, envoyTLSAdvice) + "\n" + envoyTLS
}

// engineSocket returns the part about TLS to the endpoints.
func (o *envoyOptions) engineSocket() string {
	if !o.engineTLS {
		return ""
	}
	validation := "validation_context: {}"
	if o.engineCA != "" {
		validation = fmt.Sprintf("validation_context: {trusted_ca: {filename: %s}}", strconv.Quote(o.engineCA))
	}
	return strings.Replace(envoyTLS, "alpn_protocols: [h2], validation_context: {}", validation, 1)
}
