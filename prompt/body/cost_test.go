package body

import "testing"

func TestReadCostGrowsWithTheBody(t *testing.T) {
	if none, one := ReadCost(0), ReadCost(1<<20); none <= 0 || one > 9<<20 || one-none < 1<<20 {
		t.Fatalf("ReadCost: %d bytes for no body, %d for 1 MiB", none, one)
	}
}
