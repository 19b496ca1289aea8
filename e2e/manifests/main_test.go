package manifests

import (
	"os"
	"testing"

	"kvepp/test/harness/parts"
)

func TestMain(m *testing.M) {
	os.Exit(parts.Run(m, "test", "KVEPP_MANIFEST_TOOLS", "KVEPP_IMAGE_ENVOY", "KVEPP_ROOTFS"))
}
