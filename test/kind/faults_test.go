package kind

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"kvepp/test/harness/stack"
)

// TestEngineFails makes one of three engine Pods fail while it stays Ready: its API answers 500, its /health 200. kvepp
// ejects it, and sends it requests again when the fault is over. Without retries at most three requests are lost, in
// addition to those that were running when the fault began, and one for each trial. The chart's own Envoy
// (envoy.create) does not retry a 500 either, but it retries a 503.
func TestEngineFails(t *testing.T) {
	t.Run("an Envoy without retries", func(t *testing.T) {
		n := newNamespace(t, "kvepp-e2e-fails")
		n.apply(read(t, "testdata/hub.yaml"))
		n.apply(read(t, "testdata/engines.yaml"))
		n.install("pool.selector.app=engine")
		n.startEnvoy("override-host.yaml", map[string]string{
			"kvepp": "kvepp-replicas." + n.name + ".svc.cluster.local:9002", "pool": "engine." + n.name +
				".svc.cluster.local:8000"})
		n.awaitWorkers(3)
		n.engineFails(3)
	})
	t.Run("the chart's Envoy", func(t *testing.T) {
		n := newNamespace(t, "kvepp-e2e-fails-envoy")
		n.apply(read(t, "testdata/hub.yaml"))
		n.apply(read(t, "testdata/engines.yaml"))
		n.install(
			"pool.selector.app=engine",
			"envoy.create=true",
			"envoy.image=kvepp/envoy:e2e",
			"envoy.resources.requests.cpu=50m",
		)
		n.kubectl(
			"expose",
			"deployment",
			"kvepp-envoy",
			"--name=envoy",
			"--type=NodePort",
			"--port=80",
			"--target-port=http",
		)
		n.findEnvoy("envoy")
		n.awaitWorkers(3)
		n.awaitEnvoys()
		n.stickyConversations(3)
		n.engineFails(2)

		pods, _ := n.pods("app=engine")
		if lost := n.chats(1000, 300, func() { n.setFault(pods[1], "503") }); len(lost) > 0 {
			t.Errorf("%d requests lost at an engine that answers 503: %q ...", len(lost), lost[0])
		}
		n.setFault(pods[1], "")
		n.awaitServing(pods[1])
	})
}

// clients is how many clients send chats at the same time.
const clients = 8

// engineFails makes a Pod answer 500 under traffic, and then ends the fault. failures is the number of consecutive
// failures that eject an endpoint.
func (n *namespace) engineFails(failures int) {
	n.t.Helper()
	pods, _ := n.pods("app=engine")
	bad := pods[0]
	lost := n.chats(1000, 300, func() { n.setFault(bad, "500") })

	if _, ready := n.pods("app=engine"); !slices.Contains(ready, bad) {
		n.t.Errorf("%s is not Ready; this test needs a Ready Pod", bad)
	}
	replicas, _ := n.pods(kvepp)
	m, err := n.metrics(replicas[0])
	if err != nil {
		n.t.Fatal(err)
	}
	ejections := m[`kvepp_ejections_total{cause="status_5xx"}`]
	n.t.Logf("%d of 1000 requests lost, %v ejections", len(lost), ejections)
	if ejections == 0 || m["kvepp_ejections_total"] != ejections || m["kvepp_ejected_workers"] != 1 {
		n.t.Errorf(
			"%v ejections, %v of them after a 5xx; %v ejected workers",
			m["kvepp_ejections_total"],
			ejections,
			m["kvepp_ejected_workers"],
		)
	}
	// The first ejection follows no trial.
	if allowed := failures + (clients - 1) + int(ejections) - 1; len(lost) > allowed {
		n.t.Errorf("%d requests lost, at most %d may be: %q ...", len(lost), allowed, lost[:min(3, len(lost))])
	}
	warned := false
	for text := range strings.Lines(n.kubectl("logs", replicas[0])) {
		var l struct {
			Level, Msg, Endpoint, Cause string
			Next                        string `json:"next_trial_in"`
		}
		if json.Unmarshal([]byte(text), &l) == nil && strings.HasPrefix(l.Msg, "endpoint ejected") {
			warned = true
			if l.Level != "WARN" || l.Endpoint != bad+"-rank-0" || l.Cause != "status_5xx" || l.Next == "" {
				n.t.Errorf("%s was ejected for responses of 500, but the log says %s", bad, text)
			}
		}
	}
	if !warned {
		n.t.Error("no line of the log says that an endpoint is ejected")
	}

	n.setFault(bad, "")
	n.awaitServing(bad)
	n.eventually("no worker is ejected", func() error {
		m, err := n.metrics(replicas[0])
		if err == nil && m["kvepp_ejected_workers"] != 0 {
			err = fmt.Errorf("%v are", m["kvepp_ejected_workers"])
		}
		return err
	})
}

// setFault makes the engine of a Pod fail in a mode of examples/engine/faults.go; "" ends the fault.
func (n *namespace) setFault(pod, mode string) {
	n.t.Helper()
	if _, err := n.run("", "kubectl", "create", "--raw",
		fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:8000/proxy/fault?mode=%s", n.name, pod, mode), "-f",
		"-"); err != nil {
		n.t.Error(err)
	}
}

// awaitServing waits until a Pod of engines answers a chat.
func (n *namespace) awaitServing(pod string) {
	n.t.Helper()
	n.eventually(pod+" serves again", func() error {
		c := n.newConversation()
		_, err := c.say(words(20), 8)
		if err == nil && c.engine() != pod {
			err = fmt.Errorf("%s served", c.engine())
		}
		return err
	})
}

// awaitEnvoys waits until each of several Envoys behind one address has found kvepp. Until then they choose engines
// themselves.
func (n *namespace) awaitEnvoys() {
	n.t.Helper()
	// Each request has a new connection, to any Envoy.
	fresh := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: client.Timeout}
	n.eventually("each Envoy calls kvepp", func() error {
		for range 20 {
			a, err := stack.Chat(
				n.t.Context(),
				fresh,
				n.url,
				nil,
				[]stack.Message{{Role: "user", Content: words(5)}},
				true,
				map[string]any{"model": n.model},
			)
			if err == nil && (a.Status != http.StatusOK || a.Worker == "") {
				err = fmt.Errorf("status %d from worker %q", a.Status, a.Worker)
			}
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// chats sends total chats from parallel clients, and calls begin before chat number at. It returns the result of each
// chat without a complete response.
func (n *namespace) chats(total, at int, begin func()) (lost []string) {
	var (
		next atomic.Int64
		mu   sync.Mutex
		wg   sync.WaitGroup
	)
	for range clients {
		wg.Go(func() {
			for i := int(next.Add(1)); i <= total; i = int(next.Add(1)) {
				if i == at {
					begin()
				}
				question := fmt.Sprintf("Conversation %d. %s", i%24, strings.Repeat("Say more about this. ", 20+i/24))
				a, err := stack.Chat(
					context.Background(),
					client,
					n.url,
					nil,
					[]stack.Message{{Role: "user", Content: question}},
					i%2 == 0,
					map[string]any{"model": n.model},
				)
				if err == nil && (a.Status != http.StatusOK || !a.Finished) {
					err = fmt.Errorf("%d from %s: %.60q", a.Status, a.Worker, a.Body)
				}
				if err != nil {
					mu.Lock()
					lost = append(lost, err.Error())
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	return lost
}
