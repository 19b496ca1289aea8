package e2e

import (
	"encoding/json"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// TestBusyThresholdAsTheFrontend sends the same requests to a frontend of Dynamo's and to kvepp's admin address. No
// load exceeds the thresholds that it sets at the end.
func TestBusyThresholdAsTheFrontend(t *testing.T) {
	ask := func(url, method, contentType, body string) (status int, response string) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, url+"/busy_threshold", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		if contentType != "" {
			req.Header.Set("Content-Type", contentType)
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	const asJSON = "application/json"
	for _, c := range []struct{ method, contentType, body string }{
		{"GET", "", ""},
		{"POST", asJSON, `{"model": "MODEL"}`},
		{"POST", asJSON, `{"model": "absent"}`},
		{"POST", asJSON, `{"model": "absent", "active_prefill_tokens_threshold": 1}`},
		{"POST", asJSON, `{"model": "MODEL", "active_prefill_tokens_threshold": 100000000}`},
		{"POST", asJSON, `{"model": "MODEL", "active_decode_blocks_threshold": 1, "active_prefill_tokens_threshold": ` +
			`null}`},
		{"GET", "", ""},
		{"POST", asJSON, `{"model": "MODEL", "active_decode_blocks_threshold": 1.5, ` +
			`"active_prefill_tokens_threshold": 1}`},
		{"POST", asJSON, `{"model": "MODEL", "active_decode_blocks_threshold": -0.25}`},
		{"POST", asJSON, `{"model": "MODEL", "active_prefill_tokens_threshold_frac": -1}`},
		{"POST", asJSON, `{"model": "MODEL", "active_prefill_tokens_threshold": -1}`},
		{"POST", asJSON, `{"model": "MODEL", "active_prefill_tokens_threshold": 1.5}`},
		{"POST", asJSON, `{"model": "MODEL", "active_decode_blocks_threshold": "0.5"}`},
		{"POST", asJSON, `{"model": "MODEL", "active_prefill_tokens_threshold_frac": 99999.5, "unknown": 1}`},
		{"POST", asJSON, `{"active_decode_blocks_threshold": 0.5}`},
		{"POST", asJSON, `{"model": null}`},
		{"POST", asJSON, `{"model": 7}`},
		{"POST", asJSON, `{"Model": "MODEL"}`},
		{"POST", asJSON, `{"model": "MODEL", "model": "MODEL"}`},
		{"POST", asJSON, `{"model": "MODEL", "Active_decode_blocks_threshold": 0.5}`},
		{"POST", asJSON, `"MODEL"`},
		{"POST", asJSON, `{"model"`},
		{"POST", asJSON, ``},
		{"POST", "", `{"model": "MODEL"}`},
		{"POST", "text/plain", `{"model": "MODEL"}`},
		{"POST", asJSON, `{"model": "MODEL"}`},
		{"GET", "", ""},
		{"DELETE", "", ""},
	} {
		body := strings.ReplaceAll(c.body, "MODEL", stack.Model)
		status, ours := ask(main.Admin(), c.method, c.contentType, body)
		wantStatus, theirs := ask("http://"+main.Workers[0].Address, c.method, c.contentType, body)
		var got, want any
		switch {
		case status != wantStatus:
			t.Errorf("%s %s: kvepp %d %s, Dynamo %d %s", c.method, body, status, ours, wantStatus, theirs)
		case json.Unmarshal([]byte(theirs), &want) != nil || status == http.StatusUnprocessableEntity:
			// Dynamo's parser has its own wording for JSON errors.
		case json.Unmarshal([]byte(ours), &got) != nil || !reflect.DeepEqual(got, want):
			t.Errorf("%s %s: kvepp answers %s, Dynamo %s", c.method, body, ours, theirs)
		}
		if status == http.StatusUnprocessableEntity {
			var refused struct{ Error string }
			if json.Unmarshal([]byte(ours), &refused) != nil || refused.Error == "" {
				t.Errorf("%s %s: %s", c.method, body, ours)
			}
		}
	}
}
