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

// frontends is the state of the queries of Dynamo's frontends.
type frontends struct {
	wakeup         chan struct{} // has a token while a Pod waits for a response
	loggedOtherIDs bool          // it is logged that ids are not hashes of Pod names
}

func newFrontends() frontends { return frontends{wakeup: make(chan struct{}, 1)} }

func (f *frontends) wake() {
	select {
	case f.wakeup <- struct{}{}:
	default:
	}
}

// frontendResponse is what a frontend said about the worker of a ready Pod. The zero value: no frontend was asked yet.
type frontendResponse struct {
	known  bool
	worker dynamo.FrontendWorker
	model  string               // the frontend's only model; empty: not known
	served dynamo.FrontendModel // of that model

	waitingSince time.Time // when the Pod began to wait for a response
	waitEnded    bool      // kvepp waits no longer, and uses the hash of the Pod's name as id
}

// instance returns the worker as discovery would describe it.
func (s *frontendResponse) instance() dynamo.Instance {
	return dynamo.Instance{Path: s.worker.Path, InstanceID: s.worker.InstanceID,
		Card: &dynamo.Card{Model: s.model, BlockSize: s.served.BlockSize, TotalKVBlocks: s.served.TotalKVBlocks}}
}

const (
	// maxPodWait is how long a Dynamo Pod without metadata waits for a frontend that knows its worker. A frontend
	// refuses requests for workers that it does not know.
	maxPodWait      = 3 * time.Second
	waitingInterval = 250 * time.Millisecond // interval while a Pod waits
	unknownInterval = 2 * time.Second        // interval while there is a worker that no frontend knows
	idleInterval    = 30 * time.Second       // interval if all workers are known
	// firstBatch is how many frontends of Pods with unknown workers are asked in the first round. While Pods wait, each
	// round asks twice as many, up to maxBatch.
	firstBatch   = 3
	maxBatch     = 64
	queryTimeout = time.Second // timeout, so that one frontend does not delay the others
)

// waits reports whether a Pod is not an endpoint only because no frontend has identified its worker. The caller holds
// s.mu.
func (k *knownPod) waits() bool {
	return !k.response.waitingSince.IsZero() && !k.response.known && !k.response.waitEnded && len(k.instances) == 0
}

// asksFrontends reports whether kvepp asks frontends.
func (s *Source) asksFrontends() bool { return s.config.Dynamo && s.config.QueryFrontend != nil }

// startWait starts the wait of a ready Pod, if it has not begun, and returns what a frontend said. The caller holds
// s.mu.
func (s *Source) startWait(k *knownPod) frontendResponse {
	if k.response.waitingSince.IsZero() {
		k.response.waitingSince = time.Now()
	}
	return k.response
}

// askFrontends asks frontends until ctx ends. Most frontends know all workers of their namespace, so that one response
// identifies the workers of many Pods. If discovery is files in each Pod, a frontend knows only the workers of its Pod,
// and kvepp must ask all.
func (s *Source) askFrontends(ctx context.Context) {
	next := time.NewTimer(0)
	defer next.Stop()
	atOnce := firstBatch
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.frontends.wakeup:
		case <-next.C:
		}
		// concurrent, because Pods of prefill workers have no frontend, and may not answer at all
		var all sync.WaitGroup
		for _, address := range s.frontendsToAsk(atOnce) {
			all.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, queryTimeout)
				defer cancel()
				if v, err := s.config.QueryFrontend(ctx, address); err == nil {
					s.recordResponse(&v, address)
				} else if ctx.Err() == nil {
					s.log.Debug("a Pod's frontend does not answer which workers it knows", "address", address, "error",
						err)
				}
			})
		}
		all.Wait()
		wait := s.endWaits()
		switch wait {
		case waitingInterval:
			atOnce = min(2*atOnce, maxBatch)
		case idleInterval:
			atOnce = firstBatch
		}
		next.Reset(wait/2 + rand.N(wait))
	}
}

// frontendsToAsk returns the frontends to ask: a bounded number with unknown workers, and one with a known worker.
func (s *Source) frontendsToAsk(atOnce int) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var waiting, others []string
	for _, name := range s.order {
		k := s.pods[name]
		if ip := address(k.pod, s.config.Family); !k.response.waitingSince.IsZero() && ip != "" {
			if port := s.frontendPort(k); port != 0 {
				at := net.JoinHostPort(ip, strconv.Itoa(port))
				if k.response.known {
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
func (s *Source) frontendPort(k *knownPod) int {
	if port := namedPort(k.pod, httpPort); port != 0 || s.spec == nil || len(s.spec.ports) == 0 {
		return port
	}
	return s.spec.ports[0]
}

// recordResponse records what the frontend at an address said. A worker with a loopback address is in the frontend's
// own Pod.
func (s *Source) recordResponse(v *dynamo.View, from string) {
	host, _, _ := net.SplitHostPort(from)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range s.pods {
		if k.response.waitingSince.IsZero() {
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
		before := k.response
		k.response.known, k.response.worker = true, worker
		if model, served, ok := v.OnlyModel(); ok {
			k.response.model, k.response.served = model, served
		}
		if k.response == before {
			continue
		}
		if worker.InstanceID != kvblock.InstanceID(k.pod.Name) && len(s.workers.byPod[k.pod.Name]) == 0 &&
			!s.frontends.loggedOtherIDs {
			s.frontends.loggedOtherIDs = true
			s.log.Info("the ids of Dynamo's workers are not hashes of their Pods' names: kvepp uses the ids that "+
				"frontends report", "pod", k.pod.Name, "instance", worker.InstanceID,
				"by_name", kvblock.InstanceID(k.pod.Name))
		}
		s.recompute(k)
	}
}

// endWaits ends the wait of Pods that have waited long enough, and returns when to ask again.
func (s *Source) endWaits() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	wait := idleInterval
	for _, k := range s.pods {
		if k.response.waitEnded && !k.response.known && len(k.instances) == 0 { // otherwise the Pod has metadata now
			wait = min(wait, unknownInterval)
		}
		if !k.waits() {
			continue
		}
		if time.Since(k.response.waitingSince) < maxPodWait {
			wait = min(wait, waitingInterval)
			continue
		}
		k.response.waitEnded = true
		s.log.Warn(
			"no frontend knows the worker of a Pod, and it wrote no DynamoWorkerMetadata: kvepp uses the hash of the "+
				"Pod's name as its instance id", "pod", k.pod.Name)
		s.recompute(k)
	}
	return wait
}
