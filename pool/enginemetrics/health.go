package enginemetrics

import (
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"kvepp/kvblock"
)

// PageState says whether the server behind a worker's metrics page is alive.
type PageState uint8

const (
	// PageUnknown: no read of the page has ended with a response or a refusal yet. Config.Health never receives it.
	PageUnknown PageState = iota
	// PageResponds: the server answered the last read, with any status and content.
	PageResponds
	// PageRefused: the host refuses TCP connections to the page's port, which is also the port of the worker's Address.
	PageRefused
	// PageRefusedElsewhere: the host refuses connections to the page's port, and the worker's Address is another host
	// or port.
	PageRefusedElsewhere
	// PageSilent: the server answered before, and has not answered for Config.SilentAfter since a read began.
	PageSilent
)

func (s PageState) String() string {
	return [...]string{"unknown", "answers", "refused", "refused_elsewhere", "silent"}[s]
}

const (
	defaultSilentAfter = 5 * time.Second

	// rereadAfter is the least time between the starts of two reads that ReadNow asks for. A page that may have just
	// died is read again after this time, then after twice as long, and so on up to the interval: of an engine's
	// processes, the one that publishes events may die some time before the one that serves the page.
	rereadAfter = 200 * time.Millisecond

	// slowRead is the duration after which a read does not use a slot for pages that answer any more.
	slowRead = 500 * time.Millisecond

	// maxStall is the delay of Run above which kvepp itself must have stalled, not the engines.
	maxStall = time.Second

	// maxTick bounds how late Run notices that a page is due or silent.
	maxTick = 100 * time.Millisecond
)

// pageHealth is what the reads of one page say about its server. Gauges.mu guards it. A page's targets share it while
// at least one worker stays the same.
type pageHealth struct {
	state       PageState // never PageRefusedElsewhere, which depends on the worker
	responded   bool      // at least once
	silentSince time.Time // start of the first read without a response since the last response; zero: none
	reported    bool      // Config.Health has the result of the latest read
	lastBegan   time.Time // when the latest read began
	reread      time.Duration
}

// began records the start of a read.
func (h *pageHealth) began(now time.Time) {
	h.lastBegan = now
	if h.silentSince.IsZero() {
		h.silentSince = now
	}
}

// ended records the result of a read that began at the given time. PageUnknown means neither a response nor a refusal.
func (h *pageHealth) ended(result PageState, began time.Time) {
	switch result {
	case PageUnknown:
		if h.silentSince.IsZero() {
			h.silentSince = began // another read of the page was answered in the meantime
		}
		if h.state == PageResponds && h.reread == 0 {
			h.reread = rereadAfter
		}
		return
	case PageResponds:
		h.responded = true
	case PageRefused:
		h.reread = 0
	}
	h.state, h.reported = result, false
	h.silentSince = time.Time{}
}

// becomesSilent reports whether the page has become silent by now.
func (h *pageHealth) becomesSilent(now time.Time, after time.Duration) bool {
	return h.responded && h.state != PageSilent && !h.silentSince.IsZero() && now.Sub(h.silentSince) >= after
}

// readResult returns what a read shows about the server: PageResponds, PageRefused or PageUnknown.
func readResult(how outcome, err error) PageState {
	switch how {
	case timedOut:
		return PageUnknown
	case unreachable:
		var untrusted *tls.CertificateVerificationError
		var noTLS tls.RecordHeaderError
		var alert tls.AlertError
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			return PageRefused
		case errors.As(err, &untrusted), errors.As(err, &noTLS), errors.As(err, &alert):
			return PageResponds
		}
		return PageUnknown
	}
	return PageResponds
}

// ReadNow makes the page of a worker due now, and several times soon after. If a read began less than 200 ms ago, the
// page is due 200 ms after that start. Call ReadNow when something else suggests that the engine died, such as the end
// of the worker's event subscription. It does nothing for a worker without a page.
func (g *Gauges) ReadNow(w kvblock.Worker) {
	if !g.makeDue(w, time.Now()) {
		return
	}
	g.wakeRun()
}

func (g *Gauges) makeDue(w kvblock.Worker, now time.Time) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if int(w) >= len(g.slots) {
		return false
	}
	t := g.targets[g.slots[w].page]
	if t == nil {
		return false
	}
	t.health.reread = rereadAfter
	if due := later(now, t.health.lastBegan.Add(rereadAfter)); due.Before(t.due) {
		t.due = due
	}
	return true
}

func (g *Gauges) wakeRun() {
	select {
	case g.wake <- struct{}{}:
	default: // a wake-up is pending
	}
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// checkReads finds the pages that have become silent, and moves slow reads out of the slots for pages that answer.
// Only Run's goroutine calls it, once a tick or more often.
func (g *Gauges) checkReads(now time.Time) {
	g.mu.Lock()
	defer g.mu.Unlock()
	stall := time.Duration(0)
	if late := now.Sub(g.checked); !g.checked.IsZero() && late > maxStall {
		// kvepp itself stalled, so the delay does not count as silence of the engines.
		stall = late
	}
	g.checked = now
	for _, t := range g.targets {
		h := t.health
		if stall > 0 && !h.silentSince.IsZero() {
			h.silentSince = h.silentSince.Add(stall)
		}
		if h.becomesSilent(now, g.cfg.SilentAfter) {
			h.state, h.reported = PageSilent, false
			g.mustReport(t)
		}
		if t.busy && t.slotClass == 0 && now.Sub(t.began) > slowRead {
			g.reading[0]--
			g.reading[1]++
			t.slotClass = 1
		}
	}
}

// mustReport makes report call Config.Health for a page, if its state is new or confirmed. The caller holds g.mu.
func (g *Gauges) mustReport(t *target) {
	if g.cfg.Health != nil && !t.health.reported && t.health.state != PageUnknown {
		g.unreported = append(g.unreported, t.url)
	}
}

// report calls Config.Health for the pages that were read. Only Run's goroutine calls it, while it holds the snapshot
// that the targets are for: no worker number can go to another worker before the calls return.
func (g *Gauges) report() {
	type change struct {
		worker kvblock.Worker
		state  PageState
	}
	var all []change
	g.mu.Lock()
	for _, url := range g.unreported {
		t := g.targets[url]
		// The pool has changed, or the page is listed twice.
		if t == nil || t.health.reported || t.health.state == PageUnknown {
			continue
		}
		t.health.reported = true
		for i := range t.members {
			m := &t.members[i]
			if g.slot(m.worker).generation != m.generation {
				continue // the worker has left
			}
			state := t.health.state
			if state == PageRefused && !sameServer(t.url, m.address) {
				state = PageRefusedElsewhere
			}
			all = append(all, change{m.worker, state})
		}
	}
	g.unreported = g.unreported[:0]
	g.mu.Unlock()
	for _, n := range all {
		g.cfg.Health(n.worker, n.state)
	}
}

// sameServer reports whether a page has the host and port of an address.
func sameServer(page, address string) bool {
	u, err := url.Parse(page)
	if err != nil {
		return false
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	host, hostPort, err := net.SplitHostPort(address)
	if err != nil || hostPort != port {
		return false
	}
	a, errA := netip.ParseAddr(u.Hostname())
	b, errB := netip.ParseAddr(host)
	if errA == nil && errB == nil {
		return a.Unmap() == b.Unmap()
	}
	return strings.EqualFold(u.Hostname(), host)
}
