// Package listen has the ports of a running kvepp: which connections they take, and what each client can use of them.
//
// Concurrency: everything is safe for concurrent use.
package listen
