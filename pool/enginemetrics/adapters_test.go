package enginemetrics

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// TestReadAdapters: which adapters lists of models have, and what is refused.
func TestReadAdapters(t *testing.T) {
	const wrong = "an error"
	few := strings.Repeat(`{"id":"a","parent":"b"},`, 3) + `{"id":"` + strings.Repeat("x", 257) + `","parent":"b"}`
	for body, want := range map[string]string{
		`{"object":"list","data":[{"id":"m","parent":null},{"id":"sql","parent":"m","root":"/x"}]}`: "map[sql:m]",
		`{"data":[{"id":"m"},{"id":"n"},{"id":"sql","parent":"a path"}]}`:                           "map[sql:a path]",
		`{"x":{"data":[1]},"data":[` + few + `]}`:                                                   "map[a:b]",
		`{"data":[]}`:                                "map[]",
		`{"data":[{"id":"","parent":"m"}]}`:          "map[]",
		`{"data":[{"id":"a\u0000,b","parent":"m"}]}`: "map[a\x00,b:m]",
		`{"data":[{"id":7,"parent":"m"}]}`:           wrong,
		`{"data":["sql"]}`:                           wrong,
		`{"data":{"id":"sql"}}`:                      wrong,
		`{"models":[]}`:                              wrong,
		`[]`:                                         wrong,
		`{"data":[{"id":"sql","parent":"m"}`:         wrong,
		``:                                           wrong,
	} {
		got, err := readAdapters([]byte(body))
		if s := fmt.Sprint(got); s != want && (want != wrong || err == nil) {
			t.Errorf("%.80s: %s, %v, want %s", body, s, err, want)
		}
	}
	var many strings.Builder
	for i := range 1_000_000 {
		fmt.Fprintf(&many, `{"id":"%d","parent":"m"},`, i)
		if i == 2*pool.MaxAdapters {
			got, err := readAdapters([]byte(`{"data":[` + many.String() + `{}]}`))
			if err != nil || len(got) != pool.MaxAdapters {
				t.Errorf("%d adapters, %v", len(got), err)
			}
		}
	}
	if got, err := readAdapters([]byte(`{"data":[` + many.String() + `{}]}`)); err == nil {
		t.Errorf("%d of a million adapters", len(got))
	}
}

// TestAdapters: engines are asked for their adapters in the background, and their pages say which have requests.
func TestAdapters(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		said := map[kvblock.Worker]pool.Adapters{}
		calls := 0
		var mu sync.Mutex
		cfg := Config{Adapters: func(w kvblock.Worker, a pool.Adapters) {
			mu.Lock()
			defer mu.Unlock()
			said[w] = a
			calls++
		}}
		g, e, _ := start(t, cfg, endpoints(3)...)
		models := `{"data":[{"id":"m","parent":null},{"id":"sql","parent":"m"}]}`
		const info = `vllm:lora_requests_info{max_lora="4",running_lora_adapters=%q,waiting_lora_adapters=%q} %s` + "\n"
		page := busyPage(1, 0, 0) + fmt.Sprintf(info, "old", "", "1.5e9") + fmt.Sprintf(info, "sql, b", "c", "1.6e9") +
			fmt.Sprintf(info, "older", "", "1.4e9")
		e.mu.Lock()
		e.page["e0:80"] = func(r *http.Request) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			if r.URL.Path == "/v1/models" {
				return models, nil
			}
			return page, nil
		}
		e.mu.Unlock()
		// the lists of models are no JSON
		e.setPage("e1:80", busyPage(1, 0, 0))
		e.setPage("e2:80", "sglang:lora_pool_slots_total 3\nsglang:num_running_reqs 0\n")
		advance(6 * time.Second)
		mu.Lock()
		want := pool.Adapters{Listed: map[string]string{"sql": "m"}, Active: []string{"sql", "b", "c"}, Most: 4}
		if fmt.Sprint(said[0]) != fmt.Sprint(want) || said[2].Most != 3 || len(said) != 2 {
			t.Errorf("%v, want %v", said, want)
		}
		models, page = `{"data":[{"id":"m"}]}`, busyPage(1, 0, 0)
		mu.Unlock()
		if readings(g, "models") == 0 || e.log.Count("or its list of models, cannot be read") != 1 {
			t.Errorf("%d lists could not be read; %s", readings(g, "models"), &e.log)
		}
		advance(11 * time.Second)
		mu.Lock()
		if says := said[0]; len(says.Listed)+len(says.Active)+says.Most > 0 {
			t.Errorf("after its adapters are gone: %v", says)
		}
		calls = 0
		mu.Unlock()
		advance(time.Minute)
		mu.Lock()
		defer mu.Unlock()
		if calls > 20 {
			t.Errorf("%d calls in a minute about one engine that says something", calls)
		}
	})
}
