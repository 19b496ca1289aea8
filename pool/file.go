package pool

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"kvepp/internal/suggest"
	"kvepp/kvblock"
)

// Entry is one endpoint of the endpoints file: an Endpoint, and optionally the path in Dynamo's discovery that
// completes it.
type Entry struct {
	Endpoint
	// Dynamo is NAMESPACE/COMPONENT/ENDPOINT, or empty. If it is set, the entry is an endpoint only while discovery has
	// a live instance at this path.
	Dynamo string
	// AllInstances makes one endpoint of each live instance.
	AllInstances bool
}

// fileEntry is the YAML of one endpoint. A nil pointer means absent. Errors show the examples.
type fileEntry struct {
	Name                  string   `yaml:"name" example:"worker-0"`
	Address               string   `yaml:"address" example:"10.0.0.7:8000"`
	Dynamo                string   `yaml:"dynamo" example:"dynamo/backend/generate"`
	AllInstances          bool     `yaml:"allInstances" example:"true"`
	InstanceID            *id      `yaml:"instanceId" example:"1234567890"`
	Role                  Role     `yaml:"role" example:"decode"`
	DataParallelStartRank rank     `yaml:"dataParallelStartRank" example:"0"`
	DataParallelSize      rank     `yaml:"dataParallelSize" example:"2"`
	RankByAddress         bool     `yaml:"rankByAddress" example:"true"`
	KVEvents              string   `yaml:"kvEvents" example:"tcp://10.0.0.7:5557"`
	KVReplay              string   `yaml:"kvReplay" example:"tcp://10.0.0.7:5558"`
	KVTopic               string   `yaml:"kvTopic" example:"kv-events"`
	Metrics               string   `yaml:"metrics" example:"http://10.0.0.7:8000/metrics"`
	BlockSize             integer  `yaml:"blockSize" example:"16"`
	TotalKVBlocks         integer  `yaml:"totalKvBlocks" example:"4096"`
	MaxNumBatchedTokens   integer  `yaml:"maxNumBatchedTokens" example:"8192"`
	Model                 string   `yaml:"model" example:"qwen"`
	EngineVersion         string   `yaml:"engineVersion" example:"0.5.23"`
	DeviceType            string   `yaml:"deviceType" example:"cuda"`
	Taints                []string `yaml:"taints" example:"[zone-a, fast]"`
	EAGLEDrop             string   `yaml:"eagleDrop" example:"full"`
	Cordoned              bool     `yaml:"cordoned" example:"true"`
}

// id is a Dynamo instance id. It uses all 64 bits. Package yaml would round numbers that do not fit.
type id uint64

func (i *id) UnmarshalYAML(node *yaml.Node) error {
	v, err := strconv.ParseUint(node.Value, 10, 64)
	if err != nil {
		return fmt.Errorf("line %d: instanceId: %q is not a decimal number of at most 64 bits", node.Line, node.Value)
	}
	*i = id(v)
	return nil
}

// integer and rank are integers. Package yaml would truncate fractions.
type (
	integer int
	rank    uint32
)

func (w *integer) UnmarshalYAML(node *yaml.Node) error { return decodeWhole(node, (*int)(w)) }
func (r *rank) UnmarshalYAML(node *yaml.Node) error    { return decodeWhole(node, (*uint32)(r)) }

func decodeWhole(node *yaml.Node, to any) error {
	if node.Tag == "!!float" {
		return errors.New("not a whole number")
	}
	return node.Decode(to)
}

// MaxRanks bounds an endpoint's DataParallelSize. No engine has as many ranks, and a typing error within it costs
// little memory.
const MaxRanks = 1024

// maxWorkers bounds the ranks of all endpoints, because index and load book have no more worker numbers.
const maxWorkers = 1 << 16

// Bounds on the endpoints file before it is parsed, which takes some hundred bytes for each value in it.
const (
	MaxFile       = 32 << 20 // bytes
	maxSeparators = 1 << 20  // newlines and commas, 16 for each of maxWorkers
)

// ParseFile reads the endpoints file. Errors name the line. Unknown keys, duplicate names and invalid addresses are
// errors. If an entry has neither instanceId nor dynamo, its instance id is derived from its name, as Dynamo derives it
// from a Pod's name.
func ParseFile(text []byte) ([]Entry, error) {
	if bytes.Count(text, []byte("\n"))+bytes.Count(text, []byte(",")) > maxSeparators ||
		bytes.Count(text, []byte("address")) > 2*maxWorkers {
		return nil, fmt.Errorf("more than %d workers, or too many values: spread them over several kvepps", maxWorkers)
	}
	var doc struct {
		Endpoints []fileEntry `yaml:"endpoints"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New(
			"the file is empty: it must hold a list under \"endpoints:\" (an empty list is \"endpoints: []\")")
	} else if err != nil {
		return nil, explain(text, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document in the file: put all endpoints into one list")
	}
	if doc.Endpoints == nil {
		return nil, errors.New("no list under \"endpoints:\" (an empty list is \"endpoints: []\")")
	}
	// Parse again into nodes for the line numbers of errors.
	var at struct {
		Endpoints []yaml.Node `yaml:"endpoints"`
	}
	if err := yaml.Unmarshal(text, &at); err != nil {
		return nil, err
	}
	entries := make([]Entry, 0, len(doc.Endpoints))
	lines := make(map[string]int, len(doc.Endpoints))
	joins := make(map[string]string)
	workers := uint32(0)
	for i := range doc.Endpoints {
		node := &at.Endpoints[i]
		e, err := doc.Endpoints[i].entry(node)
		if err != nil {
			return nil, err
		}
		if line, twice := lines[e.Name]; twice {
			return nil, fmt.Errorf("line %d: name %q is taken by the endpoint of line %d", node.Line, e.Name, line)
		}
		lines[e.Name] = node.Line
		if workers += e.DataParallelSize; workers > maxWorkers {
			return nil, fmt.Errorf("line %d: more than %d workers, counting all ranks: spread them over several kvepps",
				node.Line, maxWorkers)
		}
		if other, twice := joins[e.Dynamo]; twice && e.Dynamo != "" {
			// Two entries could swap their instances, and so get each other's event socket.
			return nil, fmt.Errorf("line %d: %q joins %s as %q does: give each worker a Dynamo namespace of its own, "+
				"or instanceId", node.Line, e.Name, e.Dynamo, other)
		}
		joins[e.Dynamo] = e.Name
		entries = append(entries, e)
	}
	return entries, nil
}

// keyError is an error about one key of an endpoint.
type keyError struct{ key, text string }

func (e *keyError) Error() string { return e.key + ": " + e.text }

func wrongKey(key, format string, args ...any) error {
	return &keyError{key, fmt.Sprintf(format, args...)}
}

// entry checks and converts one endpoint of the file. Errors begin with the line of the wrong key; if the key is
// absent, with the line of node, which is the endpoint's.
func (f *fileEntry) entry(node *yaml.Node) (Entry, error) {
	e := f.unchecked()
	for _, check := range []func(*Entry) error{f.checkKeys, f.checkAddresses, f.checkTexts} {
		if err := check(&e); err != nil {
			line := node.Line
			if k := (*keyError)(nil); errors.As(err, &k) {
				line = keyLine(node, k.key)
			}
			return Entry{}, fmt.Errorf("line %d: %w", line, err)
		}
	}
	switch {
	case f.Dynamo != "": // discovery has the instance id
	case f.InstanceID != nil:
		e.InstanceID = uint64(*f.InstanceID)
	default:
		e.InstanceID = kvblock.InstanceID(f.Name)
	}
	return e, nil
}

// unchecked converts f, with the defaults of absent keys but without an instance id.
func (f *fileEntry) unchecked() Entry {
	e := Entry{Dynamo: f.Dynamo, AllInstances: f.AllInstances, Endpoint: Endpoint{
		Name:                  f.Name,
		Address:               f.Address,
		Role:                  f.Role,
		DataParallelStartRank: uint32(f.DataParallelStartRank),
		DataParallelSize:      max(uint32(f.DataParallelSize), 1),
		RankByAddress:         f.RankByAddress,
		KVEvents:              f.KVEvents,
		KVReplay:              f.KVReplay,
		KVTopic:               f.KVTopic,
		Metrics:               f.Metrics,
		BlockSize:             int(f.BlockSize),
		TotalKVBlocks:         int(f.TotalKVBlocks),
		MaxNumBatchedTokens:   int(f.MaxNumBatchedTokens),
		Model:                 f.Model,
		EngineVersion:         f.EngineVersion,
		DeviceType:            strings.ToLower(f.DeviceType),
		Taints:                f.Taints,
	}}
	if e.Role == "" {
		e.Role = Aggregated
	}
	e.EAGLEDrop, _ = kvblock.ParseEAGLEDrop(f.EAGLEDrop) // checkKeys reports others
	if f.Cordoned {
		e.CordonedBy = CordonedByFile
	}
	return e
}

// checkKeys checks the name, the numbers, and keys that exclude each other.
func (f *fileEntry) checkKeys(e *Entry) error {
	if err := CheckName(f.Name); err != nil {
		return wrongKey("name", "%v", err)
	}
	_, known := kvblock.ParseEAGLEDrop(f.EAGLEDrop)
	switch {
	case !known:
		return wrongKey("eagleDrop", "%q is none of %s%s", f.EAGLEDrop, strings.Join(kvblock.EAGLEDropNames, ", "),
			suggest.DidYouMean(f.EAGLEDrop, "", kvblock.EAGLEDropNames))
	case !slices.Contains([]Role{Aggregated, Prefill, Decode}, e.Role):
		return wrongKey("role", "%q is none of aggregated, prefill, decode%s", f.Role,
			suggest.DidYouMean(string(f.Role), "", []string{string(Aggregated), string(Prefill), string(Decode)}))
	case f.AllInstances && f.Dynamo == "":
		return wrongKey("allInstances", "the instances are those of a dynamo path: give one")
	case f.AllInstances && (f.KVEvents != "" || f.KVReplay != ""):
		return wrongKey("allInstances",
			"kvEvents and kvReplay are one worker's: leave them out, events come over Dynamo's event plane")
	case f.Dynamo != "" && f.InstanceID != nil:
		return wrongKey("instanceId", "dynamo gives the instance id: leave out one of the two")
	case e.RankByAddress && e.DataParallelSize > 1:
		return wrongKey("rankByAddress", "the address serves one rank, but dataParallelSize is %d", e.DataParallelSize)
	case e.DataParallelSize > MaxRanks || e.DataParallelStartRank > 1<<31:
		return wrongKey("dataParallelSize",
			"ranks %d+%d are out of range (at most %d ranks)", e.DataParallelStartRank, e.DataParallelSize, MaxRanks)
	case f.BlockSize > kvblock.MaxBlockSize:
		return wrongKey("blockSize", "%d is out of range: at most %d tokens", f.BlockSize, kvblock.MaxBlockSize)
	case f.BlockSize < 0 || f.TotalKVBlocks < 0 || f.MaxNumBatchedTokens < 0:
		return wrongKey("blockSize", "blockSize, totalKvBlocks and maxNumBatchedTokens may not be negative")
	}
	return nil
}

// checkAddresses checks address and metrics. A prefill worker needs no address: requests reach it through the decode
// worker's frontend.
func (f *fileEntry) checkAddresses(e *Entry) error {
	if f.Address != "" || e.Role != Prefill {
		if err := checkHostPort(f.Address, 1); err != nil {
			return wrongKey("address", "%v", err)
		}
	}
	if f.AllInstances && f.Metrics != "" {
		return wrongKey("metrics", "the page is one worker's, and there may be many instances: leave it out")
	}
	if f.Metrics != "" {
		if err := checkPage(f.Metrics); err != nil {
			return wrongKey("metrics", "%v", err)
		}
	}
	return nil
}

// checkTexts checks the texts, the event addresses, and the form of the dynamo path.
func (f *fileEntry) checkTexts(e *Entry) error {
	for _, t := range append([][2]string{{"model", f.Model}, {"engineVersion", f.EngineVersion},
		{"deviceType", f.DeviceType}, {"kvTopic", f.KVTopic}, {"dynamo", f.Dynamo}}, taintTexts(f.Taints)...) {
		if err := CheckText(t[1]); err != nil {
			return wrongKey(t[0], "%v", err)
		}
	}
	for key, address := range map[string]string{"kvEvents": f.KVEvents, "kvReplay": f.KVReplay} {
		if address == "" {
			continue
		}
		if err := CheckTCP(address, e.DataParallelSize); err != nil {
			return wrongKey(key, "%v", err)
		}
	}
	if f.Dynamo != "" {
		if parts := strings.Split(f.Dynamo, "/"); len(parts) != 3 || slices.Contains(parts, "") {
			return wrongKey("dynamo", "%q must look like NAMESPACE/COMPONENT/ENDPOINT", f.Dynamo)
		}
	}
	return nil
}

// taintTexts returns a pair of the key "taints" and the taint, for each taint.
func taintTexts(taints []string) (texts [][2]string) {
	for _, taint := range taints {
		texts = append(texts, [2]string{"taints", taint})
	}
	return texts
}

// keyLine returns the line of a key in a mapping, or the mapping's own line if the key is absent.
func keyLine(node *yaml.Node, key string) int {
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == key {
			return node.Content[i].Line
		}
	}
	return node.Line
}
