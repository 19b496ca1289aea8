package dynamo

import (
	"fmt"
	"reflect"
	"testing"
	"time"

	"kvepp/pool"
)

func (s store) source(ns string, worker, publisher uint64, rank int, touched time.Time) {
	s.put(
		"event_sources",
		"namespace/"+ns+"/component/backend/endpoint/generate/topic/kv-events",
		publisher,
		fmt.Sprintf(
			`{"type":"EventSource","scope":{"kind":"endpoint","endpoint":{"namespace":%q,"component":"backend",`+
				`"name":"generate"}},"topic":"kv-events",`+
				`"publisher_id":%d,"metadata":{"worker":{"worker_id":%d,"dp_rank":%d},"publisher_id":%[2]d,`+
				`"recovery_target":{"transport":{"tcp":"127.0.0.1:9/1f/q%[4]d"},"request_plane_codec":%[5]q}}}`,
			ns,
			publisher,
			worker,
			rank,
			[]string{"msgpack", "json"}[rank%2], // kvepp does not speak JSON
		),
		touched,
	)
}

func (s store) channel(ns, topic string, publisher uint64, transport string, touched time.Time) {
	s.put("event_channels", "namespace/"+ns+"/component/backend/endpoint/generate/topic/"+topic, publisher, fmt.Sprintf(
		`{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":%q,"component":"backend",`+
			`"name":"generate"}},"topic":%q,`+
			`"instance_id":%d,"transport":%s}`,
		ns,
		topic,
		publisher,
		transport,
	), touched)
}

// TestChannels has two ranks on the event plane, one over each transport, and channels that do not belong to them.
func TestChannels(t *testing.T) {
	now := time.Now()
	s := store{t, t.TempDir()}
	zmq := func(port int) string {
		return fmt.Sprintf(`{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:%d"}}`, port)
	}
	const worker = 12510495253119935035
	s.instance("w0", worker, now)
	s.card("w0", worker, 16, now)
	s.source("w0", worker, 8286763004618594, 1, now)
	s.source("w0", worker, 2926450056302118, 0, now)
	s.channel("w0", "kv-events", 8286763004618594, zmq(41585), now)
	s.channel(
		"w0",
		"kv-events",
		2926450056302118,
		`{"kind":"Nats","config":{"subject_prefix":"namespace.w0.component.backend.endpoint.generate"}}`,
		now,
	)
	s.channel("w0", "kv_metrics", 7, zmq(1), now)
	s.channel("w0", "kv_metrics", 5, zmq(4), now)
	s.channel("w0", "kv_metrics", 6, `{"kind":"Nats","config":{"subject_prefix":"a"}}`, now)
	s.channel("w0", "kv_metrics", 9, `{"kind":"Nats","config":{"subject_prefix":"a"}}`, now) // shares the subject
	// a transport that kvepp ignores for loads
	s.channel("w0", "kv_metrics", 4, `{"kind":"ZmqBroker","config":{}}`, now)
	s.channel("w1", "kv_metrics", 8, zmq(5), now) // of another path
	s.channel("w0", "active_sequences_events", 13, zmq(6), now)
	s.channel("w0", "active_sequences_events", 14, `{"kind":"Nats","config":{"subject_prefix":"a"}}`, now)
	// without its source yet
	s.channel("w0", "kv-events", 9, zmq(2), now)
	// without its channel yet
	s.source("w0", worker, 10, 2, now)
	s.source("w0", worker, 11, 3, now)
	s.channel("w0", "kv-events", 11, `{"kind":"ZmqBroker","config":{}}`, now) // logged as invalid
	s.source("w0", worker, 12, 4, now.Add(-2*lease))                          // dead
	s.channel("w0", "kv-events", 12, zmq(3), now)

	want := []pool.EventChannel{
		{Rank: 0, Publisher: 2926450056302118, Subject: "namespace.w0.component.backend.endpoint.generate.kv-events",
			Query: "127.0.0.1:9/1f/q0"},
		{Rank: 1, Publisher: 8286763004618594, ZMQ: "tcp://127.0.0.1:41585"},
	}
	reader := NewFileStore(s.dir, quiet)
	instances := reader.scan(now)
	if len(instances) != 1 || !reflect.DeepEqual(instances[0].Channels, want) {
		t.Fatalf("channels: %+v", instances)
	}
	loads := []pool.EventChannel{
		{Subject: "a.active_sequences_events", FirstTokens: true},
		{Subject: "a.kv_metrics"},
		{Publisher: 5, ZMQ: "tcp://127.0.0.1:4"},
		{Publisher: 7, ZMQ: "tcp://127.0.0.1:1"},
		{Publisher: 13, ZMQ: "tcp://127.0.0.1:6", FirstTokens: true},
	}
	if !reflect.DeepEqual(instances[0].Loads, loads) {
		t.Errorf("loads: %+v", instances[0].Loads)
	}
	if again := reader.scan(now); &again[0].Loads[0] != &instances[0].Loads[0] {
		t.Error("unchanged loads are in a new slice")
	}
	if len(reader.loggedErrors) != 1 {
		t.Errorf("logged errors: %v", reader.loggedErrors)
	}

	endpoints := Join([]pool.Entry{
		{Endpoint: pool.Endpoint{Name: "by path"}, Dynamo: "w0/backend/generate"},
		{Endpoint: pool.Endpoint{Name: "by id", InstanceID: worker}},
		{Endpoint: pool.Endpoint{Name: "other", InstanceID: 1}},
	}, instances)
	for i, want := range [][]pool.EventChannel{want, want, nil} {
		if got := endpoints[i].EventChannels; !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v", endpoints[i].Name, got)
		}
	}
	w := pool.Worker{Endpoint: &endpoints[0], Rank: 1}
	if c, ok := w.EventChannel(); !ok || c != want[1] {
		t.Errorf("rank 1: %+v", c)
	}
	endpoints[0].KVEvents = "tcp://127.0.0.1:5557"
	if c, ok := w.EventChannel(); ok {
		t.Errorf("a channel although the engine's own socket is known: %+v", c)
	}
}

// TestBrokers: sources without a channel are heard over the brokers of the environment, else of discovery.
func TestBrokers(t *testing.T) {
	now := time.Now()
	s := store{t, t.TempDir()}
	s.instance("w0", 1, now)
	s.card("w0", 1, 16, now)
	s.source("w0", 1, 5, 0, now)
	s.source("w0", 1, 6, 1, now)
	s.channel("w0", "kv-events", 6, `{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:1"}}`, now)
	own := pool.EventChannel{Rank: 1, Publisher: 6, ZMQ: "tcp://127.0.0.1:1"}
	check := func(brokers string) {
		t.Helper()
		over := pool.EventChannel{Publisher: 5, Brokers: brokers, Query: "127.0.0.1:9/1f/q0",
			Subject: "namespace.w0.component.backend.endpoint.generate.kv-events"}
		want := []pool.EventChannel{over, own}
		if brokers == "" {
			want = want[1:]
		}
		if got := NewFileStore(s.dir, quiet).scan(now)[0].Channels; !reflect.DeepEqual(got, want) {
			t.Errorf("channels %+v, want %+v", got, want)
		}
	}
	check("")
	for id, addresses := range []string{`"tcp://b:2","tcp://a:2"`, `"tcp://a:2"`} {
		s.put("event_channels", "namespace/n/component/zmq_broker/endpoint/broker/topic/any", uint64(id),
			`{"topic":"any","transport":{"kind":"ZmqBroker","config":{"xsub_endpoints":["tcp://a:1"],`+
				`"xpub_endpoints":[`+addresses+`]}}}`, now)
	}
	check("tcp://a:2;tcp://b:2")
	t.Setenv("DYN_ZMQ_BROKER_URL", "xsub=tcp://c:1;tcp://d:1 , xpub=tcp://c:2;tcp://d:2")
	check("tcp://c:2;tcp://d:2")
	for _, wrong := range []string{"tcp://a:1", "xsub=tcp://a:1", "xpub=a:1", "xpub=tcp://a", "xpub="} {
		t.Setenv("DYN_ZMQ_BROKER_URL", wrong)
		if all, err := Brokers(); err == nil {
			t.Errorf("%q names %q", wrong, all)
		}
	}
}
