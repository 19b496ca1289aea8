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
	// maxNameSuffix bounds what kvepp itself appends to a name, in bytes: a rank, a port, an instance id.
	maxNameSuffix = 32
)

// CheckName returns an error if name cannot be an endpoint's name. Names appear in logs, metric labels, headers and
// paths.
func CheckName(name string) error { return checkName(name, MaxName) }

func checkName(name string, maxBytes int) error {
	switch {
	case name == "":
		return fmt.Errorf("every endpoint needs a name")
	case len(name) > maxBytes:
		return fmt.Errorf("the name %.40q... is longer than %d bytes", name, maxBytes)
	case !utf8.ValidString(name):
		return fmt.Errorf("the name %.100q is not UTF-8", name)
	case strings.ContainsFunc(name, func(c rune) bool { return unicode.IsSpace(c) || !unicode.IsPrint(c) }):
		return fmt.Errorf("the name %.100q has a space or a control character", name)
	}
	return nil
}

// CheckText returns an error if text cannot be a text of an endpoint, such as its model. An empty text is valid.
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

// checkHost returns an error if host is neither an IP address, with or without a zone, nor a host name.
func checkHost(host string) error {
	bad := func(c rune) bool {
		return !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' ||
			c == '.')
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		if strings.ContainsFunc(ip.Zone(), bad) || len(ip.Zone()) > maxLabel {
			return fmt.Errorf(
				"%.100q: the zone of the IP address is too long, or has a character that interface names do not have",
				host)
		}
		return nil
	}
	if len(host) > maxHost {
		return fmt.Errorf("the host %.40q... is longer than %d bytes", host, maxHost)
	}
	if strings.ContainsFunc(host, bad) {
		return fmt.Errorf(
			"the host %.100q has a character that no host name has: use letters, digits, \"-\", \"_\" and \".\"", host)
	}
	for label := range strings.SplitSeq(strings.TrimSuffix(host, "."), ".") {
		if label == "" || len(label) > maxLabel {
			return fmt.Errorf("the host %.100q: each part between dots must have from 1 to %d characters",
				host, maxLabel)
		}
	}
	return nil
}

// checkPage returns an error if text is not the URL of a metrics page.
func checkPage(text string) error {
	u, err := url.Parse(text)
	if err != nil || len(text) > MaxText || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" ||
		strings.ContainsAny(text, " \t") ||
		checkHost(u.Hostname()) != nil {
		return fmt.Errorf("%.100q must look like http://HOST:PORT/metrics", text)
	}
	return nil
}

// Check returns an error if a name, an address or a text of the endpoint is invalid. Every source of endpoints must
// drop such endpoints.
func (e *Endpoint) Check() error {
	if err := checkName(e.Name, MaxName+maxNameSuffix); err != nil {
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
			if err := CheckText(c.ZMQ + c.Brokers + c.Subject + c.Query); err != nil {
				return fmt.Errorf("event channel: %w", err)
			}
		}
	}
	return nil
}
