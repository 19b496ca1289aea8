package kind

import (
	"fmt"
	"slices"
	"testing"

	"kvepp/e2e/stack"
)

// TestDynamo is about Dynamo's workers with a frontend in direct mode beside each, behind the Envoy that knows no endpoint. A frontend
// refuses a request that names its worker by a wrong id.
func TestDynamo(t *testing.T) {
	// Ids are any numbers and in no object of the cluster: kvepp has them from the frontends.
	t.Run("discovery by files", func(t *testing.T) { testDynamo(t, "file") })
	// Ids are made of Pods' names, and in objects of the cluster.
	t.Run("discovery by Kubernetes", func(t *testing.T) { testDynamo(t, "kubernetes") })
}

func testDynamo(t *testing.T, discovery string) {
	n := newNamespace(t, "kvepp-e2e-dynamo-"+discovery)
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/dynamo-"+discovery+".yaml"))
	n.install("pool.selector.app=dynamo", "engine=dynamo")
	n.kubectl("rollout", "status", "deployment/dynamo", "--timeout=120s")
	n.startEnvoy("original-dst.yaml", map[string]string{"kvepp": "kvepp." + n.name + ".svc.cluster.local:9002"})
	n.sees(2)

	// say takes a turn, and repeats it until the worker had as much of it as kvepp thought: at once, unless an event is under way.
	say := func(c *conversation) *stack.Answer {
		t.Helper()
		before := c.messages
		n.eventually("kvepp predicts what Dynamo reports", func() error {
			n.idle()
			c.messages = slices.Clip(before)
			a, err := c.say("And then?", 8)
			if err == nil && a.CachedTokens != a.KveppCached {
				err = fmt.Errorf("%d tokens were cached at %s, kvepp predicted %d", a.CachedTokens, a.Worker, a.KveppCached)
			}
			return err
		})
		return c.last
	}
	var talk []*conversation
	for range 4 {
		talk = append(talk, n.newConversation())
	}
	all(t, talk, words(20))
	used := map[string]bool{}
	for turn := 2; turn <= 3; turn++ {
		for _, c := range talk {
			home, prompt := c.last.Worker, c.last.PromptTokens
			if a := say(c); a.Worker != home || a.CachedTokens < prompt/16*16 {
				t.Errorf("turn %d: at %s, %d tokens cached; before at %s, a prompt of %d", turn, a.Worker, a.CachedTokens, home, prompt)
			}
			used[c.last.Worker] = true
		}
	}
	if len(used) != 2 {
		t.Errorf("only %v of two workers were used", used)
	}

	pods, _ := n.pods("app=dynamo")
	n.during(func() { n.kubectl("delete", "pod", pods[0]) })
	n.sees(2)
	for _, c := range talk {
		say(c)
		if a := say(c); a.CachedTokens == 0 {
			t.Errorf("nothing is cached at %s", a.Worker)
		}
	}
}
