//go:build race

package zmqsub

// raceFactor is how many times the memory of an ordinary build a test may take in this one.
const raceFactor = 4
