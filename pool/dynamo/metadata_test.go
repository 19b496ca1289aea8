package dynamo

import (
	"fmt"
	"reflect"
	"testing"

	"kvepp/pool"
)

// TestLoadsOfOneProcess: each publisher of a path names the same subject of loads, and all instances share it.
func TestLoadsOfOneProcess(t *testing.T) {
	instance := func(id int) string {
		return fmt.Sprintf(`{"type":"Endpoint","namespace":"n","component":"c","endpoint":"e","instance_id":%d}`, id)
	}
	channel := func(publisher int) string {
		return fmt.Sprintf(`{"type":"EventChannel","topic":"kv_metrics","instance_id":%d,`+
			`"scope":{"kind":"endpoint","endpoint":{"namespace":"n","component":"c","name":"e"}},`+
			`"transport":{"kind":"Nats","config":{"subject_prefix":"n"}}}`, publisher)
	}
	instances, _, err := ParseMetadata([]byte(fmt.Sprintf(
		`{"endpoints":{"a":%s,"b":%s},"event_channels":{"a":%s,"b":%s}}`,
		instance(1), instance(2), channel(3), channel(4))))
	if err != nil || len(instances) != 2 {
		t.Fatalf("%+v, %v", instances, err)
	}
	for _, in := range instances {
		if want := []pool.EventChannel{{Subject: "n.kv_metrics"}}; !reflect.DeepEqual(in.Loads, want) {
			t.Errorf("loads of %d: %+v, want %+v", in.InstanceID, in.Loads, want)
		}
	}
}

// TestQueriesInMetadata: in Kubernetes too, a worker's record says where it tells which blocks it holds, and the
// environment names brokers.
func TestQueriesInMetadata(t *testing.T) {
	t.Setenv("DYN_ZMQ_BROKER_URL", "xsub=tcp://b:1 , xpub=tcp://b:2")
	source := `{"type":"EventSource","topic":"kv-events","publisher_id":5,` +
		`"scope":{"kind":"endpoint","endpoint":{"namespace":"n","component":"c","name":"e"}},` +
		`"metadata":{"worker":{"worker_id":1,"dp_rank":2},"recovery_target":{"transport":{"tcp":"10.0.0.7:9/1/q"},` +
		`"request_plane_codec":"msgpack"}}}`
	instances, _, err := ParseMetadata([]byte(`{"endpoints":{"a":{"type":"Endpoint","namespace":"n","component":"c",` +
		`"endpoint":"e","instance_id":1}},"event_sources":{"a":` + source + `}}`))
	want := []pool.EventChannel{{Rank: 2, Publisher: 5, Brokers: "tcp://b:2", Query: "10.0.0.7:9/1/q",
		Subject: "namespace.n.component.c.endpoint.e.kv-events"}}
	for i := range instances {
		instances[i] = instances[i].OverBrokers(JoinBrokers(nil))
	}
	if err != nil || len(instances) != 1 || !reflect.DeepEqual(instances[0].Channels, want) {
		t.Errorf("%+v, %v", instances, err)
	}
	const subject = "namespace.n.component.c.endpoint.e."
	loads := []pool.EventChannel{
		{Brokers: "tcp://b:2", Subject: subject + "active_sequences_events", FirstTokens: true},
		{Brokers: "tcp://b:2", Subject: subject + "kv_metrics"}}
	if !reflect.DeepEqual(instances[0].Loads, loads) {
		t.Errorf("loads %+v", instances[0].Loads)
	}
}
