package kube

import "testing"

func TestLeaseNames(t *testing.T) {
	for _, c := range []struct {
		Config
		want string
	}{
		{Config{PoolName: "p"}, "kvepp-p"},
		{Config{PoolName: "p", LeaseName: "x"}, "x"},
		// must never change: replicas of different versions share the lease
		{Config{EndpointSelector: "app=vllm"}, "kvepp-ae189306"},
	} {
		if got := c.lease(); got != c.want {
			t.Errorf("%+v: %s, want %s", c.Config, got, c.want)
		}
	}
}
