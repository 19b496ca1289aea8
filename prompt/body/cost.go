package body

import "kvepp/prompt/values"

// ErrTooManyValues says that the values of a body take more memory than is allowed for its size.
var ErrTooManyValues = values.ErrTooManyValues

// Limits of the memory that reading a request may take in addition to its body, in bytes.
const (
	// readCostBase is allowed for every body, in addition to ReadCostPerByte. A small body gets only readCostSmall and
	// readCostGrowth for each of its bytes; it may consist of values alone.
	readCostBase   = 1 << 20
	readCostSmall  = 64 << 10
	readCostGrowth = 16

	// ReadCostPerByte is the memory allowed for each byte of a body: the values of its JSON, the chat that an engine
	// derives from them, the prompt's text and its token ids. valueCostPerByte is the part that the values may take.
	ReadCostPerByte  = 8
	valueCostPerByte = 5

	// MaxPrompts is the number of prompts that a completion may have. A request with more is routed by load.
	MaxPrompts = 2048
)

// ReadCost returns the most memory in bytes that reading a body of bodyBytes may take in addition to the body: parsing
// it, rendering its chat template, and tokenizing the prompt.
func ReadCost(bodyBytes int) int { return baseCost(bodyBytes) + ReadCostPerByte*bodyBytes }

func baseCost(bodyBytes int) int { return min(readCostBase, readCostSmall+readCostGrowth*bodyBytes) }

// valueCost is the part of ReadCost that the values of a body may take.
func valueCost(bodyBytes int) int { return baseCost(bodyBytes) + valueCostPerByte*bodyBytes }

// routingCost is the part that the routing fields may take in a body with too many values.
func routingCost(bodyBytes int) int { return 64<<10 + 2*bodyBytes }
