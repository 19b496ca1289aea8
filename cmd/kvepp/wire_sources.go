package main

import (
	"log/slog"

	"kvepp/indexer"
	"kvepp/indexer/feed"
	"kvepp/internal/metrics"
	"kvepp/pool"
	"kvepp/pool/dynamo"
	"kvepp/pool/kube"
	"kvepp/prompt"
	"kvepp/router"
	"kvepp/serve/listen"
	"kvepp/serve/models"
)

// subscribe makes the feed of the KV events of p's workers. If the index will be copied from a peer, the feed holds
// events back until that is done.
func subscribe(
	o *options,
	p *pool.Pool,
	index *indexer.Index,
	adapters *router.Adapters,
	loaded models.Models,
	m *metrics.Metrics,
	log *slog.Logger,
) (*feed.Feed, error) {
	o.models.CompleteFeed(&o.feed, p, loaded, adapters)
	o.feed.UnmarkedSalts = o.models.Engine() != prompt.Dynamo && !o.routing.TenantSalt
	events, err := feed.New(o.feed, p, index, m, log)
	if err == nil && (len(o.indexPeers) > 0 || o.sharing.Shares()) {
		events.Hold()
	}
	return events, err
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
