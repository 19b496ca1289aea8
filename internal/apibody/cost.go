package apibody

import "kvepp/chattemplate"

// ErrTooManyValues says that the values of a body take more memory than they may for its bytes.
var ErrTooManyValues = chattemplate.ErrTooManyValues

// The memory that a request may take beside its body while it is read, in bytes.
const (
	// readCostBase is what any body may take beside what its bytes allow, but a small one no more than readCostSmall
	// and readCostGrowth for each of its bytes: small bodies may be all values.
	readCostBase   = 1 << 20
	readCostSmall  = 64 << 10
	readCostGrowth = 16

	// ReadCostPerByte is what a byte of a body may take beside that: the values of its JSON, what an engine makes of
	// them, the prompt's text and its token ids. valueCostPerByte is how much of that the values may take.
	ReadCostPerByte  = 8
	valueCostPerByte = 5

	// MaxPrompts is how many prompts a completion may have. One with more is routed by load.
	MaxPrompts = 2048
)

// ReadCost returns the most memory in bytes that reading a body of bodyBytes may take beside the body itself: parsing
// it, rendering its chat template, and tokenizing the prompt.
func ReadCost(bodyBytes int) int { return baseCost(bodyBytes) + ReadCostPerByte*bodyBytes }

func baseCost(bodyBytes int) int { return min(readCostBase, readCostSmall+readCostGrowth*bodyBytes) }

// valueCost is the most of ReadCost that the values of a body may take.
func valueCost(bodyBytes int) int { return baseCost(bodyBytes) + valueCostPerByte*bodyBytes }

// routingCost is the most of it that values take that say where a request goes, if there are too many others.
func routingCost(bodyBytes int) int { return 64<<10 + 2*bodyBytes }
