package kvblock

import "testing"

// The vectors were computed with dynamo-runtime 1.6.1.
func TestInstanceID(t *testing.T) {
	for _, c := range []struct {
		name string
		want uint64
	}{
		{"worker-0", 1186445869714687},
		{"vllm-agg-vllmdecodeworker-7d9f8c6b5-x2k4q", 2266591388188342},
		{"dynamo-worker-1", 2807507837875006},
		{"vllm-disagg-prefill-0", 8856798145472887},
		{"worker-0-engine-0", 8051026481054291},
		{"a", 7688582637611507},
		{"", 121655548788207},
	} {
		if got := InstanceID(c.name); got != c.want {
			t.Errorf("InstanceID(%q) = %d, want %d", c.name, got, c.want)
		}
	}
}
