package listen

import (
	"context"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"

	"kvepp/internal/connlimit"
	"kvepp/internal/metrics"
	"kvepp/serve/logs"
	"kvepp/serve/secrets"
)

// Limits on the resources that a client of an HTTP listener can hold.
const (
	leastWebConnections = 32
	mostWebConnections  = 256
	maxWebHeader        = 64 << 10 // bytes of a request's headers
	webHeaderWithin     = 10 * time.Second
	webRequestWithin    = 60 * time.Second // to send the whole request, and to receive the response
	webIdle             = 5 * time.Minute
	maxMetricsReadings  = 32 // concurrent requests for the metrics page
)

// webConnections is the limit on the connections of an HTTP listener: a sixteenth of the process's file descriptors.
func webConnections() int { return connlimit.Share(16, leastWebConnections, mostWebConnections) }

// Hosts are the names that HTTP requests over loopback may give in their Host header.
type Hosts struct{ names []string }

// AddFlags declares the flag.
func (h *Hosts) AddFlags(fs *pflag.FlagSet) {
	fs.StringSliceVar(&h.names, "allowed-hosts", nil,
		"`NAMES`, separated by commas, that HTTP requests over loopback may give in their Host header, besides "+
			"localhost and loopback addresses. kvepp refuses other names, because a page in a browser can make a "+
			"name of its own resolve to this machine (DNS rebinding)")
}

// guard rejects requests over loopback whose Host header does not name this machine. Otherwise a web page in a browser
// on this machine could resolve its own name to 127.0.0.1 and read the responses as its own (DNS rebinding); its
// requests carry that name in the Host header.
func (h *Hosts) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr); ok && isLoopback(local) &&
			!h.allowed(req.Host) {
			http.Error(w, fmt.Sprintf("the header Host names %.100q: over loopback it must be localhost, a loopback "+
				"address, or a name of --allowed-hosts", req.Host), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, req)
	})
}

func isLoopback(a net.Addr) bool {
	tcp, ok := a.(*net.TCPAddr)
	return ok && tcp.IP.IsLoopback()
}

// allowed reports whether a request may have this Host header. Browsers never send an empty one.
func (h *Hosts) allowed(header string) bool {
	host := header
	if name, _, err := net.SplitHostPort(header); err == nil {
		host = name
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || host == "localhost" ||
		slices.ContainsFunc(h.names, func(name string) bool { return strings.EqualFold(name, host) }) {
		return true
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return err == nil && ip.Unmap().IsLoopback()
}

// WebServer returns a server that slow clients cannot block: a request must arrive, and its response be received,
// within a minute. Long operations, such as a dump, set their own deadlines. Web pages in a browser cannot change
// anything.
func WebServer(h http.Handler, hosts *Hosts) *http.Server {
	return &http.Server{
		Handler:           hosts.guard(http.NewCrossOriginProtection().Handler(h)),
		ReadHeaderTimeout: webHeaderWithin,
		ReadTimeout:       webRequestWithin,
		WriteTimeout:      webRequestWithin,
		IdleTimeout:       webIdle,
		MaxHeaderBytes:    maxWebHeader,
		ErrorLog:          logs.HTTPErrors(),
	}
}

// MetricsPage handles requests for metrics. Readers that do not read make room for others. An invalid
// series does not hide the others.
func MetricsPage(m *metrics.Metrics) http.Handler {
	busy := func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "other readers take all places; try again later", http.StatusServiceUnavailable)
	}
	page := promhttp.HandlerFor(m.Gatherer(), promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
	return connlimit.Limit(page.ServeHTTP, busy, maxMetricsReadings, connlimit.LeastWait)
}

// serveWeb serves a listener with a bounded number of connections. name is its label in metrics.
func serveWeb(s *http.Server, l net.Listener, name string, m *metrics.Metrics) error {
	connlimit.HTTP(s)
	return s.Serve(Limit(l, name, webConnections(), m))
}

// Web are the settings of a service that is reached over HTTP alone.
type Web struct {
	Host string
	Port uint16
	Hosts
}

// AddFlags declares the flags. port is the default.
func (w *Web) AddFlags(fs *pflag.FlagSet, port uint16) {
	fs.StringVar(&w.Host, "host", "0.0.0.0", "`ADDRESS` to listen on")
	fs.Uint16Var(&w.Port, "port", port, "`PORT` to listen on")
	w.Hosts.AddFlags(fs)
}

// Validate checks the flags.
func (w *Web) Validate() error {
	if w.Port == 0 {
		return errors.New("--port 0: must be from 1 to 65535")
	}
	return nil
}

// Serve handles requests with h until ctx ends, then lets running requests end. what names their purpose in the log.
func (w *Web) Serve(ctx context.Context, what string, h http.Handler, m *metrics.Metrics, log *slog.Logger) error {
	server := WebServer(h, &w.Hosts)
	l, err := At("port", net.JoinHostPort(w.Host, strconv.Itoa(int(w.Port))))
	if err != nil {
		return err
	}
	log.Info("listening", "for", what, "address", l.Addr().String(), "tls", "off")
	failed := make(chan error, 1)
	go func() { failed <- serveWeb(server, l, "http", m) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	log.Info("kvepp stops: running requests have 5 s to end")
	last, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	return server.Shutdown(last)
}

// Guarded passes requests with the right token, and health requests. With a nil token it passes all.
func Guarded(next http.Handler, token *secrets.Token) http.Handler {
	if token == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		given, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		if req.URL.Path != "/health" &&
			!(bearer && subtle.ConstantTimeCompare([]byte(given), []byte(token.Text())) == 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(w, "the header \"Authorization: Bearer TOKEN\" must have this address's token "+
				"(--admin-token-file, --metrics-token-file)", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// HandleProfiles serves /debug/pprof/ for `go tool pprof`, but not the command line, which may hold a password.
func HandleProfiles(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof/", pprof.Index) // also serves the named profiles below it
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
}
