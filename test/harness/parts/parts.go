// Package parts keeps `go test ./...` green where the real programs that a package's tests run are not installed:
// Envoy, Dynamo, engines, Kubernetes. The make targets install them and name them in environment variables.
package parts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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

// Folder returns the folder that a variable names: what `test/tools/install.sh TARGET` prints.
func Folder(variable, target string) (string, error) {
	if folder := os.Getenv(variable); folder != "" {
		return folder, nil
	}
	return "", fmt.Errorf("%s is not set: run this through make, or set it to what `test/tools/install.sh %s` prints",
		variable, target)
}

// EnvoysAccept lets the Envoy of most tests and that of the manifests' image validate a configuration.
func EnvoysAccept(ctx context.Context, file string) error {
	for _, envoy := range [][2]string{{"KVEPP_TOOLS", "tools"}, {"KVEPP_IMAGE_ENVOY", "envoy"}} {
		folder, err := Folder(envoy[0], envoy[1])
		if err != nil {
			return err
		}
		out, err := exec.CommandContext(ctx, filepath.Join(folder, "bin/envoy"), "--mode", "validate", "-c",
			file).CombinedOutput()
		if err == nil && !strings.Contains(string(out), "OK") {
			err = errors.New("it does not print OK")
		}
		if err != nil {
			return fmt.Errorf("the Envoy of %s does not accept %s: %w\n%s", envoy[0], file, err, out)
		}
	}
	return nil
}
