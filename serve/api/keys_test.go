package api

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// TestKeysAreExact: a field's key must match its name exactly, at every depth. Keys of maps are unchanged. A repeated
// key is refused.
func TestKeysAreExact(t *testing.T) {
	type inner struct {
		Rank *uint32 `json:"dp_rank"`
	}
	type embedded struct {
		Group string `json:"routing_group"`
	}
	type body struct {
		embedded
		Model  string            `json:"model_name"`
		Tokens []uint32          `json:"token_ids"`
		Pinned *inner            `json:"pinned_worker"`
		List   []*inner          `json:"list"`
		Map    map[string]string `json:"map"`
		Of     map[string]inner  `json:"of,omitempty"`
		Raw    json.RawMessage   `json:"raw"`
		Hidden string            `json:"-"`
	}
	five, six := uint32(5), uint32(6)
	for _, c := range []struct {
		text string
		want body
		err  string
	}{
		{`{"model_name": "m", "routing_group": "g", "token_ids": [1, 2]}`,
			body{Model: "m", embedded: embedded{"g"}, Tokens: []uint32{1, 2}}, ""},
		{`{"Model_name": "m", "MODEL_NAME": 7, "ROUTING_GROUP": "g", "toKen_ids": [1], "model_name" : "n"}`,
			body{Model: "n"}, ""},
		{`{"model_name": "n", "Model_Name": "m", "hidden": "h", "Hidden": "h"}`, body{Model: "n"}, ""},
		{"\n{ \"mod\\u0065l_name\" :\t\"}]\\\"\" , \"model\u017fname\": \"m\" } ", body{Model: `}]"`}, ""},
		{`{"pinned_worker": {"DP_rank": 6, "dp_rank": 5}, "list": [{"Dp_rank": 5}, null, {"dp_rank": 6}, [], 7.5e-1]}`,
			body{}, "list"},
		{`{"pinned_worker": {"DP_rank": 6, "dp_rank": 5}, "list": [{"Dp_rank": 5}, null, {"dp_rank": 6}]}`,
			body{Pinned: &inner{&five}, List: []*inner{{}, nil, {&six}}}, ""},
		{`{"map": {"A": "1", "a": "2", "map": "3", "Map": "4"}, "of": {"x": {"dp_rank": 5, "DP_RANK": 6}, "X": {}}}`,
			body{Map: map[string]string{"A": "1", "a": "2", "map": "3", "Map": "4"},
				Of: map[string]inner{"x": {&five}, "X": {}}}, ""},
		{`{"raw": {"DP_RANK": 1, "a": 1, "a": 2}, "other": {"model_name": 1, "model_name": 2}, "other": [[]]}`,
			body{Raw: json.RawMessage(`{"DP_RANK": 1, "a": 1, "a": 2}`)}, ""},
		{`{"model_name": "m", "other": 1, "model_name": "m"}`, body{}, "model_name: the key is there twice"},
		{`{"list": [{}, {"dp_rank": 5, "dp\u005frank": 5}]}`, body{}, "dp_rank: the key is there twice"},
		{`{"of": {"x": {"dp_rank": 5, "dp_rank": null}}}`, body{}, "dp_rank: the key is there twice"},
		{`null`, body{}, ""}, {`{}`, body{}, ""}, {`[1]`, body{}, "array"}, {`7`, body{}, "number"},
		{`{"list": {"dp_rank": 1}}`, body{}, "list"},
		{`{"Model_name": "m"`, body{}, "unexpected end"}, {`{"model_name": "m",}`, body{}, "invalid character"},
	} {
		var got body
		err := decode([]byte(c.text), &got)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) ||
			err == nil && !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v, %v; want %+v, %s", c.text, got, err, c.want, c.err)
		}
	}
}

// FuzzKeys compares a decoded body with the same body in a map, which has the members by their exact names.
func FuzzKeys(f *testing.F) {
	type fields struct {
		Kind json.RawMessage `json:"kind"`
		Task json.RawMessage `json:"sk"`
	}
	type body struct {
		fields
		In *fields `json:"in"`
	}
	for _, text := range []string{
		`{"kind": 1, "Kind": 2, "sk": "\"}", "in": {"KIND": [{}], "kind": {"kind": 1, "kind": 2}}}`,
		`{"\u006bind": 1, "kind": 2}`, `{"in": {"sk": 1}, "in": null}`,
		"{\"\u212aind\": 1, \"\u017fk\": 2, \"in\": {\"s\u212a\": 3}}",
		` { "kind" : 1e5 , "in" : { } , "x" : [ "\\" , {"in": 1} ] } `, `[{"kind": 1}]`, `{"": {}, "in": "x"}`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var got body
		var plain any
		err := decode([]byte(text), &got)
		if invalid := json.Unmarshal([]byte(text), &plain); invalid != nil {
			if err == nil {
				t.Fatalf("%q: no error, and not JSON: %v", text, invalid)
			}
			return
		}
		if err != nil {
			return
		}
		same := func(got *fields, raw []byte) map[string]json.RawMessage {
			var want map[string]json.RawMessage
			if json.Unmarshal(raw, &want) != nil {
				t.Fatalf("%q: %s is no object", text, raw)
			}
			if got != nil && (string(got.Kind) != string(want["kind"]) || string(got.Task) != string(want["sk"])) {
				t.Fatalf("%q: %s, %s of %s", text, got.Kind, got.Task, raw)
			}
			return want
		}
		if in := same(&got.fields, []byte(text))["in"]; got.In != nil || in != nil {
			same(got.In, in)
		}
	})
}
