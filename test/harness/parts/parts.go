// Package parts keeps `go test ./...` green where the real programs that a package's tests run are not installed:
// Envoy, Dynamo, engines, Kubernetes. The make targets install them and name them in environment variables.
package parts

import (
	"fmt"
	"os"
)

// Run runs the tests of m, a *testing.M or one that prepares something first, if at least one of the environment
// variables is set, and returns the exit status. Without any of them it runs no test, prints which make target to run,
// and returns 0. A variable that is set and empty is an error: a make target did not install what it should have.
func Run(m interface{ Run() int }, target string, variables ...string) int {
	found := false
	for _, name := range variables {
		value, set := os.LookupEnv(name)
		if set && value == "" {
			fmt.Fprintf(os.Stderr, "%s is empty: `make %s` did not install what these tests run\n", name, target)
			return 1
		}
		found = found || set
	}
	if !found {
		fmt.Printf("no test was run: these tests need real programs; run `make %s`\n", target)
		return 0
	}
	return m.Run()
}
