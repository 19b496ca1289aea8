package main

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
)

// TestIdleWebConnections: with few file descriptors, idle connections do not block proxies or operators.
func TestIdleWebConnections(t *testing.T) {
	if testing.Short() {
		t.Skip("slow: make test runs it")
	}
	t.Parallel()
	r := reserve(t)
	r.writeEndpoints(oneEndpoint)
	r.wrapper = []string{"/bin/sh", "-c", `ulimit -n 900; exec "$0" "$@"`}
	r.start()
	r.awaitReady()
	for i := range 700 {
		for _, port := range []int{r.prom, r.admin} {
			c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err != nil {
				t.Fatalf("connection %d: %v", i, err)
			}
			defer c.Close()
			if i%2 == 0 {
				fmt.Fprint(c, "GET / HTTP/1.1\r\nHost: ") // and no more
			}
		}
	}
	for range 5 { // each time over new connections
		r.awaitEndpoint("10.0.0.1:8000")
		text, err := r.metrics()
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"metrics", "admin"} {
			if !strings.Contains(
				text,
				"\nkvepp_connections_closed_total{listener=\""+name+"\",outcome=\"evicted\"} ",
			) ||
				strings.Contains(
					text,
					"\nkvepp_connections_closed_total{listener=\""+name+"\",outcome=\"evicted\"} 0\n",
				) {
				t.Errorf("no connection to %s was closed", name)
			}
		}
		resp, err := http.Get(r.adminURL() + "/workers")
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Error(resp.Status)
		}
		http.DefaultClient.CloseIdleConnections()
	}
}
