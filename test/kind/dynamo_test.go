package kind

import "testing"

// TestDynamo runs Dynamo's workers, each with a frontend in direct mode, behind the Envoy without endpoints. A frontend
// refuses a request that names another worker id.
func TestDynamo(t *testing.T) {
	// Ids are random numbers and are in no object of the cluster. kvepp gets them from the frontends, and subscribes to
	// the engines.
	t.Run(
		"discovery by files",
		func(t *testing.T) { testDynamo(t, "file", "5657", "5557 announces blocks", "5657 answers") },
	)
	// Ids derive from Pods' names and are in objects of the cluster, with the event address: Dynamo's event plane,
	// unless configured otherwise.
	t.Run(
		"discovery by Kubernetes",
		func(t *testing.T) { testDynamo(t, "kubernetes", "0", "over Dynamo's event plane") },
	)
}

// testDynamo takes the kind of discovery, the port of the replay sockets, and texts that `kvepp check` reports for each
// worker.
func testDynamo(t *testing.T, discovery, replayPort string, says ...string) {
	n := newNamespace(t, "kvepp-e2e-dynamo-"+discovery)
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/dynamo-"+discovery+".yaml"))
	n.install("pool.selector.app=dynamo", "engine=dynamo", "kvEvents.replayPort="+replayPort)
	n.kubectl("rollout", "status", "deployment/dynamo", "--timeout=120s")
	n.startEnvoy("original-dst.yaml", map[string]string{"kvepp": "kvepp." + n.name + ".svc.cluster.local:9002"})
	n.awaitWorkers(2)

	talk := n.stickyConversations(2)
	n.wantCheck(2, append(says, "known to the frontend"), "--engine=dynamo", "--kv-replay-port="+replayPort)

	pods, _ := n.pods("app=dynamo")
	n.duringTraffic(func() { n.kubectl("delete", "pod", pods[0]) })
	n.awaitWorkers(2)
	for _, c := range talk {
		c.sayExact()
		if a := c.sayExact(); a.CachedTokens == 0 {
			t.Errorf("no block is cached at %s", a.Worker)
		}
	}
}
