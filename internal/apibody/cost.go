package apibody

import "kvepp/chattemplate"

// ErrTooManyValues says that the values of a body take more memory than they may for its bytes.
var ErrTooManyValues = chattemplate.ErrTooManyValues

// The memory that a request may take beside its body while it is read: the values of its JSON, the prompt's text and its token ids.
const (
	readCostPerByte = 8
	readCostBase    = 256 << 10 // bytes: bodies are small as a rule, and then the values of all of one may be

	// MaxPrompts is how many prompts a completion may have. One with more is routed by load.
	MaxPrompts = 2048
)

// ReadCost returns the most memory in bytes that reading a body of bodyBytes may take beside the body itself: parsing it, rendering
// its chat template, and tokenizing the prompt.
func ReadCost(bodyBytes int) int { return readCostBase + readCostPerByte*bodyBytes }

// valueCost is the most of ReadCost that the values of a body may take.
func valueCost(bodyBytes int) int { return ReadCost(bodyBytes) - 3*bodyBytes }

// routingCost is the most of it that values take that say where a request goes, if there are too many others.
func routingCost(bodyBytes int) int { return 64<<10 + 2*bodyBytes }
