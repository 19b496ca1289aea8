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
	instances, err := ParseMetadata([]byte(fmt.Sprintf(`{"endpoints":{"a":%s,"b":%s},"event_channels":{"a":%s,"b":%s}}`,
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
