package indexer

// Memory comes from the kernel 4 KiB at a time, or a big page at a time where a program asks for it. Then the processor knows by
// heart where most of a large index is; otherwise it has to look that up in memory, too, for nearly every block that is looked
// for. Of small pages it knows some thousand by heart, so that a small tier does not need big ones; and these may be slow to
// come, where a hypervisor has none ready.
const (
	bigPage = 2 << 20  // bytes
	bigTier = 16 << 20 // bytes of a tier from which on it asks for big pages
)
