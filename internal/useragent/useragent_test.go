package useragent

import (
	"net/http"
	"testing"
)

func TestSet(t *testing.T) {
	t.Cleanup(func() { Set("") })
	for version, want := range map[string]string{
		"":                       "kvepp",
		"v1.2.3":                 "kvepp/1.2.3",
		"v1.2.3-rc.1+dirty":      "kvepp/1.2.3-rc.1+dirty",
		"(devel)":                "kvepp/devel",
		"v":                      "kvepp/v",
		"vendor":                 "kvepp/vendor",
		"1.0\r\nHost: elsewhere": "kvepp/1.0Hostelsewhere",
		"\x00/":                  "kvepp",
	} {
		Set(version)
		if Text() != want {
			t.Errorf("%q: %q, want %q", version, Text(), want)
		}
		r := &http.Request{Header: http.Header{"User-Agent": {"another"}}}
		if Add(r); r.Header.Get("User-Agent") != want {
			t.Errorf("%q: header %q", version, r.Header)
		}
	}
}
