package listen

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"

	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"

	"kvepp/internal/connlimit"
)

// Limits of health checks and of proxies' access logs.
const (
	maxHealthChecks = 16        // streams of one connection to the health port
	maxHealthCheck  = 4 << 10   // bytes of a message
	maxWatches      = 256       // streams that wait for changes of the health, over all connections to a port
	maxAccessLog    = 128 << 10 // bytes of a message: Envoy's default buffer, and an entry with headers of 60 KiB
	maxAccessLogs   = 1024      // streams of access logs: one for each thread of each Envoy
)

// healthService is the health service with streams alone: grpc receives the message of another method by itself, with
// the limit of the whole server.
var healthService = grpc.ServiceDesc{
	ServiceName: healthv1.Health_ServiceDesc.ServiceName,
	HandlerType: healthv1.Health_ServiceDesc.HandlerType,
	Streams: append([]grpc.StreamDesc{
		{StreamName: "Check", ServerStreams: true, Handler: one(healthv1.HealthServer.Check)},
		{StreamName: "List", ServerStreams: true, Handler: one(healthv1.HealthServer.List)},
	}, healthv1.Health_ServiceDesc.Streams...), // Watch
}

// one returns the handler of a method with one message each way.
func one[In, Out any](
	respond func(healthv1.HealthServer, context.Context, *In) (*Out, error)) grpc.StreamHandler {
	return func(server any, stream grpc.ServerStream) error {
		in := new(In)
		if err := stream.RecvMsg(in); err != nil {
			return err
		}
		out, err := respond(server.(healthv1.HealthServer), stream.Context(), in)
		if err != nil {
			return err
		}
		return stream.SendMsg(out)
	}
}

// healthMethods returns the limits of the health service's methods at one port.
func healthMethods() map[string]*connlimit.Method {
	check := &connlimit.Method{Codec: encoding.GetCodecV2("proto"), Message: maxHealthCheck}
	return map[string]*connlimit.Method{
		healthv1.Health_Check_FullMethodName: check,
		healthv1.Health_List_FullMethodName:  check,
		healthv1.Health_Watch_FullMethodName: {
			Codec: check.Codec, Message: maxHealthCheck, Streams: maxWatches, Idle: true},
	}
}

// healthServices are the service names in health checks of gateways and probes. Source: GAIE's endpoint picker and its
// charts.
var healthServices = []string{
	"",
	liveness,
	"readiness",
	"envoy.service.ext_proc.v3.ExternalProcessor",
	"inference-extension",
}

const liveness = "liveness"

// announce sets the health of all services: SERVING or NOT_SERVING, depending on serving. liveness is always SERVING.
func announce(checks *health.Server, serving bool) {
	for _, name := range healthServices {
		status := healthv1.HealthCheckResponse_SERVING
		if !serving && name != liveness {
			status = healthv1.HealthCheckResponse_NOT_SERVING
		}
		checks.SetServingStatus(name, status)
	}
}

// Readiness is the set of conditions that must hold before kvepp reports itself ready. Requests that arrive earlier are
// served nevertheless.
type Readiness struct {
	mu        sync.Mutex // guards what follows
	unmet     map[string]bool
	ended     func() bool    // nil: nothing is announced yet
	checks    *health.Server // what is announced
	announced string         // the unmet conditions, as announced last
	log       *slog.Logger
}

// NewReadiness returns a Readiness without conditions.
func NewReadiness() *Readiness { return &Readiness{unmet: map[string]bool{}} }

// Condition adds a condition that does not hold yet. The caller reports changes with the returned function.
func (r *Readiness) Condition(what string) func(holds bool) {
	set := func(holds bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		if holds {
			delete(r.unmet, what)
		} else {
			r.unmet[what] = true
		}
		r.announce()
	}
	set(false)
	return set
}

// Await adds a condition that holds once done is closed.
func (r *Readiness) Await(what string, done <-chan struct{}) {
	set := r.Condition(what)
	select {
	case <-done:
		set(true)
	default:
		go func() {
			<-done
			set(true)
		}()
	}
}

// begin announces whether all conditions hold, now and when that changes, until ctx ends.
func (r *Readiness) begin(ctx context.Context, checks *health.Server, log *slog.Logger) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended, r.checks, r.log = func() bool { return ctx.Err() != nil }, checks, log
	announce(checks, len(r.unmet) == 0)
	if r.announced = r.waitsFor(); r.announced != "" {
		log.Info("not ready yet", "waits_for", r.announced)
	}
}

// announce announces the conditions if they have changed. The caller holds r.mu.
func (r *Readiness) announce() {
	now := r.waitsFor()
	// After the end, that of the election says nothing about readiness.
	if r.ended == nil || r.ended() || now == r.announced {
		return
	}
	r.announced = now
	r.log.Info(map[bool]string{true: "ready", false: "not ready"}[now == ""], "waits_for", now)
	announce(r.checks, now == "")
}

// ready reports whether kvepp was ready when it announced that last.
func (r *Readiness) ready() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.announced == ""
}

// waitsFor returns the conditions that do not hold; "" if all do. The caller holds r.mu.
func (r *Readiness) waitsFor() string { return strings.Join(slices.Sorted(maps.Keys(r.unmet)), ", ") }
