package kube

import (
	"fmt"
	"testing"

	"kvepp/pool"
)

// BenchmarkChange measures the departure of one of 500 Pods, the arrival of another, and the pool's update for each: a
// 25th of one second's churn.
func BenchmarkChange(b *testing.B) {
	s := NewSource(&Client{}, Config{KVEventsPort: 5557}, quiet)
	s.found, s.listed, s.spec = true, true, &spec{ports: []int{8000}}
	for i := range 500 {
		name := fmt.Sprintf("w-%03d", i)
		s.put(name, readyPod(name, fmt.Sprintf("10.0.%d.%d", i/250, 1+i%250)))
	}
	p := pool.New(quiet)
	tell := func() {
		state, _ := s.state()
		p.Update(state.Endpoints)
	}
	tell()
	pods := [2]string{"w-007", "n-007"}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		s.put(pods[i%2], nil)
		tell()
		s.put(pods[(i+1)%2], readyPod(pods[(i+1)%2], "10.0.0.8"))
		tell()
	}
}
