package apibody

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"
)

func TestForward(t *testing.T) {
	for _, c := range []struct{ body, want string }{ // want is empty where the body can go as it is
		{`{"model":"m","prompt":"x"}`, ""},
		{`{"model":"m","prompt":"x","session_control":{},"nvext":{"agent_hints":{"priority":1},"session_id":"session_control"}}`, ""},
		{`{"model":"m","prompt":"x","nvext":{"session_control":{"session_id":"s"}}}`, `{"model":"m","prompt":"x","nvext":{}}`},
		{` { "model" : "m" , "nvext" : { "a" : [ 1 , {"b":"}"} ] , "session_control" : null , "c\n" : 1.50 } , "prompt" : "\"{x" } ` + "\n",
			`{"model" : "m","nvext" : {"a" : [ 1 , {"b":"}"} ],"c\n" : 1.50},"prompt" : "\"{x"}`},
		{`{"nvext":{"session\u005fcontrol":{"session_id":"\\"},"router_config_override":{"router_temperature":1e0}},"model":"m","prompt":"é"}`,
			`{"nvext":{},"model":"m","prompt":"é"}`},
		{`{"model":"m","prompt":"x","nvext":{"agent_hints":{"osl":7,"kv_overlap_score_weight":2,"priority":-1},"dp_rank":0},"n":1}`,
			`{"model":"m","prompt":"x","nvext":{"agent_hints":{"osl":7,"priority":-1},"dp_rank":0},"n":1}`},
		{`{"nvext":null,"nvext":{"session_control":{"session_id":"s"}},"model":"m","prompt":"x"}`, `{"nvext":null,"nvext":{},"model":"m","prompt":"x"}`},
	} {
		r, err := ParseRequest("/v1/completions", []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.body, err)
		} else if got := string(r.Forward([]byte(c.body))); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.body, got, c.want)
		}
	}
}

// Whatever the body, what goes on says the same but for the keys that are taken out.
func FuzzForward(f *testing.F) {
	f.Add([]byte(`{"model":"m","prompt":["a\"]",1.5e3],"nvext":{"session_control":{"session_id":"s"},"agent_hints":{"kv_overlap_score_weight":1}}}`))
	f.Add([]byte(` {"nvext" : {"router_config_override":{}, "x":[{}]} ,"model":"m","prompt":[1]}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		r, err := ParseRequest("/v1/completions", body)
		if err != nil {
			return
		}
		forward := r.Forward(body)
		if forward == nil {
			return
		}
		decode := func(text []byte) (v map[string]any) {
			d := json.NewDecoder(bytes.NewReader(text))
			d.UseNumber()
			if err := d.Decode(&v); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			return v
		}
		want, got := decode(body), decode(forward)
		nvext := want["nvext"].(map[string]any)
		delete(nvext, "session_control")
		delete(nvext, "router_config_override")
		if hints, ok := nvext["agent_hints"].(map[string]any); ok {
			delete(hints, "kv_overlap_score_weight")
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s\nbecame %s", body, forward)
		}
		if again, err := ParseRequest("/v1/completions", forward); err != nil || again.Forward(forward) != nil {
			t.Errorf("%s\nbecame %s, which cannot go as it is (%v)", body, forward, err)
		}
	})
}
