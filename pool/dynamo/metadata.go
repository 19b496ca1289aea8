package dynamo

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"kvepp/pool"
)

// ParseMetadata decodes spec.data of a DynamoWorkerMetadata object, which a worker process writes if Dynamo's discovery
// is Kubernetes. It returns the instances, ordered by path, and the addresses of the ZMQ broker that the process is.
// Each part may be absent or null. Invalid records are in the error; the others are in the result.
//
// Source: dynamo-runtime 1.6.1, discovery::metadata.
func ParseMetadata(data []byte) (instances []Instance, brokers []string, err error) {
	var d struct {
		Endpoints map[string]json.RawMessage `json:"endpoints"`
		Cards     map[string]json.RawMessage `json:"model_cards"`
		Channels  map[string]json.RawMessage `json:"event_channels"`
		Sources   map[string]json.RawMessage `json:"event_sources"`
	}
	if err := json.Unmarshal(data, &d); err != nil {
		return nil, nil, fmt.Errorf("spec.data: %w", err)
	}
	var errs []error
	// each calls f for the records of a part, in the order of their names.
	each := func(part string, records map[string]json.RawMessage, f func(record []byte) error) {
		for _, name := range slices.Sorted(maps.Keys(records)) {
			if err := f(records[name]); err != nil {
				errs = append(errs, fmt.Errorf("spec.data.%s %q: %w", part, name, err))
			}
		}
	}
	cards := map[key]*Card{}
	each("model_cards", d.Cards, func(record []byte) error {
		path, id, card, err := parseCard(record)
		if card != nil {
			cards[key{path, id}] = card
		}
		return err
	})
	channels := map[uint64]pool.EventChannel{} // by publisher
	loads := map[string][]pool.EventChannel{}  // by path
	each("event_channels", d.Channels, func(record []byte) error {
		c, path, err := parseChannel(record)
		switch {
		case err != nil || c == (pool.EventChannel{}):
		case path != "":
			loads[path] = append(loads[path], c)
		case c.Brokers != "":
			brokers = append(brokers, c.Brokers)
		default:
			channels[c.Publisher] = c
		}
		return err
	})
	for path, list := range loads { // all instances of a path share the list
		loads[path] = sortedUnique(list)
	}
	heard, unheard := map[key][]pool.EventChannel{}, map[key][]pool.EventChannel{}
	each("event_sources", d.Sources, func(record []byte) error {
		from, err := parseSource(record)
		from.join(channels, heard, unheard)
		return err
	})
	each("endpoints", d.Endpoints, func(record []byte) error {
		in, err := parseInstance(record)
		if err == nil {
			k := key{in.Path, in.InstanceID}
			in.Card, in.Channels, in.Loads, in.unheard = cards[k], heard[k], loads[in.Path], unheard[k]
			sortChannels(in.Channels)
			instances = append(instances, in)
		}
		return err
	})
	sortInstances(instances)
	return instances, brokers, errors.Join(errs...)
}

// ServingInstance returns the instance of a worker process that serves its model: the first with a card, else the one
// whose endpoint is named generate. It returns false if there is none.
func ServingInstance(instances []Instance) (Instance, bool) {
	for _, in := range instances {
		if in.Card != nil {
			return in, true
		}
	}
	for _, in := range instances {
		if strings.HasSuffix(in.Path, "/generate") {
			return in, true
		}
	}
	return Instance{}, false
}
