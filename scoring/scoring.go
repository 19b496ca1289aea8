// Package scoring says which worker a request should go to, given numbers: how much of the prompt each worker has
// cached and how much each is already doing.
//
// It owns Dynamo's cost function ([Config.Cost]), the choice among costs ([Choose]), the ways to choose that need no
// cost ([Mode]) and the load book ([ActiveSequences]), which prices, chooses and books in one atomic step so that a
// burst does not pile onto one worker. It never does I/O, and never looks at a prompt's text: it is handed token
// counts, block counts and block hashes. Only the book reads a clock.
//
// Concurrency: ActiveSequences is safe for concurrent use; everything else is pure. It starts no goroutine.
package scoring
