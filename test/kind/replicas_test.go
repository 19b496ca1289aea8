package kind

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestReplicas runs three replicas that share their running requests, behind the chart's Envoy. Under load one is
// killed, two are cut off from each other, all are replaced by a rolling update, and one is added. Only requests that
// the killed replica handled may fail. After each change the replicas' copies are equal. The test reads them at the
// admin address that the chart opens.
func TestReplicas(t *testing.T) {
	n := newNamespace(t, "kvepp-e2e-replicas")
	n.apply(read(t, "testdata/hub.yaml"))
	n.apply(read(t, "testdata/engines.yaml"))
	n.install("pool.selector.app=engine", "replicas=3", "envoy.create=true", "envoy.image=kvepp/envoy:e2e",
		"envoy.replicas=1", "envoy.resources.requests.cpu=50m",
		"extraArgs={--decision-headers}", "admin.enabled=true")
	n.kubectl("expose", "deployment", "kvepp-envoy", "--name=envoy", "--type=NodePort", "--port=80",
		"--target-port=http")
	n.findEnvoy("envoy")
	n.awaitWorkers(3)
	r := n.watchReplicas()
	noToken := *r
	noToken.token = "a guess"
	if err := noToken.get(r.pods[0], "/workers", nil); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("the admin address answered without the token: %v", err)
	}

	for _, part := range []struct {
		name string
		test func()
	}{
		{"one is killed", r.kill},
		{"two are cut off from each other", r.partition},
		{"all are replaced", func() {
			old := r.pods
			n.duringTraffic(func() {
				n.kubectl("rollout", "restart", "deployment/kvepp")
				n.kubectl("rollout", "status", "deployment/kvepp", "--timeout=180s")
				// Requests that began before still run at replicas that end.
				n.eventually("the old replicas are gone", func() error {
					left := strings.Fields(n.kubectl("get", "pods", "-l", kvepp, "-o",
						"jsonpath={.items[*].metadata.name}"))
					if slices.ContainsFunc(left, func(pod string) bool { return slices.Contains(old, pod) }) {
						return fmt.Errorf("there are %v, and there were %v", left, old)
					}
					return nil
				})
			})
			r.follow()
			r.awaitEqual(3)
		}},
		{"one is added", func() {
			n.duringTraffic(func() {
				n.kubectl("scale", "deployment/kvepp", "--replicas=4")
				n.kubectl("rollout", "status", "deployment/kvepp", "--timeout=120s")
			})
			r.follow()
			r.awaitEqual(4)
		}},
	} {
		if !t.Run(part.name, func(t *testing.T) { n.t = t; part.test() }) {
			break
		}
		n.t = t
	}
	n.t = t
}

// replicaView is what a replica says of itself and of its peers.
type replicaView struct {
	Self struct {
		Replica  string
		Bookings int
	}
	Peers []struct {
		Replica, State string
		Bookings       int
	}
}

// of returns a peer's state and its bookings as this replica knows them; "" and 0 if it does not know the peer.
func (v *replicaView) of(replica string) (state string, bookings int) {
	for _, p := range v.Peers {
		if p.Replica == replica {
			return p.State, p.Bookings
		}
	}
	return "", 0
}

// watchedReplicas are the Pods of kvepp with the addresses at which the test reaches their admin ports.
type watchedReplicas struct {
	*namespace
	ctx   context.Context // of the whole test: the forwarded ports outlive its parts
	token string          // of the admin ports
	pods  []string
	admin map[string]string
}

func (n *namespace) watchReplicas() *watchedReplicas {
	token := n.kubectl("get", "secret", "kvepp-admin", "-o", `go-template={{index .data "token" | base64decode}}`)
	r := &watchedReplicas{namespace: n, ctx: n.t.Context(), token: token, admin: map[string]string{}}
	r.follow()
	return r
}

// follow finds the present Pods, and forwards ports to those that are new. The ports are open until the test ends.
func (r *watchedReplicas) follow() {
	r.t.Helper()
	r.pods, _ = r.namespace.pods(kvepp)
	for _, pod := range r.pods {
		if r.admin[pod] != "" {
			continue
		}
		forward := exec.CommandContext(r.ctx, "kubectl", "--namespace", r.name, "port-forward", "pod/"+pod, ":9091")
		says, err := forward.StdoutPipe()
		if err == nil {
			err = forward.Start()
		}
		if err != nil {
			r.t.Fatal(err)
		}
		line, _ := bufio.NewReader(says).ReadString('\n') // Forwarding from 127.0.0.1:PORT -> 9091
		_, address, _ := strings.Cut(line, "from ")
		address, _, ok := strings.Cut(address, " ->")
		if !ok {
			r.t.Fatalf("kubectl port-forward %s: %q", pod, line)
		}
		r.admin[pod] = address
	}
}

// get decodes what a Pod answers at its admin port.
func (r *watchedReplicas) get(pod, path string, into any) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, "GET", "http://"+r.admin[pod]+path, nil)
	if err != nil {
		return err
	}
	req.Close = true
	req.Header.Set("Authorization", "Bearer "+r.token)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s of %s: %s", path, pod, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// views returns what each replica says.
func (r *watchedReplicas) views() (map[string]*replicaView, error) {
	all := map[string]*replicaView{}
	for _, pod := range r.pods {
		all[pod] = new(replicaView)
		if err := r.get(pod, "/debug/replicas", all[pod]); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// running returns the running requests of each engine as a replica counts them.
func (r *watchedReplicas) running(pod string) (map[string]int, error) {
	var list struct {
		Endpoints []struct {
			Name    string
			Workers []struct {
				Running int `json:"running_requests"`
			}
		}
	}
	err := r.get(pod, "/workers", &list)
	requests := map[string]int{}
	for _, e := range list.Endpoints {
		for _, w := range e.Workers {
			requests[e.Name] += w.Running
		}
	}
	return requests, err
}

// awaitEqual waits until so many replicas agree on who runs what, while requests run. When these end first, it begins
// with others.
func (r *watchedReplicas) awaitEqual(replicas int) {
	r.t.Helper()
	const requests = 9
	var (
		wg      sync.WaitGroup
		running atomic.Int64
		mu      sync.Mutex
		failed  []error
		before  = r.pods
	)
	r.eventually("all replicas have equal copies", func() error {
		if running.Load() == 0 {
			running.Store(requests)
			for range requests {
				wg.Go(func() {
					defer running.Add(-1)
					if _, err := r.newConversation().say(words(20), 800); err != nil {
						mu.Lock()
						failed = append(failed, err)
						mu.Unlock()
					}
				})
			}
		}
		return r.equal(replicas, requests)
	})
	wg.Wait()
	if err := errors.Join(failed...); err != nil {
		r.t.Errorf("requests failed while %v ran: %v", before, err)
	}
}

// equal returns an error unless each of so many replicas has the bookings of all others, which are so many together,
// and counts as many requests at each engine as the others.
func (r *watchedReplicas) equal(replicas, requests int) error {
	views, err := r.views()
	if err != nil {
		return err
	}
	if len(views) != replicas {
		return fmt.Errorf("%d replicas, want %d", len(views), replicas)
	}
	total := 0
	for pod, owner := range views {
		total += owner.Self.Bookings
		for other, v := range views {
			if other == pod {
				continue
			}
			if state, got := v.of(owner.Self.Replica); state != "live" || got != owner.Self.Bookings {
				return fmt.Errorf("%s has %d bookings; at %s it is %q with %d", pod, owner.Self.Bookings, other, state,
					got)
			}
		}
	}
	if total != requests {
		return fmt.Errorf("%d bookings, want %d", total, requests)
	}
	first, err := r.running(r.pods[0])
	if err != nil {
		return err
	}
	for _, pod := range r.pods[1:] {
		if now, err := r.running(pod); err != nil || !maps.Equal(now, first) {
			return fmt.Errorf("%s counts %v, %s counts %v: %w", r.pods[0], first, pod, now, err)
		}
	}
	return nil
}

// node runs a command in the container that is the cluster's node, as `docker exec` does.
func (r *watchedReplicas) node(args ...string) error {
	node, err := r.run("", "kubectl", "get", "nodes", "-o", "jsonpath={.items[0].metadata.name}")
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(context.Background(), "docker", append([]string{"exec", node}, args...)...).
		CombinedOutput()
	if err != nil {
		return fmt.Errorf("docker exec %s %q: %w: %s", node, args, err, out)
	}
	return nil
}

// killKvepp kills the process of kvepp in the Pod with the UID $1, of whose control group the name has dashes,
// underscores or neither.
const killKvepp = `plain=$(echo "$1" | tr -d -); under=$(echo "$1" | tr - _)
for p in /proc/[0-9]*; do
	[ "$(cat $p/comm 2>/dev/null)" = kvepp ] && grep -qE "pod($1|$plain|$under)" $p/cgroup || continue
	kill -KILL "${p#/proc/}" && exit 0
done
exit 1`

// kill kills a replica that handles requests. Only those that it had, and the next ones until Envoy sees its
// connections break, may fail, one of each client. The others end its bookings.
func (r *watchedReplicas) kill() {
	r.t.Helper()
	stop := r.startTraffic(12)
	victim, rest := r.pods[0], r.pods[1:]
	uid := r.kubectl("get", "pod", victim, "-o", "jsonpath={.metadata.uid}")
	var dead string
	r.eventually("the replica handles requests", func() error {
		var owner, v replicaView
		if err := errors.Join(r.get(victim, "/debug/replicas", &owner),
			r.get(rest[0], "/debug/replicas", &v)); err != nil {
			return err
		}
		dead = owner.Self.Replica
		if _, bookings := v.of(dead); bookings < 2 {
			return fmt.Errorf("%s knows %d of its bookings", rest[0], bookings)
		}
		return nil
	})
	if err := r.node("sh", "-c", killKvepp, "kill", uid); err != nil {
		r.t.Fatal(err)
	}
	killed := time.Now()
	for _, pod := range rest {
		r.eventually(pod+" frees the dead replica's bookings", func() error {
			var v replicaView
			if err := r.get(pod, "/debug/replicas", &v); err != nil {
				return err
			}
			if state, bookings := v.of(dead); bookings > 0 {
				return fmt.Errorf("it is %s with %d bookings", state, bookings)
			}
			return nil
		})
		r.t.Logf("%s has none of its bookings %v after the kill", pod, time.Since(killed).Round(10*time.Millisecond))
	}
	r.eventually("the replica is back", func() error {
		if _, ready := r.namespace.pods(kvepp); !slices.Contains(ready, victim) {
			return errors.New("it is not ready")
		}
		return nil
	})
	requests, failures := stop()
	lost := 0
	for _, err := range failures {
		if f := (*failedRequest)(nil); errors.As(err, &f) && f.began.Before(killed.Add(time.Second)) && lost < 12 {
			lost++
		} else {
			r.t.Errorf("failed, although it began after the kill: %v", err)
		}
	}
	r.t.Logf("%d of %d requests failed, which ran when their replica was killed: %v", lost, requests, failures)
	r.awaitEqual(3)
}

// partition drops the packets between two replicas for a while.
func (r *watchedReplicas) partition() {
	r.t.Helper()
	var ips, origins [2]string
	for i, pod := range r.pods[:2] {
		ips[i] = r.kubectl("get", "pod", pod, "-o", "jsonpath={.status.podIP}")
		var v replicaView
		if err := r.get(pod, "/debug/replicas", &v); err != nil {
			r.t.Fatal(err)
		}
		origins[i] = v.Self.Replica
	}
	drop := func(change string) error {
		return errors.Join(r.node("iptables", change, "FORWARD", "-s", ips[0], "-d", ips[1], "-j", "DROP"),
			r.node("iptables", change, "FORWARD", "-s", ips[1], "-d", ips[0], "-j", "DROP"))
	}
	dropped := false
	defer func() {
		if dropped {
			_ = drop("-D")
		}
	}()
	r.duringTraffic(func() {
		dropped = true
		if err := drop("-I"); err != nil {
			r.t.Fatal(err)
		}
		r.eventually("neither counts the other's requests, and the third one counts both", func() error {
			views, err := r.views()
			if err != nil {
				return err
			}
			for i, pod := range r.pods[:2] {
				if state, bookings := views[pod].of(origins[1-i]); state == "live" || bookings > 0 {
					return fmt.Errorf("at %s the other one is %q with %d bookings", pod, state, bookings)
				}
				if state, _ := views[r.pods[2]].of(origins[i]); state != "live" {
					return fmt.Errorf("at %s %s is %q", r.pods[2], pod, state)
				}
			}
			return nil
		})
	})
	if err := drop("-D"); err != nil {
		r.t.Fatal(err)
	}
	dropped = false
	r.awaitEqual(3)
}
