// Package useragent names kvepp, with its version, to the servers that it sends HTTP and gRPC requests to, and to NATS
// servers. It sends nothing itself. All functions are safe for concurrent use.
package useragent

import (
	"net/http"
	"strings"
	"sync/atomic"
)

const name = "kvepp"

// text is the value of the header; nil before Set, which the start of the process calls.
var text atomic.Pointer[string]

// Set sets the version of this kvepp, such as "v1.2.3" or "(devel)". Characters that the header may not have in a
// version are left out (RFC 9110, section 5.6.2). Without a version, the name stands alone.
func Set(version string) {
	version = strings.Map(func(r rune) rune {
		switch {
		case r >= '0' && r <= '9', r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z',
			strings.ContainsRune("!#$%&'*+-.^_`|~", r):
			return r
		}
		return -1
	}, version)
	if len(version) > 1 && version[0] == 'v' && version[1] >= '0' && version[1] <= '9' {
		version = version[1:]
	}
	value := name
	if version != "" {
		value += "/" + version
	}
	text.Store(&value)
}

// Text returns the value of the header User-Agent: kvepp/1.2.3.
func Text() string {
	if value := text.Load(); value != nil {
		return *value
	}
	return name
}

// Add sets the header User-Agent of a request.
func Add(r *http.Request) { r.Header.Set("User-Agent", Text()) }
