// Package dynamo reads live workers and their metadata from Dynamo's service discovery.
//
// It owns the formats of Dynamo's discovery records (instances and model cards) and joins them with the endpoints file.
// It never writes to discovery and needs no Dynamo runtime. Its sources are the file store, the metadata objects of
// workers in Kubernetes (from package pool/kube), and frontends, which know the workers of any other discovery.
//
// Concurrency: functions may be called from any goroutine. A FileStore or Frontends has one caller of Watch.
//
// Source: dynamo-runtime 1.6.1, discovery and storage; dynamo-llm 1.6.1, model_card.
package dynamo

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"kvepp/kvblock"
	"kvepp/pool"
)

// Instance is one live worker process on one endpoint path.
type Instance struct {
	Path       string // NAMESPACE/COMPONENT/ENDPOINT
	InstanceID uint64
	DeviceType string // cuda or cpu; empty: unknown
	// Seen is when the instance was first seen alive. For instances that existed at the start, it is when they last
	// renewed their record.
	Seen     time.Time
	Card     *Card               // nil: not published yet
	Channels []pool.EventChannel // of its KV events, ordered by rank
	Loads    []pool.EventChannel // of the loads of all workers at its path, ordered by publisher
	unheard  []pool.EventChannel // of its KV events, without a channel: over brokers, if there are any
}

// Card holds the fields of a model deployment card that routing needs. Zero fields are absent from the card.
type Card struct {
	Model                 string // display_name
	BlockSize             int    // kv_cache_block_size, tokens
	TotalKVBlocks         int
	MaxNumBatchedTokens   int
	DataParallelStartRank uint32
	DataParallelSize      uint32
	EAGLE                 bool
	Role                  pool.Role
	Taints                []string
	Transfer              pool.Transfer
	Files                 ModelFiles
	RuntimeConfig         json.RawMessage // runtime_config, for settings that affect the frontend's prompts
}

// parseInstance decodes the record of v1/instances into Path, InstanceID and DeviceType.
func parseInstance(record []byte) (Instance, error) {
	var r struct {
		Namespace  string  `json:"namespace"`
		Component  string  `json:"component"`
		Endpoint   string  `json:"endpoint"`
		InstanceID *uint64 `json:"instance_id"`
		DeviceType string  `json:"device_type"`
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return Instance{}, err
	}
	if r.Namespace == "" || r.Component == "" || r.Endpoint == "" || r.InstanceID == nil {
		return Instance{}, fmt.Errorf("namespace, component, endpoint or instance_id is missing")
	}
	return Instance{
		Path:       r.Namespace + "/" + r.Component + "/" + r.Endpoint,
		InstanceID: *r.InstanceID,
		DeviceType: r.DeviceType,
	}, nil
}

// parseCard decodes the record of v1/mdc.
func parseCard(record []byte) (path string, id uint64, card *Card, err error) {
	var r struct {
		Namespace   string          `json:"namespace"`
		Component   string          `json:"component"`
		Endpoint    string          `json:"endpoint"`
		InstanceID  *uint64         `json:"instance_id"`
		ModelSuffix *string         `json:"model_suffix"`
		Card        json.RawMessage `json:"card_json"`
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return "", 0, nil, err
	}
	if r.InstanceID == nil || len(r.Card) == 0 {
		return "", 0, nil, fmt.Errorf("instance_id or card_json is missing")
	}
	path = r.Namespace + "/" + r.Component + "/" + r.Endpoint
	if r.ModelSuffix != nil && *r.ModelSuffix != "" {
		return path, *r.InstanceID, nil, nil // an adapter's card repeats the base model's runtime
	}
	var c struct {
		DisplayName string          `json:"display_name"`
		BlockSize   int             `json:"kv_cache_block_size"`
		WorkerType  pool.Role       `json:"worker_type"`
		ModelType   json.RawMessage `json:"model_type"`

		Tokenizer       json.RawMessage `json:"tokenizer"`
		PromptFormatter json.RawMessage `json:"prompt_formatter"`
		ChatTemplate    json.RawMessage `json:"chat_template_file"`

		Runtime json.RawMessage `json:"runtime_config"`
	}
	var runtime struct {
		TotalKVBlocks         int      `json:"total_kv_blocks"`
		MaxNumBatchedTokens   int      `json:"max_num_batched_tokens"`
		DataParallelStartRank uint32   `json:"data_parallel_start_rank"`
		DataParallelSize      uint32   `json:"data_parallel_size"`
		EnableEAGLE           bool     `json:"enable_eagle"`
		Taints                []string `json:"taints"`
		transfer
	}
	if err := json.Unmarshal(r.Card, &c); err != nil {
		return "", 0, nil, fmt.Errorf("card_json: %w", err)
	}
	if len(c.Runtime) > 0 {
		if err := json.Unmarshal(c.Runtime, &runtime); err != nil {
			return "", 0, nil, fmt.Errorf("card_json: runtime_config: %w", err)
		}
	}
	if c.WorkerType == "" && strings.Contains(string(c.ModelType), "Prefill") {
		c.WorkerType = pool.Prefill // earlier versions of Dynamo have no worker_type
	}
	var preferred pool.Transfer
	if c.WorkerType == pool.Prefill {
		if preferred, err = runtime.transfer.parse(); err != nil {
			return "", 0, nil, fmt.Errorf("card_json: runtime_config: %w", err)
		}
	}
	switch {
	case c.BlockSize < 0 || c.BlockSize > kvblock.MaxBlockSize:
		return "", 0, nil, fmt.Errorf("card_json: kv_cache_block_size %d is not a number of tokens up to %d",
			c.BlockSize, kvblock.MaxBlockSize)
	case runtime.DataParallelSize > pool.MaxRanks:
		return "", 0, nil, fmt.Errorf(
			"card_json: runtime_config: data_parallel_size %d: kvepp supports at most %d ranks",
			runtime.DataParallelSize, pool.MaxRanks)
	}
	return path, *r.InstanceID, &Card{
		Model: c.DisplayName, BlockSize: c.BlockSize, Role: c.WorkerType,
		TotalKVBlocks: runtime.TotalKVBlocks, MaxNumBatchedTokens: runtime.MaxNumBatchedTokens,
		DataParallelStartRank: runtime.DataParallelStartRank, DataParallelSize: runtime.DataParallelSize,
		EAGLE: runtime.EnableEAGLE, Taints: runtime.Taints, Transfer: preferred,
		RuntimeConfig: c.Runtime,
		Files:         ModelFiles{checksum(c.Tokenizer), checksum(c.PromptFormatter), checksum(c.ChatTemplate)},
	}, nil
}

// transfer holds the fields of a card's runtime_config about transfers of KV blocks. Source: dynamo-llm 1.6.1,
// local_model and discovery.
type transfer struct {
	Domains     map[string]string `json:"topology_domains"`
	Domain      string            `json:"kv_transfer_domain"`
	Enforcement string            `json:"kv_transfer_enforcement"`
	Weight      *float32          `json:"kv_transfer_preferred_weight"`
}

func (t *transfer) parse() (pool.Transfer, error) {
	value, found := t.Domains[t.Domain]
	preferred := pool.Transfer{Taint: "dynamo.topology/" + t.Domain + "=" + value}
	switch {
	case t.Domain == "":
		return pool.Transfer{}, nil
	case !found:
		return preferred, fmt.Errorf("kv_transfer_domain %q is not among topology_domains", t.Domain)
	case t.Enforcement == "required":
		preferred.Required = true
		return preferred, nil
	case t.Enforcement == "preferred" && t.Weight != nil:
		preferred.Weight = *t.Weight
		return preferred, nil
	}
	return preferred, fmt.Errorf(
		"kv_transfer_domain needs kv_transfer_enforcement required, or preferred with kv_transfer_preferred_weight")
}

// source is a publisher of KV events.
type source struct {
	publisher uint64 // 0: of another topic
	worker    key
	rank      uint32
	query     string // pool.EventChannel.Query
}

// parseSource decodes the record of v1/event_sources, which maps a publisher of KV events to a worker's rank.
func parseSource(record []byte) (source, error) {
	var r struct {
		Topic       string  `json:"topic"`
		PublisherID *uint64 `json:"publisher_id"`
		Scope       scope   `json:"scope"`
		Metadata    struct {
			Worker struct {
				WorkerID *uint64 `json:"worker_id"`
				Rank     uint32  `json:"dp_rank"`
			} `json:"worker"`
			Recovery struct {
				Transport struct {
					TCP string `json:"tcp"`
				} `json:"transport"`
				Codec string `json:"request_plane_codec"`
			} `json:"recovery_target"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return source{}, err
	}
	if r.Topic != kvTopic {
		return source{}, nil
	}
	if r.PublisherID == nil || r.Metadata.Worker.WorkerID == nil {
		return source{}, fmt.Errorf("publisher_id or metadata.worker.worker_id is missing")
	}
	s := source{publisher: *r.PublisherID, worker: key{r.Scope.path(), *r.Metadata.Worker.WorkerID},
		rank: r.Metadata.Worker.Rank}
	if r.Metadata.Recovery.Codec == "msgpack" { // Dynamo before 1.6 has others
		s.query = r.Metadata.Recovery.Transport.TCP
	}
	return s, nil
}

// join adds the channel of the source's events, one of those of publishers, to heard. A source without one is added to
// unheard.
func (s *source) join(publishers map[uint64]pool.EventChannel, heard, unheard map[key][]pool.EventChannel) {
	c, found := publishers[s.publisher]
	switch c.Publisher, c.Rank, c.Query = s.publisher, s.rank, s.query; {
	case s.publisher == 0: // of another topic
	case found:
		heard[s.worker] = append(heard[s.worker], c)
	default:
		unheard[s.worker] = append(unheard[s.worker], c)
	}
}

// OverBrokers returns the instance with what it publishes over ZMQ brokers, if it has sources without a channel: their
// events, loads, and notes of first tokens. brokers are from JoinBrokers; empty: there are none.
//
// Source: dynamo-runtime 1.6.1, transports::event_plane.
func (in Instance) OverBrokers(brokers string) Instance {
	if brokers == "" || len(in.unheard) == 0 {
		return in
	}
	of := strings.SplitN(in.Path, "/", 3)
	subject := fmt.Sprintf("namespace.%s.component.%s.endpoint.%s.", of[0], of[1], of[2])
	in.Channels = slices.Clone(in.Channels)
	for _, c := range in.unheard {
		c.Brokers, c.Subject = brokers, subject+kvTopic
		in.Channels = append(in.Channels, c)
	}
	in.Loads = append(slices.Clone(in.Loads), pool.EventChannel{Brokers: brokers, Subject: subject + loadTopic},
		pool.EventChannel{Brokers: brokers, Subject: subject + firstTopic, FirstTokens: true})
	sortChannels(in.Channels)
	sortChannels(in.Loads)
	return in
}

// brokersVariable is Dynamo's variable that names ZMQ brokers, as "xsub=ADDRESS;ADDRESS , xpub=ADDRESS;ADDRESS".
const brokersVariable = "DYN_ZMQ_BROKER_URL"

// Brokers returns the addresses at which the brokers of DYN_ZMQ_BROKER_URL pass messages on, separated by semicolons;
// empty without the variable.
func Brokers() (string, error) {
	text := os.Getenv(brokersVariable)
	if text == "" {
		return "", nil
	}
	for part := range strings.SplitSeq(text, ",") {
		list, found := strings.CutPrefix(strings.TrimSpace(part), "xpub=")
		if !found {
			continue
		}
		for address := range strings.SplitSeq(list, ";") {
			host, tcp := strings.CutPrefix(address, "tcp://")
			if err := pool.CheckHostPort(host); err != nil || !tcp {
				return "", fmt.Errorf("%s: %q is not tcp://HOST:PORT", brokersVariable, address)
			}
		}
		return list, nil
	}
	return "", fmt.Errorf("%s %q: must look like xsub=tcp://HOST:PORT , xpub=tcp://HOST:PORT", brokersVariable, text)
}

// JoinBrokers returns those of the variable, else those of discovery, sorted and each once.
func JoinBrokers(discovered []string) string {
	if named, err := Brokers(); err == nil && named != "" { // the start refuses a wrong value
		return named
	}
	all := strings.FieldsFunc(strings.Join(discovered, ";"), func(r rune) bool { return r == ';' })
	slices.Sort(all)
	return strings.Join(slices.Compact(all), ";")
}

// parseChannel decodes the record of v1/event_channels, the channel of a publisher. path is the workers' path for a
// channel of loads, else empty. c has only Brokers if the record is a broker's, and is zero for other topics. Loads
// over NATS have a subject but no publisher: all workers of a path share the subject, and each message names its
// worker.
func parseChannel(record []byte) (c pool.EventChannel, path string, err error) {
	var r struct {
		Topic      string  `json:"topic"`
		Scope      scope   `json:"scope"`
		InstanceID *uint64 `json:"instance_id"` // the publisher's
		Transport  struct {
			Kind   string `json:"kind"`
			Config struct {
				Endpoint      string `json:"endpoint"`
				SubjectPrefix string `json:"subject_prefix"`

				Brokers []string `json:"xpub_endpoints"`
			} `json:"config"`
		} `json:"transport"`
	}
	if err := json.Unmarshal(record, &r); err != nil {
		return c, "", err
	}
	if r.Transport.Kind == "ZmqBroker" && len(r.Transport.Config.Brokers) > 0 {
		return pool.EventChannel{Brokers: strings.Join(r.Transport.Config.Brokers, ";")}, "", nil
	}
	firsts := r.Topic == firstTopic
	load := r.Topic == loadTopic || firsts
	if r.Topic != kvTopic && !load {
		return c, "", nil
	}
	if r.InstanceID == nil {
		return c, "", fmt.Errorf("instance_id is missing")
	}
	t := &r.Transport
	switch {
	case t.Kind == "Zmq" && t.Config.Endpoint != "":
		c = pool.EventChannel{Publisher: *r.InstanceID, ZMQ: t.Config.Endpoint, FirstTokens: firsts}
		if load {
			path = r.Scope.path()
		}
		return c, path, nil
	case load && t.Kind == "Nats" && t.Config.SubjectPrefix != "":
		c = pool.EventChannel{Subject: t.Config.SubjectPrefix + "." + r.Topic, FirstTokens: firsts}
		return c, r.Scope.path(), nil
	case load: // another transport; kvepp can route without loads
		return c, "", nil
	case t.Kind == "Nats" && t.Config.SubjectPrefix != "":
		return pool.EventChannel{Publisher: *r.InstanceID, Subject: t.Config.SubjectPrefix + "." + kvTopic}, "", nil
	}
	return c, "", fmt.Errorf(
		"KV events over %q with %+v: kvepp supports the worker's own ZMQ socket, brokers and NATS; set kvEvents of "+
			"the endpoint", t.Kind, t.Config)
}

// kvTopic is the event plane's topic of KV events.
const kvTopic = "kv-events"

// loadTopic and firstTopic are the event plane's topics of workers' loads, and of their notes of first tokens.
const (
	loadTopic  = "kv_metrics"
	firstTopic = "active_sequences_events"
)

// scope names the endpoint of a record of the event plane.
type scope struct {
	Endpoint struct {
		Namespace string `json:"namespace"`
		Component string `json:"component"`
		Name      string `json:"name"`
	} `json:"endpoint"`
}

func (s *scope) path() string {
	return s.Endpoint.Namespace + "/" + s.Endpoint.Component + "/" + s.Endpoint.Name
}

// Join completes the entries of the endpoints file from discovery.
//
//   - An entry that names an instance is completed by that instance's card while it has one.
//   - An entry with a path becomes an endpoint while an instance with a card is alive there. Values in the file take
//     precedence over the card. If there are several instances, the one seen last counts: after a crash the old one
//     stays until its lease ends, and the file has one event socket for both.
//   - With AllInstances each instance becomes an endpoint, named NAME:ID with the id in hexadecimal digits.
func Join(entries []pool.Entry, instances []Instance) []pool.Endpoint {
	newest := make(map[string]*Instance)
	channels := make(map[uint64][]pool.EventChannel)
	loads := make(map[uint64][]pool.EventChannel)
	namespaces := make(map[uint64]string)
	byID := make(map[uint64]*Instance) // those with a card
	for i := range instances {
		in := &instances[i]
		if in.Card != nil {
			byID[in.InstanceID] = in
		}
		if len(in.Channels) > 0 {
			channels[in.InstanceID] = in.Channels
		}
		if len(in.Loads) > 0 {
			loads[in.InstanceID] = in.Loads
		}
		namespaces[in.InstanceID], _, _ = strings.Cut(in.Path, "/")
		if was := newest[in.Path]; in.Card != nil && (was == nil || in.Seen.After(was.Seen)) {
			newest[in.Path] = in
		}
	}
	endpoints := make([]pool.Endpoint, 0, len(entries))
	add := func(e pool.Endpoint) {
		e.Namespace, e.EventChannels, e.LoadChannels = namespaces[e.InstanceID], channels[e.InstanceID],
			loads[e.InstanceID]
		endpoints = append(endpoints, e)
	}
	for _, e := range entries {
		if e.AllInstances {
			for i := range instances {
				if in := &instances[i]; in.Path == e.Dynamo && in.Card != nil {
					one := Complete(e.Endpoint, in)
					one.Name = fmt.Sprintf("%s:%x", e.Name, in.InstanceID)
					add(one)
				}
			}
			continue
		}
		in := byID[e.InstanceID]
		if e.Dynamo != "" {
			if in = newest[e.Dynamo]; in == nil {
				continue
			}
		}
		if in != nil {
			e.Endpoint = Complete(e.Endpoint, in)
		}
		add(e.Endpoint)
	}
	return endpoints
}

// Complete returns the endpoint with the values of its instance. Values of the card fill in those that the endpoint
// lacks.
func Complete(e pool.Endpoint, in *Instance) pool.Endpoint {
	c := in.Card
	e.InstanceID = in.InstanceID
	if c == nil {
		c = &Card{}
	}
	if e.BlockSize == 0 {
		e.BlockSize = c.BlockSize
	}
	if e.TotalKVBlocks == 0 {
		e.TotalKVBlocks = c.TotalKVBlocks
	}
	if e.MaxNumBatchedTokens == 0 {
		e.MaxNumBatchedTokens = c.MaxNumBatchedTokens
	}
	if e.DataParallelSize <= 1 && e.DataParallelStartRank == 0 {
		e.DataParallelStartRank, e.DataParallelSize = c.DataParallelStartRank, c.DataParallelSize
	}
	if e.Model == "" {
		e.Model = c.Model
	}
	if e.Role == pool.Aggregated && (c.Role == pool.Prefill || c.Role == pool.Decode || c.Role == pool.Encode) {
		e.Role = c.Role
	}
	if e.DeviceType == "" {
		e.DeviceType = in.DeviceType
	}
	e.Transfer = c.Transfer
	if len(e.Taints) == 0 {
		e.Taints = c.Taints
	}
	e.EAGLE = e.EAGLE || c.EAGLE
	return e
}
