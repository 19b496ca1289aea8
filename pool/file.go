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

// Entry is one endpoint as the endpoints file gives it: an Endpoint, and perhaps the place in Dynamo's discovery that
// completes it.
type Entry struct {
	Endpoint
	// Dynamo is NAMESPACE/COMPONENT/ENDPOINT, or empty. When set, the entry is an endpoint only while discovery has a
	// live instance there.
	Dynamo string
	// AllInstances says that the entry stands for as many endpoints as there are live instances.
	AllInstances bool
}

// fileEntry is the YAML of one endpoint. Pointers tell "absent" from zero. Errors show the examples.
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
	BlockSize             whole    `yaml:"blockSize" example:"16"`
	TotalKVBlocks         whole    `yaml:"totalKvBlocks" example:"4096"`
	MaxNumBatchedTokens   whole    `yaml:"maxNumBatchedTokens" example:"8192"`
	Model                 string   `yaml:"model" example:"qwen"`
	DeviceType            string   `yaml:"deviceType" example:"cuda"`
	Taints                []string `yaml:"taints" example:"[zone-a, fast]"`
	Cordoned              bool     `yaml:"cordoned" example:"true"`
}

// id is a Dynamo instance id. It uses all 64 bits, and package yaml would round one that does not fit to one that does.
type id uint64

func (i *id) UnmarshalYAML(node *yaml.Node) error {
	v, err := strconv.ParseUint(node.Value, 10, 64)
	if err != nil {
		return fmt.Errorf("line %d: instanceId: %q is not a decimal number of at most 64 bits", node.Line, node.Value)
	}
	*i = id(v)
	return nil
}

// whole and rank are numbers without a fraction, which package yaml would cut off.
type (
	whole int
	rank  uint32
)

func (w *whole) UnmarshalYAML(node *yaml.Node) error { return decodeWhole(node, (*int)(w)) }
func (r *rank) UnmarshalYAML(node *yaml.Node) error  { return decodeWhole(node, (*uint32)(r)) }

func decodeWhole(node *yaml.Node, to any) error {
	if node.Tag == "!!float" {
		return errors.New("not a whole number")
	}
	return node.Decode(to)
}

// MaxRanks bounds an endpoint's DataParallelSize: more ranks than any engine has, few enough that a typing error costs
// no memory.
const MaxRanks = 1024

// maxWorkers bounds the ranks of all endpoints together: index and load book have no more numbers.
const maxWorkers = 1 << 16

// ParseFile reads the endpoints file. The error names the line; an unknown key, a name given twice, and whatever could
// not be dialled are errors. Where neither instanceId nor dynamo is given, the instance id is derived from the name as
// Dynamo derives it from a pod's name.
func ParseFile(text []byte) ([]Entry, error) {
	var doc struct {
		Endpoints []fileEntry `yaml:"endpoints"`
	}
	dec := yaml.NewDecoder(bytes.NewReader(text))
	dec.KnownFields(true)
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return nil, errors.New(
			"the file is empty: it must hold a list under \"endpoints:\" (an empty list is \"endpoints: []\")",
		)
	} else if err != nil {
		return nil, explain(text, err)
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one YAML document in the file: put all endpoints into one list")
	}
	if doc.Endpoints == nil {
		return nil, errors.New("no list under \"endpoints:\" (an empty list is \"endpoints: []\")")
	}
	// A second reading for the lines that errors name.
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
			return nil, fmt.Errorf(
				"line %d: more than %d workers, all ranks counted: spread them over several kvepps",
				node.Line,
				maxWorkers,
			)
		}
		if other, twice := joins[e.Dynamo]; twice && e.Dynamo != "" {
			// Two entries could take each other's instance, and with it the wrong event socket.
			return nil, fmt.Errorf(
				"line %d: %q joins %s as %q does: give each worker a Dynamo namespace of its own, or instanceId",
				node.Line,
				e.Name,
				e.Dynamo,
				other,
			)
		}
		joins[e.Dynamo] = e.Name
		entries = append(entries, e)
	}
	return entries, nil
}

// entry checks what the file gives for one endpoint, which stands at node.
func (f *fileEntry) entry(node *yaml.Node) (Entry, error) {
	// fail puts the line of the key that is wrong in front, or the entry's own where the key is absent.
	fail := func(key, format string, args ...any) (Entry, error) {
		return Entry{}, fmt.Errorf("line %d: %s: %s", keyLine(node, key), key, fmt.Sprintf(format, args...))
	}
	e := Entry{Dynamo: f.Dynamo, AllInstances: f.AllInstances, Endpoint: Endpoint{
		Name: f.Name, Address: f.Address, Role: f.Role,
		DataParallelStartRank: uint32(
			f.DataParallelStartRank,
		), DataParallelSize: max(uint32(f.DataParallelSize), 1), RankByAddress: f.RankByAddress,
		KVEvents: f.KVEvents, KVReplay: f.KVReplay, KVTopic: f.KVTopic, Metrics: f.Metrics,
		BlockSize: int(
			f.BlockSize,
		), TotalKVBlocks: int(f.TotalKVBlocks), MaxNumBatchedTokens: int(f.MaxNumBatchedTokens),
		Model: f.Model, DeviceType: strings.ToLower(f.DeviceType), Taints: f.Taints,
	}}
	if e.Role == "" {
		e.Role = Aggregated
	}
	if f.Cordoned {
		e.CordonedBy = CordonedByFile
	}
	switch {
	case CheckName(f.Name) != nil:
		return fail("name", "%v", CheckName(f.Name))
	case !slices.Contains([]Role{Aggregated, Prefill, Decode}, e.Role):
		return fail("role", "%q is none of aggregated, prefill, decode%s", f.Role,
			suggest.DidYouMean(string(f.Role), "", []string{string(Aggregated), string(Prefill), string(Decode)}))
	case f.AllInstances && f.Dynamo == "":
		return fail("allInstances", "the instances are those of a dynamo path: give one")
	case f.AllInstances && (f.KVEvents != "" || f.KVReplay != ""):
		return fail(
			"allInstances",
			"kvEvents and kvReplay are one worker's: leave them out, events come over Dynamo's event plane",
		)
	case f.Dynamo != "" && f.InstanceID != nil:
		return fail("instanceId", "dynamo gives the instance id: leave out one of the two")
	case e.RankByAddress && e.DataParallelSize > 1:
		return fail("rankByAddress", "the address is one rank's own, and dataParallelSize says %d", e.DataParallelSize)
	case e.DataParallelSize > MaxRanks || e.DataParallelStartRank > 1<<31:
		return fail(
			"dataParallelSize",
			"ranks %d+%d are out of range (at most %d ranks)",
			e.DataParallelStartRank,
			e.DataParallelSize,
			MaxRanks,
		)
	case f.BlockSize > kvblock.MaxBlockSize:
		return fail("blockSize", "%d is out of range: at most %d tokens", f.BlockSize, kvblock.MaxBlockSize)
	case f.BlockSize < 0 || f.TotalKVBlocks < 0 || f.MaxNumBatchedTokens < 0:
		return fail("blockSize", "blockSize, totalKvBlocks and maxNumBatchedTokens may not be negative")
	}
	if f.Address == "" && e.Role == Prefill { // no request is sent there: the decode worker's frontend knows the way
	} else if err := checkHostPort(f.Address, 1); err != nil {
		return fail("address", "%v", err)
	}
	if f.AllInstances && f.Metrics != "" {
		return fail("metrics", "the page is one worker's, and there may be many instances: leave it out")
	}
	if f.Metrics != "" {
		if err := checkPage(f.Metrics); err != nil {
			return fail("metrics", "%v", err)
		}
	}
	for _, t := range append([][2]string{{"model", f.Model}, {"deviceType", f.DeviceType}, {"kvTopic", f.KVTopic},
		{"dynamo", f.Dynamo}}, taintTexts(f.Taints)...) {
		if err := CheckText(t[1]); err != nil {
			return fail(t[0], "%v", err)
		}
	}
	for key, address := range map[string]string{"kvEvents": f.KVEvents, "kvReplay": f.KVReplay} {
		if address == "" {
			continue
		}
		if err := CheckTCP(address, e.DataParallelSize); err != nil {
			return fail(key, "%v", err)
		}
	}
	switch {
	case f.Dynamo != "":
		if parts := strings.Split(f.Dynamo, "/"); len(parts) != 3 || slices.Contains(parts, "") {
			return fail("dynamo", "%q must look like NAMESPACE/COMPONENT/ENDPOINT", f.Dynamo)
		}
	case f.InstanceID != nil:
		e.InstanceID = uint64(*f.InstanceID)
	default:
		e.InstanceID = kvblock.InstanceID(f.Name)
	}
	return e, nil
}

// taintTexts returns each taint with the key that it is under.
func taintTexts(taints []string) (texts [][2]string) {
	for _, taint := range taints {
		texts = append(texts, [2]string{"taints", taint})
	}
	return texts
}

// keyLine returns the line of a key in a mapping, or the mapping's own where the key is absent.
func keyLine(node *yaml.Node, key string) int {
	for i := 0; i+1 < len(node.Content); i += 2 {
		if node.Content[i].Value == key {
			return node.Content[i].Line
		}
	}
	return node.Line
}
