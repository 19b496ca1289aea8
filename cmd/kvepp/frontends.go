package main

import (
	"fmt"

	"kvepp/pool"
)

// tellMixed warns of frontends of Dynamo's behind which one model is served in two ways: by workers of two namespaces,
// or by aggregated and by decode workers. Such a frontend draws one of the ways for each request, whatever worker the
// request names, and refuses those that name a worker of the other.
//
// Source: dynamo-llm 1.6.1, discovery (a model's worker sets), and what its frontend answers.
func tellMixed(endpoints []pool.Endpoint, wrong *complaints) {
	type served struct{ address, model string }
	type way struct {
		namespace string
		alone     bool
	}
	seen := map[served]way{}
	for i := range endpoints {
		e := &endpoints[i]
		if e.Namespace == "" || e.Role != pool.Aggregated && e.Role != pool.Decode {
			continue
		}
		at, how := served{e.Address, e.Model}, way{e.Namespace, e.Role == pool.Aggregated}
		if first, there := seen[at]; !there {
			seen[at] = how
		} else if first != how {
			wrong.warn(fmt.Sprintf("the frontend at %s serves %q in two ways (workers of two Dynamo namespaces, or "+
				"aggregated and decode workers) and will "+
				"refuse requests at random: give each its own frontend, started with --namespace", e.Address, e.Model))
		}
	}
}
