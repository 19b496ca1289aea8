package kvblock

// Tier is where in the memory hierarchy a worker keeps a block.
type Tier uint8

// The tiers, fastest first. Source: dynamo-kv-router 1.6.1, protocols (StorageTier).
const (
	TierDevice     Tier = iota // GPU memory, which attention reads; the default of events without a medium
	TierHostPinned             // CPU memory
	TierDisk                   // local disk
	TierExternal               // shared or remote storage
)

// String returns Dynamo's name of the tier: device, host_pinned, disk or external.
func (t Tier) String() string {
	switch t {
	case TierDevice:
		return "device"
	case TierHostPinned:
		return "host_pinned"
	case TierDisk:
		return "disk"
	case TierExternal:
		return "external"
	case ClassTier(0), ClassTier(1), ClassTier(2):
		return "device_class_" + string('0'+rune(t-ClassTier(0)))
	}
	return "unknown"
}

// Stored says that a worker now holds Blocks. Each block follows the one before it in the prompt.
type Stored struct {
	HasParent bool       // whether Blocks[0] follows Parent; if not, it is the first block of a prompt
	Parent    EngineHash // meaningless without HasParent
	Blocks    []StoredBlock
	Tier      Tier
}

// StoredBlock is one block of a Stored.
type StoredBlock struct {
	Engine EngineHash // the engine's name of the block
	Local  LocalHash  // kvepp's hash of its content
}

// Removed says that a worker no longer holds these blocks in that tier. It may still hold their successors.
type Removed struct {
	Hashes []EngineHash
	Tier   Tier
}
