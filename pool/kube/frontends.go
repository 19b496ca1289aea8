package kube

import (
	"context"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"kvepp/kvblock"
	"kvepp/pool/dynamo"
)

// frontends holds when to ask the frontends of Dynamo's Pods again.
type frontends struct {
	asked   chan struct{} // holds one token while a Pod waits for an answer
	differs bool          // logged already that the ids are not hashes of the names
}

func newFrontends() frontends { return frontends{asked: make(chan struct{}, 1)} }

func (f *frontends) wake() {
	select {
	case f.asked <- struct{}{}:
	default:
	}
}

// sighting is what a frontend knows about a Pod's worker, since the Pod is ready. The zero value: no frontend was asked
// yet.
type sighting struct {
	known  bool
	worker dynamo.FrontendWorker
	model  string               // the frontend's only model; empty: not known
	served dynamo.FrontendModel // of that model

	since time.Time // when the Pod began to wait for this answer
	given bool      // the wait is over: the id is the hash of the name
}

// instance is the worker in the form that discovery would give.
func (s *sighting) instance() dynamo.Instance {
	return dynamo.Instance{Path: s.worker.Path, InstanceID: s.worker.InstanceID,
		Card: &dynamo.Card{Model: s.model, BlockSize: s.served.BlockSize, TotalKVBlocks: s.served.TotalKVBlocks}}
}

const (
	// heldBack is how long a Dynamo Pod without metadata waits for a frontend that knows its worker. A frontend refuses
	// requests for workers that it does not know.
	heldBack   = 3 * time.Second
	askWaiting = 250 * time.Millisecond // interval while a Pod waits
	askAgain   = 2 * time.Second        // interval while no frontend knows some worker
	askAnyway  = 30 * time.Second       // interval if all workers are known
	// Frontends of Pods with unknown workers that are asked in a round: twice as many in each round while Pods wait,
	// ...
	askedAtOnce = 3
	mostAtOnce  = 64          // ... up to this number
	askFor      = time.Second // timeout, so that one frontend does not delay the others
)

// waits reports whether a Pod is not an endpoint only because no frontend has identified its worker. The caller holds
// s.mu.
func (k *known) waits() bool {
	return !k.seen.since.IsZero() && !k.seen.known && !k.seen.given && len(k.instances) == 0
}

// asks reports whether kvepp asks frontends.
func (s *Source) asks() bool { return s.config.Dynamo && s.config.QueryFrontend != nil }

// sighted returns what a frontend knows about a ready Pod, and starts the Pod's wait. The caller holds s.mu.
func (s *Source) sighted(k *known) sighting {
	if k.seen.since.IsZero() {
		k.seen.since = time.Now()
	}
	return k.seen
}

// askFrontends asks frontends until ctx ends. Most frontends know all workers of their namespace, so that one answer
// identifies the workers of many Pods. If discovery is files in each Pod, a frontend knows only the workers of its Pod,
// and kvepp must ask all.
func (s *Source) askFrontends(ctx context.Context) {
	next := time.NewTimer(0)
	defer next.Stop()
	atOnce := askedAtOnce
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.frontends.asked:
		case <-next.C:
		}
		var all sync.WaitGroup // Pods of prefill workers have no frontend, and may not even refuse the connection
		for _, address := range s.toAsk(atOnce) {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, askFor)
				defer cancel()
				if v, err := s.config.QueryFrontend(ctx, address); err == nil {
					s.sight(&v, address)
				} else if ctx.Err() == nil {
					s.log.Debug("a Pod's frontend was asked which workers it knows", "address", address, "error", err)
				}
			})
		}
		all.Wait()
		wait := s.judge()
		switch wait {
		case askWaiting:
			atOnce = min(2*atOnce, mostAtOnce)
		case askAnyway:
			atOnce = askedAtOnce
		}
		next.Reset(wait/2 + rand.N(wait))
	}
}

// toAsk returns the frontends to ask: a bounded number with unknown workers, and one with a known worker.
func (s *Source) toAsk(atOnce int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var waiting, others []string
	for _, name := range s.order {
		k := s.pods[name]
		if ip := address(k.pod, s.config.Family); !k.seen.since.IsZero() && ip != "" {
			if port := s.frontendPort(k); port != 0 {
				at := net.JoinHostPort(ip, strconv.Itoa(port))
				if k.seen.known {
					others = append(others, at)
				} else {
					waiting = append(waiting, at)
				}
			}
		}
	}
	rand.Shuffle(len(waiting), func(i, j int) { waiting[i], waiting[j] = waiting[j], waiting[i] })
	waiting = waiting[:min(len(waiting), atOnce)]
	if len(others) > 0 {
		waiting = append(waiting, others[rand.IntN(len(others))])
	}
	return waiting
}

// frontendPort returns the port of a Pod's frontend, or 0 if there is none. The caller holds s.mu.
func (s *Source) frontendPort(k *known) int {
	if port := namedPort(k.pod, httpPort); port != 0 || s.spec == nil || len(s.spec.ports) == 0 {
		return port
	}
	return s.spec.ports[0]
}

// sight records the answer of the frontend at an address. A worker with a loopback address is in the frontend's own
// Pod.
func (s *Source) sight(v *dynamo.View, from string) {
	host, _, _ := net.SplitHostPort(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.pods {
		if k.seen.since.IsZero() {
			continue
		}
		ips := []string{k.pod.Status.PodIP}
		for _, ip := range k.pod.Status.PodIPs {
			ips = append(ips, ip.IP)
		}
		if slices.Contains(ips, host) {
			ips = append(ips, "127.0.0.1", "::1")
		}
		worker, ok := v.WorkerAt(ips...)
		if !ok {
			continue
		}
		before := k.seen
		k.seen.known, k.seen.worker = true, worker
		if model, served, ok := v.OnlyModel(); ok {
			k.seen.model, k.seen.served = model, served
		}
		if k.seen == before {
			continue
		}
		if worker.InstanceID != kvblock.InstanceID(k.pod.Name) && len(s.workers.byPod[k.pod.Name]) == 0 &&
			!s.frontends.differs {
			s.frontends.differs = true
			s.log.Info(
				"the ids of Dynamo's workers are not those of their Pods' names: the frontends' word is taken for them",
				"pod",
				k.pod.Name,
				"instance",
				worker.InstanceID,
				"by_name",
				kvblock.InstanceID(k.pod.Name),
			)
		}
		s.recompute(k)
	}
}

// judge ends the wait of Pods that have waited long enough, and returns when to ask again.
func (s *Source) judge() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	wait := askAnyway
	for _, k := range s.pods {
		if k.seen.given && !k.seen.known && len(k.instances) == 0 { // else it has metadata now
			wait = min(wait, askAgain)
		}
		if !k.waits() {
			continue
		}
		if time.Since(k.seen.since) < heldBack {
			wait = min(wait, askWaiting)
			continue
		}
		k.seen.given = true
		s.log.Warn(
			"no frontend knows the worker of a Pod, and it wrote no DynamoWorkerMetadata: its id is taken to be that "+
				"of its name",
			"pod",
			k.pod.Name,
		)
		s.recompute(k)
	}
	return wait
}
