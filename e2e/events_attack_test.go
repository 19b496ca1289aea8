package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"kvepp/test/harness/stack"
)

// picked is what POST /pick says of a request.
type picked struct {
	Worker *struct {
		Name string `json:"name"`
	} `json:"worker"`
	Reason    string `json:"reason"`
	Predicted int    `json:"predicted_cached_tokens"`
}

// pick asks kvepp where a request would go now.
func pick(t *testing.T, s *stack.Stack, body string) (p picked) {
	t.Helper()
	resp, err := http.Post(s.Admin()+"/pick", "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&p); err != nil {
		t.Fatal(err)
	}
	return p
}

// TestEngineNamesOtherModels: an engine announces another model as its adapter, and thousands of further ones. The
// other model's requests stay with its own worker, other engines' adapters are still learned, and when the engine
// leaves, its names go.
func TestEngineNamesOtherModels(t *testing.T) {
	engines := stockEngines(t, 2)
	s := start(t, stack.Config{Workers: -1, Servers: []string{engines[0].Address},
		KveppFlags: []string{"--engine=vllm"}})
	hostile, honest := newPublisher(t, 1, 0), newPublisher(t, 2, 0)
	defer runtime.KeepAlive([]*publisher{hostile, honest}) // a socket without references closes
	entry := func(name, address, model string, p *publisher) string {
		return fmt.Sprintf("- {name: %s, address: %q, model: %s, blockSize: %d, kvEvents: %q}\n", name, address, model,
			indexerBlock, p.address)
	}
	other := entry("honest", engines[1].Address, "victim", honest)
	if err := s.ReplaceEndpoints("endpoints:\n" + entry("hostile", engines[0].Address, stack.Model, hostile) +
		other); err != nil {
		t.Fatal(err)
	}
	hostile.subscribed(1)
	honest.subscribed(1)
	hash := uint64(0)
	adapter := func(name string) []any {
		hash++
		return []any{"BlockStored", []uint64{hash}, nil, []int{1, 2, 3, 4}, indexerBlock, nil, "GPU", name, nil}
	}
	request := func(model string) string { return `{"model":"` + model + `","prompt":[1,2,3,4,5]}` }
	names := func(want float64) {
		t.Helper()
		eventually(t, func() error {
			if got := metric(t, s, "kvepp_lora_adapters"); got != want {
				return fmt.Errorf("%v adapters, want %v", got, want)
			}
			return nil
		})
	}
	hostile.publish(adapter("victim"), adapter(stack.Model))
	hostile.publish(adapter("mine"))
	names(3)
	if p := pick(t, s, request("mine")); p.Worker == nil || p.Worker.Name != "hostile" || p.Predicted != 4 {
		t.Errorf("its own adapter: %+v", p)
	}
	if p := pick(t, s, request("victim")); p.Worker == nil || p.Worker.Name != "honest" {
		t.Errorf("another model that it named as its adapter: %+v", p)
	}
	for i := range 60 {
		var events [][]any
		for j := range 100 {
			events = append(events, adapter(fmt.Sprintf("adapter-%d-%d", i, j)))
		}
		hostile.publish(events...)
	}
	names(1024)
	honest.publish(adapter("late"))
	names(1025)
	if p := pick(t, s, request("late")); p.Worker == nil || p.Worker.Name != "honest" {
		t.Errorf("an adapter of the other engine: %+v", p)
	}
	if err := s.ReplaceEndpoints("endpoints:\n" + other); err != nil {
		t.Fatal(err)
	}
	names(1)
}

// TestEngineRestartsInPlace: an engine without a replay socket ends, and one without blocks takes its address. Before
// its first event, kvepp predicts no cached tokens.
func TestEngineRestartsInPlace(t *testing.T) {
	engine := stockEngines(t, 1)[0]
	s := start(t, stack.Config{Workers: -1, Servers: []string{engine.Address}, KveppFlags: []string{"--engine=vllm"}})
	p := newPublisher(t, 1, 0)
	if err := s.ReplaceEndpoints(fmt.Sprintf("endpoints:\n- {name: a, address: %q, blockSize: %d, kvEvents: %q}\n",
		engine.Address, indexerBlock, p.address)); err != nil {
		t.Fatal(err)
	}
	p.subscribed(1)
	request := `{"model":"` + stack.Model + `","prompt":[1,2,3,4,5]}`
	predicted := func(want int) {
		t.Helper()
		eventually(t, func() error {
			if got := pick(t, s, request); got.Predicted != want {
				return fmt.Errorf("%d tokens predicted, want %d", got.Predicted, want)
			}
			return nil
		})
	}
	p.publish([]any{"BlockStored", []uint64{1}, nil, []int{1, 2, 3, 4}, indexerBlock, nil, "GPU", nil, nil})
	predicted(4)
	p.socket.Close()
	predicted(0)
}
