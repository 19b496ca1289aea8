package e2e

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestDecisionsNameEjectedEndpoints checks decision records and debug log lines while an engine is ejected: they name
// the engine and its trial request, and they say when all engines are candidates because all are ejected.
func TestDecisionsNameEjectedEndpoints(t *testing.T) {
	engines := standIns(t, 2, "-token-time=1ms")
	s := start(
		t,
		stack.Config{Workers: -1, Engines: engines, KveppFlags: []string{"--engine=vllm"}},
	)
	prompts := 0
	decide := func() (*stack.Response, *stack.Decision) {
		t.Helper()
		prompts++
		// No two prompts share a block, so that the choice between two idle engines is random.
		a, err := stack.Post(t.Context(), http.DefaultClient, s.Envoy.URL+"/v1/completions", nil, map[string]any{
			"model": stack.Model, "prompt": fmt.Sprintf("%06d is a number", prompts), "max_tokens": 4, "stream": true})
		if err != nil {
			t.Fatal(err)
		}
		d, err := s.Decision(t.Context(), a.Header.Get("x-kvepp-request-id"))
		if err != nil {
			t.Fatal(err)
		}
		return a, d
	}
	// until sends requests until a decision satisfies the condition.
	until := func(what string, wanted func(*stack.Response, *stack.Decision) bool) {
		t.Helper()
		eventually(t, func() error {
			if a, d := decide(); !wanted(a, d) {
				return fmt.Errorf("%s: status %d, decision %+v", what, a.Status, *d)
			}
			return nil
		})
	}
	bad, good := engines[0], engines[1]
	if err := bad.Fault(t.Context(), "500"); err != nil {
		t.Fatal(err)
	}
	until("no candidate", func(a *stack.Response, d *stack.Decision) bool {
		return slices.Equal(d.Ejected, []string{bad.Name}) && !d.EjectedServe && !d.Trial &&
			d.Worker.Name == good.Name &&
			len(d.Candidates) == 1 &&
			a.Status == http.StatusOK
	})
	until("a trial that fails", func(a *stack.Response, d *stack.Decision) bool {
		return d.Trial && d.Worker.Name == bad.Name && a.Status == http.StatusInternalServerError
	})
	if err := good.Fault(t.Context(), "500"); err != nil {
		t.Fatal(err)
	}
	until("all are ejected", func(_ *stack.Response, d *stack.Decision) bool {
		return d.EjectedServe && len(d.Ejected) == 2 && len(d.Candidates) == 2
	})
	for _, e := range engines {
		if err := e.Fault(t.Context(), ""); err != nil {
			t.Fatal(err)
		}
	}
	until("both serve again", func(a *stack.Response, d *stack.Decision) bool {
		return len(d.Ejected) == 0 && !d.Trial && len(d.Candidates) == 2 && a.Status == http.StatusOK
	})
	eventually(t, func() error {
		log, err := s.Log()
		if err == nil && !strings.Contains(log, " ejected=["+bad.Name+"] ") {
			err = errors.New("no line at debug level names the ejected engine")
		}
		return err
	})
}
