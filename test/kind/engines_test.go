package kind

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestEngines runs plain engines behind an InferencePool. Its parts run in sequence in one namespace.
func TestEngines(t *testing.T) {
	n := newNamespace(t, "kvepp-e2e-engines")
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/engines.yaml"))
	n.install("pool.selector.app=engine")
	n.startEnvoy("override-host.yaml", map[string]string{
		"kvepp": "kvepp-replicas." + n.name + ".svc.cluster.local:9002", "pool": "engine." + n.name +
			".svc.cluster.local:8000"})
	n.awaitWorkers(3)

	var talk []*conversation
	for _, part := range []struct {
		name string
		test func(*testing.T)
	}{
		{"conversations go warm", func(t *testing.T) {
			talk = n.spreadConversations(6, 3)
			for turn := 2; turn <= 4; turn++ {
				n.awaitIndexes()
				var home []string
				var prompt []int
				for _, c := range talk {
					home, prompt = append(home, c.engine()), append(prompt, c.last.PromptTokens)
				}
				sayExactEach(t, talk)
				for i, c := range talk {
					if c.engine() != home[i] || c.last.CachedTokens < prompt[i]/16*16 {
						t.Errorf("turn %d: at %s, %d tokens cached; before at %s, a prompt of %d", turn, c.engine(),
							c.last.CachedTokens, home[i], prompt[i])
					}
				}
			}
		}},
		{"kvepp check reports a problem", func(t *testing.T) {
			n.wantCheck(3, []string{"vLLM answers", "5557 announces blocks", "5657 answers"}, "--kv-replay-port=5657")
			engines, _ := n.pods("app=engine")
			n.kubectl("annotate", "pod", engines[0], "kvepp/kv-events-port=5999")
			n.eventually("kvepp follows the annotation", func() error {
				pods, _ := n.pods(kvepp)
				m, err := n.metrics(pods[0])
				if err == nil && m[`kvepp_subscriptions{state="connected"}`] != 2 {
					err = fmt.Errorf("%v subscriptions are connected", m[`kvepp_subscriptions{state="connected"}`])
				}
				return err
			})
			status, table := n.check("--kv-replay-port=5657")
			for _, says := range []string{engines[0], ":5999", "--kv-events-config", "--kv-events-port"} {
				if !strings.Contains(table, says) {
					t.Errorf("kvepp check does not report %s", says)
				}
			}
			if got := strings.Count(table, "announces blocks"); status != 1 || got != 2 {
				t.Errorf("kvepp check exits with %d, and reports %d workers that announce blocks", status, got)
			}
			n.kubectl("annotate", "pod", engines[0], "kvepp/kv-events-port-")
			n.awaitWorkers(3)
			n.awaitIndexes() // kvepp has replayed the missed events
		}},
		{"a new engine is used", func(t *testing.T) {
			n.duringTraffic(func() { n.scaleUp("engine", 4) })
		}},
		{"a deleted engine's work moves", func(t *testing.T) {
			c := talk[0]
			gone := c.engine()
			n.duringTraffic(func() { n.kubectl("delete", "pod", gone) })
			n.awaitWorkers(4)
			n.awaitIndexes()
			if _, err := c.say(words(20), 8); err != nil {
				t.Fatal(err)
			}
			if c.engine() == gone {
				t.Errorf("%s served, although it was deleted", gone)
			}
			n.awaitIndexes()
			sayExactEach(t, talk[:1]) // its blocks are cached at its current worker
		}},
		{"all engines but one are deleted", func(t *testing.T) {
			n.duringTraffic(func() {
				n.kubectl("scale", "deployment/engine", "--replicas=1")
				n.awaitWorkers(1)
				n.kubectl("wait", "--for=jsonpath={.status.replicas}=1", "deployment/engine", "--timeout=60s")
			})
			left, _ := n.pods("app=engine")
			sayAll(t, talk, words(20))
			for _, c := range talk {
				if len(left) != 1 || c.engine() != left[0] {
					t.Errorf("%s served, want %v", c.engine(), left)
				}
			}
			n.kubectl("scale", "deployment/engine", "--replicas=3")
			n.awaitWorkers(3)
		}},
		{"kvepp is rolled", func(t *testing.T) {
			old, _ := n.pods(kvepp)
			n.duringTraffic(func() {
				n.kubectl("rollout", "restart", "deployment/kvepp")
				n.kubectl("rollout", "status", "deployment/kvepp", "--timeout=120s")
				n.kubectl("wait", "--for=delete", "pod/"+old[0], "--timeout=120s")
			})
			// kvepp gets the caches from the engines' replays.
			n.awaitIndexes()
			sayExactEach(t, talk)
		}},
		{"two replicas elect a leader", func(t *testing.T) {
			n.install("pool.selector.app=engine", "replicas=2", "leaderElection.enabled=true")
			var leader string
			one := func() error {
				pods, ready := n.pods(kvepp)
				if len(pods) != 2 || len(ready) != 1 {
					return fmt.Errorf("of %v ready: %v", pods, ready)
				}
				leader = ready[0]
				return nil
			}
			n.eventually("one of two is ready", one)
			n.awaitWorkers(3)
			// A single replica elects no leader, and ends at once on SIGTERM: only a leader waits for the next one.
			n.eventually("Envoy calls the leader", func() error {
				if _, err := n.newConversation().say(words(20), 8); err != nil {
					return err
				}
				m, err := n.metrics(leader)
				if err == nil && m["kvepp_requests_total"] == 0 {
					err = fmt.Errorf("Envoy has no connection to %s", leader)
				}
				return err
			})
			n.awaitIndexes()
			// another returns the next leader, when it is the only leader.
			another := func(was string) {
				n.eventually("another one leads", func() error {
					if err := one(); err != nil {
						return err
					}
					if leader == was {
						return fmt.Errorf("%s still leads", leader)
					}
					return nil
				})
				n.kubectl("wait", "--for=delete", "pod/"+was, "--timeout=150s") // until then the old leader serves too
			}
			was := leader
			n.duringTraffic(func() {
				began := time.Now()
				n.kubectl("delete", "pod", was, "--wait=false")
				another(was)
				t.Logf("Envoy calls only the new leader %v after the old one was deleted",
					time.Since(began).Round(100*time.Millisecond))
			})
			n.awaitIndexes()
			sayExactEach(t, talk)
			was = leader
			n.duringTraffic(func() {
				n.kubectl("rollout", "restart", "deployment/kvepp")
				another(was)
			})
			n.awaitWorkers(3)
			n.awaitIndexes()
			sayExactEach(t, talk)
		}},
		{"two replicas decide", func(t *testing.T) {
			n.install("pool.selector.app=engine", "replicas=2")
			n.eventually("both are ready", func() error {
				if pods, ready := n.pods(kvepp); len(pods) != 2 || len(ready) != 2 {
					return fmt.Errorf("of %v ready: %v", pods, ready)
				}
				return nil
			})
			n.awaitWorkers(3)
			n.duringTraffic(func() {
				n.eventually("both decide", func() error {
					return n.eachReplica(func(pod string, m map[string]float64) error {
						if m["kvepp_requests_total"] < 10 {
							return fmt.Errorf("%s has had %v requests", pod, m["kvepp_requests_total"])
						}
						return nil
					})
				})
			})
			n.awaitIndexes()
			sayExactEach(t, talk)
		}},
	} {
		n.t = t
		if !t.Run(part.name, func(t *testing.T) { n.t = t; part.test(t) }) {
			break
		}
	}
	n.t = t
}

// sayExactEach takes a turn in each conversation, one after the other, so that load does not matter. It fails the test
// unless a part of the prompt was cached, as kvepp predicted.
func sayExactEach(t *testing.T, talk []*conversation) {
	t.Helper()
	for i, c := range talk {
		c.n.awaitIdle()
		if _, err := c.say(words(20), 8); err != nil {
			t.Fatal(err)
		}
		if c.last.CachedTokens == 0 || c.last.CachedTokens != c.last.KveppCached {
			t.Errorf(
				"conversation %d: %d tokens were cached, kvepp predicted %d",
				i,
				c.last.CachedTokens,
				c.last.KveppCached,
			)
		}
	}
}

// awaitIndexes waits until the indexes of all of kvepp's replicas have all blocks of the engines.
func (n *namespace) awaitIndexes() {
	n.t.Helper()
	n.eventually("kvepp's index has the engines' blocks", func() error {
		engines, _ := n.pods("app=engine")
		held := 0
		for _, pod := range engines {
			out, err := n.run(
				"",
				"kubectl",
				"get",
				"--raw",
				fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:8000/proxy/blocks", n.name, pod),
			)
			if err != nil {
				return err
			}
			blocks, err := strconv.Atoi(out)
			if err != nil {
				return err
			}
			held += blocks
		}
		return n.eachReplica(func(pod string, m map[string]float64) error {
			if m["kvepp_index_blocks"] != float64(held) {
				return fmt.Errorf("%s has %v blocks of %d", pod, m["kvepp_index_blocks"], held)
			}
			return nil
		})
	})
}
