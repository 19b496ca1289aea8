// Package suitebin is the unchanged conformance tests of the Gateway API Inference Extension, with kvepp as their
// endpoint pickers. test/tools/install.sh suite builds one program from it, which runs in a Pod.
package suitebin

import (
	"io/fs"
	"regexp"
	"testing"
	"testing/fstest"

	"sigs.k8s.io/gateway-api-inference-extension/conformance"
)

// TestConformance runs the suite. Its flags are the suite's (-gateway-class, -run-test, -report-output and so on).
func TestConformance(t *testing.T) {
	options := conformance.DefaultOptions(t)
	for i, manifests := range options.ManifestFS {
		options.ManifestFS[i] = ours{manifests}
	}
	conformance.RunConformanceWithOptions(t, options)
}

// ours returns the suite's manifests with images that exist: endpoint pickers are kvepp, with two arguments before
// their own; model servers are the suite's own program.
type ours struct{ fs.FS }

var changes = []struct {
	from *regexp.Regexp
	to   string
}{
	{regexp.MustCompile(`(?m)^(\s*)image: \S*/(lw)?epp:.*\n(\s*imagePullPolicy: .*\n)?(\s*)args:\n`),
		"${1}image: kvepp/kvepp:e2e\n${1}imagePullPolicy: Never\n${1}args:\n${1}- serve\n" +
			"${1}- --gateway=conformance\n"},
	{
		regexp.MustCompile(`(?m)^(\s*)image: \S*/echo-basic:.*\n`),
		"${1}image: kvepp/echo:e2e\n${1}imagePullPolicy: Never\n",
	},
}

func (o ours) Open(name string) (fs.File, error) {
	text, err := fs.ReadFile(o.FS, name)
	if err != nil {
		return nil, err
	}
	for _, c := range changes {
		text = c.from.ReplaceAll(text, []byte(c.to))
	}
	return fstest.MapFS{name: {Data: text}}.Open(name)
}
