package indexer

// Memory comes from the kernel 4 KiB at a time, or a big page at a time where a program asks for it. Then the processor
// knows by heart where most of a large index is; otherwise it has to look that up in memory, too, for nearly every
// block that is looked for. And the kernel is asked once where it would be 512 times, which is much of what it takes to
// fill a small index.
const (
	bigPage = 2 << 20  // bytes
	minBack = 32 << 10 // bytes of which it is worth while to ask for anything
)
