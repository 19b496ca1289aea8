package kind

import "testing"

// TestDynamo is about Dynamo's workers with a frontend in direct mode beside each, behind the Envoy that knows no
// endpoint. A frontend refuses a request that names its worker by a wrong id.
func TestDynamo(t *testing.T) {
	// Ids are any numbers and in no object of the cluster: kvepp has them from the frontends, and listens to the
	// engines.
	t.Run(
		"discovery by files",
		func(t *testing.T) { testDynamo(t, "file", "5657", "5557 announces blocks", "5657 answers") },
	)
	// Ids are made of Pods' names, and in objects of the cluster, as is where to listen: to Dynamo's event plane,
	// unless told otherwise.
	t.Run(
		"discovery by Kubernetes",
		func(t *testing.T) { testDynamo(t, "kubernetes", "0", "over Dynamo's event plane") },
	)
}

// testDynamo says how workers are found, the port at which kvepp is told to ask for past events, and what `kvepp check`
// says of each.
func testDynamo(t *testing.T, discovery, replayPort string, says ...string) {
	n := newNamespace(t, "kvepp-e2e-dynamo-"+discovery)
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/dynamo-"+discovery+".yaml"))
	n.install("pool.selector.app=dynamo", "engine=dynamo", "kvEvents.replayPort="+replayPort)
	n.kubectl("rollout", "status", "deployment/dynamo", "--timeout=120s")
	n.startEnvoy("original-dst.yaml", map[string]string{"kvepp": "kvepp." + n.name + ".svc.cluster.local:9002"})
	n.sees(2)

	talk := n.warm(2)
	n.checked(2, append(says, "known to the frontend"), "--engine=dynamo", "--kv-replay-port="+replayPort)

	pods, _ := n.pods("app=dynamo")
	n.during(func() { n.kubectl("delete", "pod", pods[0]) })
	n.sees(2)
	for _, c := range talk {
		c.exactly()
		if a := c.exactly(); a.CachedTokens == 0 {
			t.Errorf("nothing is cached at %s", a.Worker)
		}
	}
}
