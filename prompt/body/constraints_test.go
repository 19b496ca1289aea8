package body

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
)

func TestConstraints(t *testing.T) {
	for _, c := range []struct {
		nvext string
		want  Constraints
	}{
		{`{}`, Constraints{}},
		{`{"routing_constraints":null}`, Constraints{}},
		{`{"routing_constraints":{}}`, Constraints{}},
		{`{"routing_constraints":{"required_taints":["gpu","dynamo.topology/zone=a","gpu"]}}`,
			Constraints{Required: []string{"gpu", "dynamo.topology/zone=a"}}},
		// Weights have single precision, as in Dynamo.
		{`{"routing_constraints":{"preferred_taints":{"a":0.1,"b":-2,"":1}}}`,
			Constraints{Preferred: map[string]float32{"a": 0.1, "b": -2, "": 1}}},
	} {
		r, err := ParseRequest("/v1/completions", []byte(`{"model":"m","prompt":"x","nvext":`+c.nvext+`}`))
		if err != nil || !reflect.DeepEqual(r.Constraints, c.want) {
			t.Errorf("%s: got %+v, %v; want %+v", c.nvext, r.Constraints, err, c.want)
		}
		if err == nil && r.Constraints.Given() != (len(c.want.Required)+len(c.want.Preferred) > 0) {
			t.Errorf("%s: given is %v", c.nvext, r.Constraints.Given())
		}
	}
}

func TestBadConstraintsNameTheirKey(t *testing.T) {
	many := func(format string) string {
		var items []string
		for i := range maxTaints + 1 {
			items = append(items, fmt.Sprintf(format, i))
		}
		return strings.Join(items, ",")
	}
	long := strings.Repeat("x", maxTaintBytes+1)
	const key = "nvext.routing_constraints"
	for _, c := range []struct{ constraints, code, param string }{
		{`["gpu"]`, CodeInvalidType, key},
		{`{"required":["gpu"]}`, CodeInvalidValue, key},
		{`{"` + long + `":1}`, CodeInvalidValue, key},
		{`{"required_taints":"gpu"}`, CodeInvalidType, key + ".required_taints"},
		{`{"required_taints":["gpu",1]}`, CodeInvalidType, key + ".required_taints[1]"},
		{`{"required_taints":[` + many(`"t%d"`) + `]}`, CodeInvalidValue, key + ".required_taints"},
		{`{"required_taints":["` + long + `"]}`, CodeInvalidValue, key + ".required_taints"},
		{`{"preferred_taints":["gpu"]}`, CodeInvalidType, key + ".preferred_taints"},
		{`{"preferred_taints":{"gpu":"much"}}`, CodeInvalidType, key + ".preferred_taints.gpu"},
		{`{"preferred_taints":{"gpu":true}}`, CodeInvalidType, key + ".preferred_taints.gpu"},
		{`{"preferred_taints":{"gpu":1e39}}`, CodeInvalidType, key + ".preferred_taints.gpu"},
		{`{"preferred_taints":{"gpu":NaN}}`, "", ""}, // an error, whether or not the parser accepts NaN
		{`{"preferred_taints":{` + many(`"t%d":1`) + `}}`, CodeInvalidValue, key + ".preferred_taints"},
		{`{"preferred_taints":{"` + long + `":1}}`, CodeInvalidValue, key + ".preferred_taints"},
	} {
		_, err := ParseRequest(
			"/v1/completions",
			[]byte(`{"model":"m","prompt":"x","nvext":{"routing_constraints":`+c.constraints+`}}`),
		)
		var e *Error
		if !errors.As(err, &e) ||
			c.code != "" && (e.Code != c.code || e.Param != c.param || !strings.Contains(e.Message, c.param)) ||
			len(e.Message) > 400 {
			t.Errorf("%.80s: got %v; want %s of %s", c.constraints, err, c.code, c.param)
		}
	}
}
