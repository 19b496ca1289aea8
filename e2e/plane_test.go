package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestEventPlane: workers that announce their blocks only on Dynamo's event plane, each with its frontend, and two
// behind one frontend.
func TestEventPlane(t *testing.T) {
	for _, plane := range []string{"zmq", "nats"} {
		for _, shared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s,shared=%v", plane, shared), func(t *testing.T) {
				s := start(
					t,
					stack.Config{Workers: 2, Ranks: 2, Speedup: 20, EventPlane: plane, SharedFrontend: shared},
				)
				nothingLeft(t, s)
				used := map[string]bool{}
				for i := range 12 {
					worker := warm(t, s.Envoy.URL, conversation(fmt.Sprint(t.Name(), i), 2), i%2 == 0, nil).Worker
					name, _, _ := strings.Cut(worker, "/")
					used[name] = true
				}
				for _, w := range s.Workers {
					if !used[w.Name] {
						t.Errorf("no prompt was routed to %s by its cache", w.Name)
					}
				}
				if plane != "nats" || shared {
					return
				}
				// An operator of the server sees kvepp and its version beside the connection.
				names, err := s.NATSClients(t.Context())
				if err != nil || !slices.ContainsFunc(names, func(name string) bool {
					return strings.HasPrefix(name, "kvepp/")
				}) {
					t.Errorf("NATS's clients are %q, %v", names, err)
				}
				// Events during the restart may be lost. Afterwards the index must be correct again.
				if err := s.RestartNATS(t.Context(), func() { chat(t, s.Envoy.URL, novel(), false, nil) }); err != nil {
					t.Fatal(err)
				}
				if err := s.Settled(t.Context(), 4); err != nil {
					t.Fatal(err)
				}
				for i := range 4 {
					warm(t, s.Envoy.URL, conversation(fmt.Sprint(t.Name(), "after", i), 2), false, nil)
				}
			})
		}
	}
}
