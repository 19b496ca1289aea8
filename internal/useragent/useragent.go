// Package useragent names kvepp, with its version, to the servers that it sends HTTP and gRPC requests to. It sends
// nothing itself. Set may not be called beside the other functions, which are safe for concurrent use.
package useragent

import (
	"net/http"
	"strings"
)

// text is the value of the header. Set changes it at the start of the process.
var text = "kvepp"

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
	text = "kvepp"
	if version != "" {
		text += "/" + version
	}
}

// Text returns the value of the header User-Agent: kvepp/1.2.3.
func Text() string { return text }

// Add sets the header User-Agent of a request.
func Add(r *http.Request) { r.Header.Set("User-Agent", text) }
