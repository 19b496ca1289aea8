package manifests

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// TestSizeValues: the chart takes what `kvepp size -o yaml` prints.
func TestSizeValues(t *testing.T) {
	values, err := exec.CommandContext(t.Context(), "../../bin/kvepp", "size", "--rps=200", "--tokens=2000",
		"--workers=8000", "--blocks=512", "--output=yaml").Output()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "size.yaml")
	if err := os.WriteFile(file, values, 0o600); err != nil {
		t.Fatal(err)
	}
	r, err := helm(t, "--set", "pool.selector.app=engine", "--values", file)
	if err != nil {
		t.Fatalf("%v\n%s", err, values)
	}
	spec := object(r.kvepp(t)["spec"].(map[string]any))
	container := object(spec.at("template", "spec", "containers", 0).(map[string]any))
	limit := ""
	for _, variable := range container.list("env") {
		if variable.text("name") == "GOMEMLIMIT" {
			limit = variable.text("value")
		}
	}
	if spec.at("replicas") != 2 || container.text("resources", "limits", "memory") != "2496Mi" ||
		container.text("resources", "requests", "memory") != "2048Mi" || limit != "1664MiB" {
		t.Errorf("replicas %v, %v, GOMEMLIMIT %q of\n%s", spec.at("replicas"), container["resources"], limit, values)
	}
}
