package dynamo

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"

	"kvepp/pool"
)

// frontend starts a server that answers as a frontend of Dynamo 1.6.1 does.
func frontend(t *testing.T, health, metrics string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		fmt.Fprint(w, map[string]string{"/health": health, "/metrics": metrics}[req.URL.Path])
	}))
	t.Cleanup(server.Close)
	return strings.TrimPrefix(server.URL, "http://")
}

const aHealth = `{"status":"healthy","endpoints":["dyn://ns.backend.generate"],"instances":[
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":11820826700540128610,` +
	`"transport":{"tcp":"10.0.0.8:37007/a40be46bb0d4a162/ns/backend/generate"}},
 {"component":"backend","endpoint":"clear_kv_blocks","namespace":"ns","instance_id":11820826700540128610,` +
	`"transport":{"tcp":"10.0.0.8:37007/x"}},
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":7,` +
	`"transport":{"tcp":"[fd00::7]:37007/7/x"}},
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":8,"transport":{"nats_tcp":"subject"}},
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":9,"transport":"in_process"},
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":10,"transport":{"tcp":"10.0.0.9:1/x"}},
 {"component":"backend","endpoint":"generate","namespace":"ns","instance_id":11,"transport":{"tcp":"10.0.0.9:2/x"}}]}`

const someMetrics = `# HELP dynamo_frontend_model_kv_cache_block_size KV cache block size in tokens
# TYPE dynamo_frontend_model_kv_cache_block_size gauge
dynamo_frontend_model_kv_cache_block_size{model="org/a \"model\""} 16
dynamo_frontend_model_total_kv_blocks{model="org/a \"model\""} 2048
dynamo_frontend_model_kv_cache_block_size_other{model="x"} 3
dynamo_frontend_model_kv_cache_block_size{model="x} 3
dynamo_frontend_model_total_kv_blocks{model="y"} NaN
dynamo_frontend_requests_total{model="z"} 9
`

func TestQueryFrontend(t *testing.T) {
	v, err := QueryFrontend(t.Context(), frontend(t, aHealth, someMetrics))
	if err != nil {
		t.Fatal(err)
	}
	if want := map[string]FrontendModel{`org/a "model"`: {16, 2048}}; !reflect.DeepEqual(v.Models, want) {
		t.Errorf("models %v, want %v", v.Models, want)
	}
	if len(v.Workers) != 6 {
		t.Errorf("workers %+v", v.Workers)
	}
	for ip, want := range map[string]uint64{"10.0.0.8": 11820826700540128610, "fd00::7": 7, "10.0.0.9": 0,
		"10.0.0.1": 0, "": 0} {
		if w, ok := v.WorkerAt(ip); w.InstanceID != want || ok != (want != 0) {
			t.Errorf("at %q: %+v %v, want %d", ip, w, ok, want)
		}
	}
	for _, health := range []string{"", "{", `[]`, `{"instances":[{"instance_id":-1}]}`} {
		if v, err := QueryFrontend(t.Context(), frontend(t, health, "")); err == nil {
			t.Errorf("%q: %+v", health, v)
		}
	}
}

// TestFrontends: a frontend's workers complete the entries of the endpoints file, and stay while no frontend answers.
func TestFrontends(t *testing.T) {
	var down atomic.Bool
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch {
		case down.Load():
			http.Error(w, "no", http.StatusInternalServerError)
		case req.URL.Path == "/health":
			fmt.Fprint(
				w,
				`{"instances":[{"component":"backend","endpoint":"generate","namespace":"ns","instance_id":5,`+
					`"transport":{"tcp":"127.0.0.1:1/x"}}]}`,
			)
		default:
			fmt.Fprintln(w, `dynamo_frontend_model_kv_cache_block_size{model="m"} 16`)
		}
	}))
	t.Cleanup(server.Close)
	f := NewFrontends([]string{"127.0.0.1:1", strings.TrimPrefix(server.URL, "http://")}, quiet)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var instances []Instance
	f.Watch(ctx, func(now []Instance) { instances = now })
	endpoints := Join(
		[]pool.Entry{{Endpoint: pool.Endpoint{Name: "w", Address: "127.0.0.1:8000"}, Dynamo: "ns/backend/generate"}},
		instances,
	)
	if len(endpoints) != 1 || endpoints[0].InstanceID != 5 || endpoints[0].BlockSize != 16 ||
		endpoints[0].Model != "m" ||
		endpoints[0].Namespace != "ns" {
		t.Fatalf("%+v", endpoints)
	}
	again, ok := f.query(ctx)
	if !ok || !reflect.DeepEqual(again, instances) {
		t.Errorf("the instances changed: %+v, before %+v", again, instances)
	}
	down.Store(true)
	if now, ok := f.query(ctx); ok {
		t.Errorf("instances although no frontend answers: %+v", now)
	}
	down.Store(false)
	if now, ok := f.query(ctx); !ok || !now[0].Seen.Equal(instances[0].Seen) {
		t.Errorf("after the frontend answers again: %+v", now)
	}
}
