package indexer

// bigPage is the size of a big page, in bytes. Memory comes from the kernel 4 KiB at a time, or this much at a time where a
// program asks for it. Then an index that grows waits for the kernel hundreds of times less often, and the processor knows
// by heart where most of the index is; otherwise it has to look that up in memory, too, for nearly every block that is looked
// for.
const bigPage = 2 << 20
