package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
)

var allOut = Changes{RemovePins: true, RemoveLegacy: true}

func TestForward(t *testing.T) {
	for _, c := range []struct {
		changes    Changes
		body, want string // want is empty if the body is forwarded unchanged
	}{
		{allOut, `{"model":"m","prompt":"x"}`, ""},
		{allOut, `{"model":"m","prompt":"x","dp_rank":1,"session_control":{},"nvext":{"agent_hints":{"priority":1},` +
			`"session_id":"dp_rank"}}`, ""},
		{allOut, `{"model":"m","prompt":"x","nvext":"dp_rank"}`, ""},
		{allOut, `{"model":"m","prompt":"x","nvext":{"session_control":{"session_id":"s"}}}`,
			`{"model":"m","prompt":"x","nvext":{}}`},
		{allOut, ` { "model" : "m" , "nvext" : { "a" : [ 1 , {"b":"}"} ] , "session_control" : null , "c\n" : 1.50 } ` +
			`, "prompt" : "\"{x" } ` + "\n",
			` { "model" : "m" , "nvext" : { "a" : [ 1 , {"b":"}"} ] , "c\n" : 1.50 } , "prompt" : "\"{x" } ` + "\n"},
		{allOut, `{"nvext":{"session\u005fcontrol":{"session_id":"\\"},` +
			`"router_config_override":{"router_temperature":1e0}},"model":"m","prompt":"é"}`,
			`{"nvext":{},"model":"m","prompt":"é"}`},
		{allOut, `{"model":"m","prompt":"x","nvext":{"agent_hints":{"osl":7,"kv_overlap_score_weight":2,` +
			`"priority":-1},"a":0},"n":1}`,
			`{"model":"m","prompt":"x","nvext":{"agent_hints":{"osl":7,"priority":-1},"a":0},"n":1}`},
		{allOut, `{"nvext":null,"nvext":{"session_control":{"session_id":"s"}},"model":"m","prompt":"x"}`,
			`{"nvext":null,"nvext":{},"model":"m","prompt":"x"}`},
		{Changes{RemoveLegacy: true}, `{"model":"m","prompt":"x","nvext":{"dp_rank":1}}`, ""},
		{Changes{RemovePins: true}, `{"model":"m","prompt":"x","nvext":{"session_control":{"session_id":"s"}}}`, ""},
		{Changes{RemovePins: true}, `{"model":"m","prompt":"x","nvext":{"backend_instance_id":1,` +
			`"decode_worker_id":2,"prefill_worker_id":3,"dp_rank":4,"prefill_dp_rank":5}}`,
			`{"model":"m","prompt":"x","nvext":{}}`},
		{Changes{RemovePins: true}, `{"model":"m","prompt":"x","nvext":{"a":0, "dp_rank":4, "b":[1] ,` +
			`"prefill_worker_id":3, "dp_rank":"x" }}`,
			`{"model":"m","prompt":"x","nvext":{"a":0, "b":[1] }}`},
		{allOut, `{"nvext":{"agent_hints":{"kv_overlap_score_weight":2},"dp_rank":1},"model":"m","prompt":"x"}`,
			`{"nvext":{"agent_hints":{}},"model":"m","prompt":"x"}`},

		{Changes{CacheSalt: "a\"b"}, ` {"model":"m","prompt":"x"}`, ` {"cache_salt":"a\"b","model":"m","prompt":"x"}`},
		{Changes{CacheSalt: "a"}, `{"model":"m", "cache_salt" : {"b":1} ,"prompt":"x"}`,
			`{"model":"m", "cache_salt" : "a" ,"prompt":"x"}`},

		{Changes{Model: "b/é\"<"}, `{"prompt":"x", "model" : "m" ,"model":"n"}`,
			`{"prompt":"x", "model" : "b/é\"<" ,"model":"b/é\"<"}`},
		{Changes{Model: "m"}, `{"model":"a","prompt":"x","nvext":{"model":"a"}}`,
			`{"model":"m","prompt":"x","nvext":{"model":"a"}}`},
		{Changes{Model: "b", CacheSalt: "s", TokenData: []uint32{1}}, `{"model":"m","prompt":"x"}`,
			`{"nvext":{"token_data":[1]},"cache_salt":"s","model":"b","prompt":"x"}`},

		{Changes{TokenData: []uint32{}}, `{"model":"m","prompt":"x"}`,
			`{"nvext":{"token_data":[]},"model":"m","prompt":"x"}`},
		{Changes{TokenData: []uint32{1, 4294967295}}, `{"model":"m","prompt":"x"}`,
			`{"nvext":{"token_data":[1,4294967295]},"model":"m","prompt":"x"}`},
		{Changes{TokenData: []uint32{1}, CacheSalt: "s"}, `{"model":"m","prompt":"x"}`,
			`{"nvext":{"token_data":[1]},"cache_salt":"s","model":"m","prompt":"x"}`},
		{Changes{TokenData: []uint32{1}}, `{"model":"m","nvext": null,"prompt":"x"}`,
			`{"model":"m","nvext": {"token_data":[1]},"prompt":"x"}`},
		{Changes{TokenData: []uint32{1}}, `{"model":"m","nvext":{ },"prompt":"x"}`,
			`{"model":"m","nvext":{"token_data":[1] },"prompt":"x"}`},
		{Changes{TokenData: []uint32{1}}, `{"model":"m","nvext":{ "a":1},"prompt":"x"}`,
			`{"model":"m","nvext":{"token_data":[1], "a":1},"prompt":"x"}`},
		{Changes{TokenData: []uint32{1}, RemovePins: true}, `{"model":"m","nvext":{"dp_rank":1},"prompt":"x"}`,
			`{"model":"m","nvext":{"token_data":[1]},"prompt":"x"}`},
		{Changes{TokenData: []uint32{1}}, `{"model":"m","nvext":{"token_data":[2]},"prompt":"x"}`, ""},
		{Changes{Decode: &Pin{InstanceID: 1 << 63, Rank: 2}}, `{"model":"m","prompt":"x"}`,
			`{"nvext":{"decode_worker_id":9223372036854775808,"dp_rank":2},"model":"m","prompt":"x"}`},
		{Changes{Decode: &Pin{InstanceID: 7}, TokenData: []uint32{1}}, `{"model":"m","nvext":{"a":1,"dp_rank":3},` +
			`"prompt":"x"}`,
			`{"model":"m","nvext":{"decode_worker_id":7,"dp_rank":0,"token_data":[1],"a":1},"prompt":"x"}`},
		{Changes{Decode: &Pin{InstanceID: 7}}, `{"model":"m","nvext":{"token_data":[2]},"prompt":"x"}`,
			`{"model":"m","nvext":{"decode_worker_id":7,"dp_rank":0,"token_data":[2]},"prompt":"x"}`},
		{Changes{TokenData: []uint32{1}}, `{"model":"m","nvext":"odd","prompt":"x"}`, ""},
	} {
		r, err := ParseRequest("/v1/completions", []byte(c.body))
		if err != nil {
			t.Errorf("%s: %v", c.body, err)
		} else if got := string(r.Forward([]byte(c.body), c.changes)); got != c.want {
			t.Errorf("%s:\ngot  %s\nwant %s", c.body, got, c.want)
		}
	}
}

// For every body and all changes, the forwarded body parses to the same values, except for the changes.
// TestForwardPythonJSON: changes are spliced into what only Python reads, too, and no other byte changes.
func TestForwardPythonJSON(t *testing.T) {
	for body, want := range map[string]string{
		"\ufeff" + `{"model":"m","prompt":"a"}`: "\ufeff" + `{"cache_salt":"s","model":"n","prompt":"a"}`,
		"\ufeff \n" + `{"cache_salt":"x","model":"m","prompt":"a"}`: "\ufeff \n" +
			`{"cache_salt":"s","model":"n","prompt":"a"}`,
		`{"x":NaN,"y":[-Infinity,1e400],"model":"m","prompt":[1.0]}`: `{"cache_salt":"s","x":NaN,` +
			`"y":[-Infinity,1e400],"model":"n","prompt":[1.0]}`,
		`{"x":"\ud800","\ud801":"\\","model":"m","prompt":"\ud800"}`: `{"cache_salt":"s","x":"\ud800",` +
			`"\ud801":"\\","model":"n","prompt":"\ud800"}`,
	} {
		r, err := (Parser{Python: true}).Parse("/v1/completions", []byte(body))
		if strings.Contains(body, `"\ud801"`) { // not even the model is read
			if !errors.Is(err, ErrPythonJSON) {
				t.Errorf("%s: %v", body, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", body, err)
			continue
		}
		if got := r.Forward([]byte(body), Changes{Model: "n", CacheSalt: "s"}); string(got) != want {
			t.Errorf("%s became %s", body, got)
		}
		got := WithoutFields([]byte(body), []string{"model", "cache_salt"})
		if strings.Contains(string(got), "model") || strings.HasPrefix(body, "\ufeff") !=
			strings.HasPrefix(string(got), "\ufeff") {
			t.Errorf("%s without fields: %s", body, got)
		}
	}
}

func FuzzForward(f *testing.F) {
	for changes := range byte(32) {
		f.Add(
			[]byte(
				`{"model":"m","prompt":["a\"]",1.5e3],"nvext":{"session_control":{"session_id":"s"},`+
					`"agent_hints":{"kv_overlap_score_weight":1}}}`,
			),
			changes,
		)
		f.Add(
			[]byte(
				` {"nvext" : {"router_config_override":{}, "x":[{}],"dp_rank":1} ,"model":"m","prompt":[1],`+
					`"cache_salt":"\\"}`,
			),
			changes,
		)
		f.Add([]byte(` {"nvext":null ,"model":"m","prompt":[1]}`), changes)
		f.Add([]byte("\ufeff"+` {"nvext":{"dp_rank":1, "x":"\ud800"},"model":"m","prompt":[1.0]}`), changes)
		f.Add([]byte(`{"x":[NaN,-Infinity,1e999],"nvext":{"dp_rank":NaN},"model":"m","prompt":"\ud800"}`), changes)
	}
	f.Fuzz(func(t *testing.T, body []byte, which byte) {
		how := Parser{Python: true}
		r, err := how.Parse("/v1/completions", body)
		if err != nil {
			return
		}
		c := Changes{RemovePins: which&1 != 0, RemoveLegacy: which&2 != 0}
		if which&4 != 0 {
			c.CacheSalt = "\"\\\n\u2028"
		}
		if which&8 != 0 {
			c.TokenData = []uint32{0, 7, 1 << 31}
		}
		if which&16 != 0 {
			c.Decode = &Pin{InstanceID: 1 << 63, Rank: 3}
		}
		comparable := json.Valid(bytes.TrimPrefix(body, []byte("\ufeff"))) // else only Python reads it
		decode := func(text []byte) (v map[string]any) {
			if !comparable {
				return map[string]any{}
			}
			d := json.NewDecoder(bytes.NewReader(bytes.TrimPrefix(text, []byte("\ufeff"))))
			d.UseNumber()
			if err := d.Decode(&v); err != nil {
				t.Fatalf("%s: %v", text, err)
			}
			return v
		}
		want := decode(body)
		if c.CacheSalt != "" {
			want["cache_salt"] = c.CacheSalt
		}
		nvext, _ := want["nvext"].(map[string]any)
		if c.RemovePins || c.Decode != nil {
			for _, key := range pinKeys {
				delete(nvext, key)
			}
		}
		if c.RemoveLegacy {
			for _, key := range legacyKeys {
				delete(nvext, key)
			}
			if hints, ok := nvext["agent_hints"].(map[string]any); ok {
				delete(hints, legacyHints[0])
			}
		}
		if (c.TokenData != nil || c.Decode != nil) && want["nvext"] == nil {
			nvext = map[string]any{}
			want["nvext"] = nvext
		}
		if c.Decode != nil && nvext != nil {
			nvext["decode_worker_id"], nvext["dp_rank"] = json.Number("9223372036854775808"), json.Number("3")
		}
		if c.TokenData != nil {
			if _, there := nvext["token_data"]; !there && nvext != nil {
				nvext["token_data"] = []any{json.Number("0"), json.Number("7"), json.Number("2147483648")}
			}
		}
		before := slices.Clone(body)
		forward := r.Forward(body, c)
		if !bytes.Equal(body, before) {
			t.Fatalf("%s was changed in place", before)
		}
		rest := c
		rest.CacheSalt, rest.RemovePins, rest.Decode = "", c.RemovePins && c.Decode == nil, nil
		if forward == nil {
			forward = body
		} else if again, err := how.Parse("/v1/completions", forward); err != nil {
			t.Errorf("%s\nbecame %s, which is not a valid request: %v", body, forward, err)
		} else if again.Forward(forward, rest) != nil {
			t.Errorf("%s\nbecame %s, which would be changed again", body, forward)
		}
		if got := decode(forward); comparable && !reflect.DeepEqual(got, want) {
			t.Errorf("%s\nbecame %s", body, forward)
		}
	})
}
