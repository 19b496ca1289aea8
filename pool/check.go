package pool

import (
	"fmt"
	"net/netip"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	// MaxName bounds an endpoint's name, in bytes, as Kubernetes bounds a Pod's.
	MaxName = 253
	// MaxText bounds each other text of an endpoint, in bytes.
	MaxText = 1024
	// maxHost and maxLabel bound a host name and each part of it, in bytes. Source: RFC 1035, section 2.3.4.
	maxHost, maxLabel = 253, 63
	// madeName is what kvepp itself puts behind a name, at most: a rank, a port, an instance id.
	madeName = 32
)

// CheckName says what is wrong with an endpoint's name, nil when nothing is. Names are in logs, in labels of metrics,
// in headers and in paths.
func CheckName(name string) error { return checkName(name, MaxName) }

func checkName(name string, most int) error {
	switch {
	case name == "":
		return fmt.Errorf("every endpoint needs a name")
	case len(name) > most:
		return fmt.Errorf("the name %.40q... is longer than %d bytes", name, most)
	case !utf8.ValidString(name):
		return fmt.Errorf("the name %.100q is not UTF-8", name)
	case strings.ContainsFunc(name, func(c rune) bool { return unicode.IsSpace(c) || !unicode.IsPrint(c) }):
		return fmt.Errorf("the name %.100q has a space or a control character", name)
	}
	return nil
}

// CheckText says what is wrong with another text of an endpoint, such as its model: nil when nothing is. An empty one
// is right.
func CheckText(text string) error {
	switch {
	case len(text) > MaxText:
		return fmt.Errorf("%.40q... is longer than %d bytes", text, MaxText)
	case !utf8.ValidString(text):
		return fmt.Errorf("%.100q is not UTF-8", text)
	case strings.ContainsFunc(text, func(c rune) bool { return c != ' ' && !unicode.IsPrint(c) }):
		return fmt.Errorf("%.100q has a control character", text)
	}
	return nil
}

// checkHost says what is wrong with a host: it must be an IP address, perhaps with a zone, or a host name.
func checkHost(host string) error {
	bad := func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' ||
			c == '.')
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if strings.ContainsFunc(ip.Zone(), bad) || len(ip.Zone()) > maxLabel {
			return fmt.Errorf(
				"%.100q: the zone of the IP address has a character that no network interface has in its name",
				host,
			)
		}
		return nil
	}
	if len(host) > maxHost {
		return fmt.Errorf("the host %.40q... is longer than %d bytes", host, maxHost)
	}
	if strings.ContainsFunc(host, bad) {
		return fmt.Errorf(
			"the host %.100q has a character that no host name has: letters, digits, \"-\", \"_\" and \".\" are "+
				"possible",
			host,
		)
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(host, "."), ".") {
		if label == "" || len(label) > maxLabel {
			return fmt.Errorf(
				"the host %.100q: each part between dots must have from 1 to %d characters",
				host,
				maxLabel,
			)
		}
	}
	return nil
}

// checkPage says what is wrong with the URL of a metrics page.
func checkPage(text string) error {
	u, err := url.Parse(text)
	if err != nil || len(text) > MaxText || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" ||
		strings.ContainsAny(text, " \t") ||
		checkHost(u.Hostname()) != nil {
		return fmt.Errorf("%.100q must look like http://HOST:PORT/metrics", text)
	}
	return nil
}

// Check says what is wrong with the names, addresses and texts of an endpoint, nil when nothing is. Every source of
// endpoints has to leave out those of which it says something.
func (e *Endpoint) Check() error {
	if err := checkName(e.Name, MaxName+madeName); err != nil {
		return err
	}
	if e.Address != "" || e.Role != Prefill {
		if err := CheckHostPort(e.Address); err != nil {
			return fmt.Errorf("address: %w", err)
		}
	}
	for _, address := range [...]string{e.KVEvents, e.KVReplay} {
		if address != "" {
			if err := CheckTCP(address, e.DataParallelSize); err != nil {
				return fmt.Errorf("kvEvents and kvReplay: %w", err)
			}
		}
	}
	if e.Metrics != "" {
		if err := checkPage(e.Metrics); err != nil {
			return fmt.Errorf("metrics: %w", err)
		}
	}
	for _, t := range [...]struct{ what, text string }{{"model", e.Model}, {"namespace", e.Namespace},
		{"deviceType", e.DeviceType}, {"role", string(e.Role)},
		{"kvTopic", e.KVTopic}, {"transfer", e.Transfer.Taint}} {
		if err := CheckText(t.text); err != nil {
			return fmt.Errorf("%s: %w", t.what, err)
		}
	}
	for _, taint := range e.Taints {
		if err := CheckText(taint); err != nil {
			return fmt.Errorf("taints: %w", err)
		}
	}
	for _, channels := range [...][]EventChannel{e.EventChannels, e.LoadChannels} {
		for _, c := range channels {
			if err := CheckText(c.ZMQ + c.Subject); err != nil {
				return fmt.Errorf("event channel: %w", err)
			}
		}
	}
	return nil
}
