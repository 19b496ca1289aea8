package check

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ThroughGateway is the Worker of findings about the gateway itself.
const ThroughGateway = "gateway"

// The tests of the gateway: does it answer from the endpoint that kvepp chose, does it reach kvepp, and, for each
// endpoint, does that endpoint serve when kvepp chooses it.
const (
	AboutGateway = "gateway"
	AboutExtProc = "way to kvepp"
	AboutServed  = "served"
)

// Gateway is a gateway and the kvepp that it asks. kvepp check does not use empty addresses.
type Gateway struct {
	URL  string       // the gateway's root, http or https
	HTTP *http.Client // for the gateway
	Key  string       // sent to the gateway as "Authorization: Bearer"; "": none
	// ExtProc is where the gateway should reach kvepp, HOST:PORT.
	ExtProc string
	// Admin is the root URL of kvepp's admin address, and MetricsPage that of its metrics. The tokens are those of
	// these listeners, or empty.
	Admin, AdminToken         string
	MetricsPage, MetricsToken string
}

const reportServedFix = "make the gateway report the endpoint: selected_host_key in its cluster's override_host " +
	"policy, as in manifests/envoy"

// The number of attempts to make kvepp choose a given endpoint. With events the endpoint first gets the beginning of
// the prompt; without events kvepp may choose it by chance.
const (
	attemptsWithEvents    = 5
	attemptsWithoutEvents = 24
)

// gatewayCheck is the state of the tests of one gateway.
type gatewayCheck struct {
	*Config
	gateway  *Gateway
	results  []*Result
	findings []Finding
	verdicts map[string]bool // by address: the endpoint has a finding
}

// ok, wrong and unknown add findings.
func (g *gatewayCheck) ok(worker, about, says string, args ...any) {
	g.findings = append(g.findings, Finding{Worker: worker, About: about, State: OK, Says: fmt.Sprintf(says, args...)})
}

func (g *gatewayCheck) wrong(worker, about, fix, says string, args ...any) {
	f := Finding{Worker: worker, About: about, State: Wrong, Says: fmt.Sprintf(says, args...), Fix: fix}
	g.findings = append(g.findings, f)
}

func (g *gatewayCheck) unknown(worker, about, fix, says string, args ...any) {
	f := Finding{Worker: worker, About: about, State: Unknown, Says: fmt.Sprintf(says, args...), Fix: fix}
	g.findings = append(g.findings, f)
}

// CheckGateway sends a chat through the gateway, and then, for each endpoint, a chat whose beginning the endpoint has
// cached, so that kvepp chooses it. It compares the chosen endpoint with the one that served. It calls
// progress with the number of the current endpoint, and of all.
func CheckGateway(
	ctx context.Context, cfg *Config, gateway *Gateway, results []*Result, progress func(done, all int),
) []Finding {
	g := &gatewayCheck{Config: cfg, gateway: gateway, results: results, verdicts: map[string]bool{}}
	var endpoints []*Result
	seen := map[string]bool{}
	for _, a := range results {
		if a.isGatewayEndpoint() && !seen[a.Worker.Address] {
			seen[a.Worker.Address] = true
			endpoints = append(endpoints, a)
		}
	}
	if len(endpoints) == 0 {
		g.unknown(ThroughGateway, AboutGateway, "correct the problems above",
			"not tested: no worker answers, so no model name is known")
		return g.findings
	}
	cfg.Predictor.awaitListening(ctx)
	if !g.checkFirst(ctx, endpoints[0]) {
		return g.findings
	}
	for i, a := range endpoints {
		progress(i+1, len(endpoints))
		if ctx.Err() == nil {
			g.checkEndpoint(ctx, a)
		}
	}
	return g.findings
}

// gatewayRequest is a request that went through the gateway.
type gatewayRequest struct {
	exchange
	code           int       // HTTP status; 0: no response
	decision       *decision // nil: unknown
	decisionsShown bool      // kvepp shows its decisions: if decision is nil, the gateway did not ask kvepp
	decisionsError error     // why kvepp's decisions could not be read
}

// decision is kvepp's decision for one request.
type decision struct {
	id        string
	refused   string // why kvepp chose no worker; "": it chose one
	worker    string // the chosen worker: endpoint/rank
	address   string // of the chosen worker
	served    string // address of the endpoint that served; "": unknown
	prompt    int    // tokens
	predicted int    // cached tokens
}

// checkFirst sends a chat, and reports whether kvepp chose for it. It returns whether tests of single endpoints make
// sense.
func (g *gatewayCheck) checkFirst(ctx context.Context, a *Result) bool {
	failures := g.handshakeFailures(ctx)
	opening := newChat(g.Models[a.model], a.model, uniqueWords(probeWords))
	if a.takesRequests() {
		opening.open(ctx, g.Config, a)
	}
	c := newChat(g.Models[a.model], a.model, uniqueWords(probeWords))
	c.asText = opening.asText
	p := g.send(ctx, a, c)
	d := p.decision
	switch {
	case p.code == 0:
		fix := "check that this is the gateway's listener and that the gateway is up"
		if untrusted := (*tls.CertificateVerificationError)(nil); errors.As(p.err, &untrusted) {
			fix = "make this machine trust the gateway's certificate, or use --gateway-insecure-skip-verify"
		}
		g.wrong(ThroughGateway, AboutGateway, fix, "%s: %s", g.gateway.URL, briefError(p.err))
	case d != nil && d.refused != "":
		g.wrong(ThroughGateway, AboutGateway, "see kvepp's log", "kvepp chose no worker: %s", d.refused)
	case d != nil && p.code < http.StatusInternalServerError && p.code != http.StatusOK:
		g.wrong(ThroughGateway, AboutGateway,
			"check whether the gateway requires a key (--gateway-api-key-file), and whether it has a route for this "+
				"host and path", "kvepp chose %s, but the gateway answered %s", d.worker, briefError(p.err))
	case d != nil && p.code != http.StatusOK:
		g.wrong(ThroughGateway, AboutGateway, "check that the gateway can reach that endpoint",
			"kvepp chose %s, but the gateway answered %s", d.worker, briefError(p.err))
		return true
	case d != nil:
		g.ok(ThroughGateway, AboutGateway, "answers, and kvepp chose %s", d.worker)
		g.verdict(p, nil)
		return true
	case p.decisionsShown:
		g.wrong(ThroughGateway, AboutGateway, "see "+AboutExtProc+" below",
			"%s answered %s without asking kvepp", g.gateway.URL, p.status())
		g.explainNotAsked(ctx, p.code, failures)
	default:
		fix := "make kvepp serve report its decisions: --admin-address HOST:PORT (give it to kvepp check too), or " +
			"--decision-headers"
		says := fmt.Sprintf("%s answered %s; kvepp does not report its decisions", g.gateway.URL, p.status())
		if p.decisionsError != nil {
			says += fmt.Sprintf(": %s: %s", g.gateway.Admin, briefError(p.decisionsError))
		}
		if p.code == http.StatusOK {
			g.unknown(ThroughGateway, AboutGateway, fix, "%s", says)
		} else {
			g.wrong(ThroughGateway, AboutGateway, fix, "%s", says)
		}
		if p.code >= http.StatusInternalServerError {
			g.explainNotAsked(ctx, p.code, failures)
		}
	}
	return false
}

// status returns the response's status, with the text of an error.
func (p *gatewayRequest) status() string {
	if p.code == http.StatusOK {
		return "HTTP 200"
	}
	return briefError(p.err)
}

// checkEndpoint makes kvepp choose an endpoint, and reports whether that endpoint serves.
func (g *gatewayCheck) checkEndpoint(ctx context.Context, a *Result) {
	address, model := a.Worker.Address, g.Models[a.model]
	byEvents := a.takesRequests() && g.Predictor.Events && a.Worker.Announces() && !a.eventsMissing && model != nil
	attempts := attemptsWithoutEvents
	if byEvents {
		attempts = attemptsWithEvents
	}
	var others []string
	for i := range attempts {
		if g.verdicts[address] || ctx.Err() != nil {
			return
		}
		c := newChat(model, a.model, uniqueWords(probeWords))
		var first exchange
		if a.takesRequests() {
			first = c.open(ctx, g.Config, a)
		}
		if first.err != nil {
			g.unknown(a.Worker.String(), AboutServed, "send the engine a chat yourself",
				"it answered: %s", briefError(first.err))
			return
		}
		var warm *Result
		if byEvents {
			if ids, _, _, err := kveppIDs(model, first.path, first.body); err == nil {
				g.Config.awaitBlocks(ctx, a, ids)
			}
			c.add(first.response.text, "Is that all? "+uniqueWords(3))
			warm = a
			if i > 0 { // kvepp may receive the events later than this check
				pause(ctx, time.Duration(i)*100*time.Millisecond)
			}
		} else {
			another := newChat(model, a.model, uniqueWords(probeWords))
			another.asText = c.asText
			c = another
		}
		p := g.send(ctx, a, c)
		if p.decision == nil || p.decision.refused != "" {
			break
		}
		g.verdict(p, warm)
		others = append(others, p.decision.worker)
	}
	if !g.verdicts[address] {
		says, fix := "not known: kvepp did not choose it", "repeat when the workers are idle"
		switch {
		case slices.Contains(others, a.Worker.String()):
			says, fix = "not known: the gateway does not say which endpoint served", reportServedFix
		case len(others) > 0:
			slices.Sort(others)
			says += ", but " + strings.Join(slices.Compact(others), ", ")
		}
		g.unknown(a.Worker.String(), AboutServed, fix, "%s", says)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// verdict reports whether the chosen endpoint is the one that served, once for each endpoint. warm is the only
// worker with the beginning of the prompt in its cache; nil: unknown.
func (g *gatewayCheck) verdict(p *gatewayRequest, warm *Result) {
	d := p.decision
	if g.verdicts[d.address] || d.address == "" {
		return
	}
	fix := fmt.Sprintf(
		"add %s to the endpoints of the gateway's cluster, as IP:port, and see that its health checks there succeed; "+
			"or remove it from kvepp's endpoints", d.address)
	cacheExpected := warm != nil && warm.Worker.Address == d.address && d.predicted > 0 && p.response.cached != nil
	switch {
	case d.served != "" && !sameAddress(d.served, d.address):
		g.wrong(d.worker, AboutServed, fix,
			"kvepp chose %s, but %s served: the gateway does not know the chosen endpoint", d.address, d.served)
	case p.code != http.StatusOK:
		g.wrong(d.worker, AboutServed, fix, "kvepp chose %s, but the gateway answered %s", d.address, briefError(p.err))
	case d.served != "":
		g.ok(d.worker, AboutServed, "by %s, as kvepp chose", d.address)
	case cacheExpected && *p.response.cached > 0:
		g.ok(d.worker, AboutServed, "by %s, as kvepp chose: the response reports %d of the %d predicted cached tokens",
			d.address, *p.response.cached, d.predicted)
	case cacheExpected:
		g.wrong(d.worker, AboutServed, fix,
			"kvepp chose %s, but another endpoint served: the response reports none of the %d predicted cached tokens",
			d.address, d.predicted)
	case warm == nil && g.Predictor.Events:
		return // a later request shows it
	default:
		g.unknown(d.worker, AboutServed, reportServedFix,
			"kvepp chose %s; the gateway does not say which endpoint served", d.address)
	}
	g.verdicts[d.address] = true
	for _, a := range g.results {
		if a.Worker.Address == d.address && g.findings[len(g.findings)-1].State == OK {
			a.confirmAddress()
		}
	}
}

func sameAddress(a, b string) bool {
	x, errX := netip.ParseAddrPort(a)
	y, errY := netip.ParseAddrPort(b)
	return a == b || errX == nil && errY == nil && x == y
}

// send sends a conversation's next request through the gateway, and finds kvepp's decision for it.
func (g *gatewayCheck) send(ctx context.Context, a *Result, t *chat) *gatewayRequest {
	known := map[string]bool{}
	if before, err := g.decisions(ctx, ""); err == nil {
		for i := range before {
			known[before[i].id] = true
		}
	}
	id := "kvepp-check-" + strings.ReplaceAll(uniqueWords(3), " ", "")
	header := http.Header{"Content-Type": {"application/json"}, "X-Request-Id": {id}}
	if g.gateway.Key != "" {
		header.Set("Authorization", "Bearer "+g.gateway.Key)
	}
	through := *g.Config
	through.HTTP = g.gateway.HTTP
	p := &gatewayRequest{exchange: t.request(1)}
	responded := p.sendTo(ctx, &through, strings.TrimRight(g.gateway.URL, "/"), header)
	refused := (*errStatus)(nil)
	switch {
	case errors.As(p.err, &refused):
		p.code = refused.code
	case p.err == nil:
		p.code = http.StatusOK
	default:
		return p
	}
	if g.gateway.Admin == "" {
		p.readDecision(responded, g.results)
		return p
	}
	list, err := g.decisions(ctx, id)
	if err == nil && len(list) == 0 { // the gateway may have replaced the request id
		if list, err = g.decisions(ctx, ""); err == nil {
			list = g.decisionLike(list, known, a, p)
		}
	}
	if err != nil {
		p.readDecision(responded, g.results)
		p.decisionsError = err
		return p
	}
	if p.decisionsShown = true; len(list) > 0 {
		p.decision = &list[0]
	}
	return p
}

// decisionLike returns the only new decision about a prompt with the request's number of tokens, as a list of one; an
// empty list if there is none or there are several.
func (g *gatewayCheck) decisionLike(
	list []decision, known map[string]bool, a *Result, p *gatewayRequest,
) (similar []decision) {
	tokens := p.response.promptTokens
	if model := g.Models[a.model]; model != nil {
		if ids, _, _, err := kveppIDs(model, p.path, p.body); err == nil {
			tokens = len(ids)
		}
	}
	for i := range list {
		if !known[list[i].id] && list[i].prompt == tokens {
			similar = append(similar, list[i])
		}
	}
	if len(similar) > 1 {
		return nil
	}
	return similar
}

// readDecision takes the decision from the response's headers (--decision-headers).
func (p *gatewayRequest) readDecision(h http.Header, results []*Result) {
	worker, chosen := h.Get("x-kvepp-worker"), h.Get("x-kvepp-chosen-worker")
	if worker == "" {
		if reason := h.Get("x-kvepp-reason"); reason != "" { // every error response of kvepp has it
			p.decisionsShown, p.decision = true, &decision{refused: briefError(p.err)}
		}
		return
	}
	addresses := map[string]string{}
	for _, a := range results {
		addresses[a.Worker.String()] = a.Worker.Address
	}
	d := &decision{worker: worker}
	if chosen != "" {
		d.worker, d.served = chosen, cmp.Or(addresses[worker], worker)
	}
	d.address = addresses[d.worker]
	d.predicted, _ = strconv.Atoi(h.Get("x-kvepp-predicted-cached-tokens"))
	p.decisionsShown, p.decision = true, d
}

// decisions returns kvepp's latest decisions, the newest first, or those of one request.
func (g *gatewayCheck) decisions(ctx context.Context, id string) ([]decision, error) {
	if g.gateway.Admin == "" {
		return nil, nil
	}
	var found struct {
		Decisions []struct {
			RequestID    string `json:"request_id"`
			Error        string `json:"error"`
			PromptTokens int    `json:"prompt_tokens"`
			Predicted    int    `json:"predicted_cached_tokens"`
			Worker       struct {
				Name    string `json:"name"`
				Rank    uint32 `json:"dp_rank"`
				Address string `json:"address"`
			} `json:"worker"`
			Served struct {
				Address string `json:"address"`
			} `json:"served"`
		} `json:"decisions"`
	}
	page := g.gateway.Admin + "/debug/decisions?n=100&request_id=" + url.QueryEscape(id)
	err := g.get(ctx, page, g.gateway.AdminToken, func(body io.Reader) error {
		return json.NewDecoder(body).Decode(&found)
	})
	var list []decision
	for _, d := range found.Decisions {
		list = append(list, decision{
			id:        d.RequestID,
			refused:   d.Error,
			worker:    fmt.Sprintf("%s/%d", d.Worker.Name, d.Worker.Rank),
			address:   d.Worker.Address,
			served:    d.Served.Address,
			prompt:    d.PromptTokens,
			predicted: d.Predicted,
		})
	}
	return list, err
}
