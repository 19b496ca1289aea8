package parity

import (
	"os"
	"testing"

	"kvepp/test/harness/parts"
)

func TestMain(m *testing.M) { os.Exit(parts.Run(m, "events", "KVEPP_ENGINES", "KVEPP_VLLM")) }
