package router

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvepp/internal/metrics"
	"kvepp/kvblock"
	"kvepp/pool"
	"kvepp/prompt/body"
	"kvepp/router/ladder"
	"kvepp/router/queue"
	"kvepp/scoring"
)

// Phases of a request, under the names of Dynamo's metrics.
const (
	phaseAggregated = "aggregated"
	phasePrefill    = "prefill"
	phaseDecode     = "decode"
)

// observed is what a Route keeps for metrics at the end of the request. Only the goroutine that follows the response
// uses it.
type observed struct {
	router     *Router // nil: nothing to report
	began      time.Time
	firstToken time.Time    // zero: not seen
	phase      string       // of the worker that computes the prompt
	model      string       // as a label
	target     string       // as the endpoint names it, for a label: the adapter, if there is one
	named      string       // as the request names it, for a label
	unlabeled  string       // the model, if it becomes a label once it is served; else empty
	received   time.Time    // when the request's headers came
	count      *promptCount // nil: the number of prompt tokens is not compared
}

// observeChoice reports a choice to the metrics.
func (r *Router) observeChoice(g *gathered, route *Route, req *Request, p *prepared, began time.Time) {
	route.observed = observed{
		router:   r,
		began:    began,
		received: began,
		phase:    phaseAggregated,
		model:    r.labelOf(&route.computes, p),
		count:    r.promptCounts.of(p),
	}
	if !req.Received.IsZero() {
		route.observed.received = req.Received
	}
	if r.cfg.LabelServed && route.observed.model == otherModels && len(p.model) <= maxServedName {
		route.observed.unlabeled = strings.Clone(p.model) // the client's text would keep the body in memory
	}
	route.observed.target = route.observed.model
	if p.label != "" {
		route.observed.target = p.label
	}
	if route.observed.named = route.observed.target; p.renamed != nil {
		route.observed.named = p.renamed.label
	}
	hit := -1.0
	if p.tokens != nil && p.isl > 0 && r.cfg.asksIndex() {
		hit = min(float64(route.PredictedCachedTokens)/float64(p.isl), 1)
	}
	r.cfg.Picker.Scheduled(time.Since(began)-route.Waited, hit)
	r.cfg.Picker.Began(route.observed.named, route.observed.target, int(p.priority), max(len(req.Body), req.BodyBytes))
	if r.cfg.Metrics == nil {
		return
	}
	l := g.promptLeg(route)
	if route.Prefill != nil {
		route.observed.phase = phasePrefill
		r.cfg.Metrics.Chosen(
			&metrics.Chosen{Phase: phaseDecode, Model: route.observed.model, PromptTokens: p.isl, WithoutOverlap: true},
		)
	}
	c := metrics.Chosen{
		Phase:          route.observed.phase,
		Model:          route.observed.model,
		PromptTokens:   p.isl,
		CachedTokens:   route.PredictedCachedTokens,
		WithoutOverlap: p.tokens == nil || route.BlockSize == 0 || !r.cfg.asksIndex(),
	}
	if !c.WithoutOverlap {
		chosen := 0.0 // blocks, weighted by tier
		for i := range l.candidates {
			candidate := &l.candidates[i]
			if candidate.Prompt == nil {
				continue
			}
			if candidate.Worker == route.computes.Worker {
				chosen = worth(&l.cfg, candidate)
			}
			c.BestTokens = max(c.BestTokens, cachedBlocks(candidate)*candidate.Prompt.BlockSize)
		}
		if r.cfg.Ladder != nil { // so that Dynamo's names say what the ladder says
			c.BestTokens, c.CachedTokens = route.climb.Tokens[ladder.Eligible], route.climb.Tokens[ladder.Chosen]
		}
		if p.isl > 0 {
			c.HitRate = chosen / float64((p.isl+route.BlockSize-1)/route.BlockSize)
		}
	}
	r.cfg.Metrics.Chosen(&c)
}

// countDecision counts a choice.
func (r *Router) countDecision(route *Route) {
	r.metrics.Decision(string(route.Reason))
	if route.Prefill != nil {
		r.metrics.PrefillSelections.Inc()
		r.metrics.DecodeSelections.Inc()
	} else {
		r.metrics.AggregatedSelections.Inc()
	}
	if route.Conditional != "" {
		r.metrics.Conditional(string(route.Conditional))
	}
	if route.UpperBound {
		r.metrics.UpperBound.Inc()
	}
	if route.UnusableTokens > 0 {
		r.metrics.Unusable(route.UnusableBy.String(), route.UnusableTokens)
	}
}

// cachedBlocks counts the prompt blocks that a candidate holds, in any tier.
func cachedBlocks(c *scoring.Candidate) int { return c.DeviceBlocks + c.HostBlocks + c.DiskBlocks }

// worth counts the prompt blocks that a candidate holds, weighted by tier.
func worth(cfg *scoring.Config, c *scoring.Candidate) float64 {
	return float64(
		c.DeviceBlocks,
	) + cfg.HostCacheHitWeight*float64(
		c.HostBlocks,
	) + cfg.DiskCacheHitWeight*float64(
		c.DiskBlocks,
	)
}

// servedModels are the names of models with which endpoints have served requests, at most maxServed.
type servedModels struct {
	names sync.Map // string -> nothing
	count atomic.Int32
}

// Bounds of servedModels; a name is in bytes.
const (
	maxServed     = 1000
	maxServedName = 256
)

func (s *servedModels) add(model string) {
	if s.count.Load() >= maxServed {
		return
	}
	if _, known := s.names.LoadOrStore(model, nil); !known {
		s.count.Add(1)
	}
}

// knows reports whether the operator named the model, or endpoints have served it and Config.LabelServed is set.
func (r *Router) knows(model string) bool {
	known := r.cfg.names(model)
	if !known && r.cfg.LabelServed {
		_, known = r.servedModels.names.Load(model)
	}
	return known
}

// labelOf returns the model as a metric's label: a name that the operator or a worker gave, or that [Router.knows];
// never one that only a client gave.
func (r *Router) labelOf(w *pool.Worker, p *prepared) string {
	if w.Model != "" {
		return w.Model
	}
	if r.knows(p.model) {
		return strings.Clone(p.model) // the client's text would keep the body in memory
	}
	return otherModels
}

// otherModels is the label of names that only clients gave.
const otherModels = "unknown"

// modelLabels returns the labels of the models known from the start; otherModels if the operator names none.
func (c *Config) modelLabels() map[string]bool {
	if names := c.modelNames(); len(names) > 0 {
		return names
	}
	return map[string]bool{otherModels: true}
}

// Export exports what is read at each scrape. Call it once.
func (r *Router) Export() {
	m := r.metrics
	metrics.Gauge(m, metrics.OverloadedWorkers, r.Overloaded)
	classes := []string{"default"}
	if r.cfg.Queue != nil {
		classes = r.cfg.Queue.Profiles.Classes()
	}
	for _, class := range classes {
		metrics.Gauge(m, metrics.QueuedRequests, func() int { return r.Waiting(class) }, "policy_class", class)
	}
	if r.room != nil {
		metrics.Gauge(m, metrics.QueueTenants, r.room.Tenants)
	}
	metrics.Gauge(m, metrics.HeldRequests, r.Held) // always: without it no HorizontalPodAutoscaler scales down
	if a := r.cfg.Admission; a != nil {
		metrics.Gauges(m, metrics.Conversations, "state", func() map[string]int {
			s := a.Stats()
			return map[string]int{"running": s.Running, "idle": s.Idle, "lapsed": s.Lapsed}
		})
	}
	if r.cfg.Adapters != nil {
		metrics.Gauge(m, metrics.Adapters, r.cfg.Adapters.Len)
		metrics.Counter(m, metrics.AdapterLoads, r.cfg.Adapters.Loads)
	}
	if l := r.cfg.Ladder; l != nil {
		m.CollectLadder(l.read, l.Seen.Sampling)
	}
}

// Queues returns what waits, by model and policy class: all models that the configuration names, and others after their
// first request.
func (r *Router) Queues() []metrics.Queue {
	var all []metrics.Queue
	seen := map[string]bool{}
	if r.room != nil {
		for _, l := range r.room.Loads() {
			model := lineLabel(l.Line)
			seen[model] = true
			all = append(all, metrics.Queue{Model: model, Class: l.Class,
				Requests: l.Requests, Tokens: l.Tokens, CachedTokens: l.CachedTokens})
		}
	}
	for model := range r.cfg.modelLabels() {
		if seen[model] {
			continue
		}
		for _, class := range r.cfg.classesOf(model) {
			all = append(all, metrics.Queue{Model: model, Class: class})
		}
	}
	return all
}

// classesOf returns the policy classes of a model's requests.
func (c *Config) classesOf(model string) []string {
	if c.Queue == nil {
		return []string{"default"}
	}
	profile, _ := c.Queue.Profiles.Of(model)
	var names []string
	for i := range profile.Classes {
		names = append(names, profile.Classes[i].Name)
	}
	return names
}

// sawFirstToken notes when a streamed response began.
func (o *observed) sawFirstToken(route *Route) {
	if o.router == nil || !o.firstToken.IsZero() {
		return
	}
	o.firstToken = time.Now()
	after := o.firstToken.Sub(o.began)
	o.router.cfg.Metrics.FirstToken(after)
	o.router.latest.set(route.computes.Worker, route.computes.InstanceID,
		func(l *lastResponse) { l.ttft, l.promptTokens = after, route.PromptTokens })
}

// observeRefusal counts a refused request. A request whose client has gone is not counted.
func (r *Router) observeRefusal(p *prepared, err error) {
	code := metrics.CodeInternal
	invalid, limit, late := (*body.Error)(nil), (*queue.LimitError)(nil), (*LateError)(nil)
	switch {
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return
	case errors.As(err, &invalid):
		code = metrics.CodeBadRequest
	case errors.Is(err, ErrUnknownModel):
		code = metrics.CodeNotFound
	case errors.Is(err, ErrNoEndpoints),
		errors.Is(err, ErrNoPrefill),
		errors.Is(err, ErrConstraints),
		errors.Is(err, ErrCordoned),
		errors.Is(err, ErrEnding):
		code = metrics.CodeServiceUnavailable
	case errors.Is(err, ErrOverloaded),
		errors.Is(err, ErrNoRoom),
		errors.Is(err, ErrQueueFull),
		errors.Is(err, ErrQueueTimeout),
		errors.Is(err, ErrShed),
		errors.As(err, &limit),
		errors.As(err, &late):
		code = metrics.CodeResourceExhausted
	}
	model := r.labelOf(&pool.Worker{Endpoint: &pool.Endpoint{}}, p)
	if p.label != "" {
		model = p.label
	}
	if invalid == nil { // otherwise the body was refused before a choice
		r.cfg.Picker.Unscheduled()
	}
	r.cfg.Picker.Refused(model, code)
}

// Refused counts a request that was answered with an HTTP status before the router saw it.
func (r *Router) Refused(status int) {
	code := metrics.CodeBadRequest
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable || status == 529 {
		code = metrics.CodeResourceExhausted
	}
	r.cfg.Picker.Refused(otherModels, code)
}

// Response is what kvepp saw of a response.
type Response struct {
	// Status is its HTTP status. Empty: there was none, or it was kvepp's.
	Status string
	// Complete says that its end was seen. Otherwise the client or the endpoint broke it off, or kvepp is not shown its
	// end.
	Complete bool
	// Explained says that the proxy's access log will say who broke off an incomplete response, see [Router.BrokenOff].
	Explained bool
	// Bytes is how many bytes of its body were seen.
	Bytes int
	// PromptTokens is the number of prompt tokens that it reported. 0: none.
	PromptTokens int
	// Tokens is the number of its tokens. 0: not known.
	Tokens int
	// CachedTokens is the number of cached prompt tokens that it reported. -1: none.
	CachedTokens int
}

// Ended reports the request's end to the metrics. Call it once.
func (r *Route) Ended(a Response) {
	if r.shadow != nil {
		r.shadow.unserved(r, &a)
		return
	}
	r.health.end(&a, r.Token)
	o := &r.observed
	if o.router == nil {
		return
	}
	if r.recorded != nil {
		r.endRecording(&a)
	}
	r.reachDelivered(&a)
	now := time.Now()
	for _, c := range r.health.counts {
		c.ended(&a, a.Explained && r.health.tracker != nil)
	}
	if r.Prefill != nil {
		r.health.counts[1].computed(&a, &r.Decision)
	} else {
		r.health.counts[0].computed(&a, &r.Decision)
	}
	if o.unlabeled != "" && a.Status == "200" {
		o.router.servedModels.add(o.unlabeled)
	}
	if a.Status == "200" && o.count.reported(r, a.PromptTokens, o.router.log) {
		o.router.metrics.PromptTokenMismatches.Inc()
		o.router.miscounted.Add(1)
	}
	if r.InBody {
		o.router.judgeInBody(a.Status)
	}
	o.router.chargeResponse(r, &a)
	m := o.router.cfg.Metrics
	m.Finished()
	reused := a.CachedTokens
	if o.router.cfg.Ladder != nil {
		reused = r.climb.Tokens[ladder.Delivered]
	}
	if reused >= 0 {
		m.Reused(o.phase, o.model, reused)
	}
	var between time.Duration
	if !o.firstToken.IsZero() && a.Tokens > 1 {
		between = now.Sub(o.firstToken) / time.Duration(a.Tokens-1)
		o.router.latest.set(r.destination, r.instance, func(l *lastResponse) { l.itl = between })
	}
	m.Output(a.Tokens, between)
	end := metrics.Ended{
		Model:    o.named,
		Target:   o.target,
		Failed:   a.Status != "" && a.Status != "200",
		Duration: now.Sub(o.received),
		Bytes:    a.Bytes,
		Input:    a.PromptTokens,
		Output:   a.Tokens,
		Cached:   a.CachedTokens,
	}
	if !o.firstToken.IsZero() {
		end.FirstToken = o.firstToken.Sub(o.received)
	}
	o.router.cfg.Picker.Ended(&end)
	if r.record != nil {
		o.router.records.end(r, &Outcome{Status: a.Status, Complete: a.Complete, TTFT: end.FirstToken, ITL: between,
			Duration: end.Duration, PromptTokens: a.PromptTokens, Tokens: a.Tokens, CachedTokens: a.CachedTokens,
			Climb: r.climb})
	}
}

// lastResponses holds what the latest responses of workers showed.
type lastResponses struct {
	mu       sync.Mutex // guards byWorker
	byWorker []lastResponse
}

// lastResponse is one worker's. It is valid for the worker with this number and this instance id: numbers are reused.
type lastResponse struct {
	instance     uint64
	ttft, itl    time.Duration
	promptTokens int
}

func (a *lastResponses) set(w kvblock.Worker, instance uint64, change func(*lastResponse)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := int(w) + 1; n > len(a.byWorker) {
		a.byWorker = append(a.byWorker, make([]lastResponse, n-len(a.byWorker))...)
	}
	l := &a.byWorker[w]
	if l.instance != instance {
		*l = lastResponse{instance: instance}
	}
	change(l)
}

func (a *lastResponses) of(w *pool.Worker) lastResponse {
	a.mu.Lock()
	defer a.mu.Unlock()
	if int(w.Worker) < len(a.byWorker) && a.byWorker[w.Worker].instance == w.InstanceID {
		return a.byWorker[w.Worker]
	}
	return lastResponse{}
}

// Workers returns the metrics of each worker in the pool.
func (r *Router) Workers() []metrics.Worker {
	snapshot := r.pool.Acquire()
	defer snapshot.Release()
	loads := r.book.Loads(nil)
	load := func(w kvblock.Worker) scoring.Load {
		if int(w) < len(loads) {
			return loads[w]
		}
		return scoring.Load{}
	}
	all := make([]metrics.Worker, 0, len(snapshot.Workers))
	for i := range snapshot.Workers {
		w := &snapshot.Workers[i]
		if w.Role == pool.Encode {
			continue
		}
		l, last := load(w.Worker), r.latest.of(w)
		pace := r.book.Pace(w.Worker)
		all = append(
			all,
			metrics.Worker{InstanceID: w.InstanceID, Rank: w.Rank, Prefill: w.Role == pool.Prefill,
				ActiveBlocks: l.ActiveBlocks, PrefillTokens: l.PrefillTokens,
				LastTTFT: last.ttft, LastITL: last.itl, LastPromptTokens: last.promptTokens,
				PrefillSpeed: r.book.PrefillSpeed(w.Worker), SecondsPerToken: pace.SecondsPerToken,
				StepSeconds: pace.StepSeconds, GapPerToken: pace.GapPerToken},
		)
	}
	return all
}
