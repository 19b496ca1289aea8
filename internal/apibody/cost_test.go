package apibody

import "testing"

func TestReadCostGrowsWithTheBody(t *testing.T) {
	if none, one := ReadCost(0), ReadCost(1<<20); none <= 0 || one > 8<<20+512<<10 || one-none < 1<<20 {
		t.Fatalf("ReadCost: %d bytes for no body, %d for 1 MiB", none, one)
	}
}
