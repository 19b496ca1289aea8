// Package indexer holds which worker has which KV blocks, and counts the leading blocks of a prompt that each worker
// has.
//
// It owns the workers' engine hashes, the blocks that they name in each tier of memory, and the lookup. It never hashes
// tokens, never reads events from the wire, and never guesses: the count for a worker is exactly the number of leading
// blocks that the events applied so far say it holds. At its memory bound it evicts blocks; counts are then lower
// bounds ([Index.AtBound]).
//
// # The radix tree
//
// Each tier is a path-compressed radix tree over block hashes. A node is a run: up to 61 consecutive blocks of a
// prompt. Prompts that share a beginning share its runs.
//
//	         run A (61 blocks)            run B                 run C
//	root --> [b0 b1 b2 ... b60] --------> [b61 b62 b63] -----+-> [c64 c65]      workers 1, 2
//	         workers 1, 2, 7              workers 1, 2, 7    |   run D
//	                                                         +-> [d64 d65 d66]  worker 7
//
// A sequence hash names a block together with all blocks before it, so an edge needs no pointer: the table starts
// (seqtable.go) finds the run that begins with a given sequence hash. A run also caches its follower, the only run
// known to continue it. rootFilter and startFilter are small counting filters that answer most misses without the
// table.
//
// Runs are cut where prompts part, where holders differ, and where a block in the middle is removed (run.go).
//
// # Memory layout
//
// Runs and holders' records lie in an arena (arena.go): pages of 64-bit words without pointers, so the garbage
// collector scans only the list of pages. A run is one record:
//
//	word 0     version (32 bits) | depth (26 bits) | number of blocks (6 bits)
//	word 1     the only holder, or the address of a holders' record; and the follower's address
//	word 2     the only holder's mask: a bit for each block that it holds
//	word 3..   one sequence hash for each block
//
// Beside the record, in tiers with engine hashes, lies what only writers read: a runHead beside words 0 to 2, and each
// block's engine hash and local hash beside its sequence hash. A holders' record (holders.go) has a bitset of workers
// that hold the whole run, groups of workers that hold a prefix of it, and a list of (worker, mask) pairs for the rest.
//
// # Concurrency: a seqlock for each run
//
// All methods of Index may be called concurrently. The caller applies one worker's events in the order in which the
// worker sent them, so from one goroutine at a time.
//
// Writers of a tier take turns on tier.mu. Lookups take no lock. The version in word 0 is a seqlock:
//
//	writer                                  lookup
//	beginWrite: version becomes odd         read the version; if it is odd, retry
//	write words 1.. and the holders         read the hashes and the holders
//	endWrite:   version becomes even        read word 0 again; if it changed, retry
//
// After maxRetries failed reads a lookup takes tier.mu. Memory of a released record stays mapped, so a lookup that
// holds an old address reads other words, never invalid memory, and the version shows that. Lock order: Index.evicting,
// worker.mu, tier.mu; predictions.mu, then its tier.mu. No two tiers are locked at once.
//
// # Engine hashes and aliases
//
// Events name blocks by engine hashes, which have a meaning for one worker only. Most engines derive them from the
// contents, so workers agree. Each block therefore has one own name, the engine hash of its first store, which
// nameTable (nametable.go) finds. A worker that uses another engine hash for the block has an alias (aliases.go); its
// aliasCounts say how many aliases a block has.
//
// # Operations
//
//   - Store: find the parent by its engine hash, walk down existing runs and add the worker as a holder, then append
//     the rest to the last run or to a new one.
//   - Store without a known parent: the store becomes an orphan of that worker (orphans.go). It is applied when the
//     parent is stored. A worker has at most 1,024 orphans with 16,384 blocks; the oldest are dropped first.
//   - Remove: take the engine hash from the worker. Without another name for the block, the worker is no holder any
//     more. A block without holders leaves its run; the run is truncated or split.
//   - Clear and Forget: scan all runs and remove the worker from the holders. Forget also frees its number.
//   - Evict: at Config.MaxBytes the worker that takes most memory loses the deepest quarter of its blocks, and its
//     orphans (evict.go). Depth is the number of blocks before a block, so leaves go first.
//   - Predict: blocks that a worker was sent count as held for a time. They lie in a tier of their own (predict.go).
//
// Tiers below the device (lower.go) count where they continue what the tiers above them hold. Prompts are entered there
// in the middle, so these tiers keep every block in a hash table (tier.bySeq).
//
// Workers of hybrid models also have tiers for the other layers' blocks, one for each class (classes.go). A lookup asks
// them last, for 64 workers at once (classsweep.go), and asks a filter before the hash table (lookupfilter.go).
//
// # Structural checks
//
// tier.check (check_test.go) compares the runs, tables, filters and counts of a tier with each other, in tests. With
// the build tag invariants, a tier is also checked when a writer unlocks it after Apply, Clear, Forget, Evict or
// Predict, and a difference panics. A tier of up to 64 blocks is checked after every change, a larger one after every
// (blocks / 64) changes:
//
//	go test -tags invariants ./indexer
package indexer
