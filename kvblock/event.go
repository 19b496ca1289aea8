package kvblock

// Tier is where in the memory hierarchy a worker keeps a block.
type Tier uint8

// The tiers, fastest first. Source: dynamo-kv-router 1.6.1, protocols (StorageTier).
const (
	TierDevice     Tier = iota // GPU memory, where attention reads it; events that name no medium mean this
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
	}
	return "unknown"
}

// Stored says that a worker now holds Blocks, each the successor of the one before it in its prompt.
type Stored struct {
	HasParent bool       // whether Blocks[0] follows a block stored earlier; if not, it is a prompt's first
	Parent    EngineHash // that block; meaningless without HasParent
	Blocks    []StoredBlock
	Tier      Tier
}

// StoredBlock is one block of a Stored: the engine's name for it, and ours.
type StoredBlock struct {
	Engine EngineHash
	Local  LocalHash
}

// Removed says that a worker no longer holds these blocks in that tier. Their successors may well still be held.
type Removed struct {
	Hashes []EngineHash
	Tier   Tier
}
