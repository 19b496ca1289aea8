package apibody

// The memory that a request may take beside its body while it is read: the values of its JSON, the prompt's text and its token ids.
const (
	readCostPerByte = 7
	readCostBase    = 64 << 10 // bytes
)

// ReadCost returns the most memory in bytes that reading a body of bodyBytes may take beside the body itself: parsing it, rendering
// its chat template, and tokenizing the prompt.
func ReadCost(bodyBytes int) int { return readCostBase + readCostPerByte*bodyBytes }
