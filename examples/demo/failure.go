package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"kvepp/test/harness/process"
	"kvepp/test/harness/stack"
)

// The number of requests while a worker is dead, and how many run at once.
const (
	shortRequests = 120
	atOnce        = 6
)

// outage is the result of the requests while a worker was dead.
type outage struct {
	responded, lost int
	byVictim        int    // answered by the killed worker
	said            string // kvepp's warning
}

// killOne kills a worker, sends requests, prints the result, and starts the worker again.
func killOne(ctx context.Context, s *stack.Stack) error {
	victim := s.Workers[2]
	fmt.Printf(
		"\n%s is killed (SIGKILL; its frontend answers 503), and %d requests are sent, %d at a time:\n\n",
		victim.Name,
		shortRequests,
		atOnce,
	)
	victim.Kill()
	o := send(ctx, s, victim)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	log, err := os.ReadFile(filepath.Join(filepath.Dir(s.EndpointsFile()), "kvepp.log"))
	if err != nil {
		return err
	}
	for _, line := range strings.Split(string(log), "\n") {
		if strings.Contains(line, "endpoint ejected") {
			o.said = line
			break
		}
	}
	fmt.Printf(
		"  answered                     %d of %d\n  lost                         %d\n",
		o.responded,
		shortRequests,
		o.lost,
	)
	fmt.Printf("  kvepp's log                  %s\n", o.said)
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	if err := victim.Restart(); err != nil {
		return err
	}
	if err := s.Settled(ctx, len(s.Workers)); err != nil {
		return err
	}
	if err := victim.Ready(ctx); err != nil {
		return err
	}
	err = process.Until(ctx, func() error {
		if back := send(ctx, s, victim); back.byVictim == 0 {
			return errors.New("the worker has served no request yet")
		}
		return nil
	})
	if err != nil {
		return err
	}
	fmt.Printf("  started again, and serving   after %.1f s\n", time.Since(began).Seconds())
	switch {
	case o.said == "":
		return errors.New("kvepp's log names no ejected endpoint")
	case o.lost > 0:
		return fmt.Errorf("%d requests were lost, although other workers could answer them", o.lost)
	case o.byVictim > 0:
		return fmt.Errorf("the dead worker answered %d requests", o.byVictim)
	}
	return nil
}

// send sends the requests and counts their results.
func send(ctx context.Context, s *stack.Stack, victim *stack.Worker) (o outage) {
	var (
		mu   sync.Mutex // guards o and sent
		sent int
		wait sync.WaitGroup
	)
	for range atOnce {
		wait.Go(func() {
			for ctx.Err() == nil {
				mu.Lock()
				sent++
				n := sent
				mu.Unlock()
				if n > shortRequests {
					return
				}
				a, err := ask(
					ctx,
					func(int) (string, http.Header, error) { return s.Envoy.URL, nil, nil },
					n,
					[]stack.Message{
						{Role: "user", Content: fmt.Sprintf("%d. What should I know of %s?", n, topics[n%len(topics)])},
					},
				)
				mu.Lock()
				if err != nil || a.Status != http.StatusOK {
					o.lost++
				} else if o.responded++; a.Worker == victim.Name+"/0" {
					o.byVictim++
				}
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	return o
}
