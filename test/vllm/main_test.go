package vllm

import (
	"os"
	"testing"

	"kvepp/test/harness/parts"
)

func TestMain(m *testing.M) { os.Exit(parts.Run(m, "test-vllm", "KVEPP_VLLM")) }
