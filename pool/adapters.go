package pool

// Adapters is what an engine says of LoRA adapters, by their names. The zero value: nothing.
type Adapters struct {
	Listed map[string]string // adapters that it can serve now -> their base models; "": not known
	Active []string          // those of its waiting and running requests
	// Most is how many adapters its running requests may have at once; 0: not known.
	Most int
}

// MaxAdapters bounds the adapters that are kept of one worker, MaxAdapterName the length of a name in bytes.
const (
	MaxAdapters    = 1024
	MaxAdapterName = 256
)
