package main

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
)

// Bounds on what a client of an HTTP listener can hold.
const (
	leastWebConnections = 32
	mostWebConnections  = 256
	maxWebHeader        = 64 << 10 // bytes of a request's headers
	webHeaderWithin     = 10 * time.Second
	webRequestWithin    = 60 * time.Second // for the whole request, and for taking its answer
	webIdle             = 5 * time.Minute
	maxMetricsReadings  = 32 // of the metrics page at once
)

// webConnections is how many connections an HTTP listener may have: a sixteenth of the process's file descriptors.
func webConnections() int { return connlimit.Share(16, leastWebConnections, mostWebConnections) }

// webHosts are the names that requests may give in their header Host, where they come over loopback.
type webHosts struct{ names []string }

func (o *webHosts) add(f *pflag.FlagSet) {
	f.StringSliceVar(
		&o.names,
		"allowed-hosts",
		nil,
		"`NAMES`, separated by commas, that HTTP requests over loopback may have in their header Host, beside "+
			"localhost and loopback addresses. Other names are refused, since a page in a browser could have made "+
			"its own name lead here",
	)
}

// guard lets requests over loopback through that name a host of this machine. A page in a browser on this machine could
// make its own name lead to 127.0.0.1 and then read answers as its own (DNS rebinding); its requests have that name in
// their header Host.
func (o *webHosts) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && isLoopback(local) &&
			!o.allowed(req.Host) {
			http.Error(
				w,
				fmt.Sprintf(
					"the header Host names %.100q: over loopback it must be localhost, a loopback address, or a name "+
						"of --allowed-hosts",
					req.Host,
				),
				http.StatusForbidden,
			)
			return
		}
		next.ServeHTTP(w, req)
	})
}

func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// allowed reports whether a request may have the header Host. An empty one comes from no browser.
func (o *webHosts) allowed(header string) bool {
	host := header
	if h, _, err := net.SplitHostPort(header); err == nil {
		host = h
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || host == "localhost" ||
		slices.ContainsFunc(o.names, func(name string) bool { return strings.EqualFold(name, host) }) {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && ip.Unmap().IsLoopback()
}

// webServer returns a server whose clients cannot hold it up: a request must come, and its answer be taken, within a
// minute. What takes longer by nature, as a dump does, sets deadlines of its own. Pages in a browser cannot have it
// change anything.
func webServer(h http.Handler, hosts *webHosts) *http.Server {
	h = hosts.guard(http.NewCrossOriginProtection().Handler(h))
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: webHeaderWithin,
		ReadTimeout:       webRequestWithin,
		WriteTimeout:      webRequestWithin,
		IdleTimeout:       webIdle,
		MaxHeaderBytes:    maxWebHeader,
		ErrorLog:          httpErrors(),
	}
}

// serveWeb has a server answer at a listener of a bounded number of connections, which metrics call by a name.
func serveWeb(s *http.Server, l net.Listener, name string, m *metrics.Metrics) error {
	connlimit.HTTP(s)
	return s.Serve(limited(l, name, webConnections(), m))
}
