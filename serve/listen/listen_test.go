package listen

import (
	"context"
	"fmt"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/internal/metrics"
	"kvepp/internal/metrics/metricstest"
)

// TestIdleConnections: many idle connections do not block a proxy. Its stream continues, and it can open more
// connections.
func TestIdleConnections(t *testing.T) {
	const most = 8
	m := metrics.New()
	raw, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := Limit(raw, "ext_proc", most, m)
	server := grpc.NewServer(Options(l, nil)...)
	healthv1.RegisterHealthServer(server, health.NewServer())
	go server.Serve(l)
	t.Cleanup(server.Stop)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	client := func() healthv1.HealthClient {
		conn, err := grpc.NewClient(l.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return healthv1.NewHealthClient(conn)
	}
	watch, err := client().Watch(ctx, &healthv1.HealthCheckRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := watch.Recv(); err != nil {
		t.Fatal(err)
	}
	for range 10 * most {
		conn, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
	if _, err := client().Check(ctx, &healthv1.HealthCheckRequest{}, grpc.WaitForReady(true)); err != nil {
		t.Errorf("beside %d idle connections: %v", 10*most, err)
	}
	read := func() error {
		seen := metricstest.Read(t, m.Registry)
		open := seen.Of(metrics.Connections.Name, "listener=ext_proc").Value()
		evicted := seen.Of(metrics.ConnectionsClosed.Name, "listener=ext_proc", "outcome=evicted").Value()
		if open > most || evicted < 9*most {
			return fmt.Errorf("%v connections are open, %v were evicted", open, evicted)
		}
		return nil
	}
	for deadline := time.Now().Add(30 * time.Second); read() != nil; <-time.After(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(read())
		}
	}
	ended := make(chan error, 1)
	go func() { _, err := watch.Recv(); ended <- err }()
	select {
	case err := <-ended:
		t.Errorf("the stream that was open before has ended: %v", err)
	default:
	}
}
