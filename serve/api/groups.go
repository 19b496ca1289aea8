package api

import "strconv"

// Limits that the registries of the indexer and the selector share.
const (
	// MaxGroups bounds the pairs of model and routing group.
	MaxGroups = 1 << 12

	// MaxRanks bounds the registered data-parallel ranks of all workers.
	MaxRanks = 1 << 16

	// MaxWorkerBytes bounds the estimated memory of all registered workers, in bytes.
	MaxWorkerBytes = 256 << 20

	// RecordBytes is the estimated memory of one worker without its texts, in bytes.
	RecordBytes = 512
)

// DefaultGroup is the routing group of requests that name none.
const DefaultGroup = "default"

// ModelGroup is a model and a routing group. Requests name the workers that they are about by it.
type ModelGroup struct{ Model, Group string }

// String returns the name of the pair in a dump.
func (g ModelGroup) String() string { return g.Model + ":" + g.Group }

// Describe returns the pair as errors name it. Source: what dynamo.select_service answers.
func (g ModelGroup) Describe() string { return "model=" + g.Model + " routing_group=" + g.Group }

// PoolModel encodes the pair for pool.Endpoint.Model, which has one field for both.
func (g ModelGroup) PoolModel() string { return strconv.Quote(g.Model) + g.Group }

// ParsePoolModel is the inverse of PoolModel. It returns the zero value for any other text.
func ParsePoolModel(model string) ModelGroup {
	quoted, err := strconv.QuotedPrefix(model)
	if err != nil {
		return ModelGroup{}
	}
	name, _ := strconv.Unquote(quoted)
	return ModelGroup{name, model[len(quoted):]}
}
