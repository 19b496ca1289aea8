package main

import (
	"log/slog"

	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/serve/listen"
)

// subscribe makes the feed of the workers' KV events. If the index will be copied from a peer, the feed holds events
// back until that is done.
func (s *server) subscribe() (err error) {
	s.models.CompleteFeed(&s.feed, s.pool, s.loaded, s.adapters)
	s.feed.UnmarkedSalts = s.models.Engine() != prompt.Dynamo && !s.routing.TenantSalt
	s.events, err = feed.New(s.feed, s.pool, s.index, s.m, s.log)
	if err == nil && (len(s.indexPeers) > 0 || s.sharing.Shares()) {
		s.events.Hold()
	}
	return err
}

// openCluster creates the followers of a cluster; nil without one.
func openCluster(o *options, ready *listen.Readiness, m *metrics.Metrics, log *slog.Logger) (*kube.Cluster, error) {
	c := o.sources.Kube
	c.MetricsAuth = c.MetricsAuth && o.metricsTokenFile == ""
	c.ReplicaService = o.sharing.Service
	if c.Dynamo = o.models.Engine() == prompt.Dynamo; c.Dynamo {
		c.QueryFrontend = dynamo.QueryFrontend
	}
	var leads func(bool)
	if c.LeaderElection && c.Used() {
		leads = ready.Condition("this replica to lead")
	}
	k, err := kube.Open(&c, leads, m, log)
	if k != nil {
		ready.Await("the pool and its Pods to be read", k.Synced())
	}
	return k, err
}
