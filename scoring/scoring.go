// Package scoring decides which worker a request goes to, from numbers: how much of the prompt each worker has cached,
// and the load of each worker.
//
// It owns Dynamo's cost function ([Config.Cost]), the choice among costs, the modes without a cost ([Mode]),
// and the load book ([ActiveSequences]). The book prices, chooses and books in one atomic step, so that a burst does
// not pile onto one worker. The package does no I/O and sees no text of a prompt: its input is token counts, block
// counts and block hashes. Only the book reads a clock.
//
// Concurrency: ActiveSequences is safe for concurrent use; everything else is pure. It starts no goroutine.
package scoring
