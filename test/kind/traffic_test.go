package kind

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"kvepp/test/harness/stack"
)

// client keeps its connections open, as most clients do.
var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}, Timeout: 2 * time.Minute}

// conversation is one client's conversation; each turn repeats all previous ones.
type conversation struct {
	n        *namespace
	messages []stack.Message
	last     *stack.Response
}

// engine is the Pod that answered last.
func (c *conversation) engine() string { return c.last.Header.Get("x-engine") }

// newConversation returns a conversation with its own text.
func (n *namespace) newConversation() *conversation {
	return &conversation{n: n, messages: []stack.Message{{Role: "system", Content: words(120)}}}
}

// words returns n random words.
func words(n int) string {
	var b strings.Builder
	for range n {
		b.WriteString([]string{"river", "stone", "lamp", "winter", "paper", "seven", "green", "letter"}[rand.IntN(8)])
		b.WriteByte(' ')
	}
	return b.String()
}

// say takes a turn whose response has this many tokens. An error status or an incomplete response is an error.
func (c *conversation) say(text string, tokens int) (*stack.Response, error) {
	c.messages = append(c.messages, stack.Message{Role: "user", Content: text})
	a, err := stack.Chat(
		context.Background(),
		client,
		c.n.url,
		nil,
		c.messages,
		true,
		map[string]any{"model": c.n.model, "max_tokens": tokens},
	)
	if err != nil {
		return nil, err
	}
	if a.Status != http.StatusOK || !a.Finished {
		return nil, fmt.Errorf("status %d, finished: %v, from %s: %s", a.Status, a.Finished, a.Worker, a.Body)
	}
	c.messages = append(c.messages, stack.Message{Role: "assistant", Content: a.Text})
	c.last = a
	return a, nil
}

// sayExact takes a turn, and repeats it until the worker had as many cached tokens as kvepp predicted. It repeats the
// turn only if an event is in flight.
func (c *conversation) sayExact() *stack.Response {
	c.n.t.Helper()
	before, known := c.messages, c.n.knownBlocks()
	c.n.eventually("kvepp predicts what the worker reports", func() error {
		c.n.awaitIdle()
		c.messages = slices.Clip(before)
		a, err := c.say("And then?", 8)
		if err == nil && a.CachedTokens != a.KveppCached {
			err = fmt.Errorf("%d tokens were cached at %s, kvepp predicted %d", a.CachedTokens, a.Worker, a.KveppCached)
		}
		return err
	})
	c.n.awaitBlocks(known, c)
	return c.last
}

// knownBlocks returns how many blocks each of kvepp's replicas has at least.
func (n *namespace) knownBlocks() int {
	n.t.Helper()
	least, err := n.leastKnownBlocks()
	if err != nil {
		n.t.Fatal(err)
	}
	return least
}

func (n *namespace) leastKnownBlocks() (int, error) {
	least := math.Inf(1)
	err := n.eachReplica(func(_ string, m map[string]float64) error {
		least = min(least, m["kvepp_index_blocks"])
		return nil
	})
	return int(least), err
}

// awaitBlocks waits until kvepp has the new blocks of the conversations' latest turns, in addition to known blocks.
// Without this wait a turn may precede its events, and go to a worker without its blocks.
func (n *namespace) awaitBlocks(known int, conversations ...*conversation) {
	n.t.Helper()
	for _, c := range conversations {
		known += (c.last.PromptTokens-1)/16 - c.last.CachedTokens/16 // the last token is always computed
	}
	n.eventually("kvepp's index has the blocks of the latest turns", func() error {
		now, err := n.leastKnownBlocks()
		if err == nil && now < known {
			err = fmt.Errorf("kvepp has %d blocks, want at least %d", now, known)
		}
		return err
	})
}

// spreadConversations begins conversations at the same time, and repeats that until load has spread them over this many
// workers: on a slow machine the first ones may end before the last ones begin. It returns them when kvepp has their
// blocks.
func (n *namespace) spreadConversations(conversations, workers int) (talk []*conversation) {
	n.t.Helper()
	n.eventually("conversations spread", func() error {
		n.awaitIdle()
		known := n.knownBlocks()
		talk = nil
		for range conversations {
			c := n.newConversation()
			// Their prefill takes longer than what a busy machine adds to a first token. Else kvepp may rightly leave
			// a warm worker whose responses begin late.
			c.messages[0].Content = words(1000)
			talk = append(talk, c)
		}
		sayAll(n.t, talk, words(20))
		n.awaitBlocks(known, talk...)
		used := map[string]bool{}
		for _, c := range talk {
			used[c.last.Worker] = true
		}
		if len(used) != workers {
			return fmt.Errorf("only %v of %d workers were used", used, workers)
		}
		return nil
	})
	return talk
}

// stickyConversations holds conversations over this many workers, and fails the test unless each stays on its worker
// and finds all of its blocks there. It returns them.
func (n *namespace) stickyConversations(workers int) []*conversation {
	n.t.Helper()
	talk := n.spreadConversations(2*workers, workers)
	for turn := 2; turn <= 3; turn++ {
		for _, c := range talk {
			home, prompt := c.last.Worker, c.last.PromptTokens
			if a := c.sayExact(); a.Worker != home || a.CachedTokens < prompt/16*16 {
				n.t.Errorf(
					"turn %d: at %s, %d tokens cached; before at %s, a prompt of %d",
					turn,
					a.Worker,
					a.CachedTokens,
					home,
					prompt,
				)
			}
		}
	}
	return talk
}

// sayAll takes a turn in all conversations at the same time, and fails the test unless all are answered.
func sayAll(t *testing.T, conversations []*conversation, text string) {
	t.Helper()
	errs := make([]error, len(conversations))
	var wg sync.WaitGroup
	for i, c := range conversations {
		wg.Go(func() { _, errs[i] = c.say(text, 8) })
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// failedRequest is a request that failed.
type failedRequest struct {
	began time.Time
	err   error
}

func (f *failedRequest) Error() string {
	return fmt.Sprintf("at %s: %v", f.began.Format("15:04:05.000"), f.err)
}

func (f *failedRequest) Unwrap() error { return f.err }

// startTraffic holds conversations with responses of half a second until stop is called. stop returns the number of
// requests, and the errors of the failed ones.
func (n *namespace) startTraffic(clients int) (stop func() (requests int, failures []error)) {
	ctx, cancel := context.WithCancel(context.Background())
	var (
		mu       sync.Mutex
		requests int
		failures []error
		wg       sync.WaitGroup
	)
	for range clients {
		wg.Go(func() {
			for ctx.Err() == nil {
				c := n.newConversation()
				for turn := 0; turn < 4 && ctx.Err() == nil; turn++ {
					began := time.Now()
					_, err := c.say(words(20), 100)
					mu.Lock()
					requests++
					if err != nil {
						failures = append(failures, &failedRequest{began, err})
					}
					mu.Unlock()
					if err != nil {
						break
					}
				}
			}
		})
	}
	return func() (int, []error) {
		cancel()
		wg.Wait()
		return requests, failures
	}
}

// scaleUp scales a Deployment of engines, whose app label is its name, and waits until a new one serves.
func (n *namespace) scaleUp(deployment string, to int) {
	n.t.Helper()
	old, _ := n.pods("app=" + deployment)
	n.kubectl("scale", "deployment/"+deployment, fmt.Sprintf("--replicas=%d", to))
	n.awaitWorkers(to)
	n.eventually("the new engine serves", func() error {
		c := n.newConversation()
		if _, err := c.say(words(20), 8); err != nil {
			return err
		}
		if slices.Contains(old, c.engine()) {
			return fmt.Errorf("%s served", c.engine())
		}
		return nil
	})
}

// duringTraffic runs traffic while f changes the cluster, and fails the test if a request fails.
func (n *namespace) duringTraffic(f func()) {
	n.t.Helper()
	stop := n.startTraffic(6)
	f()
	requests, failures := stop()
	if requests == 0 || len(failures) > 0 {
		n.t.Errorf("%d of %d requests failed: %v ...", len(failures), requests, failures[:min(3, len(failures))])
		return
	}
	n.t.Logf("%d requests during the change, none failed", requests)
}
