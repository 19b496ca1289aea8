package main

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"net/url"
	"strings"
)

// checkListeners refuses an admin address that anybody could reach: it tells what workers hold, and changes thresholds.
func (o *options) checkListeners() error {
	if o.adminAddress != "" {
		host, _, err := net.SplitHostPort(o.adminAddress)
		if err != nil {
			return fmt.Errorf("--admin-address %q: must look like HOST:PORT", o.adminAddress)
		}
		if ip := net.ParseIP(host); host != "localhost" && !ip.IsLoopback() && o.adminTokenFile == "" {
			return fmt.Errorf(
				"--admin-address %s can be reached from elsewhere, and nothing guards it: give --admin-token-file as "+
					"well, or listen at 127.0.0.1",
				o.adminAddress,
			)
		}
	}
	if o.enablePprof && o.adminAddress == "" {
		return errors.New(
			"--enable-pprof: profiles are shown on the admin address; give --admin-address too, 127.0.0.1:9091 for " +
				"example",
		)
	}
	metricsPort := o.metricsPort
	if o.metricsAddress != "" {
		metricsPort = 0
	}
	switch {
	case o.grpcPort == o.grpcHealthPort:
		return fmt.Errorf("--grpc-port and --grpc-health-port are both %d; give each a port of its own", o.grpcPort)
	case metricsPort == o.grpcPort:
		return fmt.Errorf("--metrics-port and --grpc-port are both %d; give each a port of its own", metricsPort)
	case metricsPort == o.grpcHealthPort:
		return fmt.Errorf("--metrics-port and --grpc-health-port are both %d; give each a port of its own", metricsPort)
	case o.metricsAddress == "":
		return nil
	}
	if _, _, err := net.SplitHostPort(o.metricsAddress); err != nil {
		return fmt.Errorf("--metrics-address %q: must look like HOST:PORT", o.metricsAddress)
	}
	return nil
}

// checkPeers says which of the URLs is none.
func checkPeers(flag string, peers []string) error {
	for _, peer := range peers {
		if u, err := url.Parse(peer); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" ||
			u.User != nil {
			return fmt.Errorf("%s: each URL must look like http://HOST:PORT", flag)
		}
	}
	return nil
}

// guarded lets requests through that bring the token, and whoever asks for health. nil asks for none.
func guarded(next http.Handler, token *tokenFile) http.Handler {
	if token == nil {
		return next
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		given, bearer := strings.CutPrefix(req.Header.Get("Authorization"), "Bearer ")
		if req.URL.Path != "/health" &&
			!(bearer && subtle.ConstantTimeCompare([]byte(given), []byte(token.token())) == 1) {
			w.Header().Set("WWW-Authenticate", "Bearer")
			http.Error(
				w,
				"the header \"Authorization: Bearer TOKEN\" must bring this address's token (--admin-token-file, "+
					"--metrics-token-file)",
				http.StatusUnauthorized,
			)
			return
		}
		next.ServeHTTP(w, req)
	})
}

// handleProfiles answers what `go tool pprof` asks for, at /debug/pprof/. Not the command line, which may hold a
// password.
func handleProfiles(mux *http.ServeMux) {
	mux.HandleFunc("/debug/pprof/", pprof.Index) // and the named profiles below it
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
}
