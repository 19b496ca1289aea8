package protocol

import (
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/serve/check"
)

// TestNotRun: what stands in the way of the check is an error, which says what to do.
func TestNotRun(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	busy, free := taken.Addr().String(), "127.0.0.1:0"
	for _, c := range []struct {
		picker  string
		engines []string
		want    string
	}{
		{free, nil, "--endpoints must list at least two"},
		{free, []string{free}, "--endpoints must list at least two"},
		{busy, []string{free, free}, "stop what listens there"},
		{free, []string{free, busy}, "stop what listens there"},
	} {
		_, err := Run(t.Context(), &Config{Picker: c.picker, Engines: c.engines, Wait: time.Second})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s, %v: %v, want %q", c.picker, c.engines, err, c.want)
		}
	}
}

// TestNotAsked: if the gateway does not ask the picker, only that is reported.
func TestNotAsked(t *testing.T) {
	gateway := httptest.NewServer(http.NotFoundHandler())
	defer gateway.Close()
	for url, want := range map[string]string{
		gateway.URL:          "does not ask it: HTTP 404",
		"http://127.0.0.1:1": "refused",
	} {
		findings, err := Run(t.Context(), &Config{URL: url, HTTP: http.DefaultClient, Picker: "127.0.0.1:0",
			Engines: []string{"127.0.0.1:0", "127.0.0.1:0"}, Wait: 10 * time.Second})
		if err != nil || len(findings) != 1 || findings[0].State != check.Wrong ||
			!strings.Contains(findings[0].Says, want) {
			t.Errorf("%s: %v, %+v", url, err, findings)
		}
	}
}

// TestPickerIsHealthy: a gateway that checks its picker's health goes on asking it.
func TestPickerIsHealthy(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := free.Addr().String()
	free.Close()
	var status healthv1.HealthCheckResponse_ServingStatus
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err == nil {
			defer conn.Close()
			var answer *healthv1.HealthCheckResponse
			answer, err = healthv1.NewHealthClient(conn).Check(r.Context(),
				&healthv1.HealthCheckRequest{Service: "envoy.service.ext_proc.v3.ExternalProcessor"})
			status = answer.GetStatus()
		}
		if err != nil {
			t.Error(err)
		}
		http.NotFound(w, r)
	}))
	defer gateway.Close()
	if _, err := Run(t.Context(), &Config{URL: gateway.URL, HTTP: http.DefaultClient, Picker: address,
		Engines: []string{"127.0.0.1:0", "127.0.0.1:0"}, Wait: 10 * time.Second}); err != nil {
		t.Fatal(err)
	}
	if status != healthv1.HealthCheckResponse_SERVING {
		t.Errorf("the picker's health: %v", status)
	}
}
